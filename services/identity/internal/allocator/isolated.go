// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// isolated is the identity reserved:init.
var isolated = func() identity.Identity {
	all := identity.Reserved()
	return all[slices.IndexFunc(all, func(id identity.Identity) bool { return id.Number == identity.Init })]
}()

// Isolated returns the label set reserved:init. An endpoint has it while its own labels have no identity. Policies
// always isolate this identity, and only policies that name reserved:init allow it anything. It needs neither the store
// nor a free number, so an endpoint can always be isolated if a change of its labels fails.
func Isolated() label.Canonical { return isolated.Labels }

// IsIsolated reports whether a label set is reserved:init.
func IsIsolated(labels label.Canonical) bool { return labels.Text() == isolated.Labels.Text() }

// isolate assigns reserved:init to a holder. If keep is set, its former number stays held.
func (a *Allocator) isolate(holder Holder, keep bool) identity.Identity {
	a.index.mu.Lock(opHold)
	defer a.index.mu.Unlock()
	a.index.move(holder, isolated, 0, keep)
	return isolated
}

// holdable reports whether a holder may hold an identity.
func holdable(id identity.Identity) bool {
	switch id.Number.Scope() {
	case identity.ScopeCluster, identity.ScopeNodeLocal:
		return true
	}
	return id.Equal(isolated)
}
