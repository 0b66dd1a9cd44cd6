// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

const (
	flagFIN = 0x01
	flagRST = 0x04
	flagPSH = 0x08
)

// theatre has two pods with devices of their own, so that packets of both can be run, and all other actors that
// they may communicate with.
type theatre struct {
	runner
	pods      map[string]endpointmap.Endpoint
	v6        bool
	events    *event.Reader
	evaluated []event.Event // connections that the last packet caused to be evaluated
	closed    []event.Event
	drops     []event.Event
}

func newTheatre(t *testing.T, v6 bool) *theatre {
	t.Helper()
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	th := &theatre{runner: runner{k}, pods: map[string]endpointmap.Endpoint{}, v6: v6}
	must(t, "add a pair of devices", netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "slta"}, PeerName: "sltb"}))
	t.Cleanup(func() {
		link, err := netlink.LinkByName("slta")
		must(t, "find slta", err)
		must(t, "delete slta", netlink.LinkDel(link))
	})
	for name, dev := range map[string]string{"a": "slta", "b": "sltb"} {
		link, err := netlink.LinkByName(dev)
		must(t, "find "+dev, err)
		must(t, "set "+dev+" up", netlink.LinkSetUp(link))
		e := testEndpoint(uint32(link.Attrs().Index), map[string]byte{"a": 10, "b": 20}[name])
		th.pods[name] = publish(t, k, e)
	}
	must(t, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
	var err error
	th.events, err = k.Events.Read()
	must(t, "Events", err)
	t.Cleanup(func() { th.events.Close() })
	return th
}

// addr of an actor in the family of the play.
func (th *theatre) addr(who string) netip.Addr {
	both := map[string][2]netip.Addr{
		"host": {host4, host6}, "world": {world4, world6}, "router": {remote4, remote6}, "nobody": {nobody4, nobody6},
	}
	for name, e := range th.pods {
		both[name] = [2]netip.Addr{e.IPv4, e.IPv6}
	}
	if th.v6 {
		return both[who][1]
	}
	return both[who][0]
}

// l4 builds a transport header for a family; it returns its protocol.
type l4 func(th *theatre) (proto byte, payload []byte)

func segment(sport, dport uint16, flags byte) l4 {
	return func(*theatre) (byte, []byte) { return 6, tcp(sport, dport, flags) }
}

func datagram(sport, dport uint16) l4 {
	return func(*theatre) (byte, []byte) { return 17, udp(sport, dport, 1, 2, 3, 4) }
}

func chunk(sport, dport uint16, kind byte) l4 {
	return func(*theatre) (byte, []byte) {
		b := make([]byte, 16)
		binary.BigEndian.PutUint16(b[0:], sport)
		binary.BigEndian.PutUint16(b[2:], dport)
		b[12] = kind
		return 132, b
	}
}

func other(proto byte) l4 {
	return func(*theatre) (byte, []byte) { return proto, make([]byte, 8) }
}

// ping returns an echo request or reply with an identifier.
func ping(reply bool, id uint16) l4 {
	return func(th *theatre) (byte, []byte) {
		proto, kind := byte(1), byte(8)
		if reply {
			kind = 0
		}
		if th.v6 {
			proto, kind = 58, 128
			if reply {
				kind = 129
			}
		}
		b := icmp(kind, 0)
		binary.BigEndian.PutUint16(b[4:], id)
		return proto, b
	}
}

// coded sets the code of an ICMP message.
func coded(what l4, code byte) l4 {
	return func(th *theatre) (byte, []byte) {
		proto, b := what(th)
		b[1] = code
		return proto, b
	}
}

// failure returns an ICMP error of a type (by its IPv4 number; 2 for too big) that quotes a packet.
func failure(kind byte, from, to string, quoted l4) l4 {
	return func(th *theatre) (byte, []byte) {
		proto, payload := quoted(th)
		if th.v6 {
			kind6 := map[byte]byte{3: 1, 2: 2, 11: 3, 12: 4}[kind]
			return 58, icmp(kind6, 0, ip6(th.addr(from), th.addr(to), proto, payload)...)
		}
		if kind == 2 { // fragmentation needed
			kind = 3
		}
		return 1, icmp(kind, 4, ip4Header{src: th.addr(from), dst: th.addr(to), proto: proto}.with(payload)...)
	}
}

// act is one step of a play: a packet and its expected result, or a change.
type act struct {
	from, to string
	stack    bool // the packet goes from the host's stack to the pod
	mark     uint32
	device   uint32 // incoming device of a packet from the stack, 0: sent by the host itself
	via      string // the pod by whose device a packet from the stack entered
	what     l4
	want     event.Reason
	wantDir  event.Direction // expected direction; 0: the direction of the program
	then     func(t *testing.T, th *theatre)
}

// say returns a packet from one actor to another.
func say(from, to string, what l4, want event.Reason) act {
	return act{from: from, to: to, what: what, want: want, stack: from != "a" && from != "b"}
}

func (a act) on(d event.Direction) act                    { a.wantDir = d; return a }
func (a act) check(f func(t *testing.T, th *theatre)) act { a.then = f; return a }
func (a act) marked(mark uint32) act                      { a.mark = mark; return a }
func (a act) forwarded() act                              { a.device = 77; return a }
func (a act) throughStack() act                           { return a.fromDevice(a.from) }
func (a act) fromDevice(pod string) act                   { a.stack, a.via = true, pod; return a }
func (a act) fromNowhere() act                            { a.stack, a.via = true, ""; return a }
func change(f func(t *testing.T, th *theatre)) act        { return act{then: f} }
func policy(who string, egress, ingress nodetable.ID) act {
	return change(func(t *testing.T, th *theatre) {
		setPolicy(t, th.k, th.pods[who].Slot, endpointmap.Policy{Egress: egress, Ingress: ingress})
	})
}

func (th *theatre) frame(a act) (prog string, ctx skbContext, in []byte) {
	proto, payload := a.what(th)
	near, dst, src := th.pods[a.from], th.pods[a.from].HostMAC, th.pods[a.from].MAC
	prog = program.FromPod
	if a.stack {
		near = th.pods[a.to]
		dst, src, prog = near.MAC, near.HostMAC, program.ToPod
	}
	from, to := th.addr(a.from), th.addr(a.to)
	if th.v6 {
		in = frame(dst, src, etherIPv6, ip6(from, to, proto, payload))
	} else {
		in = frame(dst, src, etherIPv4, ip4Header{src: from, dst: to, proto: proto}.with(payload))
	}
	device := a.device
	if a.via != "" {
		device = th.pods[a.via].Ifindex
	}
	return prog, skbContext{Ifindex: near.Ifindex, IngressIfindex: device, Mark: a.mark}, in
}

func (th *theatre) play(t *testing.T, acts []act) {
	t.Helper()
	th.forget(t)
	drain(t, th.events)
	for i, a := range acts {
		if a.what != nil {
			prog, ctx, in := th.frame(a)
			o := th.run(t, prog, in, ctx, 0)
			th.sort(drain(t, th.events))
			direction := a.wantDir
			if direction == 0 {
				direction = map[string]event.Direction{program.FromPod: event.Egress, program.ToPod: event.Ingress}[prog]
			}
			if o.reason != a.want || o.direction != direction || o.packets != 1 {
				t.Fatalf("act %d, %s to %s: %v %v, counted %d; want %v %v", i, a.from, a.to, o.reason, o.direction, o.packets, a.want, direction)
			}
			if loud := a.want.Dropped() && !a.want.Quiet(); loud != (len(th.drops) == 1) {
				t.Fatalf("act %d: events of drops %+v", i, th.drops)
			}
		}
		if a.then != nil {
			a.then(t, th)
			if t.Failed() {
				t.Fatalf("act %d, %s to %s", i, a.from, a.to)
			}
		}
	}
}

func (th *theatre) sort(events []event.Event) {
	th.evaluated, th.closed, th.drops = nil, nil, nil
	for _, e := range events {
		switch e.Type {
		case event.ConnectionEvaluated:
			th.evaluated = append(th.evaluated, e)
		case event.ConnectionClosed:
			th.closed = append(th.closed, e)
		default:
			th.drops = append(th.drops, e)
		}
	}
}

// connections lists the connection maps.
func (th *theatre) connections(t *testing.T) []conntrack.Connection {
	t.Helper()
	var all []conntrack.Connection
	must(t, "Connections", th.k.Connections.Each(func(cs []conntrack.Connection) error {
		// without the records of requested host addresses
		all = append(all, slices.DeleteFunc(slices.Clone(cs), func(c conntrack.Connection) bool { return c.Asked })...)
		return nil
	}))
	return all
}

// only returns the single existing entry.
func (th *theatre) only(t *testing.T) conntrack.Connection {
	t.Helper()
	all := th.connections(t)
	if len(all) != 1 {
		t.Fatalf("%d connections %+v, want 1", len(all), all)
	}
	return all[0]
}

func remain(n int) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		if all := th.connections(t); len(all) != n {
			t.Errorf("%d connections %+v, want %d", len(all), all, n)
		}
	}
}

// begunBy checks the initiator and the flags of the only connection. It ignores OriginLow, which depends on the order
// of the addresses, and Returned, which only concerns shares.
func begunBy(who string, flags conntrack.Flags) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		c := th.only(t)
		if c.Initiator.Addr() != th.addr(who) || c.Flags&^(conntrack.OriginLow|conntrack.Returned) != flags {
			t.Errorf("begun by %v with flags %v, want %v and %v", c.Initiator, c.Flags.Names(), th.addr(who), flags.Names())
		}
	}
}

func reported(evaluated, closed int) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		if len(th.evaluated) != evaluated || len(th.closed) != closed {
			t.Errorf("evaluated %+v, closed %+v, want %d and %d", th.evaluated, th.closed, evaluated, closed)
		}
	}
}

