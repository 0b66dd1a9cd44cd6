// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// newRedirects is a theatre whose pod a has an egress policy that redirects.
func newRedirects(t *testing.T, v6 bool, id nodetable.ID) *theatre {
	t.Helper()
	th := newTheatre(t, v6)
	putNames(t, th.k)
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: id, Ingress: nodetable.Allow})
	return th
}

// proxied attaches a proxy, or detaches it.
func (th *theatre) proxied(t *testing.T, attached bool) {
	t.Helper()
	must(t, "Set", th.k.Proxies.Set(policytable.ProxyDNS, proxymap.Proxy{Device: otherDevice, Attached: attached}))
}

// bothFamilies runs a test in each family.
func bothFamilies(t *testing.T, test func(t *testing.T, v6 bool)) {
	t.Run("IPv4", func(t *testing.T) { test(t, false) })
	t.Run("IPv6", func(t *testing.T) { test(t, true) })
}

var (
	dnsQuery  = datagram(4000, dnsPort)
	dnsAnswer = datagram(dnsPort, 4000)
)

// TestKernelRestrictedNamesDropWhileTheProxyIsAway: without its proxy, a rule that restricts names drops queries and
// answers. A late heartbeat is not enough for that.
func TestKernelRestrictedNamesDropWhileTheProxyIsAway(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		th := newRedirects(t, v6, namesOf7)
		th.expect(t, say("a", "b", dnsQuery, event.NoProxy)) // never attached
		th.proxied(t, true)
		beat(t, th.k, time.Hour)
		for range 2 {
			th.expect(t, say("a", "b", dnsQuery, event.ForwardedToProxy))
			th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToProxy))
		}
		th.proxied(t, false)
		beat(t, th.k, 0)
		th.expect(t, say("a", "b", dnsQuery, event.ProxyAway))
		th.expect(t, say("b", "a", dnsAnswer, event.ProxyAway).on(event.Ingress))
		remain(1)(t, th) // the policy still allows it
		th.proxied(t, true)
		th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToProxy))
		th.expect(t, say("a", "world", dnsQuery, event.ForwardedToProxy))
		th.expect(t, say("world", "a", dnsAnswer, event.ForwardedToProxy))
		must(t, "Set", th.k.Proxies.Set(policytable.ProxyDNS, proxymap.Proxy{}))
		th.expect(t, say("a", "b", dnsQuery, event.NoProxy))
	})
}

// TestKernelEveryNamePassesWhileTheProxyIsAway: a rule that allows every name lets packets pass without its proxy,
// and gives the packets of the same connections to the proxy once it is back.
func TestKernelEveryNamePassesWhileTheProxyIsAway(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		th := newRedirects(t, v6, namesOfAll)
		pass := func() {
			t.Helper()
			th.expect(t, say("a", "b", dnsQuery, event.ForwardedToPod))
			th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToPod))
		}
		pass() // never attached
		th.proxied(t, true)
		beat(t, th.k, 0)
		th.expect(t, say("a", "b", dnsQuery, event.ForwardedToProxy))
		th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToProxy))
		beat(t, th.k, time.Second)
		pass()
		beat(t, th.k, 0)
		th.expect(t, say("a", "b", dnsQuery, event.ForwardedToProxy))
		th.proxied(t, false)
		beat(t, th.k, 0)
		pass()
	})
}

// TestKernelOnlyQueriesOfPodsAreRedirected: what no proxy can take is dropped: TCP, rules without a set, rules of a
// receiver, and rules for other proxies.
func TestKernelOnlyQueriesOfPodsAreRedirected(t *testing.T) {
	th := newRedirects(t, false, namesOf7)
	th.proxied(t, true)
	beat(t, th.k, 0)
	th.expect(t, say("a", "b", segment(4000, dnsPort, flagSYN), event.NoProxy))
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: namesOfNone, Ingress: nodetable.Allow})
	th.expect(t, say("a", "b", dnsQuery, event.NoProxy))
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
	setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: namesOf7})
	th.expect(t, say("a", "b", dnsQuery, event.NoProxy).on(event.Ingress))
	th.expect(t, say("world", "b", dnsQuery, event.NoProxy))
	setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
	// another kind of proxy, which is attached
	update(t, th.k, bpf.MapsMapSlRule, uint32(namesOf8)*16+1, bpf.MapsSlRule{
		Action: actRedirect, Redirect: uint16(policytable.ProxyHTTP), Flags: 8,
	})
	must(t, "Set", th.k.Proxies.Set(policytable.ProxyHTTP, proxymap.Proxy{Device: otherDevice, Attached: true}))
	setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: namesOf8, Ingress: nodetable.Allow})
	th.expect(t, say("a", "b", dnsQuery, event.NoProxy))
}

