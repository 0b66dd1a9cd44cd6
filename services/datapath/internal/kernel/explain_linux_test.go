// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
)

// everything returns a hash of the contents of each map, except the ring buffer.
func everything(t testing.TB, k *Kernel) map[string][32]byte {
	t.Helper()
	all := map[string][32]byte{}
	for _, name := range k.MapNames() {
		m := k.Pins.Map(name)
		h := sha256.New()
		switch m.Type() {
		case ebpf.RingBuf, ebpf.SkStorage: // no keys to list
			continue
		case ebpf.Array:
			room := func(size uint32) reflect.Value {
				return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]())), int(m.MaxEntries()), int(m.MaxEntries()))
			}
			keys, values := room(m.KeySize()), room(m.ValueSize())
			var cursor ebpf.MapBatchCursor
			n, err := m.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
			if n != int(m.MaxEntries()) || err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Fatalf("read %s: %d elements, %v", name, n, err)
			}
			fmt.Fprint(h, values.Interface())
		case ebpf.PerCPUArray:
			for i := range m.MaxEntries() {
				var perCPU [][]byte
				must(t, "read "+name, m.Lookup(i, &perCPU))
				fmt.Fprint(h, perCPU)
			}
		default:
			var key, value []byte
			it := m.Iterate()
			for it.Next(&key, &value) {
				fmt.Fprint(h, key, value)
			}
			must(t, "read "+name, it.Err())
		}
		all[name] = [32]byte(h.Sum(nil))
	}
	return all
}

// port80 returns a list in which the rule decides TCP port 80, and nothing else.
func port80(rule uint16) policytable.Ranges {
	return policytable.Ranges{{First: 6<<16 | 80, Last: 6<<16 | 80, Rest: rule}}
}

// explained writes tables with each kind of answer: by identity, default class, prefix and default.
func explained(t testing.TB, k *Kernel) (egress, ingress nodetable.ID) {
	t.Helper()
	class, err := k.Tables.DefineIdentityClass(policytable.ClassKey{1})
	must(t, "DefineIdentityClass", err)
	must(t, "SetIdentities", k.Tables.SetIdentities(map[uint32]nodetable.Identity{
		uint32(a.Identity): {Class: class, Known: true}, uint32(b.Identity): {Class: class, Known: true},
		uint32(identity.Host):      {Class: class + 1, Kind: 3, Scope: 1, Known: true},
		uint32(identity.WorldIPv4): {Class: class + 2, Kind: 1, Scope: 2, Known: true},
		uint32(identity.WorldIPv6): {Class: class + 2, Kind: 2, Scope: 2, Known: true},
	}))
	c := nodetable.NewContent(policytable.Table{
		Hash: [32]byte{1}, HasAddresses: true,
		Rules:   []policytable.Rule{{Action: policytable.Allow, Tier: 1}, {Action: policytable.Deny, Tier: 1}, {Action: policytable.Allow, Tier: 1}},
		Classes: []policytable.Ranges{nil, port80(1), port80(2), port80(3)},
		Prefixes: map[netip.Prefix]policytable.PrefixClasses{
			netip.MustParsePrefix("198.51.100.0/24"): {0, 0, 3},
			netip.MustParsePrefix("198.51.0.0/16"):   {0, 0, 2},
		},
	}, 1)
	c.Peers[class] = 1
	egress, err = k.Tables.DefineTable(c)
	must(t, "DefineTable", err)
	c.Hash, c.HostAllow = [32]byte{2}, true
	ingress, err = k.Tables.DefineTable(c)
	must(t, "DefineTable", err)
	return egress, ingress
}

