// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"errors"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/label"
)

// connection is the state of the session with the store, for callers and the reconciler.
type connection struct {
	index *index
	store Store
	cfg   *Config
	lost  chan error // receives the error of a call that failed at the store; capacity 1
}

// errListing means that the free numbers are not known yet.
var errListing = errors.New("the identities of the cluster are still being listed")

// disconnected records that there is no session, and logs it once.
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

// noSpace records that the store accepts no writes, and logs it once.
func (c *connection) noSpace(err error) {
	c.index.mu.Lock(opSession)
	defer c.index.mu.Unlock()
	if c.index.available.space(err) {
		c.cfg.Log.Error("the store has no space: new label sets get no number until its operator frees space",
			"endpoints", c.store.Endpoints(), log.Err(err))
	}
}

// reconnected records that there is a session, and that its references equal the holders.
func (c *connection) reconnected() {
	c.index.mu.Lock(opSession)
	defer c.index.mu.Unlock()
	c.index.available.up()
}

// alive asks the store about the session. A claim that began in an earlier session may have reported the current
// session as lost, so only the store's answer counts.
func (c *connection) alive(ctx context.Context) error {
	if err := bounded(ctx, c.cfg, c.store.Ping); err != nil {
		return err
	}
	c.reconnected()
	return nil
}

// await waits until the session is established and the identities of the cluster are known. Without them, most of the
// chosen numbers would be taken.
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
