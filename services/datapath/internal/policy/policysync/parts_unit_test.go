// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// order records the calls of Addresses, and whether the kernel still had the entries of identities
// that become unknown.
type order struct {
	kernel         *fakeKernel
	gate           []identity.Numeric
	known, unknown []identity.Numeric
	late           bool
}

func (o *order) Gate(ids []identity.Numeric) error { o.gate = ids; return nil }

func (o *order) Known(ids ...identity.Numeric) error {
	for _, id := range ids {
		o.late = o.late || !o.kernel.entries[uint32(id)].Known
	}
	o.known = append(o.known, ids...)
	return nil
}

func (o *order) Unknown(ids ...identity.Numeric) error {
	for _, id := range ids {
		o.late = o.late || !o.kernel.entries[uint32(id)].Known
	}
	o.unknown = append(o.unknown, ids...)
	return nil
}

func TestAddressesHearOfIdentitiesBeforeTheyEndAndAfterTheyBegin(t *testing.T) {
	k := newFakeKernel()
	k.entries[300] = nodetable.Identity{Class: 1, Known: true}
	heard := &order{kernel: k}
	x := newIdentities(k, heard)
	if err := x.adopt(); err != nil || !slices.Equal(heard.gate, []identity.Numeric{300}) {
		t.Fatalf("Gate got %v, %v", heard.gate, err)
	}
	changes := map[uint32]nodetable.Identity{300: {}, 301: {Class: 2, Known: true}}
	if err := x.store(changes); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(heard.unknown, []identity.Numeric{300}) || len(heard.known) > 0 {
		t.Errorf("after the write: Unknown got %v, Known got %v", heard.unknown, heard.known)
	}
	if err := x.publish(changes); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(heard.known, []identity.Numeric{301}) || heard.late {
		t.Errorf("Known got %v; too early or too late: %v", heard.known, heard.late)
	}
	if len(x.entries) != 1 || !maps.Equal(x.entries, k.entries) {
		t.Errorf("memory %v, kernel %v", x.entries, k.entries)
	}
	delete(k.entries, 301)
	k.entries[302] = nodetable.Identity{Class: 3, Known: true}
	want := map[uint32]nodetable.Identity{301: {Class: 2, Known: true}, 302: {}}
	if got := x.differing(k.entries); !maps.Equal(got, want) {
		t.Errorf("the kernel differs by %v, want %v", got, want)
	}
}

// TestUnusedClassesOfIdentitiesEnd: after any changes of entries, a class is retired when no identity has it and it is
// not otherwise in use.
func TestUnusedClassesOfIdentitiesEnd(t *testing.T) {
	const ids, keys, changes = 8, 5, 1000
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	k := newFakeKernel()
	x := newIdentities(k, nil)
	for i := range changes {
		entry := nodetable.Identity{}
		if rng.IntN(3) > 0 {
			nc, err := x.number(policytable.ClassKey{byte(1 + rng.IntN(keys))})
			if err != nil || nc == 0 {
				t.Fatal(nc, err)
			}
			entry = nodetable.Identity{Class: nc, Known: true}
		}
		if err := x.store(map[uint32]nodetable.Identity{uint32(300 + rng.IntN(ids)): entry}); err != nil {
			t.Fatal(err)
		}
		used := nodetable.IdentityClass(1 + rng.IntN(keys))
		if rng.IntN(4) > 0 {
			continue
		}
		before := maps.Clone(x.numbers)
		if _, err := x.retireUnused(func(nc nodetable.IdentityClass) bool { return nc == used }); err != nil {
			t.Fatal(err)
		}
		for key, nc := range before {
			entries := slices.Collect(maps.Values(x.entries))
			has := slices.ContainsFunc(entries, func(e nodetable.Identity) bool { return e.Class == nc })
			if _, stays := x.numbers[key]; stays != (has || nc == used) {
				t.Fatalf("seed %d, change %d: class %d stays: %v; an identity has it: %v; else used: %v",
					seed, i, nc, stays, has, nc == used)
			}
		}
	}
}

func TestSnapshotIsDecidedOnceItIsComplete(t *testing.T) {
	number := func(policytable.ClassKey) (nodetable.IdentityClass, error) { return 1, nil }
	var n incoming
	if n.collecting() || n.undecided() {
		t.Fatal("a snapshot exists before one began")
	}
	n.begin()
	key := policytable.ClassKey{1}
	for i, st := range []policytable.Step{
		policytable.DefineIdentityClass{IdentityClass: 7, Key: key},
		policytable.SetIdentity{Identity: 300, IdentityClass: 7},
		policytable.SnapshotComplete{},
	} {
		if n.undecided() {
			t.Fatalf("step %d: the snapshot is complete before SnapshotComplete", i)
		}
		if err := n.collect(st, 1, number); err != nil {
			t.Fatal(err)
		}
	}
	if !n.undecided() {
		t.Fatal("the snapshot is complete, but undecided returns false")
	}
	if n.held = "behind"; n.undecided() || !n.collecting() {
		t.Error("a held snapshot is not kept unchanged")
	}
	if err := n.collect(policytable.SetIdentity{Identity: 301, IdentityClass: 7}, 2, number); err != nil {
		t.Fatal(err) // later messages belong to it
	}
	if err := n.collect(policytable.SnapshotComplete{}, 2, number); err == nil {
		t.Error("a second SnapshotComplete is accepted")
	}
	m := n.taken()
	if _, ok := m.wants[301]; !ok || len(m.wants) != 2 || n.collecting() || n.held != "" {
		t.Errorf("taken over: %v; left: %+v", m.wants, n)
	}
}

