// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// comparison is one comparison of all records with the kernel. Its listings may be older than a
// record.
type comparison struct {
	*Reconciler
	repair  bool
	report  reporter
	entries []endpoint.Entry
	devices []endpoint.HostDevice
	present map[endpoint.HostDevice]bool // the same devices
	// Host ends known to be as expected; nil: host ends are not compared.
	sound map[endpoint.HostDevice]bool
}

// compare begins a comparison, which passes every difference to emit.
func (rc *Reconciler) compare(repair bool, emit func(endpoint.Finding) error) (*comparison, error) {
	entries, devices, err := rc.listings()
	if err != nil {
		return nil, err
	}
	present := make(map[endpoint.HostDevice]bool, len(devices))
	for _, d := range devices {
		present[d] = true
	}
	return &comparison{
		Reconciler: rc, repair: repair, report: reporterTo(emit, repair),
		entries: entries, devices: devices, present: present,
	}, nil
}

// listings lists the published endpoints and the devices of endpoints in the kernel.
func (rc *Reconciler) listings() (entries []endpoint.Entry, devices []endpoint.HostDevice, err error) {
	if entries, err = rc.cfg.Maps.Entries(); err != nil {
		return nil, nil, fmt.Errorf("list published endpoints: %w", err)
	}
	if devices, err = rc.cfg.Links.Devices(); err != nil {
		return nil, nil, fmt.Errorf("list devices: %w", err)
	}
	return entries, devices, nil
}

type reporter func(endpoint.Difference, func() error) error

func reporterTo(emit func(endpoint.Finding) error, repair bool) reporter {
	return func(d endpoint.Difference, fix func() error) error {
		f := endpoint.Finding{Difference: d}
		if repair && fix != nil {
			f.Err = fix()
			f.Repaired = f.Err == nil
		}
		return emit(f)
	}
}

func (c *comparison) auditRecords(ctx context.Context, live []endpoint.Record) error {
	for _, r := range live {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := c.auditRecord(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

func (c *comparison) auditRecord(ctx context.Context, r endpoint.Record) error {
	o := r.Spec.Owner
	leave, err := c.registry.locks.Lock(ctx, o)
	if err != nil {
		return err
	}
	defer leave()
	now, ok := c.registry.record(o)
	if !ok || now.Phase == endpoint.PhaseDeleted || now.Phase != r.Phase ||
		now.Namespace != r.Namespace || now.Slot != r.Slot {
		return nil // it changed since the listing; the call that changed it handles it
	}
	r = now // its identity may have changed
	switch {
	case r.BootID != c.cfg.BootID:
		d := endpoint.Difference{Subject: "record", Key: o.String(), Want: "boot " + c.cfg.BootID, Have: "boot " + r.BootID}
		return c.report(d, func() error { return c.lifecycle.markDeleted(r) })
	case r.Phase == endpoint.PhaseCreating:
		return c.report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "incomplete creation"},
			func() error { return c.lifecycle.dispose(ctx, r) })
	case c.registry.disconnecting(o):
		return c.report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "incomplete deletion"},
			func() error { return c.lifecycle.dispose(ctx, now) })
	case !c.present[r.HostDevice()] && c.lifecycle.orphaned(r):
		return c.report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "its network namespace is gone"},
			func() error { return c.lifecycle.dispose(ctx, r) })
	}

	entries := c.entries
	if _, differs := r.DiffersFrom(entries); differs {
		// the listing may be older than the endpoint: list again while the owner's mutex is held
		if entries, err = c.cfg.Maps.Entries(); err != nil {
			return fmt.Errorf("list published endpoints: %w", err)
		}
	}
	d, differs := r.DiffersFrom(entries)
	switch identityOnly := r.DiffersInIdentity(entries); {
	case !differs, identityOnly && c.registry.differs(o): // the Relabeller will handle it
	case identityOnly:
		// The endpoint's traffic is evaluated as the old identity, and the tables of the new one
		// may be missing.
		complete := func() error { c.registry.setDiffers(o, true); wake(c.relabeller.wake); return nil }
		if err := c.report(d, complete); err != nil {
			return err
		}
	default:
		if err := c.report(d, func() error { return c.republish(ctx, &r, entries) }); err != nil {
			return err
		}
	}
	if c.sound == nil {
		return nil
	}
	if err := c.hostEnds.audit(r, c.sound[r.HostDevice()], c.repair, c.report); err != nil {
		return err
	}
	if c.repair {
		c.registry.mu.Lock()
		restoring := c.registry.states[o] == endpoint.Restoring
		c.registry.mu.Unlock()
		if restoring {
			c.registry.set(r, endpoint.Ready)
		}
	}
	return nil
}