// TestKernelChangedRuleActsOnTheNextQuery: a live connection becomes redirected with its next packet, of either
// direction, and direct again.
func TestKernelChangedRuleActsOnTheNextQuery(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		th := newRedirects(t, v6, nodetable.Allow)
		th.proxied(t, true)
		beat(t, th.k, 0)
		for range 3 {
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
			th.expect(t, say("a", "b", dnsQuery, event.ForwardedToPod))
			th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToPod))
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: namesOf7, Ingress: nodetable.Allow})
			th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToProxy))
			th.expect(t, say("a", "b", dnsQuery, event.ForwardedToProxy))
			th.expect(t, say("a", "b", dnsQuery, event.ForwardedToProxy))
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
			th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToPod))
		}
		setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: noNames, Ingress: nodetable.Allow})
		th.expect(t, say("a", "b", dnsQuery, event.IdentityUnknown)) // denied; b has no known identity
	})
}

// TestKernelRedirectedConnectionIsReportedOnce: each packet of a redirected connection is evaluated, but only a
// changed verdict is reported.
func TestKernelRedirectedConnectionIsReportedOnce(t *testing.T) {
	th := newRedirects(t, false, namesOf7)
	th.proxied(t, true)
	beat(t, th.k, 0)
	th.play(t, []act{
		say("a", "b", dnsQuery, event.ForwardedToProxy).check(reported(1, 0)),
		say("a", "b", dnsQuery, event.ForwardedToProxy).check(reported(0, 0)),
		say("b", "a", dnsAnswer, event.ForwardedToProxy).check(reported(0, 0)),
		policy("a", namesOf8, nodetable.Allow),
		say("a", "b", dnsQuery, event.ForwardedToProxy).check(reported(1, 0)),
		say("b", "a", dnsAnswer, event.ForwardedToProxy).check(reported(0, 0)),
	})
}

// TestKernelAuditModeLeavesTheProxyOut: in audit mode, packets that a rule redirects are forwarded and reported; the
// proxy would refuse names that its rules do not allow.
func TestKernelAuditModeLeavesTheProxyOut(t *testing.T) {
	th := newRedirects(t, false, namesOf7)
	slot := th.pods["a"].Slot
	for _, attached := range []bool{true, false} {
		th.proxied(t, attached)
		must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), true, slot))
		drain(t, th.events)
		th.expect(t, say("a", "b", dnsQuery, event.ForwardedToPod))
		th.sort(drain(t, th.events))
		if len(th.evaluated) != 1 || !th.evaluated[0].Egress.Audited {
			t.Errorf("reported %+v, want an audited redirect", th.evaluated)
		}
		th.expect(t, say("b", "a", dnsAnswer, event.ForwardedToPod))
		must(t, "SetAudit", th.k.Endpoints.SetAudit(t.Context(), false, slot))
		want := event.ForwardedToProxy
		if !attached {
			want = event.ProxyAway
		}
		th.expect(t, say("a", "b", dnsQuery, want))
	}
}

// TestKernelPacketBehindTheStackMustHaveBeenHeld: the stack may have translated a pod's packet after sluice_from_pod.
// It passes if the proxy has evaluated it by the set of the rule that now redirects it.
func TestKernelPacketBehindTheStackMustHaveBeenHeld(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		th := newRedirects(t, v6, namesOf7)
		th.proxied(t, true)
		beat(t, th.k, 0)
		const pod, local, evaluated = 0x200, 0x900, 0xd00
		for _, known := range []bool{false, true} {
			if known {
				th.expect(t, say("a", "b", dnsQuery, event.ForwardedToProxy))
			}
			for mark, want := range map[uint32]event.Reason{
				0: event.NoProxy, pod: event.NoProxy, local: event.NoProxy, 8<<16 | pod: event.NoProxy,
				7 << 16:           event.NoProxy,
				7<<16 | evaluated: event.NoProxy, 7<<16 | 0x100: event.NoProxy,
				7<<16 | pod: event.ForwardedFromStack, 7<<16 | local: event.ForwardedFromStack,
			} {
				th.expect(t, say("a", "b", dnsQuery, want).throughStack().marked(mark))
			}
		}
		// the answer of a pod, behind the stack
		th.expect(t, say("b", "a", dnsAnswer, event.NoProxy).throughStack().marked(pod))
		th.expect(t, say("b", "a", dnsAnswer, event.ForwardedFromStack).throughStack().marked(7<<16|pod))
	})
}

// TestKernelHeldPacketIsNotRedirectedAgain: packets with the mark of sluice_from_tap go on, with the number of the set
// in their mark if the stack forwards them.
func TestKernelHeldPacketIsNotRedirectedAgain(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		th := newRedirects(t, v6, namesOf7)
		th.proxied(t, true)
		beat(t, th.k, 0)
		const proxy, pod = 0x400, 0x200
		for _, c := range []struct {
			from, to string
			what     l4
			want     event.Reason
			mark     uint32
		}{
			{"a", "world", dnsQuery, event.ForwardedOutside, 7<<16 | pod},
			{"a", "host", dnsQuery, event.ForwardedToHost, 7<<16 | pod},
			{"a", "b", dnsQuery, event.ForwardedToPod, 0},
			{"b", "a", dnsAnswer, event.ForwardedToPod, 0},
			// no rule redirects it, so no proxy has held it
			{"a", "world", datagram(4000, 80), event.ProxyForged, proxy},
		} {
			if c.want != event.ProxyForged {
				th.expect(t, say(c.from, c.to, c.what, event.ForwardedToProxy))
			}
			prog, ctx, in := th.frame(say(c.from, c.to, c.what, c.want).marked(proxy))
			if o := th.run(t, prog, in, ctx, 0); o.reason != c.want || o.mark != c.mark {
				t.Errorf("%s to %s: %v with mark %#x, want %v with %#x", c.from, c.to, o.reason, o.mark, c.want, c.mark)
			}
		}
	})
}

