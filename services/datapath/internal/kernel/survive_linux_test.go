// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// clearMaps removes every element, as an LRU map may do at any time.
func clearMaps(t *testing.T, k *Kernel, names ...string) {
	t.Helper()
	for _, name := range names {
		m := k.Pins.Map(name)
		key := make([]byte, m.KeySize())
		for m.NextKey(nil, key) == nil {
			if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Fatalf("delete an element of %s: %v", name, err)
			}
		}
	}
}

// clearZone removes the translations whose keys have a zone.
func clearZone(t *testing.T, k *Kernel, zone uint8) {
	t.Helper()
	var keys4 []bpf.MapsSlXlKey4
	var keys6 []bpf.MapsSlXlKey6
	var v bpf.MapsSlXl
	var k4 bpf.MapsSlXlKey4
	for _, name := range []string{bpf.MapsMapSlXl4, bpf.MapsMapSlPodXl4} {
		for it := k.Pins.Map(name).Iterate(); it.Next(&k4, &v); {
			if k4.Zone == zone {
				keys4 = append(keys4, k4)
			}
		}
	}
	var k6 bpf.MapsSlXlKey6
	for _, name := range []string{bpf.MapsMapSlXl6, bpf.MapsMapSlPodXl6} {
		for it := k.Pins.Map(name).Iterate(); it.Next(&k6, &v); {
			if k6.Zone == zone {
				keys6 = append(keys6, k6)
			}
		}
	}
	remove := func(names [2]string, key any) {
		t.Helper()
		for _, name := range names {
			if err := k.Pins.Map(name).Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Fatalf("remove a translation of %s: %v", name, err)
			}
		}
	}
	for i := range keys4 {
		remove([2]string{bpf.MapsMapSlXl4, bpf.MapsMapSlPodXl4}, &keys4[i])
	}
	for i := range keys6 {
		remove([2]string{bpf.MapsMapSlXl6, bpf.MapsMapSlPodXl6}, &keys6[i])
	}
}

// answerMaps are the maps of records and copies.
var answerMaps = []string{
	bpf.MapsMapSlAnswers4, bpf.MapsMapSlAnswers6, bpf.MapsMapSlPodAnswers4, bpf.MapsMapSlPodAnswers6,
}

// losses are entries that a service connection may lose: any single one, or all of one map.
var losses = map[string]func(t *testing.T, k *Kernel){
	"its entry": func(t *testing.T, k *Kernel) { clearMaps(t, k, bpf.MapsMapSlCt4, bpf.MapsMapSlCt6) },
	"its entry, by a flush": func(t *testing.T, k *Kernel) {
		_, err := k.Connections.Flush(t.Context(), conntrack.Filter{}, false)
		must(t, "flush", err)
	},
	"where its requests go": func(t *testing.T, k *Kernel) { clearZone(t, k, 0) },
	"the claim of its port": func(t *testing.T, k *Kernel) { clearZone(t, k, 1) },
	"its translation and its claim": func(t *testing.T, k *Kernel) {
		clearMaps(t, k, bpf.MapsMapSlXl4, bpf.MapsMapSlXl6, bpf.MapsMapSlPodXl4, bpf.MapsMapSlPodXl6)
	},
	"what is stored about answers": func(t *testing.T, k *Kernel) {
		clearMaps(t, k, answerMaps...)
	},
	"what is stored about answers, then its entry by a flush": func(t *testing.T, k *Kernel) {
		clearMaps(t, k, answerMaps...)
		_, err := k.Connections.Flush(t.Context(), conntrack.Filter{}, false)
		must(t, "flush", err)
	},
	"nothing, and its service's list": nil,
}

