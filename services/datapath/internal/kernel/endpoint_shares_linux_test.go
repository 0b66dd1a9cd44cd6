// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/event"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/translation"
)

// TestKernelTranslationsOfOnePodLeaveThoseOfOthers: a pod asks itself through a Service from
// 60,000 ports, each twice, so that the map takes its translations for the ones in use. The
// connection of another pod, whose Service has another list by now, stays with its backend.
func TestKernelTranslationsOfOnePodLeaveThoseOfOthers(t *testing.T) {
	n := newServiceNode(t)
	col, err := n.k.Connections.NewCollector(conntrack.CollectorOptions{})
	must(t, "make a collector", err)
	collect(t, col)
	client := newPod(t, n.k, "sl-client", 10, slotmap.DeliverPeer)
	flooder := newPod(t, n.k, "sl-flooder", 11, slotmap.DeliverPeer)
	var backends []netip.AddrPort
	for i := range byte(2) {
		s := newPod(t, n.k, fmt.Sprintf("sl-server%d", i), 20+i, slotmap.DeliverPeer)
		backends = append(backends, netip.AddrPortFrom(s.IPv4, 8080))
		tell(t, s.ns, backends[i])
	}
	vip := serviceAddr(backends[0].Addr(), 1)
	front := n.lead(vip, feAddress, backends[0])
	own := serviceAddr(flooder.IPv4, 2)
	n.lead(own, feAddress, netip.AddrPortFrom(flooder.IPv4, 8080))
	stream, err := dialIn(t, client.ns, "tcp", vip)
	must(t, "connect", err)
	_, err = readLine(stream)
	must(t, "read", err)
	// another list; the connection stays where it is
	n.backend++
	putBackend(t, n.k, n.backend, backends[1], beActive, 1)
	f := bpf.MapsSlFront{List: putMembers(t, n.k, n.member+1, n.backend), Port: vip.Port()}
	copy(f.Addr[:], vip.Addr().AsSlice())
	putFront(t, n.k, front, f)
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
	for round := range 3 {
		before := n.counters(t)
		inNetns(t, flooder.ns, func() {
			var frames [][]byte
			for i := range 60000 {
				proto := []byte{protoTCP, protoUDP}[round&1]
				b := frame(flooder.HostMAC, flooder.MAC, etherIPv4,
					ip4Header{src: flooder.IPv4, dst: own.Addr(), proto: proto}.with(tcp(uint16(2000+i), own.Port(), flagSYN)))
				frames = append(frames, b, b)
			}
			sendRaw(t, "eth0", frames...)
		})
		servicetest.Eventually(t, "the flood", func() bool {
			sum := uint64(0)
			for c, now := range n.counters(t) {
				if c.direction == event.Egress {
					sum += now.Packets - before[c].Packets
				}
			}
			return sum >= 110_000
		})
		collect(t, col)
	}
	still := false
	must(t, "list", n.k.Translations.Each(func(tr translation.Translation) error {
		still = still || tr.Source.Addr() == client.IPv4 && tr.Protocol == protoTCP && tr.Backend == backends[0]
		return nil
	}))
	if !still {
		t.Error("the translation of another pod's connection was pushed out")
	}
	if err := echo(); err != nil {
		t.Errorf("a pod that asks itself through a service has ended the connection of another: %v", err)
	}
}

// hairpins sends one datagram from each of n ports of a pod, from a first one on, to a Service that
// leads back to the pod. It returns how many passed.
func (n *serviceNode) hairpins(pod *pod, vip netip.AddrPort, first, count int) int {
	n.Helper()
	var frames [][]byte
	for i := range count {
		frames = append(frames, frame(pod.HostMAC, pod.MAC, etherIPv4,
			ip4Header{src: pod.IPv4, dst: vip.Addr(), proto: protoUDP}.with(udp(uint16(first+i), vip.Port()))))
	}
	over := cell{event.DropTranslationShare, event.Egress}
	held := func() int { return n.k.Bounds.Held(bound.Translations4, pod.Slot) }
	before, had, passed := n.counters(n.T), held(), 0
	inNetns(n.T, pod.ns, func() { sendRaw(n.T, "eth0", frames...) })
	servicetest.Eventually(n.T, "the datagrams", func() bool {
		passed = (held() - had) / 2
		return passed+int(n.counters(n.T)[over].Packets-before[over].Packets) >= count
	})
	return passed
}

