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

// trackConnections has the stack of a namespace track connections, and so put fragments
// together and cut packets anew.
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

// guarded gives the node the firewall that a datapath has.
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
	f := firewall.Fabric{
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
	g.SetFabric(f)
	must(t, "make the firewall", g.Repair())
	return g
}

// eachGuard runs a test on a fabric whose nodes track connections, without the firewall
// of the datapath and with it.
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

// A cut is how a datagram is sent.
type cut struct {
	name    string
	size    int // of the datagram, bytes
	options int // of destination options in the first fragment, IPv6; -1: whole
	port    uint16
}

// cuts of which the stack copies the last one's fragments wherever they leave.
var cuts = []cut{
	{"whole", 100, -1, 4000},
	{"in fragments", 3400, 0, 4001},
	{"in fragments of which the first has options", 3400, 128, 4002},
}

// datagram is a UDP packet from the cut's port to port 53, as it is sent.
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

// from is the identity that a node's pod has seen as the sender of a datagram to port 53,
// when that has arrived.
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

// TestKernelForwardedFragmentsInTheTunnelAreTheWorlds shows that a packet from outside
// which node a forwards into the tunnel under its own address is the world's at node b:
// whole, in fragments, and in fragments that the stack of a has copied, without a device
// of arrival. Rules of others have given it the address, or it came under it.
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
		// IPv4 takes nothing from outside under an address of the node.
		for _, c := range cuts {
			f.fromOutside(t, f.a, c.datagram(f.a.addr6, f.b.pod.IPv6, 77+c.port)...)
			f.wantWorld(t, f.a.addr6, c)
		}
	})
}

// wantWorld wants a datagram to be the world's at node b.
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

// TestKernelFragmentsOfAHostsSocketAreTheHosts shows that what a socket of a node sends
// is the node's at a pod of another one and at its own, in fragments too.
func TestKernelFragmentsOfAHostsSocketAreTheHosts(t *testing.T) {
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

// sendFrom sends a datagram by a socket with a mark.
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

// leads has the stack of a node translate the destination of what comes for one address.
func leads(t *testing.T, ns netns.NsHandle, from, to netip.Addr) {
	t.Helper()
	translate(t, ns, from, to, expr.NATTypeDestNAT)
}

// translates has the stack of a node translate the source of what it forwards from one
// address.
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

// TestKernelTranslatedFragmentsOfAPodAreEvaluatedBehindTheStack shows that a pod's packet
// that rules of others have led to a pod of another node, or of this one, is evaluated as
// one to that pod: whole, in fragments, and in fragments that the stack has copied.
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

// sendFromPod sends packets with their headers from a node's pod.
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

// TestKernelMarkOfAPodIsNobodyElses shows that a process of the node that sends under the
// address of a pod, with the mark that the pod's program gives, gets no packet out.
func TestKernelMarkOfAPodIsNobodyElses(t *testing.T) {
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

// sendMarked sends packets with their headers by a raw socket with a mark.
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

// answered asks by UDP with so many bytes until the answer comes whole, at most five times.
func answered(t *testing.T, ns netns.NsHandle, to netip.AddrPort, size int) bool {
	t.Helper()
	u, err := dialIn(t, ns, "udp", to)
	must(t, "open a socket", err)
	defer u.Close()
	sent, b := bytes.Repeat([]byte("fragment"), size/8), make([]byte, 65536)
	for range 5 {
		must(t, "deadline", u.SetDeadline(time.Now().Add(servicetest.Patience/20)))
		if _, err := u.Write(sent); err != nil {
			continue // the MTU of the path was not known yet
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

// drops are the drops of a node by their names.
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

// TestKernelFragmentsTakeThePathOfTheFirst shows that a datagram arrives whose first
// fragments are too large for the way past the stack, and whose last one is not: where
// the stack tracks connections, it waits for all of them.
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
						t.Errorf("%v is asked, and 5,600 bytes do not come back: a %v, b %v",
							at, f.a.gained(t, before), f.b.gained(t, beforeB))
					}
				}
			})
		}
	}
}

// TestKernelLargeDatagramsAreAnswered shows that datagrams of four fragments are answered
// on each path that one can take, where nodes track connections and where they do not.
func TestKernelLargeDatagramsAreAnswered(t *testing.T) {
	for _, tracked := range []bool{true, false} {
		t.Run(fmt.Sprintf("tracked %t", tracked), func(t *testing.T) {
			eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
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
					n.lead(netip.AddrPortFrom(own, 30080), feNode, local)
					n.lead(netip.AddrPortFrom(own, 30081), feNode, away)
					n.lead(netip.AddrPortFrom(own, 30082), feNode, host)
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
						// last: node b learns that the path to a is narrow, which is the tunnel's, too
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

// TestKernelRepairKeepsTheMarksOfFragments shows that no fragment that the stack copies
// into the tunnel lacks a mark while the firewall is repaired, also after another has
// changed it, and that none is taken for the node's when another has removed it.
func TestKernelRepairKeepsTheMarksOfFragments(t *testing.T) {
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
		t.Errorf("without a firewall they are node a's")
	}
}

// addRule puts a rule into a chain that changes nothing.
func addRule(t *testing.T, table, chain string) {
	conn, err := nftables.New()
	must(t, "nftables", err)
	inet := &nftables.Table{Name: table, Family: nftables.TableFamilyINet}
	conn.AddRule(&nftables.Rule{
		Table: inet, Chain: &nftables.Chain{Name: chain, Table: inet}, Exprs: []expr.Any{&expr.Counter{}},
	})
	must(t, "add a rule", conn.Flush())
}

// TestKernelFragmentsPastTheTunnelAreDropped shows that copied fragments under the address
// of another node's pod enter a pod only if they have come by the tunnel.
func TestKernelFragmentsPastTheTunnelAreDropped(t *testing.T) {
	eachGuard(t, RoutingOverlay, func(t *testing.T, f *fabric) {
		setPolicy(t, f.a.k, f.a.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
		for i, src := range f.b.pod.Addrs() {
			f.routeFromOutside(t, f.a.pod.Addrs()[i], f.a)
			for _, c := range cuts {
				f.fromOutside(t, f.a, c.datagram(src, f.a.pod.Addrs()[i], 79)...)
			}
			// the last packet that arrives shows that those before it were dropped
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

// TestKernelResetsOfTheHostAreTheHosts shows that a pod which may receive nothing but
// answers learns of a closed port of its node, and of the other one: the kernel sends
// resets of IPv6 without a socket.
func TestKernelResetsOfTheHostAreTheHosts(t *testing.T) {
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
