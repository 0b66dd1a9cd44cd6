// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// sniffer reads the packets that a device sends and receives.
type sniffer struct {
	fd int
}

func sniff(t *testing.T, ns netns.NsHandle, device string) *sniffer {
	t.Helper()
	s := &sniffer{fd: -1}
	inNetns(t, ns, func() {
		link, err := net.InterfaceByName(device)
		if err != nil {
			t.Errorf("find %s: %v", device, err)
			return
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Errorf("packet socket: %v", err)
			return
		}
		s.fd = fd
		all := uint16(unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8)
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Index}); err != nil {
			t.Errorf("bind to %s: %v", device, err)
		}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
			t.Errorf("timeout: %v", err)
		}
	})
	if s.fd < 0 {
		t.FailNow()
	}
	t.Cleanup(func() { unix.Close(s.fd) })
	return s
}

// next waits for a packet and returns it from the IP header on.
func (s *sniffer) next(t *testing.T, what string, match func(wire) bool) []byte {
	t.Helper()
	b := make([]byte, 65536)
	for end := time.Now().Add(servicetest.Patience); time.Now().Before(end); {
		n, _, err := unix.Recvfrom(s.fd, b, 0)
		if err != nil || n < 14 {
			continue
		}
		if w := readWire(binary.BigEndian.Uint16(b[12:]), b[14:n]); w.ok && match(w) {
			return slices.Clone(b[14:n])
		}
	}
	t.Fatalf("%s: no such packet has come", what)
	return nil
}

// sendIP sends a complete IP packet by the routes of a namespace.
func sendIP(t *testing.T, ns netns.NsHandle, packet []byte) {
	t.Helper()
	domain, dst := unix.AF_INET, unix.Sockaddr(nil)
	if packet[0]>>4 == 6 {
		domain, dst = unix.AF_INET6, &unix.SockaddrInet6{Addr: [16]byte(packet[24:])}
	} else {
		dst = &unix.SockaddrInet4{Addr: [4]byte(packet[16:])}
	}
	inNetns(t, ns, func() {
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			t.Errorf("raw socket: %v", err)
			return
		}
		defer unix.Close(fd)
		if err := unix.Sendto(fd, packet, 0, dst); err != nil {
			t.Errorf("send a packet: %v", err)
		}
	})
}

// ip returns a packet of either family.
func ip(src, dst netip.Addr, proto byte, payload []byte) []byte {
	if src.Is4() {
		return ip4Header{src: src, dst: dst, proto: proto, frag: 0x4000}.with(payload)
	}
	return ip6(src, dst, proto, payload)
}

// tooBig returns the error that a hop sends about a packet; it quotes the whole packet.
func tooBig(from, to netip.Addr, mtu uint16, about []byte) []byte {
	if from.Is4() {
		msg := binary.BigEndian.AppendUint16([]byte{3, 4, 0, 0, 0, 0}, mtu)
		msg = append(msg, about...)
		binary.BigEndian.PutUint16(msg[2:], checksum(msg))
		return ip4Header{src: from, dst: to, proto: 1}.with(msg)
	}
	msg := binary.BigEndian.AppendUint16([]byte{2, 0, 0, 0, 0, 0}, mtu)
	return ip6(from, to, 58, icmp6(from, to, append(msg, about...)))
}

// isTooBig reports whether a packet is such an error.
func isTooBig(w wire) bool {
	return w.proto == 1 && bytes.HasPrefix(w.rest, []byte{3, 4}) || w.proto == 58 && bytes.HasPrefix(w.rest, []byte{2, 0})
}

