// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package places leads from what a record has to its owner, so that no call about one
// endpoint looks at the records of all. It keeps no record and has no lock.
package places

import (
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Places are the owners of slots and namespaces, and those of tombstones, which have
// neither.
type Places struct {
	Slots      map[uint16]workload.Owner
	Namespaces map[endpoint.NamespaceID]map[workload.Owner]bool
	Tombstones map[workload.Owner]bool
}

// New knows no record.
func New() Places {
	return Places{
		Slots: map[uint16]workload.Owner{}, Namespaces: map[endpoint.NamespaceID]map[workload.Owner]bool{},
		Tombstones: map[workload.Owner]bool{},
	}
}

// Add learns a record.
func (p Places) Add(r endpoint.Record) {
	o := r.Spec.Owner
	if r.Phase == endpoint.PhaseDeleted {
		p.Tombstones[o] = true
		return
	}
	if r.Slot != 0 {
		p.Slots[r.Slot] = o
	}
	if p.Namespaces[r.Namespace] == nil {
		p.Namespaces[r.Namespace] = map[workload.Owner]bool{}
	}
	p.Namespaces[r.Namespace][o] = true
}

// Remove forgets it.
func (p Places) Remove(r endpoint.Record) {
	o := r.Spec.Owner
	delete(p.Tombstones, o)
	if p.Slots[r.Slot] == o {
		delete(p.Slots, r.Slot)
	}
	delete(p.Namespaces[r.Namespace], o)
	if len(p.Namespaces[r.Namespace]) == 0 {
		delete(p.Namespaces, r.Namespace)
	}
}
