// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// watched calls after following every write of the real maps, and fails from a number of writes on,
// as if the process had been killed.
type watched struct {
	kernel.Policies
	after  func()
	left   int // writes until it fails; negative: never
	writes int
}

var errKilled = errors.New("killed by the test")

func (k *watched) write(f func() error) error {
	if k.left == 0 {
		return errKilled
	}
	if err := f(); err != nil {
		return err
	}
	k.left--
	k.writes++
	if k.after != nil {
		k.after()
	}
	return nil
}

func (k *watched) DefineTable(c nodetable.Content) (t nodetable.ID, err error) {
	return t, k.write(func() error { t, err = k.Policies.DefineTable(c); return err })
}

func (k *watched) GrowTable(t nodetable.ID, classes []policytable.Ranges) error {
	return k.write(func() error { return k.Policies.GrowTable(t, classes) })
}

func (k *watched) SetPeer(t nodetable.ID, nc nodetable.IdentityClass, class uint16) error {
	return k.write(func() error { return k.Policies.SetPeer(t, nc, class) })
}

func (k *watched) DeletePeer(t nodetable.ID, nc nodetable.IdentityClass) error {
	return k.write(func() error { return k.Policies.DeletePeer(t, nc) })
}

func (k *watched) SetDefaults(t nodetable.ID, classes [identity.Kinds]policytable.Class) error {
	return k.write(func() error { return k.Policies.SetDefaults(t, classes) })
}

func (k *watched) SetPrefix(t nodetable.ID, p netip.Prefix, classes policytable.PrefixClasses) error {
	return k.write(func() error { return k.Policies.SetPrefix(t, p, classes) })
}

func (k *watched) DeletePrefix(t nodetable.ID, p netip.Prefix) error {
	return k.write(func() error { return k.Policies.DeletePrefix(t, p) })
}

func (k *watched) RetireTables(ts ...nodetable.ID) error {
	return k.write(func() error { return k.Policies.RetireTables(ts...) })
}

func (k *watched) RetireIdentityClasses(ncs ...nodetable.IdentityClass) error {
	return k.write(func() error { return k.Policies.RetireIdentityClasses(ncs...) })
}

func (k *watched) SetIdentities(ws map[uint32]nodetable.Identity) error {
	for id, w := range ws {
		if err := k.write(func() error { return k.Policies.SetIdentities(map[uint32]nodetable.Identity{id: w}) }); err != nil {
			return err
		}
	}
	return nil
}

func (k *watched) SetPolicy(slot uint16, egress, ingress nodetable.ID) (epoch uint32, err error) {
	return epoch, k.write(func() error { epoch, err = k.Policies.SetPolicy(slot, egress, ingress); return err })
}

// stage is real maps with three endpoints.
type stage struct {
	t         *testing.T
	dir       string
	kernel    *kernel.Kernel
	evaluator kerneltest.Evaluator
	maps      *watched
	slots     map[uint16]uint32 // identities by slot
	policies  *policysync.Applier
}

func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{t: t, dir: kerneltest.NewBPFFS(t), slots: map[uint16]uint32{}}
	s.start()
	t.Cleanup(func() { s.close() })
	s.evaluator = kerneltest.NewEvaluator(t, s.kernel.Pins) // later starts adopt its maps
	for i, number := range []uint32{300, 301, 300} {
		n := byte(i + 1)
		slot, err := s.kernel.Endpoints.Publish(t.Context(), endpointmap.Endpoint{
			Ifindex: 1000 + uint32(n), Identity: identity.Numeric(number), IPv4: netip.AddrFrom4([4]byte{10, 244, 0, n}),
			MAC: [6]byte{2, 0, 0, 0, 0, n}, HostMAC: [6]byte{2, 0, 0, 0, 1, n}, MTU: 1500, Deliver: endpointmap.DeliverPeer,
			Policy: endpointmap.Policy{Egress: nodetable.Pending, Ingress: nodetable.Pending},
		})
		if err != nil {
			t.Fatal(err)
		}
		s.slots[slot] = number
	}
	s.restart()
	return s
}

func (s *stage) close() {
	if err := s.kernel.Close(); err != nil {
		s.t.Error(err)
	}
}

