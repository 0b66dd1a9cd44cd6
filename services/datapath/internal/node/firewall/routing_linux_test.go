// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

const (
	podGroup    = 0x510
	dyingGroup  = 0x511
	tunnelGroup = 0x520
	tunnelPort  = 4789

	// Packets to the second of these ports get a mark before the firewall sees them.
	plainPort  = 7000
	markedPort = 7001
)

// routingWorld is a node with two namespaces that send arbitrary packets to it.
type routingWorld struct {
	t               *testing.T
	home            *netns.Namespace
	outside, inside *netns.Namespace
	at              map[string]*netns.Namespace // namespace of the other end of a device
	listen          map[uint16]net.PacketConn   // sockets of the node, by port
	guard           *Table
	sent            int
}

// Addresses by family: 0 is IPv4.
var (
	nodeAddrs = []string{"192.0.2.1", "2001:db8::1"}
	sources   = map[string][]string{
		"world":   {"198.51.100.7", "2001:db8:ff::7"},
		"own":     {"10.1.0.9", "fd00:1::9"},
		"overlay": {"10.1.0.2", "fd00:1::2"}, // the node itself
		"other":   {"10.2.0.9", "fd00:2::9"},
		"node":    nodeAddrs,
	}
)

func addrOf(kind string, family int) netip.Addr { return netip.MustParseAddr(sources[kind][family]) }

func newRoutingWorld(t *testing.T) *routingWorld {
	w := &routingWorld{
		t: t, home: netnstest.New(t), outside: netnstest.New(t), inside: netnstest.New(t),
		at: map[string]*netns.Namespace{}, listen: map[uint16]net.PacketConn{},
	}
	w.at["lo"] = w.home
	w.in(w.home, func() error {
		err := errors.Join(sysctl("ipv4/conf/all/rp_filter", "0"), sysctl("ipv4/conf/default/rp_filter", "0"),
			sysctl("ipv4/ip_forward", "1"))
		for _, kind := range []string{"node", "overlay"} {
			err = errors.Join(err, addAddrs("lo", sources[kind]...))
		}
		for _, port := range []uint16{plainPort, markedPort} {
			c, e := net.ListenPacket("udp", fmt.Sprintf(":%d", port))
			if e != nil {
				return e
			}
			t.Cleanup(func() { c.Close() })
			w.listen[port] = c
		}
		return err
	})
	for _, ns := range []*netns.Namespace{w.outside, w.inside} {
		w.in(ns, func() (err error) {
			for _, kind := range []string{"world", "own", "other"} {
				err = errors.Join(err, addAddrs("lo", sources[kind]...))
			}
			return err
		})
	}
	for i, d := range []struct {
		name  string
		at    *netns.Namespace
		group uint32
	}{
		{"up0", w.outside, 0}, {"pod0", w.inside, podGroup}, {"old0", w.inside, dyingGroup}, {"tun0", w.inside, tunnelGroup},
	} {
		w.device(i, d.name, d.at, d.group)
	}
	w.markPort()
	w.guard = New(w.home, "test", []uint32{podGroup, dyingGroup}, testMarks)
	return w
}

func (w *routingWorld) in(ns *netns.Namespace, fn func() error) {
	w.t.Helper()
	if err := ns.Do(fn); err != nil {
		w.t.Fatal(err)
	}
}

func sysctl(name, value string) error {
	return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0)
}

func addAddrs(device string, addrs ...string) error {
	link, err := netlink.LinkByName(device)
	for _, a := range addrs {
		ip := netip.MustParseAddr(a)
		mask := net.CIDRMask(ip.BitLen(), ip.BitLen())
		err = errors.Join(err, netlink.AddrAdd(link, &netlink.Addr{
			IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: mask}, Flags: unix.IFA_F_NODAD,
		}))
	}
	return err
}

