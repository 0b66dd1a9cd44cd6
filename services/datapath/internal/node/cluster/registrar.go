// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Underlay is where and how this node is reached by others.
type Underlay struct {
	Addresses []netip.Addr // the preferred of a family first
	Overlay   []netip.Addr // of the node itself inside its ranges, one of a family
	MTU       uint16       // of what its pods take, bytes
	Mode      Mode         // how packets for its pods travel
	Port      uint16       // UDP, on which it takes packets of the tunnel; 0: on none
}

func (u Underlay) equal(v Underlay) bool {
	return slices.Equal(u.Addresses, v.Addresses) && slices.Equal(u.Overlay, v.Overlay) &&
		u.MTU == v.MTU && u.Mode == v.Mode && u.Port == v.Port
}

// Registry takes what this node is.
type Registry interface {
	Register(ctx context.Context, u Underlay) error
}

// Registrar says what this node is: at the start, whenever that changes, and when
// the registry may have lost it.
type Registrar struct {
	registry Registry
	look     func() (Underlay, error)
	log      *slog.Logger
	wake     Changes

	mu    sync.Mutex
	again bool  // guarded by mu; say it although it is the same
	err   error // guarded by mu; why it was not said
}

// Changes has a Registrar look again at what the node is. It may exist before the Registrar.
type Changes chan struct{}

// NewChanges has nothing to look at.
func NewChanges() Changes { return make(Changes, 1) }

// Add says that the node may be another. It does not wait.
func (c Changes) Add() {
	select {
	case c <- struct{}{}:
	default:
	}
}

// NewRegistrar prepares a registrar. look says what the node is now, and changes when it may
// be another.
func NewRegistrar(registry Registry, look func() (Underlay, error), changes Changes, l *slog.Logger) *Registrar {
	return &Registrar{registry: registry, look: look, log: l, wake: changes, again: true}
}

// Changed has Run look again at what the node is. It does not wait.
func (r *Registrar) Changed() { r.wake.Add() }

// Lost has Run say again what the node is: the registry was away.
func (r *Registrar) Lost() {
	r.mu.Lock()
	r.again = true
	r.mu.Unlock()
	r.Changed()
}

// Pauses after a registration that failed.
const (
	registerAgain    = 100 * time.Millisecond
	registerAgainMax = 5 * time.Second
)

// Run registers until ctx ends.
func (r *Registrar) Run(ctx context.Context) error {
	var said Underlay
	pause := registerAgain
	for {
		var retry <-chan time.Time
		u, err := r.look()
		r.mu.Lock()
		due := err == nil && (r.again || !u.equal(said))
		r.again = r.again && !due
		r.mu.Unlock()
		if due {
			err = r.registry.Register(ctx, u)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			r.note(err)
			if due {
				r.mu.Lock()
				r.again = true
				r.mu.Unlock()
			}
			retry = time.After(pause)
			pause = min(2*pause, registerAgainMax)
		default:
			if due {
				r.log.Info("node registered", "addresses", u.Addresses, "overlay", u.Overlay, "mode", u.Mode)
			}
			r.note(nil)
			said, pause = u, registerAgain
		}
		select {
		case <-r.wake:
		case <-retry:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *Registrar) note(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && (r.err == nil || r.err.Error() != err.Error()) {
		r.log.Warn("node not registered, trying again", log.Err(err))
	}
	r.err = err
}

// Err is why the cluster does not have what the node is now, as far as this
// process knows.
func (r *Registrar) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}
