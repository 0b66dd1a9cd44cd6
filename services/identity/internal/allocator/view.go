// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/looptime"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
)

// View reads which identities this node knows and holds, and the state of its session with the store.
type View struct {
	index *index
	store Store
}

// Status is a summary.
type Status struct {
	Connected     bool
	StoreError    string // why the node is not connected, or which writes a connected store refuses
	Unsaved       error  // why this node's records are not written; nil: they are
	Denied        error  // the grant that the store lacks; nil: none
	Ready         bool
	Heard         time.Time // time up to which the mirror has all changes; zero: never
	Known         int       // cluster identities
	Held          int       // how many of them this node holds
	Isolated      int       // number of endpoints of this node whose labels have no identity
	PendingWrites int       // references and releases that wait for the store
	TopKeys       []labels.KeyCount
}

// Counters are events since the start, for metrics.
type Counters struct {
	Allocated uint64 // identities that this node created
	Conflicts uint64 // numbers that this node held and that got another label set in the cluster
	Restored  uint64 // references that were written again
	Collected uint64 // identities that this node removed
	Offline   uint64 // answers given from memory because the store was unavailable

	Relabelled uint64 // endpoints that were moved to other labels of their pod
}

// Listed is an element of List.
type Listed struct {
	Identity identity.Identity
	Holders  int // on this node
}

// Ready reports whether the identities of the cluster are known, from the cache or from the store, and no other node
// owns this node's name. The channel is closed when the result may have changed.
func (v *View) Ready() (bool, <-chan struct{}) {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return v.index.available.answers(), v.index.available.changed
}

// Numbers reports whether a label set that is new to the cluster would get a number now, which requires that the store
// is reachable and that the store and the disk accept writes. The channel is closed when that, or the result of Ready,
// may have changed.
func (v *View) Numbers() (bool, <-chan struct{}) {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return v.index.available.numbers(), v.index.available.changed
}

// Connected reports whether there is a session whose references equal the holders'. The channel is closed when the
// result may have changed.
func (v *View) Connected() (bool, <-chan struct{}) {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return v.index.available.connected, v.index.available.changed
}

// Get returns an identity and its holders on this node, sorted.
func (v *View) Get(n identity.Numeric) (identity.Identity, []Holder, error) {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	id, ok := v.index.lookup(n)
	if !ok {
		return identity.Identity{}, nil, fmt.Errorf("%w: %d", ErrNotFound, n)
	}
	var holders []Holder
	if h := v.index.held.byNumber[n]; h != nil {
		holders = slices.Sorted(maps.Keys(h.holders))
	}
	return id, holders, nil
}

// Find returns a label set with the number that this node knows for it: a cluster number, a node-local number, or 0.
func (v *View) Find(labels label.Canonical, nodeLocal bool) identity.Identity {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	id := identity.Identity{Number: v.index.mirror.byText[labels.Text()], Labels: labels}
	if nodeLocal {
		id.Number = v.index.local.byText[labels.Text()]
	}
	return id
}

// Endpoints returns the known workloads of the holders of a number.
func (v *View) Endpoints(n identity.Numeric) map[Holder]Workload {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	out := map[Holder]Workload{}
	if h := v.index.held.byNumber[n]; h != nil {
		for holder := range h.holders {
			if w, ok := v.index.held.workloads[holder]; ok {
				out[holder] = w
			}
		}
	}
	return out
}

// References returns the names of this node's holders that are not endpoints.
func (v *View) References() (all []string) {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	for holder := range v.index.held.byHolder {
		if name, ok := holder.Reference(); ok {
			all = append(all, name)
		}
	}
	return all
}

// List returns a consistent snapshot of all identities, sorted by number.
func (v *View) List() []Listed {
	out := v.list()
	// Sort without holding the lock, because it takes most of the time.
	slices.SortFunc(out, func(x, y Listed) int { return identity.Compare(x.Identity, y.Identity) })
	return out
}

func (v *View) list() []Listed {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	out := make([]Listed, 0, len(v.index.mirror.known)+16)
	for _, id := range identity.Reserved() {
		if id.Number == identity.Host {
			id = v.index.host
		}
		l := Listed{Identity: id}
		if h := v.index.held.byNumber[id.Number]; h != nil {
			l.Holders = len(h.holders)
		}
		out = append(out, l)
	}
	for n, e := range v.index.mirror.known {
		l := Listed{Identity: identity.Identity{Number: n, Labels: e.labels}}
		if h := v.index.held.byNumber[n]; h != nil {
			l = Listed{Identity: identity.Identity{Number: n, Labels: h.labels}, Holders: len(h.holders)}
		}
		out = append(out, l)
	}
	for n, h := range v.index.held.byNumber {
		if _, ok := v.index.mirror.known[n]; !ok && n.Scope() != identity.ScopeReserved {
			out = append(out, Listed{Identity: identity.Identity{Number: n, Labels: h.labels}, Holders: len(h.holders)})
		}
	}
	return out
}

// Status returns a summary.
func (v *View) Status() Status {
	s := v.Summary()
	s.TopKeys = v.topKeys()
	return s
}

// Summary is Status without TopKeys, which would read every identity.
func (v *View) Summary() Status {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	s := Status{
		// A store that refused the name has answered, so it counts as connected.
		Connected: v.index.available.connected || v.index.available.refusedNow,
		Unsaved:   v.index.available.diskErr, Denied: v.index.denied, Ready: v.index.available.answers(), Heard: v.index.mirror.heard,
		Known: len(v.index.mirror.known), PendingWrites: len(v.index.releases.due),
		StoreError: v.index.available.problem(v.store.Endpoints()),
	}
	if h := v.index.held.byNumber[identity.Init]; h != nil {
		for holder := range h.holders {
			if _, ok := holder.Owner(); ok {
				s.Isolated++ // do not count an endpoint that only holds a former number until Confirm
			}
		}
	}
	for n, h := range v.index.held.byNumber {
		if n.Scope() == identity.ScopeCluster {
			s.Held++
			if h.ref == 0 {
				s.PendingWrites++
			}
		}
	}
	return s
}

// Counters returns the counts of events since the start.
func (v *View) Counters() Counters {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return v.index.counters
}

// Busy returns how long each operation held the allocator's lock. It does not wait for the lock.
func (v *View) Busy() []looptime.Figures { return v.index.mu.Times() }

func (v *View) topKeys() []labels.KeyCount {
	v.index.mu.Lock(opRead)
	sets := make([]label.Canonical, 0, len(v.index.mirror.known))
	for _, e := range v.index.mirror.known {
		sets = append(sets, e.labels)
	}
	v.index.mu.Unlock()
	return labels.TopKeys(slices.Values(sets), 10)
}

// Usage returns how many numbers tenants have, according to this node's own count of the cluster's label sets and the
// published counts. A tenant also requests a number for each of its waiting label sets on this node.
func (v *View) Usage() []shares.Usage {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return []shares.Usage{v.index.tenants.usage(&v.index.mirror, time.Now())}
}

// HeldBy returns the number of a holder, which Release would release; 0 if it has none.
func (v *View) HeldBy(holder Holder) identity.Numeric {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return v.index.held.byHolder[holder]
}

// sinceHeard returns the time since the last contact with the store. ok is false if there was none, or if its time is
// in the future, because the clock was set back.
func (v *View) sinceHeard() (age time.Duration, ok bool) {
	v.index.mu.Lock(opRead)
	defer v.index.mu.Unlock()
	return v.index.mirror.age(time.Now())
}
