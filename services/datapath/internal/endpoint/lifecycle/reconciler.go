// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Reconciler compares the records with the kernel, and repairs the kernel: after a start, at
// intervals, and at the request of a caller.
type Reconciler struct {
	cfg         *Config
	registry    *registry // its mutex, mu, also guards the field below
	lifecycle   *Lifecycle
	relabeller  *Relabeller
	allocations *Allocations
	hostEnds    *HostEnds
	nodeState   *NodeState

	closedDevices []string // guarded by mu; devices that the last audit kept for an unreadable record
}

// Restore reads the records and reconciles the maps with them: it adopts matching map entries,
// replaces different ones, and removes endpoints whose container is gone or whose creation or
// deletion was not completed. It removes nothing unknown before all records were compared. Restore
// is called once, before any other method, and passes every finding to emit.
//
// Afterwards the node serves calls. Endpoints stay in state Restoring until an Audit with repair
// has compared their devices, too. Their traffic continues meanwhile, as it did before the restart.
func (rc *Reconciler) Restore(ctx context.Context, emit func(endpoint.Finding) error) error {
	if err := rc.load(); err != nil {
		return err
	}
	if err := rc.nodeState.audit(true, emit); err != nil {
		return err
	}
	// On a fresh node everything is missing. Creating it does not count as a repair.
	rc.nodeState.repairs.Store(0)
	c, err := rc.compare(true, emit)
	if err != nil {
		return err
	}
	ofOtherBoot := func(r endpoint.Record) bool { return r.BootID != rc.cfg.BootID }
	rc.cfg.HostPorts.Restore(slices.DeleteFunc(rc.registry.live(), ofOtherBoot))
	if err := c.auditRecords(ctx, rc.registry.live()); err != nil {
		return err
	}
	if err := c.auditStrays(); err != nil {
		return err
	}
	rc.cfg.HostPorts.LeadAll(ctx)
	rc.registry.hub.Loaded()
	if len(rc.registry.tombstones()) > 0 {
		wake(rc.allocations.wake)
	}
	return nil
}

// Inspect does what Restore and Audit do, but only reports the differences.
func (rc *Reconciler) Inspect(ctx context.Context) (findings []endpoint.Finding, err error) {
	if err := rc.load(); err != nil {
		return nil, err
	}
	err = rc.Audit(ctx, false, func(f endpoint.Finding) error { findings = append(findings, f); return nil })
	return findings, err
}

func (rc *Reconciler) load() error {
	records, bad, err := rc.cfg.Records.Load()
	if err != nil {
		return fmt.Errorf("read the records of endpoints: %w", err)
	}
	rc.registry.mu.Lock()
	for _, u := range bad {
		rc.cfg.Log.Error("record of an endpoint cannot be read; its endpoint stays without traffic", log.Err(u.Err))
		rc.registry.unreadable[u.File] = u
	}
	rc.registry.mu.Unlock()
	for _, r := range records {
		rc.registry.set(r, endpoint.Restoring)
	}
	return nil
}

// Audit compares records, maps and devices, and with repair repairs differences. It passes every
// finding to emit and ends early with emit's error. Check and AuditContainers compare the interior
// of containers.
func (rc *Reconciler) Audit(ctx context.Context, repair bool, emit func(endpoint.Finding) error) error {
	if err := rc.nodeState.audit(repair, emit); err != nil {
		return err
	}
	if err := rc.reread(ctx); err != nil {
		return err
	}
	c, err := rc.compare(repair, emit)
	if err != nil {
		return err
	}
	live := rc.registry.live()
	if c.sound, err = rc.hostEnds.sound(live); err != nil {
		return err
	}
	if err := c.auditRecords(ctx, live); err != nil {
		return err
	}
	if err := c.auditStrays(); err != nil {
		return err
	}
	return rc.auditTables(repair, emit)
}

func (rc *Reconciler) auditTables(repair bool, emit func(endpoint.Finding) error) error {
	if rc.cfg.Tables == nil {
		return nil
	}
	findings, err := rc.cfg.Tables(repair)
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

// AuditContainers compares the interior of every container with its record, and with repair repairs it. It only runs on
// request, because a container with the privilege to change its routes may have changed them on purpose.
func (rc *Reconciler) AuditContainers(ctx context.Context, repair bool, emit func(endpoint.Finding) error) error {
	for _, r := range rc.registry.live() {
		diffs, left, fixErr, err := rc.auditContainer(ctx, r, repair)
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

func (rc *Reconciler) auditContainer(ctx context.Context, r endpoint.Record, repair bool) (
	diffs, left []endpoint.Difference, fixErr, err error,
) {
	o := r.Spec.Owner
	leave, err := rc.registry.locks.Lock(ctx, o)
	if err != nil {
		return nil, nil, nil, err
	}
	defer leave()
	r, ok := rc.registry.record(o)
	if !ok || r.Phase != endpoint.PhaseReady || rc.registry.disconnecting(o) {
		return nil, nil, nil, nil
	}
	ns, err := rc.cfg.Links.OpenNamespace(r.Spec.Netns)
	if err != nil {
		// A missing path does not prove that the container has ended.
		return nil, nil, nil, ignore(err, endpoint.ErrNamespaceGone, endpoint.ErrNamespace)
	}
	defer ns.Close()
	if ns.ID() != r.Namespace {
		return nil, nil, nil, nil
	}
	if diffs, err = rc.cfg.Links.CheckContainer(ns, r.Device); err != nil {
		return nil, nil, nil, fmt.Errorf("check the container of %s: %w", o, err)
	}
	if len(diffs) == 0 || !repair {
		return diffs, diffs, nil, nil
	}
	fixErr = rc.cfg.Links.RepairContainer(ns, r.Device)
	if left, err = rc.cfg.Links.CheckContainer(ns, r.Device); err != nil {
		return nil, nil, nil, fmt.Errorf("check the container of %s: %w", o, err)
	}
	for i := range left {
		left[i].Key = o.String() + ": " + left[i].Key
	}
	return diffs, left, fixErr, nil
}

// Expected are the values that a caller of Check expects; zero fields are not compared.
type Expected struct {
	Netns string
	Addrs []netip.Addr
}

// Check compares one endpoint, including the interior of its container, with the kernel and with
// the caller's expectation.
func (rc *Reconciler) Check(ctx context.Context, o workload.Owner, b Expected) ([]endpoint.Difference, error) {
	leave, err := rc.registry.locks.Lock(ctx, o)
	if err != nil {
		return nil, err
	}
	defer leave()
	r, ok := rc.registry.record(o)
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
	entries, err := rc.cfg.Maps.Entries()
	if err != nil {
		return nil, fmt.Errorf("list published endpoints: %w", err)
	}
	if d, differs := r.DiffersFrom(entries); differs {
		diffs = append(diffs, d)
	}
	host, err := rc.cfg.Links.CheckHost(r.Device)
	if err != nil {
		return nil, fmt.Errorf("check device %s of %s: %w", r.Device.HostName, o, err)
	}
	diffs = append(diffs, host...)

	ns, err := rc.cfg.Links.OpenNamespace(path)
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
	inside, err := rc.cfg.Links.CheckContainer(ns, r.Device)
	if err != nil {
		return nil, fmt.Errorf("check the container of %s: %w", o, err)
	}
	return append(diffs, inside...), nil
}