// device connects the node by a pair of devices with the same name. The other end has a route to the node through it,
// and a static neighbour entry.
func (w *routingWorld) device(number int, name string, at *netns.Namespace, group uint32) {
	w.t.Helper()
	mac := func(end int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, byte(end), byte(number)} }
	up := func(group uint32, mac net.HardwareAddr) (netlink.Link, error) {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return nil, err
		}
		// no link-local address, or the kernel would send packets on its own
		return link, errors.Join(sysctl("ipv6/conf/"+name+"/addr_gen_mode", "1"), netlink.LinkSetGroup(link, int(group)),
			netlink.LinkSetHardwareAddr(link, mac), netlink.LinkSetUp(link))
	}
	w.in(w.home, func() error {
		err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name, PeerNamespace: netlink.NsFd(at.Fd()),
		})
		if err == nil {
			_, err = up(group, mac(0))
		}
		return err
	})
	w.in(at, func() error {
		link, err := up(0, mac(1))
		if err != nil {
			return err
		}
		for _, a := range nodeAddrs {
			err = errors.Join(err, leadTo(link, netip.MustParseAddr(a), mac(0), 10+number))
		}
		return err
	})
	w.at[name] = at
}

// leadTo creates a route to an address through a device.
func leadTo(link netlink.Link, to netip.Addr, mac net.HardwareAddr, metric int) error {
	dst := &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(to.BitLen(), to.BitLen())}
	index := link.Attrs().Index
	return errors.Join(
		netlink.RouteAdd(&netlink.Route{LinkIndex: index, Dst: dst, Priority: metric, Scope: netlink.SCOPE_LINK}),
		netlink.NeighSet(&netlink.Neigh{
			LinkIndex: index, IP: to.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
		}))
}

// markPort marks packets to a port before the firewall sees them, as a program on the device would.
func (w *routingWorld) markPort() {
	w.t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(w.home.Fd()))
	if err != nil {
		w.t.Fatal(err)
	}
	table := c.AddTable(&nftables.Table{Name: "programs", Family: nftables.TableFamilyINet})
	chain := c.AddChain(&nftables.Chain{
		Name: "mark", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityRef(*nftables.ChainPriorityRaw - 10),
	})
	mark := func(conditions ...expr.Any) {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(conditions,
			&expr.Immediate{Register: 1, Data: native(0x200)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1})})
	}
	toPort := func(port uint16) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
		}
	}
	mark(toPort(markedPort)...)
	mark(append(toPort(tunnelPort), // only from a pod
		&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(podGroup)})...)
	if err := c.Flush(); err != nil {
		w.t.Fatal(err)
	}
}

// from opens a socket that sends through a device with a source address.
func (w *routingWorld) from(device string, source netip.Addr) net.PacketConn {
	w.t.Helper()
	var c net.PacketConn
	w.in(w.at[device], func() (err error) {
		lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
			var bound error
			err := raw.Control(func(fd uintptr) { bound = unix.BindToDevice(int(fd), device) })
			return errors.Join(err, bound)
		}}
		c, err = lc.ListenPacket(w.t.Context(), "udp", netip.AddrPortFrom(source, 0).String())
		return err
	})
	w.t.Cleanup(func() { c.Close() })
	return c
}

// send sends a unique text to the node.
func (w *routingWorld) send(device string, source netip.Addr, family int, port uint16) (text string) {
	w.t.Helper()
	w.sent++
	text = fmt.Sprintf("%d: by %s from %v", w.sent, device, source)
	c := w.from(device, source)
	defer c.Close()
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(nodeAddrs[family]), port))
	if _, err := c.WriteTo([]byte(text), to); err != nil {
		w.t.Fatalf("send %q: %v", text, err)
	}
	return text
}

// received returns the next text that the node receives on a port.
func (w *routingWorld) received(port uint16) string {
	w.t.Helper()
	c := w.listen[port]
	if err := c.SetReadDeadline(time.Now().Add(servicetest.Patience)); err != nil {
		w.t.Fatal(err)
	}
	buf := make([]byte, 200)
	n, _, err := c.ReadFrom(buf)
	if err != nil {
		return err.Error()
	}
	return string(buf[:n])
}

