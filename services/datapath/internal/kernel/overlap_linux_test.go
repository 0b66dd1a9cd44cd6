// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf/swapped"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// swappedBuild has the connection layouts of this build, the current and the previous one swapped.
var swappedBuild = build{maps: swapped.LoadMaps, programs: []program.Spec{
	{Name: program.FromPod, Devices: program.Endpoints, Hook: program.Ingress, Load: swapped.LoadFromPod},
	{Name: program.ToPod, Devices: program.Endpoints, Hook: program.Egress, Load: swapped.LoadToPod},
}}

// begin starts the theatre in a directory of its own, with another build.
func (th *theatre) begin(t *testing.T, b build) {
	t.Helper()
	th.reopen(t, kerneltest.NewBPFFS(t), b)
	for name, e := range th.pods {
		th.pods[name] = publish(t, th.k, e)
	}
	must(t, "SyncHostAddrs", th.k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
}

// reopen ends the process and starts another build on the same pins.
func (th *theatre) reopen(t *testing.T, dir string, b build) {
	t.Helper()
	th.events.Close()
	must(t, "Close", th.k.Close())
	o := testOptions(dir)
	o.build = b
	th.k = openKernel(t, o)
	var err error
	th.events, err = th.k.Events.Read()
	must(t, "Events", err)
	t.Cleanup(func() { th.events.Close() })
}

// goOn plays acts without removing the existing state.
func (th *theatre) goOn(t *testing.T, when string, acts []act) {
	t.Helper()
	for i, a := range acts {
		if a.then != nil {
			a.then(t, th)
			continue
		}
		prog, ctx, in := th.frame(a)
		if o := th.run(t, prog, in, ctx, 0); o.reason != a.want {
			t.Errorf("%s, act %d, %s to %s: %v, want %v", when, i, a.from, a.to, o.reason, a.want)
		}
	}
	th.sort(drain(t, th.events))
}

// held counts the entries of the maps of the theatre's family.
func (th *theatre) held(t *testing.T) (current, previous int) {
	t.Helper()
	i := 0
	if th.v6 {
		i = 1
	}
	count := func(m *ebpf.Map) (n int) {
		if m == nil {
			return 0
		}
		key := make([]byte, m.KeySize())
		value := make([]byte, m.ValueSize())
		it := m.Iterate()
		for it.Next(&key, &value) {
			n++
		}
		must(t, "count connections", it.Err())
		return n
	}
	return count(th.k.Pins.Map(pin.PreviousMaps[i].Current)), count(th.k.Pins.Previous(pin.PreviousMaps[i].Previous))
}

// openings begin the connections that must survive. The policies only allow that a begins, so replies pass
// because of their entries; b became isolated from the world in the middle of a connection.
func openings() []act {
	return []act{
		policy("a", nodetable.Allow, nodetable.Deny), policy("b", nodetable.Allow, nodetable.Allow),
		say("b", "world", segment(6000, 80, flagSYN), event.ForwardedOutside),
		say("world", "b", segment(80, 6000, flagSYN|flagACK), event.ForwardedFromStack),
		say("b", "world", segment(6000, 80, flagACK), event.ForwardedOutside),
		policy("b", nodetable.Deny, nodetable.Allow),
		say("b", "world", segment(6000, 80, flagACK), event.PolicyDenied),
		say("a", "b", datagram(4000, 53), event.ForwardedToPod),
		say("b", "a", datagram(53, 4000), event.ForwardedToPod),
		say("a", "b", segment(5000, 80, flagSYN), event.ForwardedToPod),
		say("b", "a", segment(80, 5000, flagSYN|flagACK), event.ForwardedToPod),
		say("a", "b", segment(5000, 80, flagACK), event.ForwardedToPod),
		say("a", "b", ping(false, 7), event.ForwardedToPod),
		say("b", "a", ping(true, 7), event.ForwardedToPod),
	}
}

// sequels returns the next packets of the connections, the server's first.
func sequels() []act {
	return []act{
		say("b", "a", datagram(53, 4000), event.ForwardedToPod),
		say("a", "b", datagram(4000, 53), event.ForwardedToPod),
		say("b", "a", segment(80, 5000, flagACK|flagPSH), event.ForwardedToPod),
		say("a", "b", segment(5000, 80, flagACK), event.ForwardedToPod),
		say("b", "a", ping(true, 7), event.ForwardedToPod),
		say("a", "b", ping(false, 7), event.ForwardedToPod),
		// terminated, and not picked up
		say("world", "b", segment(80, 6000, flagACK|flagPSH), event.PolicyDenied),
		say("b", "world", segment(6000, 80, flagACK), event.PolicyDenied),
		// never begun
		say("b", "a", datagram(53, 4999), event.PolicyDenied),
	}
}

const kept = 4 // connections after the openings

// unevaluated checks that the connections were moved without evaluation, and that each is in one map.
func (th *theatre) unevaluated(t *testing.T, when string, before conntrack.Counters) {
	t.Helper()
	if len(th.evaluated) > 0 {
		t.Errorf("%s: evaluated again: %+v", when, th.evaluated)
	}
	after, err := th.k.Connections.Counters()
	must(t, "ConnectionCounters", err)
	if after != before {
		t.Errorf("%s: counters %+v, before %+v", when, after, before)
	}
	if current, previous := th.held(t); current != kept || previous != 0 {
		t.Errorf("%s: %d connections here, %d in the previous map, want %d and none", when, current, previous, kept)
	}
}

func TestKernelConnectionsLiveOnOverAnUpgradeAndBack(t *testing.T) {
	for name, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) {
			th := newTheatre(t, v6)
			th.begin(t, swappedBuild)
			th.goOn(t, "the beginning", openings())
			before, err := th.k.Connections.Counters()
			must(t, "ConnectionCounters", err)
			for _, step := range []struct {
				when string
				b    build
			}{{"upgrade", build{}}, {"restart", build{}}, {"rollback", swappedBuild}, {"upgrade again", build{}}} {
				th.reopen(t, th.k.opened.Dir, step.b)
				th.goOn(t, step.when, sequels())
				th.unevaluated(t, step.when, before)
			}
		})
	}
}

