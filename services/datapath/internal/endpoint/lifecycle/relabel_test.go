// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

func web(value string) *[]label.Label {
	return &[]label.Label{{Source: "cni", Key: "app", Value: value}}
}

// relabelling runs Relabels until the test ends.
func relabelling(t *testing.T, c *node) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = c.Relabeller.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// await waits until an endpoint satisfies the condition.
func (m *machine) await(t *testing.T, c *node, o workload.Owner, is func(endpoint.Endpoint) bool) endpoint.Endpoint {
	t.Helper()
	s, err := c.Hub().Subscribe(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for {
		if e, err := c.Get(o); err == nil && is(e) {
			return e
		}
		if _, err := s.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func (m *machine) entry(slot uint16) endpoint.Entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.slots[slot]
}

func (m *machine) called(op string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, c := range m.calls {
		if c == op {
			n++
		}
	}
	return n
}

// TestUpdateWaitsForTheTablesThenSavesThenChangesTheMaps proves INV-70, INV-71.
func TestUpdateWaitsForTheTablesThenSavesThenChangesTheMaps(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	m.number = 2000
	p.await = func(context.Context, uint32) error {
		if m.entry(e.Slot).Identity != 1000 || m.recordOf(s.Owner).Identity.Number != 1000 {
			t.Error("changed before its tables existed")
		}
		return nil
	}
	got, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: web("b")}, false)
	if err != nil || got.Identity.Number != 2000 || got.Slot != e.Slot || !slices.Equal(got.Given.Labels, *web("b")) {
		t.Fatalf("%+v, %v", got, err)
	}
	r := m.recordOf(s.Owner)
	if m.entry(e.Slot).Identity != 2000 || r.Identity.Number != 2000 || !slices.Equal(r.Spec.Labels, s.Labels) {
		t.Errorf("maps %+v, record %+v", m.entry(e.Slot), r)
	}
	if n := m.called("unpublish"); n != 0 {
		t.Errorf("it was unpublished %d times", n)
	}
	// the original request still matches for Create
	if again, err := c.Create(t.Context(), s, false); err != nil || again.Identity.Number != 2000 {
		t.Errorf("the repeated creation: %+v, %v", again, err)
	}
	other := s
	other.Labels = *web("b")
	if _, err := c.Create(t.Context(), other, false); !errors.Is(err, endpoint.ErrExists) {
		t.Errorf("a creation with the labels of the update: %v, want ErrExists", err)
	}
}

func TestUpdateWithTheSameIdentityChangesNothingInTheMaps(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	for _, labels := range []*[]label.Label{&s.Labels, web("b"), web("b"), nil} {
		if _, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: labels}, false); err != nil {
			t.Fatal(err)
		}
	}
	if n := m.called("set identity"); n != 0 {
		t.Errorf("SetIdentity was called %d times", n)
	}
	ports := []workload.NamedPort{{Name: "http", Port: 80, Protocol: 6}}
	m.number = 1001
	e, err := c.Update(t.Context(), Update{Owner: s.Owner, Ports: &ports}, false)
	if err != nil || e.Identity.Number != 1001 || !slices.Equal(e.Ports, ports) ||
		!slices.Equal(e.Given.Labels, *web("b")) {
		t.Errorf("named ports: %+v, %v", e, err)
	}
}

func TestUpdateThatIsNotAllowedChangesNothing(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	s := m.wanted("a", 2)
	s.Manager = "cni"
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	before := m.recordOf(s.Owner)
	m.number = 2000
	for _, v := range []struct {
		u    Update
		want error
	}{
		{Update{Owner: workload.Owner{ContainerID: "nobody", Interface: "eth0"}, Labels: web("b")}, endpoint.ErrNotFound},
		{Update{Owner: workload.Owner{ContainerID: "a", Interface: "lo"}, Labels: web("b")}, endpoint.ErrInvalid},
		{Update{Owner: s.Owner, Labels: web("b")}, endpoint.ErrForeign},
		{Update{Owner: s.Owner, Manager: "podman", Labels: web("b")}, endpoint.ErrForeign},
	} {
		if _, err := c.Update(t.Context(), v.u, false); !errors.Is(err, v.want) {
			t.Errorf("%+v: %v, want %v", v.u, err, v.want)
		}
	}
	e, err := c.Update(t.Context(), Update{Owner: s.Owner, Manager: "cni", Labels: web("b")}, true)
	if err != nil || e.Identity.Number != 2000 || !slices.Equal(e.Given.Labels, *web("b")) {
		t.Errorf("validate only: %+v, %v", e, err)
	}
	if now := m.recordOf(s.Owner); fmt.Sprint(now) != fmt.Sprint(before) || m.called("set identity") != 0 {
		t.Errorf("record %+v, before %+v", now, before)
	}
}

