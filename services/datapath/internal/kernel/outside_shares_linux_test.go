// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// fromOutside runs the uplink's program on count packets that build returns, twice on each, because LRU maps
// keep entries that were used. It returns how many were dropped.
func (n *serviceNode) fromOutside(count int, build func(i int) []byte) (dropped int) {
	n.Helper()
	header := [14]byte{12: 8}
	prog := n.k.program(program.FromUplink)
	for i := range count {
		in := append(header[:], build(i)...)
		for range 2 {
			verdict, err := prog.Run(&ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256)})
			must(n.T, "run", err)
			if verdict == verdictShot {
				dropped++
			}
		}
	}
	return dropped
}

// forged returns one of many addresses outside.
func forged(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}) }

// TestKernelTranslationsFromOutsideLeaveThoseOfPods: clients outside use a node port from more ports than the
// translation map holds. A pod's connection to a Service, whose list has changed since, keeps its backend.
func TestKernelTranslationsFromOutsideLeaveThoseOfPods(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	var backends []netip.AddrPort
	for i := range byte(2) {
		s := f.a.newPod(t, 20+i)
		backends = append(backends, netip.AddrPortFrom(s.IPv4, 8080))
		tell(t, s.ns, backends[i])
	}
	vip := serviceAddr(backends[0].Addr(), 1)
	front := n.lead(vip, feAddress, backends[0])
	stream, err := dialIn(t, f.a.pod.ns, "tcp", vip)
	must(t, "connect", err)
	_, err = readLine(stream)
	must(t, "read", err)
	n.backend++
	putBackend(t, n.k, n.backend, backends[1], beActive, 1)
	change := bpf.MapsSlFront{List: putMembers(t, n.k, n.member+1, n.backend), Port: vip.Port()}
	copy(change.Addr[:], vip.Addr().AsSlice())
	putFront(t, n.k, front, change)
	n.member++
	echo := func() error {
		_ = stream.SetDeadline(time.Now().Add(3 * time.Second))
		if _, err := stream.Write([]byte("on\n")); err != nil {
			return err
		}
		got, err := readLine(stream)
		if err == nil && got != "on" {
			return fmt.Errorf("%q", got)
		}
		return err
	}
	must(t, "echo", echo())
	open := netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(open, feNode, backends[0])
	for round := range 2 {
		dropped := n.fromOutside(60_000, func(i int) []byte {
			h := ip4Header{src: forged(i), dst: open.Addr(), proto: protoUDP}
			return h.with(udp(uint16(1000+round), open.Port()))
		})
		if dropped != 0 {
			t.Errorf("%d datagrams to the node port were dropped", dropped)
		}
		if err := echo(); err != nil {
			t.Fatalf("round %d: the connection of a pod has ended: %v", round, err)
		}
	}
}

// TestKernelAnswersFromOutsideLeaveThoseOfPods: a node port answers more clients outside than the map of copies holds.
// A pod's connection to a Service, whose list has changed since, keeps its backend after its translation was evicted,
// because the copy of the translation is in another map.
func TestKernelAnswersFromOutsideLeaveThoseOfPods(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	servers := []*pod{f.a.newPod(t, 20), f.a.newPod(t, 21)}
	var backends []netip.AddrPort
	for i, s := range servers {
		backends = append(backends, netip.AddrPortFrom(s.IPv4, 8080))
		tell(t, s.ns, backends[i])
	}
	vip, open := serviceAddr(backends[0].Addr(), 1), netip.AddrPortFrom(f.a.addr4, 30080)
	front := n.lead(vip, feAddress, backends[0])
	stream, err := dialIn(t, f.a.pod.ns, "tcp", vip)
	must(t, "connect", err)
	_, err = readLine(stream)
	must(t, "read", err)
	n.lead(open, feNode, backends[0])
	n.backend++
	putBackend(t, n.k, n.backend, backends[1], beActive, 1)
	change := bpf.MapsSlFront{List: putMembers(t, n.k, n.member+1, n.backend), Port: vip.Port()}
	copy(change.Addr[:], vip.Addr().AsSlice())
	putFront(t, n.k, front, change)
	n.member++

	server, fromPod := servers[0], n.k.program(program.FromPod)
	inNetns(t, f.a.ns, func() {
		for i := range 17_000 {
			n.fromOutside(1, func(int) []byte {
				return ip4Header{src: forged(i), dst: open.Addr(), proto: protoUDP}.with(udp(1000, open.Port()))
			})
			in := frame(server.HostMAC, server.MAC, etherIPv4,
				ip4Header{src: server.IPv4, dst: forged(i), proto: protoUDP}.with(udp(8080, 1000)))
			_, err := fromPod.Run(&ebpf.RunOptions{
				Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: server.Ifindex},
			})
			must(t, "run", err)
		}
	})
	records := 0
	for _, x := range n.translations() {
		if x.Record {
			records++
		}
	}
	if records < 8192 {
		t.Fatalf("%d records of answers to clients outside, want the map nearly full", records)
	}
	clearMaps(t, n.k, bpf.MapsMapSlPodXl4)
	_ = stream.SetDeadline(time.Now().Add(3 * time.Second))
	_, err = stream.Write([]byte("on\n"))
	must(t, "write", err)
	if got, err := readLine(stream); err != nil || got != "on" {
		t.Errorf("the connection of a pod has ended: %q, %v", got, err)
	}
}

