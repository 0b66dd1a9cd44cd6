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
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// memory replaces the file of the enforced state. A test passes it to the next process.
type memory struct {
	mu   sync.Mutex
	e    policystream.Enforced // guarded by mu
	err  error                 // guarded by mu; of Load
	full error                 // guarded by mu; of Save
}

func (m *memory) Load() (policystream.Enforced, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.e, m.err
}

func (m *memory) Save(e policystream.Enforced) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full != nil {
		return m.full
	}
	m.e, m.err = e, nil
	return nil
}

// wait returns when the revision is saved.
func (m *memory) wait(t *testing.T, want policystream.Enforced) {
	t.Helper()
	for end := time.Now().Add(servicetest.Patience); ; time.Sleep(time.Millisecond) {
		if e, _ := m.Load(); e.Equal(want) {
			return
		} else if time.Now().After(end) {
			t.Fatalf("saved is %+v, want %+v", e, want)
		}
	}
}

// at sets a message's barrier.
func at(m policytable.Message, b policytable.Barrier) policytable.Message {
	m.Steps = slices.Clone(m.Steps)
	m.Steps[slices.IndexFunc(m.Steps, func(s policytable.Step) bool { _, ok := s.(policytable.Barrier); return ok })] = b
	return m
}

// verdicts returns all answers of the kernel, for every peer in a state.
func verdicts(k *fakeKernel) string {
	var b strings.Builder
	for _, slot := range []uint16{1, 2, 3} {
		for _, d := range []policytable.Direction{policytable.Egress, policytable.Ingress} {
			for peer := range uint32(8) {
				for _, addr := range testAddrs {
					for _, point := range testPoints {
						if k.allows(slot, d, 299+peer, addr, point) {
							b.WriteByte('1')
						} else {
							b.WriteByte('0')
						}
					}
				}
			}
		}
	}
	return b.String()
}

// known returns the kernel's entries of identities.
func (k *fakeKernel) known() map[uint32]nodetable.Identity { w, _ := k.Identities(); return w }

const stateA, stateB = "0123456789abcdef", "fedcba9876543210"

var closed = policytable.Barrier{PolicyRevision: 12, State: stateA, Sources: []string{"grpc"}}

