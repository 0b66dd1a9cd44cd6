// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

const (
	web = 2<<16 | 80
	dns = 2<<16 | 53
)

var testAddrs = []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("192.0.2.7")}

// testPoints lie at the ends of the port ranges in testStates.
var testPoints = []uint32{0, dns, web - 1, web, web + 1, lastTop}

// testStates differ in rules, in the selectors used, in the known identities, and in ports.
func testStates() []state {
	allow := func(bit uint8, not bool, from, to uint32) testRule {
		return testRule{bit, not, policytable.Allow, from, to}
	}
	deny := func(bit uint8, not bool, from, to uint32) testRule {
		return testRule{bit, not, policytable.Deny, from, to}
	}
	everybody := map[uint32]props{300: 1, 301: 2, 302: 3, 303: 4, 304: 7}
	fewer := map[uint32]props{300: 1, 301: 2, 303: 4}
	more := maps.Clone(everybody)
	more[305] = 6
	var many []testRule
	for i := range uint32(40) {
		many = append(many, allow(uint8(i%3), i%2 == 0, web+2*i, web+2*i)) //nolint:gosec // small
	}
	on := func(rules ...testRule) testPolicy { return testPolicy{enforce: true, rules: rules} }
	with := func(ids map[uint32]props, a, b testPolicies) state {
		return state{ids, map[uint32]testPolicies{300: a, 301: b}}
	}
	off := testPolicy{}
	blocks := testPolicy{enforce: true, prefixes: map[netip.Prefix]policytable.Action{
		netip.MustParsePrefix("10.0.0.0/8"): policytable.Allow, netip.MustParsePrefix("10.0.0.0/24"): policytable.Deny,
	}}
	return []state{
		with(everybody, testPolicies{off, off}, testPolicies{off, off}),
		with(everybody, testPolicies{on(), on()}, testPolicies{off, on()}),
		with(everybody, testPolicies{on(allow(0, false, web, web)), off}, testPolicies{on(allow(0, false, web, web)), on()}),
		with(everybody, testPolicies{on(allow(1, false, web, web)), off}, testPolicies{on(allow(0, true, web, web)), on()}),
		with(fewer, testPolicies{on(deny(0, false, 0, lastTop), allow(8, false, 0, lastTop)), on(allow(2, false, 0, web))}, testPolicies{off, off}),
		with(more, testPolicies{on(deny(1, true, dns, dns), allow(8, false, 0, web)), on(allow(2, false, 0, web))}, testPolicies{on(allow(2, true, 0, web)), off}),
		with(more, testPolicies{on(many...), on(deny(2, false, web, web+9), allow(8, false, 0, lastTop))}, testPolicies{on(many...), on()}),
		with(fewer, testPolicies{blocks, on(deny(2, false, web, web))}, testPolicies{blocks, off}),
	}
}

// scene returns a kernel with two endpoints per subject.
func scene() *fakeKernel {
	k := newFakeKernel()
	k.endpoint(1, 300, "10.0.0.1")
	k.endpoint(2, 301, "10.0.0.2")
	k.endpoint(3, 300, "10.0.0.3")
	return k
}

func start(t *testing.T, k *fakeKernel) *Applier {
	t.Helper()
	a := New(Config{Name: "test", Kernel: k, Wait: true})
	if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		t.Fatal(err)
	}
	return a
}

// load applies a snapshot.
func (a *Applier) load(m policytable.Message) ([]policystream.Nack, error) {
	a.begin(policystream.Subscription{}, m)
	return a.apply(context.Background(), m)
}

// question is one evaluation of a packet.
type question struct {
	slot  uint16
	d     policytable.Direction
	peer  uint32
	addr  netip.Addr
	point uint32
}

func questions(k *fakeKernel) (qs []question) {
	for _, slot := range slices.Sorted(maps.Keys(k.endpoints)) {
		for _, d := range []policytable.Direction{policytable.Egress, policytable.Ingress} {
			for peer := uint32(300); peer < 307; peer++ {
				for _, addr := range testAddrs {
					for _, point := range testPoints {
						qs = append(qs, question{slot, d, peer, addr, point})
					}
				}
			}
		}
	}
	return qs
}

