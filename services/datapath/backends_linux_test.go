// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// wantConnections waits until each backend has the wanted number of TCP connections.
func (w *world) wantConnections(when string, want map[netip.AddrPort]int) {
	w.t.Helper()
	servicetest.EventuallyNil(w.t, when, func() error {
		got, err := w.node.Services.Connections(w.t.Context())
		if err != nil {
			return err
		}
		left := len(want)
		for _, c := range got {
			if n, ok := want[c.AddrPort]; !ok || n != c.Connections || c.Protocol != unix.IPPROTO_TCP {
				return fmt.Errorf("counted %v, want %v", got, want)
			}
			left--
		}
		if left != 0 {
			return fmt.Errorf("counted %v, want %v", got, want)
		}
		return nil
	})
}

// led returns how many tracked connections to the backend were translated per packet.
func (w *world) led(to netip.AddrPort) (n int) {
	w.t.Helper()
	if err := w.node.Kernel.Connections.Each(func(cs []conntrack.Connection) error {
		for i := range cs {
			if cs[i].Responder == to && cs[i].Value.Front != 0 {
				n++
			}
		}
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// TestKernelConnectionsOfBackendsAreCounted counts connections that are translated per packet, connections that are
// translated at the socket, and connections to the backend's own address. Closed connections and connections to a pod
// that is not a backend are not counted.
func TestKernelConnectionsOfBackendsAreCounted(t *testing.T) {
	const byPackets, bySockets = 5, 3
	w := newWorld(t)
	w.frontends, w.cgroup = silentBalancer{}, kerneltest.NewCgroup(t)
	w.start(false)
	client, web := w.pod("client"), w.pod("web")
	key := func(a string) frontend.Key {
		return frontend.Key{Addr: netip.MustParseAddr(a), Port: 80, Protocol: frontend.TCP}
	}
	keys := []frontend.Key{key("10.96.0.1"), key("fd00:96::1")}
	var at []netip.AddrPort
	var tx, removal frontendtx.Transaction
	for i, k := range keys {
		at = append(at, web.echo(web.spec.Addrs[i]))
		tx.Upsert(&frontend.Frontend{
			Key: k, Kind: frontend.ClusterIP, Service: "shop/web:http",
			Inside: &frontend.List{Backends: []frontend.Backend{{AddrPort: at[i]}}},
		})
		removal.Remove(k)
	}
	apply := func(tx *frontendtx.Transaction) {
		t.Helper()
		res, err := w.node.Kernel.Frontends().Apply(t.Context(), tx)
		if err != nil || len(res.Refused) != 0 {
			t.Fatalf("apply: %+v, %v", res, err)
		}
	}
	apply(&tx)
	var open []net.Conn
	dial := func(to netip.AddrPort) {
		t.Helper()
		c, err := dialIn(client.ns, "tcp", to, patience)
		if err == nil {
			t.Cleanup(func() { c.Close() })
			err = exchange(c, "hello", patience)
		}
		if err != nil {
			t.Fatalf("connect to %v: %v", to, err)
		}
		open = append(open, c)
	}
	// a port of the pod that is not a backend
	other := web.echo(web.spec.Addrs[0])
	dial(other)
	// an ICMP echo whose identifier equals the backend's port
	echo := conntrack.Connection{
		Tuple: conntrack.Tuple{
			Initiator: netip.AddrPortFrom(client.spec.Addrs[0], at[0].Port()), Responder: at[0], Protocol: unix.IPPROTO_ICMP,
		},
		From: conntrack.End{Slot: client.ep.Slot}, To: conntrack.End{Slot: web.ep.Slot}, LastSeen: conntrack.MonotonicSeconds(),
	}
	m, tuple := w.node.Kernel.Connections.Map(echo.Tuple)
	if err := m.Update(tuple, conntrack.ValueOf(echo), ebpf.UpdateNoExist); err != nil {
		t.Fatal(err)
	}

	w.wantConnections("no connection", nil)
	for range byPackets {
		for _, k := range keys {
			dial(netip.AddrPortFrom(k.Addr, k.Port))
		}
	}
	w.wantConnections("by packets", map[netip.AddrPort]int{at[0]: byPackets, at[1]: byPackets})
	if n := w.led(at[0]); n != byPackets {
		t.Errorf("%d connections were translated per packet, want %d", n, byPackets)
	}

	if err := w.node.Services.NameSockets(false); err != nil {
		t.Fatal(err)
	}
	if err := w.node.Kernel.Sockets.Attach(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sockets.Detach(w.config().BPFDir); err != nil {
			t.Error(err)
		}
	})
	first := len(open)
	for range bySockets {
		for _, k := range keys {
			dial(netip.AddrPortFrom(k.Addr, k.Port))
		}
	}
	dial(at[0])
	all := map[netip.AddrPort]int{at[0]: byPackets + bySockets + 1, at[1]: byPackets + bySockets}
	w.wantConnections("by sockets and to the backend", all)
	if n := w.led(at[0]); n != byPackets {
		t.Errorf("%d connections were translated per packet, want %d as before", n, byPackets)
	}

	for _, c := range slices.Concat(open[1:3], open[first:first+2]) {
		c.Close()
	}
	w.wantConnections("without two of each", map[netip.AddrPort]int{at[0]: all[at[0]] - 2, at[1]: all[at[1]] - 2})
	apply(&removal)
	w.wantConnections("without the service", nil)
}
