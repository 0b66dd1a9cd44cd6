// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/log"
)

// Pin is a range that a node had before the store was rebuilt. No other node gets the range until that node returns it
// or is forgotten.
type Pin struct {
	Range netip.Prefix `json:"range"`
	Node  string       `json:"node"`
	// Former identifies this node's claim of the range in the former store. Zero: the claim is unknown, or the range is
	// another node's.
	Former Former `json:"former,omitzero"`
}

// Restore sets the pins that the previous process saved. It must be called before Observe.
func (r *Registry) Restore(pins []Pin) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.savedPins = pins
	for _, p := range pins {
		if r.view.pins == nil {
			r.view.pins = map[netip.Prefix]string{}
		}
		r.view.pins[p.Range] = p.Node
		if p.Former != (Former{}) {
			r.view.former[p.Range] = p.Former
		}
	}
}

// Prepare saves the pins that remain after an update. It must be called with each update before the update is saved in
// the copy of the store on the disk, and Observe with the same update after that: a later process that resumes from the
// copy does not receive the update again.
func (r *Registry) Prepare(u Update) {
	r.mu.Lock()
	v := &r.view
	if u.Complete && v.rebuilt(u) && !v.prepared {
		v.pin(v.at.Cluster)
		v.prepared = true
	}
	gone := map[string]bool{}
	for _, k := range u.Removed {
		if k.ofRecord() {
			gone[k.Node] = true
		}
	}
	pins := v.listPins(gone)
	r.mu.Unlock()
	r.savePins(pins)
}

// saveChangedPins saves the pins after an update.
func (r *Registry) saveChangedPins() {
	r.mu.Lock()
	pins := r.view.listPins(nil)
	r.mu.Unlock()
	r.savePins(pins)
}

// savePins saves pins that differ from the saved ones. If that fails, the next update saves them.
func (r *Registry) savePins(pins []Pin) {
	r.mu.Lock()
	same := slices.Equal(pins, r.savedPins)
	r.mu.Unlock()
	if same {
		return
	}
	if err := r.records.SavePins(pins); err != nil {
		r.cfg.Log.Error("the ranges that nodes had before etcd was rebuilt were not written; "+
			"after a restart, only the claims in etcd decide", log.Err(err))
		return
	}
	r.mu.Lock()
	r.savedPins = pins
	r.mu.Unlock()
}

// listPins returns the pins of all nodes except the given ones, sorted by range.
func (v *view) listPins(without map[string]bool) (out []Pin) {
	if len(v.pins) == 0 {
		return nil
	}
	for _, p := range slices.SortedFunc(maps.Keys(v.pins), netip.Prefix.Compare) {
		pin := Pin{Range: p, Node: v.pins[p]}
		if without[pin.Node] {
			continue
		}
		if pin.Node == v.own {
			pin.Former = v.former[p]
		}
		out = append(out, pin)
	}
	return out
}