// drops returns how many packets each rule has dropped, by the group or the set that the rule matches.
func (w *routingWorld) drops() map[string]uint64 {
	w.t.Helper()
	drops := map[string]uint64{}
	err := w.guard.conn(func(c *nftables.Conn) error {
		table := &nftables.Table{Name: w.guard.name, Family: nftables.TableFamilyINet}
		for _, chain := range []string{chainName, foreignName} {
			rules, err := c.GetRules(table, &nftables.Chain{Name: chain, Table: table})
			if err != nil {
				return err
			}
			for _, r := range rules {
				name, packets, drop := "", uint64(0), false
				for _, e := range r.Exprs {
					switch e := e.(type) {
					case *expr.Lookup:
						name = e.SetName
					case *expr.Cmp:
						if name == "" {
							name = fmt.Sprintf("group %#x", binary.NativeEndian.Uint32(append(e.Data, 0, 0, 0)))
						}
					case *expr.Counter:
						packets = e.Packets
					case *expr.Verdict:
						drop = e.Kind == expr.VerdictDrop
					}
				}
				if drop {
					drops[name] += packets
				}
			}
		}
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return drops
}

func (w *routingWorld) routing(nativeRouting bool) Routing {
	return Routing{
		Native: nativeRouting, TunnelGroup: tunnelGroup, TunnelPort: tunnelPort,
		Own:    func() []netip.Prefix { return prefixes("10.1.0.0/24", "fd00:1::/64") },
		Others: prefixes("10.2.0.0/24", "fd00:2::/64", "10.3.0.0/24"),
		Nodes:  []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")},
	}
}

// TestKernelRoutingDropsForgedSourcesAndNothingElse sends with every kind of source through every kind of device, with
// and without a mark.
func TestKernelRoutingDropsForgedSourcesAndNothingElse(t *testing.T) {
	const pod, dying, tunnel = "group 0x510", "group 0x511", "group 0x520"
	type verdicts [2]string // rule that drops packets without and with a mark; "": none
	w := newRoutingWorld(t)
	var rows []struct {
		device, source  string
		overlay, native verdicts
	}
	row := func(device, source string, overlay, native verdicts) {
		rows = append(rows, struct {
			device, source  string
			overlay, native verdicts
		}{device, source, overlay, native})
	}
	row("up0", "world", verdicts{}, verdicts{})
	row("up0", "own", verdicts{ownSet, ownSet}, verdicts{ownSet, ownSet})
	row("up0", "other", verdicts{othersSet, othersSet}, verdicts{othersSet, ""})
	row("tun0", "world", verdicts{tunnel, ""}, verdicts{})
	row("tun0", "own", verdicts{tunnel, ""}, verdicts{ownSet, ownSet})
	row("tun0", "other", verdicts{tunnel, ""}, verdicts{othersSet, ""})
	for _, source := range []string{"world", "own", "other"} {
		row("pod0", source, verdicts{pod, ""}, verdicts{pod, ""})
		row("old0", source, verdicts{dying, ""}, verdicts{dying, ""})
	}
	row("lo", "overlay", verdicts{}, verdicts{})
	row("lo", "node", verdicts{}, verdicts{})

	for _, mode := range []string{"no table", "overlay", "native"} {
		if mode != "no table" {
			w.guard.SetRouting(w.routing(mode == "native"))
			if err := w.guard.Repair(); err != nil {
				t.Fatal(err)
			}
			if diffs, err := w.guard.Check(); err != nil || len(diffs) > 0 {
				t.Fatalf("%s: %+v, %v", mode, diffs, err)
			}
		}
		for _, r := range rows {
			for family, n := range []string{"4", "6"} {
				for marked, port := range []uint16{plainPort, markedPort} {
					want := map[string]verdicts{"overlay": r.overlay, "native": r.native}[mode][marked]
					if want == ownSet || want == othersSet {
						want += n
					}
					w.check(fmt.Sprintf("%s, mark %d", mode, marked), r.device, addrOf(r.source, family), family, port, want)
				}
			}
		}
	}
}

// check fails unless exactly the named rule drops a packet.
func (w *routingWorld) check(what, device string, source netip.Addr, family int, port uint16, rule string) {
	w.t.Helper()
	if rule == "" {
		text := w.send(device, source, family, port)
		if got := w.received(port); got != text {
			w.t.Errorf("%s: the node received %q, want %q", what, got, text)
		}
		return
	}
	before := w.drops()
	text := w.send(device, source, family, port)
	servicetest.EventuallyNil(w.t, what+": "+text, func() error {
		for name, n := range w.drops() {
			if n != before[name] && name != rule || n != before[name]+1 && name == rule {
				return fmt.Errorf("rule %s dropped %d packets", name, n-before[name])
			}
		}
		return nil
	})
	// A packet that was not dropped would arrive before this one.
	text = w.send("up0", addrOf("world", family), family, port)
	if got := w.received(port); got != text {
		w.t.Errorf("%s: the node received %q, want %q", what, got, text)
	}
}

// tracked returns the number of tracked UDP connections of the node to a port.
func (w *routingWorld) tracked(port uint16) (n int) {
	w.t.Helper()
	w.in(w.home, func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return err
			}
			for _, f := range flows {
				if f.Forward.Protocol == unix.IPPROTO_UDP && f.Forward.DstPort == port {
					n++
				}
			}
		}
		return nil
	})
	return n
}