// toLegacy leaves the pins with the names of the legacy version, with the connections in its layout.
func (th *theatre) toLegacy(t *testing.T) {
	t.Helper()
	specs := legacySpecs(t)
	for i, p := range pin.PreviousMaps {
		old, err := newPinned(filepath.Join(th.k.opened.Dir, pin.LegacyPins[p.Current].Pin), specs[p.Current])
		must(t, "create an old map", err)
		write := func(key any, v bpf.MapsSlCt) {
			must(t, "write a connection", old.Put(key, &bpf.MapsSlCtPrev{
				Epochs: v.Epochs, Where: v.Where, IdInit: v.IdInit, IdResp: v.IdResp, LastS: v.LastS, Flags: v.Flags,
				RuleEg: v.RuleEg, RuleIn: v.RuleIn,
			}))
		}
		if i == 0 {
			err = pin.EachEntry(th.k.Pins.Map(p.Current), pin.Unguarded, func(keys []bpf.MapsSlCtKey4, values []bpf.MapsSlCt) error {
				for i := range keys {
					write(&keys[i], values[i])
				}
				return nil
			})
		} else {
			err = pin.EachEntry(th.k.Pins.Map(p.Current), pin.Unguarded, func(keys []bpf.MapsSlCtKey6, values []bpf.MapsSlCt) error {
				for i := range keys {
					write(&keys[i], values[i])
				}
				return nil
			})
		}
		must(t, "read connections", err)
		must(t, "close an old map", old.Close())
		must(t, "remove a pin", os.Remove(th.k.Pins.Pin(p.Current)))
	}
	renamePins(t, th.k.opened.Dir)
}

func TestKernelConnectionsOfTheEarlierVersionLiveOn(t *testing.T) {
	for name, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) {
			th := newTheatre(t, v6)
			th.goOn(t, "the beginning", openings())
			before, err := th.k.Connections.Counters()
			must(t, "ConnectionCounters", err)
			th.toLegacy(t)
			th.reopen(t, th.k.opened.Dir, build{})
			th.goOn(t, "upgrade", sequels())
			th.unevaluated(t, "upgrade", before)
			for _, c := range th.connections(t) {
				if tcp := c.Protocol == 6; tcp != (c.Flags&conntrack.Established != 0) {
					t.Errorf("%v: flags %v, want established of TCP alone", c.Tuple, c.Flags)
				}
			}
		})
	}
}