func TestTablesStayWhileTheServiceIsBehind(t *testing.T) {
	states := testStates()
	incomplete := []string{"grpc", "identity"}
	for what, c := range map[string]struct {
		before  policytable.Barrier // closed if zero
		forget  bool                // the memory cannot be read after the restart
		after   policytable.Barrier
		held    string // part of the reason; empty: the tables change
		restart bool   // only with a restart of the datapath in between
	}{
		"another state, lower revision":      {after: policytable.Barrier{PolicyRevision: 0, State: stateB, Incomplete: incomplete}, held: "another state"},
		"another state, same revision":       {after: policytable.Barrier{PolicyRevision: 12, State: stateB, Incomplete: incomplete}, held: "another state"},
		"another state, higher revision":     {after: policytable.Barrier{PolicyRevision: 99, State: stateB, Incomplete: incomplete}, held: "another state"},
		"another state that is complete":     {after: policytable.Barrier{PolicyRevision: 1, State: stateB}},
		"a backup":                           {after: policytable.Barrier{PolicyRevision: 11, State: stateA, Incomplete: incomplete}, held: "went back"},
		"a backup that is complete":          {after: policytable.Barrier{PolicyRevision: 11, State: stateA}},
		"the same":                           {after: policytable.Barrier{PolicyRevision: 12, State: stateA, Incomplete: incomplete}},
		"more":                               {after: policytable.Barrier{PolicyRevision: 13, State: stateA, Incomplete: incomplete}},
		"a service without a state name":     {after: policytable.Barrier{PolicyRevision: 1, Incomplete: incomplete}},
		"there were no policies":             {before: policytable.Barrier{PolicyRevision: 12, State: stateA}, after: policytable.Barrier{State: stateB, Incomplete: incomplete}},
		"the enforced state is unreadable":   {forget: true, restart: true, after: policytable.Barrier{PolicyRevision: 12, State: stateA, Incomplete: incomplete}, held: "cannot be read"},
		"unreadable, but complete":           {forget: true, restart: true, after: policytable.Barrier{PolicyRevision: 12, State: stateA}},
		"the kernel enforced no named state": {before: policytable.Barrier{PolicyRevision: 12}, after: policytable.Barrier{PolicyRevision: 1, State: stateB, Incomplete: incomplete}},
	} {
		for _, restart := range []bool{false, true} {
			if c.restart && !restart {
				continue
			}
			t.Run(fmt.Sprintf("%s/restart=%t", what, restart), func(t *testing.T) {
				if c.before.PolicyRevision == 0 {
					c.before = closed
				}
				k, m := scene(), &memory{}
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				a, sc := playWith(ctx, t, k, Config{Wait: true, Memory: m})
				st := next(t, sc.subscribed)
				first := at(newService(1).snapshot(states[2]), c.before)
				st.send(t, first)
				st.expect(t, fmt.Sprint("ack ", first.Seq))
				if c.before.State != "" {
					m.wait(t, policystream.Enforced{State: c.before.State, Revision: c.before.PolicyRevision, Sources: c.before.Sources})
				}
				if restart {
					stop()
					<-a.over
					if c.forget {
						m.err = errors.New("policy.json: corrupt record")
					}
					a, sc = playWith(t.Context(), t, k, Config{Wait: true, Memory: m})
				} else {
					st.end <- errors.New("ended by the test")
				}
				before, entries := verdicts(k), k.known()

				st = next(t, sc.subscribed)
				if wants := c.forget || c.before.State != "" && len(c.before.Sources) > 0; (st.Enforced != nil) != wants {
					t.Errorf("the subscription reports %+v as enforced, want a report: %t", st.Enforced, wants)
				}
				sv := newService(2)
				second := at(sv.snapshot(states[0]), c.after)
				st.send(t, second)
				if c.held == "" {
					st.expect(t, fmt.Sprint("ack ", second.Seq))
					if got := verdicts(k); got == before {
						t.Error("the tables stay, want the service's tables")
					}
					if got := a.Status(); got.Held != "" || got.Revision != c.after.PolicyRevision {
						t.Errorf("status %+v", got)
					}
					return
				}
				hold := next(t, st.said)
				if !strings.HasPrefix(hold, fmt.Sprintf("hold %d at revision ", second.Seq)) || !strings.Contains(hold, c.held) || !strings.Contains(hold, "sluice policy confirm") {
					t.Errorf("sent %q, want a hold that contains %q", hold, c.held)
				}
				// Changes of the other state have no effect, either.
				third := at(sv.change(states[3]), c.after)
				st.send(t, third)
				if said := next(t, st.said); !strings.HasPrefix(said, fmt.Sprintf("hold %d ", third.Seq)) {
					t.Errorf("said %q of a change", said)
				}
				if got := verdicts(k); got != before {
					t.Errorf("verdicts changed while the service is behind:\n%s, want\n%s", got, before)
				}
				if got := k.known(); !maps.Equal(got, entries) {
					t.Errorf("entries changed: %v, want %v", got, entries)
				}
				if got := a.Status(); !strings.Contains(got.Held, c.held) || !got.Synced {
					t.Errorf("status %+v", got)
				}
				// Its sources become complete, or an operator confirms.
				done := c.after
				done.Incomplete, done.Sources = nil, []string{"file"}
				fourth := at(sv.change(states[3]), done)
				st.send(t, fourth)
				st.expect(t, fmt.Sprint("ack ", fourth.Seq))
				want := scene()
				b := start(t, want)
				if _, err := b.load(newService(3).snapshot(states[3])); err != nil {
					t.Fatal(err)
				}
				if got := verdicts(k); got != verdicts(want) {
					t.Errorf("after it is complete:\n%s, want\n%s", got, verdicts(want))
				}
				m.wait(t, policystream.Enforced{State: done.State, Revision: done.PolicyRevision, Sources: done.Sources})
				if got := a.Status(); got.Held != "" || got.Revision != done.PolicyRevision || len(got.Refusals) != 0 {
					t.Errorf("status %+v", got)
				}
			})
		}
	}
}

// held runs an applier until it holds the tables of states[2].
func held(t *testing.T, c Config) (*fakeKernel, *Applier, *script, *scripted, *service) {
	t.Helper()
	states := testStates()
	k := scene()
	c.Memory = &memory{}
	a, sc := play(t, k, c)
	st := next(t, sc.subscribed)
	first := at(newService(1).snapshot(states[2]), closed)
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq))
	st.end <- errors.New("ended by the test")
	st = next(t, sc.subscribed)
	sv := newService(2)
	st.send(t, at(sv.snapshot(states[0]), policytable.Barrier{State: stateB, Incomplete: []string{"grpc"}}))
	if said := next(t, st.said); !strings.HasPrefix(said, "hold ") {
		t.Fatalf("sent %q, want a hold", said)
	}
	return k, a, sc, st, sv
}

// TestIdentityThatEndsWhileTablesStayBecomesUnknown: the number may be assigned to other labels, which the remaining
// tables must not mistake for the old ones.
func TestIdentityThatEndsWhileTablesStayBecomesUnknown(t *testing.T) {
	k, _, _, st, sv := held(t, Config{Wait: true})
	if _, ok := k.known()[303]; !ok {
		t.Fatal("identity 303 is not known")
	}
	gone := sv.message([]policytable.Step{policytable.SetIdentity{Identity: 303}, policytable.Barrier{State: stateB, Incomplete: []string{"grpc"}}})
	st.send(t, gone)
	next(t, st.said)
	if w, ok := k.known()[303]; ok {
		t.Errorf("identity 303 was removed, but has the entry %+v", w)
	}
	if _, ok := k.known()[302]; !ok {
		t.Error("identity 302 has lost its entry")
	}
	again := sv.message([]policytable.Step{policytable.SetIdentity{Identity: 303, IdentityClass: sv.numbers[classKey(3, sv.selectors)]}, policytable.Barrier{State: stateB, Incomplete: []string{"grpc"}}})
	st.send(t, again)
	next(t, st.said)
	if w, ok := k.known()[303]; ok {
		t.Errorf("identity 303 was reused, but has the entry %+v", w)
	}
}

