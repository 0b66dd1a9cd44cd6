// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// places lead from what a record has to its owner, so that no call about one
// endpoint looks at the records of all.
type places struct {
	slots      map[uint16]workload.Owner
	namespaces map[endpoint.NamespaceID]map[workload.Owner]bool
	tombstones map[workload.Owner]bool
}

func newPlaces() places {
	return places{
		slots: map[uint16]workload.Owner{}, namespaces: map[endpoint.NamespaceID]map[workload.Owner]bool{},
		tombstones: map[workload.Owner]bool{},
	}
}

func (p places) add(r endpoint.Record) {
	o := r.Spec.Owner
	if r.Phase == endpoint.PhaseDeleted {
		p.tombstones[o] = true
		return
	}
	if r.Slot != 0 {
		p.slots[r.Slot] = o
	}
	if p.namespaces[r.Namespace] == nil {
		p.namespaces[r.Namespace] = map[workload.Owner]bool{}
	}
	p.namespaces[r.Namespace][o] = true
}

func (p places) remove(r endpoint.Record) {
	o := r.Spec.Owner
	delete(p.tombstones, o)
	if p.slots[r.Slot] == o {
		delete(p.slots, r.Slot)
	}
	delete(p.namespaces[r.Namespace], o)
	if len(p.namespaces[r.Namespace]) == 0 {
		delete(p.namespaces, r.Namespace)
	}
}
