// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// crafted is a packet as an attacker would build it.
type crafted struct {
	class string
	prog  string
	ctx   skbContext
	in    []byte
}

// crafter builds packets, runs them, and compares what passes with an oracle: pod a may open TCP, UDP and SCTP
// connections to port 80 of any peer, any peer may do so to pod b, and no other connection may begin.
type crafter struct {
	*theatre
	open    bool                   // whether new connections are allowed
	live    map[string]bool        // connections whose first packet passed
	pieces  map[string]bool        // fragmented packets whose first fragment passed
	before  map[cell]event.Counter // counters after the last packet
	count   map[string]int         // number of packets by class
	passed  map[string]int         // number of passed packets by class
	failure int
}

func newCrafter(t *testing.T, v6 bool) *crafter {
	th := newTheatre(t, v6)
	th.putTables(t)
	c := &crafter{theatre: th, live: map[string]bool{}, pieces: map[string]bool{}, count: map[string]int{}, passed: map[string]int{}}
	c.policy(t, true)
	return c
}

func (c *crafter) policy(t *testing.T, open bool) {
	c.open = open
	to, from := endpointmap.Policy{}, endpointmap.Policy{}
	if open {
		to, from = endpointmap.Policy{Egress: only80}, endpointmap.Policy{Ingress: only80}
	}
	setPolicy(t, c.k, c.pods["a"].Slot, to)
	setPolicy(t, c.k, c.pods["b"].Slot, from)
}

// wire contains the fields of a frame that the oracle uses.
type wire struct {
	ok           bool
	family       int
	src, dst     netip.Addr
	proto        byte
	rest         []byte // from the transport header to the end of the packet
	later        bool   // a later fragment
	cut          bool   // the first of several fragments
	id           uint32
	sport, dport uint16
}

func readWire(ethertype uint16, p []byte) (w wire) {
	switch {
	case ethertype == etherIPv4 && len(p) >= 20 && p[0]>>4 == 4:
		ihl, total := int(p[0]&15)*4, int(binary.BigEndian.Uint16(p[2:]))
		if ihl < 20 || total < ihl || total > len(p) {
			return w
		}
		frag := binary.BigEndian.Uint16(p[6:])
		w = wire{
			ok: true, family: 4, proto: p[9], rest: p[ihl:total], later: frag&0x1fff != 0, cut: frag&0x3fff == 0x2000,
			id: uint32(binary.BigEndian.Uint16(p[4:])), src: netip.AddrFrom4([4]byte(p[12:])), dst: netip.AddrFrom4([4]byte(p[16:])),
		}
	case ethertype == etherIPv6 && len(p) >= 40 && p[0]>>4 == 6:
		end := 40 + int(binary.BigEndian.Uint16(p[4:]))
		if end > len(p) {
			return w
		}
		w = wire{ok: true, family: 6, proto: p[6], rest: p[40:end], src: netip.AddrFrom16([16]byte(p[8:])), dst: netip.AddrFrom16([16]byte(p[24:]))}
		for slices.Contains([]byte{0, 44, 51, 60, 135, 139, 140}, w.proto) && !w.later {
			if len(w.rest) < 8 {
				return wire{}
			}
			var n int
			switch w.proto {
			case 44:
				n = 8
				at := binary.BigEndian.Uint16(w.rest[2:])
				w.later, w.cut, w.id = at&0xfff8 != 0, at&0xfff9 == 1, binary.BigEndian.Uint32(w.rest[4:])
			case 51:
				n = (int(w.rest[1]) + 2) * 4
			default:
				n = (int(w.rest[1]) + 1) * 8
			}
			if n > len(w.rest) {
				return wire{}
			}
			w.proto, w.rest = w.rest[0], w.rest[n:]
		}
	}
	if w.ok && !w.later && len(w.rest) >= 4 && slices.Contains([]byte{6, 17, 132}, w.proto) {
		w.sport, w.dport = binary.BigEndian.Uint16(w.rest), binary.BigEndian.Uint16(w.rest[2:])
	}
	return w
}

