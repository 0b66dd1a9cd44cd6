// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Renewer keeps the credentials in a directory valid, and their addresses current.
type Renewer struct {
	dir string
	log *slog.Logger
	now func() time.Time
	// failed has an element after a connection failed, until the next request.
	failed chan struct{}

	mu      sync.Mutex
	current Credentials // guarded by mu
	problem error       // guarded by mu; of the last attempt
}

// NewRenewer reads the credentials in a directory, which has one Renewer.
func NewRenewer(dir, node string, now func() time.Time, l *slog.Logger) (*Renewer, error) {
	c, err := Load(dir)
	if err != nil {
		return nil, err
	}
	if c.Node != node {
		return nil, fmt.Errorf("credentials of the store: %s belongs to the node %q, and this node is called %q; "+
			"set the name back, or join again", dir, c.Node, node)
	}
	if _, err := c.TLS(); err != nil {
		return nil, err
	}
	return &Renewer{dir: dir, log: l, now: now, failed: make(chan struct{}, 1), current: c}, nil
}

// Current returns the credentials.
func (r *Renewer) Current() Credentials {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current
}

// Problem returns why the credentials were not renewed when it was time; nil if they were.
func (r *Renewer) Problem() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.problem
}

// Failed makes the Renewer ask for the members soon: a connection to a member failed, perhaps because of a new epoch.
func (r *Renewer) Failed() {
	select {
	case r.failed <- struct{}{}:
	default:
	}
}

// The node renews its certificate after two thirds of its life, so that a store may be unavailable for the last third.
// It asks for the members more often, at a random moment, because members change.
const (
	locateEvery = time.Minute
	retryAfter  = 15 * time.Second
	soon        = 4 * time.Second // least time to the next request after a connection failed
)

// Run renews until ctx ends. changed is called after each change.
func (r *Renewer) Run(ctx context.Context, changed func(Credentials)) error {
	for {
		wait := locateEvery/2 + rand.N(locateEvery)
		if !r.step(ctx, changed) {
			wait = retryAfter/2 + rand.N(retryAfter)
		}
		least := time.After(soon/2 + rand.N(soon))
		select {
		case <-time.After(wait):
		case <-r.failed:
			select {
			case <-least:
			case <-ctx.Done():
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// step renews the certificate if it is time, or asks for the members. It reports whether that succeeded.
func (r *Renewer) step(ctx context.Context, changed func(Credentials)) bool {
	old := r.Current()
	due, err := r.due(old)
	var c Credentials
	switch {
	case err != nil:
	case due:
		c, err = Renew(ctx, old)
	default:
		c, err = Locate(ctx, old)
	}
	if err == nil && !same(c, old) {
		err = c.Save(r.dir)
	}
	r.mu.Lock()
	repeated := r.problem != nil
	if r.problem = err; err == nil {
		r.current = c
	}
	r.mu.Unlock()
	if err != nil {
		if ctx.Err() == nil && !repeated {
			r.log.Error("the credentials for the store are not renewed; see docs/store.md", "due", due, log.Err(err))
		}
		return false
	}
	if !same(c, old) {
		r.log.Info("the credentials for the store changed", "epoch", c.Epoch, "members", c.Clients, "renewed", due)
		changed(c)
	}
	return true
}

func (r *Renewer) due(c Credentials) (bool, error) {
	from, to, err := c.Validity()
	if err != nil {
		return false, err
	}
	return r.now().After(from.Add(to.Sub(from) * 2 / 3)), nil
}

func same(a, b Credentials) bool {
	return fmt.Sprint(a) == fmt.Sprint(b)
}