// TestKernelMovedConnectionsAreEvaluatedByTheirDirection: a connection whose policy has changed is evaluated in its own
// direction.
func TestKernelMovedConnectionsAreEvaluatedByTheirDirection(t *testing.T) {
	th := newTheatre(t, false)
	th.goOn(t, "the beginning", openings())
	th.toLegacy(t)
	th.reopen(t, th.k.opened.Dir, build{})
	th.goOn(t, "upgrade", []act{
		policy("a", nodetable.Allow, nodetable.Deny), // the same under another epoch
		say("b", "a", datagram(53, 4000), event.ForwardedToPod),
		say("b", "a", segment(80, 5000, flagACK), event.ForwardedToPod),
		policy("b", nodetable.Deny, nodetable.Deny),
		say("b", "a", datagram(53, 4000), event.PolicyDenied),
		say("a", "b", datagram(4000, 53), event.PolicyDenied),
		say("b", "a", segment(80, 5000, flagACK), event.PolicyDenied),
	})
}

// TestKernelAClaimedEntryIsMovedUnclaimed: an entry that was copied while a program was changing it is evaluated again,
// once.
func TestKernelAClaimedEntryIsMovedUnclaimed(t *testing.T) {
	th := newTheatre(t, false)
	th.goOn(t, "the beginning", openings())
	c, found, err := th.k.Connections.Lookup(conntrack.Tuple{Initiator: netip.AddrPortFrom(th.addr("a"), 4000), Responder: netip.AddrPortFrom(th.addr("b"), 53), Protocol: 17})
	if err != nil || !found {
		t.Fatalf("the connection: %v, %v", found, err)
	}
	from, to := c.From.Epoch, c.To.Epoch
	c.From.Epoch, c.To.Epoch = 0xffffffff, 0xfffffffe
	th.k.put(t, c)
	th.toLegacy(t)
	th.reopen(t, th.k.opened.Dir, build{})
	th.goOn(t, "upgrade", []act{say("b", "a", datagram(53, 4000), event.ForwardedToPod)})
	if len(th.evaluated) != 1 {
		t.Errorf("evaluated %+v, want once", th.evaluated)
	}
	if c, _, err = th.k.Connections.Lookup(c.Tuple); err != nil || c.From.Epoch != from || c.To.Epoch != to || c.Initiator.Port() != 4000 {
		t.Errorf("afterwards: %+v, %v; want epochs %d and %d", c, err, from, to)
	}
}

func TestKernelTheCounterOfEpochsGoesOnBehindThoseOfPreviousMaps(t *testing.T) {
	th := newTheatre(t, false)
	th.k.put(t, conntrack.Connection{
		Tuple: tuple(6, "10.244.0.10:40000", "10.244.0.20:80"), From: conntrack.End{Slot: 9, Epoch: 500}, To: conntrack.End{Slot: endpointmap.NoID},
	})
	dir, epochs := th.k.opened.Dir, filepath.Base(th.k.Pins.Pin(bpf.MapsMapSlGen))
	th.toLegacy(t)
	must(t, "remove a pin", os.Remove(filepath.Join(dir, epochs)))
	th.reopen(t, dir, build{})
	epoch, err := th.k.Endpoints.SetPolicy(publish(t, th.k, testEndpoint(9001, 91)).Slot, nodetable.Allow, nodetable.Allow)
	must(t, "SetPolicy", err)
	if epoch <= 500 {
		t.Errorf("the next epoch is %d, want one behind 500", epoch)
	}
}

// TestKernelTheLaterOfTwoEntriesCounts: after a rollback, the entry of the previous version may be newer than the entry
// that was moved before.
func TestKernelTheLaterOfTwoEntriesCounts(t *testing.T) {
	for name, c := range map[string]struct {
		last int32 // last_s of the previous version's entry, relative to the current one
		want uint16
	}{"seen later there": {5, 77}, "seen at the same time": {0, 0}, "seen earlier there": {-5, 0}} {
		t.Run(name, func(t *testing.T) {
			th := newTheatre(t, false)
			th.goOn(t, "the beginning", openings())
			th.toLegacy(t)
			dir := th.k.opened.Dir
			th.reopen(t, dir, build{})
			th.goOn(t, "upgrade", sequels())
			tu := conntrack.Tuple{Initiator: netip.AddrPortFrom(th.addr("a"), 4000), Responder: netip.AddrPortFrom(th.addr("b"), 53), Protocol: 17}
			was, _, err := th.k.Connections.Lookup(tu)
			must(t, "look up the connection", err)
			v := was.Value
			key := tu.Key4()
			must(t, "write an entry of the previous version", th.k.Pins.Previous(bpf.MapsMapSlPrev4).Put(&key, &bpf.MapsSlCtPrev{
				Epochs: v.Epochs, Where: v.Where, IdInit: v.IdInit, IdResp: v.IdResp, LastS: v.LastS + uint32(c.last), Flags: v.Flags, RuleEg: 77,
			}))
			th.reopen(t, dir, build{})
			must(t, "DropOldPrograms", th.k.DropOldPrograms())
			_, err = th.k.Connections.DrainPrevious(t.Context(), conntrack.MonotonicSeconds(), conntrack.DefaultTimeouts())
			must(t, "drainPrevious", err)
			th.goOn(t, "upgrade again", sequels())
			if now, found, err := th.k.Connections.Lookup(tu); err != nil || !found || now.EgressRule != c.want {
				t.Errorf("%+v, %v, %v; want egress rule %d", now, found, err, c.want)
			}
			if _, previous := th.held(t); previous != 0 {
				t.Errorf("%d connections in the previous map, want none", previous)
			}
		})
	}
}

