// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

var (
	faultCut       = fault.Register("datapath/delete/cut")
	faultUnpublish = fault.Register("datapath/delete/unpublish")
	faultTombstone = fault.Register("datapath/delete/tombstone")
)

// Removal contains the options of Remove.
type Removal struct {
	// UnlessInUse returns endpoint.ErrInUse if a container still uses the endpoint.
	UnlessInUse bool
	// ValidateOnly changes nothing.
	ValidateOnly bool
}

// Remove stops the owner's traffic, removes its map state and writes a tombstone; Releases and
// Reaper do the rest later. A creation of the same owner in progress is undone first. existed
// reports whether there was an endpoint; was is its last state, zero if its record cannot be read.
func (l *Lifecycle) Remove(
	ctx context.Context, o workload.Owner, how Removal,
) (was endpoint.Endpoint, existed bool, err error) {
	if err := endpoint.ValidateOwner(o); err != nil {
		return was, false, err
	}
	switch {
	case how.UnlessInUse:
		// Waiting for the owner's mutex would mean waiting for the end of the creation.
		if r, ok := l.registry.record(o); ok && r.Phase == endpoint.PhaseCreating {
			return was, true, fmt.Errorf("endpoint of %s: %w: it is being created", o, endpoint.ErrInUse)
		}
	case !how.ValidateOnly:
		l.registry.locks.Interrupt(o, endpoint.ErrDeleted)
	}
	if !how.ValidateOnly {
		leave, err := l.registry.locks.Lock(ctx, o)
		if err != nil {
			return was, false, err
		}
		defer leave()
	}
	r, ok := l.registry.record(o)
	_, bad := l.registry.unreadableOf(o)
	switch {
	case ok && r.Phase == endpoint.PhaseDeleted, !ok && !bad:
		return was, false, nil
	case ok:
		was = l.registry.asItIs(r)
	default: // the record is unreadable: derive the device from the owner
		r.Spec.Owner = o
		r.Device = l.cfg.device(r.Spec)
	}
	if how.UnlessInUse {
		if err := r.InUse(l.cfg.Links); err != nil {
			return was, true, err
		}
	}
	switch {
	case how.ValidateOnly:
		return was, true, nil
	case !ok:
		return was, true, l.disposeUnreadable(ctx, o)
	}
	return was, true, l.dispose(ctx, r)
}

// DeleteSpooled deletes the owner's endpoint as Remove does and removes the spooled deletion,
// unless another caller has removed it. It does not interrupt a creation in progress, which is
// newer. No timestamps are compared, because clocks may be set back.
func (l *Lifecycle) DeleteSpooled(ctx context.Context, o workload.Owner, s endpoint.Spooled) (existed bool, err error) {
	if err := endpoint.ValidateOwner(o); err != nil {
		return false, err
	}
	leave, err := l.registry.locks.Lock(ctx, o)
	if err != nil {
		return false, err
	}
	defer leave()
	if waits, err := s.Waits(); err != nil || !waits {
		return false, err
	}
	r, ok := l.registry.record(o)
	_, bad := l.registry.unreadableOf(o)
	switch {
	case ok && r.Phase != endpoint.PhaseDeleted:
		existed, err = true, l.dispose(ctx, r)
	case !ok && bad:
		existed, err = true, l.disposeUnreadable(ctx, o)
	}
	if err != nil {
		return existed, err
	}
	return existed, s.Done()
}

// dispose deletes what the record describes. The caller holds the owner's mutex. After an error it
// may be repeated.
func (l *Lifecycle) dispose(ctx context.Context, r endpoint.Record) error {
	o := r.Spec.Owner
	l.registry.set(r, endpoint.Disconnecting)
	slots, err := l.slotsOf(r)
	if err != nil {
		return fmt.Errorf("find the endpoint ID of %s: %w", o, err)
	}
	for _, s := range slots {
		if err := l.cfg.Maps.Cut(s); err != nil && !errors.Is(err, endpoint.ErrNotFound) {
			return fmt.Errorf("disconnect endpoint ID %d of %s: %w", s, o, err)
		}
	}
	if err := errors.Join(faultCut.Hit(ctx), l.cfg.HostPorts.Release(o)); err != nil {
		return err
	}
	for _, s := range slots {
		if err := l.cfg.Maps.Unpublish(s); err != nil && !errors.Is(err, endpoint.ErrNotFound) {
			return fmt.Errorf("unpublish endpoint ID %d of %s: %w", s, o, err)
		}
	}
	// From here on, the ID may be reused. If the tombstone cannot be written, the next attempt must
	// not touch it.
	r.Slot = 0
	l.registry.set(r, endpoint.Disconnecting)
	if err := faultUnpublish.Hit(ctx); err != nil {
		return err
	}
	l.deactivate(ctx, r)
	device, err := l.hostEnd(r)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	if err := l.markDeleted(r); err != nil {
		return fmt.Errorf("write the tombstone of %s: %w", o, err)
	}
	if device.Name != "" {
		l.Reaper.Add(device)
	}
	return faultTombstone.Hit(ctx)
}