func (w wire) tuple(reverse bool) string {
	if reverse {
		return fmt.Sprint(w.proto, w.dst, w.dport, w.src, w.sport)
	}
	return fmt.Sprint(w.proto, w.src, w.sport, w.dst, w.dport)
}

func (w wire) piece(prog string) string { return fmt.Sprint(prog, w.src, w.dst, w.id, w.proto) }

// mayPass returns the expected verdict on a packet. It records connections and fragments for later packets.
func (c *crafter) mayPass(p crafted) bool {
	near := c.pods["a"]
	if p.ctx.Ifindex == c.pods["b"].Ifindex {
		near = c.pods["b"]
	}
	isA, from := near.Slot == c.pods["a"].Slot, p.prog == program.FromPod
	if len(p.in) < 14 || p.ctx.VlanPresent != 0 {
		return false
	}
	ethertype := binary.BigEndian.Uint16(p.in[12:])
	ip := p.in[14:]
	if from && !bytes.Equal(p.in[6:12], near.MAC[:]) {
		return false
	}
	if ethertype == etherARP {
		return from && len(ip) >= 28 && ip[7] == 1 && bytes.Equal(ip[8:14], near.MAC[:]) &&
			bytes.Equal(ip[14:18], near.IPv4.AsSlice()) && bytes.Equal(ip[24:28], gateway4.AsSlice())
	}
	w := readWire(ethertype, ip)
	if !w.ok {
		return false
	}
	own := near.IPv4
	if w.family == 6 {
		own = near.IPv6
	}
	if from && w.family == 6 && w.proto == 58 && !w.later && len(w.rest) >= 24 && w.rest[0] == 135 {
		return (w.src == own || w.src.IsLinkLocalUnicast()) && bytes.Equal(w.rest[8:24], gateway6.AsSlice())
	}
	if from && (w.src != own || !bytes.Equal(p.in[:6], near.HostMAC[:])) || !from && w.dst != own {
		return false
	}
	// only a local pod's own device may use its address
	for _, pod := range c.pods {
		if !from && (w.src == pod.IPv4 || w.src == pod.IPv6) && p.ctx.IngressIfindex != pod.Ifindex {
			return false
		}
	}
	if w.later {
		return c.pieces[w.piece(p.prog)]
	}
	ok := c.connected(w, isA, from) || c.quotes(w, isA, from)
	if ok && w.cut {
		c.pieces[w.piece(p.prog)] = true
	}
	return ok
}

func (c *crafter) connected(w wire, isA, from bool) bool {
	if !slices.Contains([]byte{6, 17, 132}, w.proto) || len(w.rest) < 8 {
		return false
	}
	if c.live[w.tuple(true)] && c.open {
		return true
	}
	// new connections: from a to port 80 of any peer, from any peer to port 80 of b
	if !c.open || w.dport != 80 || isA != from {
		return false
	}
	if w.proto == 6 && (w.rest[13]&(flagSYN|flagFIN) == flagSYN|flagFIN || w.rest[13]&(flagSYN|flagRST) == flagSYN|flagRST) {
		return false
	}
	c.live[w.tuple(false)] = true
	return true
}

// quotes reports whether an ICMP error quotes a packet that its receiver has sent: to the pod that sends the
// error, and of a known connection unless the error is packet too big.
func (c *crafter) quotes(w wire, isA, from bool) bool {
	kinds := map[int][]byte{4: {3, 11, 12}, 6: {1, 2, 3, 4}}[w.family]
	if w.proto != map[int]byte{4: 1, 6: 58}[w.family] || len(w.rest) < 8 || !slices.Contains(kinds, w.rest[0]) {
		return false
	}
	q := wire{}
	if inner := slices.Clone(w.rest[8:]); len(inner) >= 20 {
		// only its beginning is quoted
		if w.family == 4 {
			binary.BigEndian.PutUint16(inner[2:], uint16(len(inner)))
			q = readWire(etherIPv4, inner)
		} else if len(inner) >= 40 {
			binary.BigEndian.PutUint16(inner[4:], uint16(len(inner)-40))
			q = readWire(etherIPv6, inner)
		}
	}
	if !q.ok || q.src != w.dst || from && q.dst != w.src {
		return false
	}
	if !from && w.family == 6 && w.rest[0] == 2 {
		return true
	}
	return c.open && !q.later && (c.live[q.tuple(false)] || c.live[q.tuple(true)])
}