// tunnel creates one end of a tunnel through up0 in a namespace, with an inner address.
func (w *routingWorld) tunnel(ns *netns.Namespace, id int, local, remote, inner string) {
	w.t.Helper()
	w.in(ns, func() error {
		up, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		name := fmt.Sprintf("vx%d", id)
		vx := &netlink.Vxlan{
			LinkAttrs: netlink.LinkAttrs{Name: name}, VxlanId: id, Port: tunnelPort, VtepDevIndex: up.Attrs().Index,
			SrcAddr: net.ParseIP(local), Group: net.ParseIP(remote), Learning: true,
		}
		if err := netlink.LinkAdd(vx); err != nil {
			return err
		}
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		address, err := netlink.ParseAddr(inner)
		return errors.Join(err, netlink.AddrAdd(link, address), netlink.LinkSetUp(link))
	})
}

// answer makes a namespace echo packets to an address and port.
func (w *routingWorld) answer(ns *netns.Namespace, at string) {
	w.t.Helper()
	var c net.PacketConn
	w.in(ns, func() (err error) {
		c, err = net.ListenPacket("udp", at)
		return err
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for buf := make([]byte, 100); ; {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(buf[:n], from) // the client asks again
		}
	}()
	w.t.Cleanup(func() {
		c.Close()
		<-done
	})
}

// ask sends to an echo until it gets an answer, which proves both directions.
func (w *routingWorld) ask(c net.PacketConn, to string) {
	w.t.Helper()
	servicetest.EventuallyNil(w.t, "an answer of "+to, func() error {
		if _, err := c.WriteTo([]byte("?"), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			return err
		}
		_, _, err := c.ReadFrom(make([]byte, 100))
		return err
	})
}

// underlay adds addresses to both ends of up0.
func (w *routingWorld) underlay() {
	w.t.Helper()
	for i, ns := range []*netns.Namespace{w.home, w.outside} {
		w.in(ns, func() error {
			link, err := netlink.LinkByName("up0")
			for _, a := range []string{fmt.Sprintf("203.0.113.%d/24", i+1), fmt.Sprintf("2001:db8:1::%d/64", i+1)} {
				addr, e := netlink.ParseAddr(a)
				addr.Flags = unix.IFA_F_NODAD
				err = errors.Join(err, e, netlink.AddrAdd(link, addr))
			}
			return err
		})
	}
}

func (w *routingWorld) masquerade() {
	w.guard.SetMasquerade(Masquerade{
		Mark: 0x200, Own: func() []netip.Prefix { return prefixes("10.1.0.0/24", "fd00:1::/64") },
	})
}

// TestKernelTunnelIsNotTracked sends through tunnels over both families, with both ends using the tunnel port. Inner
// packets are still tracked.
func TestKernelTunnelIsNotTracked(t *testing.T) {
	w := newRoutingWorld(t)
	w.underlay()
	w.tunnel(w.home, 300, "203.0.113.1", "203.0.113.2", "172.16.4.1/24")
	w.tunnel(w.outside, 300, "203.0.113.2", "203.0.113.1", "172.16.4.2/24")
	w.tunnel(w.home, 600, "2001:db8:1::1", "2001:db8:1::2", "172.16.6.1/24")
	w.tunnel(w.outside, 600, "2001:db8:1::2", "2001:db8:1::1", "172.16.6.2/24")
	w.answer(w.outside, "172.16.4.2:7400")
	w.answer(w.outside, "172.16.6.2:7600")
	exchange := func(when string, tunnel bool) {
		t.Helper()
		w.in(w.home, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
		for _, c := range []struct {
			at   string
			port uint16
		}{{"172.16.4.1:0", 7400}, {"172.16.6.1:0", 7600}} {
			var s net.PacketConn
			w.in(w.home, func() (err error) {
				s, err = net.ListenPacket("udp", c.at)
				return err
			})
			defer s.Close()
			w.ask(s, fmt.Sprintf("172.16.%d.2:%d", c.port/100%10, c.port))
			if n := w.tracked(c.port); n != 1 {
				t.Errorf("%s: %d entries for inner packets, want 1", when, n)
			}
		}
		if n := w.tracked(tunnelPort); (n >= 4) != tunnel || n > 0 && !tunnel {
			t.Errorf("%s: %d entries for outer packets", when, n)
		}
	}
	w.masquerade() // enables connection tracking
	if err := w.guard.Repair(); err != nil {
		t.Fatal(err)
	}
	exchange("without routing", true)
	w.guard.SetRouting(w.routing(false))
	if err := w.guard.Repair(); err != nil {
		t.Fatal(err)
	}
	exchange("with an overlay", false)
	w.guard.SetRouting(w.routing(true))
	if err := w.guard.Repair(); err != nil {
		t.Fatal(err)
	}
	exchange("native", true)
}

// TestKernelMasqueradeWithRouting sends packets from pods and checks the source that external hosts see. Packets from
// pods to the tunnel port are dropped for every destination, because the destination may be a node.
func TestKernelMasqueradeWithRouting(t *testing.T) {
	w := newRoutingWorld(t)
	w.underlay()
	pod, node := addrOf("own", 0), netip.MustParseAddr("203.0.113.1")
	// of another node, of a pod there, and external
	others := []string{"192.0.2.2", "10.2.0.7", "198.18.0.7"}
	w.in(w.outside, func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		dst := &net.IPNet{IP: pod.AsSlice(), Mask: net.CIDRMask(32, 32)}
		lo, err := netlink.LinkByName("lo")
		return errors.Join(err, addAddrs("lo", others...),
			netlink.AddrDel(lo, &netlink.Addr{IPNet: dst}),
			netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Gw: net.ParseIP("203.0.113.1")}))
	})
	w.in(w.home, func() error {
		up, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		for _, a := range others {
			dst := &net.IPNet{IP: net.ParseIP(a), Mask: net.CIDRMask(32, 32)}
			err = errors.Join(err, netlink.RouteAdd(&netlink.Route{
				LinkIndex: up.Attrs().Index, Dst: dst, Gw: net.ParseIP("203.0.113.2"),
			}))
		}
		link, err2 := netlink.LinkByName("pod0")
		if err = errors.Join(err, err2); err != nil {
			return err
		}
		return leadTo(link, pod, net.HardwareAddr{2, 0, 0, 0, 1, 1}, 0)
	})
	w.in(w.inside, func() error {
		link, err := netlink.LinkByName("pod0")
		if err != nil {
			return err
		}
		for _, a := range others {
			err = errors.Join(err, leadTo(link, netip.MustParseAddr(a), net.HardwareAddr{2, 0, 0, 0, 0, 1}, 0))
		}
		return err
	})
	w.masquerade()
	for _, c := range []struct {
		name   string
		native bool
		want   []netip.Addr
	}{{"overlay", false, []netip.Addr{node, pod, node}}, {"native", true, []netip.Addr{pod, pod, node}}} {
		w.guard.SetRouting(w.routing(c.native))
		if err := w.guard.Repair(); err != nil {
			t.Fatal(err)
		}
		for i, a := range others {
			for _, port := range []int{markedPort, tunnelPort} {
				at := fmt.Sprintf("%s:%d", a, port)
				if !c.native && port == tunnelPort {
					w.barred(a)
					continue
				}
				if seen := w.seen(w.from("pod0", pod), at); seen != c.want[i] {
					t.Errorf("%s, to %s: seen as %v, want %v", c.name, at, seen, c.want[i])
				}
			}
		}
	}
}

