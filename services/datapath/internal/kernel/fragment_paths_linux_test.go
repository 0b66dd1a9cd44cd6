// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	homens "github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/node/firewall"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// trackConnections makes the stack of a namespace track connections, and so reassemble and refragment packets.
func trackConnections(t *testing.T, ns netns.NsHandle) {
	t.Helper()
	inNetns(t, ns, func() {
		conn, err := nftables.New()
		must(t, "nftables", err)
		inet := conn.AddTable(&nftables.Table{Name: "tracked", Family: nftables.TableFamilyINet})
		forward := conn.AddChain(&nftables.Chain{
			Name: "forward", Table: inet, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
		})
		conn.AddRule(&nftables.Rule{Table: inet, Chain: forward, Exprs: []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.NativeEndian.AppendUint32(nil, 0xffff)},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
		must(t, "add the rules", conn.Flush())
	})
}

var routingNames = map[Routing]string{RoutingOverlay: "overlay", RoutingNative: "native"}

// Device groups of a guarded node.
const (
	guardedPods   = 0x510
	guardedTunnel = 0x520
)

// guarded installs the firewall of the datapath on the node.
func (n *fabricNode) guarded(t *testing.T, other *fabricNode) *firewall.Table {
	t.Helper()
	home, err := homens.Open(fmt.Sprintf("/proc/self/fd/%d", int(n.ns)))
	must(t, "open the namespace", err)
	t.Cleanup(func() { home.Close() })
	pod, err := n.h.LinkByIndex(int(n.pod.Ifindex))
	must(t, "find the pod's device", err)
	must(t, "group of the pod's device", n.h.LinkSetGroup(pod, guardedPods))
	v4, v6 := n.ranges()
	other4, other6 := other.ranges()
	f := firewall.Routing{
		Native: n.tunnel == nil, Own: func() []netip.Prefix { return []netip.Prefix{v4, v6} },
		Others: []netip.Prefix{other4, other6}, Nodes: []netip.Addr{other.addr4, other.addr6},
	}
	if n.tunnel != nil {
		f.TunnelGroup, f.TunnelPort = guardedTunnel, 4789
		must(t, "group of the tunnel", n.h.LinkSetGroup(n.tunnel, guardedTunnel))
	}
	g := firewall.New(home, "fragments", []uint32{guardedPods, guardedPods | 1}, firewall.Marks{
		Mask: markMask, Pod: markPod, Pods: 0x0900, Tunnel: 0x0300, Others: forwardMark,
	})
	g.SetRouting(f)
	must(t, "make the firewall", g.Repair())
	return g
}

// eachGuard runs a test on a fabric whose nodes track connections, without and with the datapath's firewall.
func eachGuard(t *testing.T, routing Routing, test func(t *testing.T, f *fabric)) {
	for _, guarded := range []bool{false, true} {
		t.Run(fmt.Sprintf("firewall %t", guarded), func(t *testing.T) {
			f := newFabric(t, routing, false)
			trackConnections(t, f.a.ns)
			trackConnections(t, f.b.ns)
			if guarded {
				f.a.guarded(t, f.b)
				f.b.guarded(t, f.a)
			}
			test(t, f)
		})
	}
}

// A cut describes how a datagram is sent.
type cut struct {
	name    string
	size    int // of the datagram, in bytes
	options int // bytes of destination options in the first fragment, IPv6; -1: not fragmented
	port    uint16
}

// cuts are ways to send a datagram. The stack copies the IPv6 fragments of the last one, whatever device they leave by,
// because the options of the first fragment do not fit into the headroom of the others.
var cuts = []cut{
	{"whole", 100, -1, 4000},
	{"in fragments", 3400, 0, 4001},
	{"in fragments of which the first has options", 3400, 128, 4002},
}

// datagram returns the packets of a UDP datagram from the cut's port to port 53.
func (c cut) datagram(src, dst netip.Addr, id uint16) [][]byte {
	dgram := udp(c.port, 53, make([]byte, c.size)...)
	length := []byte{byte(len(dgram) >> 8), byte(len(dgram))}
	sum := checksum(slices.Concat(
		src.AsSlice(), dst.AsSlice(), []byte{0, 0}, length, []byte{0, 0, 0, unix.IPPROTO_UDP}, dgram))
	dgram[6], dgram[7] = byte(sum>>8), byte(sum)
	switch {
	case src.Is4() && c.options < 0:
		return [][]byte{ip4Header{src: src, dst: dst, proto: unix.IPPROTO_UDP}.with(dgram)}
	case src.Is4():
		return fragments4(src, dst, id, dgram, 1400)
	case c.options < 0:
		return [][]byte{ip6(src, dst, unix.IPPROTO_UDP, dgram)}
	}
	return fragments6(src, dst, uint32(id), dgram, c.options)
}

// from waits for a datagram to port 53 at a node's pod, and returns the identity of its sender.
func (n *fabricNode) from(t *testing.T, src netip.Addr, port uint16) (from identity.Numeric) {
	t.Helper()
	to := n.pod.IPv4
	if src.Is6() {
		to = n.pod.IPv6
	}
	tuple := conntrack.Tuple{
		Initiator: netip.AddrPortFrom(src, port), Responder: netip.AddrPortFrom(to, 53), Protocol: unix.IPPROTO_UDP,
	}
	servicetest.Eventually(t, "the datagram at the pod", func() bool {
		c, ok := n.k.tracked(t)[tuple]
		from = c.From.Identity
		return ok
	})
	return from
}

// TestKernelForwardedFragmentsInTheTunnelAreTheWorlds shows that a packet from outside that node a forwards
// into the tunnel with its own address as source belongs to the world at node b: unfragmented, in fragments,
// and in fragments that a's stack has copied, without an incoming device. The address comes from rules of other
// components, or the packet already had it.
func TestKernelForwardedFragmentsInTheTunnelAreTheWorlds(t *testing.T) {
	eachGuard(t, RoutingOverlay, func(t *testing.T, f *fabric) {
		setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
		for i, outside := range f.outsideAddrs() {
			over := []netip.Addr{f.a.over4, f.a.over6}[i]
			f.routeFromOutside(t, f.b.pod.Addrs()[i], f.a)
			translates(t, f.a.ns, outside, over)
			for _, c := range cuts {
				f.fromOutside(t, f.a, c.datagram(outside, f.b.pod.Addrs()[i], 77+c.port)...)
				f.wantWorld(t, over, c)
			}
		}
		// The stack accepts no IPv4 packet from outside with an address of the node.
		for _, c := range cuts {
			f.fromOutside(t, f.a, c.datagram(f.a.addr6, f.b.pod.IPv6, 77+c.port)...)
			f.wantWorld(t, f.a.addr6, c)
		}
	})
}

// wantWorld checks that a datagram belongs to the world at node b.
func (f *fabric) wantWorld(t *testing.T, src netip.Addr, c cut) {
	t.Helper()
	world := identity.WorldIPv4
	if src.Is6() {
		world = identity.WorldIPv6
	}
	if from := f.b.from(t, src, c.port); from != world {
		t.Errorf("from outside under %v, %s: identity %v at node b, want %v", src, c.name, from, world)
	}
}

// TestKernelFragmentsOfAHostSocketHaveTheIdentityOfTheNode shows that packets of a node's socket have the
// identity of the node, at a pod of another node and at a local pod, also in fragments.
func TestKernelFragmentsOfAHostSocketHaveTheIdentityOfTheNode(t *testing.T) {
	for _, routing := range []Routing{RoutingOverlay, RoutingNative} {
		t.Run(routingNames[routing], func(t *testing.T) {
			eachGuard(t, routing, func(t *testing.T, f *fabric) {
				for i, src := range []netip.Addr{f.a.over4, f.a.over6} {
					for _, to := range []struct {
						n    *fabricNode
						want identity.Numeric
					}{{f.a, identity.Host}, {f.b, identity.RemoteNode}} {
						sendFrom(t, f.a.ns, netip.AddrPortFrom(src, 4000), netip.AddrPortFrom(to.n.pod.Addrs()[i], 53), 3400, 0)
						if from := to.n.from(t, src, 4000); from != to.want {
							t.Errorf("from a socket at %v: identity %v at node %d, want %v", src, from, to.n.number, to.want)
						}
					}
				}
			})
		})
	}
}

// sendFrom sends a datagram from a socket with a mark.
func sendFrom(t *testing.T, ns netns.NsHandle, from, to netip.AddrPort, size int, mark uint32) {
	t.Helper()
	inNetns(t, ns, func() {
		d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(from), Control: func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark))
			}), err)
		}}
		u, err := d.Dial("udp", to.String())
		if err != nil {
			t.Errorf("open a socket: %v", err)
			return
		}
		defer u.Close()
		if _, err := u.Write(make([]byte, size)); err != nil {
			t.Errorf("send: %v", err)
		}
	})
}

