// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoints

import (
	"context"
	"errors"
	"log/slog"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/node/host"
)

// Auditor keeps the node's kernel state as the records specify. It compares periodically and on
// netlink events, and reports what it finds.
type Auditor struct {
	parts   lifecycle.Parts // know the expected state of endpoints and host
	host    *host.Host      // state that belongs to no endpoint
	changes *netdev.Netdev  // kernel events
	log     *slog.Logger
}

// Restore calls lifecycle.Reconciler.Restore and reports its findings.
func (a *Auditor) Restore(ctx context.Context) error { return a.parts.Reconciler.Restore(ctx, a.emit) }

// Compare compares and repairs everything, including devices, which Restore leaves out.
func (a *Auditor) Compare(ctx context.Context) error {
	return a.parts.Reconciler.Audit(ctx, true, a.emit)
}

func (a *Auditor) emit(f endpoint.Finding) error {
	a.report(f)
	return nil
}

func (a *Auditor) report(f endpoint.Finding) {
	args := []any{"subject", f.Subject, "key", f.Key, "want", f.Want, "have", f.Have}
	switch {
	case f.Err != nil:
		a.log.Error("difference not repaired", append(args, log.Err(f.Err))...)
	case f.Repaired:
		a.log.Info("difference repaired", args...)
	default:
		a.log.Warn("difference found", args...)
	}
}

// Audit runs one comparison and checks for warnings to operators.
func (a *Auditor) Audit(ctx context.Context, repair bool) error {
	err := a.parts.Reconciler.Audit(ctx, repair, a.emit)
	a.host.Changed()
	return errors.Join(err, a.host.CheckWarnings())
}

// Watch handles kernel events until ctx ends. With repair, it restores host ends and the node-wide
// state; it always keeps the host's addresses current.
func (a *Auditor) Watch(ctx context.Context, repair bool) error {
	// Restore and Compare do not check for warnings.
	if err := a.host.CheckWarnings(); err != nil {
		a.log.Error("cannot check the node for warnings", log.Err(err))
	}
	failing := map[netdev.Change]bool{}
	return a.changes.Watch(ctx, func(c netdev.Change) (again bool) {
		var err error
		if c.Node {
			a.host.Changed() // it may be a default route
		}
		switch {
		case c.Addresses:
			err = a.host.SyncAddrs()
		case c.Everything:
			// no audit compares all of the host's addresses
			err = a.host.SyncAddrs()
			if repair {
				err = errors.Join(err, a.Audit(ctx, true))
			}
		case c.Node && repair:
			again, err = a.parts.NodeState.Changed(a.emit)
		case c.Ifindex != 0 && repair:
			again, err = a.parts.HostEnds.LinkChanged(ctx, c.Ifindex, a.emit)
		case c.Addr.IsValid() && repair:
			again, err = a.parts.HostEnds.AddrChanged(ctx, c.Addr, a.emit)
		}
		if err == nil {
			delete(failing, c)
			return again
		}
		if ctx.Err() == nil && !failing[c] {
			failing[c] = true
			a.log.Error("cannot handle a change of a device or address; retrying", log.Err(err))
		}
		// The kernel reports the change only once.
		return true
	})
}