func TestAnEndpointWithThePodsLabelsTakesNoOthers(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	relabelling(t, c)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	ports := []workload.NamedPort{{Name: "web", Port: 8080, Protocol: 6}}
	c.Wishes(map[workload.Owner]endpoint.Identity{s.Owner: {Number: 2000, Labels: *web("x"), FromPod: true, Ports: ports}}, nil)
	e := m.await(t, c, s.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 2000 })
	if !slices.Equal(e.Ports, ports) {
		t.Errorf("named ports %v", e.Ports)
	}
	_, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: web("b")}, false)
	if !errors.Is(err, endpoint.ErrLabelsOfPod) {
		t.Errorf("%v, want ErrLabelsOfPod", err)
	}
	// nor does another endpoint get its identity while the service is unavailable
	m.setFail("resolve", endpoint.ErrUnavailable)
	equal := m.wanted("b", 3)
	equal.Labels = s.Labels
	if _, err := c.Create(t.Context(), equal, false); !errors.Is(err, endpoint.ErrUnavailable) {
		t.Errorf("an endpoint of equal labels: %v, want ErrUnavailable", err)
	}
}

// TestAWishThatCannotBeGrantedLeavesTheEndpointAsItIsAndDelaysNoOther proves INV-70.
func TestAWishThatCannotBeGrantedLeavesTheEndpointAsItIsAndDelaysNoOther(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	relabelling(t, c)
	one, two := m.wanted("a", 2), m.wanted("b", 3)
	for _, s := range []endpoint.Spec{one, two} {
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	gone := make(chan struct{}) // the policy service returns
	p.mu.Lock()
	p.await = func(ctx context.Context, id uint32) error {
		if id != 2000 {
			return nil
		}
		select {
		case <-gone:
			return nil
		default:
			return fmt.Errorf("%w: no tables", endpoint.ErrUnavailable)
		}
	}
	p.mu.Unlock()
	c.Wishes(map[workload.Owner]endpoint.Identity{one.Owner: {Number: 2000}, two.Owner: {Number: 3000}}, nil)
	m.await(t, c, two.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 3000 })
	if e, err := c.Get(one.Owner); err != nil || e.Identity.Number != 1000 || m.entry(e.Slot).Identity != 1000 {
		t.Errorf("without tables: %+v, %v", e, err)
	}
	for len(c.Counts().Waiting) == 0 { // at least one attempt failed
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	close(gone)
	m.await(t, c, one.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 2000 })
	for c.Counts().PendingRelabels > 0 {
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.confirmed[one.Owner] != 2000 || m.confirmed[two.Owner] != 3000 {
		t.Errorf("confirmed %v", m.confirmed)
	}
}

// TestAKilledChangeOfIdentityIsDoneAfterTheRestartAndUnpublishesNothing proves INV-71.
func TestAKilledChangeOfIdentityIsDoneAfterTheRestartAndUnpublishesNothing(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	first := m.evaluated(t, p)
	s := m.wanted("a", 2)
	e, err := first.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	// killed after the record was written
	r := m.recordOf(s.Owner)
	r.Identity.Number = 2000
	if err := (fakeRecords{m}).Save(r); err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	p.await = func(ctx context.Context, _ uint32) error {
		select {
		case <-ready:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	c := m.evaluated(t, p)
	if m.entry(e.Slot).Identity != 1000 || m.called("unpublish") != 0 {
		t.Errorf("before its tables exist: %+v", m.entry(e.Slot))
	}
	for range 2 { // the audit keeps waiting, too
		found := func(f endpoint.Finding) error { t.Errorf("finding %+v", f); return nil }
		if err := c.Audit(t.Context(), true, found); err != nil {
			t.Fatal(err)
		}
	}
	relabelling(t, c)
	close(ready)
	for c.Counts().PendingRelabels > 0 {
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	if m.entry(e.Slot).Identity != 2000 || m.called("unpublish") != 0 {
		t.Errorf("afterwards: %+v, unpublished %d times", m.entry(e.Slot), m.called("unpublish"))
	}
}

func TestAFailedChangeOfIdentityIsTakenBackOrDoneAgain(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	m.number = 2000
	m.setFail("set identity", errTest)
	if _, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: web("b")}, false); !errors.Is(err, errTest) {
		t.Fatal(err)
	}
	if r := m.recordOf(s.Owner); r.Identity.Number != 1000 || r.Given != nil ||
		m.entry(e.Slot).Identity != 1000 || !c.RefreshDue() {
		t.Errorf("record %+v, maps %+v, refresh due %t", r, m.entry(e.Slot), c.RefreshDue())
	}
	m.setFail("set identity", nil)
	m.number = 1000 // the identity of its current labels
	if n, err := c.Refresh(t.Context()); n != 0 || err != nil {
		t.Errorf("refresh: %d, %v", n, err)
	}
}

// TestUpdatesAndDeletionsOfOneOwnerComeOneAfterTheOther proves INV-40.
func TestUpdatesAndDeletionsOfOneOwnerComeOneAfterTheOther(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	relabelling(t, c)
	s := m.wanted("a", 2)
	for round := range 30 {
		m.mu.Lock()
		m.leases[s.Owner] = lease{addrs: s.Addrs}
		m.mu.Unlock()
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				_, err := c.Update(context.Background(), Update{Owner: s.Owner, Labels: web(fmt.Sprint(i))}, false)
				if err != nil && !errors.Is(err, endpoint.ErrNotFound) && !errors.Is(err, endpoint.ErrDeleted) {
					t.Errorf("update: %v", err)
				}
			})
		}
		wg.Go(func() {
			c.Wishes(map[workload.Owner]endpoint.Identity{s.Owner: {Number: uint32(2000 + round)}}, nil)
		})
		wg.Go(func() {
			if _, err := c.Delete(context.Background(), s.Owner); err != nil {
				t.Errorf("delete: %v", err)
			}
		})
		wg.Wait()
		settle(t, c)
		m.holds(t, c, 0)
	}
}