// TestKernelFragmentsFromOutsideLeaveThoseOfPods: clients outside begin more datagrams to a node port than the
// map of fragments holds. The last fragment of a pod's datagram passes.
func TestKernelFragmentsFromOutsideLeaveThoseOfPods(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	server := f.a.newPod(t, 20)
	open := netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(open, feNode, netip.AddrPortFrom(server.IPv4, 8080))
	piece := func(last bool) (passed bool) {
		inNetns(t, f.a.ns, func() { passed = n.piece(f.a.pod, server.IPv4, 1, last) })
		return passed
	}
	if !piece(false) {
		t.Fatal("the first fragment of a datagram did not pass")
	}
	dropped := n.fromOutside(20_000, func(i int) []byte {
		h := ip4Header{src: forged(i), dst: open.Addr(), proto: protoUDP, frag: 0x2000}
		b := h.with(append(udp(1000, open.Port()), make([]byte, 56)...))
		binary.BigEndian.PutUint16(b[4:], uint16(i))
		binary.BigEndian.PutUint16(b[10:], 0)
		binary.BigEndian.PutUint16(b[10:], checksum(b[:20]))
		return b
	})
	if dropped != 0 {
		t.Errorf("%d first fragments from outside were dropped", dropped)
	}
	if !piece(true) {
		t.Error("the last fragment of a pod's datagram was dropped")
	}
}

// TestKernelAffinityFromOutsideLeavesThatOfPods: a pod keeps its backend when more outside clients use a Service than
// the affinity map can hold.
func TestKernelAffinityFromOutsideLeavesThatOfPods(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	var backends []netip.AddrPort
	server := f.a.newPod(t, 20)
	for i := range uint16(16) {
		backends = append(backends, netip.AddrPortFrom(server.IPv4, 8080+i))
	}
	sticky := func(at netip.AddrPort, kind uint8) {
		n.lead(at, kind, backends...)
		for _, number := range []uint32{n.front, n.front + outsideFronts} {
			var front bpf.MapsSlFront
			must(t, "read a front", n.k.Pins.Map(bpf.MapsMapSlFront).Lookup(number, &front))
			front.Timeout, front.Group = 10800, uint16(n.front)
			putFront(t, n.k, number, front)
		}
	}
	vip, open := serviceAddr(backends[0].Addr(), 1), netip.AddrPortFrom(f.a.addr4, 30080)
	sticky(vip, feAddress)
	sticky(open, feNode)
	// the backend of a new connection of the pod, from the translation map
	goes := func(from uint16) (to netip.AddrPort) {
		t.Helper()
		inNetns(t, f.a.ns, func() { n.ask(f.a.pod, vip, from) })
		for _, x := range n.translations() {
			if x.Source == netip.AddrPortFrom(f.a.pod.IPv4, from) {
				to = x.Backend
			}
		}
		if !to.IsValid() {
			t.Fatalf("the datagram from port %d was not translated", from)
		}
		return to
	}
	kept := goes(2000)
	for i := range uint16(20) {
		if got := goes(2001 + i); got != kept {
			t.Fatalf("connection %d went to %v, not to the backend that the pod keeps, %v", i, got, kept)
		}
	}
	n.fromOutside(24_000, func(i int) []byte {
		return ip4Header{src: forged(i), dst: open.Addr(), proto: protoUDP}.with(udp(1000, open.Port()))
	})
	for i := range uint16(20) {
		if got := goes(3000 + i); got != kept {
			t.Fatalf("connection %d after the flood went to %v, not to the backend that the pod keeps, %v", i, got, kept)
		}
	}
}

