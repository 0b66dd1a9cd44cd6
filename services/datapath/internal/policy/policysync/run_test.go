// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// script is a fake service; the test gives every answer.
type script struct {
	subscribed chan *scripted
}

type scripted struct {
	policystream.Subscription
	ctx      context.Context
	messages chan policytable.Message
	end      chan error
	said     chan string // what the applier sends
}

func (s *script) Subscribe(ctx context.Context, sub policystream.Subscription) (policystream.Stream, error) {
	st := &scripted{Subscription: sub, ctx: ctx, messages: make(chan policytable.Message), end: make(chan error), said: make(chan string, 1000)}
	select {
	case s.subscribed <- st:
		return st, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *scripted) Recv() (policytable.Message, error) {
	select {
	case m := <-s.messages:
		return m, nil
	case err := <-s.end:
		return policytable.Message{}, err
	case <-s.ctx.Done():
		return policytable.Message{}, s.ctx.Err()
	}
}

func (s *scripted) say(format string, args ...any) error {
	s.said <- fmt.Sprintf(format, args...)
	return nil
}

func (s *scripted) Subjects(add, remove []uint32) error {
	return s.say("subjects +%v -%v", add, remove)
}

func (s *scripted) Locate(add map[netip.Addr]uint32, remove []netip.Addr) error {
	return s.say("locate +%v -%v", add, remove)
}

func (s *scripted) Ack(seq uint64) error { return s.say("ack %d", seq) }

func (s *scripted) Hold(h policystream.Hold) error {
	return s.say("hold %d at revision %d: %s", h.Seq, h.Revision, h.Reason)
}

func (s *scripted) Nack(n policystream.Nack) error {
	return s.say("nack %d subject %d", n.Seq, n.Subject)
}

// play runs an applier against the script.
func play(t *testing.T, k *fakeKernel, c Config) (*Applier, *script) {
	t.Helper()
	a, s := playWith(t.Context(), t, k, c)
	return a.Applier, s
}

type running struct {
	*Applier
	over chan struct{} // closed when it has ended
}

// playWith also ends with the context.
func playWith(ctx context.Context, t *testing.T, k *fakeKernel, c Config) (*running, *script) {
	t.Helper()
	s := &script{subscribed: make(chan *scripted)}
	c.Name, c.Kernel, c.Service = "test", k, s
	a := New(c)
	if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return &running{a, done}, s
}

func next[T any](t *testing.T, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(servicetest.Patience):
		t.Fatal("nothing came")
	}
	return v
}

func (s *scripted) expect(t *testing.T, want string) {
	t.Helper()
	if got := next(t, s.said); got != want {
		t.Fatalf("the service got %q, want %q", got, want)
	}
}

func (s *scripted) send(t *testing.T, m policytable.Message) {
	t.Helper()
	select {
	case s.messages <- m:
	case <-time.After(servicetest.Patience):
		t.Fatal("the message was not taken")
	}
}

func TestStreamContinuesBehindTheLastMessageOrBeginsAnew(t *testing.T) {
	states := testStates()
	k := scene()
	a, sc := play(t, k, Config{Wait: true})
	sv := newService(1)

	st := next(t, sc.subscribed)
	if st.Incarnation != "" || !slices.Equal(st.Subscription.Subjects, []uint32{300, 301}) || len(st.Locations) != 3 {
		t.Fatalf("subscription %+v", st.Subscription)
	}
	first := sv.snapshot(states[2])
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq))
	next(t, a.Synced())

	// the connection is lost: the applier asks to continue, and does
	st.end <- errors.New("cut by the test")
	st = next(t, sc.subscribed)
	if st.Incarnation != first.Incarnation || st.Seq != first.Seq {
		t.Fatalf("subscription %+v, want to continue after %d", st.Subscription, first.Seq)
	}
	second := sv.change(state{states[2].identities, states[3].policies})
	st.send(t, second)
	st.expect(t, fmt.Sprint("ack ", second.Seq))

	// a gap: the message must not be applied, and the service has to send everything again
	sv.seq += 5
	st.send(t, sv.change(state{states[2].identities, states[1].policies}))
	st = next(t, sc.subscribed)
	if st.Incarnation != "" {
		t.Fatalf("after a gap the subscription is %+v", st.Subscription)
	}

	// a restarted service, whose snapshot is interrupted
	sv = newService(2)
	all := sv.snapshot(states[4])
	part := policytable.Message{Incarnation: all.Incarnation, Seq: all.Seq, Steps: all.Steps[:len(all.Steps)-3]}
	st.send(t, part) // which is not acknowledged
	st.end <- errors.New("cut by the test")
	st = next(t, sc.subscribed)
	if st.Incarnation != "" {
		t.Fatalf("half a snapshot is continued: %+v", st.Subscription)
	}
	sv = newService(3)
	all = sv.snapshot(states[4])
	st.send(t, all)
	st.expect(t, fmt.Sprint("ack ", all.Seq))
	qs := questions(k)
	same(t, "at the end", qs, k.answers(qs), states[4].answers(k, qs))
}