// barred fails unless a packet from a pod to the tunnel port of an address is dropped.
func (w *routingWorld) barred(address string) {
	w.t.Helper()
	const rule = "group 0x510"
	before := w.drops()[rule]
	at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(address), tunnelPort))
	if _, err := w.from("pod0", addrOf("own", 0)).WriteTo([]byte("?"), at); err != nil {
		w.t.Fatal(err)
	}
	servicetest.EventuallyNil(w.t, "a pod to the tunnel's port of "+address, func() error {
		if n := w.drops()[rule] - before; n != 1 {
			return fmt.Errorf("%d packets were dropped, want 1", n)
		}
		return nil
	})
}

// seen returns the source of a packet as the external host sees it.
func (w *routingWorld) seen(from net.PacketConn, at string) netip.Addr {
	w.t.Helper()
	var there net.PacketConn
	w.in(w.outside, func() (err error) {
		there, err = net.ListenPacket("udp", at)
		return err
	})
	defer there.Close()
	_, err := from.WriteTo([]byte("?"), there.LocalAddr())
	if err == nil {
		err = there.SetReadDeadline(time.Now().Add(servicetest.Patience))
	}
	if err != nil {
		w.t.Fatal(err)
	}
	_, source, err := there.ReadFrom(make([]byte, 100))
	if err != nil {
		w.t.Errorf("to %s: %v", at, err)
		return netip.Addr{}
	}
	return source.(*net.UDPAddr).AddrPort().Addr()
}