// leads makes the stack of a node translate the destination of packets to one address.
func leads(t *testing.T, ns netns.NsHandle, from, to netip.Addr) {
	t.Helper()
	translate(t, ns, from, to, expr.NATTypeDestNAT)
}

// translates makes the stack of a node translate the source of packets that it forwards from one address.
func translates(t *testing.T, ns netns.NsHandle, from, to netip.Addr) {
	t.Helper()
	translate(t, ns, from, to, expr.NATTypeSourceNAT)
}

func translate(t *testing.T, ns netns.NsHandle, from, to netip.Addr, end expr.NATType) {
	t.Helper()
	family, offset, nat := nftables.TableFamilyIPv4, uint32(16), uint32(unix.NFPROTO_IPV4)
	if from.Is6() {
		family, offset, nat = nftables.TableFamilyIPv6, 24, unix.NFPROTO_IPV6
	}
	hook, priority := nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest
	if end == expr.NATTypeSourceNAT {
		hook, priority = nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource
		offset -= uint32(len(from.AsSlice()))
	}
	inNetns(t, ns, func() {
		conn, err := nftables.New()
		must(t, "nftables", err)
		table := conn.AddTable(&nftables.Table{Name: "leads", Family: family})
		chain := conn.AddChain(&nftables.Chain{
			Name: "nat", Table: table, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: priority,
		})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Payload{
				DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(len(from.AsSlice())),
			},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: from.AsSlice()},
			&expr.Immediate{Register: 1, Data: to.AsSlice()},
			&expr.NAT{Type: end, Family: nat, RegAddrMin: 1},
		}})
		must(t, "add the rules", conn.Flush())
	})
}