func TestRefusalsAreSaidBeforeTheAcknowledgement(t *testing.T) {
	states := testStates()
	k := scene()
	a, sc := play(t, k, Config{Wait: true, Retry: 10 * time.Millisecond})
	sv := newService(1)
	st := next(t, sc.subscribed)
	first := sv.snapshot(states[0])
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq))
	a.mu.Lock()
	k.maxTables = 0
	a.mu.Unlock()
	m := sv.change(states[1])
	st.send(t, m)
	for _, subject := range []int{300, 300, 301} {
		st.expect(t, fmt.Sprintf("nack %d subject %d", m.Seq, subject))
	}
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	if err := a.Await(t.Context(), 300); !errors.Is(err, nodetable.ErrNoCapacity) {
		t.Errorf("another endpoint of a subject without its tables: %v", err)
	}
	// with capacity it subscribes again, so that the service learns of it
	a.mu.Lock()
	k.maxTables = 100
	a.mu.Unlock()
	st = next(t, sc.subscribed)
	if st.Incarnation != "" {
		t.Errorf("subscription %+v", st.Subscription)
	}
	a.mu.Lock()
	qs := questions(k)
	same(t, "with capacity", qs, k.answers(qs), states[1].answers(k, qs))
	a.mu.Unlock()
}

// TestCreationWaitsForItsTablesAndBeginsWithThem proves INV-52, INV-57.
func TestCreationWaitsForItsTablesAndBeginsWithThem(t *testing.T) {
	states := testStates()
	k := newFakeKernel()
	a, sc := play(t, k, Config{Wait: true})
	sv := newService(1)
	st := next(t, sc.subscribed)
	none := state{map[uint32]props{301: 2}, nil}
	m := sv.snapshot(none)
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))

	done := make(chan error, 1)
	go func() { done <- a.Await(t.Context(), 300) }()
	st.expect(t, "subjects +[300] -[]")
	only := map[uint32]testPolicies{300: states[2].policies[300]}
	m = sv.change(state{none.identities, only}) // bound, but the identity is unknown
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	select {
	case err := <-done:
		t.Fatalf("it may start (%v), although no table includes it", err)
	default:
	}
	m = sv.change(state{map[uint32]props{300: 1, 301: 2}, only})
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	if err := next(t, done); err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr("10.0.0.1")
	slot, err := a.Publish(300, []netip.Addr{addr}, func(egress, ingress nodetable.ID) (uint16, uint32, error) {
		if egress < nodetable.First || ingress != nodetable.Allow {
			t.Errorf("it starts with tables %d and %d", egress, ingress)
		}
		k.endpoint(7, 300, addr.String())
		k.endpoints[7].Egress, k.endpoints[7].Ingress = egress, ingress
		return 7, k.endpoints[7].Epoch, nil
	})
	if err != nil || slot != 7 {
		t.Fatal(slot, err)
	}
	st.expect(t, "locate +map[10.0.0.1:300] -[]")
	epoch := k.endpoints[7].Epoch
	if got := a.History.RuleSources(7, epoch, true, 1); len(got) != 1 || got[0] != "Test policy of 300 0" {
		t.Errorf("sources of rule 1: %q", got)
	}
	if got := a.History.RuleSources(7, epoch, false, 1); got != nil {
		t.Errorf("sources of a missing rule: %q", got)
	}
	if p, ok := a.Of(7); !ok || p.Pending() || p.Revision == 0 {
		t.Errorf("policy %+v, %v", p, ok)
	}

	// a flip: the old epoch keeps its rules and revision for a while
	m = sv.change(state{sv.state.identities, map[uint32]testPolicies{300: states[3].policies[300]}})
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	now := k.endpoints[7].Epoch
	before, _ := a.History.Revision(7, epoch)
	after, _ := a.History.Revision(7, now)
	if now == epoch || before == 0 || after <= before {
		t.Errorf("revisions %d at epoch %d and %d at %d", before, epoch, after, now)
	}

	// another endpoint of the subject starts at once, also while the service is unavailable
	st.end <- errors.New("cut by the test")
	next(t, sc.subscribed)
	if err := a.Await(t.Context(), 300); err != nil {
		t.Error(err)
	}
	if err := a.Drop(7, func() error {
		k.endpoints[7].Egress, k.endpoints[7].Ingress = nodetable.Deny, nodetable.Deny
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, ok := a.Of(7); ok {
		t.Error("a removed endpoint has a policy")
	}
	if got, _ := a.History.Revision(7, now); got != after {
		t.Errorf("events of a removed endpoint have revision %d, want %d", got, after)
	}
}

func TestAuditModeIsThatOfTheConfiguration(t *testing.T) {
	for _, on := range []bool{true, false} {
		k := scene()
		k.audit[1] = !on
		a, _ := play(t, k, Config{Audit: on})
		for slot := range k.endpoints {
			if k.audit[slot] != on {
				t.Errorf("slot %d has audit mode %v, want %v", slot, k.audit[slot], on)
			}
		}
		_, err := a.Publish(300, nil, func(nodetable.ID, nodetable.ID) (uint16, uint32, error) {
			k.endpoint(9, 300, "10.0.0.9")
			return 9, 1, nil
		})
		if p, _ := a.Of(9); err != nil || k.audit[9] != on || p.Audit != on {
			t.Errorf("a new endpoint: audit mode %v, %v", k.audit[9], err)
		}
	}
}

// TestAuditModeOfSomeIsThatOfThose: new endpoints get the node's audit mode, and a failed change is not recorded as
// applied.
func TestAuditModeOfSomeIsThatOfThose(t *testing.T) {
	k := scene()
	var changed []uint16
	a, _ := play(t, k, Config{Changed: func(slots []uint16) { changed = slots }})
	set := func(d auditmode.Audited, want error) {
		t.Helper()
		changed = nil
		if err := a.SetAudit(t.Context(), d); !errors.Is(err, want) {
			t.Errorf("SetAudit: %v, want %v", err, want)
		}
	}
	set(auditmode.Audited{Slots: map[uint16]bool{1: true, 77: true}}, nil)
	if p, _ := a.Of(1); !k.audit[1] || k.audit[2] || k.audit[77] || !p.Audit || !slices.Equal(changed, []uint16{1}) {
		t.Errorf("audited %v, changed %v, %+v", k.audit, changed, p)
	}
	set(auditmode.Audited{All: true}, nil)
	_, err := a.Publish(300, nil, func(nodetable.ID, nodetable.ID) (uint16, uint32, error) {
		k.endpoint(9, 300, "10.0.0.9")
		return 9, 1, nil
	})
	if p, _ := a.Of(9); err != nil || !k.audit[9] || !p.Audit || !k.audit[2] {
		t.Errorf("a new endpoint: %v, %v", k.audit, err)
	}
	k.auditError = errors.New("no")
	set(auditmode.Audited{}, k.auditError)
	if p, _ := a.Of(1); !p.Audit {
		t.Error("reported off although the kernel has it on")
	}
	k.auditError = nil
	set(auditmode.Audited{}, nil)
	for slot, on := range k.audit {
		if on {
			t.Errorf("slot %d is still in audit mode", slot)
		}
	}
}

func TestCreationFailsInTimeWithoutItsTables(t *testing.T) {
	k := newFakeKernel()
	a, sc := play(t, k, Config{Wait: true, Timeout: 20 * time.Millisecond})
	err := a.Await(t.Context(), 300)
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "300") {
		t.Errorf("not connected: %v", err)
	}
	st := next(t, sc.subscribed)
	k.maxTables = 0
	sv := newService(1)
	st.send(t, sv.snapshot(testStates()[2]))
	deadline := time.Now().Add(servicetest.Patience)
	for err = nil; !errors.Is(err, nodetable.ErrNoCapacity); err = a.Await(t.Context(), 300) {
		if time.Now().After(deadline) {
			t.Fatalf("no capacity: %v", err)
		}
	}
}

