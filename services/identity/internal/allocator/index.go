// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/looptime"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// index contains the identities of the cluster that this node knows, and the numbers that it holds. One lock guards
// both, because most changes affect both. Its methods keep the two consistent, and publish changes.
type index struct {
	cfg  *Config
	pub  Publisher
	kick chan struct{} // wakes the reconciler; capacity 1

	mu         looptime.Mutex
	mirror     mirror            // guarded by mu; the identities of the cluster
	held       holdings          // guarded by mu; the numbers that this node holds
	releases   releases          // guarded by mu; references to remove from the store
	local      localNumbers      // guarded by mu
	candidates candidates        // guarded by mu; chooses numbers for label sets without one
	tenants    tenantNumbers     // guarded by mu; the tenants' shares of the cluster's numbers
	places     places            // guarded by mu; use of this node's quota
	available  availability      // guarded by mu
	joined     string            // guarded by mu; name of the session with the store
	sessions   uint64            // guarded by mu; number of sessions that were established
	denied     error             // guarded by mu; error about a grant that this node lacks
	counters   Counters          // guarded by mu
	host       identity.Identity // guarded by mu; identity of the local node

	saver saver // of changes of held
}

// newIndex returns an index with the reserved identities. heard is the time stored in the cache.
func newIndex(cfg *Config, pub Publisher, holds Holds, heard time.Time) *index {
	x := &index{
		cfg: cfg, pub: pub, kick: make(chan struct{}, 1),
		mirror: newMirror(heard), held: newHoldings(), releases: newReleases(),
		local: newLocalNumbers(holds.NextNodeLocal), candidates: newCandidates(), tenants: newTenantNumbers(cfg.tenant),
		places: newPlaces(cfg.Quota, cfg.tenant), available: newAvailability(), joined: holds.Session,
	}
	for _, id := range identity.Reserved() {
		if id.Number == identity.Host {
			x.host = id
		}
		pub.Upsert(id.Number, id)
	}
	return x
}

// restore adds the holders that the last process has saved, and then the identities of the cache. If the two differ,
// the cache is older than the holders. It needs no lock, because the index is not shared yet.
func (x *index) restore(holders []HolderRecord, known []identity.Identity) error {
	for _, r := range holders {
		if !holdable(r.Identity) {
			return fmt.Errorf("holder %s: a workload cannot have the identity %d", r.Holder, r.Identity.Number)
		}
		if h := x.held.other(r.Identity.Number, r.Identity.Labels); h != nil {
			return fmt.Errorf("holder %s: number %d has two label sets: %s and %s", r.Holder, r.Identity.Number, h.labels, r.Identity.Labels)
		}
		if _, ok := x.held.byHolder[r.Holder]; ok {
			return fmt.Errorf("holder %s is listed twice", r.Holder)
		}
		x.addHolder(r.Holder, r.Identity, 0)
		if !r.Workload.equal(Workload{}) {
			x.held.workloads[r.Holder] = r.Workload
		}
		switch r.Identity.Number.Scope() {
		case identity.ScopeNodeLocal:
			x.local.restore(r.Identity.Labels.Text(), r.Identity.Number)
			x.pub.Upsert(r.Identity.Number, r.Identity)
		case identity.ScopeCluster:
			x.learn(r.Identity, 0)
		}
	}
	for _, id := range known {
		if id.Number.Scope() != identity.ScopeCluster {
			return fmt.Errorf("known identity %d is not one of the cluster", id.Number)
		}
		if _, ok := x.mirror.known[id.Number]; ok {
			continue
		}
		if _, ok := x.mirror.byText[id.Labels.Text()]; ok {
			continue
		}
		x.learn(id, 0)
	}
	return nil
}

// becomeReady is called with mu held.
func (x *index) becomeReady() {
	if x.available.loaded() {
		x.pub.Loaded()
	}
}

// describe is called with mu held.
func (x *index) describe(holder Holder, w Workload) {
	if x.held.describe(holder, w) {
		x.saver.dirty()
	}
}

// reserve reserves a unit of the quota for a label set that this node does not hold yet. It is called with mu held; the
// caller must release the unit.
func (x *index) reserve(holder Holder, labels label.Canonical) *QuotaError {
	// A holder that moves away from a number without other holders frees a unit.
	if n, ok := x.held.byHolder[holder]; ok && n.Scope() == identity.ScopeCluster && len(x.held.byNumber[n].holders) == 1 {
		return x.places.reserve(namespaceOf(labels), true, namespaceOf(x.held.byNumber[n].labels))
	}
	return x.places.reserve(namespaceOf(labels), false, "")
}