func all(fs ...func(*testing.T, *theatre)) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		for _, f := range fs {
			f(t, th)
		}
	}
}

// evict removes the entries, as the kernel may do, and keeps all other records.
func evict() act {
	return change(func(t *testing.T, th *theatre) {
		for _, c := range th.connections(t) {
			m, key := th.k.Connections.Map(c.Tuple)
			must(t, "delete a connection", m.Delete(key))
		}
	})
}

// fullOfRevoked fills the map of revoked connections.
func fullOfRevoked() act {
	return change(func(t *testing.T, th *theatre) {
		for n := range th.k.Pins.Map(bpf.MapsMapSlRevoked4).MaxEntries() {
			tuple := tuple(6, fmt.Sprintf("192.0.2.77:%d", n), "192.0.2.78:80")
			m, key := th.k.Pins.Map(bpf.MapsMapSlRevoked4), any(tuple.Key4())
			if th.v6 {
				tuple.Initiator = netip.AddrPortFrom(world6, uint16(n))
				tuple.Responder = netip.AddrPortFrom(remote6, 80)
				m, key = th.k.Pins.Map(bpf.MapsMapSlRevoked6), tuple.Key6()
			}
			must(t, "fill the map", pin.InsertOnce(m, key, bpf.MapsSlRevoked{}))
		}
	})
}

func stopped(want int) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		if n, err := th.k.Endpoints.PickUpStopped(); err != nil || n != want {
			t.Errorf("pick-up is stopped for %d endpoints, %v; want %d", n, err, want)
		}
	}
}

func forgetAll() act {
	return change(func(t *testing.T, th *theatre) { th.forget(t) })
}

// Tables of the plays.
const (
	only80    = nodetable.ID(40) // TCP, UDP and SCTP to port 80, for all peers
	only80b   = nodetable.ID(41) // a table with the same content but another number
	friends   = nodetable.ID(42) // all traffic with peers of identity class 7
	pings     = nodetable.ID(43) // echo requests
	redirects = nodetable.ID(44) // TCP to a proxy that does not exist
	worldly   = nodetable.ID(45) // only peers in the world
)

// putTables writes the tables to the maps.
func (th *theatre) putTables(t *testing.T) {
	t.Helper()
	none := rules(noAdmin, noRest)
	web := map[uint32]uint32{lastHi: none}
	for _, proto := range []uint32{6, 17, 132} {
		web[proto<<16|79], web[proto<<16|80] = none, rules(noAdmin, 1)
	}
	for _, id := range []nodetable.ID{only80, only80b} {
		rawTable{id: id, rules: []uint8{actAllow}, classes: []map[uint32]uint32{web}}.put(t, th.k)
	}
	rawTable{
		id: friends, header: bpf.MapsSlTable{PeerSet: uint32(friends)}, rules: []uint8{actAllow},
		classes: []map[uint32]uint32{{lastHi: none}, {lastHi: rules(noAdmin, 1)}},
	}.put(t, th.k)
	must(t, "befriend", th.k.Pins.Map(bpf.MapsMapSlPeer).Update(
		bpf.MapsSlPeerKey{PeerSet: uint32(friends), NodeClass: 7}, uint32(1), ebpf.UpdateAny))
	rawTable{
		id: pings, rules: []uint8{actAllow},
		classes: []map[uint32]uint32{{
			1<<16 | 8<<8 - 1: none, 1<<16 | 8<<8: rules(noAdmin, 1),
			58<<16 | 128<<8 - 1: none, 58<<16 | 128<<8: rules(noAdmin, 1), lastHi: none,
		}},
	}.put(t, th.k)
	rawTable{
		id: redirects, rules: []uint8{actRedirect},
		classes: []map[uint32]uint32{{6 << 16: none, 6<<16 | 0xffff: rules(noAdmin, 1), lastHi: none}},
	}.put(t, th.k)
	rawTable{
		id: worldly, rules: []uint8{actAllow},
		header:  bpf.MapsSlTable{DefClass: [8]uint16{bpf.MapsSlKindSL_KIND_WORLD4: 1, bpf.MapsSlKindSL_KIND_WORLD6: 1}},
		classes: []map[uint32]uint32{{lastHi: none}, {lastHi: rules(noAdmin, 1)}},
	}.put(t, th.k)
	for id, word := range map[identity.Numeric]uint32{
		identity.Host: knownWord(0, uint32(bpf.MapsSlKindSL_KIND_HOST), 1), identity.World: knownWord(0, uint32(bpf.MapsSlKindSL_KIND_WORLD4), 2),
		identity.WorldIPv4: knownWord(0, uint32(bpf.MapsSlKindSL_KIND_WORLD4), 2), identity.WorldIPv6: knownWord(0, uint32(bpf.MapsSlKindSL_KIND_WORLD6), 2),
	} {
		update(t, th.k, bpf.MapsMapSlId, uint32(id), word)
	}
	update(t, th.k, bpf.MapsMapSlId, uint32(friend), knownWord(7, 0, 2))
	update(t, th.k, bpf.MapsMapSlId, uint32(stranger), knownWord(8, 0, 2))
}

const friend, stranger = identity.Numeric(3000), identity.Numeric(3001)

// within adds a prefix around an actor's address to the ipcache, shorter by the given number of bits.
func within(who string, bits int, id identity.Numeric) act {
	return change(func(t *testing.T, th *theatre) {
		must(t, "set a prefix", th.k.Addresses.Set(around(t, th.addr(who), bits), ipmap.Info{Identity: id}))
	})
}

// forgets removes the ipcache entry of knows or within.
func forgets(who string, bits int) act {
	return change(func(t *testing.T, th *theatre) {
		must(t, "remove a prefix", th.k.Addresses.Remove(around(t, th.addr(who), bits)))
	})
}

func around(t *testing.T, a netip.Addr, bits int) netip.Prefix {
	t.Helper()
	p, err := a.Prefix(a.BitLen() - bits)
	must(t, "prefix", err)
	return p
}

// knows adds an actor's address to the ipcache.
func knows(who string, id identity.Numeric) act {
	return change(func(t *testing.T, th *theatre) {
		must(t, "UpsertIP", th.k.Addresses.Set(ipmap.HostPrefix(th.addr(who)), ipmap.Info{Identity: id}))
	})
}

// labelled changes the identity of a pod.
func labelled(who string, id identity.Numeric) act {
	return change(func(t *testing.T, th *theatre) {
		must(t, "SetIdentity", setIdentity(t, th.k, th.pods[who].Slot, id))
	})
}

// hostHas sets the addresses of the host.
func hostHas(who ...string) act {
	return change(func(t *testing.T, th *theatre) {
		as := []netip.Addr{host4, host6}
		for _, name := range who {
			as = append(as, th.addr(name))
		}
		must(t, "SyncHostAddrs", th.k.Endpoints.SyncHostAddrs(as))
	})
}

func bump(who string) act {
	return change(func(t *testing.T, th *theatre) { must(t, "BumpAddress", th.k.Addresses.Bump(th.addr(who))) })
}

func bumpEpoch(who string) act {
	return change(func(t *testing.T, th *theatre) { must(t, "BumpEpochs", th.k.Endpoints.BumpEpochs(th.pods[who].Slot)) })
}

func audit(who string, on bool) act {
	return change(func(t *testing.T, th *theatre) {
		must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), on, th.pods[who].Slot))
	})
}

// budgetOf returns the index of a pod, or of the world, in sl_budget.
func (th *theatre) budgetOf(who string) uint32 {
	at := uint32(th.pods[who].Slot) << 1
	if who == "world" {
		at = conntrack.Outside << 1
	}
	if th.v6 {
		at++
	}
	return at
}

// wornOut sets a budget to the state in which it was used up the given number of seconds ago.
func wornOut(who string, limit uint64, ago uint32) act {
	return change(func(t *testing.T, th *theatre) {
		update(t, th.k, bpf.MapsMapSlBudget, th.budgetOf(who),
			bpf.MapsSlBudget{Begun: uint64(conntrack.MonotonicSeconds()-ago)<<32 | limit, Limit: limit})
	})
}

// spent checks how many connections are charged to a pod.
func spent(who string, want uint32) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		var b bpf.MapsSlBudget
		must(t, "look up", th.k.Pins.Map(bpf.MapsMapSlBudget).Lookup(th.budgetOf(who), &b))
		if uint32(b.Begun) != want {
			t.Errorf("%d connections are charged to %s, want %d", uint32(b.Begun), who, want)
		}
	}
}

// ended checks how many connections of a pod have ended since its budget was renewed.
func ended(who string, want uint32) func(*testing.T, *theatre) {
	return func(t *testing.T, th *theatre) {
		var b bpf.MapsSlBudget
		must(t, "look up", th.k.Pins.Map(bpf.MapsMapSlBudget).Lookup(th.budgetOf(who), &b))
		if got := uint32(b.Limit >> 32); got != want {
			t.Errorf("%d connections of %s have ended, want %d", got, who, want)
		}
	}
}

// short opens connections from a to b from consecutive ports and resets them.
func short(first, n uint16) (acts []act) {
	for port := first; port < first+n; port++ {
		acts = append(acts, handshake(port, 80)...)
		acts = append(acts, say("a", "b", segment(port, 80, flagRST), event.ForwardedToPod))
	}
	return acts
}

// budget sets a limit and restarts the count.
func budget(who string, limit uint64) act {
	return change(func(t *testing.T, th *theatre) {
		update(t, th.k, bpf.MapsMapSlBudget, th.budgetOf(who), bpf.MapsSlBudget{Limit: limit})
	})
}

// handshake opens a connection from a to b.
func handshake(sport, dport uint16) []act {
	return []act{
		say("a", "b", segment(sport, dport, flagSYN), event.ForwardedToPod),
		say("b", "a", segment(dport, sport, flagSYN|flagACK), event.ForwardedToPod),
		say("a", "b", segment(sport, dport, flagACK), event.ForwardedToPod),
	}
}