// TestKernelTranslatedFragmentsOfAPodAreEvaluatedBehindTheStack shows that a pod's packet whose destination the
// stack translates to a pod of another node, or of this one, is evaluated as a packet to that pod:
// unfragmented, in fragments, and in fragments that the stack has copied.
func TestKernelTranslatedFragmentsOfAPodAreEvaluatedBehindTheStack(t *testing.T) {
	asked := []netip.Addr{netip.MustParseAddr("198.51.100.77"), netip.MustParseAddr("2001:db8:77::1")}
	for _, routing := range []Routing{RoutingOverlay, RoutingNative} {
		t.Run(routingNames[routing], func(t *testing.T) {
			eachGuard(t, routing, func(t *testing.T, f *fabric) {
				second := f.a.newPod(t, 11)
				link, err := f.a.h.LinkByIndex(int(second.Ifindex))
				must(t, "find the device", err)
				must(t, "group of the device", f.a.h.LinkSetGroup(link, guardedPods))
				for i, vip := range asked {
					for at, to := range []*pod{f.b.pod, second} {
						vip := vip
						if at > 0 {
							vip = vip.Next()
						}
						leads(t, f.a.ns, vip, to.Addrs()[i])
						for _, c := range cuts {
							f.a.sendFromPod(t, c.datagram(f.a.pod.Addrs()[i], vip, 77+c.port))
							tuple := conntrack.Tuple{
								Initiator: netip.AddrPortFrom(f.a.pod.Addrs()[i], c.port),
								Responder: netip.AddrPortFrom(to.Addrs()[i], 53), Protocol: unix.IPPROTO_UDP,
							}
							servicetest.Eventually(t, fmt.Sprintf("an evaluation of %v, %s", tuple.Responder, c.name), func() bool {
								c, ok := f.a.k.tracked(t)[tuple]
								return ok && c.From.Identity == f.a.pod.Identity
							})
						}
						inNetns(t, f.a.ns, func() { removeTable(t, "leads") })
					}
				}
			})
		})
	}
}

// sendFromPod sends complete IP packets from a node's pod.
func (n *fabricNode) sendFromPod(t *testing.T, packets [][]byte) {
	t.Helper()
	inNetns(t, n.pod.ns, func() {
		for _, p := range packets {
			ethertype := uint16(etherIPv4)
			if p[0]>>4 == 6 {
				ethertype = etherIPv6
			}
			sendRaw(t, "eth0", frame(n.pod.HostMAC, n.pod.MAC, ethertype, p))
		}
	})
}