func (c *crafter) fire(t *testing.T, p crafted) {
	t.Helper()
	c.count[p.class]++
	if c.before == nil {
		c.before = c.counters(t)
	}
	opts := &ebpf.RunOptions{Data: p.in, DataOut: make([]byte, len(p.in)+256), Context: p.ctx}
	verdict, err := c.k.program(p.prog).Run(opts)
	if err != nil {
		// BPF_PROG_TEST_RUN rejects a frame without a complete IP header
		if len(p.in) < 34 || len(p.in) < 54 && p.in[12] == 0x86 && p.in[13] == 0xdd {
			c.count[p.class]--
			return
		}
		t.Fatalf("%s: run %s on %x: %v", p.class, p.prog, p.in, err)
	}
	after := c.counters(t)
	counted, reason := uint64(0), event.Reason(0)
	for key, n := range after {
		if d := n.Packets - c.before[key].Packets; d != 0 {
			counted += d
			reason = key.reason
		}
	}
	c.before = after
	may := c.mayPass(p)
	passes := verdict != verdictShot
	if passes {
		c.passed[p.class]++
	}
	if counted != 1 || passes == reason.Dropped() || passes && !may {
		t.Errorf("%s, %s at device %d from %d, mark %#x: %x: verdict %d, %v, counted %d, may pass: %v",
			p.class, p.prog, p.ctx.Ifindex, p.ctx.IngressIfindex, p.ctx.Mark, p.in, verdict, reason, counted, may)
		if c.failure++; c.failure > 20 {
			t.FailNow()
		}
	}
}

// contexts returns the ways in which a packet can reach a pod's device.
func (c *crafter) contexts(pod string) (out []crafted) {
	e := c.pods[pod]
	out = append(out, crafted{prog: program.FromPod, ctx: skbContext{Ifindex: e.Ifindex}})
	for _, device := range []uint32{0, otherDevice, c.pods["a"].Ifindex, c.pods["b"].Ifindex} {
		for _, mark := range []uint32{0, markPod, markOf(markEvaluated, e.Ifindex), forwardMark} {
			if device != 0 && device != otherDevice && mark == markOf(markEvaluated, e.Ifindex) {
				continue // such a packet was already evaluated
			}
			ctx := skbContext{Ifindex: e.Ifindex, IngressIfindex: device, Mark: mark}
			out = append(out, crafted{prog: program.ToPod, ctx: ctx})
		}
	}
	return out
}

// packet puts an IP packet between two addresses into a frame.
func (c *crafter) packet(p crafted, pod, far string, proto byte, payload []byte) crafted {
	e := c.pods[pod]
	from, to, dst, src := c.addr(far), c.addr(pod), e.MAC, e.HostMAC
	if p.prog == program.FromPod {
		from, to, dst, src = to, from, src, dst
	}
	if c.v6 {
		p.in = frame(dst, src, etherIPv6, ip6(from, to, proto, payload))
	} else {
		p.in = frame(dst, src, etherIPv4, ip4Header{src: from, dst: to, proto: proto}.with(payload))
	}
	return p
}

