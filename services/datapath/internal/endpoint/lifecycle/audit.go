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
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// errRemains is the outcome of a repair that changed nothing about a difference.
var errRemains = errors.New("the difference remains after a repair; its owner has to remove it")

// Restore reads the records and makes the maps agree with them: what the maps hold
// is adopted, what differs is replaced, what lost its container or was half done is
// removed. Nothing that no record knows is removed before all records were compared.
// Restore is called once, before anything else, and hands every finding to emit.
// Afterwards the node serves calls. Its endpoints stay in state Restoring until an
// Audit with repair has compared their devices too: a device works on as it is
// meanwhile, as it did without this process.
func (c *Core) Restore(ctx context.Context, emit func(endpoint.Finding) error) error {
	if err := c.load(); err != nil {
		return err
	}
	if c.cfg.Host != nil {
		if err := c.auditHost(true, emit); err != nil {
			return err
		}
	}
	// what a fresh node lacks was made, not repaired
	c.nodeRepairs.Store(0)
	entries, devices, err := c.listings()
	if err != nil {
		return err
	}
	a, report := comparison{entries: entries, devices: index(devices)}, reporterTo(emit, true)
	ofOtherBoot := func(r endpoint.Record) bool { return r.BootID != c.cfg.BootID }
	c.cfg.HostPorts.Restore(slices.DeleteFunc(c.live(), ofOtherBoot))
	if err := c.auditRecords(ctx, c.live(), a, true, report); err != nil {
		return err
	}
	if err := c.auditStrays(entries, devices, true, report); err != nil {
		return err
	}
	c.cfg.HostPorts.LeadAll(ctx)
	c.hub.Loaded()
	if len(c.tombstones()) > 0 {
		wake(c.wakeReleases)
	}
	return nil
}

// Inspect is Restore and Audit without changing anything: it says what they would do.
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
	c.mu.Lock()
	for _, u := range bad {
		c.log.Error("record of an endpoint cannot be read; its endpoint stays without traffic", log.Err(u.Err))
		c.unreadable[u.File] = u
	}
	c.mu.Unlock()
	for _, r := range records {
		c.set(r, endpoint.Restoring)
	}
	return nil
}