// oneWay allows only connections from a to b.
func oneWay() []act {
	return []act{policy("a", nodetable.Allow, nodetable.Deny), policy("b", nodetable.Deny, nodetable.Allow)}
}

type scene struct {
	name string
	acts []act
}

func scenes() []scene {
	play := func(parts ...any) []act {
		var acts []act
		for _, p := range parts {
			switch p := p.(type) {
			case act:
				acts = append(acts, p)
			case []act:
				acts = append(acts, p...)
			}
		}
		return acts
	}
	data := byte(flagACK | flagPSH)
	return []scene{
		// answers
		{"a TCP connection needs permission one way only", play(oneWay(), handshake(4000, 80),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},
		{"a UDP flow needs permission one way only", play(oneWay(),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod).check(begunBy("a", 0)),
			say("b", "a", datagram(53, 4000), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod))},
		{"a UDP answer to another port belongs to no connection", play(oneWay(),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			say("b", "a", datagram(53, 4001), event.PolicyDenied).check(remain(1)))},
		{"a UDP packet before the request is not an answer", play(oneWay(), say("b", "a", datagram(53, 4000), event.PolicyDenied).check(remain(0)))},
		{"an echo is answered", play(oneWay(),
			say("a", "b", ping(false, 7), event.ForwardedToPod).check(begunBy("a", 0)),
			say("b", "a", ping(true, 7), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)))},
		{"an echo of another identifier is not answered", play(oneWay(),
			say("a", "b", ping(false, 7), event.ForwardedToPod),
			say("b", "a", ping(true, 8), event.PolicyDenied))},
		{"an echo reply to no request begins nothing", play(
			say("a", "b", ping(true, 7), event.ForwardedToPod).check(remain(0)),
			policy("a", nodetable.Deny, nodetable.Allow),
			say("a", "b", ping(true, 7), event.PolicyDenied))},
		{"an echo the other way with the same identifier is evaluated by itself", play(oneWay(),
			say("a", "b", ping(false, 7), event.ForwardedToPod),
			say("b", "a", ping(false, 7), event.PolicyDenied),
			say("b", "a", ping(true, 7), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)))},
		{"an echo with another type is evaluated", play(policy("a", pings, nodetable.Deny), policy("b", nodetable.Deny, pings),
			say("a", "b", ping(false, 7), event.ForwardedToPod),
			say("a", "b", ping(true, 7), event.IdentityUnknown),
			say("a", "b", coded(ping(false, 7), 5), event.IdentityUnknown),
			say("b", "a", coded(ping(true, 7), 5), event.PolicyDenied),
			say("b", "a", ping(true, 7), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)))},
		{"an SCTP association needs permission one way only", play(oneWay(),
			say("a", "b", chunk(4000, 80, 1), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 2), event.ForwardedToPod),
			say("a", "b", chunk(4000, 80, 10), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("b", "a", chunk(80, 4000, 11), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},
		{"an SCTP association is open when the cookie was right", play(
			say("a", "b", chunk(4000, 80, 1), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 2), event.ForwardedToPod),
			say("a", "b", chunk(4000, 80, 10), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 9), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("b", "a", chunk(80, 4000, 14), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("b", "a", chunk(80, 4000, 0x80), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},
		{"another protocol needs permission one way only", play(oneWay(),
			say("b", "a", other(47), event.PolicyDenied),
			say("a", "b", other(47), event.ForwardedToPod),
			say("b", "a", other(47), event.ForwardedToPod),
			say("b", "a", other(50), event.PolicyDenied))},
		{"ICMP that is neither echo nor error is evaluated by itself", play(oneWay(),
			say("a", "b", func(th *theatre) (byte, []byte) {
				if th.v6 {
					return 58, icmp(200, 0)
				}
				return 1, icmp(13, 0)
			}, event.ForwardedToPod).check(remain(0)),
			say("b", "a", func(th *theatre) (byte, []byte) {
				if th.v6 {
					return 58, icmp(200, 0)
				}
				return 1, icmp(14, 0)
			}, event.PolicyDenied))},
		{"the host's probes are answered while the policy is unknown", play(policy("a", nodetable.Pending, nodetable.Pending),
			say("host", "a", segment(4000, 80, flagSYN), event.ForwardedFromStack),
			say("a", "host", segment(80, 4000, flagSYN|flagACK), event.ForwardedToHost),
			say("host", "a", datagram(4000, 53), event.ForwardedFromStack),
			say("a", "host", datagram(53, 4000), event.ForwardedToHost),
			say("host", "a", ping(false, 7), event.ForwardedFromStack),
			say("a", "host", ping(true, 7), event.ForwardedToHost),
			say("a", "host", datagram(53, 4001), event.PolicyPending),
			say("a", "host", segment(80, 4001, flagSYN), event.PolicyPending),
			say("world", "a", datagram(4000, 53), event.PolicyPending))},

		// life and end
		{"each connection is reported when it is evaluated and when it ends", play(
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(reported(1, 0)),
			say("b", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedToPod).check(reported(0, 0)),
			say("a", "b", segment(4000, 80, flagFIN|flagACK), event.ForwardedToPod).check(all(reported(0, 0), begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.InitiatorFinished))),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.ForwardedToPod).check(all(reported(0, 1), begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.InitiatorFinished|conntrack.ResponderFinished|conntrack.CloseReported))),
			say("a", "b", segment(4000, 80, flagACK), event.ForwardedToPod).check(reported(0, 0)),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.ForwardedToPod).check(reported(0, 0)))},
		{"a RST ends a connection, and late packets still pass", play(handshake(4000, 80),
			say("b", "a", segment(80, 4000, flagRST), event.ForwardedToPod).check(all(reported(0, 1), begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.Reset|conntrack.ByResponderReset|conntrack.CloseReported))),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(all(reported(0, 0), begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.Reset|conntrack.ByResponderReset|conntrack.CloseReported))))},
		{"a RST whose sender continues did not end the connection", play(handshake(4000, 80),
			say("b", "a", segment(80, 4000, flagRST), event.ForwardedToPod).check(reported(0, 1)),
			say("b", "a", segment(80, 4000, flagRST|flagACK), event.ForwardedToPod),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)),
			say("a", "b", segment(4000, 80, flagRST|flagACK), event.ForwardedToPod).check(all(reported(0, 1), begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.Reset|conntrack.CloseReported))),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.Reset|conntrack.CloseReported)),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},
		{"an SCTP association ends by shutdown", play(
			say("a", "b", chunk(4000, 80, 1), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 2), event.ForwardedToPod),
			say("a", "b", chunk(4000, 80, 7), event.ForwardedToPod).check(reported(0, 0)),
			say("b", "a", chunk(80, 4000, 8), event.ForwardedToPod).check(all(reported(0, 1), begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.InitiatorFinished|conntrack.ResponderFinished|conntrack.CloseReported))))},
		{"an SCTP association ends by abort", play(
			say("a", "b", chunk(4000, 80, 1), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 6), event.ForwardedToPod).check(all(reported(0, 1), begunBy("a", conntrack.SeenReply|conntrack.Reset|conntrack.ByResponderReset|conntrack.CloseReported))))},

		{"an answer to a SYN establishes nothing", play(
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod),
			say("b", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("b", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply)),
			say("a", "b", segment(4000, 80, flagACK), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},

		// SYN
		{"a repeated SYN is the same connection", play(
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(all(begunBy("a", 0), reported(0, 0))))},
		{"a SYN the other way needs its own permission", play(oneWay(), handshake(4000, 80),
			say("b", "a", segment(80, 4000, flagSYN), event.PolicyDenied).check(begunBy("a", conntrack.SeenReply|conntrack.Established)),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod))},
		{"a SYN the other way takes no live connection over", play(handshake(4000, 80),
			say("b", "a", segment(80, 4000, flagSYN), event.ConnectionInvalid).check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},
		{"both ends may open at once under a one-way policy", play(oneWay(),
			say("a", "b", segment(4000, 4000, flagSYN), event.ForwardedToPod),
			say("b", "a", segment(4000, 4000, flagSYN), event.PolicyDenied),
			say("b", "a", segment(4000, 4000, flagSYN|flagACK), event.ForwardedToPod))},
		{"a port is used again after the end", play(handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagFIN|flagACK), event.ForwardedToPod),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.ForwardedToPod),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(all(begunBy("a", 0), reported(1, 0))))},
		{"a port is used again by the same end before the other has finished", play(handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagFIN|flagACK), event.ForwardedToPod),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(begunBy("a", 0)))},
		{"a port is used again the other way after the end", play(handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagFIN|flagACK), event.ForwardedToPod),
			say("b", "a", segment(80, 4000, flagSYN), event.ConnectionInvalid),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.ForwardedToPod),
			say("b", "a", segment(80, 4000, flagSYN), event.ForwardedToPod).check(begunBy("b", 0)),
			say("a", "b", segment(4000, 80, flagSYN|flagACK), event.ForwardedToPod).check(begunBy("b", conntrack.SeenReply)))},
		{"a port that is used again is evaluated again", play(handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagRST|flagACK), event.ForwardedToPod),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, flagSYN), event.PolicyDenied).on(event.Ingress))},
		{"an INIT the other way takes no live association over", play(
			say("a", "b", chunk(4000, 80, 1), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 2), event.ForwardedToPod),
			say("b", "a", chunk(80, 4000, 1), event.ConnectionInvalid))},

		// packets that match no connection
		{"a segment without ACK begins nothing", play(
			say("a", "b", segment(4000, 80, 0), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagFIN), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagRST), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagSYN|flagACK), event.ConnectionInvalid),
			say("host", "a", segment(4000, 80, flagPSH), event.ConnectionInvalid).check(remain(0)))},
		{"a segment without ACK belongs to no connection", play(handshake(4000, 80),
			say("a", "b", segment(4000, 80, 0), event.ConnectionInvalid),
			say("b", "a", segment(80, 4000, flagFIN|flagPSH), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagRST), event.ForwardedToPod).check(reported(0, 1)))},
		{"a SYN with FIN or RST is invalid", play(budget("a", 3),
			say("a", "b", segment(4000, 80, flagSYN|flagFIN), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagSYN|flagRST), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, 0xff), event.ConnectionInvalid).check(all(remain(0), spent("a", 0))),
			handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagSYN|flagFIN), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagSYN|flagRST), event.ConnectionInvalid).check(begunBy("a", conntrack.SeenReply|conntrack.Established)),
			budget("a", 0))},
		{"a RST of an unknown connection creates no entry", play(
			say("a", "b", segment(4000, 80, flagRST|flagACK), event.ForwardedToPod).check(remain(0)))},

		// eviction
		{"an evicted connection goes on from the client", play(oneWay(), handshake(4000, 80), forgetAll(),
			say("a", "b", segment(4000, 80, data), event.ForwardedOutside).check(all(begunBy("a", conntrack.PickedUp|conntrack.ViaStack), reported(1, 0))),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside))},
		{"a server waits for a silent client", play(oneWay(), handshake(4000, 80), forgetAll(),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(remain(0)),
			say("a", "b", segment(4000, 80, flagACK), event.ForwardedOutside).check(begunBy("a", conntrack.PickedUp|conntrack.ViaStack)),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside).check(begunBy("a", conntrack.PickedUp|conntrack.ViaStack|conntrack.SeenReply|conntrack.Established)))},
		{"a port is not scanned with anything but a SYN", play(policy("a", nodetable.Allow, nodetable.Allow), policy("b", nodetable.Allow, only80),
			say("a", "b", segment(4000, 22, flagACK), event.IdentityUnknown).on(event.Ingress).check(remain(0)),
			say("a", "b", segment(4000, 22, flagFIN), event.ConnectionInvalid),
			say("a", "b", segment(4000, 22, 0), event.ConnectionInvalid),
			say("a", "b", segment(4000, 22, flagFIN|flagPSH|0x20), event.ConnectionInvalid),
			say("a", "b", segment(4000, 22, flagRST), event.ConnectionInvalid),
			say("a", "b", segment(4000, 22, flagSYN|flagACK), event.ConnectionInvalid),
			say("a", "b", segment(4000, 22, data), event.IdentityUnknown).on(event.Ingress).check(remain(0)),
			say("world", "b", segment(4000, 22, flagACK), event.PolicyDenied).check(remain(0)))},
		{"a connection that either end may have begun needs both permissions", play(handshake(4000, 22), forgetAll(),
			say("b", "a", segment(22, 4000, data), event.ForwardedOutside).check(begunBy("b", conntrack.PickedUp|conntrack.Unoriented|conntrack.ViaStack)),
			say("a", "b", segment(4000, 22, data), event.ForwardedOutside),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 22, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 1)),
			say("b", "a", segment(22, 4000, data), event.PolicyDenied).on(event.Egress).check(reported(0, 0)))},
		{"a late end of the server does not keep the client's next connection from its port", play(
			handshake(4000, 80), forgetAll(),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.ForwardedOutside),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(begunBy("a", 0)),
			say("b", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedToPod))},
		{"nor does an end that still knows the connection", play(handshake(4000, 80), forgetAll(),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside),
			say("a", "b", segment(4000, 80, data), event.ForwardedOutside),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(begunBy("a", 0)),
			say("b", "a", segment(80, 4000, flagACK), event.ForwardedToPod),
			say("a", "b", segment(4000, 80, flagRST), event.ForwardedToPod))},
		{"but the policy decides about a SYN", play(handshake(4000, 80), forgetAll(),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, flagSYN), event.PolicyDenied).on(event.Ingress))},
		{"the permission of the other end alone does not keep it", play(handshake(4000, 22), forgetAll(),
			say("a", "b", segment(4000, 22, data), event.ForwardedOutside).check(begunBy("a", conntrack.PickedUp|conntrack.Unoriented|conntrack.ViaStack)),
			policy("a", nodetable.Allow, nodetable.Deny),
			say("b", "a", segment(22, 4000, data), event.PolicyDenied).on(event.Ingress),
			policy("a", nodetable.Allow, nodetable.Allow),
			say("b", "a", segment(22, 4000, data), event.ForwardedOutside),
			say("a", "b", segment(4000, 22, data), event.ForwardedOutside))},
		{"a connection that was picked up begins nothing the other way", play(oneWay(),
			say("a", "b", segment(4000, 80, data), event.ForwardedOutside),
			say("b", "a", segment(80, 4000, flagRST|flagACK), event.ForwardedOutside),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.ForwardedOutside),
			say("b", "a", segment(80, 4000, flagSYN), event.PolicyDenied))},
		{"a connection that the stack has translated stays on the stack", play(
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedFromStack).throughStack(),
			say("b", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedOutside),
			forgetAll(),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside),
			say("a", "b", segment(4000, 80, data), event.ForwardedFromStack).throughStack(),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside))},
		{"a connection that is denied in both directions is not picked up", play(policy("a", nodetable.Deny, nodetable.Deny), policy("b", nodetable.Deny, nodetable.Deny),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(remain(0)),
			say("a", "b", segment(80, 4000, data), event.PolicyDenied).check(remain(0)))},
		{"an evicted UDP flow is not picked up", play(oneWay(),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod), forgetAll(),
			say("b", "a", datagram(53, 4000), event.PolicyDenied).check(remain(0)))},

		// connections that a policy has terminated
		{"a revoked connection stays revoked without its entry", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 1)),
			evict(),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(remain(0)),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(remain(0)),
			say("b", "a", segment(80, 4000, flagFIN|flagACK), event.PolicyDenied).check(remain(0)))},
		{"a connection whose server's answer was denied first stays revoked", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied),
			evict(),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(remain(0)))},
		{"a revoked connection that is allowed again goes on without its entry", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress),
			evict(),
			policy("b", nodetable.Allow, nodetable.Allow),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside).check(begunBy("a", conntrack.PickedUp|conntrack.ByResponder|conntrack.ViaStack)),
			say("a", "b", segment(4000, 80, data), event.ForwardedOutside),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(reported(0, 1)),
			evict(),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(remain(0)))},
		{"a connection that has ended can still be revoked", play(handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagRST), event.ForwardedToPod),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress),
			evict(),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).check(remain(0)))},
		{"the record of ports that are reused in the other direction is replaced", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress),
			evict(),
			policy("b", nodetable.Allow, nodetable.Allow),
			say("b", "a", segment(80, 4000, flagSYN), event.ForwardedToPod).check(begunBy("b", 0)),
			policy("a", nodetable.Allow, nodetable.Deny),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).on(event.Ingress),
			evict(),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Egress).check(remain(0)))},
		{"if the map of records is full, connections are not picked up", play(handshake(4000, 80),
			fullOfRevoked(),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(stopped(1)),
			evict(),
			say("b", "a", segment(80, 4000, data), event.ConnectionInvalid).check(remain(0)),
			say("b", "world", segment(80, 4000, data), event.ConnectionInvalid),
			// the other end has revoked no connection
			say("a", "world", segment(80, 4000, data), event.ForwardedOutside),
			change(func(t *testing.T, th *theatre) { th.k.Endpoints.AllowPickUp() }))},
		{"after a loss of entries, connections that may have been revoked are not picked up", play(
			policy("b", nodetable.Allow, only80),
			change(func(t *testing.T, th *theatre) { th.k.Endpoints.StopPickUp() }),
			say("b", "a", segment(22, 4000, data), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, data), event.ConnectionInvalid),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod),
			say("a", "world", segment(4000, 80, data), event.ForwardedOutside),
			change(func(t *testing.T, th *theatre) { th.k.Endpoints.AllowPickUp() }),
			say("b", "a", segment(22, 4000, data), event.ForwardedOutside))},

		// policy changes during a connection
		{"a revoked connection is cut both ways and stays cut", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 1)),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).on(event.Egress).check(reported(0, 0)),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 0)),
			say("a", "b", segment(4000, 80, flagSYN), event.PolicyDenied).on(event.Ingress))},
		{"a reply is the first denied packet", play(handshake(4000, 80),
			policy("a", nodetable.Deny, nodetable.Allow),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 1)))},
		{"a revoked connection that is allowed again goes on", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress),
			policy("b", nodetable.Allow, nodetable.Allow),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod))},
		{"a connection is revoked twice", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 1)),
			policy("b", nodetable.Allow, nodetable.Allow),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established)),
			say("b", "a", segment(80, 4000, flagSYN), event.ConnectionInvalid),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).on(event.Egress).check(reported(0, 1)))},
		{"the end of a connection is reported once, whatever the policy does", play(handshake(4000, 80),
			say("b", "a", segment(80, 4000, flagRST), event.ForwardedToPod).check(reported(0, 1)),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress).check(reported(0, 0)),
			policy("b", nodetable.Allow, nodetable.Allow),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(begunBy("a", conntrack.SeenReply|conntrack.Established|conntrack.Reset|conntrack.ByResponderReset|conntrack.CloseReported)))},
		{"a revoked connection begins anew with a SYN", play(handshake(4000, 80),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied).on(event.Ingress),
			policy("b", nodetable.Allow, nodetable.Allow),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod).check(begunBy("a", 0)))},
		{"a revoked UDP flow is cut and forgotten", play(
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			policy("b", nodetable.Allow, nodetable.Deny),
			say("a", "b", datagram(4000, 53), event.PolicyDenied).on(event.Ingress).check(all(reported(0, 1), remain(0))))},
		{"a connection that stays allowed loses nothing and is evaluated once", play(handshake(4000, 80),
			policy("b", nodetable.Allow, only80),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod).check(reported(1, 0)),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(reported(0, 0)),
			bumpEpoch("a"),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(reported(1, 0)),
			change(func(t *testing.T, th *theatre) {
				c := th.only(t)
				a, err := th.k.Endpoints.Lookup(th.pods["a"].Slot)
				must(t, "Lookup", err)
				b, err := th.k.Endpoints.Lookup(th.pods["b"].Slot)
				must(t, "Lookup", err)
				if c.From.Epoch != a.Policy.Epoch || c.To.Epoch != b.Policy.Epoch || c.IngressRule != 1 {
					t.Errorf("epochs %d and %d, rule %d, want %d, %d, 1", c.From.Epoch, c.To.Epoch, c.IngressRule, a.Policy.Epoch, b.Policy.Epoch)
				}
			}))},
		{"an answer is evaluated by the ports of the question", play(policy("a", only80, nodetable.Deny), policy("b", nodetable.Deny, only80),
			handshake(4000, 80),
			policy("b", nodetable.Deny, only80b),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod),
			policy("a", only80b, nodetable.Deny),
			say("b", "a", segment(80, 4000, data), event.ForwardedToPod),
			say("b", "a", segment(81, 4000, data), event.PolicyDenied))},
		{"an echo reply is evaluated as the request", play(policy("a", pings, nodetable.Deny), policy("b", nodetable.Deny, pings),
			say("a", "b", ping(false, 7), event.ForwardedToPod),
			bumpEpoch("b"), bumpEpoch("a"),
			say("b", "a", ping(true, 7), event.ForwardedToPod))},
		{"only the side that moved is evaluated", play(handshake(4000, 80),
			// a's table is replaced in place, without a new epoch for the connection
			policy("a", only80, nodetable.Allow),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod),
			change(func(t *testing.T, th *theatre) {
				update(t, th.k, bpf.MapsMapSlRule, uint32(only80)*16, bpf.MapsSlRule{Action: actDeny})
			}),
			bumpEpoch("b"),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(func(t *testing.T, th *theatre) {
				if len(th.evaluated) != 1 || th.evaluated[0].Egress.By != event.ByNobody || th.evaluated[0].Ingress.By == event.ByNobody {
					t.Errorf("evaluated %+v, want the ingress side alone", th.evaluated)
				}
			}),
			bumpEpoch("a"),
			say("a", "b", segment(4000, 80, data), event.IdentityUnknown))},
		{"a connection that is to go through a proxy cannot be moved", play(handshake(4000, 80),
			policy("b", nodetable.Allow, redirects),
			say("a", "b", segment(4000, 80, data), event.NoProxy).on(event.Ingress).check(reported(0, 1)))},
		{"a relabelled pod's connections are evaluated again on both sides", play(
			change(func(t *testing.T, th *theatre) {
				must(t, "SetIdentity", setIdentity(t, th.k, th.pods["b"].Slot, friend))
			}),
			policy("a", friends, nodetable.Allow),
			handshake(4000, 80),
			change(func(t *testing.T, th *theatre) {
				must(t, "SetIdentity", setIdentity(t, th.k, th.pods["b"].Slot, stranger))
			}),
			say("a", "b", segment(4000, 80, data), event.PolicyDenied),
			say("b", "a", segment(80, 4000, data), event.PolicyDenied).on(event.Ingress))},

		{"a packet that is denied in audit mode passes and is reported", play(policy("b", nodetable.Deny, only80), audit("b", true),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod).check(func(t *testing.T, th *theatre) {
				if len(th.evaluated) != 1 || !th.evaluated[0].Ingress.Audited || th.evaluated[0].Egress.Audited {
					t.Errorf("evaluated %+v, want the ingress side audited", th.evaluated)
				}
			}),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod).check(reported(0, 0)),
			say("a", "b", datagram(4000, 80), event.ForwardedToPod).check(func(t *testing.T, th *theatre) {
				if len(th.evaluated) != 1 || th.evaluated[0].Ingress.Audited || th.evaluated[0].Ingress.Rule != 1 {
					t.Errorf("evaluated %+v, want rule 1 and nothing audited", th.evaluated)
				}
			}),
			audit("b", false),
			say("a", "b", datagram(4000, 53), event.IdentityUnknown).on(event.Ingress),
			say("a", "b", datagram(4000, 80), event.ForwardedToPod))},

		// budgets
		{"an endpoint over its budget must wait", play(budget("a", 2),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			say("a", "world", segment(4000, 80, flagSYN), event.ForwardedOutside),
			say("a", "b", datagram(4001, 53), event.ConnectionBudget),
			say("a", "b", segment(4000, 80, flagSYN), event.ConnectionBudget),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			say("b", "a", datagram(53, 4000), event.ForwardedToPod),
			say("b", "a", datagram(4000, 53), event.ForwardedToPod),
			say("world", "a", datagram(4001, 53), event.ForwardedFromStack).check(remain(4)),
			budget("a", 2),
			say("a", "b", datagram(4001, 53), event.ForwardedToPod),
			budget("a", 0))},
		{"echo requests from outside leave the budget of outside to other protocols", play(budget("world", 1),
			say("world", "a", ping(false, 7), event.ForwardedFromStack),
			say("world", "a", ping(false, 8), event.ForwardedFromStack).check(spent("world", 0)),
			say("world", "a", chunk(4000, 80, 1), event.ForwardedFromStack),
			say("world", "a", chunk(4001, 80, 1), event.ConnectionBudget),
			budget("world", 0))},
		{"a denied packet is not charged to the budget", play(budget("a", 1), policy("b", nodetable.Allow, only80),
			say("a", "b", datagram(4000, 53), event.IdentityUnknown).on(event.Ingress),
			say("a", "b", datagram(4000, 80), event.ForwardedToPod),
			budget("a", 0))},
		{"without a collector a budget is renewed in parts", play(wornOut("a", 2000, 11),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod).check(spent("a", 2000-250+1)),
			say("a", "b", datagram(4001, 53), event.ForwardedToPod).check(spent("a", 2000-250+2)),
			wornOut("a", 200, 11),
			say("a", "b", datagram(4002, 53), event.ForwardedToPod).check(spent("a", 200-128+1)),
			wornOut("a", 3, 11),
			say("a", "b", datagram(4003, 53), event.ForwardedToPod).check(spent("a", 1)),
			say("a", "b", datagram(4004, 53), event.ForwardedToPod),
			say("a", "b", datagram(4005, 53), event.ForwardedToPod),
			say("a", "b", datagram(4006, 53), event.ConnectionBudget),
			budget("a", 0))},
		{"ended connections are returned to the budget, at most a quarter at once", play(budget("a", 8),
			short(4000, 8), short(5000, 2), say("a", "b", segment(6000, 80, flagSYN), event.ConnectionBudget),
			budget("a", 0))},
		{"a connection that continues after a RST is not returned", play(budget("a", 8),
			handshake(4000, 80),
			say("a", "b", segment(4000, 80, flagRST), event.ForwardedToPod).check(ended("a", 1)),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(ended("a", 0)),
			say("b", "a", segment(80, 4000, flagRST), event.ForwardedToPod).check(ended("a", 1)),
			say("a", "b", segment(4000, 80, data), event.ForwardedToPod).check(ended("a", 1)),
			budget("a", 0))},
		{"a budget is not renewed before its time", play(wornOut("a", 2000, 5),
			say("a", "b", datagram(4000, 53), event.ConnectionBudget).check(spent("a", 2000)),
			budget("a", 0))},
		{"a connection that is picked up is charged to the pod that sends", play(budget("a", 1), budget("b", 2),
			say("b", "a", segment(80, 4000, data), event.ForwardedOutside).check(all(begunBy("b", conntrack.PickedUp|conntrack.Unoriented|conntrack.ViaStack), spent("a", 0), spent("b", 1))),
			say("b", "a", segment(80, 4001, data), event.ForwardedOutside),
			say("b", "a", segment(80, 4002, data), event.ConnectionBudget),
			say("a", "b", segment(4003, 80, flagSYN), event.ForwardedToPod).check(spent("a", 1)),
			budget("a", 0), budget("b", 0))},

		// address changes
		{"an address that goes to another identity ends its connection at once", play(knows("world", friend), policy("a", friends, nodetable.Deny),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			knows("world", stranger),
			say("a", "world", datagram(4000, 53), event.PolicyDenied).check(remain(0)),
			forgets("world", 0))},
		{"an address whose prefix becomes more specific is evaluated again", play(within("world", 8, friend), policy("a", friends, nodetable.Deny),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			knows("world", stranger),
			say("a", "world", datagram(4000, 53), event.PolicyDenied).check(remain(0)),
			forgets("world", 0),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside).check(remain(1)),
			forgets("world", 8),
			say("a", "world", datagram(4000, 53), event.PolicyDenied).check(remain(0)))},
		{"a prefix under a longer match has no effect", play(knows("world", friend), policy("a", friends, nodetable.Deny),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			within("world", 8, stranger),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside).check(remain(1)),
			forgets("world", 0),
			say("a", "world", datagram(4000, 53), event.PolicyDenied).check(remain(0)),
			forgets("world", 8))},
		{"an answer from an address whose identity has changed is denied, too", play(knows("world", friend), policy("a", friends, nodetable.Deny),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			knows("world", stranger), bump("world"),
			say("world", "a", datagram(53, 4000), event.PolicyDenied).on(event.Ingress),
			change(func(t *testing.T, th *theatre) {
				must(t, "DeleteIP", th.k.Addresses.Remove(ipmap.HostPrefix(th.addr("world"))))
			}))},
		{"an address that becomes the host's is evaluated as the host", play(policy("a", worldly, nodetable.Deny),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			hostHas("host", "world"),
			say("a", "world", datagram(4000, 53), event.PolicyDenied),
			hostHas("host"),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside))},
		{"a packet to a tunnel port is not an answer", play(
			say("host", "a", datagram(4789, 53), event.ForwardedFromStack),
			say("a", "host", datagram(53, 4789), event.TunnelPort),
			say("a", "world", datagram(53, 4789), event.ForwardedOutside),
			hostHas("host", "world"),
			say("a", "world", datagram(53, 4789), event.TunnelPort),
			hostHas("host"))},
		{"an address epoch moves its own connections only", play(
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			bump("world"),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod).check(reported(0, 0)),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside).check(reported(1, 0)),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside).check(reported(0, 0)))},

		// through the stack
		{"a packet from the stack is answered through the stack", play(
			say("a", "b", datagram(4000, 53), event.ForwardedFromStack).throughStack().check(begunBy("a", conntrack.ViaStack)),
			say("b", "a", datagram(53, 4000), event.ForwardedOutside).check(begunBy("a", conntrack.ViaStack|conntrack.SeenReply)),
			say("b", "a", datagram(53, 4001), event.ForwardedToPod))},
		{"an error about a packet from the stack goes back through the stack", play(
			say("a", "b", datagram(4000, 53), event.ForwardedFromStack).throughStack(),
			say("b", "a", failure(3, "a", "b", datagram(4000, 53)), event.ForwardedOutside),
			say("b", "a", failure(11, "a", "b", datagram(4000, 53)), event.ForwardedOutside),
			say("a", "b", datagram(4001, 53), event.ForwardedToPod),
			say("b", "a", failure(3, "a", "b", datagram(4001, 53)), event.ForwardedToPod))},
		{"a port that was used directly is used through the stack", play(
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedToPod),
			say("a", "b", segment(4000, 80, flagSYN), event.ForwardedFromStack).throughStack().check(begunBy("a", conntrack.ViaStack)),
			say("b", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedOutside))},
		{"a flow to the outside is the stack's", play(
			say("a", "world", segment(4000, 80, flagSYN), event.ForwardedOutside).check(begunBy("a", conntrack.ViaStack)),
			say("world", "a", segment(80, 4000, flagSYN|flagACK), event.ForwardedFromStack).check(begunBy("a", conntrack.ViaStack|conntrack.SeenReply)),
			say("a", "world", segment(4000, 80, flagACK), event.ForwardedOutside))},
		{"a flow to the host is the stack's", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("a", "host", datagram(4000, 53), event.ForwardedToHost).check(begunBy("a", conntrack.ViaStack)),
			say("host", "a", datagram(53, 4000), event.ForwardedFromStack))},
		{"a forwarded packet with the host's address does not belong to the host", play(policy("b", nodetable.Deny, nodetable.Pending),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack),
			say("host", "b", datagram(4001, 53), event.PolicyPending).forwarded(),
			// a sender that was allowed before the new evaluation keeps its identity
			bumpEpoch("b"),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack))},
		// which packets can be from a sender
		{"a mark opens nothing to processes of the host", play(policy("b", nodetable.Deny, friends),
			say("host", "b", datagram(4000, 53), event.PolicyDenied),
			say("host", "b", datagram(4000, 53), event.PolicyDenied).marked(markOf(markPod, uint32(friend))),
			say("host", "b", datagram(4000, 53), event.PolicyDenied).marked(0x0a00|uint32(friend)<<16),
			change(func(t *testing.T, th *theatre) {
				a := say("host", "b", datagram(4000, 53), 0)
				prog, ctx, in := th.frame(a)
				ctx.Mark = markOf(markEvaluated, ctx.Ifindex)
				if o := th.run(t, prog, in, ctx, 0); o.reason != event.PolicyDenied {
					t.Errorf("with the mark of a delivered packet: %v, verdict %d", o.reason, o.verdict)
				}
			}))},
		{"a mark does not make a pod another one", play(policy("b", nodetable.Deny, friends), labelled("a", stranger),
			say("a", "b", datagram(4000, 53), event.PolicyDenied).throughStack(),
			say("a", "b", datagram(4000, 53), event.PolicyDenied).throughStack().marked(markOf(markPod, uint32(friend))),
			labelled("a", friend),
			say("a", "b", datagram(4000, 53), event.ForwardedFromStack).throughStack().marked(markOf(markPod, uint32(stranger))))},
		{"a pod's address by another device is forged", play(
			say("a", "b", datagram(4000, 53), event.SpoofedIP).fromDevice("b").on(event.Ingress),
			say("a", "b", datagram(4000, 53), event.SpoofedIP).fromNowhere().forwarded().on(event.Ingress),
			say("a", "b", datagram(4000, 53), event.ForwardedFromStack).throughStack())},
		{"a packet marked as forwarded does not belong to the host", play(policy("b", nodetable.Deny, nodetable.Pending),
			say("host", "b", datagram(4000, 53), event.PolicyPending).marked(0x100),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack),
			say("host", "b", datagram(4000, 53), event.PolicyPending).marked(0x100|0x8000),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack))},
		{"a forwarded packet does not continue a flow of the host", play(policy("b", nodetable.Deny, nodetable.Pending),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack).check(begunBy("host", conntrack.ViaStack)),
			say("host", "b", datagram(4000, 53), event.PolicyPending).forwarded().check(begunBy("host", conntrack.ViaStack)),
			say("host", "b", datagram(4000, 53), event.PolicyPending).fromDevice("a"),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack).check(reported(0, 0)),
			say("b", "host", datagram(53, 4000), event.ForwardedToHost))},
		{"a forwarded packet does not continue a flow that the host has answered", play(policy("b", nodetable.Allow, nodetable.Deny),
			say("b", "host", datagram(53, 4000), event.ForwardedToHost),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack),
			say("host", "b", datagram(4000, 53), event.PolicyDenied).forwarded(),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack))},
		{"the host does not continue what it forwards under its address", play(policy("b", nodetable.Allow, worldly),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack).forwarded(),
			say("host", "b", datagram(4000, 53), event.PolicyDenied),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack).forwarded().check(reported(0, 0)))},
		{"a process of the host does not continue a pod's flow", play(
			say("a", "b", datagram(4000, 53), event.ForwardedFromStack).throughStack().check(begunBy("a", conntrack.ViaStack)),
			say("a", "b", datagram(4000, 53), event.SpoofedIP).fromNowhere().on(event.Ingress),
			say("a", "b", datagram(4000, 53), event.SpoofedIP).fromDevice("b").on(event.Ingress),
			say("a", "b", datagram(4000, 53), event.ForwardedFromStack).throughStack().check(all(reported(0, 0), begunBy("a", conntrack.ViaStack))))},
		{"a SYN of another sender leaves the connection alone", play(policy("b", nodetable.Allow, nodetable.Allow),
			say("host", "b", segment(4000, 80, flagSYN), event.ForwardedFromStack),
			say("b", "host", segment(80, 4000, flagSYN|flagACK), event.ForwardedToHost),
			say("host", "b", segment(4000, 80, flagSYN), event.ForwardedFromStack).forwarded(),
			change(func(t *testing.T, th *theatre) {
				if c := th.only(t); c.From.Identity != identity.Host {
					t.Errorf("the connection is identity %d's, want the host's", c.From.Identity)
				}
			}))},
		{"a new epoch admits no other sender", play(policy("b", nodetable.Deny, nodetable.Pending),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack),
			bumpEpoch("b"),
			say("host", "b", datagram(4000, 53), event.PolicyPending).forwarded().check(begunBy("host", conntrack.ViaStack)),
			say("host", "b", datagram(4000, 53), event.ForwardedFromStack))},

		// senders after their address has moved
		{"a forged packet ends no flow whose address has moved", play(oneWay(),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod), say("b", "a", datagram(53, 4000), event.ForwardedToPod),
			bump("a"),
			say("a", "b", datagram(4000, 53), event.SpoofedIP).fromNowhere(),
			say("b", "a", datagram(53, 4000), event.ForwardedToPod))},
		{"a forged packet terminates no TCP connection whose address has moved", play(oneWay(), handshake(4000, 80),
			bump("a"),
			say("a", "b", segment(4000, 80, flagACK), event.SpoofedIP).fromNowhere().check(begunBy("a", conntrack.SeenReply|conntrack.Established)))},
		{"a forwarded packet takes over no flow to the host whose address has moved", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("a", "host", datagram(4000, 53), event.ForwardedToHost), say("host", "a", datagram(53, 4000), event.ForwardedFromStack),
			bump("host"),
			say("host", "a", datagram(53, 4000), event.PolicyDenied).forwarded(),
			say("host", "a", datagram(53, 4000), event.ForwardedFromStack))},
		{"a client under the host's address is not evaluated as the host when that moves", play(policy("a", nodetable.Deny, worldly),
			say("host", "a", datagram(4000, 53), event.ForwardedFromStack).forwarded(),
			say("a", "host", datagram(53, 4000), event.ForwardedToHost),
			policy("a", nodetable.Deny, nodetable.Pending),
			bump("host"),
			say("a", "host", datagram(53, 4000), event.PolicyPending).on(event.Egress))},

		// ICMP errors
		{"an error about a connection is delivered from any sender", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("a", "world", segment(4000, 80, flagSYN), event.ForwardedOutside),
			say("router", "a", failure(11, "a", "world", segment(4000, 80, flagSYN)), event.ForwardedFromStack),
			say("router", "a", failure(2, "a", "world", segment(4000, 80, flagSYN)), event.ForwardedFromStack),
			say("router", "a", failure(3, "a", "world", segment(4000, 80, flagSYN)), event.ForwardedFromStack).check(remain(1)),
			say("router", "a", failure(3, "a", "world", segment(4001, 80, flagSYN)), event.PolicyDenied),
			say("router", "a", failure(3, "b", "world", segment(4000, 80, flagSYN)), event.PolicyDenied))},
		{"an error about a connection of another pod is evaluated", play(
			policy("a", nodetable.Allow, nodetable.Deny),
			say("b", "world", datagram(4000, 53), event.ForwardedOutside),
			say("router", "a", failure(3, "b", "world", datagram(4000, 53)), event.PolicyDenied),
			say("router", "b", failure(3, "b", "world", datagram(4000, 53)), event.ForwardedFromStack),
		)},
		{"an error about an echo is delivered", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("a", "world", ping(false, 7), event.ForwardedOutside),
			say("router", "a", failure(3, "a", "world", ping(false, 7)), event.ForwardedFromStack),
			say("router", "a", failure(3, "a", "world", ping(false, 8)), event.PolicyDenied))},
		{"an error about another protocol is delivered", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("a", "world", other(47), event.ForwardedOutside),
			say("router", "a", failure(3, "a", "world", other(47)), event.ForwardedFromStack))},
		{"a pod answers with an error that its policy does not know", play(oneWay(),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			say("b", "a", failure(3, "a", "b", datagram(4000, 53)), event.ForwardedToPod),
			say("b", "a", failure(3, "a", "b", datagram(4001, 53)), event.PolicyDenied))},
		{"an error about a connection under an older policy is evaluated", play(
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			policy("a", nodetable.Deny, nodetable.Deny),
			say("router", "a", failure(3, "a", "world", datagram(4000, 53)), event.PolicyDenied))},
		{"a pod may not send errors about connections of others", play(oneWay(),
			say("a", "b", datagram(4000, 53), event.ForwardedToPod),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			say("b", "a", failure(3, "a", "world", datagram(4000, 53)), event.ConnectionInvalid),
			say("b", "a", failure(2, "a", "world", datagram(4000, 53)), event.ConnectionInvalid),
			say("router", "a", failure(3, "a", "world", datagram(4000, 53)), event.ForwardedFromStack),
			say("b", "a", failure(3, "a", "b", datagram(4000, 53)), event.ForwardedToPod))},
		{"a pod that may send everything forges no errors either", play(
			say("a", "b", failure(2, "b", "world", datagram(4000, 53)), event.ConnectionInvalid),
			say("a", "host", failure(2, "host", "world", ping(true, 7)), event.ConnectionInvalid),
			say("a", "host", failure(3, "host", "world", segment(4000, 80, flagACK)), event.ConnectionInvalid),
			say("a", "world", failure(11, "world", "b", datagram(4000, 53)), event.ConnectionInvalid),
			say("a", "host", failure(3, "b", "a", datagram(4000, 53)), event.ConnectionInvalid),
			say("a", "host", func(th *theatre) (byte, []byte) {
				proto, b := failure(2, "host", "world", datagram(4000, 53))(th)
				return proto, b[:8+12]
			}, event.ConnectionInvalid),
			say("a", "host", failure(3, "host", "a", datagram(4000, 53)), event.ForwardedToHost),
			say("a", "b", failure(2, "b", "a", datagram(4000, 53)), event.ForwardedToPod))},
		{"an error about an address that went to another is evaluated", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			say("world", "a", failure(3, "a", "world", datagram(4000, 53)), event.ForwardedFromStack),
			bump("world"),
			say("world", "a", failure(3, "a", "world", datagram(4000, 53)), event.PolicyDenied),
			say("a", "world", datagram(4000, 53), event.ForwardedOutside),
			say("world", "a", failure(3, "a", "world", datagram(4000, 53)), event.ForwardedFromStack))},
		{"an error quotes an error", play(policy("a", nodetable.Allow, nodetable.Deny),
			say("router", "a", failure(3, "a", "world", failure(3, "a", "world", datagram(1, 2))), event.PolicyDenied))},
	}
}

