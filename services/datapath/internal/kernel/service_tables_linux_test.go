// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// scramble is the same function as scramble in service.h.
func scramble(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// memberOf returns the backend that the table selects for a packet, as hash_of and next_member of translate.h
// do.
func memberOf(backends []netip.AddrPort, proto uint8, from, to netip.AddrPort) netip.AddrPort {
	words := func(a netip.Addr) (w [2]uint64) {
		var b [16]byte
		copy(b[:], a.AsSlice())
		return [2]uint64{binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])}
	}
	s, d := words(from.Addr()), words(to.Addr())
	ports := uint64(from.Port())<<32 | uint64(to.Port())<<16 | uint64(proto)
	hash := scramble(scramble(s[0]^scramble(s[1]+ports)) ^ scramble(d[0]) ^ d[1])
	hash = scramble(hash + 1)
	bits := rendezvous.Bits(len(backends))
	return backends[rendezvous.New(bits, backends).Owners()[hash&0xffffffff<<bits>>32]]
}

// tableNode is a node with one service of many backends, at ports of one pod.
type tableNode struct {
	*serviceNode
	client, server *pod
	vip            netip.AddrPort
	socks          []*net.UDPConn
}

func newTableNode(t *testing.T, i int, flows int) *tableNode {
	t.Helper()
	n := &tableNode{serviceNode: newServiceNode(t)}
	n.client = newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	n.server = newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	n.vip = serviceAddr(n.server.Addrs()[i], 1)
	inNetns(t, n.client.ns, func() {
		for f := range flows {
			from := netip.AddrPortFrom(n.client.Addrs()[i], uint16(40000+f))
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(from))
			if err != nil {
				t.Errorf("listen at %v: %v", from, err)
				return
			}
			n.socks = append(n.socks, c)
			t.Cleanup(func() { c.Close() })
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return n
}

// backendsAt returns backends at ports of the server from 8000 on, without some.
func (n *tableNode) backendsAt(count int, but ...int) (as []netip.AddrPort) {
	for i := range count {
		if !slices.Contains(but, i) {
			as = append(as, netip.AddrPortFrom(n.serverAddr(), uint16(8000+i)))
		}
	}
	return as
}

func (n *tableNode) serverAddr() netip.Addr {
	for _, a := range n.server.Addrs() {
		if a.Is4() == n.vip.Addr().Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// leadTo sets a list with a table of the backends for the service.
func (n *tableNode) leadTo(affinity time.Duration, backends []netip.AddrPort) {
	n.Helper()
	f := &frontend.Frontend{
		Key:  frontend.Key{Addr: n.vip.Addr(), Port: n.vip.Port(), Protocol: frontend.UDP},
		Kind: frontend.ClusterIP, Service: "shop/web:http", Affinity: affinity, Inside: &frontend.List{Table: true},
	}
	for _, b := range backends {
		f.Inside.Backends = append(f.Inside.Backends, frontend.Backend{AddrPort: b})
	}
	tx := &frontendtx.Transaction{}
	tx.Upsert(f)
	res, err := n.k.Services.Apply(n.Context(), tx)
	if err != nil || len(res.Refused) > 0 {
		n.Fatalf("Apply: %+v, %v", res, err)
	}
}

// forget deletes the connections and translations.
func (n *tableNode) forget() {
	n.Helper()
	n.runner.forget(n)
	for name, key := range map[string]any{
		bpf.MapsMapSlXl4: &bpf.MapsSlXlKey4{}, bpf.MapsMapSlXl6: &bpf.MapsSlXlKey6{},
		bpf.MapsMapSlPodXl4: &bpf.MapsSlXlKey4{}, bpf.MapsMapSlPodXl6: &bpf.MapsSlXlKey6{},
	} {
		m := n.k.Pins.Map(name)
		for m.NextKey(nil, key) == nil {
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				n.Fatalf("delete from %s: %v", name, err)
			}
		}
	}
}

// ask sends a datagram from each socket to the service, and returns their backends.
func (n *tableNode) ask() map[netip.AddrPort]netip.AddrPort {
	n.Helper()
	for _, c := range n.socks {
		// a port unreachable error fails a later call
		if _, err := c.WriteToUDPAddrPort([]byte("ping"), n.vip); err != nil {
			_, err = c.WriteToUDPAddrPort([]byte("ping"), n.vip)
			must(n, "send", err)
		}
	}
	led := map[netip.AddrPort]netip.AddrPort{}
	must(n, "list translations", n.k.Translations.Each(func(x translation.Translation) error {
		if x.Asked == n.vip {
			led[x.Source] = x.Backend
		}
		return nil
	}))
	if len(led) != len(n.socks) {
		n.Fatalf("%d translations, want %d", len(led), len(n.socks))
	}
	return led
}

// TestKernelPacketsGoWhereTheTableSays: packets go to the backend of their hash's slot, also after their
// entries were lost, and removing a backend only moves its own connections.
func TestKernelPacketsGoWhereTheTableSays(t *testing.T) {
	for i, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			n := newTableNode(t, i, 200)
			all := n.backendsAt(100)
			n.leadTo(0, all)
			led := n.ask()
			for from, to := range led {
				if want := memberOf(all, protoUDP, from, n.vip); to != want {
					t.Errorf("%v goes to %v, want %v", from, to, want)
				}
			}
			n.forget()
			for from, to := range n.ask() {
				if to != led[from] {
					t.Errorf("%v goes to %v after its entry was lost, went to %v", from, to, led[from])
				}
			}
			gone := led[netip.AddrPortFrom(n.client.Addrs()[i], 40000)]
			fewer := slices.DeleteFunc(slices.Clone(all), func(a netip.AddrPort) bool { return a == gone })
			n.leadTo(0, fewer)
			n.forget()
			for from, to := range n.ask() {
				switch want := memberOf(fewer, protoUDP, from, n.vip); {
				case to != want:
					t.Errorf("%v goes to %v without %v, want %v", from, to, gone, want)
				case led[from] != gone && to != led[from]:
					t.Errorf("%v goes to %v, went to %v, which has stayed", from, to, led[from])
				}
			}
		})
	}
}