// wantTooBig compares an error with the packet that it is about, byte for byte. Hop limit and header checksum
// change on the way; the quoted TCP or UDP checksum is the one of the packet at the hop, because a receiver
// cannot verify it: see bpf/include/sluice/quote.h.
func wantTooBig(t *testing.T, what string, packet []byte, from, to netip.Addr, mtu uint16, about []byte) {
	t.Helper()
	head, hops, sum := 20, []int{8, 10, 11}, map[byte]int{protoTCP: 16, protoUDP: 6}
	v6 := packet[0]>>4 == 6
	ethertype := uint16(etherIPv4)
	if v6 {
		head, hops, ethertype = 40, []int{7}, etherIPv6
	}
	w, sent := readWire(ethertype, packet), readWire(ethertype, about)
	if w.src != from || w.dst != to {
		t.Errorf("%s: the error is from %v to %v, want from %v to %v", what, w.src, w.dst, from, to)
	}
	checked := w.rest
	if v6 {
		checked = slices.Concat(pseudo6(w.src, w.dst, len(w.rest)), w.rest)
	} else if checksum(packet[:20]) != 0 {
		t.Errorf("%s: the error's header has a wrong checksum", what)
	}
	if checksum(checked) != 0 {
		t.Errorf("%s: the error has a wrong checksum", what)
	}
	if got := binary.BigEndian.Uint16(w.rest[6:]); got != mtu {
		t.Errorf("%s: the error has the MTU %d, want %d", what, got, mtu)
	}
	quote, want := slices.Clone(w.rest[8:]), slices.Clone(about)
	if len(quote) < head+8 {
		t.Fatalf("%s: %d bytes are quoted", what, len(quote))
	}
	if !v6 && checksum(quote[:20]) != 0 {
		t.Errorf("%s: the quoted header has a wrong checksum", what)
	}
	want = want[:min(len(want), len(quote))]
	skip := head + sum[sent.proto]
	for _, at := range append(hops, skip, skip+1) {
		if at < len(quote) {
			quote[at], want[at] = 0, 0
		}
	}
	if !bytes.Equal(quote, want) {
		t.Errorf("%s: the error quotes\n%x, sent was\n%x", what, quote, want)
	}
}