// TestKernelConnectionLife plays every scene in both families (INV-37, INV-38).
func TestKernelConnectionLife(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			th := newTheatre(t, v6)
			for _, s := range scenes() {
				t.Run(s.name, func(t *testing.T) {
					th.putTables(t)
					defer func() {
						for _, e := range th.pods {
							must(t, "SetIdentity", setIdentity(t, th.k, e.Slot, e.Identity))
							setPolicy(t, th.k, e.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
						}
					}()
					th.play(t, s.acts)
				})
			}
		})
	}
}

// pieces cuts a transport packet into fragments at the given offsets, all multiples of 8.
func (th *theatre) pieces(from, to string, what l4, id uint32, at ...int) [][]byte {
	proto, payload := what(th)
	e := th.pods[from]
	var out [][]byte
	for i, start := range append([]int{0}, at...) {
		end, more := len(payload), byte(0)
		if i < len(at) {
			end, more = at[i], 1
		}
		if th.v6 {
			ext := []byte{proto, 0, byte(start >> 8), byte(start) | more}
			ext = binary.BigEndian.AppendUint32(ext, id)
			out = append(out, frame(e.HostMAC, e.MAC, etherIPv6, ip6(th.addr(from), th.addr(to), 44, append(ext, payload[start:end]...))))
			continue
		}
		h := ip4Header{src: th.addr(from), dst: th.addr(to), proto: proto, frag: uint16(more)<<13 | uint16(start/8)}
		f := frame(e.HostMAC, e.MAC, etherIPv4, h.with(payload[start:end]))
		binary.BigEndian.PutUint16(f[14+4:], uint16(id))
		out = append(out, f)
	}
	return out
}