// TestKernelAnyOtherRoutingIsSeenAndRepaired changes each part of the table externally.
func TestKernelAnyOtherRoutingIsSeenAndRepaired(t *testing.T) {
	w := &routingWorld{t: t}
	for _, mode := range []string{"overlay", "overlay, tracked", "native"} {
		guard := New(netnstest.New(t), "test", []uint32{podGroup, dyingGroup}, testMarks)
		guard.SetRouting(w.routing(mode == "native"))
		guard.set.tracked = mode == "overlay, tracked"
		clean := func(when string) {
			t.Helper()
			if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
				t.Fatalf("%s, %s: %+v, %v", mode, when, diffs, err)
			}
		}
		if err := guard.Repair(); err != nil {
			t.Fatal(err)
		}
		clean("after the first repair")
		if err := guard.forge(0, nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		clean("the same table, written by the test")
		seen := func(what string, change func(*nftables.Conn, *nftables.Table)) {
			t.Helper()
			err := guard.conn(func(c *nftables.Conn) error {
				change(c, &nftables.Table{Name: guard.name, Family: nftables.TableFamilyINet})
				return c.Flush()
			})
			if err != nil {
				t.Fatalf("%s, %s: make it: %v", mode, what, err)
			}
			if diffs, err := guard.Check(); err != nil || len(diffs) != 1 || diffs[0].Have == "" {
				t.Errorf("%s, %s: not seen: %+v, %v", mode, what, diffs, err)
			}
			if err := guard.Repair(); err != nil {
				t.Fatal(err)
			}
			clean("after the repair of " + what)
		}
		everyPart(t, guard, seen)
	}
}