// TestKernelBothVersionsForwardSideBySide: programs of both versions run while filters are replaced.
func TestKernelBothVersionsForwardSideBySide(t *testing.T) {
	th := newTheatre(t, false)
	th.begin(t, swappedBuild)
	th.goOn(t, "the beginning", openings())
	previous, current := th.k, openKernel(t, testOptions(th.k.opened.Dir))
	// the entry is moved, and the version that does not find it creates it again
	th.k = current
	th.goOn(t, "upgrade", []act{say("b", "a", segment(80, 5000, flagACK), event.ForwardedToPod)})
	th.k = previous
	th.goOn(t, "the previous version", []act{say("a", "b", segment(5000, 80, flagACK), event.ForwardedOutside)})
	th.k = current
	if _, previous := th.held(t); previous != kept {
		t.Fatalf("%d connections in the previous map, want %d", previous, kept)
	}
	th.goOn(t, "upgrade", sequels())
	if current, previous := th.held(t); current != kept || previous != 1 {
		t.Errorf("%d connections, %d in the previous map, want %d and the one that was created again", current, previous,
			kept)
	}
	pass := func() conntrack.PreviousPass {
		p, err := th.k.Connections.DrainPrevious(t.Context(), conntrack.MonotonicSeconds(), conntrack.DefaultTimeouts())
		must(t, "drainPrevious", err)
		return p
	}
	if p := pass(); p != (conntrack.PreviousPass{Left: 1}) {
		t.Errorf("while filters hold programs of the previous version: %+v, want one connection left", p)
	}
	must(t, "DropOldPrograms", th.k.DropOldPrograms())
	if p := pass(); p != (conntrack.PreviousPass{Removed: 1}) {
		t.Errorf("when all are replaced: %+v, want that one removed", p)
	}
	th.goOn(t, "after the pass", sequels())
}

func TestKernelOldPinsGoAfterOneIdleTime(t *testing.T) {
	th := newTheatre(t, false)
	th.goOn(t, "the beginning", openings())
	th.toLegacy(t)
	dir := th.k.opened.Dir
	th.reopen(t, dir, build{})
	pins := func() (n int) {
		for _, l := range pin.LegacyPins {
			switch _, err := os.Stat(filepath.Join(dir, l.Pin)); {
			case err == nil:
				n++
			case !errors.Is(err, os.ErrNotExist):
				t.Fatal(err)
			}
		}
		return n
	}
	start := pins()
	foreign := filepath.Join(dir, "sl_something")
	must(t, "pin a map of another owner", pinCopy(th.k.Pins.Map(bpf.MapsMapSlIf), foreign))
	drainAt := func(seconds uint32) conntrack.PreviousPass {
		p, err := th.k.Connections.DrainPrevious(t.Context(), conntrack.MonotonicSeconds()+seconds, conntrack.DefaultTimeouts())
		must(t, "drainPrevious", err)
		return p
	}
	if p := drainAt(0); p != (conntrack.PreviousPass{Left: kept}) {
		t.Errorf("at the start: %+v, want %d connections left", p, kept)
	}
	drainAt(9000) // a filter may still hold an old program
	if pins() != start || start == 0 {
		t.Errorf("%d old pins before all filters are replaced, want %d", pins(), start)
	}
	must(t, "DropOldPrograms", th.k.DropOldPrograms())
	drainAt(9000)
	drainAt(9000 + 7999)
	if pins() != start {
		t.Errorf("%d old pins within the idle time, want %d", pins(), start)
	}
	if p := drainAt(9000 + 8000); !p.Over || pins() != 0 {
		t.Errorf("after the idle time: %+v, %d old pins, want none", p, pins())
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Errorf("the pin of another owner: %v", err)
	}
	// from the next start on, each lookup uses one map
	th.goOn(t, "afterwards", []act{say("a", "b", datagram(4000, 53), event.ForwardedToPod), say("b", "a", datagram(53, 4000), event.ForwardedToPod)})
	th.reopen(t, dir, build{})
	if len(th.k.Pins.PreviousNames()) != 0 {
		t.Errorf("previous maps %v, want none", th.k.Pins.PreviousNames())
	}
	th.goOn(t, "the next start", []act{say("b", "a", datagram(53, 4000), event.ForwardedToPod)})
}

