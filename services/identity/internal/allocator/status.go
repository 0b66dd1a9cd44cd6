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
	"github.com/sluice-net/sluice/services/identity/internal/labels"
)

// Status is a summary.
type Status struct {
	Connected     bool
	StoreError    string // why it is not connected, or what a connected store refuses
	Unsaved       error  // why this node's own records are not written; nil: they are
	Denied        error  // the grant that the store lacks; nil: none
	Ready         bool
	Heard         time.Time // the mirror has everything up to then; zero: never
	Known         int       // cluster identities
	Held          int       // of them, held by this node
	Isolated      int       // endpoints of this node without a number
	PendingWrites int       // references and releases that wait for the store
	TopKeys       []labels.KeyCount
}

// Counters are events since the start, for metrics.
type Counters struct {
	Allocated uint64 // identities that this node created
	Conflicts uint64 // held numbers that had another label set afterwards
	Restored  uint64 // references that were written again
	Collected uint64 // identities that this node removed
	Offline   uint64 // answers given from memory because the store was unavailable

	Relabelled uint64 // endpoints that were moved to other labels of their pod
}

// Get returns an identity and its holders on this node, sorted.
func (a *Allocator) Get(n identity.Numeric) (identity.Identity, []Holder, error) {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	id, ok := a.lookup(n)
	if !ok {
		return identity.Identity{}, nil, fmt.Errorf("%w: %d", ErrNotFound, n)
	}
	var holders []Holder
	if h := a.held.byNumber[n]; h != nil {
		holders = slices.Sorted(maps.Keys(h.holders))
	}
	return id, holders, nil
}

// Find returns a label set with its number, according to this node: a cluster number, a node-local one, or 0.
func (a *Allocator) Find(labels label.Canonical, nodeLocal bool) identity.Identity {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	id := identity.Identity{Number: a.mirror.byText[labels.Text()], Labels: labels}
	if nodeLocal {
		id.Number = a.local.byText[labels.Text()]
	}
	return id
}

// Endpoints describes the holders of a number that were described.
func (a *Allocator) Endpoints(n identity.Numeric) map[Holder]Workload {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	out := map[Holder]Workload{}
	if h := a.held.byNumber[n]; h != nil {
		for holder := range h.holders {
			if w, ok := a.held.workloads[holder]; ok {
				out[holder] = w
			}
		}
	}
	return out
}

// lookup is called with mu held.
func (a *Allocator) lookup(n identity.Numeric) (identity.Identity, bool) {
	if n == identity.Host {
		return a.host, true
	}
	if n.Scope() == identity.ScopeReserved {
		r := identity.Reserved()
		if i, ok := slices.BinarySearchFunc(r, identity.Identity{Number: n}, identity.Compare); ok {
			return r[i], true
		}
		return identity.Identity{}, false
	}
	if h := a.held.byNumber[n]; h != nil {
		return identity.Identity{Number: n, Labels: h.labels}, true
	}
	if e, ok := a.mirror.known[n]; ok {
		return identity.Identity{Number: n, Labels: e.labels}, true
	}
	return identity.Identity{}, false
}

// References returns the names of this node's holders that are not endpoints.
func (a *Allocator) References() (all []string) {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	for holder := range a.held.byHolder {
		if name, ok := holder.Reference(); ok {
			all = append(all, name)
		}
	}
	return all
}

// Listed is an element of List.
type Listed struct {
	Identity identity.Identity
	Holders  int // on this node
}

// List returns all identities, sorted by number, as of one point in time.
func (a *Allocator) List() []Listed {
	out := a.list()
	// Without the lock: it is most of the work.
	slices.SortFunc(out, func(x, y Listed) int { return identity.Compare(x.Identity, y.Identity) })
	return out
}

func (a *Allocator) list() []Listed {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	out := make([]Listed, 0, len(a.mirror.known)+16)
	for _, id := range identity.Reserved() {
		if id.Number == identity.Host {
			id = a.host
		}
		l := Listed{Identity: id}
		if h := a.held.byNumber[id.Number]; h != nil {
			l.Holders = len(h.holders)
		}
		out = append(out, l)
	}
	for n, e := range a.mirror.known {
		l := Listed{Identity: identity.Identity{Number: n, Labels: e.labels}}
		if h := a.held.byNumber[n]; h != nil {
			l = Listed{Identity: identity.Identity{Number: n, Labels: h.labels}, Holders: len(h.holders)}
		}
		out = append(out, l)
	}
	for n, h := range a.held.byNumber {
		if _, ok := a.mirror.known[n]; !ok && n.Scope() != identity.ScopeReserved {
			out = append(out, Listed{Identity: identity.Identity{Number: n, Labels: h.labels}, Holders: len(h.holders)})
		}
	}
	return out
}

// Status returns a summary.
func (a *Allocator) Status() Status {
	s := a.Summary()
	s.TopKeys = a.topKeys()
	return s
}

// Summary is Status without TopKeys, which would read every identity.
func (a *Allocator) Summary() Status {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	s := Status{
		// A store that refused the name has answered, so it counts as connected.
		Connected: a.available.connected || a.available.refusedNow,
		Unsaved:   a.available.diskErr, Denied: a.denied, Ready: a.available.answers(), Heard: a.mirror.heard,
		Known: len(a.mirror.known), PendingWrites: len(a.releases.due),
		StoreError: a.available.problem(a.store.Endpoints()),
	}
	if h := a.held.byNumber[identity.Init]; h != nil {
		for holder := range h.holders {
			if _, ok := holder.Owner(); ok {
				s.Isolated++ // not one that was, and has to confirm
			}
		}
	}
	for n, h := range a.held.byNumber {
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
func (a *Allocator) Counters() Counters {
	a.mu.Lock(opRead)
	defer a.mu.Unlock()
	return a.counters
}

// Busy returns for how long each operation held the allocator's lock. It does not wait for the lock.
func (a *Allocator) Busy() []looptime.Figures { return a.mu.Times() }

func (a *Allocator) topKeys() []labels.KeyCount {
	a.mu.Lock(opRead)
	sets := make([]label.Canonical, 0, len(a.mirror.known))
	for _, e := range a.mirror.known {
		sets = append(sets, e.labels)
	}
	a.mu.Unlock()
	return labels.TopKeys(slices.Values(sets), 10)
}
