// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"fmt"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// HoldNodeLocal assigns to the holder a number that is valid on this node only. It needs no store.
func (a *Allocator) HoldNodeLocal(ctx context.Context, holder Holder, labels label.Canonical) (identity.Identity, error) {
	if err := holder.check(); err != nil {
		return identity.Identity{}, err
	}
	unlock, err := a.byHolder.Lock(ctx, holder)
	if err != nil {
		return identity.Identity{}, err
	}
	defer unlock()
	if err := faultResolveStart.Hit(ctx); err != nil {
		return identity.Identity{}, err
	}
	id, err := a.holdNodeLocal(holder, labels)
	if err != nil {
		return identity.Identity{}, err
	}
	return a.answer(ctx, id)
}

// SetHostLabels changes the label set of the local host's identity. The number stays the same, and readers receive the
// change.
func (a *Allocator) SetHostLabels(labels label.Canonical) {
	a.index.mu.Lock(opHold)
	defer a.index.mu.Unlock()
	a.index.host.Labels = labels
	a.index.pub.Upsert(identity.Host, a.index.host)
}

func (a *Allocator) holdNodeLocal(holder Holder, labels label.Canonical) (identity.Identity, error) {
	a.index.mu.Lock(opHold)
	defer a.index.mu.Unlock()
	if n, ok := a.index.held.byHolder[holder]; ok {
		if h := a.index.held.byNumber[n]; n.Scope() != identity.ScopeNodeLocal || h.labels.Text() != labels.Text() {
			return identity.Identity{}, fmt.Errorf("%w: %s holds %d %s", ErrHeldOther, holder, n, clip(h.labels.Text(), 200))
		}
		return identity.Identity{Number: n, Labels: labels}, nil
	}
	n, ok := a.index.local.number(labels.Text())
	if !ok {
		const size = identity.NodeLocalSize
		return identity.Identity{}, &QuotaError{Kind: ErrExhausted, Used: size, Limit: size}
	}
	id := identity.Identity{Number: n, Labels: labels}
	a.index.move(holder, id, 0, false)
	a.index.pub.Upsert(n, id)
	return id, nil
}
