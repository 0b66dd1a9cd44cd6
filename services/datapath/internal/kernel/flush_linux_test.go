// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/conntrackview"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func (k *Kernel) flush(t testing.TB, f conntrack.Filter) conntrack.Flushed {
	t.Helper()
	done, err := k.trackedView().Flush(t.Context(), f, false)
	must(t, "Flush", err)
	return done
}

// listed returns the connections that match a filter.
func (k *Kernel) listed(t testing.TB, f conntrack.Filter) (all []conntrackview.Connection) {
	t.Helper()
	must(t, "List", k.trackedView().List(t.Context(), f, func(c *conntrackview.Connection) error {
		kept := *c
		kept.Connection = new(conntrack.Connection)
		*kept.Connection = *c.Connection
		all = append(all, kept)
		return nil
	}))
	return all
}

var (
	inOnly  = endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow}
	outOnly = endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny}
)

// TestKernelAFlushedConnectionGoesOnAsTheOneThatItWas: whichever end sends next, the connection is evaluated in
// its original direction, under the current policies.
func TestKernelAFlushedConnectionGoesOnAsTheOneThatItWas(t *testing.T) {
	// the stack forwards connections that were picked up
	fromA := say("a", "b", segment(4000, 80, flagACK|flagPSH), event.ForwardedOutside)
	fromB := say("b", "a", segment(80, 4000, flagACK|flagPSH), event.ForwardedOutside)
	denied := func(a act) act { a.want = event.PolicyDenied; return a }
	for name, c := range map[string]struct {
		before, after endpointmap.Policy // of b
		then          []act
		again         []act // with the previous policy
	}{
		"its direction alone is allowed":     {inOnly, inOnly, []act{fromB, fromA}, nil},
		"both directions are":                {bothWays, bothWays, []act{fromB, fromA}, nil},
		"its direction is not allowed since": {bothWays, outOnly, []act{denied(fromB), denied(fromA)}, []act{fromB, fromA}},
		"the other direction is not allowed since": {
			bothWays, inOnly, []act{fromB, fromA}, nil,
		},
	} {
		for family, v6 := range []bool{false, true} {
			t.Run(name+[]string{", IPv4", ", IPv6"}[family], func(t *testing.T) {
				th := newTheatre(t, v6)
				setPolicy(t, th.k, th.pods["b"].Slot, c.before)
				th.play(t, handshake(4000, 80))
				if done := th.k.flush(t, conntrack.Filter{Ports: []uint16{80}}); done != (conntrack.Flushed{Removed: 1}) {
					t.Fatalf("flushed %+v, want one", done)
				}
				if left := th.k.tracked(t); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
				setPolicy(t, th.k, th.pods["b"].Slot, c.after)
				for _, a := range c.then {
					th.expect(t, a)
				}
				if c.again == nil {
					return
				}
				setPolicy(t, th.k, th.pods["b"].Slot, c.before)
				for _, a := range c.again {
					th.expect(t, a)
				}
			})
		}
	}
}

var bothWays = endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow}

// TestKernelAFlushKeepsWhatAPolicyHasTerminated: a flush keeps connections that a policy has terminated, and counts
// them.
func TestKernelAFlushKeepsWhatAPolicyHasTerminated(t *testing.T) {
	th := newTheatre(t, false)
	revokedConnection(t, th)
	if done := th.k.flush(t, conntrack.Filter{}); done != (conntrack.Flushed{Terminated: 1}) {
		t.Errorf("flushed %+v, want none", done)
	}
	th.expect(t, say("b", "a", segment(80, 4000, flagACK|flagPSH), event.PolicyDenied))
	th.expect(t, say("a", "b", segment(4000, 80, flagACK|flagPSH), event.PolicyDenied))
}

// TestKernelAFlushLeavesRoomForWhatPoliciesTerminate: half of the map of records is reserved for that.
// Connections that need no record are removed even if the rest is full.
func TestKernelAFlushLeavesRoomForWhatPoliciesTerminate(t *testing.T) {
	th := newTheatre(t, false)
	th.play(t, handshake(4000, 80))
	revoked := th.k.Pins.Map(bpf.MapsMapSlRevoked4)
	half := int(revoked.MaxEntries()) / 2
	for n := range half - 1 {
		other := tuple(6, world4.String()+":1", "10.1.0.0:1")
		other.Initiator = addrPort(other.Initiator, n)
		must(t, "fill", pin.InsertOnce(revoked, other.Key4(), bpf.MapsSlRevoked{LastS: conntrack.MonotonicSeconds()}))
	}
	for _, a := range append(handshake(4001, 80), say("a", "b", datagram(4000, 53), event.ForwardedToPod)) {
		th.expect(t, a)
	}
	want := conntrack.Flushed{Removed: 2, Unremembered: 1}
	if done, err := th.k.trackedView().Flush(t.Context(), conntrack.Filter{}, true); err != nil || done != want {
		t.Errorf("to validate: %+v, %v, want %+v", done, err, want)
	}
	if done := th.k.flush(t, conntrack.Filter{}); done != want {
		t.Errorf("flushed %+v, want %+v", done, want)
	}
	if left := th.k.tracked(t); len(left) != 1 {
		t.Errorf("left: %v, want one of TCP", left)
	}
	if done := th.k.flush(t, conntrack.Filter{}); done != (conntrack.Flushed{Unremembered: 1}) {
		t.Errorf("again: %+v", done)
	}
}