// TestEndpointsOfModeInitBeginPendingAndAreUpgraded proves INV-52.
func TestEndpointsOfModeInitBeginPendingAndAreUpgraded(t *testing.T) {
	k := newFakeKernel()
	changed := make(chan []uint16, 10)
	a, sc := play(t, k, Config{Changed: func(s []uint16) { changed <- s }})
	if err := a.Await(t.Context(), 300); err != nil {
		t.Fatal(err)
	}
	publish := func(egress, ingress nodetable.ID) (uint16, uint32, error) {
		k.endpoint(7, 300, "10.0.0.1")
		k.endpoints[7].Egress, k.endpoints[7].Ingress = egress, ingress
		return 7, k.endpoints[7].Epoch, nil
	}
	if _, err := a.Publish(300, nil, publish); err != nil {
		t.Fatal(err)
	}
	if p, _ := a.Of(7); !p.Pending() {
		t.Errorf("it begins with %+v", p)
	}
	st := next(t, sc.subscribed)
	sv := newService(1)
	st.send(t, sv.snapshot(testStates()[2]))
	if got := next(t, changed); !slices.Equal(got, []uint16{7}) {
		t.Errorf("changed %v", got)
	}
	if p, _ := a.Of(7); p.Pending() || p.Egress < nodetable.First {
		t.Errorf("it has %+v", p)
	}
}