// start opens the maps, as a new process does.
func (s *stage) start() {
	s.t.Helper()
	k, err := kernel.Open(s.t.Context(), kernel.Options{Dir: s.dir, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/24")}, EventsPerSecond: 1000})
	if err != nil {
		s.t.Fatal(err)
	}
	s.kernel = k
	s.adopt()
}

// adopt creates a new applier on open maps: opening takes a second, most of it in the verifier.
func (s *stage) adopt() {
	s.t.Helper()
	s.maps = &watched{Policies: s.kernel.Policies(), left: -1}
	s.policies = policysync.New(policysync.Config{Name: "test", Kernel: s.maps, Addresses: s.kernel.IPCache, Wait: true})
	if err := s.policies.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) restart() {
	s.t.Helper()
	s.close()
	s.start()
}

// allows evaluates by the live maps.
func (s *stage) allows(
	e endpointmap.Endpoint, d policytable.Direction, peer uint32, addr netip.Addr, point uint32,
) bool {
	table := e.Policy.Egress
	if d == policytable.Ingress {
		table = e.Policy.Ingress
	}
	switch table {
	case nodetable.Deny, nodetable.Pending:
		return false
	case nodetable.Allow:
		return true
	}
	q := kerneltest.Question(table, identity.Numeric(peer), addr, 0, 0)
	q.Point = point
	_, side := s.evaluator.Ask(s.t, q)
	return side.Action != event.ActionDeny
}

// check fails unless every verdict is the verdict of one of the states.
func (s *stage) check(what string, states ...policysync.TestState) {
	s.t.Helper()
	list, err := s.kernel.Endpoints.List()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range list {
		for _, d := range []policytable.Direction{policytable.Egress, policytable.Ingress} {
			for peer := uint32(300); peer < 307; peer++ {
				for _, addr := range policysync.TestAddrs {
					for _, point := range policysync.TestPoints {
						got, ok := s.allows(e, d, peer, addr, point), false
						for _, st := range states {
							ok = ok || st.Allows(uint32(e.Identity), d, peer, addr, point) == got
						}
						if !ok {
							s.t.Fatalf("%s: %s of slot %d with identity %d at %v, point %#x: %v", what, d, e.Slot, peer, addr, point, got)
						}
					}
				}
			}
		}
	}
}

// holds fails if the maps hold more than a state needs.
func (s *stage) holds(what string, st policysync.TestState) {
	s.t.Helper()
	tables, err := s.kernel.Tables.Tables()
	if err != nil {
		s.t.Fatal(err)
	}
	entries, err := s.kernel.Tables.Identities()
	if err != nil {
		s.t.Fatal(err)
	}
	classes := map[nodetable.IdentityClass]bool{}
	for _, w := range entries {
		classes[w.Class] = true
	}
	wantTables, wantWords := st.Figures()
	if len(tables) != wantTables || len(entries) != wantWords || len(s.kernel.Tables.IdentityClasses()) != len(classes) {
		s.t.Fatalf("%s: %d tables, want %d; %d words, want %d; %d identity classes, want %d",
			what, len(tables), wantTables, len(entries), wantWords, len(s.kernel.Tables.IdentityClasses()), len(classes))
	}
	if diffs, err := s.kernel.Tables.Audit(false); err != nil || len(diffs) > 0 {
		s.t.Fatalf("%s: the maps differ from what was written: %q, %v", what, diffs, err)
	}
}

// remoteAddr returns an address on another node with an identity.
func remoteAddr(id uint32) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 0, byte(id - 300)}) }

// published returns the identities under which the ipcache has addresses of other nodes. The tables
// must know each of them.
func (s *stage) published(what string) (ids []uint32) {
	s.t.Helper()
	for id := uint32(300); id < 307; id++ {
		info, _, err := s.kernel.Addresses.Match(remoteAddr(id))
		if err != nil {
			s.t.Fatal(err)
		}
		switch {
		case info.Node != 7:
			s.t.Fatalf("%s: the address of identity %d is on node %d, want 7", what, id, info.Node)
		case info.Identity == identity.UnknownInCluster:
		case uint32(info.Identity) != id || !s.kernel.Tables.Identity(info.Identity).Known:
			s.t.Fatalf("%s: the address of identity %d has %d, which the tables do not include", what, id, info.Identity)
		default:
			ids = append(ids, id)
		}
	}
	return ids
}

