// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Restore reads the records and reconciles the maps with them: it adopts matching map entries,
// replaces different ones, and removes endpoints whose container is gone or whose creation or
// deletion was not completed. It removes nothing unknown before all records were compared. Restore
// is called once, before any other method, and passes every finding to emit.
//
// Afterwards the node serves calls. Endpoints stay in state Restoring until an Audit with repair
// has compared their devices, too. Their traffic continues meanwhile, as it did before the restart.
func (c *Core) Restore(ctx context.Context, emit func(endpoint.Finding) error) error {
	if err := c.load(); err != nil {
		return err
	}
	if err := c.nodeState.audit(true, emit); err != nil {
		return err
	}
	// what a fresh node lacks was created, not repaired
	c.nodeState.repairs.Store(0)
	entries, devices, err := c.listings()
	if err != nil {
		return err
	}
	a, report := comparison{entries: entries, devices: index(devices)}, reporterTo(emit, true)
	ofOtherBoot := func(r endpoint.Record) bool { return r.BootID != c.cfg.BootID }
	c.cfg.HostPorts.Restore(slices.DeleteFunc(c.registry.live(), ofOtherBoot))
	if err := c.auditRecords(ctx, c.registry.live(), a, true, report); err != nil {
		return err
	}
	if err := c.auditStrays(entries, devices, true, report); err != nil {
		return err
	}
	c.cfg.HostPorts.LeadAll(ctx)
	c.registry.hub.Loaded()
	if len(c.registry.tombstones()) > 0 {
		wake(c.allocations.wake)
	}
	return nil
}

// Inspect does what Restore and Audit do, but only reports the differences.
func (c *Core) Inspect(ctx context.Context) (findings []endpoint.Finding, err error) {
	if err := c.load(); err != nil {
		return nil, err
	}
	err = c.Audit(ctx, false, func(f endpoint.Finding) error { findings = append(findings, f); return nil })
	return findings, err
}

func (c *Core) load() error {
	records, bad, err := c.cfg.Records.Load()
	if err != nil {
		return fmt.Errorf("read the records of endpoints: %w", err)
	}
	c.registry.mu.Lock()
	for _, u := range bad {
		c.log.Error("record of an endpoint cannot be read; its endpoint stays without traffic", log.Err(u.Err))
		c.registry.unreadable[u.File] = u
	}
	c.registry.mu.Unlock()
	for _, r := range records {
		c.registry.set(r, endpoint.Restoring)
	}
	return nil
}

// Audit compares records, maps and devices, and with repair repairs differences. It passes every
// finding to emit and ends early with emit's error. Check and AuditContainers compare the interior
// of containers.
func (c *Core) Audit(ctx context.Context, repair bool, emit func(endpoint.Finding) error) error {
	report := reporterTo(emit, repair)
	if err := c.nodeState.audit(repair, emit); err != nil {
		return err
	}
	if err := c.reread(ctx); err != nil {
		return err
	}
	entries, devices, err := c.listings()
	if err != nil {
		return err
	}
	live := c.registry.live()
	sound, err := c.hostEnds.sound(live)
	if err != nil {
		return err
	}
	a := comparison{entries: entries, devices: index(devices), hostEnds: true, sound: sound}
	if err := c.auditRecords(ctx, live, a, repair, report); err != nil {
		return err
	}
	if err := c.auditStrays(entries, devices, repair, report); err != nil {
		return err
	}
	return c.auditTables(repair, emit)
}

// comparison is the kernel state that an audit compares records with. It may be older than a
// record.
type comparison struct {
	entries []endpoint.Entry
	devices map[endpoint.HostDevice]bool
	// Whether host ends are compared, too, and the host ends known to be as expected.
	hostEnds bool
	sound    map[endpoint.HostDevice]bool
}

// listings lists the published endpoints and the devices of endpoints in the kernel.
func (c *Core) listings() (entries []endpoint.Entry, devices []endpoint.HostDevice, err error) {
	if entries, err = c.cfg.Maps.Entries(); err != nil {
		return nil, nil, fmt.Errorf("list published endpoints: %w", err)
	}
	if devices, err = c.cfg.Links.Devices(); err != nil {
		return nil, nil, fmt.Errorf("list devices: %w", err)
	}
	return entries, devices, nil
}

func index(devices []endpoint.HostDevice) map[endpoint.HostDevice]bool {
	m := make(map[endpoint.HostDevice]bool, len(devices))
	for _, d := range devices {
		m[d] = true
	}
	return m
}