func TestKernelExplainNamesEveryStep(t *testing.T) {
	r, cast := newStage(t)
	egress, ingress := explained(t, r.k)
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: egress, Ingress: ingress})
	setPolicy(t, r.k, cast["b"].Slot, endpointmap.Policy{Egress: egress, Ingress: ingress})
	from := netip.AddrPortFrom(a.IPv4, 40000)
	ask := func(proto uint8, src, dst netip.AddrPort) explain.Explanation {
		t.Helper()
		x, err := r.k.explainer().Explain(conntrack.Tuple{Initiator: src, Responder: dst, Protocol: proto})
		must(t, fmt.Sprintf("Explain %v to %v", src, dst), err)
		return x
	}

	x := ask(6, from, netip.AddrPortFrom(b.IPv4, 80))
	if x.Reason != event.ForwardedToPod || x.Egress == nil || x.Ingress == nil {
		t.Fatalf("pod to pod: %+v", x)
	}
	if s := x.Egress; s.By != event.ByRule || s.Rule != 1 || s.Action != event.ActionAllow || s.Table != egress || !s.Place.IdentityRow || s.Place.IdentityClass != 1 {
		t.Errorf("pod to pod, egress: %+v", s)
	}
	if s := x.Source; s.Slot != cast["a"].Slot || s.Identity != a.Identity || !s.Word.Known || s.Entry != ipmap.HostPrefix(a.IPv4) {
		t.Errorf("the sender: %+v", s)
	}
	if x.Tracked {
		t.Errorf("a connection that never was: %+v", x.Connection)
	}

	x = ask(6, from, netip.AddrPortFrom(b.IPv4, 81))
	if x.Reason != event.PolicyDenied || x.Egress.By != event.ByDefault || x.Egress.Rule != 0 || x.Ingress == nil {
		t.Errorf("a port without a rule: %v, %+v", x.Reason, x.Egress)
	}
	x = ask(6, from, netip.AddrPortFrom(world4, 80))
	if x.Reason != event.ForwardedOutside || x.Ingress != nil || x.Egress.Rule != 3 || x.Egress.Place.AddressPrefix != netip.MustParsePrefix("198.51.100.0/24") {
		t.Errorf("an address in two prefixes: %v, %+v", x.Reason, x.Egress)
	}
	if d := x.Destination; d.Slot != endpointmap.NoID || d.Identity != identity.WorldIPv4 || d.Entry.IsValid() {
		t.Errorf("the world: %+v", d)
	}
	x = ask(6, from, netip.MustParseAddrPort("198.51.9.9:80"))
	if x.Reason != event.PolicyDenied || x.Egress.By != event.ByRule || x.Egress.Rule != 2 {
		t.Errorf("the wider prefix denies: %v, %+v", x.Reason, x.Egress)
	}
	x = ask(6, from, netip.AddrPortFrom(remote4, 80))
	if x.Reason != event.IdentityUnknown || x.Egress.By != event.ByUnknownIdentity || x.Destination.Word.Known {
		t.Errorf("an unknown identity: %v, %+v", x.Reason, x.Egress)
	}
	x = ask(6, netip.AddrPortFrom(host4, 1), from)
	if x.Reason != event.ForwardedFromStack || x.Ingress.By != event.ByHostAllow || x.Source.Slot != endpointmap.HostID {
		t.Errorf("the local host: %v, %+v, %+v", x.Reason, x.Ingress, x.Source)
	}
	must(t, "SetAudit", r.k.Endpoints.SetAudit(t.Context(), true, cast["a"].Slot))
	x = ask(6, from, netip.MustParseAddrPort("198.51.9.9:80"))
	if x.Reason != event.ForwardedOutside || !x.Egress.Audited || x.Egress.Action != event.ActionDeny {
		t.Errorf("in audit mode: %v, %+v", x.Reason, x.Egress)
	}

	for _, tu := range []conntrack.Tuple{
		{Initiator: netip.AddrPortFrom(world4, 1), Responder: netip.AddrPortFrom(remote4, 2), Protocol: 6},
		{Initiator: netip.AddrPortFrom(host4, 1), Responder: netip.AddrPortFrom(world4, 2), Protocol: 6},
	} {
		if _, err := r.k.explainer().Explain(tu); !errors.Is(err, explain.ErrNotLocal) {
			t.Errorf("Explain(%v): %v, want ErrNotLocal", tu, err)
		}
	}
}