// TestKernelAffinityIsRememberedBesideATable: a client keeps its backend although the table would select others
// as backends are added.
func TestKernelAffinityIsRememberedBesideATable(t *testing.T) {
	for i, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			n := newTableNode(t, i, 20)
			only := func(what string) (kept netip.AddrPort) {
				t.Helper()
				n.forget()
				at := map[netip.AddrPort]bool{}
				for _, to := range n.ask() {
					at[to], kept = true, to
				}
				if len(at) != 1 {
					t.Fatalf("%s: the client uses %d backends", what, len(at))
				}
				return kept
			}
			n.leadTo(time.Hour, n.backendsAt(100))
			kept := only("100 backends")
			n.leadTo(time.Hour, n.backendsAt(300))
			if got := only("300 backends"); got != kept {
				t.Errorf("the client used %v, and with more backends %v", kept, got)
			}
			n.leadTo(time.Hour, n.backendsAt(300, int(kept.Port())-8000))
			if got := only("without its own"); got == kept {
				t.Errorf("the client uses %v, which was removed", got)
			}
		})
	}
}

// TestKernelUDPSocketStaysInATable: an unconnected socket selects a backend with each call, and only leaves it
// when it is removed.
func TestKernelUDPSocketStaysInATable(t *testing.T) {
	n := newSocketNode(t, 1)
	var all []netip.AddrPort
	for i := 1; i <= 40; i++ {
		all = append(all, backend4(i))
		serve(t, n.ns, backend4(i))
	}
	lead := func(backends []netip.AddrPort) {
		t.Helper()
		l := &frontend.List{Table: true}
		for _, b := range backends {
			l.Backends = append(l.Backends, frontend.Backend{AddrPort: b})
		}
		tx := &frontendtx.Transaction{}
		tx.Upsert(&frontend.Frontend{
			Key:  frontend.Key{Addr: vip4.Addr(), Port: vip4.Port(), Protocol: frontend.UDP},
			Kind: frontend.ClusterIP, Service: "shop/web:http", Inside: l,
		})
		res, err := n.k.Services.Apply(t.Context(), tx)
		if err != nil || len(res.Refused) > 0 {
			t.Fatalf("Apply: %+v, %v", res, err)
		}
	}
	var fds []int
	for range 60 {
		fd := udp4.open(t, n.ns)
		defer unix.Close(fd)
		fds = append(fds, fd)
	}
	ask := func() (at []netip.AddrPort) {
		t.Helper()
		for _, fd := range fds {
			must(t, "send", udp4.send(fd, vip4))
			at = append(at, udp4.receive(t, fd).backend)
		}
		return at
	}
	lead(all)
	before := ask()
	gone := before[0]
	lead(slices.DeleteFunc(slices.Clone(all), func(a netip.AddrPort) bool { return a == gone }))
	for i, now := range ask() {
		if now == gone || before[i] != gone && now != before[i] {
			t.Errorf("socket %d uses %v, used %v, and %v was removed", i, now, before[i], gone)
		}
	}
	lead(all)
	for i, now := range ask() {
		if now != before[i] {
			t.Errorf("socket %d uses %v with all backends again, used %v", i, now, before[i])
		}
	}
}