// TestIdentityThatIsMissingInACompleteListingBecomesUnknown: the identity was removed while the service was not
// connected.
func TestIdentityThatIsMissingInACompleteListingBecomesUnknown(t *testing.T) {
	states := testStates()
	k, m := scene(), &memory{}
	_, sc := play(t, k, Config{Wait: true, Memory: m})
	st := next(t, sc.subscribed)
	first := at(newService(1).snapshot(states[2]), closed)
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq))
	for _, c := range []struct {
		incomplete []string
		known      bool
	}{{[]string{"grpc", "identity"}, true}, {[]string{"grpc"}, false}} {
		st.end <- errors.New("ended by the test")
		st = next(t, sc.subscribed)
		less := states[0]
		less.identities = maps.Clone(less.identities)
		delete(less.identities, 303)
		st.send(t, at(newService(2).snapshot(less), policytable.Barrier{State: stateB, Incomplete: c.incomplete}))
		next(t, st.said)
		if _, ok := k.known()[303]; ok != c.known {
			t.Errorf("incomplete %v: identity 303 is known: %t, want %t", c.incomplete, ok, c.known)
		}
	}
}

func TestNewEndpointsWhileTablesStay(t *testing.T) {
	_, a, _, _, _ := held(t, Config{Wait: true, Timeout: 20 * time.Millisecond})
	if err := a.Await(t.Context(), 301); err != nil {
		t.Errorf("an identity with tables: %v", err)
	}
	err := a.Await(t.Context(), 305)
	if !errors.Is(err, ErrUnavailable) || !errors.Is(err, ErrHeld) ||
		!strings.Contains(err.Error(), "sluice policy confirm") {
		t.Errorf("an identity without tables: %v, want %v with what to do", err, ErrUnavailable)
	}
	_, a, _, _, _ = held(t, Config{})
	if err := a.Await(t.Context(), 305); err != nil {
		t.Errorf("without waiting for policies: %v", err)
	}
	var egress, ingress nodetable.ID
	if _, err := a.Begin(t.Context(), 305, []netip.Addr{netip.MustParseAddr("10.0.0.5")}, func(e, i nodetable.ID) (uint16, uint32, error) {
		egress, ingress = e, i
		return 9, 1, nil
	}); err != nil || egress != nodetable.Pending || ingress != nodetable.Pending {
		t.Errorf("it begins with tables %d and %d, %v; want %d, which allows only the local node", egress, ingress, err,
			nodetable.Pending)
	}
}

func TestHeldStateIsListedAgainAfterALostConnection(t *testing.T) {
	k, a, sc, st, _ := held(t, Config{Wait: true})
	before := verdicts(k)
	st.end <- errors.New("ended by the test")
	st = next(t, sc.subscribed)
	if a.Status().Held == "" {
		t.Error("the status no longer reports that the tables stay")
	}
	if st.Enforced == nil || st.Enforced.Revision != 12 || st.Enforced.State != stateA || !slices.Equal(st.Enforced.Sources, []string{"grpc"}) {
		t.Errorf("the subscription reports %+v as enforced", st.Enforced)
	}
	st.send(t, at(newService(2).snapshot(testStates()[0]), policytable.Barrier{State: stateB, Incomplete: []string{"grpc"}}))
	if said := next(t, st.said); !strings.HasPrefix(said, "hold ") || verdicts(k) != before {
		t.Errorf("sent %q; verdicts unchanged: %t", said, verdicts(k) == before)
	}
}

func TestRevisionThatIsNotSavedIsReported(t *testing.T) {
	k, m := scene(), &memory{full: errors.New("no space left on device")}
	a, sc := play(t, k, Config{Wait: true, Memory: m})
	st := next(t, sc.subscribed)
	sv := newService(1)
	first := at(sv.snapshot(testStates()[2]), closed)
	st.send(t, first)
	st.expect(t, fmt.Sprint("ack ", first.Seq)) // a failed save delays no policy
	if got := a.Status().Unsaved; !strings.Contains(got, "no space left on device") {
		t.Errorf("status: %q", got)
	}
	m.mu.Lock()
	m.full = nil
	m.mu.Unlock()
	later := closed
	later.PolicyRevision++
	second := at(sv.change(testStates()[3]), later)
	st.send(t, second)
	st.expect(t, fmt.Sprint("ack ", second.Seq))
	m.wait(t, policystream.Enforced{State: stateA, Revision: 13, Sources: []string{"grpc"}})
	for end := time.Now().Add(servicetest.Patience); a.Status().Unsaved != ""; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the status still reports that it is not saved")
		}
	}
}