func (k *fakeKernel) answers(qs []question) []bool {
	out := make([]bool, len(qs))
	for i, q := range qs {
		out[i] = k.allows(q.slot, q.d, q.peer, q.addr, q.point)
	}
	return out
}

func (s state) answers(k *fakeKernel, qs []question) []bool {
	out := make([]bool, len(qs))
	for i, q := range qs {
		out[i] = s.allows(k.endpoints[q.slot].Identity, q.d, q.peer, q.addr, q.point)
	}
	return out
}

// same fails if the kernel's answers differ from the expected ones.
func same(t *testing.T, what string, qs []question, got, want []bool) {
	t.Helper()
	for i := range qs {
		if got[i] != want[i] {
			t.Fatalf("%s: %+v is %v, want %v", what, qs[i], got[i], want[i])
		}
	}
}

// oldOrNew checks every verdict after every write.
func oldOrNew(t *testing.T, k *fakeKernel, qs []question, before, after []bool) {
	k.after = func(what string) {
		for i, got := range k.answers(qs) {
			if got != before[i] && got != after[i] {
				t.Fatalf("after %q: %+v is %v, and was before and will be %v", what, qs[i], got, before[i])
			}
		}
	}
}

// epochs returns the epochs of the endpoints.
func (k *fakeKernel) epochs() map[uint16]uint32 {
	out := map[uint16]uint32{}
	for n, e := range k.endpoints {
		out[n] = e.Epoch
	}
	return out
}

// evaluatedAgain fails if a revoked connection would keep its cached verdict.
func evaluatedAgain(t *testing.T, k *fakeKernel, qs []question, before, after []bool, epochs map[uint16]uint32) {
	t.Helper()
	for i, q := range qs {
		if before[i] && !after[i] && k.endpoints[q.slot].Epoch == epochs[q.slot] {
			t.Fatalf("%+v was revoked, and connections stay", q)
		}
	}
}

// nothingLeft fails if the kernel holds more than a state needs.
func nothingLeft(t *testing.T, k *fakeKernel, st state) {
	t.Helper()
	tables := map[string]bool{}
	for _, list := range st.policies {
		for _, p := range list.sides() {
			if p.enforce {
				tables[p.text()] = true
			}
		}
	}
	classes := map[nodetable.IdentityClass]bool{}
	for _, w := range k.entries {
		classes[w.Class] = true
	}
	if len(k.tables) != len(tables) || len(k.entries) != len(st.identities) || len(k.numbers) != len(classes) {
		t.Fatalf("%d tables, want %d; %d words, want %d; %d identity classes, want %d",
			len(k.tables), len(tables), len(k.entries), len(st.identities), len(k.numbers), len(classes))
	}
	for id, c := range k.tables {
		for nc := range c.Peers {
			if !classes[nc] {
				t.Fatalf("table %d has a row for identity class %d, which no identity has", id, nc)
			}
		}
	}
}

// TestEveryVerdictIsOldOrNewAfterEveryWriteWhenTheServiceBeganAnew proves INV-50, INV-53, INV-55, INV-56.
func TestEveryVerdictIsOldOrNewAfterEveryWriteWhenTheServiceBeganAnew(t *testing.T) {
	states := testStates()
	for i, from := range states {
		for j, to := range states {
			for _, restarted := range []bool{false, true} {
				name := fmt.Sprintf("%d to %d restarted %v", i, j, restarted)
				k := scene()
				a := start(t, k)
				if _, err := a.load(newService(1).snapshot(from)); err != nil {
					t.Fatal(name, err)
				}
				qs := questions(k)
				before, after := from.answers(k, qs), to.answers(k, qs)
				same(t, name+", begin", qs, k.answers(qs), before)
				if restarted {
					a = start(t, k)
				}
				epochs, writes := k.epochs(), k.writes
				oldOrNew(t, k, qs, before, after)
				var log []string
				check := k.after
				k.after = func(what string) { log = append(log, what); check(what) }
				if _, err := a.load(newService(2).snapshot(to)); err != nil {
					t.Fatal(name, err)
				}
				same(t, name+", end", qs, k.answers(qs), after)
				evaluatedAgain(t, k, qs, before, after, epochs)
				nothingLeft(t, k, to)
				if i == j && k.writes != writes {
					t.Errorf("%s: %d writes for the same policy: %q", name, k.writes-writes, log)
				}
			}
		}
	}
}

