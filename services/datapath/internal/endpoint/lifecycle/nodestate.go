// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// NodeState checks and repairs the kernel state that belongs to no endpoint: after a kernel event,
// and for an audit.
type NodeState struct {
	cfg      *Config
	registry *registry // its mutex, mu, also guards the field below

	unrepaired unrepaired // guarded by mu
	repairs    atomic.Uint64
}

// audit compares the state, and with repair repairs differences. It passes every difference to emit.
func (n *NodeState) audit(repair bool, emit func(endpoint.Finding) error) error {
	if n.cfg.Host == nil {
		return nil
	}
	diffs, err := n.cfg.Host.Check()
	if err != nil {
		return fmt.Errorf("check the host: %w", err)
	}
	return n.finish(diffs, repair, emit)
}

// finish repairs the differences of a check, if repair is set, and passes them to emit.
func (n *NodeState) finish(diffs []endpoint.Difference, repair bool, emit func(endpoint.Finding) error) error {
	left, repairErr := diffs, error(nil)
	if repair && len(diffs) > 0 {
		var err error
		repairErr = n.cfg.Host.Repair()
		if left, err = n.cfg.Host.Check(); err != nil {
			return fmt.Errorf("check the host: %w", err)
		}
	}
	n.registry.mu.Lock()
	n.unrepaired = n.unrepaired.next(left)
	n.registry.mu.Unlock()
	repaired := false
	for _, d := range diffs {
		remains := slices.Contains(left, d)
		f := endpoint.Finding{Difference: d, Repaired: !remains}
		repaired = repaired || !remains
		if remains {
			f.Err = repairErr
		}
		if err := emit(f); err != nil {
			return err
		}
	}
	if repaired {
		n.repairs.Add(1)
	}
	return nil
}

// Changed checks and repairs the state after a kernel event. Differences that several repairs in a row did not remove
// are left to the audit. again has the same meaning as in HostEnds.LinkChanged.
func (n *NodeState) Changed(emit func(endpoint.Finding) error) (again bool, err error) {
	diffs, err := n.cfg.Host.Check()
	if err != nil {
		return true, fmt.Errorf("check the host: %w", err)
	}
	n.registry.mu.Lock()
	settled := n.unrepaired.settles(diffs)
	n.registry.mu.Unlock()
	if settled {
		return false, nil
	}
	failed := false
	err = n.finish(diffs, true, func(f endpoint.Finding) error {
		failed = failed || f.Err != nil
		return emit(f)
	})
	n.registry.mu.Lock()
	defer n.registry.mu.Unlock()
	return err != nil || failed && !n.unrepaired.settles(n.unrepaired.left), err
}