func TestKernelExplainKnowsTheConnection(t *testing.T) {
	r, cast := newStage(t)
	from, to := netip.AddrPortFrom(a.IPv4, 40000), netip.AddrPortFrom(b.IPv4, 80)
	epoch := func(name string) uint32 {
		e, err := r.k.Endpoints.At(cast[name].Slot)
		must(t, "At", err)
		return e.Policy.Epoch
	}
	epochA, err := r.k.Addresses.Epoch(a.IPv4)
	must(t, "Epoch", err)
	epochB, err := r.k.Addresses.Epoch(b.IPv4)
	must(t, "Epoch", err)
	r.k.put(t, conntrack.Connection{
		Tuple: conntrack.Tuple{Initiator: from, Responder: to, Protocol: 6},
		From:  conntrack.End{Slot: cast["a"].Slot, Epoch: epoch("a"), AddressEpoch: epochA},
		To:    conntrack.End{Slot: cast["b"].Slot, Epoch: epoch("b"), AddressEpoch: epochB},
		Flags: conntrack.SeenReply, EgressRule: 5,
	})
	r.k.put(t, conntrack.Connection{
		Tuple: conntrack.Tuple{Initiator: netip.AddrPortFrom(a.IPv4, 77), Responder: netip.AddrPortFrom(b.IPv4, 77), Protocol: 1},
		From:  conntrack.End{Slot: cast["a"].Slot, Epoch: epoch("a"), AddressEpoch: epochA},
		To:    conntrack.End{Slot: cast["b"].Slot, Epoch: epoch("b"), AddressEpoch: epochB},
	})
	check := func(tu conntrack.Tuple, tracked, current bool, next event.Reason) {
		t.Helper()
		x, err := r.k.explainer().Explain(tu)
		must(t, "Explain", err)
		if x.Tracked != tracked || x.Next.Reason != next ||
			tracked && (x.Next.Evaluated == current || x.Connection.Initiator.Addr() != a.IPv4) {
			t.Errorf("%v: tracked %v, next %+v, %+v", tu, x.Tracked, x.Next, x.Connection)
		}
	}
	there := conntrack.Tuple{Initiator: from, Responder: to, Protocol: 6}
	check(there, true, true, event.ForwardedToPod)
	check(conntrack.Tuple{Initiator: to, Responder: from, Protocol: 6}, true, true, event.ForwardedToPod)
	check(conntrack.Tuple{Initiator: from, Responder: to, Protocol: 17}, false, false, 0)
	// the identifier of an echo
	ping := conntrack.Tuple{
		Initiator: netip.AddrPortFrom(a.IPv4, 77), Responder: netip.AddrPortFrom(b.IPv4, 8<<8), Protocol: 1,
	}
	check(ping, true, true, event.ForwardedToPod)
	must(t, "BumpAddress", r.k.Addresses.Bump(b.IPv4))
	check(there, true, false, event.ForwardedToPod)
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
	check(there, true, false, event.ForwardedToPod)
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
	check(there, true, false, event.PolicyDenied)
	check(conntrack.Tuple{Initiator: to, Responder: from, Protocol: 6}, true, false, event.PolicyDenied)
}

// TestKernelExplainSaysThatARedirectIsDropped: a policy redirects to a proxy that does not exist. The packet is
// dropped. In audit mode it passes that side, and the side names the rule. The other side is evaluated in both
// cases.
func TestKernelExplainSaysThatARedirectIsDropped(t *testing.T) {
	r, cast := newStage(t)
	id := nodetable.ID(16)
	everyRule(id, 0).put(t, r.k)
	update(t, r.k, bpf.MapsMapSlId, identityIndex(b.Identity), knownWord(7, 0, 0))
	update(t, r.k, bpf.MapsMapSlPeer, bpf.MapsSlPeerKey{PeerSet: uint32(id), NodeClass: 7}, uint32(1))
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: id, Ingress: nodetable.Allow})
	setPolicy(t, r.k, cast["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
	for _, audit := range []bool{false, true} {
		must(t, "SetAudit", r.k.Endpoints.SetAudit(t.Context(), audit, cast["a"].Slot))
		x, err := r.k.explainer().Explain(conntrack.Tuple{
			Initiator: netip.AddrPortFrom(a.IPv4, 1), Responder: netip.AddrPortFrom(b.IPv4, 12), Protocol: 6,
		})
		must(t, "Explain", err)
		want := event.NoProxy
		if audit {
			want = event.PolicyDenied // by the other side
		}
		if x.Reason != want || x.Egress == nil || !x.Egress.Redirects() || x.Egress.Rule != 4 || x.Egress.Audited != audit {
			t.Errorf("audit %v: %v, %+v", audit, x.Reason, x.Egress)
		}
		if x.Ingress == nil || x.Ingress.Action != event.ActionDeny || x.Ingress.Table != nodetable.Deny {
			t.Errorf("audit %v, the other side: %+v", audit, x.Ingress)
		}
	}
}

// TestKernelExplainFollowsRedirectsToTheProxy: the packet would go to the proxy, if it is attached.
func TestKernelExplainFollowsRedirectsToTheProxy(t *testing.T) {
	r, cast := newStage(t)
	putNames(t, r.k)
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: namesOf7, Ingress: nodetable.Allow})
	for _, c := range []struct {
		proxy proxymap.Proxy
		want  event.Reason
	}{
		{proxymap.Proxy{}, event.NoProxy},
		{proxymap.Proxy{Device: otherDevice, Attached: true}, event.ForwardedToProxy},
		{proxymap.Proxy{Device: otherDevice}, event.ProxyAway},
	} {
		must(t, "Set", r.k.Proxies.Set(policytable.ProxyDNS, c.proxy))
		x, err := r.k.explainer().Explain(conntrack.Tuple{
			Initiator: netip.AddrPortFrom(a.IPv4, 4000), Responder: netip.AddrPortFrom(b.IPv4, dnsPort), Protocol: 17,
		})
		must(t, "Explain", err)
		if x.Reason != c.want || x.Egress == nil || !x.Egress.Redirects() || x.Egress.Rule != 2 {
			t.Errorf("proxy %+v: %v, %+v, want %v", c.proxy, x.Reason, x.Egress, c.want)
		}
	}
}