// republish replaces the map entries of the record. Between the two steps the endpoint has no
// traffic; its entries were wrong before.
func (c *comparison) republish(ctx context.Context, r *endpoint.Record, entries []endpoint.Entry) error {
	for _, e := range entries {
		if r.Owns(e) {
			if err := c.cfg.Maps.Unpublish(e.Slot); err != nil && !errors.Is(err, endpoint.ErrNotFound) {
				return err
			}
		}
	}
	// If publishing fails, the old ID may belong to another endpoint.
	r.Slot = 0
	c.registry.set(*r, endpoint.Restoring)
	slot, err := c.cfg.Maps.Publish(ctx, r.Entry())
	if err != nil {
		return err
	}
	r.Slot = slot
	if err := c.cfg.Records.Save(*r); err != nil {
		return err
	}
	c.registry.set(*r, endpoint.Ready)
	return nil
}

// strays returns the map entries and devices that belong to no record.
func (c *comparison) strays(entries []endpoint.Entry, devices []endpoint.HostDevice) (
	slots []endpoint.Entry, links []endpoint.HostDevice,
) {
	byAddr, names := map[endpoint.MAC][]endpoint.Record{}, map[string]bool{}
	for _, r := range c.registry.live() {
		byAddr[r.Device.HostMAC] = append(byAddr[r.Device.HostMAC], r)
		names[r.Device.HostName] = true
	}
	for _, e := range entries {
		if !slices.ContainsFunc(byAddr[e.HostMAC], func(r endpoint.Record) bool { return r.Owns(e) }) {
			slots = append(slots, e)
		}
	}
	for _, d := range devices {
		if !names[d.Name] && !c.lifecycle.Reaper.Waits(d) {
			links = append(links, d)
		}
	}
	return slots, links
}

// auditStrays handles map entries and devices without a record. The listings are older than the
// records, so an endpoint deleted in between looks like a stray: strays are confirmed by a second
// listing.
func (c *comparison) auditStrays() error {
	slots, links := c.strays(c.entries, c.devices)
	if len(slots)+len(links) == 0 && !c.registry.anyUnreadable() {
		return nil
	}
	entries, devices, err := c.listings()
	if err != nil {
		return err
	}
	slots, links = c.strays(entries, devices)
	closedSlots, closedLinks := c.closed(slots, links)
	if err := c.auditClosed(closedSlots, closedLinks); err != nil {
		return err
	}
	slots = slices.DeleteFunc(slots, func(e endpoint.Entry) bool {
		return slices.ContainsFunc(closedSlots, func(k endpoint.Entry) bool { return k.Slot == e.Slot })
	})
	links = slices.DeleteFunc(links, func(d endpoint.HostDevice) bool { return slices.Contains(closedLinks, d) })
	for _, e := range slots {
		d := endpoint.Difference{Subject: "sl_ep", Key: strconv.Itoa(int(e.Slot)), Have: e.String()}
		if err := c.report(d, func() error { return c.unpublishStray(e) }); err != nil {
			return err
		}
	}
	if len(links) > 0 && c.repair {
		err = c.cfg.Links.Remove(links)
	}
	for _, d := range links {
		stray := endpoint.Difference{Subject: "device", Key: d.Name, Have: fmt.Sprintf("index %d", d.Index)}
		if err := c.report(stray, func() error { return err }); err != nil {
			return err
		}
	}
	return nil
}

// unpublishStray unpublishes e, unless the ID was reused since the listing.
func (c *comparison) unpublishStray(e endpoint.Entry) error {
	entries, err := c.cfg.Maps.Entries()
	if err != nil {
		return err
	}
	for _, now := range entries {
		if now.Slot == e.Slot && now.Epoch == e.Epoch && now.Ifindex == e.Ifindex {
			return ignore(c.cfg.Maps.Unpublish(e.Slot), endpoint.ErrNotFound)
		}
	}
	return nil
}