// TestKernelAFlushIsNoEviction: flushed connections are counted, so that the collector does not count them as
// evicted.
func TestKernelAFlushIsNoEviction(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	col, cl := newCollector(t, k, conntrack.CollectorOptions{})
	k.putAll(t, remotes(e, 17, 0, 5000, conntrack.SeenReply, cl.now.Load()))
	collect(t, col)
	if done := k.flush(t, conntrack.Filter{Protocols: []uint8{17}}); done.Removed != 5000 {
		t.Errorf("flushed %+v, want 5000", done)
	}
	if p := collect(t, col); p.Evicted != 0 || p.Live != [2]int{} {
		t.Errorf("the pass after: %+v, want nothing live and nothing evicted", p)
	}
}

// TestKernelAFlushEndsWithItsCaller: if the caller cancels, the flush ends within some thousand connections.
func TestKernelAFlushEndsWithItsCaller(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, a)
	const n = 20000
	k.putAll(t, remotes(e, 17, 0, n, 0, 100_000))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	done, err := k.trackedView().Flush(ctx, conntrack.Filter{}, false)
	if !errors.Is(err, context.Canceled) || done.Removed > pin.BatchSize {
		t.Errorf("flushed %+v, %v, want a batch at most and context.Canceled", done, err)
	}
	if left := len(k.tracked(t)); left != n-done.Removed {
		t.Errorf("%d are left of %d, and %d were flushed", left, n, done.Removed)
	}
	seen := 0
	err = k.trackedView().List(ctx, conntrack.Filter{}, func(*conntrackview.Connection) error { seen++; return nil })
	if !errors.Is(err, context.Canceled) || seen > pin.BatchSize {
		t.Errorf("listed %d, %v, want a batch at most and context.Canceled", seen, err)
	}
}