// TestKernelSocketsOfTheHostHaveAShareOfAffinity: the host uses more Services with affinity than its share
// allows entries, and a pod keeps its backends.
func TestKernelSocketsOfTheHostHaveAShareOfAffinity(t *testing.T) {
	n := newServiceNode(t)
	e := newPod(t, n.k, "sl-pod", 10, endpointmap.DeliverPeer)
	word := uint64(1)
	local, err := n.k.Endpoints.Local()
	must(t, "list the addresses", err)
	const ofHost = 30
	for i := range uint16(ofHost) {
		must(t, "store", n.k.Pins.Map(bpf.MapsMapSlPodAff4).Put(&bpf.MapsSlAffKey4{Group: i + 1}, word))
	}
	a := e.IPv4.As4()
	client := binary.NativeEndian.Uint32(a[:])
	must(t, "store", n.k.Pins.Map(bpf.MapsMapSlPodAff4).Put(&bpf.MapsSlAffKey4{Client: client, Group: 1}, word))
	must(t, "collect", n.k.Bounds.CollectAffinity(local))
	for s, want := range map[endpointmap.ID]int{endpointmap.HostID: ofHost, e.Slot: 1} {
		if got := n.k.Bounds.Held(3, s); got != want {
			t.Errorf("%d backends are counted for slot %d, want %d", got, s, want)
		}
	}
}

// TestKernelPodsKeepTheirBackendsWhenTheirMapsAreNew: an earlier version has the translations and affinity
// entries of pods in the maps of outside clients. A start that creates the pods' maps copies the pods' entries,
// and only those. The next start copies nothing.
func TestKernelPodsKeepTheirBackendsWhenTheirMapsAreNew(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	k := openKernel(t, o)
	e := publish(t, k, a)
	number := func(a netip.Addr) uint32 { b := a.As4(); return binary.NativeEndian.Uint32(b[:]) }
	put := func(k *Kernel, sport uint16) {
		t.Helper()
		v := bpf.MapsSlXl{Port: 8080, Front: 1, Backend: 2, LastS: conntrack.MonotonicSeconds()}
		for _, src := range []netip.Addr{e.IPv4, world4} {
			key := bpf.MapsSlXlKey4{Src: number(src), Dst: number(host4), Sport: sport, Dport: 80, Proto: protoTCP}
			must(t, "store", k.Pins.Map(bpf.MapsMapSlXl4).Put(key, v))
			copyOf := key
			copyOf.Zone = 4
			must(t, "store", k.Pins.Map(bpf.MapsMapSlAnswers4).Put(copyOf, v))
			must(t, "store", k.Pins.Map(bpf.MapsMapSlAff4).Put(bpf.MapsSlAffKey4{Client: number(src), Group: sport}, uint64(2)))
		}
		six := bpf.MapsSlXlKey6{Src: e.IPv6.As16(), Sport: sport, Proto: protoTCP}
		must(t, "store", k.Pins.Map(bpf.MapsMapSlXl6).Put(six, v))
		must(t, "store", k.Pins.Map(bpf.MapsMapSlAff6).Put(bpf.MapsSlAffKey6{Group: sport}, uint64(2)))
	}
	put(k, 1000)
	k.Close()
	for _, name := range []string{
		"sl_pod_xl4", "sl_pod_xl6", "sl_pod_aff4", "sl_pod_aff6", "sl_pod_answers4", "sl_pod_answers6",
	} {
		pins, err := filepath.Glob(filepath.Join(o.Dir, name+"_*"))
		if err != nil || len(pins) != 1 {
			t.Fatalf("pins of %s: %v, %v", name, pins, err)
		}
		must(t, "remove a pin", os.Remove(pins[0]))
	}
	for start, sport := range []uint16{1000, 2000} {
		k = openKernel(t, o)
		for name, want := range map[string]string{
			"sl_pod_xl4": e.IPv4.String(), "sl_pod_aff4": e.IPv4.String(), "sl_pod_xl6": e.IPv6.String(), "sl_pod_aff6": "::",
			"sl_pod_answers4": e.IPv4.String(),
		} {
			got := dump(t, k, name)
			if len(got) != 1 || !strings.Contains(got[0], want) || strings.Contains(got[0], world4.String()) {
				t.Errorf("start %d: %s has %q, want the one entry of %s", start, name, got, want)
			}
		}
		put(k, sport)
		k.Close()
	}
}

// translations lists the entries of the maps.
func (n *serviceNode) translations() (all []translation.Translation) {
	n.Helper()
	must(n.T, "list", n.k.Translations.Each(func(x translation.Translation) error {
		all = append(all, x)
		return nil
	}))
	return all
}