// path splits the change between two states: identities are added, policies change, identities are
// removed.
func path(from, to state) []state {
	both := maps.Clone(from.identities)
	maps.Copy(both, to.identities)
	return []state{from, {both, from.policies}, {both, to.policies}, to}
}

// TestEveryVerdictIsOldOrNewAfterEveryWriteOfAChange proves INV-50, INV-53, INV-56.
func TestEveryVerdictIsOldOrNewAfterEveryWriteOfAChange(t *testing.T) {
	states := testStates()
	for i, from := range states {
		for j, to := range states {
			k := scene()
			a, s := start(t, k), newService(1)
			if _, err := a.load(s.snapshot(from)); err != nil {
				t.Fatal(i, j, err)
			}
			qs := questions(k)
			way := path(from, to)
			for n, next := range way[1:] {
				name := fmt.Sprintf("%d to %d, change %d", i, j, n)
				before, after := way[n].answers(k, qs), next.answers(k, qs)
				epochs := k.epochs()
				oldOrNew(t, k, qs, before, after)
				if _, err := a.apply(t.Context(), s.change(next)); err != nil {
					t.Fatal(name, err)
				}
				same(t, name, qs, k.answers(qs), after)
				evaluatedAgain(t, k, qs, before, after, epochs)
				nothingLeft(t, k, next)
				if got := a.Status(); got.Revision != s.seq || len(got.Refusals) != 0 {
					t.Errorf("%s: status %+v, want revision %d", name, got, s.seq)
				}
			}
		}
	}
}

// TestKilledAfterAnyWriteTheNextProcessConvergesAndLeaksNothing proves INV-50, INV-55: a process is killed after each
// number of writes; the next one finds a service that has forgotten it.
func TestKilledAfterAnyWriteTheNextProcessConvergesAndLeaksNothing(t *testing.T) {
	states := testStates()
	for i, from := range states {
		for _, step := range []int{1, 3, 6} { // each state is left and reached three times
			j := (i + step) % len(states)
			to := states[j]
			for change, way := range [][]state{{from, to}, path(from, to)[:2], path(from, to)[1:3], path(from, to)[2:]} {
				for n := 1; killedAt(t, fmt.Sprintf("%d to %d, part %d, write %d", i, j, change, n), way[0], way[1], change == 0, n); n++ {
					continue
				}
			}
		}
	}
}

// killedAt reports whether there were that many writes.
func killedAt(t *testing.T, name string, from, to state, snapshot bool, n int) bool {
	t.Helper()
	k := scene()
	a, s := start(t, k), newService(1)
	if _, err := a.load(s.snapshot(from)); err != nil {
		t.Fatal(name, err)
	}
	qs := questions(k)
	before, after := from.answers(k, qs), to.answers(k, qs)
	epochs := k.epochs()
	oldOrNew(t, k, qs, before, after)
	k.failAt = k.writes + n
	var err error
	if snapshot {
		_, err = a.load(newService(2).snapshot(to))
	} else {
		_, err = a.apply(t.Context(), s.change(to))
	}
	k.failAt = 0
	if err != nil && !errors.Is(err, errKilled) {
		t.Fatal(name, err)
	}
	a = start(t, k)
	if _, err := a.load(newService(3).snapshot(to)); err != nil {
		t.Fatal(name, err)
	}
	same(t, name, qs, k.answers(qs), after)
	evaluatedAgain(t, k, qs, before, after, epochs)
	nothingLeft(t, k, to)
	return err != nil
}

