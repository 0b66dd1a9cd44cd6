// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package auditmode

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// node is a fake of the store, the endpoints and the kernel that Modes uses.
type node struct {
	state     State
	saveError error
	loadError error
	endpoints []endpoint.Endpoint
	applied   Audited
	applyErr  error
	steps     []string
	now       time.Time
}

// Load returns a copy, as a file does.
func (n *node) Load() (State, error) {
	s := State{Endpoints: slices.Clone(n.state.Endpoints)}
	if n.state.Node != nil {
		mode := *n.state.Node
		s.Node = &mode
	}
	return s, n.loadError
}

func (n *node) Save(s State) error {
	n.steps = append(n.steps, "save")
	if n.saveError != nil {
		return n.saveError
	}
	n.state = s
	return nil
}

func (n *node) modes() *Modes {
	return New(Config{
		Store: n, Endpoints: func() []endpoint.Endpoint { return n.endpoints }, Now: func() time.Time { return n.now },
		Apply: func(_ context.Context, a Audited) error {
			n.steps = append(n.steps, "apply")
			if n.applyErr == nil {
				n.applied = a
			}
			return n.applyErr
		},
	})
}

func named(id string, slot uint16, created time.Time) endpoint.Endpoint {
	return endpoint.Endpoint{
		Spec: endpoint.Spec{Owner: workload.Owner{ContainerID: id, Interface: "eth0"}}, Slot: slot, Created: created,
	}
}

var start = time.Date(2026, 11, 28, 0, 0, 0, 0, time.UTC)

func newNode() *node {
	return &node{now: start, endpoints: []endpoint.Endpoint{named("a", 1, start), named("b", 2, start)}}
}

func (n *node) wants(t *testing.T, all bool, slots ...uint16) {
	t.Helper()
	want := Audited{All: all, Slots: map[uint16]bool{}}
	for _, s := range slots {
		want.Slots[s] = true
	}
	if !reflect.DeepEqual(n.applied, want) {
		t.Errorf("the kernel has %+v, want %+v", n.applied, want)
	}
}

// TestModesAreWrittenBeforeTheyBeginAndAfterTheyEnd: if the process is killed in between, a recorded mode remains that
// expires by itself. A mode that is in effect is always recorded.
func TestModesAreWrittenBeforeTheyBeginAndAfterTheyEnd(t *testing.T) {
	n := newNode()
	m := n.modes()
	for _, c := range []struct {
		do    func() error
		steps string
		all   bool
		slots []uint16
	}{
		{func() error { return m.Set(t.Context(), n.endpoints[0], true, 0) }, "save apply", false, []uint16{1}},
		{func() error { return m.SetNode(t.Context(), true, time.Minute) }, "save apply", true, []uint16{1}},
		{func() error { return m.Set(t.Context(), n.endpoints[0], false, 0) }, "apply save", true, nil},
		{func() error { return m.SetNode(t.Context(), false, 0) }, "apply save", false, nil},
	} {
		n.steps = nil
		if err := c.do(); err != nil || strings.Join(n.steps, " ") != c.steps {
			t.Errorf("%v, steps %v, want %s", err, n.steps, c.steps)
		}
		n.wants(t, c.all, c.slots...)
	}
	if lines := m.Warnings(); len(lines) > 0 {
		t.Errorf("no endpoint is in audit mode, but the warnings are %q", lines)
	}
}