// TestOnePodFillsNoQueueOfAnother: between two heartbeats a pod gets its share of the queue and the common half, and
// no more; another pod gets its share whatever the first one sends. While the proxy is stopped, time changes nothing.
func TestOnePodFillsNoQueueOfAnother(t *testing.T) {
	stayOnOneCPU(t)
	th := newRedirects(t, false, namesOf7)
	setPolicy(t, th.k, th.pods["b"].Slot, endpointmap.Policy{Egress: namesOf7, Ingress: nodetable.Allow})
	th.proxied(t, true)
	at := pin.Word(th.k.Pins.Memory(bpf.MapsMapSlProxyBeat), int(proxymap.HeartbeatOffset(policytable.ProxyDNS)))
	const window, period = proxymap.QueueLength / 4, uint64(20 * time.Millisecond)
	// send returns how many of n queries to the world enter the queue.
	send := func(who string, n int) (entered int) {
		t.Helper()
		prog, ctx, in := th.frame(say(who, "world", dnsQuery, event.ForwardedToProxy))
		for range n {
			switch o := th.run(t, prog, in, ctx, 0); o.reason {
			case event.ForwardedToProxy:
				entered++
			case event.ProxyBudget:
			default:
				t.Fatalf("%v", o.reason)
			}
		}
		return entered
	}
	// The device gets the segments of a GSO packet: with 2 bytes each, the packet is more than 20 of them.
	prog, ctx, in := th.frame(say("a", "world", dnsQuery, event.ForwardedToProxy))
	ctx.GSOSize = 2
	entered := 0
	for th.run(t, prog, in, ctx, 0).reason == event.ForwardedToProxy {
		entered++
	}
	if entered == 0 || entered > window/20 {
		t.Errorf("%d GSO packets of the first pod entered, want 1 to %d", entered, window/20)
	}
	for round := range uint64(3) {
		atomic.StoreUint64(at, (round+1)*period)
		if n := send("a", 2*window); n < window/2 || n > window {
			t.Errorf("round %d: %d packets of the first pod entered, want %d to %d", round, n, window/2, window)
		}
		if n := send("b", window); n < window/4 || n > window/2 {
			t.Errorf("round %d: %d packets of the second pod entered, want %d to %d", round, n, window/4, window/2)
		}
		if n := send("a", 10) + send("b", 10); n != 0 {
			t.Errorf("round %d: %d further packets entered the queue", round, n)
		}
	}
}

// TestKernelForgedAnswersOfAServerReachNoPod: a server that a pod may ask sends segments from its port, in no
// connection, to 1,024 ports of the pod. Neither they nor further ones reach the pod, whatever its policy for
// incoming connections. Segments from other ports, and those that begin a connection, do not go to the proxy.
func TestKernelForgedAnswersOfAServerReachNoPod(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		th := newRedirects(t, v6, namesOf7)
		must(t, "Set", th.k.Proxies.Set(proxymap.DNSNamespace, proxymap.Proxy{Device: otherDevice, Attached: true}))
		for _, ingress := range []nodetable.ID{nodetable.Allow, nodetable.Deny} {
			setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: namesOf7, Ingress: ingress})
			begin := uint16(ingress) << 10
			for port := begin + 2000; port < begin+2512; port++ {
				th.expect(t, say("b", "a", segment(dnsPort, port, flagACK), event.ForwardedToProxy))
				th.expect(t, say("b", "a", segment(dnsPort, port, flagACK), event.ForwardedToProxy))
			}
		}
		for _, c := range th.connections(t) {
			if c.Flags&conntrack.Proxied == 0 || c.Flags&conntrack.Established != 0 {
				t.Fatalf("%+v: want a proxied connection that is not established", c)
			}
		}
		setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: namesOf7, Ingress: nodetable.Allow})
		th.expect(t, say("b", "a", segment(dnsPort, 1000, flagSYN), event.ForwardedToPod))
		th.expect(t, say("b", "a", segment(dnsPort+1, 1001, flagACK), event.ForwardedOutside)) // by the stack
		setPolicy(t, th.k, th.pods["a"].Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Deny})
		th.expect(t, say("b", "a", segment(dnsPort, 1002, flagACK), event.PolicyDenied).on(event.Ingress))
	})
}