// TestKernelOutsideTooBigQuotesWhatWasSent: a packet-too-big error of a hop reaches the sender of the packet
// and quotes the packet that it has sent. The packet is either a request of an outside client, or the answer of
// a backend on this or another node, whose kernel must learn the MTU.
func TestKernelOutsideTooBigQuotesWhatWasSent(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		client := sniff(t, f.outsider, "up0")
		for i, outside := range f.outsideAddrs() {
			own := []netip.Addr{f.a.addr4, f.a.addr6}[i]
			host := []netip.Addr{f.b.addr4, f.b.addr6}[i]
			hop, router := host, []netip.Addr{netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("2001:db8:7::7")}[i]
			sees := router // the source of errors about its answers that the backend sees
			if routing == RoutingOverlay {
				hop, sees = []netip.Addr{f.b.over4, f.b.over6}[i], []netip.Addr{f.a.over4, f.a.over6}[i]
			}
			for j, c := range []struct {
				what    string
				in      netns.NsHandle
				device  string
				at      netip.Addr
				hop     netip.Addr // that sends errors about requests
				hopIn   netns.NsHandle
				from    netip.Addr // source that the client sees; not valid: the service
				answers netip.Addr // source of the errors about the backend's answers
			}{
				{"pod", f.a.pod.ns, "eth0", f.a.pod.Addrs()[i], f.a.pod.Addrs()[i], f.a.pod.ns, netip.Addr{}, router},
				{"pod elsewhere", f.b.pod.ns, "eth0", f.b.pod.Addrs()[i], hop, f.b.ns, hop, sees},
				{"host elsewhere", f.b.ns, "up0", host, host, f.b.ns, netip.Addr{}, router},
			} {
				at := netip.AddrPortFrom(c.at, 9000+uint16(j))
				tell(t, c.in, at)
				backend := sniff(t, c.in, c.device)
				h, err := netlink.NewHandleAt(c.in, unix.NETLINK_ROUTE)
				must(t, "netlink", err)
				defer h.Close()
				vip := serviceAddr(own, byte(20+j))
				f.routeFromOutside(t, vip.Addr(), f.a)
				n.lead(vip, feAddress, at)
				nodePort := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(nodePort, feNode, at)
				for k, asked := range []netip.AddrPort{vip, nodePort} {
					for _, proto := range []byte{protoTCP, protoUDP} {
						what := fmt.Sprintf("%s at %v by protocol %d", c.what, asked, proto)
						from := c.from
						if !from.IsValid() {
							from = asked.Addr()
						}
						port := 41000 + uint16(j*10+k)
						payload := bytes.Repeat([]byte("request "), 40)
						segment := tcp(port, asked.Port(), flagSYN, payload...)
						if proto == protoUDP {
							segment = udp(port, asked.Port(), payload...)
							segment[7] = 1
						}
						// its wrong checksum keeps the backend's kernel from answering
						sent := ip(outside, asked.Addr(), proto, segment)
						f.fromOutside(t, f.a, sent)
						arrived := backend.next(t, what, func(w wire) bool {
							return w.dst == c.at && w.dport == at.Port() && w.proto == proto
						})
						w := readWire([]uint16{etherIPv4, etherIPv6}[i], arrived)
						sendIP(t, c.hopIn, tooBig(c.hop, w.src, 1281, arrived))
						told := client.next(t, what+", the error", func(w wire) bool { return isTooBig(w) && w.dst == outside })
						wantTooBig(t, what, told, from, outside, 1281, sent)

						payload = bytes.Repeat([]byte("answer "), 40)
						segment = tcp(at.Port(), w.sport, flagSYN|flagACK, payload...)
						if proto == protoUDP {
							segment = udp(at.Port(), w.sport, payload...)
						}
						answer := ip(c.at, w.src, proto, segment)
						sendIP(t, c.in, answer)
						got := client.next(t, what+", the answer", func(w wire) bool {
							return w.src == asked.Addr() && w.sport == asked.Port() && w.dport == port && w.proto == proto
						})
						mtu := 1290 + uint16(2*k)
						f.fromOutside(t, f.a, tooBig(router, asked.Addr(), mtu, got))
						learned := backend.next(t, what+", the error about the answer", func(w wire) bool {
							return isTooBig(w) && w.dst == c.at
						})
						wantTooBig(t, what+", the answer", learned, c.answers, c.at, mtu, answer)
						// For TCP, the kernel of the backend has no socket that accepts the error. The second error has
						// a larger size than the first, and an error never raises a learned size.
						if proto != protoUDP || k == 1 {
							continue
						}
						servicetest.Eventually(t, what+": the backend's kernel learns the size", func() bool {
							routes, err := h.RouteGet(w.src.AsSlice())
							must(t, "find the route", err)
							return len(routes) == 1 && routes[0].MTU == int(mtu)
						})
					}
				}
			}
		}
	})
}

// behindAHop creates a namespace behind the outsider, which forwards packets of at most mtu to it.
func (f *fabric) behindAHop(t *testing.T, mtu int) netns.NsHandle {
	t.Helper()
	far := newNetns(t)
	addrs := []netip.Addr{netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("2001:db8:51::2")}
	hop, err := netlink.NewHandleAt(f.outsider, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	t.Cleanup(hop.Close)
	h, err := netlink.NewHandleAt(far, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	t.Cleanup(h.Close)
	must(t, "add the link", hop.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "far0", MTU: fabricMTU},
		PeerName:  "eth0", PeerNamespace: netlink.NsFd(far), PeerMTU: fabricMTU,
	}))
	inNetns(t, f.outsider, func() {
		for name, value := range map[string]string{
			"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1", "ipv4/icmp_ratelimit": "0", "ipv6/icmp/ratelimit": "0",
		} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
				t.Errorf("sysctl: %v", err)
			}
		}
	})
	near, err := hop.LinkByName("far0")
	must(t, "find far0", err)
	eth0, err := h.LinkByName("eth0")
	must(t, "find eth0", err)
	must(t, "set far0 up", hop.LinkSetUp(near))
	must(t, "set eth0 up", h.LinkSetUp(eth0))
	for i, a := range addrs {
		gateway, bits := a.Prev(), []int{24, 64}[i]
		for _, end := range []struct {
			h *netlink.Handle
			l netlink.Link
			a netip.Addr
		}{{hop, near, gateway}, {h, eth0, a}} {
			must(t, "add an address", end.h.AddrAdd(end.l, &netlink.Addr{
				IPNet: &net.IPNet{IP: end.a.AsSlice(), Mask: net.CIDRMask(bits, end.a.BitLen())}, Flags: unix.IFA_F_NODAD,
			}))
			receives(t, end.h, end.a)
		}
		must(t, "route to the sender", hop.RouteReplace(&netlink.Route{
			LinkIndex: near.Attrs().Index, Dst: ipNet(a), MTU: mtu,
		}))
		must(t, "route from the sender", h.RouteAdd(&netlink.Route{
			Gw: gateway.AsSlice(), Dst: &net.IPNet{IP: make(net.IP, len(a.AsSlice())), Mask: net.CIDRMask(0, a.BitLen())},
		}))
		must(t, "route of the node", f.a.h.RouteAdd(&netlink.Route{Gw: f.outsideAddrs()[i].AsSlice(), Dst: ipNet(a)}))
	}
	return far
}

