// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package auditmode keeps which endpoints of the node are in audit mode, and until when:
// what their policies deny passes and is reported. A mode ends by itself.
//
// It decides, and keeps what was decided over restarts; the kernel is changed through an
// interface. An endpoint that is deleted takes its mode along, and the next one of its
// owner has none.
package auditmode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// How long a mode lasts: if nothing is said, and at most.
const (
	Usual   = time.Hour
	Longest = 30 * 24 * time.Hour
)

// Mode says when a mode ends.
type Mode struct {
	Until time.Time `json:"until"`
	// Lasts is how long it was to last: a clock that was set back does not prolong it
	// beyond.
	Lasts time.Duration `json:"lasts"`
}

// Entry is the mode of an endpoint, which is told by its owner and when it was made from
// one that the owner has later.
type Entry struct {
	Mode
	Owner   workload.Owner `json:"owner"`
	Created time.Time      `json:"created"`
}

// State is what is kept.
type State struct {
	Node      *Mode   `json:"node,omitempty"`
	Endpoints []Entry `json:"endpoints,omitempty"`
}

// Store keeps the state. Load gives an empty one if there is none.
type Store interface {
	Load() (State, error)
	Save(s State) error
}

// Audited says which endpoints are in audit mode.
type Audited struct {
	All   bool            // every endpoint, and each that comes
	Slots map[uint16]bool // these
}

// Has says whether the endpoint in a slot is.
func (a Audited) Has(slot uint16) bool { return a.All || a.Slots[slot] }

// Config is what Modes need.
type Config struct {
	Store Store
	// Endpoints lists those of the node.
	Endpoints func() []endpoint.Endpoint
	// Apply has the kernel enforce it; it returns when what has ended lets nothing pass.
	Apply func(ctx context.Context, audited Audited) error
	Log   *slog.Logger // nothing is logged if nil
	Now   func() time.Time
}

// Modes are the modes of a node. Its methods may be called concurrently.
type Modes struct {
	cfg Config
	log *slog.Logger

	mu    sync.Mutex
	state State // guarded by mu
	lost  error // guarded by mu; why the state could not be read
	// unapplied is why the kernel may have another state, unsaved why the file may.
	unapplied, unsaved error // guarded by mu
	wake               chan struct{}
}