func removeTable(t *testing.T, name string) {
	conn, err := nftables.New()
	must(t, "nftables", err)
	tables, err := conn.ListTables()
	must(t, "list tables", err)
	for _, table := range tables {
		if table.Name == name {
			conn.DelTable(table)
		}
	}
	must(t, "delete the rules", conn.Flush())
}

// TestKernelHostProcessCannotSendAsAPod shows that a process of the node cannot send packets with the address of a
// pod and the mark of the pod's program.
func TestKernelHostProcessCannotSendAsAPod(t *testing.T) {
	for _, routing := range []Routing{RoutingOverlay, RoutingNative} {
		t.Run(routingNames[routing], func(t *testing.T) {
			eachGuard(t, routing, func(t *testing.T, f *fabric) {
				for i, src := range f.a.pod.Addrs() {
					before := f.a.counters(t)
					sent := uint64(0)
					for _, c := range cuts {
						packets := c.datagram(src, f.b.pod.Addrs()[i], 78)
						sendMarked(t, f.a.ns, f.b.pod.Addrs()[i], packets, markPod)
						sent += uint64(len(packets))
					}
					servicetest.Eventually(t, "drops", func() bool {
						gained := f.a.gained(t, before)
						return gained[cell{event.SpoofedIP, event.Egress}] > 0 &&
							gained[cell{event.ForwardedNative, event.Egress}] == 0 &&
							gained[cell{event.ForwardedOverlay, event.Egress}] == 0
					})
				}
				if all := f.b.k.tracked(t); len(all) > 0 {
					t.Errorf("node b took %v", all)
				}
			})
		})
	}
}

// sendMarked sends complete IP packets from a raw socket with a mark.
func sendMarked(t *testing.T, ns netns.NsHandle, to netip.Addr, packets [][]byte, mark int) {
	t.Helper()
	inNetns(t, ns, func() {
		family, addr := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Addr: [4]byte(to.AsSlice()[:4])})
		if to.Is6() {
			family, addr = unix.AF_INET6, &unix.SockaddrInet6{Addr: to.As16()}
		}
		fd, err := unix.Socket(family, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			t.Errorf("open a raw socket: %v", err)
			return
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
			t.Errorf("set the mark: %v", err)
		}
		for _, p := range packets {
			if err := unix.Sendto(fd, p, 0, addr); err != nil {
				t.Errorf("send: %v", err)
			}
		}
	})
}

// answered sends UDP requests of a size until a complete answer arrives, at most five times.
func answered(t *testing.T, ns netns.NsHandle, to netip.AddrPort, size int) bool {
	t.Helper()
	u, err := dialIn(t, ns, "udp", to)
	must(t, "open a socket", err)
	defer u.Close()
	sent, b := bytes.Repeat([]byte("fragment"), size/8), make([]byte, 65536)
	for range 5 {
		must(t, "deadline", u.SetDeadline(time.Now().Add(servicetest.Patience/20)))
		if _, err := u.Write(sent); err != nil {
			continue // the path MTU was not known yet
		}
		if n, err := u.Read(b); err == nil {
			if _, echoed, _ := strings.Cut(string(b[:n]), "\n"); echoed == string(sent) {
				return true
			}
		} else if !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, unix.EMSGSIZE) {
			t.Logf("to %v: %v", to, err)
		}
	}
	return false
}

// drops returns the drops of a node by the name of the reason.
func (n *fabricNode) drops(t *testing.T) map[string]uint64 {
	t.Helper()
	m := map[string]uint64{}
	for c, v := range n.counters(t) {
		if c.reason.Dropped() && !c.reason.Quiet() && v.Packets > 0 {
			m[c.reason.String()] += v.Packets
		}
	}
	return m
}

// TestKernelFragmentsTakeThePathOfTheFirst shows that a datagram arrives even if its first fragments are too
// large to bypass the stack and its last one is not. A stack that tracks connections waits for all of them.
func TestKernelFragmentsTakeThePathOfTheFirst(t *testing.T) {
	for _, tracked := range []bool{true, false} {
		for _, c := range []struct {
			name    string
			routing Routing
			under6  bool
		}{{"to a pod with a smaller MTU", RoutingNative, false}, {"by a narrow way", RoutingOverlay, true}} {
			t.Run(fmt.Sprintf("%s, tracked %t", c.name, tracked), func(t *testing.T) {
				f := newFabric(t, c.routing, c.under6)
				if tracked {
					trackConnections(t, f.a.ns)
					trackConnections(t, f.b.ns)
				}
				to, ns := []netip.Addr{f.b.addr4, f.b.addr6}, f.b.ns // 1,500 bytes; the pod that asks takes 1,450
				if c.routing == RoutingOverlay {
					to, ns = f.b.pod.Addrs(), f.b.pod.ns // 1,430 bytes; pods send 1,450
				}
				for _, a := range to {
					at := netip.AddrPortFrom(a, 8081)
					tell(t, ns, at)
					before, beforeB := f.a.counters(t), f.b.counters(t)
					if !answered(t, f.a.pod.ns, at, 5600) {
						t.Errorf("%v does not return 5,600 bytes: drops of a %v, of b %v",
							at, f.a.gained(t, before), f.b.gained(t, beforeB))
					}
				}
			})
		}
	}
}