// TestKernelConnectionsByServicesSurviveTheLossOfAnEntry: connections of outside clients and of pods, to backends on
// this and other nodes, continue after their entry was lost, whichever end sends next.
func TestKernelConnectionsByServicesSurviveTheLossOfAnEntry(t *testing.T) {
	for name, routing := range map[string]Routing{"overlay": RoutingOverlay, "native": RoutingNative} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t, routing, false)
			n := &serviceNode{T: t, runner: f.a.runner}
			local, away := f.a.newPod(t, 20), f.b.newPod(t, 21)
			for _, a := range away.Addrs() {
				f.a.says(t, netip.PrefixFrom(a, a.BitLen()), away.Identity, uint16(f.b.number))
			}
			port := uint16(30080)
			for family := range 2 {
				node := []netip.Addr{f.a.addr4, f.a.addr6}[family]
				other := []netip.Addr{f.b.addr4, f.b.addr6}[family]
				of := func(p *pod) place { return place{p.ns, p.Addrs()[family]} }
				hosts := [2]place{{f.a.ns, node}, {f.b.ns, other}}
				for _, c := range []struct {
					name   string
					from   netns.NsHandle
					node   bool // it asks a node port
					server place
				}{
					{"outside, local backend", f.outsider, true, of(local)},
					{"outside, backend elsewhere", f.outsider, true, of(f.b.pod)},
					{"outside, socket of the node", f.outsider, true, hosts[0]},
					{"outside, host of the other node", f.outsider, true, hosts[1]},
					{"pod of the other node, local backend", f.b.pod.ns, true, of(local)},
					{"pod of the other node, backend elsewhere", f.b.pod.ns, true, of(away)},
					{"pod of the other node, socket of the node", f.b.pod.ns, true, hosts[0]},
					{"host of the other node, local backend", f.b.ns, true, of(local)},
					{"pod, local backend", f.a.pod.ns, false, of(local)},
					{"pod, backend elsewhere", f.a.pod.ns, false, of(f.b.pod)},
					{"pod, socket of the node", f.a.pod.ns, false, hosts[0]},
					{"pod, itself", f.a.pod.ns, false, of(f.a.pod)},
				} {
					port++
					asked, kind := netip.AddrPortFrom(node, port), uint8(feNode)
					if !c.node {
						asked, kind = serviceAddr(node, byte(port%100)), feAddress
					}
					backend := netip.AddrPortFrom(c.server.addr, port+1000)
					n.lead(asked, kind, backend)
					t.Run(fmt.Sprintf("IPv%d, %s", 4+2*family, c.name), func(t *testing.T) {
						for what, lose := range losses {
							if lose == nil {
								continue
							}
							for _, network := range []string{"tcp", "udp"} {
								for _, serverFirst := range []bool{true, false} {
									name := fmt.Sprintf("%s loses %s, server first %t", network, what, serverFirst)
									conn := connectPair(t, network, c.from, c.server.ns, asked, backend)
									if err := conn.exchange(serverFirst); err != nil {
										t.Fatalf("%s: before: %v", name, err)
									}
									lose(t, n.k)
									if err := conn.exchange(serverFirst); err != nil {
										t.Errorf("%s: %v", name, err)
									}
									conn.close()
								}
							}
						}
					})
				}
			}
		})
	}
}

// TestKernelConnectionsByServicesKeepTheirBackendWhenTheListChangesAndAnEntryIsLost, whichever end sends next: a
// connection that has been answered never moves to the Service's present backends.
func TestKernelConnectionsByServicesKeepTheirBackendWhenTheListChangesAndAnEntryIsLost(t *testing.T) {
	for name, routing := range map[string]Routing{"overlay": RoutingOverlay, "native": RoutingNative} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t, routing, false)
			n := &serviceNode{T: t, runner: f.a.runner}
			local := f.a.newPod(t, 20)
			port := uint16(30080)
			for family := range 2 {
				node := []netip.Addr{f.a.addr4, f.a.addr6}[family]
				of := func(p *pod) place { return place{p.ns, p.Addrs()[family]} }
				for _, c := range []struct {
					name   string
					from   netns.NsHandle
					node   bool // it asks a node port
					server place
				}{
					{"outside, local backend", f.outsider, true, of(local)},
					{"outside, backend elsewhere", f.outsider, true, of(f.b.pod)},
					{"outside, socket of the node", f.outsider, true, place{f.a.ns, node}},
					{"pod of the other node, local backend", f.b.pod.ns, true, of(local)},
					{"pod, local backend", f.a.pod.ns, false, of(local)},
					{"pod, backend elsewhere", f.a.pod.ns, false, of(f.b.pod)},
					{"pod, socket of the node", f.a.pod.ns, false, place{f.a.ns, node}},
					{"pod, itself", f.a.pod.ns, false, of(f.a.pod)},
					{"pod, node port, local backend", f.a.pod.ns, true, of(local)},
					{"pod, node port, itself", f.a.pod.ns, true, of(f.a.pod)},
				} {
					port++
					asked, kind := netip.AddrPortFrom(node, port), uint8(feNode)
					if !c.node {
						asked, kind = serviceAddr(node, byte(port%100)), feAddress
					}
					backend := netip.AddrPortFrom(c.server.addr, port+1000)
					front := n.lead(asked, kind, backend)
					// nothing listens there, so a packet that reaches it is refused
					change := n.lists(front, backend, netip.AddrPortFrom(c.server.addr, port+2000))
					t.Run(fmt.Sprintf("IPv%d, %s", 4+2*family, c.name), func(t *testing.T) {
						for what, lose := range losses {
							for _, serverFirst := range []bool{true, false} {
								name := fmt.Sprintf("loses %s, server first %t", what, serverFirst)
								change(0)
								conn := connectPair(t, "tcp", c.from, c.server.ns, asked, backend)
								if err := conn.exchange(serverFirst); err != nil {
									t.Fatalf("%s: before: %v", name, err)
								}
								change(1)
								if lose != nil {
									lose(t, n.k)
								}
								for _, after := range []string{"", "again: "} {
									if err := conn.exchange(serverFirst); err != nil {
										t.Errorf("%s: %s%v", name, after, err)
										break
									}
								}
								conn.close()
							}
						}
					})
				}
			}
		})
	}
}

