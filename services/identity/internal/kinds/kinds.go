// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kinds publishes which kinds of policy the API server serves. One process of the cluster looks them up for all
// nodes.
package kinds

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// ErrMalformed is the error of Check.
var ErrMalformed = errors.New("not group/version/resource")

// retry is the shortest pause after the store failed.
const retry = 2 * time.Second

// State has the kinds that were published last.
type State struct {
	Published bool     // a process has published the kinds at least once
	Kinds     []string // group/version/resource, sorted
}

// Equal reports whether two states are equal.
func (s State) Equal(o State) bool {
	return s.Published == o.Published && slices.Equal(s.Kinds, o.Kinds)
}

// Store keeps the state of the cluster.
type Store interface {
	// PublishKinds replaces the kinds, unless they are the same.
	PublishKinds(ctx context.Context, kinds []string) error
	// FollowKinds calls sink with the state, and after every change, until ctx ends or
	// the store fails.
	FollowKinds(ctx context.Context, sink func(State)) error
}

// Board holds the state that was last read from the store.
type Board struct {
	store Store
	log   *slog.Logger

	mu      sync.Mutex
	state   State         // guarded by mu
	read    bool          // guarded by mu; the store was read once
	changed chan struct{} // guarded by mu; closed with the next change
}

// New returns a Board without kinds: they come when Run has read the store.
func New(s Store, l *slog.Logger) *Board {
	return &Board{store: s, log: l, changed: make(chan struct{})}
}

// Run follows the store until ctx ends; it then returns nil.
func (b *Board) Run(ctx context.Context) error {
	for failure := ""; ; {
		err := b.store.FollowKinds(ctx, b.set)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil && err.Error() != failure {
			failure = err.Error()
			b.log.Info("cannot read which kinds of policy the API server serves; retrying", log.Err(err))
		}
		select {
		case <-time.After(retry + rand.N(retry)):
		case <-ctx.Done():
			return nil
		}
	}
}

func (b *Board) set(s State) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.read && b.state.Equal(s) {
		return
	}
	b.state, b.read = s, true
	close(b.changed)
	b.changed = make(chan struct{})
}

// State returns the state, whether the store was read once, and a channel that is
// closed with the next change.
func (b *Board) State() (s State, read bool, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state, b.read, b.changed
}

// Publish writes the kinds to the store. The error wraps ErrMalformed for a kind in another
// form.
func (b *Board) Publish(ctx context.Context, kinds []string) error {
	kinds = slices.Clone(kinds)
	slices.Sort(kinds)
	for _, k := range kinds {
		if err := Check(k); err != nil {
			return err
		}
	}
	return b.store.PublishKinds(ctx, kinds)
}

// Check returns an error unless a kind is group/version/resource.
func Check(kind string) error {
	parts := strings.Split(kind, "/")
	if len(parts) != 3 || slices.Contains(parts, "") || strings.ContainsFunc(kind, func(r rune) bool {
		return r <= ' ' || r > '~'
	}) {
		return fmt.Errorf("%w: %q", ErrMalformed, kind)
	}
	return nil
}
