// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// wayOut tells an operator how to handle an unreadable record.
const wayOut = "repair or remove the file, or delete the container; " +
	"until then its endpoint has no traffic and keeps its addresses and its endpoint ID"

// unreadableOf returns the unreadable file with the owner's name.
func (x *Index) unreadableOf(o workload.Owner) (endpoint.Unreadable, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, u := range x.unreadable {
		if u.Key == o.Key() {
			return u, true
		}
	}
	return endpoint.Unreadable{}, false
}

// mayBeUnreadable reports whether an unreadable file may be the owner's record: its name is the
// owner's, or names no owner.
func (x *Index) mayBeUnreadable(o workload.Owner) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, u := range x.unreadable {
		if u.Key == o.Key() || u.Key == "" {
			return true
		}
	}
	return false
}

func (x *Index) anyUnreadable() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return len(x.unreadable) > 0
}

// resolved removes the owner's unreadable files from memory.
func (x *Index) resolved(o workload.Owner) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for file, u := range x.unreadable {
		if u.Key == o.Key() {
			delete(x.unreadable, file)
		}
	}
}

// reread checks whether unreadable files have become readable or are gone.
func (rc *Reconciler) reread(ctx context.Context) error {
	if !rc.registry.anyUnreadable() {
		return nil
	}
	records, bad, err := rc.cfg.Records.Load()
	if err != nil {
		return fmt.Errorf("read the records of endpoints: %w", err)
	}
	for _, r := range records {
		if _, known := rc.registry.record(r.Spec.Owner); !known {
			if err := rc.adopt(ctx, r.Spec.Owner); err != nil {
				return err
			}
		}
	}
	rc.registry.mu.Lock()
	defer rc.registry.mu.Unlock()
	for file := range rc.registry.unreadable {
		i := slices.IndexFunc(bad, func(u endpoint.Unreadable) bool { return u.File == file })
		if i < 0 {
			rc.cfg.Log.Info("record of an endpoint is readable again, or removed", log.KeyPath, file)
			delete(rc.registry.unreadable, file)
			continue
		}
		rc.registry.unreadable[file] = bad[i]
	}
	return nil
}

// adopt adopts a record that has become readable. The owner's creation or deletion may have written
// or removed it since it was listed.
func (rc *Reconciler) adopt(ctx context.Context, o workload.Owner) error {
	leave, err := rc.registry.locks.Lock(ctx, o)
	if err != nil {
		return err
	}
	defer leave()
	if _, known := rc.registry.record(o); known {
		return nil
	}
	records, _, err := rc.cfg.Records.Load()
	if err != nil {
		return fmt.Errorf("read the records of endpoints: %w", err)
	}
	for _, r := range records {
		if r.Spec.Owner != o {
			continue
		}
		rc.registry.set(r, endpoint.Restoring)
		if r.Phase == endpoint.PhaseDeleted {
			wake(rc.allocations.wake)
		}
	}
	rc.registry.resolved(o)
	return nil
}

// disposeUnreadable deletes the endpoint of an owner with an unreadable record, with a record
// derived from the owner. The caller holds the owner's mutex.
func (l *Lifecycle) disposeUnreadable(ctx context.Context, o workload.Owner) error {
	r := endpoint.Record{Phase: endpoint.PhaseReady, BootID: l.cfg.BootID, Spec: endpoint.Spec{Owner: o}}
	r.Device = l.cfg.device(r.Spec)
	devices, err := l.cfg.Links.Devices()
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, d := range devices {
		if d.Name == r.Device.HostName {
			r.Device.HostIndex = d.Index
		}
	}
	entries, err := l.cfg.Maps.Entries()
	if err != nil {
		return fmt.Errorf("list published endpoints: %w", err)
	}
	for _, e := range entries {
		if e.HostMAC == r.Device.HostMAC {
			r.Slot = e.Slot
		}
	}
	if err := l.dispose(ctx, r); err != nil {
		return err
	}
	l.registry.resolved(o)
	return nil
}

// closed returns the map entries and devices without a record that may belong to an endpoint with an unreadable record.
// It omits entries whose device is gone, because the device is removed with its container.
func (c *comparison) closed(slots []endpoint.Entry, links []endpoint.HostDevice) (
	keptSlots []endpoint.Entry, keptLinks []endpoint.HostDevice,
) {
	if !c.registry.anyUnreadable() {
		return nil, nil
	}
	var deleted []string
	for _, o := range c.registry.tombstones() {
		deleted = append(deleted, c.cfg.device(endpoint.Spec{Owner: o}).HostName)
	}
	for _, d := range links {
		if !slices.Contains(deleted, d.Name) {
			keptLinks = append(keptLinks, d)
		}
	}
	for _, e := range slots {
		if slices.ContainsFunc(keptLinks, func(d endpoint.HostDevice) bool { return d.Index == e.Ifindex }) {
			keptSlots = append(keptSlots, e)
		}
	}
	return keptSlots, keptLinks
}

// auditClosed reports the unreadable records and stops the traffic of the map entries and devices
// that may belong to them.
func (c *comparison) auditClosed(slots []endpoint.Entry, links []endpoint.HostDevice) error {
	c.registry.mu.Lock()
	var files []endpoint.Unreadable
	for _, u := range c.registry.unreadable {
		files = append(files, u)
	}
	c.closedDevices = nil
	for _, d := range links {
		// A device without a map entry is most likely left over from a deletion.
		for _, e := range slots {
			if e.Ifindex == d.Index {
				c.closedDevices = append(c.closedDevices, fmt.Sprintf("device %s with %v", d.Name, e.Addrs))
			}
		}
	}
	c.registry.mu.Unlock()
	slices.SortFunc(files, func(a, b endpoint.Unreadable) int { return strings.Compare(a.File, b.File) })
	for _, u := range files {
		d := endpoint.Difference{Subject: "record", Key: u.File, Want: "a record", Have: u.Err.Error()}
		if err := c.report(d, func() error { return fmt.Errorf("%w: %s", endpoint.ErrUnreadable, wayOut) }); err != nil {
			return err
		}
	}
	for _, e := range slots {
		if !e.Forwards {
			continue
		}
		d := endpoint.Difference{
			Subject: "sl_ep", Key: strconv.Itoa(int(e.Slot)),
			Want: "no traffic, because its record cannot be read", Have: e.String(),
		}
		if err := c.report(d, func() error { return c.cfg.Maps.Cut(e.Slot) }); err != nil {
			return err
		}
	}
	for _, d := range links {
		diffs, err := c.cfg.Links.CheckFilters(d)
		if err != nil {
			return err
		}
		for _, diff := range diffs {
			if err := c.report(diff, func() error { return c.cfg.Links.AttachTo(d) }); err != nil {
				return err
			}
		}
	}
	return nil
}