// lists returns a function that makes one of the backends the only one of a front, for both sides.
func (n *serviceNode) lists(front uint32, backends ...netip.AddrPort) func(which int) {
	n.Helper()
	var all []uint64
	for _, b := range backends {
		n.backend++
		putBackend(n, n.k, n.backend, b, beActive, 1)
		n.member++
		all = append(all, putMembers(n, n.k, n.member, n.backend))
	}
	return func(which int) {
		n.Helper()
		for _, number := range []uint32{front, front + outsideFronts} {
			var f bpf.MapsSlFront
			must(n.T, "read a front", n.k.Pins.Map(bpf.MapsMapSlFront).Lookup(number, &f))
			f.List = all[which]
			putFront(n, n.k, number, f)
		}
	}
}

// place is a namespace, and an address in it.
type place struct {
	ns   netns.NsHandle
	addr netip.Addr
}

// pair is the two ends of a connection.
type pair struct{ client, server net.Conn }

func (p pair) close() { _, _ = p.client.Close(), p.server.Close() }

// exchange sends a message in each direction and waits for both.
func (p pair) exchange(serverFirst bool) error {
	from, to, names := p.client, p.server, [2]string{"the client", "the server"}
	if serverFirst {
		from, to, names = p.server, p.client, [2]string{"the server", "the client"}
	}
	for range 2 {
		if err := send(from, to); err != nil {
			return fmt.Errorf("%s writes to %s: %w", names[0], names[1], err)
		}
		from, to, names[0], names[1] = to, from, names[1], names[0]
	}
	return nil
}

// send sends a message; a datagram up to three times.
func send(from, to net.Conn) error {
	var err error
	for range 3 {
		if _, err = from.Write([]byte("x")); err != nil {
			return err
		}
		wait := 500 * time.Millisecond
		if from.LocalAddr().Network() == "tcp" {
			wait = 3 * time.Second
		}
		_ = to.SetReadDeadline(time.Now().Add(wait))
		if _, err = to.Read(make([]byte, 16)); err == nil || from.LocalAddr().Network() == "tcp" {
			return err
		}
	}
	return err
}

// connectPair connects a client with a server through a service. A datagram server sends to the first client.
func connectPair(t *testing.T, network string, from, at netns.NsHandle, asked, backend netip.AddrPort) pair {
	t.Helper()
	if network == "udp" {
		var u *net.UDPConn
		inNetns(t, at, func() {
			var err error
			u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(backend))
			must(t, "listen", err)
		})
		client, err := dialIn(t, from, network, asked)
		must(t, "open a socket", err)
		server := &answerer{UDPConn: u}
		must(t, "ask the server", send(client, server))
		return pair{client, server}
	}
	var l net.Listener
	inNetns(t, at, func() {
		var err error
		l, err = new(net.ListenConfig).Listen(context.Background(), network, backend.String())
		must(t, "listen", err)
	})
	defer l.Close()
	client, err := dialIn(t, from, network, asked)
	must(t, "connect", err)
	server, err := l.Accept()
	must(t, "accept", err)
	return pair{client, server}
}

// answerer is a socket of a server that sends to the last client.
type answerer struct {
	*net.UDPConn
	peer netip.AddrPort
}