// TestKernelLargeDatagramsAreAnswered shows that datagrams of four fragments are answered on every possible
// path, on nodes with and without connection tracking.
func TestKernelLargeDatagramsAreAnswered(t *testing.T) {
	for _, tracked := range []bool{true, false} {
		t.Run(fmt.Sprintf("tracked %t", tracked), func(t *testing.T) {
			eachUnderlay(t, func(t *testing.T, f *fabric, _ Routing) {
				n := &serviceNode{T: t, runner: f.a.runner}
				if tracked {
					trackConnections(t, f.a.ns)
					trackConnections(t, f.b.ns)
				}
				for i := range f.a.pod.Addrs() {
					local, away := netip.AddrPortFrom(f.a.pod.Addrs()[i], 8080), netip.AddrPortFrom(f.b.pod.Addrs()[i], 8080)
					host := netip.AddrPortFrom([]netip.Addr{f.b.addr4, f.b.addr6}[i], 8081)
					own, over := []netip.Addr{f.a.addr4, f.a.addr6}[i], []netip.Addr{f.a.over4, f.a.over6}[i]
					tell(t, f.a.pod.ns, local)
					tell(t, f.b.pod.ns, away)
					tell(t, f.b.ns, host)
					socket := netip.AddrPortFrom(own, 8082)
					tell(t, f.a.ns, socket)
					n.lead(netip.AddrPortFrom(own, 30080), feNode, local)
					n.lead(netip.AddrPortFrom(own, 30081), feNode, away)
					n.lead(netip.AddrPortFrom(own, 30082), feNode, host)
					n.lead(netip.AddrPortFrom(own, 30083), feNode, socket)
					ways := []struct {
						name string
						from netns.NsHandle
						to   netip.AddrPort
					}{
						{"pod to a pod elsewhere", f.a.pod.ns, away},
						{"outside to a pod", f.outsider, netip.AddrPortFrom(own, 30080)},
						{"outside to a pod elsewhere", f.outsider, netip.AddrPortFrom(own, 30081)},
						{"outside to a host elsewhere", f.outsider, netip.AddrPortFrom(own, 30082)},
						{"pod of the other node to a node port", f.b.pod.ns, netip.AddrPortFrom(over, 30080)},
						{"pod of the other node to a socket by a node port", f.b.pod.ns, netip.AddrPortFrom(over, 30083)},
						{"pod of the other node to itself by a node port", f.b.pod.ns, netip.AddrPortFrom(over, 30081)},
						// last: node b learns a smaller path MTU to a, which then
						// applies to the tunnel, too
						{"host of the other node to a node port", f.b.ns, netip.AddrPortFrom(own, 30080)},
					}
					for _, w := range ways {
						if !answered(t, w.from, w.to, 64) {
							t.Errorf("%v, %s: 64 bytes are not answered: a %v, b %v", own, w.name, f.a.drops(t), f.b.drops(t))
						}
						before, beforeB := f.a.counters(t), f.b.counters(t)
						if !answered(t, w.from, w.to, 5600) {
							t.Errorf("%v, %s: 5,600 bytes are not answered: a %v, b %v",
								own, w.name, f.a.gained(t, before), f.b.gained(t, beforeB))
						}
					}
				}
			})
		})
	}
}

