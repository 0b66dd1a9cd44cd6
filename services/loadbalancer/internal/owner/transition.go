// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// held is a frontend in the form that subscribers know.
type held struct {
	by       service.Name
	frontend *frontend.Frontend // set only for a touched service
}

// same reports whether the kernel would get the same frontend from both.
func (h held) same(o held) bool {
	if h.by != o.by || (h.frontend == nil) != (o.frontend == nil) {
		return false
	}
	return h.frontend == nil || h.frontend.Equal(o.frontend)
}

// transition finds the frontends that an edit changes. Before the edit, the touched services are removed from the
// index. Their keys must still be the same as when they were added. The edit may change their shares, and thus their
// keys.
type transition struct {
	index   *index
	touched []service.Name // sorted
	keys    map[frontend.Key]struct{}
	before  map[frontend.Key]held
	had     map[service.Name]bool // services that had one of the keys
}

// begin removes the touched services from the claims, the backends and the counts.
func (ix *index) begin(touched map[service.Name]struct{}) *transition {
	t := &transition{
		index: ix, touched: sorted(touched, service.Name.Compare),
		keys: make(map[frontend.Key]struct{}), had: make(map[service.Name]bool),
	}
	for _, name := range t.touched {
		if j := ix.service(name); j != nil {
			for _, k := range ix.keys(j) {
				t.keys[k] = struct{}{}
			}
		}
	}
	t.before = t.held(t.touched)
	for _, h := range t.before {
		t.had[h.by] = true
	}
	for _, name := range t.touched {
		if j := ix.service(name); j != nil {
			ix.leave(j)
		}
	}
	return t
}

// expect adds the keys that the touched services will have after the edit.
func (t *transition) expect(after map[service.Name]*joined) {
	for _, name := range t.touched {
		j := after[name]
		if j == nil {
			continue
		}
		for _, k := range t.index.keys(j) {
			if _, ok := t.keys[k]; ok {
				continue
			}
			t.keys[k] = struct{}{}
			if w := t.index.claims.winner(k); w != nil {
				t.before[k] = held{by: w.name}
			}
		}
	}
}

// end adds the touched services again, and returns the keys of the frontends that have changed.
func (t *transition) end() []frontend.Key {
	for _, name := range t.touched {
		if j := t.index.service(name); j != nil {
			t.index.enter(j)
		}
	}
	// Compare only frontends of services that had them before and have them afterwards.
	existing := slices.DeleteFunc(slices.Clone(t.touched), func(name service.Name) bool { return !t.had[name] })
	changed := make([]frontend.Key, 0, len(t.keys))
	after := t.held(existing)
	for k := range t.keys {
		if !t.before[k].same(after[k]) {
			changed = append(changed, k)
		}
	}
	return changed
}

// held returns which service has each of the keys, with its frontend if the service is one of the given ones.
func (t *transition) held(touched []service.Name) map[frontend.Key]held {
	of := make(map[frontend.Key]*frontend.Frontend, len(t.keys))
	for _, name := range touched {
		j := t.index.service(name)
		if j == nil {
			continue
		}
		for _, f := range t.index.held(j) {
			of[f.Key] = f
		}
	}
	out := make(map[frontend.Key]held, len(t.keys))
	for k := range t.keys {
		if w := t.index.claims.winner(k); w != nil {
			out[k] = held{w.name, of[k]}
		}
	}
	return out
}

// sorted returns the sorted keys of a set.
func sorted[K comparable](m map[K]struct{}, compare func(a, b K) int) []K {
	out := make([]K, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.SortFunc(out, compare)
	return out
}