// TestKernelFragmentsAreEvaluatedByTheirPorts: later fragments are evaluated with the ports of the first one, never
// without ports, and belong to its connection in either direction.
func TestKernelFragmentsAreEvaluatedByTheirPorts(t *testing.T) {
	long := func(sport, dport uint16) l4 {
		return func(*theatre) (byte, []byte) { return 17, udp(sport, dport, make([]byte, 40)...) }
	}
	longPing := func(reply bool) l4 {
		return func(th *theatre) (byte, []byte) {
			proto, b := ping(reply, 7)(th)
			return proto, append(b, make([]byte, 40)...)
		}
	}
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			th := newTheatre(t, v6)
			th.putTables(t)
			send := func(from string, in []byte) event.Reason {
				t.Helper()
				return th.run(t, program.FromPod, in, skbContext{Ifindex: th.pods[from].Ifindex}, 0).reason
			}
			expect := func(what, from string, in []byte, want event.Reason) {
				t.Helper()
				if got := send(from, in); got != want {
					t.Errorf("%s: %v, want %v", what, got, want)
				}
			}
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
			setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: only80})

			allowed := th.pieces("a", "b", long(4000, 80), 1, 8, 24)
			expect("a later piece before the first", "a", allowed[2], event.FragmentUnknown)
			for i, in := range allowed {
				expect([]string{"the first piece", "the second", "the last"}[i], "a", in, event.ForwardedToPod)
			}
			for _, in := range th.pieces("b", "a", long(80, 4000), 2, 8, 24) {
				expect("a piece of the answer", "b", in, event.ForwardedToPod)
			}
			for i, in := range th.pieces("a", "b", long(4000, 53), 3, 8, 24) {
				expect("a piece of what is denied", "a", in, []event.Reason{event.IdentityUnknown, event.FragmentUnknown, event.FragmentUnknown}[i])
			}
			// the identification is reused with other ports
			again := th.pieces("a", "b", long(4000, 53), 1, 8)
			expect("another first piece", "a", again[0], event.IdentityUnknown)
			expect("its second", "a", again[1], event.FragmentUnknown)
			// fragments of another pod with the same identification are different ones
			expect("the other pod's piece", "b", th.pieces("b", "a", long(80, 4000), 1, 8)[1], event.FragmentUnknown)

			// fragments that would overwrite flags that were evaluated
			for proto, what := range map[string]l4{
				"TCP": func(*theatre) (byte, []byte) { return 6, tcp(4000, 80, flagSYN, make([]byte, 40)...) },
				"SCTP": func(th *theatre) (byte, []byte) {
					_, c := chunk(4000, 80, 1)(th)
					return 132, append(c, make([]byte, 40)...)
				},
			} {
				over := th.pieces("a", "b", what, 6, 8, 16, 24)
				whole := th.pieces("a", "b", what, 6, 24)
				expect("the first piece of "+proto, "a", whole[0], event.ForwardedToPod)
				expect("one over its flags", "a", over[1], event.Malformed)
				expect("one over its end", "a", over[2], event.Malformed)
				expect("the next", "a", whole[1], event.ForwardedToPod)
			}
			if v6 {
				// the first fragment's next header must match the later fragments
				hidden := func(*theatre) (byte, []byte) { return 60, append(ext(17), udp(4000, 80, make([]byte, 40)...)...) }
				for i, in := range th.pieces("a", "b", hidden, 7, 24) {
					expect("an option behind a fragment header", "a", in, []event.Reason{event.ExtensionHeaders, event.FragmentUnknown}[i])
				}
			}

			setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: pings})
			for _, in := range th.pieces("a", "b", longPing(false), 4, 8, 24) {
				expect("a piece of an echo", "a", in, event.ForwardedToPod)
			}
			for _, in := range th.pieces("b", "a", longPing(true), 5, 8, 24) {
				expect("a piece of its answer", "b", in, event.ForwardedToPod)
			}
		})
	}
}