// AuditContainers compares the interior of every container with its record, and with repair repairs
// it. It only runs on request: a container that may change its own routes has its reasons.
func (c *Core) AuditContainers(ctx context.Context, repair bool, emit func(endpoint.Finding) error) error {
	for _, r := range c.registry.live() {
		diffs, left, fixErr, err := c.auditContainer(ctx, r, repair)
		if err != nil {
			return err
		}
		for _, d := range diffs {
			d.Key = r.Spec.Owner.String() + ": " + d.Key
			f := endpoint.Finding{Difference: d}
			if repair {
				f.Err = outcome(d, left, fixErr)
				f.Repaired = f.Err == nil
			}
			if err := emit(f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Core) auditContainer(ctx context.Context, r endpoint.Record, repair bool) (
	diffs, left []endpoint.Difference, fixErr, err error,
) {
	o := r.Spec.Owner
	leave, err := c.registry.locks.Lock(ctx, o)
	if err != nil {
		return nil, nil, nil, err
	}
	defer leave()
	r, ok := c.registry.record(o)
	if !ok || r.Phase != endpoint.PhaseReady || c.registry.disconnecting(o) {
		return nil, nil, nil, nil
	}
	ns, err := c.cfg.Links.OpenNamespace(r.Spec.Netns)
	if err != nil {
		// A missing path says nothing about the container, which may still run.
		return nil, nil, nil, ignore(err, endpoint.ErrNamespaceGone, endpoint.ErrNamespace)
	}
	defer ns.Close()
	if ns.ID() != r.Namespace {
		return nil, nil, nil, nil
	}
	if diffs, err = c.cfg.Links.CheckContainer(ns, r.Device); err != nil {
		return nil, nil, nil, fmt.Errorf("check the container of %s: %w", o, err)
	}
	if len(diffs) == 0 || !repair {
		return diffs, diffs, nil, nil
	}
	fixErr = c.cfg.Links.RepairContainer(ns, r.Device)
	if left, err = c.cfg.Links.CheckContainer(ns, r.Device); err != nil {
		return nil, nil, nil, fmt.Errorf("check the container of %s: %w", o, err)
	}
	for i := range left {
		left[i].Key = o.String() + ": " + left[i].Key
	}
	return diffs, left, fixErr, nil
}

func (c *Core) auditTables(repair bool, emit func(endpoint.Finding) error) error {
	if c.cfg.Tables == nil {
		return nil
	}
	findings, err := c.cfg.Tables(repair)
	for _, f := range findings {
		if err := emit(f); err != nil {
			return err
		}
	}
	if err != nil {
		return fmt.Errorf("compare policy tables: %w", err)
	}
	return nil
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

func (c *Core) auditRecords(
	ctx context.Context, live []endpoint.Record, a comparison, repair bool, report reporter,
) error {
	for _, r := range live {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := c.auditRecord(ctx, r, a, repair, report); err != nil {
			return err
		}
	}
	return nil
}

func (c *Core) auditRecord(
	ctx context.Context, r endpoint.Record, a comparison, repair bool, report reporter,
) error {
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
		return report(d, func() error { return c.markDeleted(r) })
	case r.Phase == endpoint.PhaseCreating:
		return report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "incomplete creation"},
			func() error { return c.dispose(ctx, r) })
	case c.registry.disconnecting(o):
		return report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "incomplete deletion"},
			func() error { return c.dispose(ctx, now) })
	case !a.devices[r.HostDevice()] && c.orphaned(r):
		return report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "its network namespace is gone"},
			func() error { return c.dispose(ctx, r) })
	}

	entries := a.entries
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
		if err := report(d, complete); err != nil {
			return err
		}
	default:
		if err := report(d, func() error { return c.republish(ctx, &r, entries) }); err != nil {
			return err
		}
	}
	if !a.hostEnds {
		return nil
	}
	if err := c.hostEnds.audit(r, a.sound[r.HostDevice()], repair, report); err != nil {
		return err
	}
	if repair {
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
func (c *Core) republish(ctx context.Context, r *endpoint.Record, entries []endpoint.Entry) error {
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
func (c *Core) strays(entries []endpoint.Entry, devices []endpoint.HostDevice) (
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
		if !names[d.Name] && !c.Reaper.Waits(d) {
			links = append(links, d)
		}
	}
	return slots, links
}

// auditStrays handles map entries and devices without a record. The listings are older than the
// records, so an endpoint deleted in between looks like a stray: strays are confirmed by a second
// listing.
func (c *Core) auditStrays(
	entries []endpoint.Entry, devices []endpoint.HostDevice, repair bool, report reporter,
) error {
	slots, links := c.strays(entries, devices)
	if len(slots)+len(links) == 0 && !c.registry.anyUnreadable() {
		return nil
	}
	entries, devices, err := c.listings()
	if err != nil {
		return err
	}
	slots, links = c.strays(entries, devices)
	closedSlots, closedLinks := c.closed(slots, links)
	if err := c.auditClosed(closedSlots, closedLinks, report); err != nil {
		return err
	}
	slots = slices.DeleteFunc(slots, func(e endpoint.Entry) bool {
		return slices.ContainsFunc(closedSlots, func(k endpoint.Entry) bool { return k.Slot == e.Slot })
	})
	links = slices.DeleteFunc(links, func(d endpoint.HostDevice) bool { return slices.Contains(closedLinks, d) })
	for _, e := range slots {
		d := endpoint.Difference{Subject: "sl_ep", Key: strconv.Itoa(int(e.Slot)), Have: e.String()}
		if err := report(d, func() error { return c.unpublishStray(e) }); err != nil {
			return err
		}
	}
	if len(links) > 0 && repair {
		err = c.cfg.Links.Remove(links)
	}
	for _, d := range links {
		stray := endpoint.Difference{Subject: "device", Key: d.Name, Have: fmt.Sprintf("index %d", d.Index)}
		if err := report(stray, func() error { return err }); err != nil {
			return err
		}
	}
	return nil
}

// unpublishStray unpublishes e, unless the ID was reused since the listing.
func (c *Core) unpublishStray(e endpoint.Entry) error {
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

// Expected are the values that a caller of Check expects; zero fields are not compared.
type Expected struct {
	Netns string
	Addrs []netip.Addr
}

// Check compares one endpoint, including the interior of its container, with the kernel and with
// the caller's expectation.
func (c *Core) Check(ctx context.Context, o workload.Owner, b Expected) ([]endpoint.Difference, error) {
	leave, err := c.registry.locks.Lock(ctx, o)
	if err != nil {
		return nil, err
	}
	defer leave()
	r, ok := c.registry.record(o)
	if !ok || r.Phase != endpoint.PhaseReady {
		return nil, fmt.Errorf("%s: %w", o, endpoint.ErrNotFound)
	}
	var diffs []endpoint.Difference
	if len(b.Addrs) > 0 {
		expected := slices.Clone(b.Addrs)
		slices.SortFunc(expected, netip.Addr.Compare)
		if !slices.Equal(expected, r.Spec.Addrs) {
			diffs = append(diffs, endpoint.Difference{
				Subject: "addresses", Key: o.String(), Want: fmt.Sprint(expected), Have: fmt.Sprint(r.Spec.Addrs),
			})
		}
	}
	path := r.Spec.Netns
	if b.Netns != "" {
		path = b.Netns
	}
	entries, err := c.cfg.Maps.Entries()
	if err != nil {
		return nil, fmt.Errorf("list published endpoints: %w", err)
	}
	if d, differs := r.DiffersFrom(entries); differs {
		diffs = append(diffs, d)
	}
	host, err := c.cfg.Links.CheckHost(r.Device)
	if err != nil {
		return nil, fmt.Errorf("check device %s of %s: %w", r.Device.HostName, o, err)
	}
	diffs = append(diffs, host...)

	ns, err := c.cfg.Links.OpenNamespace(path)
	if err != nil {
		return append(diffs, endpoint.Difference{
			Subject: "network namespace", Key: path, Want: "the one of the endpoint", Have: err.Error(),
		}), nil
	}
	defer ns.Close()
	if ns.ID() != r.Namespace {
		return append(diffs, endpoint.Difference{
			Subject: "network namespace", Key: path,
			Want: fmt.Sprintf("inode %d", r.Namespace.Inode), Have: fmt.Sprintf("inode %d", ns.ID().Inode),
		}), nil
	}
	inside, err := c.cfg.Links.CheckContainer(ns, r.Device)
	if err != nil {
		return nil, fmt.Errorf("check the container of %s: %w", o, err)
	}
	return append(diffs, inside...), nil
}