// Audit compares records, maps and devices, and with repair puts right what
// differs. It hands every finding to emit, and ends early with emit's error.
// The interior of containers is compared by Check and AuditContainers.
func (c *Core) Audit(ctx context.Context, repair bool, emit func(endpoint.Finding) error) error {
	report := reporterTo(emit, repair)
	if c.cfg.Host != nil {
		if err := c.auditHost(repair, emit); err != nil {
			return err
		}
	}
	if err := c.reread(ctx); err != nil {
		return err
	}
	entries, devices, err := c.listings()
	if err != nil {
		return err
	}
	live := c.live()
	sound, err := c.soundHosts(live)
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

// comparison is what an audit compares records with. It may be older than a record.
type comparison struct {
	entries []endpoint.Entry
	devices map[endpoint.HostDevice]bool
	// Whether host ends are compared too, and those that are known to be as they should.
	hostEnds bool
	sound    map[endpoint.HostDevice]bool
}

// listings are the published endpoints and the devices of endpoints, as the kernel
// has them.
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

// soundHosts looks at the host ends of all records at once, which costs a fraction
// of a look at each, and gives those that are as they should be. The others may have
// been changed by a call meanwhile: they are looked at again under their owner's turn.
func (c *Core) soundHosts(live []endpoint.Record) (map[endpoint.HostDevice]bool, error) {
	var devices []endpoint.Device
	for _, r := range live {
		if r.Phase == endpoint.PhaseReady && r.BootID == c.cfg.BootID {
			devices = append(devices, r.Device)
		}
	}
	diffs, err := c.cfg.Links.CheckHosts(devices)
	if err != nil {
		return nil, fmt.Errorf("check devices: %w", err)
	}
	sound := make(map[endpoint.HostDevice]bool, len(devices))
	for i, d := range devices {
		sound[endpoint.HostDevice{Name: d.HostName, Index: d.HostIndex}] = len(diffs[i]) == 0
	}
	return sound, nil
}

// AuditContainers compares the interior of every container with its record, and
// with repair puts it right. It is done when an operator asks, not by itself: a
// container that may change its own routes has reasons to.
func (c *Core) AuditContainers(ctx context.Context, repair bool, emit func(endpoint.Finding) error) error {
	for _, r := range c.live() {
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
	leave, err := c.turns.Lock(ctx, o)
	if err != nil {
		return nil, nil, nil, err
	}
	defer leave()
	r, ok := c.record(o)
	if !ok || r.Phase != endpoint.PhaseReady || c.disconnecting(o) {
		return nil, nil, nil, nil
	}
	ns, err := c.cfg.Links.OpenNamespace(r.Spec.Netns)
	if err != nil {
		// A name that is gone says nothing of the container, which may live on.
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

// auditHost compares what belongs to no endpoint.
func (c *Core) auditHost(repair bool, emit func(endpoint.Finding) error) error {
	diffs, err := c.cfg.Host.Check()
	if err != nil {
		return fmt.Errorf("check the host: %w", err)
	}
	return c.settleHost(diffs, repair, emit)
}

// settleHost repairs what a check of the host found, if it shall, and emits it.
func (c *Core) settleHost(diffs []endpoint.Difference, repair bool, emit func(endpoint.Finding) error) error {
	left, repairErr := diffs, error(nil)
	if repair && len(diffs) > 0 {
		var err error
		repairErr = c.cfg.Host.Repair()
		if left, err = c.cfg.Host.Check(); err != nil {
			return fmt.Errorf("check the host: %w", err)
		}
	}
	c.mu.Lock()
	c.hostUnrepaired = c.hostUnrepaired.next(left)
	c.mu.Unlock()
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
		c.nodeRepairs.Add(1)
	}
	return nil
}

// HostChanged looks at once at what belongs to no endpoint, about which the
// kernel has sent an event, and repairs it. What several repairs in a row have
// left is left to the audit. again is as of LinkChanged.
func (c *Core) HostChanged(emit func(endpoint.Finding) error) (again bool, err error) {
	diffs, err := c.cfg.Host.Check()
	if err != nil {
		return true, fmt.Errorf("check the host: %w", err)
	}
	c.mu.Lock()
	settled := c.hostUnrepaired.settles(diffs)
	c.mu.Unlock()
	if settled {
		return false, nil
	}
	failed := false
	err = c.settleHost(diffs, true, func(f endpoint.Finding) error {
		failed = failed || f.Err != nil
		return emit(f)
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	return err != nil || failed && !c.hostUnrepaired.settles(c.hostUnrepaired.left), err
}

type reporter func(endpoint.Difference, func() error) error

// reporterTo hands a difference to emit, with repair after its fix.
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
	leave, err := c.turns.Lock(ctx, o)
	if err != nil {
		return err
	}
	defer leave()
	now, ok := c.record(o)
	if !ok || now.Phase == endpoint.PhaseDeleted || now.Phase != r.Phase ||
		now.Namespace != r.Namespace || now.Slot != r.Slot {
		return nil // it changed since the listing: its own call looks after it
	}
	r = now // it may have another identity
	switch {
	case r.BootID != c.cfg.BootID:
		d := endpoint.Difference{Subject: "record", Key: o.String(), Want: "boot " + c.cfg.BootID, Have: "boot " + r.BootID}
		return report(d, func() error { return c.markDeleted(r) })
	case r.Phase == endpoint.PhaseCreating:
		return report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "half-done creation"},
			func() error { return c.dispose(ctx, r) })
	case c.disconnecting(o):
		return report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "half-done deletion"},
			func() error { return c.dispose(ctx, now) })
	case !a.devices[r.HostDevice()] && c.orphaned(r):
		return report(endpoint.Difference{Subject: "record", Key: o.String(), Have: "its network namespace is gone"},
			func() error { return c.dispose(ctx, r) })
	}

	entries := a.entries
	if _, differs := r.DiffersFrom(entries); differs {
		// the listing may be older than the endpoint: look again now that
		// nobody changes it
		if entries, err = c.cfg.Maps.Entries(); err != nil {
			return fmt.Errorf("list published endpoints: %w", err)
		}
	}
	d, differs := r.DiffersFrom(entries)
	switch identityOnly := r.DiffersInIdentity(entries); {
	case !differs, identityOnly && c.differs(o): // Relabels is about to
	case identityOnly:
		// It has traffic as what it was before, and the tables may not be there.
		if err := report(d, func() error { c.setDiffers(o, true); wake(c.wakeRelabels); return nil }); err != nil {
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
	if err := c.auditHostEnd(r, a.sound[r.HostDevice()], repair, report); err != nil {
		return err
	}
	if repair {
		c.mu.Lock()
		restoring := c.states[o] == endpoint.Restoring
		c.mu.Unlock()
		if restoring {
			c.set(r, endpoint.Ready)
		}
	}
	return nil
}

// auditHostEnd compares the host end of a record, unless it is known to be sound.
// The caller has the owner's turn.
func (c *Core) auditHostEnd(r endpoint.Record, sound, repair bool, report reporter) error {
	o := r.Spec.Owner
	var diffs []endpoint.Difference
	if !sound {
		var err error
		if diffs, err = c.cfg.Links.CheckHost(r.Device); err != nil {
			return fmt.Errorf("check device %s of %s: %w", r.Device.HostName, o, err)
		}
	}
	left, fixErr := diffs, error(nil)
	if len(diffs) > 0 && repair {
		left, fixErr = c.repairHost(r, diffs)
	}
	c.setUnrepaired(o, left)
	for _, d := range diffs {
		if err := report(d, func() error { return outcome(d, left, fixErr) }); err != nil {
			return err
		}
	}
	return nil
}

// republish replaces what the maps hold for the record. Between the two steps
// the endpoint has no traffic; what it had was wrong.
func (c *Core) republish(ctx context.Context, r *endpoint.Record, entries []endpoint.Entry) error {
	for _, e := range entries {
		if r.Owns(e) {
			if err := c.cfg.Maps.Unpublish(e.Slot); err != nil && !errors.Is(err, endpoint.ErrNotFound) {
				return err
			}
		}
	}
	// If publishing fails, the old number may be somebody else's.
	r.Slot = 0
	c.set(*r, endpoint.Restoring)
	slot, err := c.cfg.Maps.Publish(ctx, r.Entry())
	if err != nil {
		return err
	}
	r.Slot = slot
	if err := c.cfg.Records.Save(*r); err != nil {
		return err
	}
	c.set(*r, endpoint.Ready)
	return nil
}

// strays are what no record knows.
func (c *Core) strays(entries []endpoint.Entry, devices []endpoint.HostDevice) (
	slots []endpoint.Entry, links []endpoint.HostDevice,
) {
	byAddr, names := map[endpoint.MAC][]endpoint.Record{}, map[string]bool{}
	for _, r := range c.live() {
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

// auditStrays finds what no record knows. The listings are older than the
// records: an endpoint deleted between them looks like a stray, so whatever
// looks like one is listed again.
func (c *Core) auditStrays(
	entries []endpoint.Entry, devices []endpoint.HostDevice, repair bool, report reporter,
) error {
	slots, links := c.strays(entries, devices)
	if len(slots)+len(links) == 0 && !c.anyUnreadable() {
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

// unpublishStray makes sure that the slot was not given to somebody since the
// listing.
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

// repairHost repairs the host end of a record and returns the differences that
// remain.
func (c *Core) repairHost(r endpoint.Record, diffs []endpoint.Difference) (left []endpoint.Difference, err error) {
	if !slices.ContainsFunc(diffs, endpoint.Difference.Repairable) {
		return diffs, nil
	}
	err = c.cfg.Links.RepairHost(r.Device)
	left, cerr := c.cfg.Links.CheckHost(r.Device)
	if cerr != nil {
		left, err = diffs, errors.Join(err, cerr)
	}
	c.count(r.Spec.Owner, diffs, left, err)
	return left, err
}

// outcome says why a difference was not repaired, if it was not.
func outcome(d endpoint.Difference, left []endpoint.Difference, err error) error {
	remains := slices.ContainsFunc(left, func(l endpoint.Difference) bool {
		return l.Subject == d.Subject && l.Key == d.Key
	})
	switch {
	case !remains:
		return nil
	case err != nil && d.Repairable():
		return err
	}
	return errRemains
}

// unrepaired is what the last look found and did not repair.
type unrepaired struct {
	left  []endpoint.Difference
	looks int // in a row that have left just this
}

// mostVain is how many repairs may change nothing before events no longer lead
// to the next, which would send events again. One may be undone by another
// program at once, which is no reason to give up.
const mostVain = 5

// next is u after a look that has left something.
func (u unrepaired) next(left []endpoint.Difference) unrepaired {
	if !slices.Equal(left, u.left) {
		u.looks = 0
	}
	return unrepaired{left, u.looks + 1}
}

// settles says whether an event about the differences needs no repair: there are
// none, or repairs did not change them.
func (u unrepaired) settles(diffs []endpoint.Difference) bool {
	return slices.Equal(diffs, u.left) &&
		(u.looks >= mostVain || !slices.ContainsFunc(diffs, endpoint.Difference.Repairable))
}

// setUnrepaired notes what a look at the endpoint's host end has left.
func (c *Core) setUnrepaired(o workload.Owner, left []endpoint.Difference) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.unrepaired[o].noDevice()
	r, ok := c.records[o]
	if ok && len(left) > 0 {
		c.unrepaired[o] = c.unrepaired[o].next(left)
	} else {
		delete(c.unrepaired, o)
	}
	if ok && r.Phase != endpoint.PhaseDeleted && c.unrepaired[o].noDevice() != before {
		c.hub.Upsert(o, c.endpoint(r, c.states[o]))
	}
}

// noDevice says whether the host end is gone.
func (u unrepaired) noDevice() bool {
	return slices.ContainsFunc(u.left, endpoint.Difference.IsNoDevice)
}

// count notes what a repair of an endpoint's host end did. A repaired attachment
// is an alarm, because a program was off a container.
func (c *Core) count(o workload.Owner, diffs, left []endpoint.Difference, err error) {
	attachment := slices.IndexFunc(diffs, endpoint.Difference.OfAttachment)
	if attachment >= 0 {
		c.countAttachment(o, diffs[attachment], outcome(diffs[attachment], left, err))
	}
	for _, d := range diffs {
		if !d.OfAttachment() && !slices.Contains(left, d) {
			c.deviceRepairs.Add(1)
			return
		}
	}
}

func (c *Core) countAttachment(o workload.Owner, d endpoint.Difference, err error) {
	if e, gone := c.Get(o); gone == nil && c.cfg.Repaired != nil {
		c.cfg.Repaired(e, d, err)
	}
	if err != nil {
		c.log.Error("attachment not repaired", "owner", o.String(), "subject", d.Subject, "device", d.Key, log.Err(err))
		return
	}
	c.repairs.Add(1)
	c.log.Warn("attachment repaired",
		"owner", o.String(), "subject", d.Subject, "device", d.Key, "want", d.Want, "have", d.Have)
}

// LinkChanged looks at once at the host end with an index, about which the
// kernel has sent an event, and repairs it. It does not wait for long for another
// call of the same owner: with again set, the caller should call again later. So
// it should after a look or a repair that failed, of which no event may tell.
func (c *Core) LinkChanged(
	ctx context.Context, ifindex uint32, emit func(endpoint.Finding) error,
) (again bool, err error) {
	c.mu.Lock()
	o, ok := c.byIndex[ifindex]
	c.mu.Unlock()
	if !ok {
		return false, nil
	}
	return c.hostEndChanged(ctx, o, emit)
}

// AddrChanged is LinkChanged for the endpoint that has an address, after an
// event about a route to it.
func (c *Core) AddrChanged(
	ctx context.Context, a netip.Addr, emit func(endpoint.Finding) error,
) (again bool, err error) {
	c.mu.Lock()
	o, ok := c.holders[a]
	c.mu.Unlock()
	if !ok {
		return false, nil
	}
	return c.hostEndChanged(ctx, o, emit)
}

// eventPatience bounds the wait of an event for the turn of its endpoint's owner:
// longer than checks take, one of which may follow the other without end, and
// short for the events of all other endpoints, which wait meanwhile.
const eventPatience = 250 * time.Millisecond

func (c *Core) hostEndChanged(
	ctx context.Context, o workload.Owner, emit func(endpoint.Finding) error,
) (again bool, err error) {
	// A creation or a deletion under way ends with a device as it should be.
	steady := func() (endpoint.Record, bool) {
		r, ok := c.record(o)
		return r, ok && r.Phase == endpoint.PhaseReady && !c.disconnecting(o)
	}
	if _, ok := steady(); !ok {
		return false, nil
	}
	leave, ok := c.turns.LockWithin(ctx, o, eventPatience)
	if !ok {
		return true, nil
	}
	defer leave()
	r, ok := steady()
	if !ok {
		return false, nil
	}
	diffs, err := c.cfg.Links.CheckHost(r.Device)
	if err != nil {
		return true, fmt.Errorf("check device %s of %s: %w", r.Device.HostName, o, err)
	}
	c.mu.Lock()
	settled := c.unrepaired[o].settles(diffs)
	c.mu.Unlock()
	if settled {
		return false, nil // nothing, or what repairs have left to the audit
	}
	if len(diffs) > 0 && c.orphaned(r) {
		c.log.Info("endpoint removed, its network namespace is gone", "owner", o.String())
		return false, c.dispose(ctx, r)
	}
	left, fixErr := []endpoint.Difference(nil), error(nil)
	if len(diffs) > 0 {
		left, fixErr = c.repairHost(r, diffs)
	}
	c.setUnrepaired(o, left)
	if fixErr != nil {
		// What failed has perhaps changed nothing, and then no event follows.
		c.mu.Lock()
		again = !c.unrepaired[o].settles(left)
		c.mu.Unlock()
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

// Expected is what a caller of Check thinks of an endpoint; zero for nothing.
type Expected struct {
	Netns string
	Addrs []netip.Addr
}

// Check compares one endpoint with the kernel, its interior included, and with
// what the caller believes.
func (c *Core) Check(ctx context.Context, o workload.Owner, b Expected) ([]endpoint.Difference, error) {
	leave, err := c.turns.Lock(ctx, o)
	if err != nil {
		return nil, err
	}
	defer leave()
	r, ok := c.record(o)
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