// TestKernelConnectionWithoutRoomIsDropped: a connection for which the map has no capacity is dropped; packets of
// existing entries still pass. An LRU map nearly always has capacity, so the programs are loaded with a plain hash map.
func TestKernelConnectionWithoutRoomIsDropped(t *testing.T) {
	th := newTheatre(t, false)
	spec, err := bpf.LoadFromPod()
	must(t, "read the compiled program", err)
	must(t, "set constants", program.SetConstants(spec, testOptions("").constants()))
	replace, err := th.k.Pins.Bind(spec)
	must(t, "bind", err)
	delete(replace, bpf.MapsMapSlCt4)
	spec.Maps[bpf.MapsMapSlCt4].Type, spec.Maps[bpf.MapsMapSlCt4].MaxEntries = ebpf.Hash, 1
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replace})
	must(t, "load", err)
	defer coll.Close()
	send := func(a act) event.Reason {
		_, ctx, in := th.frame(a)
		before := th.counters(t)
		opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256), Context: ctx}
		_, err := coll.Programs[program.FromPod].Run(opts)
		must(t, "run", err)
		for key, after := range th.counters(t) {
			if after.Packets != before[key].Packets {
				return key.reason
			}
		}
		return 0
	}
	for i, c := range []struct {
		a    act
		want event.Reason
	}{
		{say("a", "b", datagram(4000, 53), 0), event.ForwardedToPod},
		{say("a", "b", datagram(4001, 53), 0), event.ConnectionInsertFailed},
		{say("a", "b", datagram(4000, 53), 0), event.ForwardedToPod},
		{say("b", "a", datagram(53, 4000), 0), event.ForwardedToPod},
	} {
		if got := send(c.a); got != c.want {
			t.Errorf("packet %d: %v, want %v", i, got, c.want)
		}
	}
}