// everyPart removes each rule, chain and set element from a table, and adds one of each kind.
func everyPart(t *testing.T, guard *Table, seen func(string, func(*nftables.Conn, *nftables.Table))) {
	t.Helper()
	s := guard.settings()
	table := &nftables.Table{Name: guard.name, Family: nftables.TableFamilyINet}
	rules := 0
	for _, wall := range guard.walls(s, table) {
		name := wall.chain.Name
		for i := range wall.rules {
			rules++
			seen(fmt.Sprintf("chain %s without rule %d", name, i), func(c *nftables.Conn, table *nftables.Table) {
				have, err := c.GetRules(table, &nftables.Chain{Name: name, Table: table})
				if err == nil {
					err = c.DelRule(have[i])
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		seen("chain "+name+" that lets all pass", func(c *nftables.Conn, table *nftables.Table) {
			c.InsertRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Name: name, Table: table}, Exprs: []expr.Any{
				&expr.Verdict{Kind: expr.VerdictAccept},
			}})
		})
	}
	want := 15
	switch {
	case s.routing.Native:
		want = 11
	case s.tracked:
		want = 17
	}
	if rules != want {
		t.Errorf("%d rules were tried, want %d", rules, want)
	}
	if s.tracked {
		seen("no chain "+tunnelName, func(c *nftables.Conn, table *nftables.Table) {
			chain := &nftables.Chain{Name: tunnelName, Table: table}
			c.FlushChain(chain)
			c.DelChain(chain)
		})
	}
	for _, set := range s.sets() {
		kind := nftables.TypeIPAddr
		one := span{netip.MustParseAddr("100.64.0.0"), netip.MustParseAddr("100.64.1.0")}
		if set.bits == 128 {
			kind, one = nftables.TypeIP6Addr, span{netip.MustParseAddr("fd99::"), netip.MustParseAddr("fd99::1")}
		}
		at := func(table *nftables.Table) *nftables.Set {
			return &nftables.Set{Table: table, Name: set.name, KeyType: kind, Interval: true}
		}
		seen("another element in set "+set.name, func(c *nftables.Conn, table *nftables.Table) {
			if err := c.SetAddElements(at(table), elements([]span{one})); err != nil {
				t.Error(err)
			}
		})
		seen("set "+set.name+" with an element less", func(c *nftables.Conn, table *nftables.Table) {
			if err := c.SetDeleteElements(at(table), elements(set.ranges[:1])); err != nil {
				t.Error(err)
			}
		})
		seen("an empty set "+set.name, func(c *nftables.Conn, table *nftables.Table) { c.FlushSet(at(table)) })
	}
	seen("a set more", func(c *nftables.Conn, table *nftables.Table) {
		if err := c.AddSet(&nftables.Set{Table: table, Name: "more", KeyType: nftables.TypeIPAddr}, nil); err != nil {
			t.Error(err)
		}
	})
}

// TestKernelTunnelIsLeftOutOnceConnectionsAreTracked enables connection tracking with a foreign rule. Before that,
// outgoing packets meet no rule of the instance.
func TestKernelTunnelIsLeftOutOnceConnectionsAreTracked(t *testing.T) {
	w := &routingWorld{t: t}
	ns := netnstest.New(t)
	guard := New(ns, "test", []uint32{podGroup, dyingGroup}, testMarks)
	guard.SetRouting(w.routing(false))
	if err := guard.Repair(); err != nil {
		t.Fatal(err)
	}
	is := func(when string, differences int) {
		t.Helper()
		if diffs, err := guard.Check(); err != nil || len(diffs) != differences {
			t.Fatalf("%s: %+v, %v; want %d differences", when, diffs, err, differences)
		}
	}
	is("without connection tracking", 0)
	if err := guard.conn(func(c *nftables.Conn) error {
		table := c.AddTable(&nftables.Table{Name: "others", Family: nftables.TableFamilyIPv4})
		chain := c.AddChain(&nftables.Chain{
			Name: "tracks", Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		}})
		return c.Flush()
	}); err != nil {
		t.Fatal(err)
	}
	if err := ns.Do(func() error {
		there, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer there.Close()
		_, err = there.WriteTo([]byte("?"), there.LocalAddr())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	is("with it", 1)
	if err := guard.Repair(); err != nil {
		t.Fatal(err)
	}
	is("after the repair", 0)
	if walls := guard.walls(guard.settings(), guard.table()); walls[len(walls)-1].chain.Name != tunnelName {
		t.Errorf("the last chain is %s, want %s", walls[len(walls)-1].chain.Name, tunnelName)
	}
}

// TestKernelAnOverlayWithoutATunnelIsRefused: with group 0, the rules for the tunnel device would match foreign devices
// and drop their packets.
func TestKernelAnOverlayWithoutATunnelIsRefused(t *testing.T) {
	guard := New(netnstest.New(t), "test", []uint32{podGroup, dyingGroup}, testMarks)
	for _, f := range []Routing{{TunnelPort: tunnelPort}, {TunnelGroup: tunnelGroup}} {
		f.Own = func() []netip.Prefix { return nil }
		guard.SetRouting(f)
		if err := guard.Repair(); err == nil {
			t.Errorf("%+v: the table was created", f)
		}
	}
}