func TestRandomChangesKeepEveryVerdictOldOrNew(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7)) //nolint:gosec // a test
	states := testStates()
	k := scene()
	a, s := start(t, k), newService(1)
	at := states[0]
	if _, err := a.load(s.snapshot(at)); err != nil {
		t.Fatal(err)
	}
	qs := questions(k)
	var way []state
	for n := range 600 {
		if len(way) == 0 {
			way = path(at, states[rng.IntN(len(states))])[1:]
		}
		next := way[0]
		way = way[1:]
		before, after := at.answers(k, qs), next.answers(k, qs)
		oldOrNew(t, k, qs, before, after)
		epochs := k.epochs()
		var err error
		switch rng.IntN(8) {
		case 0:
			s = newService(uint64(n) + 2) //nolint:gosec // small
			_, err = a.load(s.snapshot(next))
		case 1:
			a = start(t, k)
			_, err = a.load(s.snapshotAgain(next))
		default:
			_, err = a.apply(t.Context(), s.change(next))
		}
		if err != nil {
			t.Fatalf("step %d: %v", n, err)
		}
		same(t, fmt.Sprint("step ", n), qs, k.answers(qs), after)
		evaluatedAgain(t, k, qs, before, after, epochs)
		nothingLeft(t, k, next)
		at = next
	}
}

// snapshotAgain returns a complete snapshot, from a service that forgot its subscriber.
func (s *service) snapshotAgain(st state) policytable.Message {
	t := newService(s.seq)
	*s = *t
	return s.snapshot(st)
}

// TestAnEndpointTakesAnotherIdentityOnlyWithItsTables proves INV-70.
func TestAnEndpointTakesAnotherIdentityOnlyWithItsTables(t *testing.T) {
	k, st := scene(), testStates()[3]
	a := start(t, k)
	a.cfg.Timeout = time.Millisecond
	var calls [][2]nodetable.ID
	set := func(egress, ingress nodetable.ID) (uint32, error) {
		calls = append(calls, [2]nodetable.ID{egress, ingress})
		e := k.endpoints[1]
		e.Identity = 301
		k.endpoints[1] = e
		return k.SetPolicy(1, egress, ingress)
	}
	if err := a.SetIdentity(t.Context(), 1, 305, set); !errors.Is(err, ErrUnavailable) || len(calls) > 0 {
		t.Fatalf("without tables: %v, %v", err, calls)
	}
	if _, err := a.load(newService(1).snapshot(st)); err != nil {
		t.Fatal(err)
	}
	if err := a.SetIdentity(t.Context(), 9, 301, set); !errors.Is(err, ErrNoEndpoint) {
		t.Errorf("of nobody: %v", err)
	}
	qs := questions(k)
	before := k.answers(qs)
	if err := a.SetIdentity(t.Context(), 1, 301, set); err != nil || len(calls) != 1 {
		t.Fatalf("%v, %v", err, calls)
	}
	want := st.answers(k, qs)
	same(t, "as the new identity", qs, k.answers(qs), want)
	if slices.Equal(before, want) {
		t.Error("the two identities have the same policies, so the test proves nothing")
	}
	if _, where := a.endpoints.wanted(); where[netip.MustParseAddr("10.0.0.1")] != 301 {
		t.Errorf("the policy service got locations %v", where)
	}
	if p, ok := a.History.Last(1); !ok || p.Egress != calls[0][0] || p.Ingress != calls[0][1] {
		t.Errorf("history %+v", p)
	}
	// a change that failed half-way has been made
	failed := errors.New("the ipcache is full")
	err := a.SetIdentity(t.Context(), 1, 300, func(egress, ingress nodetable.ID) (uint32, error) {
		epoch, _ := k.SetPolicy(1, egress, ingress)
		return epoch, failed
	})
	if !errors.Is(err, failed) || a.endpoints.slots[1].Identity != 300 {
		t.Errorf("%v, identity %d", err, a.endpoints.slots[1].Identity)
	}
	for id, want := range map[uint32]int{300: 2, 301: 1} {
		if n := a.endpoints.subjects[id].users; n != want {
			t.Errorf("subject %d has %d users, want %d", id, n, want)
		}
	}
}