func TestSubjectsWithoutEndpointsAreLetGoAfterAWhile(t *testing.T) {
	k := newFakeKernel()
	a, sc := play(t, k, Config{Linger: 20 * time.Millisecond})
	st := next(t, sc.subscribed)
	if err := a.Await(t.Context(), 300); err != nil {
		t.Fatal(err)
	}
	st.expect(t, "subjects +[300] -[]")
	st.expect(t, "subjects +[] -[300]")
}

// TestCreationWaitsAgainForTablesThatWentBeforeItBegan proves INV-52: a subject is dropped, wanted again and found in the
// model, while the service's message that removes it is on its way and arrives between Await and Begin.
func TestCreationWaitsAgainForTablesThatWentBeforeItBegan(t *testing.T) {
	k := newFakeKernel()
	a, sc := play(t, k, Config{Wait: true})
	st := next(t, sc.subscribed)
	sv := newService(1)
	send := func(m policytable.Message) {
		t.Helper()
		st.send(t, m)
		st.expect(t, fmt.Sprint("ack ", m.Seq))
	}
	states := testStates()
	only := state{states[2].identities, map[uint32]testPolicies{300: states[2].policies[300]}}
	nobody := state{states[2].identities, nil}
	send(sv.snapshot(only))
	if err := a.Await(t.Context(), 300); err != nil {
		t.Fatal(err)
	}
	st.expect(t, "subjects +[300] -[]")
	farewell := sv.change(nobody)
	farewell.Steps = slices.Concat([]policytable.Step{policytable.RemoveSubject{Subject: 300}}, farewell.Steps)
	send(farewell)
	published := false
	done := make(chan error, 1)
	go func() {
		_, err := a.Begin(t.Context(), 300, nil, func(egress, ingress nodetable.ID) (uint16, uint32, error) {
			published = true
			if egress == nodetable.Pending || ingress == nodetable.Pending {
				t.Errorf("it starts with tables %d and %d", egress, ingress)
			}
			k.endpoint(7, 300, "10.0.0.1")
			k.endpoints[7].Egress, k.endpoints[7].Ingress = egress, ingress
			return 7, k.endpoints[7].Epoch, nil
		})
		done <- err
	}()
	a.waitsFor(t, 300)
	a.mu.Lock()
	early := published
	a.mu.Unlock()
	if early {
		t.Fatal("it started without its tables")
	}
	send(sv.change(only))
	if err := next(t, done); err != nil {
		t.Fatal(err)
	}
	if p, ok := a.Of(7); !ok || p.Pending() {
		t.Errorf("it has %+v, %v", p, ok)
	}
}