// everything yields packets of every kind, in every direction.
func (c *crafter) everything(yield func(crafted)) {
	craft := func(class, pod, far string, p crafted, proto byte, payload []byte) {
		p = c.packet(p, pod, far, proto, payload)
		p.class = class
		yield(p)
	}
	for _, pod := range []string{"a", "b"} {
		other := map[string]string{"a": "b", "b": "a"}[pod]
		ways := c.contexts(pod)
		for i, way := range ways {
			far := []string{other, "world", "host", "router", "nobody"}
			for _, who := range far {
				for _, ports := range [][2]uint16{{4000, 53}, {80, 53}, {4000, 80}} {
					craft("UDP", pod, who, way, 17, udp(ports[0], ports[1], 1, 2, 3, 4))
					for _, flags := range []byte{0, flagSYN, flagACK, flagSYN | flagACK, flagRST, flagFIN | flagACK, flagRST | flagACK, 0xff} {
						craft("TCP", pod, who, way, 6, tcp(ports[0], ports[1], flags))
					}
					_, payload := chunk(ports[0], ports[1], byte(i))(c.theatre)
					craft("SCTP", pod, who, way, 132, payload)
				}
			}
		}
		for n := range 256 {
			for i := range 3 {
				way := ways[(n*3+i*5)%len(ways)]
				who := []string{other, "world", "host"}[i]
				craft("TCP flags", pod, who, way, 6, tcp(4000, 53, byte(n)))
				_, payload := chunk(80, 53, byte(n))(c.theatre)
				craft("SCTP chunks", pod, who, way, 132, payload)
				craft("protocols", pod, who, way, byte(n), make([]byte, 64))
				quoted := []l4{segment(4000, 80, flagACK), datagram(80, 53), ping(false, 7)}[n%3]
				proto, inner := quoted(c.theatre)
				ends := [][2]string{{pod, who}, {who, pod}, {"world", "host"}, {"host", "world"}}[n%4]
				msg := icmp(byte(n), byte(i))
				if c.v6 {
					craft("ICMP", pod, who, way, 58, append(msg, ip6(c.addr(ends[0]), c.addr(ends[1]), proto, inner)...))
				} else {
					craft("ICMP", pod, who, way, 1, append(msg, ip4Header{src: c.addr(ends[0]), dst: c.addr(ends[1]), proto: proto}.with(inner)...))
				}
				if c.v6 {
					// two extension headers, then UDP
					kinds := []byte{0, 43, 44, 50, 51, 59, 60, 135, 139, 140, 253}
					first, second := kinds[n%len(kinds)], kinds[n/len(kinds)%len(kinds)]
					craft("extension headers", pod, who, way, first, append(append(ext(second), ext(17)...), udp(4000, 53)...))
				} else {
					p := c.packet(way, pod, who, 17, udp(4000, 53))
					options := ip4Header{src: netip.AddrFrom4([4]byte(p.in[26:])), dst: netip.AddrFrom4([4]byte(p.in[30:])), proto: 17, options: []byte{byte(n), byte(4 + i), 4, 0}}
					p.in, p.class = append(p.in[:14:14], options.with(udp(4000, 53))...), "options"
					yield(p)
					lie := c.packet(way, pod, who, 17, udp(4000, 53))
					lie.class = "lengths"
					lie.in[14+n%2*3] = byte(n)
					yield(lie)
					cut := c.packet(way, pod, who, []byte{6, 17, 132, 1, 253}[n%5], make([]byte, 40))
					cut.class = "fragments"
					binary.BigEndian.PutUint16(cut.in[14+6:], uint16(n)<<8|uint16(i))
					yield(cut)
				}
			}
			link := c.packet(ways[n%len(ways)], pod, other, 17, udp(4000, 53))
			link.class = "Ethernet"
			link.in[12], link.in[13] = []byte{8, 0x86, 0x81, 0x88}[n%4], byte(n)
			yield(link)
			e := c.pods[pod]
			ask := ways[n%2]
			ask.class, ask.in = "ARP", frame(broadcastMAC, e.MAC, etherARP, arp(1, e.MAC, e.IPv4, [6]byte{}, gateway4))
			ask.in[14+n%28] ^= byte(n)
			ask.in = append(ask.in, make([]byte, 18)...)
			yield(ask)
		}
	}
}

