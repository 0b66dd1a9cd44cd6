// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Underlay describes how other nodes reach this node.
type Underlay struct {
	Addresses []netip.Addr // the preferred address of a family first
	Overlay   []netip.Addr // the node's own addresses inside its ranges, one per family
	MTU       uint16       // of the largest packet that its pods accept, bytes
	Mode      Mode         // how packets to its pods travel
	Port      uint16       // UDP port at which it receives tunnel packets; 0: none
}

func (u Underlay) equal(v Underlay) bool {
	return slices.Equal(u.Addresses, v.Addresses) && slices.Equal(u.Overlay, v.Overlay) &&
		u.MTU == v.MTU && u.Mode == v.Mode && u.Port == v.Port
}

// Registry registers this node in the cluster.
type Registry interface {
	Register(ctx context.Context, u Underlay) error
}

// ErrIncomplete is wrapped by the error of underlay while a required part of the description is not known yet, as at
// every start: another process announces it.
var ErrIncomplete = errors.New("the description of the node is not complete yet")

// Registrar registers this node: at the start, after each change, and when the registry may have lost the registration.
type Registrar struct {
	registry Registry
	underlay func() (Underlay, error)
	log      *slog.Logger
	wake     Changes

	mu    sync.Mutex
	again bool  // guarded by mu; register even without a change
	err   error // guarded by mu; why the last registration failed
}

// Changes triggers a Registrar to compare the node with its registration. It may be created before the Registrar.
type Changes chan struct{}

// NewChanges returns a Changes without a pending trigger.
func NewChanges() Changes { return make(Changes, 1) }

// Add triggers a comparison. It does not block.
func (c Changes) Add() {
	select {
	case c <- struct{}{}:
	default:
	}
}

// NewRegistrar returns a registrar. underlay returns the current description of the node; changes triggers calls of it.
func NewRegistrar(registry Registry, underlay func() (Underlay, error), changes Changes, l *slog.Logger) *Registrar {
	return &Registrar{registry: registry, underlay: underlay, log: l, wake: changes, again: true}
}

// Changed triggers Run to compare the node with its registration. It does not block.
func (r *Registrar) Changed() { r.wake.Add() }

// Lost makes Run register the node again, because the registry was unavailable.
func (r *Registrar) Lost() {
	r.mu.Lock()
	r.again = true
	r.mu.Unlock()
	r.Changed()
}

// Pauses after a failed registration.
const (
	registerAgain    = 100 * time.Millisecond
	registerAgainMax = 5 * time.Second
)

// Run registers the node until ctx ends.
func (r *Registrar) Run(ctx context.Context) error {
	var said Underlay
	pause := registerAgain
	for {
		var retry <-chan time.Time
		u, err := r.underlay()
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
	switch {
	case err == nil || r.err != nil && r.err.Error() == err.Error():
	case errors.Is(err, ErrIncomplete):
		r.log.Info("waiting before the node is registered", "for", err.Error())
	default:
		r.log.Warn("cannot register the node; retrying", log.Err(err))
	}
	r.err = err
}

// Err returns the reason why the current description of the node is not registered; nil if it is.
func (r *Registrar) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}