// TestAnEndpointWhoseTablesDoNotFitTakesItsIdentityIsolated: until there is capacity, the endpoint has its new identity
// and is isolated, so the permissions of its former identity end. A change that may fail changes nothing.
//
// INV-70
func TestAnEndpointWhoseTablesDoNotFitTakesItsIdentityIsolated(t *testing.T) {
	states := testStates()
	k := scene()
	a, s := start(t, k), newService(1)
	a.cfg.Timeout = time.Millisecond
	if _, err := a.load(s.snapshot(states[0])); err != nil {
		t.Fatal(err)
	}
	k.maxTables = 0
	change := states[3]
	change.policies = map[uint32]testPolicies{300: {}, 301: states[3].policies[301]}
	if _, err := a.apply(t.Context(), s.change(change)); err != nil {
		t.Fatal(err)
	}
	qs := questions(k)
	set := func(egress, ingress nodetable.ID) (uint32, error) {
		e := k.endpoints[1]
		e.Identity = 301
		k.endpoints[1] = e
		return k.SetPolicy(1, egress, ingress)
	}
	before := k.answers(qs)
	if err := a.SetIdentity(t.Context(), 1, 301, set); !errors.Is(err, nodetable.ErrNoCapacity) {
		t.Errorf("a change that may fail: %v", err)
	}
	same(t, "refused", qs, k.answers(qs), before)
	reason, err := a.SetIdentityOrIsolate(t.Context(), 1, 301, set)
	if err != nil || !strings.Contains(reason, "map tables: 1 needed, 0 free") {
		t.Fatalf("%q, %v", reason, err)
	}
	for i, got := range k.answers(qs) {
		if qs[i].slot == 1 && got {
			t.Fatalf("%+v is allowed", qs[i])
		}
	}
	if e := a.endpoints.slots[1]; e.Identity != 301 ||
		a.endpoints.subjects[301].users != 2 || a.endpoints.subjects[300].users != 1 {
		t.Errorf("slot %+v, users %d and %d", e, a.endpoints.subjects[301].users, a.endpoints.subjects[300].users)
	}
	k.maxTables = 100
	if err := a.again(t.Context()); !errors.Is(err, subscription.ErrAnew) {
		t.Fatalf("with capacity: %v", err)
	}
	same(t, "with capacity", qs, k.answers(qs), change.answers(k, qs))
	if reason, err := a.SetIdentityOrIsolate(t.Context(), 1, 301, set); err != nil || reason != "" {
		t.Errorf("with capacity: %q, %v", reason, err)
	}
}

// TestAnEndpointIsIsolatedWhilePoliciesAreHeld: the service's state is not adopted, so the tables
// of the new identity are unknown. While the service is silent, nothing changes.
func TestAnEndpointIsIsolatedWhilePoliciesAreHeld(t *testing.T) {
	k, st := scene(), testStates()[3]
	a, s := start(t, k), newService(1)
	a.cfg.Timeout = time.Millisecond
	if _, err := a.load(s.snapshot(st)); err != nil {
		t.Fatal(err)
	}
	set := func(egress, ingress nodetable.ID) (uint32, error) {
		k.endpoints[1].Identity = 305
		return k.SetPolicy(1, egress, ingress)
	}
	_, err := a.SetIdentityOrIsolate(t.Context(), 1, 305, set)
	if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrHeld) {
		t.Errorf("while the service is silent: %v", err)
	}
	if k.endpoints[1].Identity != 300 {
		t.Error("it changed")
	}
	s.seq++
	if _, err := a.apply(t.Context(), policytable.Message{
		Incarnation: s.run, Seq: s.seq, Steps: []policytable.Step{policytable.UnknownStep{Field: 99}},
	}); err != nil {
		t.Fatal(err)
	}
	reason, err := a.SetIdentityOrIsolate(t.Context(), 1, 305, set)
	if e := k.endpoints[1]; err != nil || reason == "" ||
		e.Egress != nodetable.Pending || e.Ingress != nodetable.Pending {
		t.Errorf("%q, %v; endpoint %+v", reason, err, e)
	}
	// An identity whose tables exist gets them.
	reason, err = a.SetIdentityOrIsolate(t.Context(), 1, 301, func(egress, ingress nodetable.ID) (uint32, error) {
		k.endpoints[1].Identity = 301
		return k.SetPolicy(1, egress, ingress)
	})
	if e := k.endpoints[1]; err != nil || reason != "" ||
		e.Egress != a.endpoints.subjects[301].egress || e.Ingress != a.endpoints.subjects[301].ingress {
		t.Errorf("%q, %v; endpoint %+v", reason, err, e)
	}
}
