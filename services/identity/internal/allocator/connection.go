// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"errors"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/label"
)

// connection is the session with the store, as callers and the reconciler see it.
type connection struct {
	index *index
	store Store
	cfg   *Config
	lost  chan error // holds the failure that a call saw; capacity 1
}

// errListing: it is not known yet which numbers are free.
var errListing = errors.New("the identities of the cluster are still being listed")

// disconnected notes that there is no session, and logs it once.
func (c *connection) disconnected(err error) {
	c.index.mu.Lock(opSession)
	defer c.index.mu.Unlock()
	switch isNew := c.index.available.down(err); {
	case !isNew:
	case errors.Is(err, ErrNameTaken):
		c.cfg.Log.Error("another node owns this node's name; label sets get no numbers on this node", log.Err(err))
	default:
		c.cfg.Log.Warn("the store is unavailable; known label sets are still answered", "endpoints", c.store.Endpoints(),
			log.Err(err))
	}
}

// noSpace notes that the store accepts no writes, and logs it once.
func (c *connection) noSpace(err error) {
	c.index.mu.Lock(opSession)
	defer c.index.mu.Unlock()
	if c.index.available.space(err) {
		c.cfg.Log.Error("the store has no space: new label sets get no number until its operator frees space",
			"endpoints", c.store.Endpoints(), log.Err(err))
	}
}

// reconnected notes that there is a session whose references equal the holds.
func (c *connection) reconnected() {
	c.index.mu.Lock(opSession)
	defer c.index.mu.Unlock()
	c.index.available.up()
}

// alive asks the store about the session. A claim that began in an earlier session may have reported the present one
// as lost; the store's answer decides.
func (c *connection) alive(ctx context.Context) error {
	if err := bounded(ctx, c.cfg, c.store.Ping); err != nil {
		return err
	}
	c.reconnected()
	return nil
}

// await waits until the session is up, and the cluster's identities are
// known: a choice among unknown ones meets one taken number after the other.
func (c *connection) await(ctx context.Context) error {
	for {
		c.index.mu.Lock(opRead)
		v := c.index.available
		c.index.mu.Unlock()
		if v.connected && v.ready {
			return nil
		}
		select {
		case <-v.changed:
		case <-ctx.Done():
			if v.connected {
				return errListing
			}
			return v.storeErr
		}
	}
}

// fail wakes Run because a call failed at the store.
func (c *connection) fail(err error) {
	select {
	case c.lost <- err:
	default: // one is enough
	}
}

func (c *connection) unavailable(ctx context.Context, labels label.Canonical, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return ctx.Err()
	}
	return &StoreError{Endpoints: c.store.Endpoints(), Labels: labels, Err: err}
}
