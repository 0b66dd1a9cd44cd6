// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// incoming is a snapshot that is not taken over. Nothing of it is written before it is
// complete, because a service that began anew may have changed everything at once. A complete
// one stays while the service is behind what was enforced; what follows belongs to it for as
// long. The lock of the Applier guards it.
type incoming struct {
	model    *model // nil: no snapshot is on its way
	steps    int
	complete bool
	held     string // why a complete snapshot is not taken over
}

// begin begins a snapshot.
func (n *incoming) begin() { *n = incoming{model: newModel()} }

// drop forgets a snapshot that was not taken over.
func (n *incoming) drop() { *n = incoming{} }

// taken returns the model, which is taken over now.
func (n *incoming) taken() *model {
	m := n.model
	n.drop()
	return m
}

// collecting says whether a snapshot has begun and is not taken over.
func (n *incoming) collecting() bool { return n.model != nil }

// undecided says whether a complete snapshot waits for the decision to take it over.
func (n *incoming) undecided() bool { return n.complete && n.held == "" }

// collect remembers a step.
func (n *incoming) collect(
	st policytable.Step, seq uint64, number func(policytable.ClassKey) (nodetable.IdentityClass, error),
) error {
	if n.steps++; n.steps > maxSnapshot && !n.complete {
		return policytable.Invalid("more than %d steps before snapshot_complete", maxSnapshot)
	}
	if err := n.model.take(st, seq, number); err != nil {
		return err
	}
	if _, ok := st.(policytable.SnapshotComplete); ok {
		if n.complete {
			return policytable.Invalid("snapshot_complete in the middle of a stream")
		}
		n.complete = true
	}
	return nil
}
