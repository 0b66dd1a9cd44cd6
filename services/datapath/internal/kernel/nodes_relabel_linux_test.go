// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// opened is a TCP connection between two namespaces.
type opened struct{ here, there net.Conn }

// open connects from a local address.
func open(t *testing.T, from netns.NsHandle, local netip.Addr, to netns.NsHandle, addr netip.Addr) opened {
	t.Helper()
	var l net.Listener
	var o opened
	var err error
	inNetns(t, to, func() { l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String()) })
	must(t, "listen", err)
	defer l.Close()
	inNetns(t, from, func() {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0)), Timeout: 10 * time.Second}
		o.here, err = d.DialContext(t.Context(), "tcp", l.Addr().String())
	})
	must(t, fmt.Sprintf("connect from %v to %v", local, addr), err)
	o.there, err = l.Accept()
	must(t, "accept", err)
	t.Cleanup(func() {
		o.here.Close()
		o.there.Close()
	})
	return o
}

// ask sends a byte in each direction.
func (o opened) ask() error {
	for _, way := range [][2]net.Conn{{o.here, o.there}, {o.there, o.here}} {
		if _, err := way[0].Write([]byte{1}); err != nil {
			return err
		}
		if err := way[1].SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			return err
		}
		if _, err := way[1].Read(make([]byte, 1)); err != nil {
			return err
		}
	}
	return nil
}

// TestKernelConnectionsOfARelabelledNodeAreEvaluatedAgain shows that a node's connection continues when the
// node's labels change to an identity that the pod also admits, and ends when they change to one that it does
// not: not a byte arrives after that, neither from the node's device address nor from its overlay address.
func TestKernelConnectionsOfARelabelledNodeAreEvaluatedAgain(t *testing.T) {
	const east, south, west = identity.MinNodeLocal, identity.MinNodeLocal + 1, identity.MaxNodeLocal
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		(&theatre{runner: f.b.runner}).putTables(t)
		const clusterWide = uint32(identity.MaxCluster) + 1
		for id, word := range map[identity.Numeric]uint32{
			east: knownWord(7, 4, 1), south: knownWord(7, 4, 1), west: knownWord(8, 4, 1),
		} {
			update(t, f.b.k, bpf.MapsMapSlId, clusterWide+uint32(id-identity.MinNodeLocal), word)
		}
		setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: friends})
		addresses := [][]netip.Addr{{f.a.addr4, f.a.over4}, {f.a.addr6, f.a.over6}}
		relabel := func(id identity.Numeric) {
			for _, list := range addresses {
				for i, a := range list {
					must(t, "SetRemote", f.b.k.IPCache.SetRemote(netip.PrefixFrom(a, a.BitLen()),
						ipcache.Remote{Identity: id, Node: uint16(f.a.number), OfDevice: i == 0}))
				}
			}
		}
		for i, addr := range f.b.pod.Addrs() {
			for _, local := range addresses[i] {
				relabel(east)
				o := open(t, f.a.ns, local, f.b.pod.ns, addr)
				must(t, "ask", o.ask())
				relabel(south)
				if err := o.ask(); err != nil {
					t.Errorf("from %v with other labels that are admitted: %v", local, err)
				}
				relabel(west)
				before := f.b.counters(t)
				_, err := o.here.Write([]byte{1})
				must(t, "write", err)
				c := cell{event.PolicyDenied, event.Ingress}
				servicetest.Eventually(t, "a packet to be denied", func() bool { return f.b.gained(t, before)[c] > 0 })
				must(t, "set a deadline", o.there.SetReadDeadline(time.Now()))
				if n, err := o.there.Read(make([]byte, 1)); n > 0 || err == nil {
					t.Errorf("from %v with labels that are not admitted: %d bytes arrived, %v", local, n, err)
				}
			}
		}
	})
}