func TestSubjectsAreLetGoAfterTheirLastEndpoint(t *testing.T) {
	now := time.Unix(1000, 0)
	e := newEndpoints(func() time.Time { return now }, time.Minute)
	s, fresh := e.subject(300)
	if again, second := e.subject(300); !fresh || second || again != s {
		t.Fatalf("fresh %v, then %v, the same %v", fresh, second, again == s)
	}
	<-e.wake // the subscription has another subject
	addrs := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	e.slots[1] = &slot{Binding: nodetable.Binding{Slot: 1, Identity: 300, Addrs: addrs}}
	s.use()
	s.use()
	e.release(s)
	if len(e.wake) > 0 {
		t.Error("the subscription changes while the subject has an endpoint")
	}
	now = now.Add(time.Hour)
	if subjects, at := e.wanted(); len(subjects) != 1 || len(at) != 1 || at[netip.MustParseAddr("10.0.0.1")] != 300 {
		t.Errorf("wanted: %v and %v", subjects, at)
	}
	delete(e.slots, 1)
	e.release(s)
	<-e.wake
	if subjects, _ := e.wanted(); len(subjects) != 1 {
		t.Error("the subject is dropped at once")
	}
	now = now.Add(time.Minute)
	if subjects, at := e.wanted(); len(subjects)+len(at)+len(e.subjects) > 0 {
		t.Errorf("after its time: %v, %v, %d subjects", subjects, at, len(e.subjects))
	}
}

func TestOldestIdleSubjectsMakeRoomForASubscription(t *testing.T) {
	now := time.Unix(1000, 0)
	e := newEndpoints(func() time.Time { return now }, time.Hour)
	const idle = 10
	for n := range maxSubjects {
		s, _ := e.subject(uint32(1000 + n))
		s.use()
	}
	for n := range idle {
		s, _ := e.subject(uint32(100 + n))
		s.use()
		now = now.Add(time.Second)
		e.release(s)
	}
	subjects, _ := e.wanted()
	if len(subjects) != maxSubjects || len(e.subjects) != maxSubjects {
		t.Errorf("%d of %d subjects are wanted, want the subjects with endpoints", len(subjects), len(e.subjects))
	}
	s, _ := e.subject(1000)
	e.release(s)
	for n := range 2 {
		now = now.Add(time.Second)
		s, _ := e.subject(uint32(200 + n))
		s.use()
		if subjects, _ = e.wanted(); len(subjects) != maxSubjects+n {
			t.Errorf("%d subjects, want %d: no subject with an endpoint may be dropped", len(subjects), maxSubjects+n)
		}
	}
	if _, there := e.subjects[1000]; there {
		t.Error("an idle subject stays, although a subject with an endpoint does not fit")
	}
}

func TestTablesThatAreUsed(t *testing.T) {
	e := newEndpoints(time.Now, time.Minute)
	e.slots[1] = &slot{Binding: nodetable.Binding{Slot: 1, Identity: 300, Egress: 10, Ingress: 11}}
	e.slots[2] = &slot{Binding: nodetable.Binding{Slot: 2, Identity: 300, Egress: 10, Ingress: 10}}
	s, _ := e.subject(301)
	s.ready, s.egress, s.ingress = true, 12, 11
	waits, _ := e.subject(302)
	waits.egress = 13
	used := e.used()
	if got := fmt.Sprint(slices.Sorted(maps.Keys(used))); got != "[10 11 12]" {
		t.Errorf("used: %s, want the tables of endpoints and of the ready subject", got)
	}
	if len(used[12]) != 0 || !slices.Equal(used[11], []uint16{1}) {
		t.Errorf("table 12 evaluates %v, table 11 %v", used[12], used[11])
	}
	if got := slices.Sorted(slices.Values(e.evaluatedBy(10))); !slices.Equal(got, []uint16{1, 2}) {
		t.Errorf("table 10 evaluates %v", got)
	}
	if got := e.slotsOf(300); !slices.Equal(got, []uint16{1, 2}) {
		t.Errorf("subject 300 has %v", got)
	}
	s.revision, s.refusal = 5, "no capacity"
	if p := e.policyOf(1); p.Refusal != "" || p.Egress != 10 || p.Revision != 0 {
		t.Errorf("policy of slot 1: %+v", p)
	}
	e.gone(302)
	e.gone(300)
	if len(e.subjects) != 1 {
		t.Errorf("%d subjects, want only the service's", len(e.subjects))
	}
}

func TestServiceThatLostPoliciesIsNamedUntilItIsAheadAgain(t *testing.T) {
	var m watermark
	for i, c := range []struct {
		revision uint64
		named    bool
		lost     bool
	}{
		{revision: 5},
		{revision: 3, lost: true},
		{revision: 4, lost: true}, // it continues from its state
		{revision: 5},
		{revision: 7},
		{revision: 2, named: true}, // the service sends the name of its state
		{revision: 2},
		{revision: 1, lost: true},
	} {
		if got := m.reach(c.revision, c.named, log.Discard()); (got != "") != c.lost {
			t.Errorf("step %d: revision %d: %q, lost %v", i, c.revision, got, c.lost)
		}
	}
}