// New reads the state. A state that cannot be read is none, so that nothing is in audit
// mode; Warnings say so until another one is written.
func New(cfg Config) *Modes {
	if cfg.Log == nil {
		cfg.Log = log.Discard()
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	m := &Modes{cfg: cfg, log: cfg.Log, wake: make(chan struct{}, 1)}
	if m.state, m.lost = cfg.Store.Load(); m.lost != nil {
		m.state = State{}
		m.log.Error("audit mode is off, for its state cannot be read", log.Err(m.lost))
	}
	m.begin(cfg.Now())
	return m
}

// begin counts what is left of the modes that were read from now on: their ends have
// only a wall clock, which may have been set since and may be set again. What ends later
// than it may was written under another clock; its new end is written, so that a process
// that starts often does not prolong it.
func (m *Modes) begin(now time.Time) {
	cut := false
	count := func(mode *Mode) {
		left, most := mode.Until.Sub(now), min(mode.Lasts, Longest)
		cut = cut || left > most
		mode.Until = now.Add(min(left, most))
	}
	if m.state.Node != nil {
		count(m.state.Node)
	}
	for i := range m.state.Endpoints {
		count(&m.state.Endpoints[i].Mode)
	}
	if cut {
		m.unsaved = m.cfg.Store.Save(m.state) // Run tries it again
	}
}

// Audited is what the kernel shall enforce now, for those endpoints.
func (m *Modes) Audited(all []endpoint.Endpoint) Audited {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.audited(all)
}

func (m *Modes) audited(all []endpoint.Endpoint) Audited {
	now := m.cfg.Now()
	a := Audited{All: m.state.Node != nil && now.Before(m.state.Node.Until), Slots: map[uint16]bool{}}
	for _, e := range all {
		if entry, ok := m.entry(e); ok && e.Slot != 0 && now.Before(entry.Until) {
			a.Slots[e.Slot] = true
		}
	}
	return a
}

// entry is that of an endpoint.
func (m *Modes) entry(e endpoint.Endpoint) (Entry, bool) {
	i := slices.IndexFunc(m.state.Endpoints, func(x Entry) bool {
		return x.Owner == e.Spec.Owner && x.Created.Equal(e.Created)
	})
	if i < 0 {
		return Entry{}, false
	}
	return m.state.Endpoints[i], true
}

// SetNode has every endpoint of the node be in audit mode for a time, or ends that; 0 is
// the usual time. Endpoints that are in audit mode themselves stay so.
func (m *Modes) SetNode(ctx context.Context, on bool, lasts time.Duration) error {
	return m.set(ctx, on, func(s *State, until Mode) {
		if s.Node = nil; on {
			s.Node = &until
		}
	}, lasts, "node")
}

// Set has an endpoint be in audit mode for a time, or ends that; 0 is the usual time.
func (m *Modes) Set(ctx context.Context, e endpoint.Endpoint, on bool, lasts time.Duration) error {
	return m.set(ctx, on, func(s *State, until Mode) {
		s.Endpoints = slices.DeleteFunc(slices.Clone(s.Endpoints), func(x Entry) bool { return x.Owner == e.Spec.Owner })
		if on {
			s.Endpoints = append(s.Endpoints, Entry{Mode: until, Owner: e.Spec.Owner, Created: e.Created})
		}
	}, lasts, e.Spec.Owner.String())
}

// CheckDuration refuses times that no mode lasts.
func CheckDuration(lasts time.Duration) error {
	if lasts < 0 || lasts > Longest || lasts > 0 && lasts < time.Second {
		return &endpoint.FieldError{
			Field: "duration", Reason: fmt.Sprintf("%v is not between a second and %v", lasts, Longest),
		}
	}
	return nil
}

func (m *Modes) set(
	ctx context.Context, on bool, change func(*State, Mode), lasts time.Duration, of string,
) error {
	if err := CheckDuration(lasts); err != nil {
		return err
	}
	if lasts == 0 {
		lasts = Usual
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.state
	change(&next, Mode{Until: m.cfg.Now().Add(lasts), Lasts: lasts})
	if on {
		// A process that is killed behind that goes on when it starts.
		if err := m.cfg.Store.Save(next); err != nil {
			return fmt.Errorf("audit mode of %s: %w: %w", of, endpoint.ErrStorage, err)
		}
		m.lost, m.unsaved = nil, nil
	}
	m.state = next
	m.log.WarnContext(ctx, "audit mode changed", "of", of, "on", on, "lasts", lasts.String())
	m.trigger()
	if err := m.enforce(ctx); err != nil {
		return fmt.Errorf("audit mode of %s: %w", of, err)
	}
	if on {
		return nil
	}
	// It is off, whether or not that can be written: until then a restart would switch it
	// on again.
	if m.unsaved = m.cfg.Store.Save(m.state); m.unsaved != nil {
		return fmt.Errorf("audit mode of %s is off, and would be on after a restart: %w: %w",
			of, endpoint.ErrStorage, m.unsaved)
	}
	m.lost = nil
	return nil
}

// enforce has the kernel enforce the state. mu is held.
func (m *Modes) enforce(ctx context.Context) error {
	m.unapplied = m.cfg.Apply(ctx, m.audited(m.cfg.Endpoints()))
	return m.unapplied
}

func (m *Modes) trigger() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// look is how often the endpoints are compared with the modes while there are any.
const look = time.Second

// Run ends what is over, and forgets endpoints that are deleted, until ctx ends.
func (m *Modes) Run(ctx context.Context) error {
	for {
		var next <-chan time.Time
		if m.tend(ctx) {
			next = time.After(look)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.wake:
		case <-next:
		}
	}
}

// tend makes one look, and says whether another one is needed.
func (m *Modes) tend(ctx context.Context) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.Node == nil && len(m.state.Endpoints) == 0 && m.unapplied == nil && m.unsaved == nil {
		return false
	}
	failing := m.unapplied != nil || m.unsaved != nil
	now, over := m.cfg.Now(), false
	all := m.cfg.Endpoints()
	if n := m.state.Node; n != nil && !now.Before(n.Until) {
		m.state.Node, over = nil, true
		m.log.InfoContext(ctx, "audit mode has ended", "of", "node")
	}
	m.state.Endpoints = slices.DeleteFunc(slices.Clone(m.state.Endpoints), func(x Entry) bool {
		there := slices.ContainsFunc(all, func(e endpoint.Endpoint) bool {
			return x.Owner == e.Spec.Owner && x.Created.Equal(e.Created)
		})
		ends := !there || !now.Before(x.Until)
		if ends {
			over = true
			m.log.InfoContext(ctx, "audit mode has ended", "of", x.Owner.String())
		}
		return ends
	})
	err := m.enforce(ctx)
	if err == nil && (over || m.unsaved != nil) {
		m.unsaved = m.cfg.Store.Save(m.state)
		err = m.unsaved
	}
	if err != nil && !failing {
		m.log.ErrorContext(ctx, "audit mode not as it should be, trying again", log.Err(err))
	}
	return true
}

// Until says until when an endpoint is in audit mode, by its own mode or that of the
// node; zero: it is not, or as configured.
func (m *Modes) Until(e endpoint.Endpoint) (until time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if entry, ok := m.entry(e); ok {
		until = entry.Until
	}
	if n := m.state.Node; n != nil && n.Until.After(until) {
		until = n.Until
	}
	return until
}

// Node says until when the node is in audit mode; zero: it is not.
func (m *Modes) Node() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.Node == nil {
		return time.Time{}
	}
	return m.state.Node.Until
}

// maxNamed bounds how many endpoints a warning names.
const maxNamed = 10

// Warnings name what is in audit mode, and what went wrong, one line each.
func (m *Modes) Warnings() (lines []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	text := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	if n := m.state.Node; n != nil {
		lines = append(lines, fmt.Sprintf("audit mode: what policies deny passes for every endpoint of the node until %s; "+
			"`sluice endpoint audit-mode --node off` ends that", text(n.Until)))
	}
	if n := len(m.state.Endpoints); n > 0 {
		until := map[string]time.Time{}
		for _, e := range m.state.Endpoints {
			until[e.Owner.String()] = e.Until
		}
		var named []string
		for _, o := range slices.Sorted(maps.Keys(until)) {
			if len(named) < maxNamed {
				named = append(named, fmt.Sprintf("%s until %s", o, text(until[o])))
			}
		}
		if n > maxNamed {
			named = append(named, fmt.Sprintf("%d more", n-maxNamed))
		}
		lines = append(lines, "audit mode: what policies deny passes for "+strings.Join(named, ", "))
	}
	if m.lost != nil {
		lines = append(lines, fmt.Sprintf("audit mode is off, for its state cannot be read: %v; remove the file, "+
			"or switch audit mode on or off", m.lost))
	}
	if err := errors.Join(m.unapplied, m.unsaved); err != nil {
		lines = append(lines, fmt.Sprintf("audit mode is not as it should be: %v", err))
	}
	return lines
}