// TestKernelPodsThatComeLaterHaveTheirShareOfTranslations: one pod has all of the half of the map
// that is for pods. Another one finds its guarantee free at once, and the first one gives way.
func TestKernelPodsThatComeLaterHaveTheirShareOfTranslations(t *testing.T) {
	n := newServiceNode(t)
	greedy := newPod(t, n.k, "sl-greedy", 10, slotmap.DeliverPeer)
	late := newPod(t, n.k, "sl-late", 11, slotmap.DeliverPeer)
	vip := func(p *pod, last byte) netip.AddrPort {
		at := serviceAddr(p.IPv4, last)
		n.lead(at, feAddress, netip.AddrPortFrom(p.IPv4, 8080))
		return at
	}
	first, second := vip(greedy, 1), vip(late, 2)
	size := n.k.Bounds.Size(bound.Translations4)
	if passed := n.hairpins(greedy, first, 1000, size); passed != size/2 {
		t.Fatalf("%d hairpins passed, want all translations of pods, two for each: %d", passed, size/2)
	}
	const few = 500
	if passed := n.hairpins(late, second, 1000, few); passed != few {
		t.Errorf("%d of %d passed of the pod that came later", passed, few)
	}
	pass := func() translation.Pass {
		p, err := n.k.Translations.Collect(conntrack.MonotonicSeconds(), n.k.Connections, conntrack.DefaultTimeouts())
		must(t, "collect", err)
		return p
	}
	p := pass()
	if p.Surplus != 2*few {
		t.Errorf("%d translations were removed, want those beyond the half: %d", p.Surplus, 2*few)
	}
	of := func(e *pod) int { return n.k.Bounds.Held(bound.Translations4, e.Slot) }
	if of(greedy) != size-2*few || of(late) != 2*few {
		t.Errorf("the pods have %d and %d translations, want %d and %d", of(greedy), of(late), size-2*few, 2*few)
	}
	if got := n.k.Bounds.Guarantee(bound.Translations4); got != size/4 {
		t.Errorf("each of two pods is guaranteed %d translations, want %d", got, size/4)
	}
	if passed := n.hairpins(greedy, first, 30_000, 100); passed != 0 {
		t.Errorf("%d more passed of the pod that is above its guarantee", passed)
	}
	rest := size/8 - few
	if passed := n.hairpins(late, second, 30_000, rest+100); passed != rest {
		t.Errorf("%d more passed of the other one, want up to its guarantee: %d", passed, rest)
	}
}

// TestKernelSharesOutliveTheirCollector: while no collector passes, a pod that was refused has
// another eighth of its guarantee every ten seconds.
func TestKernelSharesOutliveTheirCollector(t *testing.T) {
	n := newServiceNode(t)
	p := newPod(t, n.k, "sl-alone", 10, slotmap.DeliverPeer)
	vip := serviceAddr(p.IPv4, 1)
	n.lead(vip, feAddress, netip.AddrPortFrom(p.IPv4, 8080))
	const guarantee = 160
	b := bpf.MapsSlBound{Guarantee: guarantee}
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), b)
	if passed := n.hairpins(p, vip, 1000, 200); passed != guarantee/2 {
		t.Fatalf("%d passed, want %d", passed, guarantee/2)
	}
	if !n.k.Translations.Pressed() {
		t.Error("a pod was refused, and no pass is wanted")
	}
	for _, waits := range []uint32{1, 2} {
		b.RefusedS = conntrack.MonotonicSeconds() - 10*waits - 5 // the time passes
		update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), b)
		if passed := n.hairpins(p, vip, 1000+1000*int(waits), 200); passed != guarantee/8/2 {
			t.Errorf("%d passed after %d waits, want an eighth, %d", passed, waits, guarantee/8/2)
		}
	}
}

// TestKernelSharesOfASlotBeginAnew: an endpoint has nothing of what the last one of its slot had.
func TestKernelSharesOfASlotBeginAnew(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	var held bpf.MapsSlHeld
	held.N[bound.Translations4] = 1000
	for s := range uint32(slotmap.MaxEndpoints) {
		update(t, k, bpf.MapsMapSlHeld, s+1, held)
	}
	e := publish(t, k, a)
	if got := k.Bounds.Held(bound.Translations4, e.Slot); got != 0 {
		t.Errorf("the new endpoint of slot %d has %d translations", e.Slot, got)
	}
}

// answers runs the program of a pod's device on a datagram of the pod to an address, and reports
// whether the sender was answered.
func (n *serviceNode) answers(p *pod, to netip.AddrPort) bool {
	n.Helper()
	in := frame(p.HostMAC, p.MAC, etherIPv4,
		ip4Header{src: p.IPv4, dst: to.Addr(), proto: protoUDP}.with(udp(40000, to.Port())))
	verdict, err := n.k.program(program.FromPod).Run(&ebpf.RunOptions{
		Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: p.Ifindex},
	})
	must(n.T, "run", err)
	return verdict == verdictRedirect
}

// TestKernelAnswersToOnePodLeaveThoseToOthers: a pod asks a Service without backends more often
// than a CPU answers in a second. Other pods are told as before that nobody listens.
func TestKernelAnswersToOnePodLeaveThoseToOthers(t *testing.T) {
	stayOnOneCPU(t)
	n := newServiceNode(t)
	greedy := newPod(t, n.k, "sl-greedy", 10, slotmap.DeliverPeer)
	others := []*pod{
		newPod(t, n.k, "sl-other0", 11, slotmap.DeliverPeer), newPod(t, n.k, "sl-other1", 12, slotmap.DeliverPeer),
	}
	vip := serviceAddr(greedy.IPv4, 1)
	n.lead(vip, feAddress)
	const flood, few = 3000, 20
	answered := 0
	for range flood {
		if n.answers(greedy, vip) {
			answered++
		}
	}
	for i := range few {
		for _, o := range others {
			if !n.answers(o, vip) {
				t.Fatalf("datagram %d of another pod was not answered, after %d of %d of the first pod", i, answered, flood)
			}
		}
	}
	if answered == flood {
		t.Errorf("all %d datagrams were answered", flood)
	}
	t.Logf("%d of %d datagrams of the first pod were answered", answered, flood)
}