// waitsFor returns once a creation uses the subject.
func (a *Applier) waitsFor(t *testing.T, id uint32) {
	t.Helper()
	for deadline := time.Now().Add(servicetest.Patience); ; time.Sleep(time.Millisecond) {
		a.mu.Lock()
		s := a.endpoints.subjects[id]
		waits := s != nil && s.users > 0
		a.mu.Unlock()
		if waits {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody waits")
		}
	}
}

func TestServiceThatLostItsPoliciesIsReported(t *testing.T) {
	states := testStates()
	k := scene()
	a, sc := play(t, k, Config{Wait: true})
	sv := newService(1)
	st := next(t, sc.subscribed)
	send := func(m policytable.Message, revision uint64) {
		t.Helper()
		m.Steps[slices.IndexFunc(m.Steps, func(s policytable.Step) bool { _, ok := s.(policytable.Barrier); return ok })] = policytable.Barrier{PolicyRevision: revision}
		st.send(t, m)
		st.expect(t, fmt.Sprint("ack ", m.Seq))
	}
	send(sv.snapshot(states[2]), 41)
	if got := a.Status(); len(got.Refusals) != 0 || got.Revision != 41 {
		t.Fatalf("status %+v", got)
	}
	st.end <- errors.New("cut by the test")
	st = next(t, sc.subscribed)
	sv = newService(2)
	send(sv.snapshot(states[0]), 0)
	if got := a.Status(); len(got.Refusals) != 1 || !strings.Contains(got.Refusals[0], "revision 41") || got.Revision != 0 {
		t.Errorf("the status does not report that revision 41 is lost: %+v", got)
	}
	send(sv.change(states[2]), 42)
	if got := a.Status(); len(got.Refusals) != 0 || got.Revision != 42 {
		t.Errorf("status %+v after everything was restored", got)
	}
}

