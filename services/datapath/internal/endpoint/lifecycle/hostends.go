// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// HostEnds checks and repairs the host ends of endpoints: after a kernel event, and for an audit.
type HostEnds struct {
	cfg       *Config
	registry  *registry
	lifecycle *Lifecycle

	repairs       atomic.Uint64 // of attachments
	deviceRepairs atomic.Uint64 // of other properties
}

// LinkChanged checks and repairs the host end with an interface index after a kernel event. It
// waits only briefly for another call of the same owner. again asks the caller to call again later:
// because the owner was busy, or because a check or repair failed, after which the kernel may send
// no further event.
func (h *HostEnds) LinkChanged(
	ctx context.Context, ifindex uint32, emit func(endpoint.Finding) error,
) (again bool, err error) {
	o, ok := h.registry.ownerOfLink(ifindex)
	if !ok {
		return false, nil
	}
	return h.changed(ctx, o, emit)
}

// AddrChanged is like LinkChanged, but for the endpoint that has an address, after an event about a route to the
// address.
func (h *HostEnds) AddrChanged(
	ctx context.Context, a netip.Addr, emit func(endpoint.Finding) error,
) (again bool, err error) {
	o, ok := h.registry.ownerOfAddr(a)
	if !ok {
		return false, nil
	}
	return h.changed(ctx, o, emit)
}

// eventPatience is how long an event waits for its owner's mutex. It is longer than one check. It is short, because the
// events of all other endpoints wait meanwhile, and checks of one owner may follow each other without end.
const eventPatience = 250 * time.Millisecond

func (h *HostEnds) changed(
	ctx context.Context, o workload.Owner, emit func(endpoint.Finding) error,
) (again bool, err error) {
	// A creation or deletion in progress sets the device up or removes it itself.
	steady := func() (endpoint.Record, bool) {
		r, ok := h.registry.record(o)
		return r, ok && r.Phase == endpoint.PhaseReady && !h.registry.disconnecting(o)
	}
	if _, ok := steady(); !ok {
		return false, nil
	}
	leave, ok := h.registry.locks.LockWithin(ctx, o, eventPatience)
	if !ok {
		return true, nil
	}
	defer leave()
	r, ok := steady()
	if !ok {
		return false, nil
	}
	diffs, err := h.cfg.Links.CheckHost(r.Device)
	if err != nil {
		return true, fmt.Errorf("check device %s of %s: %w", r.Device.HostName, o, err)
	}
	h.registry.mu.Lock()
	settled := h.registry.unrepaired[o].settles(diffs)
	h.registry.mu.Unlock()
	if settled {
		return false, nil // no differences, or only differences left to the audit
	}
	if len(diffs) > 0 && h.lifecycle.orphaned(r) {
		h.cfg.Log.Info("endpoint removed, its network namespace is gone", "owner", o.String())
		return false, h.lifecycle.dispose(ctx, r)
	}
	left, fixErr := []endpoint.Difference(nil), error(nil)
	if len(diffs) > 0 {
		left, fixErr = h.repair(r, diffs)
	}
	h.registry.setUnrepaired(o, left)
	if fixErr != nil {
		// A failed repair may have changed nothing; then no event follows.
		h.registry.mu.Lock()
		again = !h.registry.unrepaired[o].settles(left)
		h.registry.mu.Unlock()
	}
	for _, d := range diffs {
		if d.OfAttachment() {
			continue // countAttachment has logged it
		}
		f := endpoint.Finding{Difference: d, Err: outcome(d, left, fixErr)}
		f.Repaired = f.Err == nil
		if err := emit(f); err != nil {
			return again, err
		}
	}
	return again, nil
}

// sound checks the host ends of all records at once, which is much cheaper than one by one,
// and returns those without differences. A concurrent call may have changed the others: they are
// checked again while the owner's mutex is held.
func (h *HostEnds) sound(live []endpoint.Record) (map[endpoint.HostDevice]bool, error) {
	var devices []endpoint.Device
	for _, r := range live {
		if r.Phase == endpoint.PhaseReady && r.BootID == h.cfg.BootID {
			devices = append(devices, r.Device)
		}
	}
	diffs, err := h.cfg.Links.CheckHosts(devices)
	if err != nil {
		return nil, fmt.Errorf("check devices: %w", err)
	}
	sound := make(map[endpoint.HostDevice]bool, len(devices))
	for i, d := range devices {
		sound[endpoint.HostDevice{Name: d.HostName, Index: d.HostIndex}] = len(diffs[i]) == 0
	}
	return sound, nil
}

// audit compares the host end of a record, unless it is sound. The caller holds the owner's
// mutex.
func (h *HostEnds) audit(r endpoint.Record, sound, repair bool, report reporter) error {
	o := r.Spec.Owner
	var diffs []endpoint.Difference
	if !sound {
		var err error
		if diffs, err = h.cfg.Links.CheckHost(r.Device); err != nil {
			return fmt.Errorf("check device %s of %s: %w", r.Device.HostName, o, err)
		}
	}
	left, fixErr := diffs, error(nil)
	if len(diffs) > 0 && repair {
		left, fixErr = h.repair(r, diffs)
	}
	h.registry.setUnrepaired(o, left)
	for _, d := range diffs {
		if err := report(d, func() error { return outcome(d, left, fixErr) }); err != nil {
			return err
		}
	}
	return nil
}

// repair repairs the host end of a record and returns the differences that remain.
func (h *HostEnds) repair(r endpoint.Record, diffs []endpoint.Difference) (left []endpoint.Difference, err error) {
	if !slices.ContainsFunc(diffs, endpoint.Difference.Repairable) {
		return diffs, nil
	}
	err = h.cfg.Links.RepairHost(r.Device)
	left, cerr := h.cfg.Links.CheckHost(r.Device)
	if cerr != nil {
		left, err = diffs, errors.Join(err, cerr)
	}
	h.count(r.Spec.Owner, diffs, left, err)
	return left, err
}

// count counts the repairs of an endpoint's host end. A repaired attachment is logged as a warning,
// because packets bypassed a program.
func (h *HostEnds) count(o workload.Owner, diffs, left []endpoint.Difference, err error) {
	attachment := slices.IndexFunc(diffs, endpoint.Difference.OfAttachment)
	if attachment >= 0 {
		h.countAttachment(o, diffs[attachment], outcome(diffs[attachment], left, err))
	}
	for _, d := range diffs {
		if !d.OfAttachment() && !slices.Contains(left, d) {
			h.deviceRepairs.Add(1)
			return
		}
	}
}

func (h *HostEnds) countAttachment(o workload.Owner, d endpoint.Difference, err error) {
	if e, gone := h.registry.Get(o); gone == nil && h.cfg.Repaired != nil {
		h.cfg.Repaired(e, d, err)
	}
	if err != nil {
		h.cfg.Log.Error("cannot repair an attachment", "owner", o.String(), "subject", d.Subject, "device", d.Key,
			log.Err(err))
		return
	}
	h.repairs.Add(1)
	h.cfg.Log.Warn("attachment repaired",
		"owner", o.String(), "subject", d.Subject, "device", d.Key, "want", d.Want, "have", d.Have)
}
