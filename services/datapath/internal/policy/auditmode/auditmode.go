// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package auditmode stores which endpoints of the node are in audit mode, and until when. In audit
// mode, packets that policies deny pass and are reported. An audit mode expires by itself.
//
// The package persists audit modes across restarts and applies them to the kernel through an
// interface. When an endpoint is deleted, its audit mode ends; the owner's next endpoint has none.
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

// Default and maximum duration of an audit mode.
const (
	Usual   = time.Hour
	Longest = 30 * 24 * time.Hour
)

// Mode is the duration of one audit mode.
type Mode struct {
	Until time.Time `json:"until"`
	// Lasts is the requested duration: a clock that is set back does not prolong the mode beyond it.
	Lasts time.Duration `json:"lasts"`
}

// Entry is the mode of one endpoint. The time of creation distinguishes the endpoint from later
// ones of the same owner.
type Entry struct {
	Mode
	Owner   workload.Owner `json:"owner"`
	Created time.Time      `json:"created"`
}

// State is the persistent state.
type State struct {
	Node      *Mode   `json:"node,omitempty"`
	Endpoints []Entry `json:"endpoints,omitempty"`
}

// Store persists the state. Load returns an empty State if none was saved.
type Store interface {
	Load() (State, error)
	Save(s State) error
}

// Audited is the set of endpoints in audit mode.
type Audited struct {
	All   bool            // every endpoint, also new ones
	Slots map[uint16]bool // these endpoints
}

// Has reports whether an endpoint is in audit mode.
func (a Audited) Has(slot uint16) bool { return a.All || a.Slots[slot] }

// Config configures Modes.
type Config struct {
	Store Store
	// Endpoints lists the node's endpoints.
	Endpoints func() []endpoint.Endpoint
	// Apply enforces the modes in the kernel. It returns when expired modes no longer let packets
	// pass.
	Apply func(ctx context.Context, audited Audited) error
	Log   *slog.Logger // nil: no logging
	Now   func() time.Time
}

// Modes manages the audit modes of a node. Its methods may be called concurrently.
type Modes struct {
	cfg Config
	log *slog.Logger

	mu    sync.Mutex
	state State // guarded by mu
	lost  error // guarded by mu; error of reading the state
	// unapplied is the error of the last change of the kernel, unsaved of the last write of the
	// file.
	unapplied, unsaved error // guarded by mu
	wake               chan struct{}
}

// New reads the state. If it cannot be read, no endpoint is in audit mode, and Warnings report it
// until a new state is written.
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
		m.log.Error("audit mode is off, because its state cannot be read", log.Err(m.lost))
	}
	m.begin(cfg.Now())
	return m
}

// begin lets the loaded modes last for their remaining time from now. The file has the wall-clock times at which they
// end, and the clock may have been set since. If an end is later than the mode's duration from now, the clock was set
// back: the end is shortened, and written at once, so that frequent restarts do not prolong the mode.
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
		m.unsaved = m.cfg.Store.Save(m.state) // Run retries it
	}
}

// Audited returns which of the endpoints the kernel should have in audit mode now.
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

func (m *Modes) entry(e endpoint.Endpoint) (Entry, bool) {
	i := slices.IndexFunc(m.state.Endpoints, func(x Entry) bool {
		return x.Owner == e.Spec.Owner && x.Created.Equal(e.Created)
	})
	if i < 0 {
		return Entry{}, false
	}
	return m.state.Endpoints[i], true
}

// SetNode switches audit mode for all endpoints of the node on for a time, or off; 0 is the default
// duration. The audit modes of single endpoints do not change.
func (m *Modes) SetNode(ctx context.Context, on bool, lasts time.Duration) error {
	return m.set(ctx, on, func(s *State, until Mode) {
		if s.Node = nil; on {
			s.Node = &until
		}
	}, lasts, "node")
}

// Set switches audit mode of an endpoint on for a time, or off; 0 is the default duration.
func (m *Modes) Set(ctx context.Context, e endpoint.Endpoint, on bool, lasts time.Duration) error {
	return m.set(ctx, on, func(s *State, until Mode) {
		s.Endpoints = slices.DeleteFunc(slices.Clone(s.Endpoints), func(x Entry) bool { return x.Owner == e.Spec.Owner })
		if on {
			s.Endpoints = append(s.Endpoints, Entry{Mode: until, Owner: e.Spec.Owner, Created: e.Created})
		}
	}, lasts, e.Spec.Owner.String())
}

// CheckDuration rejects durations that no mode can have.
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
		// If the process is killed after this, the next one applies the mode when it starts.
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
	// It is off, even if that cannot be saved: until then a restart would switch it on again.
	if m.unsaved = m.cfg.Store.Save(m.state); m.unsaved != nil {
		return fmt.Errorf("audit mode of %s is off, but a restart would switch it on again: %w: %w",
			of, endpoint.ErrStorage, m.unsaved)
	}
	m.lost = nil
	return nil
}

// enforce applies the state to the kernel. mu is held.
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

// look is the interval at which the endpoints are compared with the modes while any mode exists.
const look = time.Second

// Run ends expired modes and modes of deleted endpoints, until ctx ends.
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

// tend makes one comparison, and reports whether another one is needed.
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
		m.log.ErrorContext(ctx, "cannot apply or save the audit mode; retrying", log.Err(err))
	}
	return true
}

// Until returns when an endpoint's audit mode ends, its own or the node's; zero if it has none, or
// only the configured one.
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

// Node returns when the node's audit mode ends; zero if it has none.
func (m *Modes) Node() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.Node == nil {
		return time.Time{}
	}
	return m.state.Node.Until
}

// maxNamed bounds the endpoints that a warning names.
const maxNamed = 10

// Warnings name the endpoints in audit mode, and errors, one line each.
func (m *Modes) Warnings() (lines []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	text := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	if n := m.state.Node; n != nil {
		lines = append(lines,
			fmt.Sprintf("audit mode: packets that policies deny pass for every endpoint of the node until %s; "+
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
		lines = append(lines, "audit mode: packets that policies deny pass for "+strings.Join(named, ", "))
	}
	if m.lost != nil {
		lines = append(lines, fmt.Sprintf("audit mode is off, because its state cannot be read: %v; remove the file, "+
			"or switch audit mode on or off", m.lost))
	}
	if err := errors.Join(m.unapplied, m.unsaved); err != nil {
		lines = append(lines, fmt.Sprintf("audit mode cannot be applied or saved: %v", err))
	}
	return lines
}