// TestKernelFragmentsKeepTheirMarkDuringRepairs shows that every fragment that the stack copies into the tunnel
// has a mark while the firewall rules are repaired, even if another component has changed the rules. After the
// rules were removed, fragments have no mark, and the receiving node does not attribute them to the sending node.
func TestKernelFragmentsKeepTheirMarkDuringRepairs(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	trackConnections(t, f.a.ns)
	g := f.a.guarded(t, f.b)
	setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
	var record func() map[seen]uint64
	inNetns(t, f.a.ns, func() { record = recorder(t, uint32(f.a.tunnel.Attrs().Index)) })
	f.routeFromOutside(t, f.b.pod.IPv6, f.a)
	copied := func() (all, unmarked uint64) {
		for s, n := range record() {
			if s.Ingress == 0 {
				all += n
				if s.Mark&markMask == 0 {
					unmarked += n
				}
			}
		}
		return all, unmarked
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for id := uint16(1); ; id++ {
			select {
			case <-stop:
				return
			default:
				f.fromOutside(t, f.a, cuts[2].datagram(f.a.addr6, f.b.pod.IPv6, id)...)
			}
		}
	}()
	servicetest.Eventually(t, "copied fragments", func() bool { all, _ := copied(); return all > 0 })
	at, _ := copied()
	for i := range 200 {
		if i%4 == 0 {
			inNetns(t, f.a.ns, func() { addRule(t, g.Name(), "forwarded") })
		}
		must(t, "repair", g.Repair())
	}
	servicetest.Eventually(t, "copied fragments during repairs", func() bool { all, _ := copied(); return all > at+100 })
	if all, unmarked := copied(); unmarked > 0 {
		t.Errorf("%d of %d fragments had no mark", unmarked, all)
	}
	must(t, "remove the firewall", g.Remove())
	servicetest.Eventually(t, "fragments without a mark", func() bool { _, unmarked := copied(); return unmarked > 0 })
	close(stop)
	<-ended
	if from := f.b.from(t, f.a.addr6, cuts[2].port); from == identity.RemoteNode {
		t.Errorf("without a firewall, fragments without a mark are attributed to node a")
	}
}

// addRule adds a rule without effect to a chain.
func addRule(t *testing.T, table, chain string) {
	conn, err := nftables.New()
	must(t, "nftables", err)
	inet := &nftables.Table{Name: table, Family: nftables.TableFamilyINet}
	conn.AddRule(&nftables.Rule{
		Table: inet, Chain: &nftables.Chain{Name: chain, Table: inet}, Exprs: []expr.Any{&expr.Counter{}},
	})
	must(t, "add a rule", conn.Flush())
}

// TestKernelFragmentsPastTheTunnelAreDropped shows that copied fragments with the address of another node's pod
// only reach a pod if they came through the tunnel.
func TestKernelFragmentsPastTheTunnelAreDropped(t *testing.T) {
	eachGuard(t, RoutingOverlay, func(t *testing.T, f *fabric) {
		setPolicy(t, f.a.k, f.a.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
		for i, src := range f.b.pod.Addrs() {
			f.routeFromOutside(t, f.a.pod.Addrs()[i], f.a)
			for _, c := range cuts {
				f.fromOutside(t, f.a, c.datagram(src, f.a.pod.Addrs()[i], 79)...)
			}
			// when the last packet arrives, those before it must have been dropped
			f.fromOutside(t, f.a, cuts[0].datagram(f.outsideAddrs()[i], f.a.pod.Addrs()[i], 80)...)
			f.a.from(t, f.outsideAddrs()[i], cuts[0].port)
		}
		for tuple := range f.a.k.tracked(t) {
			if slices.Contains(f.b.pod.Addrs(), tuple.Initiator.Addr()) {
				t.Errorf("node a took %v from outside", tuple)
			}
		}
	})
}

// TestKernelResetsOfANodeHaveItsIdentity shows that a pod that may only receive answers gets the RST for a closed
// port of its node, and of the other node: the kernel sends IPv6 resets without a socket.
func TestKernelResetsOfANodeHaveItsIdentity(t *testing.T) {
	for _, routing := range []Routing{RoutingOverlay, RoutingNative} {
		t.Run(routingNames[routing], func(t *testing.T) {
			eachGuard(t, routing, func(t *testing.T, f *fabric) {
				setPolicy(t, f.a.k, f.a.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
				for _, host := range []netip.Addr{f.a.over4, f.a.over6, f.b.over4, f.b.over6} {
					if _, err := dialIn(t, f.a.pod.ns, "tcp", netip.AddrPortFrom(host, 9)); !errors.Is(err, unix.ECONNREFUSED) {
						t.Errorf("a closed port of %v: %v, want %v", host, err, unix.ECONNREFUSED)
					}
				}
			})
		})
	}
}
