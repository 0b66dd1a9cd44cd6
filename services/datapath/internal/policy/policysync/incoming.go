// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// incoming is a snapshot that is not adopted yet. It is not written before it is complete, because a restarted service
// may have changed everything. A complete snapshot stays here, with all later messages, while the service's state is
// older than the enforced one. The lock of the Applier guards it.
type incoming struct {
	model    *model // nil: no snapshot is being received
	steps    int
	complete bool
	held     string // why a complete snapshot is not adopted
}

func (n *incoming) begin() { *n = incoming{model: newModel()} }

// drop discards the snapshot.
func (n *incoming) drop() { *n = incoming{} }

// taken returns the model of the snapshot, which is adopted now.
func (n *incoming) taken() *model {
	m := n.model
	n.drop()
	return m
}

// collecting reports whether a snapshot has begun and is not adopted.
func (n *incoming) collecting() bool { return n.model != nil }

// undecided reports whether a complete snapshot waits for decide.
func (n *incoming) undecided() bool { return n.complete && n.held == "" }

// collect adds a step to the snapshot.
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