func TestUpdateIsEndedByADeletion(t *testing.T) {
	m := newMachine()
	waits := make(chan struct{})
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	m.number = 2000
	p.await = func(ctx context.Context, _ uint32) error {
		close(waits)
		<-ctx.Done()
		return ctx.Err()
	}
	done := make(chan error, 1)
	go func() {
		_, err := c.Update(context.Background(), Update{Owner: s.Owner, Labels: web("b")}, false)
		done <- err
	}()
	<-waits
	if existed, err := c.Delete(t.Context(), s.Owner); !existed || err != nil {
		t.Errorf("%t, %v", existed, err)
	}
	if err := <-done; !errors.Is(err, endpoint.ErrDeleted) {
		t.Errorf("%v, want ErrDeleted", err)
	}
	settle(t, c)
	m.holds(t, c, 0)
}

// TestAChangeUnderWayIsNotTakenForOneThatAKillLeft: Relabels reads an endpoint after an update has saved the record and
// before it has changed the maps. It must not treat the update as interrupted.
func TestAChangeUnderWayIsNotTakenForOneThatAKillLeft(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	m.number = 2000
	goes := make(chan struct{})
	m.mu.Lock()
	m.block["set identity"] = goes
	m.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		_, err := c.Update(context.Background(), Update{Owner: s.Owner, Labels: web("b")}, false)
		done <- err
	}()
	for !c.differs(s.Owner) {
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	c.mu.Lock()
	w, ok := c.due(s.Owner)
	c.mu.Unlock()
	if !ok || w.identity.Number != 1000 {
		t.Fatalf("due %+v, %t: the test did not reach the state it is about", w, ok)
	}
	granted := make(chan error, 1)
	go func() { granted <- c.grant(context.Background(), s.Owner, w, make(chan struct{}, 1)) }()
	close(goes)
	if err := errors.Join(<-done, <-granted); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Get(s.Owner); err != nil || e.Identity.Number != 2000 || m.entry(e.Slot).Identity != 2000 {
		t.Errorf("the identity was reverted: %+v, %v", e.Identity, err)
	}
}