func TestModesEndByThemselvesAndWithTheirEndpoint(t *testing.T) {
	n := newNode()
	m := n.modes()
	for _, err := range []error{
		m.Set(t.Context(), n.endpoints[0], true, time.Minute), m.Set(t.Context(), n.endpoints[1], true, 0),
		m.SetNode(t.Context(), true, 2*time.Minute),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if lines := strings.Join(m.Warnings(), "\n"); !strings.Contains(lines, "2026-11-28T00:02:00Z") ||
		!strings.Contains(lines, "a/eth0 until 2026-11-28T00:01:00Z, b/eth0 until 2026-11-28T01:00:00Z") {
		t.Errorf("warnings %q", lines)
	}
	n.now = start.Add(time.Minute)
	m.tend(t.Context())
	n.wants(t, true, 2)
	n.now = start.Add(2 * time.Minute)
	m.tend(t.Context())
	n.wants(t, false, 2)
	n.endpoints[1].Slot = 7 // it was published again
	m.tend(t.Context())
	n.wants(t, false, 7)
	n.endpoints[1] = named("b", 7, start.Add(time.Second)) // the owner's next endpoint
	m.tend(t.Context())
	n.wants(t, false)
	if m.tend(t.Context()) || len(n.state.Endpoints) > 0 || n.state.Node != nil {
		t.Errorf("left: %+v", n.state)
	}
}

func TestModesOutliveAProcessAndNoClock(t *testing.T) {
	n := newNode()
	if err := n.modes().Set(t.Context(), n.endpoints[0], true, time.Hour); err != nil {
		t.Fatal(err)
	}
	n.now = start.Add(30 * time.Minute)
	if a := n.modes().Audited(n.endpoints); a.All || !a.Slots[1] || a.Slots[2] {
		t.Errorf("after a restart: %+v", a)
	}
	n.now = start.Add(-100 * time.Hour) // the clock was set back
	m := n.modes()
	if until := m.Until(n.endpoints[0]); until.After(n.now.Add(time.Hour)) {
		t.Errorf("a clock that was set back prolongs the mode until %v", until)
	}
	// Frequent restarts under that clock do not prolong the mode.
	n.now = n.now.Add(time.Hour)
	if a := n.modes().Audited(n.endpoints); a.Slots[1] {
		t.Errorf("an hour after the clock was set back: %+v", a)
	}
}

// TestModesEndWhileNoProcessRuns: audit modes expire while the datapath is down, even if the clock was set far forward.
func TestModesEndWhileNoProcessRuns(t *testing.T) {
	for _, later := range []time.Duration{time.Hour, tenYears} {
		n := newNode()
		if err := n.modes().Set(t.Context(), n.endpoints[0], true, time.Hour); err != nil {
			t.Fatal(err)
		}
		n.now = start.Add(later)
		if a := n.modes().Audited(n.endpoints); a.Slots[1] {
			t.Errorf("%v later: %+v", later, a)
		}
	}
}

const tenYears = 10 * 365 * 24 * time.Hour

// TestModesEndByTheRunningClock: the end of a loaded mode has a reading of the monotonic clock
// again. So setting the wall clock while the process runs does not move the end, as for a new mode.
func TestModesEndByTheRunningClock(t *testing.T) {
	n := newNode()
	n.now = time.Now()
	if err := n.modes().SetNode(t.Context(), true, time.Hour); err != nil {
		t.Fatal(err)
	}
	for name, stored := range map[string]time.Time{
		"as it was written": n.state.Node.Until, "under a clock that was ahead": n.now.Add(tenYears),
	} {
		n.state.Node.Until = stored.Round(0) // a file has no monotonic reading
		until := n.modes().Node()
		if !strings.Contains(until.String(), " m=+") {
			t.Errorf("%s: it ends at %v, without a monotonic reading", name, until)
		}
		if left := until.Sub(n.now); left != time.Hour {
			t.Errorf("%s: %v are left", name, left)
		}
	}
}

func TestModesThatCannotBeWrittenDoNotBeginAndDoEnd(t *testing.T) {
	n := newNode()
	m := n.modes()
	n.saveError = errors.New("disk full")
	if err := m.Set(t.Context(), n.endpoints[0], true, 0); !errors.Is(err, endpoint.ErrStorage) {
		t.Errorf("on: %v, want ErrStorage", err)
	}
	n.wants2(t, Audited{})
	n.saveError = nil
	if err := m.Set(t.Context(), n.endpoints[0], true, 0); err != nil {
		t.Fatal(err)
	}
	n.saveError = errors.New("disk full")
	if err := m.Set(t.Context(), n.endpoints[0], false, 0); !errors.Is(err, endpoint.ErrStorage) {
		t.Errorf("off: %v, want ErrStorage", err)
	}
	n.wants(t, false)
	if lines := m.Warnings(); len(lines) != 1 || !strings.Contains(lines[0], "disk full") {
		t.Errorf("warnings %q", lines)
	}
	n.saveError = nil
	if !m.tend(t.Context()) || len(n.state.Endpoints) > 0 || len(m.Warnings()) > 0 {
		t.Errorf("not written later: %+v, %q", n.state, m.Warnings())
	}
}

func (n *node) wants2(t *testing.T, want Audited) {
	t.Helper()
	if !reflect.DeepEqual(n.applied, want) {
		t.Errorf("the kernel has %+v, want %+v", n.applied, want)
	}
}

func TestModesAreTriedAgainUntilTheKernelHasThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode()
		m := n.modes()
		if err := m.SetNode(t.Context(), true, time.Minute); err != nil {
			t.Fatal(err)
		}
		n.applyErr = errors.New("no")
		if err := m.SetNode(t.Context(), false, 0); err == nil {
			t.Error("reported off although the kernel has it on")
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		synctest.Wait()
		m.mu.Lock()
		n.applyErr = nil
		m.mu.Unlock()
		time.Sleep(2 * look) // the fake clock
		synctest.Wait()
		m.mu.Lock()
		n.wants(t, false)
		m.mu.Unlock()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

func TestStateThatCannotBeReadIsNoMode(t *testing.T) {
	n := newNode()
	n.state = State{Node: &Mode{Until: start.Add(time.Hour), Lasts: time.Hour}}
	n.loadError = errors.New("audit-mode.json: corrupt")
	m := n.modes()
	if a := m.Audited(n.endpoints); a.All {
		t.Errorf("%+v", a)
	}
	if lines := m.Warnings(); len(lines) != 1 || !strings.Contains(lines[0], "audit-mode.json") {
		t.Errorf("warnings %q", lines)
	}
	for _, lasts := range []time.Duration{-1, time.Millisecond, Longest + 1} {
		if err := m.SetNode(t.Context(), true, lasts); !errors.Is(err, endpoint.ErrInvalid) {
			t.Errorf("%v: %v", lasts, err)
		}
	}
}

// TestTheNextEndpointOfAnOwnerIsNotInAuditMode: the next endpoint of an owner is not in audit mode from its first
// packet on, even before Run has ended the former mode.
func TestTheNextEndpointOfAnOwnerIsNotInAuditMode(t *testing.T) {
	n := newNode()
	m := n.modes()
	if err := m.Set(t.Context(), n.endpoints[0], true, time.Hour); err != nil {
		t.Fatal(err)
	}
	next := named("a", 9, start.Add(time.Second))
	if a := m.Audited([]endpoint.Endpoint{next}); a.All || len(a.Slots) > 0 {
		t.Errorf("%+v", a)
	}
	if until := m.Until(next); !until.IsZero() {
		t.Errorf("until %s", until)
	}
}

// TestAnEndpointIsInAuditModeUntilTheLaterEnd: an endpoint is in audit mode until both its own audit mode and the
// node's have ended.
func TestAnEndpointIsInAuditModeUntilTheLaterEnd(t *testing.T) {
	for _, c := range []struct{ own, node, want time.Duration }{
		{time.Hour, time.Minute, time.Hour}, {time.Minute, time.Hour, time.Hour},
	} {
		n := newNode()
		m := n.modes()
		if err := errors.Join(m.Set(t.Context(), n.endpoints[0], true, c.own), m.SetNode(t.Context(), true,
			c.node)); err != nil {
			t.Fatal(err)
		}
		if until := m.Until(n.endpoints[0]); !until.Equal(start.Add(c.want)) {
			t.Errorf("own %s, node %s: until %s", c.own, c.node, until)
		}
		if until := m.Until(n.endpoints[1]); !until.Equal(start.Add(c.node)) {
			t.Errorf("without a mode of its own: until %s", until)
		}
	}
}

// TestAChangeReplacesAStateThatCannotBeRead: the warning ends when the file is written again, also
// by switching audit mode off.
func TestAChangeReplacesAStateThatCannotBeRead(t *testing.T) {
	for _, on := range []bool{true, false} {
		n := newNode()
		n.loadError = errors.New("audit-mode.json: corrupt")
		m := n.modes()
		if err := m.SetNode(t.Context(), on, 0); err != nil {
			t.Fatal(err)
		}
		if lines := strings.Join(m.Warnings(), "\n"); strings.Contains(lines, "audit-mode.json") {
			t.Errorf("on %t: warnings %q", on, lines)
		}
	}
}