// TestKernelFiltersChooseConnections checks each criterion.
func TestKernelFiltersChooseConnections(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	one, two := publish(t, k, a), publish(t, k, b)
	of := func(e endpointmap.Endpoint) conntrack.Local { return conntrack.Local{Slot: e.Slot, Addrs: e.Addrs()} }
	k.putAll(t, remotes(one, 6, 1, 10, conntrack.SeenReply|conntrack.Established, 1))
	k.putAll(t, begun(remotes(one, 17, 11, 10, conntrack.SeenReply, 1)))
	k.putAll(t, remotes(two, 17, 21, 10, 0, 1))
	k.put(t, conntrack.Connection{
		Tuple: tuple(6, "[2001:db8::1]:1", netip.AddrPortFrom(one.IPv6, 443).String()),
		From:  conntrack.End{Slot: endpointmap.NoID}, To: conntrack.End{Slot: one.Slot, Epoch: one.Policy.Epoch}, LastSeen: 1,
	})
	for name, c := range map[string]struct {
		filter conntrack.Filter
		want   int
	}{
		"all":                     {conntrack.Filter{}, 31},
		"an endpoint":             {conntrack.Filter{Locals: []conntrack.Local{of(one)}}, 21},
		"either of two":           {conntrack.Filter{Locals: []conntrack.Local{of(one), of(two)}}, 31},
		"the slot of another":     {conntrack.Filter{Locals: []conntrack.Local{{Slot: one.Slot, Addrs: two.Addrs()}}}, 0},
		"an address":              {conntrack.Filter{Prefixes: []netip.Prefix{netip.PrefixFrom(two.IPv4, 32)}}, 10},
		"a prefix":                {conntrack.Filter{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.0.0/28")}}, 15},
		"a port":                  {conntrack.Filter{Ports: []uint16{443}}, 1},
		"a port of the initiator": {conntrack.Filter{Ports: []uint16{3, 25}}, 2},
		"a protocol":              {conntrack.Filter{Protocols: []uint8{17}}, 20},
		"a family":                {conntrack.Filter{Without: [2]bool{true, false}}, 1},
		"the other":               {conntrack.Filter{Without: [2]bool{false, true}}, 30},
		"a state":                 {conntrack.Filter{States: []string{"established"}}, 20},
		"one of two states":       {conntrack.Filter{States: []string{"opening", "established"}}, 31},
		"two kinds":               {conntrack.Filter{Protocols: []uint8{17}, States: []string{"opening"}}, 10},
		"nothing":                 {conntrack.Filter{Protocols: []uint8{6}, Ports: []uint16{25}}, 0},
	} {
		if got := len(k.listed(t, c.filter)); got != c.want {
			t.Errorf("%s: %d connections, want %d", name, got, c.want)
		}
	}
}

// TestKernelListedConnectionIsCurrentUntilAnEpochMoves: bumping the epoch of an end, or of its address, makes the
// connection outdated.
func TestKernelListedConnectionIsCurrentUntilAnEpochMoves(t *testing.T) {
	th := newTheatre(t, false)
	current := func(want bool) {
		t.Helper()
		all := th.k.listed(t, conntrack.Filter{})
		if len(all) != 1 || all[0].Current != want {
			t.Errorf("listed %+v, want one that is current: %t", all, want)
		}
	}
	th.play(t, handshake(4000, 80))
	current(true)
	must(t, "BumpEpochs", th.k.Endpoints.BumpEpochs(th.pods["b"].Slot))
	current(false)
	th.expect(t, say("a", "b", segment(4000, 80, flagACK), event.ForwardedToPod))
	current(true)
	must(t, "SetLocal", th.k.IPCache.SetLocal(a.IPv4, a.Identity+1))
	current(false)
}

// TestKernelAFlushKnowsTheVersionBefore: connections of the previous version are listed once and flushed, and
// so are their migrated entries.
func TestKernelAFlushKnowsTheVersionBefore(t *testing.T) {
	th := newTheatre(t, false)
	th.goOn(t, "the beginning", openings())
	all := len(th.k.listed(t, conntrack.Filter{}))
	th.toLegacy(t)
	th.reopen(t, th.k.opened.Dir, build{})
	th.goOn(t, "upgrade", []act{say("b", "a", datagram(53, 4000), event.ForwardedToPod)})
	_, previous := th.held(t)
	earlier := 0
	list := th.k.listed(t, conntrack.Filter{})
	for _, c := range list {
		if c.Earlier != nil {
			earlier++
		}
	}
	if earlier == 0 || earlier != previous || len(list) != all {
		t.Errorf("%d connections are listed, of which %d are in the previous map, want %d and %d",
			len(list), earlier, all, previous)
	}
	done := th.k.flush(t, conntrack.Filter{})
	current, previous := th.held(t)
	if done.Terminated != 1 || done.Removed != all-1 || current+previous != done.Terminated {
		t.Errorf("flushed %+v, left %d and %d, want all of %d but the one that is terminated", done, current, previous, all)
	}
}

// TestKernelAFlushDuringTrafficOpensNothing: policies alternate while packets of both ends arrive and the
// connection is flushed again and again. No packet passes that the current policy denies to the connection, and
// each passes that it allows. If a flush removes the entry while a packet ends the connection, its direction is
// lost, and a SYN has to begin it again.
func TestKernelAFlushDuringTrafficOpensNothing(t *testing.T) {
	th := newTheatre(t, false)
	slot := th.pods["b"].Slot
	th.play(t, handshake(4000, 80))
	ctx, stop := context.WithCancel(t.Context())
	var flusher sync.WaitGroup
	flushed := 0
	flusher.Go(func() {
		for ctx.Err() == nil {
			done, err := th.k.trackedView().Flush(t.Context(), conntrack.Filter{}, false)
			if err != nil {
				t.Errorf("Flush: %v", err)
				return
			}
			flushed += done.Removed
		}
	})
	const flips, packets = 150, 6
	again := 0
	for range flips {
		for _, p := range []struct {
			policy endpointmap.Policy
			denies bool
		}{{outOnly, true}, {inOnly, false}} {
			setPolicy(t, th.k, slot, p.policy)
			for range packets {
				for _, a := range []act{
					say("b", "a", segment(80, 4000, flagACK|flagPSH), 0), say("a", "b", segment(4000, 80, flagACK|flagPSH), 0),
				} {
					prog, in, frame := th.frame(a)
					o := th.run(t, prog, frame, in, 0)
					if o.reason == event.PolicyDenied && !p.denies {
						again++
						prog, in, frame := th.frame(say("a", "b", segment(4000, 80, flagSYN), 0))
						o = th.run(t, prog, frame, in, 0)
					}
					if o.reason.Dropped() != p.denies {
						t.Fatalf("from %s, while the policy denies: %t: %v", a.from, p.denies, o.reason)
					}
				}
			}
		}
	}
	stop()
	flusher.Wait()
	if flushed == 0 {
		t.Error("no connection was flushed meanwhile")
	}
	if again > flips/10 {
		t.Errorf("%d connections had to begin anew in %d changes", again, flips)
	}
}