// TestSnapshotThatNeverEndsKeepsKnownSubjectsGoing: a snapshot that never ends does not delay endpoints whose tables
// are in the kernel, and changes no verdict.
func TestSnapshotThatNeverEndsKeepsKnownSubjectsGoing(t *testing.T) {
	states := testStates()
	k := scene()
	a, sc := play(t, k, Config{Wait: true, Timeout: 20 * time.Millisecond})
	st := next(t, sc.subscribed)
	m := newService(1).snapshot(states[2])
	st.send(t, m)
	st.expect(t, fmt.Sprint("ack ", m.Seq))
	st.end <- errors.New("cut by the test")
	st = next(t, sc.subscribed)
	m = newService(2).snapshot(states[4])
	m.Steps = slices.DeleteFunc(m.Steps, func(s policytable.Step) bool { _, ok := s.(policytable.SnapshotComplete); return ok })
	a.mu.Lock()
	tables, entries := slices.Sorted(maps.Keys(k.tables)), maps.Clone(k.entries)
	a.mu.Unlock()
	st.send(t, m)
	for range 3 { // messages without content
		m = policytable.Message{Incarnation: m.Incarnation, Seq: m.Seq + 1, Steps: []policytable.Step{policytable.Barrier{}}}
		st.send(t, m)
	}
	if _, err := a.Begin(t.Context(), 300, nil, func(egress, ingress nodetable.ID) (uint16, uint32, error) {
		if egress == nodetable.Pending || ingress == nodetable.Pending {
			t.Errorf("it starts with tables %d and %d", egress, ingress)
		}
		k.endpoint(9, 300, "10.0.0.9")
		return 9, k.endpoints[9].Epoch, nil
	}); err != nil {
		t.Errorf("a known subject: %v", err)
	}
	if err := a.Await(t.Context(), 399); !errors.Is(err, ErrUnavailable) {
		t.Errorf("an unknown subject: %v", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !slices.Equal(slices.Sorted(maps.Keys(k.tables)), tables) || !maps.Equal(k.entries, entries) {
		t.Error("half a snapshot is in the kernel")
	}
}

// BenchmarkKnownSubjectBegins measures what policies add to a creation whose tables are in the
// kernel, with other endpoints present.
func BenchmarkKnownSubjectBegins(b *testing.B) {
	k := newFakeKernel()
	for n := range uint16(100) {
		k.endpoint(n+1, 300+uint32(n%2), netip.AddrFrom4([4]byte{10, 0, 1, byte(n)}).String())
	}
	a := New(Config{Kernel: k, Wait: true})
	if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		b.Fatal(err)
	}
	a.mu.Lock()
	a.next.begin()
	a.mu.Unlock()
	if _, err := a.apply(b.Context(), newService(1).snapshot(testStates()[2])); err != nil {
		b.Fatal(err)
	}
	k.endpoint(200, 300, "10.0.0.200")
	for b.Loop() {
		if err := a.Await(b.Context(), 300); err != nil {
			b.Fatal(err)
		}
		if _, err := a.Begin(b.Context(), 300, nil, func(nodetable.ID, nodetable.ID) (uint16, uint32, error) { return 200, 1, nil }); err != nil {
			b.Fatal(err)
		}
		if err := a.Drop(200, func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

// TestSubjectsThatLingerGiveWayToThoseWithEndpoints: a subscription with too many subjects is rejected, and then no
// policy would be enforced any more.
func TestSubjectsThatLingerGiveWayToThoseWithEndpoints(t *testing.T) {
	now := time.Now()
	k := newFakeKernel()
	k.endpoint(1, 300, "10.0.0.1")
	a := New(Config{Kernel: k, Now: func() time.Time { now = now.Add(time.Millisecond); return now }})
	if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		t.Fatal(err)
	}
	for id := uint32(1000); id < 1000+maxSubjects+5; id++ {
		if err := a.Await(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	sub, _ := a.subscription()
	if n := len(sub.Subjects); n != maxSubjects {
		t.Errorf("%d subjects", n)
	}
	if !slices.Contains(sub.Subjects, 300) || slices.Contains(sub.Subjects, 1000) || !slices.Contains(sub.Subjects, 1000+maxSubjects+4) {
		t.Error("the dropped subject is not the oldest without endpoints")
	}
}

// TestHistoryNamesTheProxyOfARule: an event contains only the number of its rule.
func TestHistoryNamesTheProxyOfARule(t *testing.T) {
	b := binding{table: &serviceTable{content: nodetable.Content{Table: policytable.Table{Rules: []policytable.Rule{
		{Action: policytable.Allow}, {Action: policytable.Redirect, Proxy: 2},
	}}}}}
	var h policyhistory.History
	h.Set(7, policyhistory.Policy{
		Epoch: 3, Proxies: [2]map[uint16]uint16{policytable.Egress: b.proxies()},
	}, time.Now())
	for rule, want := range []uint16{0, 0, 2, 0} {
		if got := h.Proxy(7, 3, true, uint16(rule)); got != want { //nolint:gosec // small
			t.Errorf("egress rule %d redirects to %d, want %d", rule, got, want)
		}
		if got := h.Proxy(7, 3, false, uint16(rule)); got != 0 { //nolint:gosec // small
			t.Errorf("ingress rule %d redirects to %d, want none", rule, got)
		}
	}
	if got := (binding{}).proxies(); got != nil {
		t.Errorf("a table that allows everything redirects: %v", got)
	}
}