// TestKernelExplainSaysWhatTheProgramsDo: Explain agrees with the programs about first packets from and to a pod, for
// every kind of address, under every kind of table, and changes nothing.
func TestKernelExplainSaysWhatTheProgramsDo(t *testing.T) {
	r, cast := newStage(t)
	egress, ingress := explained(t, r.k)
	tables := []nodetable.ID{nodetable.Deny, nodetable.Allow, nodetable.Pending, egress, ingress, 999}
	places := []netip.Addr{
		a.IPv4, b.IPv4, only4.IPv4, shaped.IPv4, host4, remote4, world4, nobody4, gateway4,
		netip.MustParseAddr("198.51.9.9"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("0.1.2.3"), netip.MustParseAddr("240.0.0.1"),
		netip.MustParseAddr("224.0.0.5"), netip.MustParseAddr("255.255.255.255"),
		a.IPv6, b.IPv6, shaped.IPv6, host6, remote6, world6, nobody6, gateway6, podLocal,
		netip.MustParseAddr("::1"), netip.MustParseAddr("ff02::5"),
	}
	reasons := map[event.Reason]int{}
	for i, e := range tables {
		in := tables[(i*5+3)%len(tables)]
		for _, audit := range []bool{false, true} {
			for _, who := range []string{"a", "b", "shaped"} {
				setPolicy(t, r.k, cast[who].Slot, endpointmap.Policy{Egress: e, Ingress: in})
				must(t, "SetAudit", r.k.Endpoints.SetAudit(t.Context(), audit, cast[who].Slot))
			}
			var cs []firstPacket
			for _, addr := range places {
				for _, port := range []uint16{80, 81, 4789} {
					for _, proto := range []uint8{6, 17} {
						for _, to := range []bool{false, true} {
							if c, ok := r.firstPacket(t, proto, addr, port, to); ok {
								cs = append(cs, c)
							}
						}
					}
				}
			}
			first := e == egress && !audit
			var before map[string][32]byte
			if first {
				before = everything(t, r.k)
			}
			xs := make([]explain.Explanation, len(cs))
			for i, c := range cs {
				var err error
				xs[i], err = r.k.explainer().Explain(c.tuple)
				must(t, fmt.Sprint("Explain ", c.tuple), err)
			}
			if first && !maps.Equal(before, everything(t, r.k)) {
				t.Error("Explain has changed the maps")
			}
			for i, c := range cs {
				o := r.run(t, c.prog, c.in, skbContext{}, 0)
				reasons[o.reason]++
				if x := xs[i]; o.reason != x.Reason {
					t.Errorf("%s, protocol %d, %v to %v: the program returns %v, Explain %v\negress %+v\ningress %+v",
						c.prog, c.tuple.Protocol, c.tuple.Initiator, c.tuple.Responder, o.reason, x.Reason, x.Egress, x.Ingress)
				}
				for tu := range r.k.tracked(t) {
					m, key := r.k.Connections.Map(tu)
					must(t, "forget the connection", m.Delete(key))
				}
			}
		}
	}
	if len(reasons) < 14 {
		t.Errorf("only these reasons occurred: %v", reasons)
	}
}

type firstPacket struct {
	tuple conntrack.Tuple
	prog  string
	in    []byte
}

// firstPacket returns the first packet of a connection of pod a with an address. ok is false if the program
// never sees such a packet.
func (r runner) firstPacket(t *testing.T, proto uint8, addr netip.Addr, port uint16, to bool) (c firstPacket, ok bool) {
	t.Helper()
	payload := udp(40000, port)
	if proto == 6 {
		payload = tcp(40000, port, flagSYN)
	}
	own := a.IPv4
	if addr.Is6() {
		own = a.IPv6
	}
	here, there := netip.AddrPortFrom(own, 40000), netip.AddrPortFrom(addr, port)
	if !to {
		out := conntrack.Tuple{Initiator: here, Responder: there, Protocol: proto}
		c = firstPacket{out, program.FromPod, from6(addr, proto, payload)}
		if addr.Is4() {
			c.in = from4(addr, proto, payload)
		}
		return c, true
	}
	s, err := r.k.Endpoints.SlotOf(addr)
	must(t, "slotOf", err)
	if addr.IsMulticast() || addr.IsLinkLocalUnicast() || s != endpointmap.NoID && s != endpointmap.HostID {
		return c, false // no sender, or one whose packets are evaluated where they leave it
	}
	in := conntrack.Tuple{Initiator: netip.AddrPortFrom(addr, 40000), Responder: netip.AddrPortFrom(own, port), Protocol: proto}
	c = firstPacket{in, program.ToPod, to6(addr, proto, payload)}
	if addr.Is4() {
		c.in = to4(addr, proto, payload)
	}
	return c, true
}