func (a *answerer) Read(b []byte) (int, error) {
	n, from, err := a.ReadFromUDPAddrPort(b)
	if err == nil {
		a.peer = from
	}
	return n, err
}

func (a *answerer) Write(b []byte) (int, error) { return a.WriteToUDPAddrPort(b, a.peer) }

// TestKernelAPortMayAskAServiceAndItsBackend: after a client's socket has used a service, another socket uses
// the same port for a direct connection to the backend, and vice versa.
func TestKernelAPortMayAskAServiceAndItsBackend(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, n.k, "sl-server", 20, endpointmap.DeliverPeer)
	for i, own := range client.Addrs() {
		vip, at := serviceAddr(own, 1), netip.AddrPortFrom(server.Addrs()[i], 8080)
		tell(t, server.ns, at)
		n.lead(vip, feAddress, at)
		for round, to := range []netip.AddrPort{vip, at, vip} {
			var c net.Conn
			inNetns(t, client.ns, func() {
				var err error
				c, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(own, 40000)), net.UDPAddrFromAddrPort(to))
				must(t, "open a socket", err)
			})
			// A port that is in use for another connection is refused until it has been idle.
			var err error
			for deadline := time.Now().Add(servicetest.Patience); time.Now().Before(deadline); {
				_ = c.SetDeadline(time.Now().Add(time.Second))
				if _, err = c.Write([]byte("x")); err == nil {
					if _, err = c.Read(make([]byte, 200)); err == nil {
						break
					}
				}
				if to == at {
					break // it is never refused
				}
			}
			if err != nil {
				t.Errorf("round %d: from %v to %v: %v", round, own, to, err)
			}
			must(t, "close", c.Close())
		}
	}
}

// TestKernelServiceMadeAgainServesFlowsThatGoOn: a client that keeps its port and never pauses is served again
// after its Service was deleted and recreated, even if the backend keeps sending.
func TestKernelServiceMadeAgainServesFlowsThatGoOn(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	local := f.a.newPod(t, 20)
	apply := func(change func(*frontendtx.Transaction)) {
		t.Helper()
		tx := &frontendtx.Transaction{Partial: true}
		change(tx)
		res, err := n.k.Frontends().Apply(t.Context(), tx)
		must(t, "apply", err)
		if len(res.Refused) > 0 {
			t.Fatalf("refused: %v", res.Refused)
		}
	}
	port := uint16(30080)
	for family := range 2 {
		node := []netip.Addr{f.a.addr4, f.a.addr6}[family]
		for _, c := range []struct {
			name   string
			from   netns.NsHandle
			node   bool
			server *pod
		}{
			{"outside, local backend", f.outsider, true, local},
			{"outside, backend elsewhere", f.outsider, true, f.b.pod},
			{"pod, local backend", f.a.pod.ns, false, local},
			{"pod, backend elsewhere", f.a.pod.ns, false, f.b.pod},
		} {
			for _, speaks := range []bool{false, true} {
				port++
				backend := netip.AddrPortFrom(c.server.Addrs()[family], port)
				asked := serviceAddr(node, byte(port%100))
				service := clusterAt(asked, frontend.UDP, leadsTo(backend))
				if c.node {
					asked = netip.AddrPortFrom(node, port)
					key := frontend.Key{
						Addr: frontend.Unspecified(node), Port: port, Protocol: frontend.UDP, Node: true,
					}
					service = &frontend.Frontend{
						Key: key, Kind: frontend.NodePort, Service: "shop/web:http",
						Inside: leadsTo(backend), Outside: leadsTo(backend),
					}
				}
				name := fmt.Sprintf("IPv%d, %s, the backend speaks meanwhile: %t", 4+2*family, c.name, speaks)
				apply(func(tx *frontendtx.Transaction) { tx.Upsert(service) })
				conn := connectPair(t, "udp", c.from, c.server.ns, asked, backend)
				if err := conn.exchange(false); err != nil {
					t.Fatalf("%s: before: %v", name, err)
				}
				apply(func(tx *frontendtx.Transaction) { tx.Remove(service.Key) })
				if speaks {
					if err := send(conn.server, conn.client); err != nil {
						t.Errorf("%s: the backend while there is no Service: %v", name, err)
					}
				}
				apply(func(tx *frontendtx.Transaction) { tx.Upsert(service) })
				if err := conn.exchange(false); err != nil {
					t.Errorf("%s: afterwards: %v", name, err)
				}
				conn.close()
			}
		}
	}
}
