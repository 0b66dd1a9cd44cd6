// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"time"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// current is a time at which a reader had all changes in the store.
type current struct {
	at       time.Duration // time by BootTime; 0: never
	revision int64         // the store's revision at that time
}

// NoteApplied records the point up to which the datapath of this node has applied nodes and mappings. It returns how
// long ago the datapath was up to date with the store; ok is false if it never was since the process started.
func (r *Registry) NoteApplied(at cluster.Point) (silence time.Duration, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at.Cluster == r.view.at.Cluster {
		r.applied = at
		if at.Revision >= r.current.revision && len(r.view.held) == 0 && len(r.view.touched) == 0 {
			r.heard = r.current
		}
	}
	return r.bootTime() - r.heard.at, r.heard.at != 0
}

func (r *Registry) bootTime() time.Duration {
	if r.cfg.BootTime == nil {
		return time.Duration(time.Now().UnixNano())
	}
	return r.cfg.BootTime()
}

// StaleMappings returns how long a node without the store trusts the mappings of
// others.
func (r *Registry) StaleMappings() time.Duration { return r.cfg.StaleMappings }

// Applied returns the point up to which this node has applied all removals of mappings, including its datapath.
// Revision 0: unknown.
func (r *Registry) Applied() cluster.Point {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := r.view.at
	switch u := r.registration.Underlay; {
	case len(r.view.held) > 0 || len(r.view.touched) > 0:
		return cluster.Point{Cluster: at.Cluster} // the readers have not received all changes yet
	case u == nil || u.Mode == ModeUnset:
		return at // no packets travel to other nodes, so the kernel has no mappings
	case r.applied.Cluster != at.Cluster || r.applied.Revision <= r.lagged:
		return cluster.Point{Cluster: at.Cluster}
	}
	return r.applied
}
