// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"slices"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// edit is a change of objects.
type edit struct {
	Outcome
	puts  []*object // new or changed
	gone  []service.ObjectKey
	named []service.ObjectKey // objects that the caller named, even if they do not change
	dry   bool                // only validated
	// completes is set if the manager or the source has now sent everything.
	completes bool
	listed    []string // sources that are recorded as listed in this state
	zone      *string  // of the node; nil: unchanged
	levels    *levels  // of the shares; nil: unchanged
	// waits contains objects of an API server in gone that no longer fit into their share, so that they wait.
	waits []waiting
	// redelivered is set if the source delivers the change again until it is stored. If the change cannot be stored,
	// it takes effect nevertheless.
	redelivered bool
	unsaved     record.Change // earlier changes that are not stored yet

	content bool // the content of objects changes, and with it the revision
	touched map[service.Name]struct{}
	// after holds the services of puts and gone in their future state; nil once the edit is applied.
	after map[service.Name]*joined
}

// writes reports whether the edit must be written to the journal.
func (e *edit) writes() bool {
	return len(e.puts)+len(e.gone)+len(e.listed) > 0 || e.zone != nil || e.levels != nil
}

func (e *edit) record() record.Change {
	c := record.Change{State: record.StateRecords(e.listed, e.zone)}
	if e.content {
		c.Revision = e.Revision + 1
	}
	c.Puts = make([]record.Record, len(e.puts))
	for i, x := range e.puts {
		c.Puts[i] = x.record()
	}
	for _, k := range e.gone {
		c.Deletes = append(c.Deletes, record.Key(k))
	}
	c.Revision = max(c.Revision, e.unsaved.Revision)
	c.Puts, c.Deletes = append(c.Puts, e.unsaved.Puts...), append(c.Deletes, e.unsaved.Deletes...)
	return c
}

// last returns the last object of a kind that an edit adds, for a message.
func last(e *edit, kind service.Kind) service.ObjectKey {
	for _, x := range slices.Backward(e.puts) {
		if k := x.key(); k.Kind == kind {
			return k
		}
	}
	return service.ObjectKey{}
}