// TestRefreshGoesOnBehindAPodThatIsNotKnown: a refresh continues after a pod that the identity service does not know.
func TestRefreshGoesOnBehindAPodThatIsNotKnown(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	for i, name := range []string{"a", "b", "c"} {
		if _, err := c.Create(t.Context(), m.wanted(name, byte(2+i)), false); err != nil {
			t.Fatal(err)
		}
	}
	before := m.called("resolve")
	for _, v := range []struct {
		err   error
		calls int
	}{{fmt.Errorf("%w: %w", endpoint.ErrUnavailable, endpoint.ErrPodUnknown), 3}, {endpoint.ErrUnavailable, 1}} {
		m.setFail("resolve", v.err)
		_, err := c.Refresh(t.Context())
		if n := m.called("resolve") - before; !errors.Is(err, endpoint.ErrUnavailable) || n != v.calls || !c.RefreshDue() {
			t.Errorf("%v: %d calls, want %d; %v", v.err, n, v.calls, err)
		}
		before = m.called("resolve")
	}
}

// TestAWishWhoseTablesCannotBeMadeIsolates: the identity service has announced that the labels
// changed, so the endpoint must not keep the permissions of the old labels.
//
// INV-70
func TestAWishWhoseTablesCannotBeMadeIsolates(t *testing.T) {
	held := fmt.Errorf("%w: %w", endpoint.ErrUnavailable, endpoint.ErrPoliciesHeld)
	for _, want := range []error{endpoint.ErrFull, held} {
		m := newMachine()
		p := &fakePolicies{}
		c := m.evaluated(t, p)
		s := m.wanted("a", 2)
		e, err := c.Create(t.Context(), s, false)
		if err != nil {
			t.Fatal(err)
		}
		p.mu.Lock()
		p.await = func(context.Context, uint32) error { return want }
		p.mu.Unlock()
		// An Update request gets the error, and nothing changes.
		m.number = 2000
		if _, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: web("b")}, false); !errors.Is(err, want) {
			t.Errorf("%v: update: %v", want, err)
		}
		if m.entry(e.Slot).Identity != 1000 {
			t.Errorf("%v: a failed update changed %+v", want, m.entry(e.Slot))
		}
		m.isolates = "no capacity"
		relabelling(t, c)
		c.Wishes(map[workload.Owner]endpoint.Identity{s.Owner: {Number: 2000}}, nil)
		m.await(t, c, s.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 2000 })
		for c.Counts().PendingRelabels > 0 {
			if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
				t.Fatal(err)
			}
		}
		m.mu.Lock()
		if !m.isolated[e.Slot] || m.confirmed[s.Owner] != 2000 || m.records[s.Owner].Identity.Number != 2000 {
			t.Errorf("%v: isolated %v, confirmed %v, record %+v", want, m.isolated, m.confirmed, m.records[s.Owner].Identity)
		}
		m.mu.Unlock()
	}
}

// TestARefreshWhoseTablesCannotBeMadeIsolates: a refresh whose tables do not fit isolates the endpoint, like an
// announced identity change.
func TestARefreshWhoseTablesCannotBeMadeIsolates(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	p.await = func(context.Context, uint32) error { return endpoint.ErrFull }
	m.number, m.isolates = 5, "no capacity"
	if n, err := c.Refresh(t.Context()); n != 1 || err != nil || !m.isolated[e.Slot] || m.entry(e.Slot).Identity != 5 {
		t.Errorf("%d, %v; isolated %v, %+v", n, err, m.isolated, m.entry(e.Slot))
	}
}

