// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// copies returns the copies of the translations of requests.
func (n *serviceNode) copies() (all []translation.Translation) {
	n.Helper()
	must(n.T, "list", n.k.Translations.Each(func(x translation.Translation) error {
		if x.Copy && !x.Answer {
			all = append(all, x)
		}
		return nil
	}))
	return all
}

// putCopy stores a copy of the translation of a pod's requests, as if an earlier connection had left it.
func putCopy(t *testing.T, k *Kernel, from, asked, backend netip.AddrPort, front uint32) {
	t.Helper()
	v := bpf.MapsSlXl{Port: backend.Port(), Front: front}
	copy(v.Addr[:], backend.Addr().AsSlice())
	if from.Addr().Is4() {
		number := func(a netip.Addr) uint32 { b := a.As4(); return binary.NativeEndian.Uint32(b[:]) }
		key := bpf.MapsSlXlKey4{Src: number(from.Addr()), Dst: number(asked.Addr()), Sport: from.Port(), Dport: asked.Port()}
		key.Proto, key.Zone = protoTCP, 4
		must(t, "write a copy", k.Pins.Map(bpf.MapsMapSlPodAnswers4).Put(&key, &v))
		return
	}
	key := bpf.MapsSlXlKey6{Src: from.Addr().As16(), Dst: asked.Addr().As16(), Sport: from.Port(), Dport: asked.Port()}
	key.Proto, key.Zone = protoTCP, 4
	must(t, "write a copy", k.Pins.Map(bpf.MapsMapSlPodAnswers6).Put(&key, &v))
}

// pairFrom connects from a local port through a Service whose only backend is in another namespace.
func pairFrom(t *testing.T, from netns.NsHandle, port uint16, in netns.NsHandle, asked, backend netip.AddrPort) pair {
	t.Helper()
	var l net.Listener
	inNetns(t, in, func() {
		var err error
		l, err = net.Listen("tcp", backend.String())
		must(t, "listen", err)
	})
	defer l.Close()
	client := dialFrom(t, from, "tcp", port, asked)
	must(t, "linger", client.(*net.TCPConn).SetLinger(0))
	server, err := l.Accept()
	must(t, "accept", err)
	return pair{client, server}
}

// TestKernelLaterConnectionsIgnoreTheCopiesOfEarlierOnes: a copy that an earlier connection of the same ports has left
// neither chooses the backend of a new connection, nor replaces its lost translation.
func TestKernelLaterConnectionsIgnoreTheCopiesOfEarlierOnes(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	first := newPod(t, n.k, "sl-first", 20, endpointmap.DeliverPeer)
	second := newPod(t, n.k, "sl-second", 21, endpointmap.DeliverPeer)
	for i, own := range client.Addrs() {
		for j, c := range []struct {
			name   string
			server *pod
		}{{"another pod", second}, {"the pod itself", client}} {
			t.Run(fmt.Sprintf("IPv%d, the new backend is %s", 4+2*i, c.name), func(t *testing.T) {
				asked, port := serviceAddr(own, byte(1+j)), uint16(40000+j)
				old := netip.AddrPortFrom(first.Addrs()[i], 8080)
				backend := netip.AddrPortFrom(c.server.Addrs()[i], 8081+uint16(j))
				front := n.lead(asked, feAddress, backend)
				change := n.lists(front, backend, old)
				change(0)
				putCopy(t, n.k, netip.AddrPortFrom(own, port), asked, old, front)
				conn := pairFrom(t, client.ns, port, c.server.ns, asked, backend)
				must(t, "exchange", conn.exchange(false))
				change(1)
				clearZone(t, n.k, 0)
				if err := conn.exchange(false); err != nil {
					t.Errorf("after the loss of its translation: %v", err)
				}
				conn.close()
			})
		}
	}
}

// TestKernelACopyEndsWithItsConnection: the end of a pod's connection removes the copy of its translation, and returns
// it to the pod's share.
func TestKernelACopyEndsWithItsConnection(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), bpf.MapsSlBound{Guarantee: 100})
	update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations6), bpf.MapsSlBound{Guarantee: 100})
	for i, own := range client.Addrs() {
		asked, backend := serviceAddr(own, 1), netip.AddrPortFrom(server.Addrs()[i], 8080)
		n.lead(asked, feAddress, backend)
		held := func() int {
			return n.k.Bounds.Held([]bound.Bound{bound.Translations4, bound.Translations6}[i], client.Slot)
		}
		for what, end := range map[string]func(pair){
			"the client resets": func(p pair) { _ = p.client.Close() },
			"the server resets": func(p pair) { _ = p.server.(*net.TCPConn).SetLinger(0); _ = p.server.Close() },
		} {
			conn := pairFrom(t, client.ns, 40000, server.ns, asked, backend)
			must(t, "exchange", conn.exchange(false))
			if got := n.copies(); len(got) != 1 || got[0].Backend != backend || got[0].Source.Port() != 40000 || held() != 3 {
				t.Errorf("%v, %s: the copies are %v, want one; the pod has %d translations, want 3", own, what, got, held())
			}
			end(conn)
			servicetest.Eventually(t, "the end", func() bool { return held() == 0 })
			if got := n.copies(); len(got) != 0 {
				t.Errorf("%v, %s: copies remain: %v", own, what, got)
			}
			conn.close()
		}
	}
}

// TestKernelConnectionsContinueByTheirCopiesBeyondTheShare, and after their Service was removed: a lost translation
// never ends a connection that has a copy.
func TestKernelConnectionsContinueByTheirCopiesBeyondTheShare(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	for i, own := range client.Addrs() {
		asked, backend := serviceAddr(own, 1), netip.AddrPortFrom(server.Addrs()[i], 8080)
		n.lead(asked, feAddress, backend)
		of := []bound.Bound{bound.Translations4, bound.Translations6}[i]
		update(t, n.k, bpf.MapsMapSlBound, uint32(of), bpf.MapsSlBound{Guarantee: 6})
		conn := pairFrom(t, client.ns, 40000, server.ns, asked, backend)
		must(t, "exchange", conn.exchange(false))
		update(t, n.k, bpf.MapsMapSlBound, uint32(of), bpf.MapsSlBound{Guarantee: 1})
		clearZone(t, n.k, 0)
		if err := conn.exchange(false); err != nil {
			t.Errorf("%v, beyond the share: %v", own, err)
		}
		update(t, n.k, bpf.MapsMapSlBound, uint32(of), bpf.MapsSlBound{})
		must(t, "exchange", conn.exchange(false))
		clearMaps(t, n.k, bpf.MapsMapSlFe4, bpf.MapsMapSlFe6)
		clearZone(t, n.k, 0)
		if err := conn.exchange(false); err != nil {
			t.Errorf("%v, after the Service was removed: %v", own, err)
		}
		conn.close()
	}
}