// TestKernelOutsideAnswersFitTheWayToTheSender: if a hop between the node and a client has a smaller MTU than
// both ends assume, TCP answers of backends on this and another node arrive, because the backend's kernel
// learns the MTU.
func TestKernelOutsideAnswersFitTheWayToTheSender(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, _ Routing) {
		const mtu = 1300
		n := &serviceNode{T: t, runner: f.a.runner}
		far := f.behindAHop(t, mtu)
		for j, c := range []struct {
			what string
			in   netns.NsHandle
			at   []netip.Addr
		}{
			{"pod", f.a.pod.ns, f.a.pod.Addrs()},
			{"pod elsewhere", f.b.pod.ns, f.b.pod.Addrs()},
			// last: the MTU that this host learns for the node also applies to its tunnel
			{"host elsewhere", f.b.ns, []netip.Addr{f.b.addr4, f.b.addr6}},
		} {
			h, err := netlink.NewHandleAt(c.in, unix.NETLINK_ROUTE)
			must(t, "netlink", err)
			defer h.Close()
			for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
				at := netip.AddrPortFrom(c.at[i], 9000+uint16(j))
				tell(t, c.in, at)
				nodePort := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(nodePort, feNode, at)
				_, seen, _ := strings.Cut(askTCP(t, far, nodePort, 1<<20), " to ")
				peer, err := netip.ParseAddrPort(seen)
				must(t, "read whom the backend sees", err)
				routes, err := h.RouteGet(peer.Addr().Unmap().AsSlice())
				if err != nil || len(routes) != 1 || routes[0].MTU != mtu {
					t.Errorf("%s: the route to %v is %v, %v, want the size %d", c.what, peer, routes, err, mtu)
				}
			}
		}
	})
}

// TestKernelRefusalsOutsideLeaveErrorsToOthers: while a sender outside is refused faster than a CPU may answer, another
// one learns the MTU on the way to its backend.
func TestKernelRefusalsOutsideLeaveErrorsToOthers(t *testing.T) {
	stayOnOneCPU(t)
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	closed, open := netip.AddrPortFrom(f.a.addr4, 30080), netip.AddrPortFrom(f.a.addr4, 30081)
	n.lead(closed, feNode)
	n.lead(open, feNode, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
	prog := n.k.program(program.FromUplink)
	send := func(src netip.Addr, to netip.AddrPort, size int) {
		t.Helper()
		header := [14]byte{12: 8}
		in := ip(src, to.Addr(), protoUDP, udp(40000, to.Port(), make([]byte, size)...))
		_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...), DataOut: make([]byte, 2048)})
		must(t, "run", err)
	}
	const rate = 1000
	before := n.counters(t)
	for range 2 * rate {
		send(f.outside, closed, 8)
	}
	send(netip.MustParseAddr("192.0.2.98"), open, fabricMTU-28)
	got := f.a.gained(t, before)
	if got[cell{event.AnsweredTooBig, event.Ingress}] != 1 || got[cell{event.ServiceNoBackend, event.Ingress}] != 2*rate {
		t.Errorf("counted %v, want one %v", got, event.AnsweredTooBig)
	}
}
