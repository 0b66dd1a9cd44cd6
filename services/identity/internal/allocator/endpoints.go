// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"fmt"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// Endpoint is an endpoint of this node with its identity.
type Endpoint struct {
	Holder   Holder
	Identity identity.Identity
	Workload Workload
	// Former is the number that the endpoint had before Relabel. It is held until Confirm; 0: none.
	Former identity.Numeric
}

// Equal reports whether both endpoints are equal.
func (e Endpoint) Equal(f Endpoint) bool {
	return e.Holder == f.Holder && e.Identity.Equal(f.Identity) && e.Workload.equal(f.Workload) && e.Former == f.Former
}

// endpoints returns the endpoints in records, which also contain other holders.
func (s *holdings) endpoints(records []HolderRecord) (all []Endpoint) {
	for _, r := range records {
		if _, ok := r.Holder.Owner(); ok {
			all = append(all, Endpoint{r.Holder, r.Identity, r.Workload, s.byHolder[r.Holder.former()]})
		}
	}
	return all
}

// Relabel moves an endpoint to another label set. It holds the former number until Confirm, because packets carry that
// number until then. It does nothing if the endpoint has no identity. It returns ErrUnconfirmed if the last move is not
// confirmed yet, so an endpoint holds at most two numbers.
func (a *Allocator) Relabel(ctx context.Context, holder Holder, labels label.Canonical) error {
	unlock, err := a.byHolder.Lock(ctx, holder)
	if err != nil {
		return err
	}
	defer unlock()
	a.index.mu.Lock(opHold)
	n, held := a.index.held.byHolder[holder]
	former, owed := a.index.held.byHolder[holder.former()]
	same := held && a.index.held.as(n, labels) != nil
	a.index.mu.Unlock()
	switch {
	case !held:
		return nil
	case (same || owed) && IsIsolated(labels) && a.recorder.isolateUnsaved(ctx, holder):
		return nil
	case same: // an earlier call may have failed to save its change
		return a.index.saver.wait(ctx)
	case owed:
		return fmt.Errorf("%w: %s moves from %d to %d", ErrUnconfirmed, holder, former, n)
	}
	unlockLabels, err := a.claims.byLabels.Lock(ctx, labels.Text())
	if err != nil {
		return err
	}
	id, err := a.holdLabels(ctx, holder, labels, true)
	unlockLabels()
	if err != nil {
		return err
	}
	a.index.mu.Lock(opHold)
	a.index.counters.Relabelled++
	a.index.mu.Unlock()
	_, err = a.answer(ctx, id)
	return err
}

// Confirm reports that an endpoint's packets now carry a number. If that is the current number of the endpoint, its
// former number is released; otherwise nothing changes.
func (a *Allocator) Confirm(ctx context.Context, holder Holder, n identity.Numeric) error {
	unlock, err := a.byHolder.Lock(ctx, holder)
	if err != nil {
		return err
	}
	defer unlock()
	a.index.mu.Lock(opRelease)
	if a.index.held.byHolder[holder] == n && a.index.dropHolder(holder.former()) != 0 {
		a.index.held.touch(holder) // readers must learn that the move is confirmed
		a.index.saver.dirty()
	}
	a.index.mu.Unlock()
	// Wait even without a change: an earlier call may have failed to save its change.
	if err := a.index.saver.wait(ctx); err != nil {
		return err
	}
	a.index.wake()
	return nil
}