// TestKernelCutQuotationsHelpNobody: an ICMP error with a truncated quoted packet is evaluated on its own; one whose
// quoted packet has ports passes.
func TestKernelCutQuotationsHelpNobody(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			th := newTheatre(t, v6)
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
			_, ctx, in := th.frame(say("a", "world", segment(4000, 80, flagSYN), 0))
			if o := th.run(t, program.FromPod, in, ctx, 0); o.reason != event.ForwardedOutside {
				t.Fatalf("the connection is not begun: %v", o.reason)
			}
			_, ctx, in = th.frame(say("router", "a", failure(11, "a", "world", segment(4000, 80, flagSYN)), 0))
			ip := map[bool]int{false: 20, true: 40}[v6]
			icmpAt, quoted := 14+ip, 14+ip+8
			for n := icmpAt; n <= len(in); n++ {
				cut := append([]byte(nil), in[:n]...)
				truthful(cut)
				o := th.run(t, program.ToPod, cut, ctx, 0)
				want := event.PolicyDenied
				switch {
				case n < quoted:
					want = event.Malformed
				case n >= quoted+ip+8:
					want = event.ForwardedFromStack
				}
				if o.reason != want {
					t.Errorf("%d bytes of the quoted packet: %v, want %v", n-quoted, o.reason, want)
				}
			}
			// a quoted packet with contradictory fields
			for name, spoil := range map[string]func(q []byte){
				"version":     func(q []byte) { q[0] = q[0]&0xf | 0x50 },
				"IHL":         func(q []byte) { q[0] = 0x44 },
				"a fragment":  func(q []byte) { q[6], q[7] = 0, 1 },
				"other ports": func(q []byte) { q[ip]++ },
			} {
				if v6 && name != "other ports" {
					continue
				}
				bad := append([]byte(nil), in...)
				spoil(bad[quoted:])
				if o := th.run(t, program.ToPod, bad, ctx, 0); o.reason != event.PolicyDenied {
					t.Errorf("%s: %v, want %v", name, o.reason, event.PolicyDenied)
				}
			}
		})
	}
}