// mutate changes some bytes, often to meaningful values.
func mutate(r *rand.Rand, p crafted) crafted {
	p.in = slices.Clone(p.in)
	p.class = "mutated"
	telling := []byte{0, 1, 4, 6, 17, 43, 44, 51, 58, 60, 80, 132, 0x20, 0x45, 0x60, 0xff}
	for range 1 + r.IntN(3) {
		at := 14 + r.IntN(len(p.in)-14)
		if r.IntN(2) == 0 {
			p.in[at] = telling[r.IntN(len(telling))]
		} else {
			p.in[at] ^= 1 << r.IntN(8)
		}
	}
	switch r.IntN(6) {
	case 0:
		p.in = append(p.in, make([]byte, r.IntN(40))...)
	case 1:
		p.in = p.in[:max(34, len(p.in)-r.IntN(12))]
	}
	return p
}

// TestKernelCraftedPacketsDoNotPassWhatPolicyDenies: a pod, a process of the host with any mark, and a sender outside
// send crafted packets. Only packets that a simple reading of the policy allows pass, each packet is counted once,
// denied packets leave no connection, and existing connections continue.
func TestKernelCraftedPacketsDoNotPassWhatPolicyDenies(t *testing.T) {
	stayOnOneCPU(t)
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			c := newCrafter(t, v6)
			between := func(from, to string, what l4) {
				t.Helper()
				prog, ctx, in := c.frame(say(from, to, what, 0))
				p := crafted{class: "established", prog: prog, ctx: ctx, in: in}
				passed := c.passed["established"]
				if c.fire(t, p); c.passed["established"] == passed {
					t.Errorf("%s to %s is harmed", from, to)
				}
			}
			established := func() {
				t.Helper()
				between("a", "b", segment(5000, 80, flagACK))
				between("b", "a", segment(80, 5000, flagACK))
				between("b", "a", datagram(80, 5001))
				between("world", "a", segment(80, 5002, flagACK))
				between("world", "a", datagram(80, 5003))
			}
			for _, begin := range []struct {
				to   string
				what l4
			}{{"b", segment(5000, 80, flagSYN)}, {"b", datagram(5001, 80)}, {"world", segment(5002, 80, flagSYN)}, {"world", datagram(5003, 80)}} {
				between("a", begin.to, begin.what)
			}
			between("b", "a", segment(80, 5000, flagSYN|flagACK))
			between("world", "a", segment(80, 5002, flagSYN|flagACK))
			established()

			r := rand.New(rand.NewPCG(1, 2))
			var seeds []crafted
			c.everything(func(p crafted) {
				c.fire(t, p)
				seeds = append(seeds, p)
			})
			established()
			for range 2500 {
				c.fire(t, mutate(r, seeds[r.IntN(len(seeds))]))
			}
			established()
			for _, conn := range c.connections(t) {
				w := wire{proto: conn.Protocol, src: conn.Initiator.Addr(), dst: conn.Responder.Addr(), sport: conn.Initiator.Port(), dport: conn.Responder.Port()}
				if !c.live[w.tuple(false)] {
					t.Errorf("a connection that nothing began: %+v", conn)
				}
			}

			// the policies now deny everything: with the connection entries, and without
			for i, evicted := range []bool{false, true} {
				c.policy(t, false)
				if evicted {
					evict().then(t, c.theatre)
				}
				for flags := range 256 {
					for _, way := range [][2]string{{"a", "b"}, {"b", "a"}, {"a", "world"}, {"world", "a"}, {"host", "b"}} {
						sport, dport := uint16(5000), uint16(80)
						if way[0] != "a" {
							sport, dport = dport, sport
						}
						prog, ctx, in := c.frame(say(way[0], way[1], segment(sport, dport, byte(flags)), 0))
						c.fire(t, crafted{class: []string{"revoked", "revoked and evicted"}[i], prog: prog, ctx: ctx, in: in})
					}
				}
			}
			for range 1500 {
				c.fire(t, mutate(r, seeds[r.IntN(len(seeds))]))
			}
			if n := len(c.connections(t)); n != 0 {
				t.Errorf("%d connections after everything was denied, want none", n)
			}
			total := 0
			for _, n := range c.count {
				total += n
			}
			t.Logf("%d packets: %v; passed: %v", total, c.count, c.passed)
			if total < 10_000 {
				t.Errorf("%d packets, want 10,000", total)
			}
		})
	}
}