// TestKernelIdentityBeforeAddress proves INV-53 for the addresses of other nodes: after every
// write, also a failed one, no address is published with an unknown identity, and in the end all
// addresses of known identities are.
func TestKernelIdentityBeforeAddress(t *testing.T) {
	s := newStage(t)
	announce := func() {
		for id := uint32(300); id < 307; id++ {
			p := netip.PrefixFrom(remoteAddr(id), 32)
			if err := s.kernel.IPCache.SetRemote(p, ipcache.Remote{Identity: identity.Numeric(id), Node: 7}); err != nil {
				t.Fatal(err)
			}
		}
	}
	announce()
	states := policysync.TestStates()
	service, runs := policysync.NewTestService(1), uint64(1)
	at := states[0]
	hidden := 0
	for round, n := range []int{0, 1, 4, 2, 7, 3, 6, 5, 1, 0} {
		name := fmt.Sprintf("round %d to %d", round, n)
		s.maps.after = func() { hidden += 7 - len(s.published(name)) }
		var err error
		switch {
		case round == 0 || round%3 == 2: // a restarted service
			runs++
			service = policysync.NewTestService(runs)
			err = s.policies.Load(service.Snapshot(states[n]))
		case round%3 == 1: // a process that is killed in between, with the service unavailable
			change := service.Change(states[n])
			s.maps.left = round
			err = s.policies.Apply(t.Context(), change)
			if err != nil && !errors.Is(err, errKilled) {
				t.Fatalf("%s: %v", name, err)
			}
			s.restart()
			s.published(name + ", after a start")
			runs++
			service = policysync.NewTestService(runs)
			s.maps.after = func() { s.published(name) }
			err = s.policies.Load(service.Snapshot(states[n]))
			announce()
		default:
			err = s.policies.Apply(t.Context(), service.Change(states[n]))
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		at = states[n]
		words, err := s.kernel.Tables.Identities()
		if err != nil {
			t.Fatal(err)
		}
		known := 0
		for id := range words {
			if id >= 300 && id < 307 {
				known++
			}
		}
		if got := s.published(name + ", at the end"); len(got) != known {
			t.Errorf("%s: published %v, and the tables include %d identities", name, got, known)
		}
	}
	if hidden == 0 {
		t.Errorf("no address ever waited; the last state is %v", at)
	}
}

// TestKernelVerdictsAreOldOrNewBehindEveryWrite proves INV-50, INV-51, INV-55. It visits all states and returns, by
// changes and by snapshots of restarted services, with restarts of the process: after every write the maps of the
// running kernel give old or new verdicts.
func TestKernelVerdictsAreOldOrNewBehindEveryWrite(t *testing.T) {
	s := newStage(t)
	states := policysync.TestStates()
	service, runs := policysync.NewTestService(1), uint64(1)
	at := states[0]
	if err := s.policies.Load(service.Snapshot(at)); err != nil {
		t.Fatal(err)
	}
	s.check("begin", at)
	for round, turn := range [][]int{{1, 2, 3, 4, 5, 6, 7, 0}, {5, 3, 6, 2, 0}} {
		for _, n := range turn {
			for part, next := range policysync.TestPath(at, states[n])[1:] {
				name := fmt.Sprintf("round %d to %d part %d", round, n, part)
				s.maps.after = func() { s.check(name, at, next) }
				var err error
				if (n+part+round)%4 == 0 {
					s.maps.after = nil
					s.restart()
					s.maps.after = func() { s.check(name, at, next) }
					runs++
					service = policysync.NewTestService(runs)
					err = s.policies.Load(service.Snapshot(next))
				} else {
					err = s.policies.Apply(t.Context(), service.Change(next))
				}
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				s.check(name, next)
				if err := s.kernel.Tables.Barrier(t.Context()); err != nil {
					t.Fatal(err)
				}
				s.holds(name, next)
				at = next
			}
		}
	}
	s.maps.after = nil
	// Neither a new service nor a new process rewrites anything. A service that has seen many
	// policies knows more kinds of peers than a new one.
	if err := s.policies.Load(policysync.NewTestService(runs + 1).Snapshot(states[5])); err != nil {
		t.Fatal(err)
	}
	at, runs = states[5], runs+1
	for _, restart := range []bool{false, true} {
		s.maps.writes = 0
		if restart {
			s.restart()
		}
		runs++
		if err := s.policies.Load(policysync.NewTestService(runs).Snapshot(at)); err != nil {
			t.Fatal(err)
		}
		if s.maps.writes != 0 {
			t.Errorf("%d writes for the same policy", s.maps.writes)
		}
	}
}

// TestKernelProcessThatEndsBehindAnyWriteLeavesNothing proves INV-50, INV-55: the process ends after each write of a
// change in turn; the next one adopts the real maps in that state, and brings them to the new state.
func TestKernelProcessThatEndsBehindAnyWriteLeavesNothing(t *testing.T) {
	s := newStage(t)
	states := policysync.TestStates()
	runs := uint64(0)
	load := func(st policysync.TestState) (*policysync.TestService, error) {
		runs++
		service := policysync.NewTestService(runs)
		return service, s.policies.Load(service.Snapshot(st))
	}
	for _, pair := range [][2]int{{2, 3}, {6, 5}} {
		from, to := states[pair[0]], states[pair[1]]
		for n := 0; ; n++ {
			name := fmt.Sprintf("%v, %d writes", pair, n)
			if _, err := load(from); err != nil {
				t.Fatal(name, err)
			}
			s.maps.left = n
			_, err := load(to)
			if err != nil && !errors.Is(err, errKilled) {
				t.Fatal(name, err)
			}
			killed := s.maps.left == 0
			if n%5 == 3 {
				s.restart()
			} else {
				s.adopt()
			}
			s.check(name+", restarted", from, to)
			s.maps.after = func() { s.check(name, from, to) }
			if _, err := load(to); err != nil {
				t.Fatal(name, err)
			}
			s.maps.after = nil
			s.check(name+", end", to)
			if err := s.kernel.Tables.Barrier(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.holds(name, to)
			if !killed {
				break
			}
		}
	}
}