func TestKernelCollectorDrainsPreviousMaps(t *testing.T) {
	th := newTheatre(t, false)
	th.goOn(t, "the beginning", openings())
	th.toLegacy(t)
	dir := th.k.opened.Dir
	th.reopen(t, dir, build{})
	th.goOn(t, "upgrade", []act{say("b", "a", datagram(53, 4000), event.ForwardedToPod)})
	must(t, "DropOldPrograms", th.k.DropOldPrograms())
	c, cl := newCollector(t, th.k, conntrack.CollectorOptions{})
	start := conntrack.MonotonicSeconds()
	for _, step := range []struct {
		after                  uint32
		live, expired, evicted int
	}{{0, 1, 0, 0}, {100, 1, 1, 0}, {200, 0, 1, 0}, {8002, 0, 2, 0}} {
		cl.now.Store(start + step.after)
		if p := collect(t, c); p.Live[0] != step.live || p.Expired != step.expired || p.Evicted != uint64(step.evicted) {
			t.Errorf("after %d s: %+v, want %+v", step.after, p, step)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, pin.LegacyPins[bpf.MapsMapSlCt4].Pin)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old pin after the idle time: %v, want none", err)
	}
}

func TestKernelIdleConnectionsExpireInPreviousMaps(t *testing.T) {
	th := newTheatre(t, false)
	// the time of the entries is between the two, however slow the machine is
	first := conntrack.MonotonicSeconds()
	th.goOn(t, "the beginning", openings())
	last := conntrack.MonotonicSeconds()
	th.toLegacy(t)
	th.reopen(t, th.k.opened.Dir, build{})
	timeouts := conntrack.DefaultTimeouts()
	for _, c := range []struct {
		since uint32
		after time.Duration
		want  conntrack.PreviousPass
	}{
		{last, timeouts.ICMP + 2*time.Second, conntrack.PreviousPass{Left: 3, Removed: 1}},
		{last, timeouts.UDPAnswered + 2*time.Second, conntrack.PreviousPass{Left: 2, Removed: 1}},
		{first, timeouts.TCPEstablished - 2*time.Second, conntrack.PreviousPass{Left: 2}},
		{last, timeouts.TCPEstablished + 2*time.Second, conntrack.PreviousPass{Removed: 2}},
	} {
		p, err := th.k.Connections.DrainPrevious(t.Context(), c.since+uint32(c.after/time.Second), timeouts)
		if err != nil || p != c.want {
			t.Errorf("after %v: %+v, %v, want %+v", c.after, p, err, c.want)
		}
	}
}

func TestKernelVerifierAcceptsTheOverlap(t *testing.T) {
	th := newTheatre(t, false)
	th.toLegacy(t)
	th.reopen(t, th.k.opened.Dir, build{})
	loaded, err := th.k.Programs.Load(program.Endpoints)
	must(t, "load the programs", err)
	for _, p := range loaded {
		t.Logf("verified %s %s: %d instructions walked", pin.Release(), p.Name, p.VerifiedInstructions)
		if p.VerifiedInstructions > verifierLimit {
			t.Errorf("%s: the verifier walked %d instructions, more than %d", p.Name, p.VerifiedInstructions, verifierLimit)
		}
	}
}

// TestSwappedLayoutsAreThoseOfTheOther: the layouts are swapped, not changed.
func TestSwappedLayoutsAreThoseOfTheOther(t *testing.T) {
	ours, err := bpf.LoadMaps()
	must(t, "read the compiled maps", err)
	theirs, err := swapped.LoadMaps()
	must(t, "read the swapped maps", err)
	for _, p := range pin.PreviousMaps {
		if pin.Layout(ours.Maps[p.Current]) != pin.Layout(theirs.Maps[p.Previous]) ||
			pin.Layout(ours.Maps[p.Previous]) != pin.Layout(theirs.Maps[p.Current]) {
			t.Errorf("%s and %s are not exchanged", p.Current, p.Previous)
		}
		if l := pin.LegacyPins[p.Current]; pin.Layout(ours.Maps[p.Previous]) != l.Layout {
			t.Errorf("%s is not the layout behind %s", p.Previous, l.Pin)
		}
	}
}