// move assigns an identity to a holder and releases its former identity. If keep is set, a separate holder keeps the
// former identity until Confirm. Called with mu held.
func (x *index) move(holder Holder, id identity.Identity, ref int64, keep bool) {
	if n, ok := x.held.byHolder[holder]; ok {
		if n == id.Number {
			x.addHolder(holder, id, ref)
			return
		}
		w := x.held.workloads[holder]
		if keep {
			x.addHolder(holder.former(), identity.Identity{Number: n, Labels: x.held.byNumber[n].labels}, 0)
		}
		x.dropHolder(holder)
		x.describe(holder, w)
	}
	x.addHolder(holder, id, ref)
	x.saver.dirty()
	if id.Number.Scope() == identity.ScopeCluster && x.held.byNumber[id.Number].ref == 0 || len(x.releases.due) > 0 {
		x.wake()
	}
}

// addHolder is called with mu held.
func (x *index) addHolder(holder Holder, id identity.Identity, ref int64) {
	if x.held.add(holder, id, ref) && id.Number.Scope() == identity.ScopeCluster {
		x.places.hold(namespaceOf(id.Labels))
	}
}

// dropHolder removes a holder, and returns its number, 0 if it had none. Called with mu held.
func (x *index) dropHolder(holder Holder) identity.Numeric {
	n, ended := x.held.drop(holder)
	if ended != nil {
		x.dropHold(n, ended)
	}
	return n
}

// dropHold removes a hold that has no holders any more. Called with mu held.
func (x *index) dropHold(n identity.Numeric, h *hold) {
	switch n.Scope() {
	case identity.ScopeCluster:
		x.candidates.unassign(n)
		x.places.release(namespaceOf(h.labels))
	case identity.ScopeNodeLocal:
		x.local.release(h.labels.Text(), n)
		x.pub.Delete(n)
		return
	default:
		return // a reserved identity exists even without holders
	}
	if h.ref != 0 {
		x.releases.due[n] = h.ref
	}
	// A held number stays known even after it was deleted from the store. It is no longer held, so remove it now.
	switch e, ok := x.mirror.known[n]; {
	case !ok:
		x.pub.Delete(n)
	case e.gone:
		x.forget(n)
	case e.labels.Text() != h.labels.Text():
		x.pub.Upsert(n, identity.Identity{Number: n, Labels: e.labels})
	}
}

// learn adds an identity to the mirror, with the revision at which the store had it. If the mirror has a later
// revision, learn does nothing. Called with mu held.
func (x *index) learn(id identity.Identity, revision int64) {
	var since time.Time
	if x.available.ready {
		since = time.Now()
	}
	taken, changed := x.mirror.learn(id, revision, since)
	if !taken {
		return
	}
	if changed {
		x.candidates.begin(id.Number)
	}
	if h := x.held.other(id.Number, id.Labels); h != nil {
		// In the cluster, the number belongs to another label set than on this node. Until Run has resolved the
		// conflict, readers see the label set of this node's endpoints.
		h.ref = 0
		x.wake()
		return
	}
	x.pub.Upsert(id.Number, id)
}

// forget removes a number from the mirror. Called with mu held.
func (x *index) forget(n identity.Numeric) {
	e, ok := x.mirror.known[n]
	if !ok {
		return
	}
	h := x.held.byNumber[n]
	if h != nil {
		// The number was removed from the store although this node holds it. Write the reference again, which
		// also creates the identity again.
		h.ref = 0
		x.wake()
		if h.labels.Text() == e.labels.Text() {
			x.mirror.keep(n)
			return
		}
	}
	x.mirror.remove(n)
	// A collection takes the grace period and up to two rounds of the collector.
	x.candidates.end(n, e.since, time.Now(), x.cfg.Grace+2*x.cfg.Reconcile)
	if h == nil {
		x.pub.Delete(n)
	}
}

// replace publishes the current label set of a number whose holders have moved. The mirror may be newer than the
// conflict, because it follows the store. Called with mu held.
func (x *index) replace(c *ConflictError) {
	n := c.Held.Number
	e, ok := x.mirror.known[n]
	stale := ok && e.labels.Text() == c.Held.Labels.Text()
	if stale {
		x.mirror.remove(n)
		x.candidates.unassign(n)
	}
	switch {
	case ok && !stale:
		// It was not published while this node held the number for another label set.
		x.pub.Upsert(n, identity.Identity{Number: n, Labels: e.labels})
	case !c.Occupant.Labels.IsZero() && c.Revision > x.mirror.revision:
		x.learn(c.Occupant, c.Revision)
	default:
		x.pub.Delete(n)
	}
}

// lookup is called with mu held.
func (x *index) lookup(n identity.Numeric) (identity.Identity, bool) {
	if n == identity.Host {
		return x.host, true
	}
	if n.Scope() == identity.ScopeReserved {
		r := identity.Reserved()
		if i, ok := slices.BinarySearchFunc(r, identity.Identity{Number: n}, identity.Compare); ok {
			return r[i], true
		}
		return identity.Identity{}, false
	}
	if h := x.held.byNumber[n]; h != nil {
		return identity.Identity{Number: n, Labels: h.labels}, true
	}
	if e, ok := x.mirror.known[n]; ok {
		return identity.Identity{Number: n, Labels: e.labels}, true
	}
	return identity.Identity{}, false
}

func (x *index) wake() {
	select {
	case x.kick <- struct{}{}:
	default:
	}
}