// hostEnd returns the device of a record, or an empty name without a device. The record of a killed
// creation has no index: the index is looked up, because with the name alone the reaper would
// remove the device of the owner's next creation.
func (l *Lifecycle) hostEnd(r endpoint.Record) (endpoint.HostDevice, error) {
	d := endpoint.HostDevice{Name: r.Device.HostName, Index: r.Device.HostIndex}
	if d.Name == "" || d.Index != 0 {
		return d, nil
	}
	devices, err := l.cfg.Links.Devices()
	if err != nil {
		return endpoint.HostDevice{}, err
	}
	for _, have := range devices {
		if have.Name == d.Name {
			return have, nil
		}
	}
	return endpoint.HostDevice{}, nil
}

// deactivate removes the endpoint's state in the container that deleting the device would leave
// behind. A failure does not prevent the deletion: the remaining rules have no effect, and the next
// attachment to the namespace removes them.
func (l *Lifecycle) deactivate(ctx context.Context, r endpoint.Record) {
	if r.Phase == endpoint.PhaseReady && len(r.Device.SourceRouted) == 0 || r.Spec.Netns == "" {
		return
	}
	ns, err := l.cfg.Links.OpenNamespace(r.Spec.Netns)
	if err != nil {
		return // the namespace is gone, or the path is a file of another kind now
	}
	defer ns.Close()
	if ns.ID() != r.Namespace {
		return
	}
	if err := l.cfg.Links.Deactivate(ns, r.Device); err != nil {
		l.cfg.Log.WarnContext(ctx, "routing rules of a deleted endpoint stay in its container",
			"owner", r.Spec.Owner.String(), log.Err(err))
	}
}

// slotsOf returns the endpoint IDs of a record: its own, none if it was unpublished already, or,
// for an incomplete creation, all entries with its device or addresses.
func (l *Lifecycle) slotsOf(r endpoint.Record) ([]uint16, error) {
	if r.Phase == endpoint.PhaseReady {
		if r.Slot == 0 {
			return nil, nil
		}
		return []uint16{r.Slot}, nil
	}
	entries, err := l.cfg.Maps.Entries()
	if err != nil {
		return nil, err
	}
	var slots []uint16
	for _, e := range entries {
		if r.Owns(e) {
			slots = append(slots, e.Slot)
		}
	}
	return slots, nil
}

// Reclaim deletes the endpoints of a network whose owners are not in valid, except endpoints
// created after the call began. Endpoints of other networks, of other managers, or without a
// manager are not affected. validateOnly deletes nothing.
func (l *Lifecycle) Reclaim(
	ctx context.Context, in endpoint.Scope, valid []workload.Owner, validateOnly bool,
) (reclaimed []workload.Owner, err error) {
	if in.Manager == "" {
		return nil, &endpoint.FieldError{Field: "manager", Reason: "is not set"}
	}
	keep := map[workload.Owner]bool{}
	for _, o := range valid {
		keep[o] = true
	}
	var errs []error
	for _, r := range l.registry.live() {
		if keep[r.Spec.Owner] || r.Spec.Scope() != in {
			continue
		}
		deleted := r.Phase != endpoint.PhaseCreating
		if !validateOnly {
			deleted, err = l.deleteIfSame(ctx, r)
		}
		if err != nil {
			errs = append(errs, err)
		}
		if deleted {
			reclaimed = append(reclaimed, r.Spec.Owner)
		}
	}
	return reclaimed, errors.Join(errs...)
}

// deleteIfSame deletes the endpoint of a record, unless it has been replaced.
func (l *Lifecycle) deleteIfSame(ctx context.Context, r endpoint.Record) (bool, error) {
	leave, err := l.registry.locks.Lock(ctx, r.Spec.Owner)
	if err != nil {
		return false, err
	}
	defer leave()
	now, ok := l.registry.record(r.Spec.Owner)
	if !ok || now.Phase == endpoint.PhaseDeleted || r.Phase == endpoint.PhaseCreating ||
		now.Namespace != r.Namespace || now.Slot != r.Slot {
		return false, nil
	}
	return true, l.dispose(ctx, now)
}