// TestAWithdrawnWishIsNotGranted: a withdrawn identity change is neither applied while it waits nor during its
// execution.
func TestAWithdrawnWishIsNotGranted(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	one, two := m.wanted("a", 2), m.wanted("b", 3)
	for _, s := range []endpoint.Spec{one, two} {
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	tried, goes := make(chan struct{}), make(chan struct{})
	var once sync.Once
	p.mu.Lock()
	p.await = func(ctx context.Context, id uint32) error {
		if id != 2000 {
			return nil
		}
		once.Do(func() { close(tried) })
		select {
		case <-goes:
			return endpoint.ErrUnavailable
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	p.mu.Unlock()
	relabelling(t, c)
	c.Wishes(map[workload.Owner]endpoint.Identity{one.Owner: {Number: 2000}}, nil)
	<-tried
	c.Wishes(nil, map[workload.Owner]struct{}{one.Owner: {}})
	if n := c.Counts().PendingRelabels; n != 0 {
		t.Errorf("%d wishes are left", n)
	}
	close(goes)
	// A later change of another owner is still made.
	c.Wishes(map[workload.Owner]endpoint.Identity{two.Owner: {Number: 3000}}, nil)
	m.await(t, c, two.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 3000 })
	if e, err := c.Get(one.Owner); err != nil || e.Identity.Number != 1000 || m.entry(e.Slot).Identity != 1000 {
		t.Errorf("withdrawn, but granted: %+v, %v", e.Identity, err)
	}
}

// TestAWishThatChangesWhileTheEarlierOneIsGrantedIsGrantedToo: completing the earlier change does
// not complete the later one.
func TestAWishThatChangesWhileTheEarlierOneIsGrantedIsGrantedToo(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	goes := make(chan struct{})
	m.mu.Lock()
	m.block["set identity"] = goes
	m.mu.Unlock()
	relabelling(t, c)
	c.Wishes(map[workload.Owner]endpoint.Identity{s.Owner: {Number: 2000}}, nil)
	for !c.differs(s.Owner) {
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	c.Wishes(map[workload.Owner]endpoint.Identity{s.Owner: {Number: 3000}}, nil)
	close(goes)
	m.await(t, c, s.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 3000 })
}

// TestARecordIsTakenBackOnlyIfTheMapsHaveTheFormerIdentity: a change that failed half-way may have
// reached the maps. Then the record keeps the new identity, and Relabels completes the change.
func TestARecordIsTakenBackOnlyIfTheMapsHaveTheFormerIdentity(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	relabelling(t, c)
	c.Wishes(map[workload.Owner]endpoint.Identity{s.Owner: {Number: 1500}}, nil)
	for m.entry(e.Slot).Identity != 1500 || c.Counts().PendingRelabels > 0 { // then it waits for the next event
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	m.mu.Lock()
	m.number, m.halfway = 2000, errTest
	m.mu.Unlock()
	if _, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: web("b")}, false); !errors.Is(err, errTest) {
		t.Fatal(err)
	}
	m.await(t, c, s.Owner, func(e endpoint.Endpoint) bool { return e.Identity.Number == 2000 })
	for c.Counts().PendingRelabels > 0 {
		if err := pause(t.Context(), c.cfg.RetryDelay); err != nil {
			t.Fatal(err)
		}
	}
	if r := m.recordOf(s.Owner); r.Identity.Number != 2000 || m.entry(e.Slot).Identity != 2000 {
		t.Errorf("record %d, maps %+v", r.Identity.Number, m.entry(e.Slot))
	}
}

// TestAnEndpointThatIsBeingDeletedIsNotChanged: the device of such an endpoint may already be removed.
func TestAnEndpointThatIsBeingDeletedIsNotChanged(t *testing.T) {
	m := newMachine()
	c := m.evaluated(t, &fakePolicies{})
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.states[s.Owner] = endpoint.Disconnecting
	c.mu.Unlock()
	_, err := c.Update(t.Context(), Update{Owner: s.Owner, Labels: web("b")}, false)
	if !errors.Is(err, endpoint.ErrNotFound) {
		t.Errorf("update: %v, want ErrNotFound", err)
	}
	c.setDiffers(s.Owner, true)
	w := wish{identity: endpoint.Identity{Number: 2000}, confirm: true}
	if err := c.grant(t.Context(), s.Owner, w, make(chan struct{}, 1)); err != nil || m.called("set identity") != 0 {
		t.Errorf("grant: %v, %d calls", err, m.called("set identity"))
	}
	if c.differs(s.Owner) {
		t.Error("Relabels retries a deleted endpoint for ever")
	}
}

func TestRefreshHoldsIdentitiesAndAdoptsNewNumbers(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	clear(m.identities) // the identity service has lost its state
	if n, err := c.Refresh(t.Context()); err != nil || n != 0 {
		t.Errorf("the same number: %d changed, %v", n, err)
	}
	m.holds(t, c, 1)

	m.number = 2000
	if n, err := c.Refresh(t.Context()); err != nil || n != 1 {
		t.Errorf("another number: %d changed, %v", n, err)
	}
	now, err := c.Get(s.Owner)
	if err != nil || now.Identity.Number != 2000 || m.slots[e.Slot].Identity != 2000 || m.records[s.Owner].Identity.Number != 2000 {
		t.Errorf("endpoint %+v, slot %+v, %v", now.Identity, m.slots[e.Slot], err)
	}
	m.setFail("resolve", endpoint.ErrUnavailable)
	if _, err := c.Refresh(t.Context()); !errors.Is(err, endpoint.ErrUnavailable) {
		t.Errorf("without the service: %v", err)
	}
	if now, err := c.Get(s.Owner); err != nil || now.State != endpoint.Ready {
		t.Errorf("without the service: endpoint %+v, %v", now, err)
	}
}