// TestKernelPacketTooBigPassesEveryPolicy: IPv6 path MTU discovery works under any policy. But a pod cannot send
// anything past its policy by labelling it packet too big, and no sender can use an error about a packet that the
// receiver did not send.
func TestKernelPacketTooBigPassesEveryPolicy(t *testing.T) {
	th := newTheatre(t, true)
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{})
	in := failure(2, "a", "world", segment(4000, 80, flagACK))
	for _, c := range []act{
		say("router", "a", in, event.ForwardedFromStack),
		say("b", "a", in, event.ConnectionInvalid),
		say("router", "a", failure(2, "b", "world", segment(4000, 80, flagACK)), event.PolicyDenied),
		say("router", "a", failure(11, "a", "world", segment(4000, 80, flagACK)), event.PolicyDenied),
	} {
		th.expect(t, c)
	}
}

// TestKernelTooBigAboutNothingIsLimited: errors about unknown connections are rate-limited, because any sender can
// forge them.
func TestKernelTooBigAboutNothingIsLimited(t *testing.T) {
	stayOnOneCPU(t)
	th := newTheatre(t, true)
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow})
	th.expect(t, say("a", "world", datagram(1, 53), event.ForwardedOutside))
	_, ctx, in := th.frame(say("router", "a", failure(2, "a", "world", datagram(2, 53)), 0))
	const sent = 10_000
	opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, 256+len(in)), Context: ctx, Repeat: sent}
	_, err := th.k.program(program.ToPod).Run(opts)
	must(t, "run", err)
	passed := th.counters(t)[cell{event.ForwardedFromStack, event.Ingress}].Packets
	denied := th.counters(t)[cell{event.PolicyDenied, event.Ingress}].Packets
	if passed < 100 || passed > 200 || passed+denied != sent {
		t.Errorf("%d of %d passed, %d were denied, want 100 in each second", passed, sent, denied)
	}
	th.expect(t, say("router", "a", failure(2, "a", "world", datagram(1, 53)), event.ForwardedFromStack))
}

// TestKernelAnAddressThatIsUsedAgainInheritsNothing: a new pod with the address of a removed pod, with the same
// endpoint ID or another one, inherits no connection.
func TestKernelAnAddressThatIsUsedAgainInheritsNothing(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			th := newTheatre(t, v6)
			th.putTables(t)
			update(t, th.k, bpf.MapsMapSlId, uint32(th.pods["b"].Identity), knownWord(7, 0, 0))
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: friends, Ingress: nodetable.Deny})
			send := func(a act) {
				t.Helper()
				prog, ctx, in := th.frame(a)
				if o := th.run(t, prog, in, ctx, 0); o.reason != a.want {
					t.Errorf("%s to %s: %v, want %v", a.from, a.to, o.reason, a.want)
				}
			}
			send(say("a", "b", datagram(4000, 53), event.ForwardedToPod))
			old := th.pods["b"]
			must(t, "Cut", th.k.Endpoints.Cut(old.Slot))
			send(say("a", "b", datagram(4000, 53), event.PolicyDenied).on(event.Ingress))
			must(t, "Unpublish", th.k.Endpoints.Unpublish(old.Slot))
			send(say("a", "b", datagram(4000, 53), event.NoRoute))
			for _, identity := range []identity.Numeric{old.Identity, stranger} {
				must(t, "Barrier", th.k.Endpoints.Barrier(t.Context()))
				e := old
				e.Identity, e.Policy = identity, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow}
				th.pods["b"] = publish(t, th.k, e)
				// a, which denies all ingress, receives nothing from it
				send(say("b", "a", datagram(53, 4000), event.PolicyDenied))
				want := event.ForwardedToPod
				if identity == stranger {
					want = event.PolicyDenied
				}
				send(say("a", "b", datagram(4000, 53), want))
				must(t, "Unpublish", th.k.Endpoints.Unpublish(th.pods["b"].Slot))
			}
		})
	}
}

// TestKernelConnectionEventsCanBeLeftOut: connection events can be disabled; packets that audit mode lets pass, and
// drops, are still reported.
func TestKernelConnectionEventsCanBeLeftOut(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.NoConnectionEvents = true
	k := openKernel(t, o)
	r := runner{k}
	one := publish(t, k, a)
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	r.run(t, program.FromPod, from4(world4, 6, tcp(4000, 80, flagSYN)), skbContext{}, 0)
	r.run(t, program.FromPod, from4(world4, 6, tcp(4000, 80, flagRST)), skbContext{}, 0)
	if got := drain(t, events); len(got) != 0 {
		t.Errorf("events %+v, want none", got)
	}
	setPolicy(t, k, one.Slot, endpointmap.Policy{Egress: nodetable.Pending, Ingress: nodetable.Pending})
	must(t, "SetAudit", k.Endpoints.SetAudit(t.Context(), true, one.Slot))
	r.run(t, program.FromPod, from4(world4, 6, tcp(4001, 80, flagSYN)), skbContext{}, 0)
	if got := drain(t, events); len(got) != 1 || got[0].Type != event.ConnectionEvaluated || !got[0].Egress.Audited {
		t.Errorf("events %+v, want one of an audited connection", got)
	}
	must(t, "SetAudit", k.Endpoints.SetAudit(t.Context(), false, one.Slot))
	r.run(t, program.FromPod, from4(world4, 6, tcp(4001, 80, flagACK)), skbContext{}, 0)
	if got := drain(t, events); len(got) != 1 || got[0].Type != event.PacketDropped {
		t.Errorf("events %+v, want one of a drop", got)
	}
}

// TestKernelNoTCPFlagsOpenWhatIsDenied: every combination of TCP flags and every SCTP chunk type, under tables that
// deny: each packet is counted once, none passes, none creates an entry.
func TestKernelNoTCPFlagsOpenWhatIsDenied(t *testing.T) {
	th := newTheatre(t, false)
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Deny})
	for flags := range 256 {
		_, ctx, in := th.frame(say("a", "b", segment(4000, 80, byte(flags)), 0))
		o := th.run(t, program.FromPod, in, ctx, 0)
		if !o.reason.Dropped() || o.packets != 1 {
			t.Errorf("flags %#x: %v, counted %d", flags, o.reason, o.packets)
		}
		_, ctx, in = th.frame(say("a", "b", chunk(4000, 80, byte(flags)), 0))
		o = th.run(t, program.FromPod, in, ctx, 0)
		if o.reason != event.PolicyDenied || o.packets != 1 {
			t.Errorf("chunk %d: %v, counted %d", flags, o.reason, o.packets)
		}
	}
	if all := th.connections(t); len(all) != 0 {
		t.Errorf("connections %+v, want none", all)
	}
}
