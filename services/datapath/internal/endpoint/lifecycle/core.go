// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package lifecycle creates and removes the endpoints of a node step by step, keeps their kernel
// state as recorded, and restores them after a restart.
//
// It owns the records and their order relative to the kernel: a record is written before the
// described object is created, and removed after the object is removed. It uses devices, maps,
// files and other services through the interfaces of package endpoint, and does not depend on
// netlink, eBPF or gRPC.
package lifecycle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-net/sluice/kit/keymutex"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/reaper"
)

// Config configures a Core.
type Config struct {
	// Instance is part of device names, so that copies can run side by side.
	Instance string
	// BootID identifies the running boot.
	BootID string
	// Ranges are the node's pod ranges.
	Ranges Ranges
	// MTU in bytes of devices for which the caller requests none.
	MTU uint16
	// Index holds the records in memory; nil: Core creates one.
	Index *Index
	// RefuseSecond rejects a second attachment to the same namespace.
	RefuseSecond bool
	// ReapDelay is how long a deleted endpoint's device waits for its namespace to vanish, so that
	// devices are deleted in batches. 0: one second.
	ReapDelay time.Duration
	// RetryDelay is the first pause after a failed release; it doubles up to a hundredfold. 0: 100
	// ms.
	RetryDelay time.Duration

	// Sockets passes the cookies of namespaces to Maps, by which the service programs recognise the
	// endpoint of a socket.
	Sockets bool

	Maps       endpoint.Maps
	Links      endpoint.Links
	Leases     endpoint.Leases
	Identities endpoint.Identities
	Records    endpoint.Records
	// Published returns when other nodes can know the addresses of an endpoint whose identity was
	// resolved, or will not for a while; nil: do not wait.
	Published func(ctx context.Context, o workload.Owner)
	// HostPorts forwards ports of the node to endpoints.
	HostPorts endpoint.HostPorts
	// Policies evaluate endpoints; nil: everything is allowed.
	Policies endpoint.Policies
	Host     endpoint.Host
	// Tables compares map state that belongs to no single endpoint: tables, policy entries,
	// identities. With repair it repairs what it can. nil: no comparison.
	Tables func(repair bool) ([]endpoint.Finding, error)
	// Repaired is called after programs were found detached from an endpoint's device. Its error is
	// nil if they were attached again. nil: no call.
	Repaired func(endpoint.Endpoint, endpoint.Difference, error)
	Log      *slog.Logger // nil: no logging
	Now      func() time.Time
}

// Ranges are the node's pod ranges. An endpoint may be created in an open range.
type Ranges interface {
	Open(a netip.Addr) bool
	Close(p netip.Prefix)
	All() []netip.Prefix
	// Changes reports whether further ranges may be added.
	Changes() bool
}

// Core manages the endpoints of one node. All methods may be called concurrently, after Restore.
type Core struct {
	cfg   Config
	log   *slog.Logger
	turns keymutex.Mutexes[workload.Owner]
	hub   *watch.Hub[workload.Owner, endpoint.Endpoint]
	// Reaper removes the devices of deleted endpoints.
	Reaper *reaper.Reaper[endpoint.HostDevice]

	*Index // its mutex also guards the fields below

	unclaimed  map[workload.Owner]error       // guarded by mu; live endpoints that ipam refuses to confirm again
	unreadable map[string]endpoint.Unreadable // guarded by mu; files that are no valid records, by name
	unrepaired map[workload.Owner]unrepaired  // guarded by mu; of host ends
	wishes     map[workload.Owner]wish        // guarded by mu; identities that the identity service has announced
	// Endpoints whose identity in the maps may differ from the record, with the error of the last
	// attempt to change it.
	differing map[workload.Owner]error // guarded by mu

	hostUnrepaired unrepaired // guarded by mu; of state that belongs to no endpoint
	closedDevices  []string   // guarded by mu; devices that the last audit kept for an unreadable record

	wakeReleases chan struct{}
	wakeRelabels chan struct{}
	refreshDue   atomic.Bool // an endpoint has an identity without a reference
	releasing    atomic.Bool // a release failed and waits for its retry

	repairs       atomic.Uint64 // of attachments
	deviceRepairs atomic.Uint64
	nodeRepairs   atomic.Uint64
	relabels      atomic.Uint64
}

// New returns an empty core: call Restore.
func New(cfg Config) *Core {
	if cfg.Log == nil {
		cfg.Log = log.Discard()
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Index == nil {
		cfg.Index = NewIndex()
	}
	if cfg.ReapDelay == 0 {
		cfg.ReapDelay = time.Second
	}
	if cfg.RetryDelay == 0 {
		cfg.RetryDelay = 100 * time.Millisecond
	}
	return &Core{
		cfg: cfg, log: cfg.Log,
		Reaper:     reaper.New(cfg.Links.Remove, cfg.ReapDelay, cfg.Now, cfg.Log),
		hub:        watch.NewHub[workload.Owner, endpoint.Endpoint](watch.Options[endpoint.Endpoint]{Loading: true}),
		Index:      cfg.Index,
		unrepaired: map[workload.Owner]unrepaired{}, unreadable: map[string]endpoint.Unreadable{},
		wishes: map[workload.Owner]wish{}, differing: map[workload.Owner]error{},
		wakeReleases: make(chan struct{}, 1), wakeRelabels: make(chan struct{}, 1),
	}
}

// Hub distributes the changes of endpoints.
func (c *Core) Hub() *watch.Hub[workload.Owner, endpoint.Endpoint] { return c.hub }

// Get returns one endpoint, or ErrNotFound.
func (c *Core) Get(o workload.Owner) (endpoint.Endpoint, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, err := c.get(o)
	if err != nil {
		return endpoint.Endpoint{}, err
	}
	return c.endpoint(r, c.states[o]), nil
}

// List returns a consistent snapshot of all endpoints, sorted by ID and owner.
func (c *Core) List() []endpoint.Endpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.list(c.endpoint)
}

// HolderOf returns the endpoint that has an address.
func (c *Core) HolderOf(a netip.Addr) (endpoint.Endpoint, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, ok := c.holders[a]
	if !ok {
		return endpoint.Endpoint{}, false
	}
	r, err := c.get(o)
	if err != nil {
		return endpoint.Endpoint{}, false
	}
	return c.endpoint(r, c.states[o]), true
}

// Counts is a summary of the core's state.
type Counts struct {
	ByState         map[endpoint.State]int
	PendingReleases int
	// Repairs of attachments, of other properties of host ends, and of state that belongs to no
	// endpoint.
	Repairs, DeviceRepairs, NodeRepairs uint64
	// BadRecords lists the unreadable record files, each with what to do about it, sorted, followed
	// by the devices that have no traffic because of them.
	BadRecords []string
	// Unrepaired lists the differences of host ends and of the node that the last check found and
	// did not repair, one line each, sorted.
	Unrepaired []string
	// Relabels counts changes of identities. PendingRelabels counts those still to be made; Waiting
	// has a reason for each, one line each.
	Relabels        uint64
	PendingRelabels int
	Waiting         []string
}

// Counts returns the summary.
func (c *Core) Counts() Counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := Counts{
		ByState: map[endpoint.State]int{}, Repairs: c.repairs.Load(), DeviceRepairs: c.deviceRepairs.Load(),
		NodeRepairs: c.nodeRepairs.Load(),
	}
	for _, u := range c.unreadable {
		n.BadRecords = append(n.BadRecords, fmt.Sprintf("record of an endpoint cannot be read: %v; %s", u.Err, wayOut))
	}
	slices.Sort(n.BadRecords)
	if len(n.BadRecords) > 0 {
		for _, line := range c.closedDevices {
			n.BadRecords = append(n.BadRecords, line+" has no traffic, because its record cannot be read")
		}
	}
	for o, r := range c.records {
		if r.Phase == endpoint.PhaseDeleted {
			n.PendingReleases++
		} else {
			n.ByState[c.endpoint(r, c.states[o]).State]++
		}
	}
	for o, u := range c.unrepaired {
		for _, d := range u.left {
			line := fmt.Sprintf("%s: %s", o, d)
			if d.IsNoDevice() {
				line += "; the device was deleted; delete and create the container again to restore its network"
			}
			n.Unrepaired = append(n.Unrepaired, line)
		}
	}
	for _, d := range c.hostUnrepaired.left {
		n.Unrepaired = append(n.Unrepaired, "node: "+d.String())
	}
	for _, err := range c.unclaimed {
		n.Unrepaired = append(n.Unrepaired,
			fmt.Sprintf("%v; the endpoint keeps its traffic, but creating another one with its addresses fails", err))
	}
	slices.Sort(n.Unrepaired)
	n.Relabels, n.PendingRelabels, n.Waiting = c.relabels.Load(), len(c.wishes)+len(c.differing), c.waiting()
	return n
}

// endpoint returns the public view of a record, with the tables that evaluate it. mu is held,
// unless the state is not Ready.
func (c *Core) endpoint(r endpoint.Record, s endpoint.State) endpoint.Endpoint {
	e := view(r, s)
	if c.cfg.Policies != nil && r.Slot != 0 {
		e.Policy, _ = c.cfg.Policies.Of(r.Slot)
		if s == endpoint.Ready && e.Policy.Pending {
			e.State = endpoint.WaitingForPolicy
		}
	}
	if s == endpoint.Ready && c.unrepaired[r.Spec.Owner].noDevice() {
		e.State = endpoint.Damaged
	}
	return e
}

// policyChanged publishes the endpoints of some IDs to watchers.
func (c *Core) policyChanged(slots []uint16) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range slots {
		if o, ok := c.slots[s]; ok {
			c.hub.Upsert(o, c.endpoint(c.records[o], c.states[o]))
		}
	}
}

// FollowPolicies notifies watchers when the policy of endpoints changes, until ctx ends. events
// delivers their IDs.
func (c *Core) FollowPolicies(ctx context.Context, events *endpoint.SlotEvents) error {
	for {
		slots, err := events.Next(ctx)
		if err != nil {
			return err
		}
		c.policyChanged(slots)
	}
}

// awaits records the state in which a creation waits now.
func (c *Core) awaits(o workload.Owner, s endpoint.State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r, ok := c.records[o]; ok && r.Phase == endpoint.PhaseCreating {
		c.states[o] = s
		c.hub.Upsert(o, c.endpoint(r, s))
	}
}

// set is the only place that changes an endpoint in memory.
func (c *Core) set(r endpoint.Record, s endpoint.State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setLocked(r, s)
}

func (c *Core) setLocked(r endpoint.Record, s endpoint.State) {
	o := r.Spec.Owner
	c.add(r, s)
	if r.Phase == endpoint.PhaseDeleted {
		delete(c.unrepaired, o)
		delete(c.differing, o)
		c.hub.Delete(o)
		return
	}
	c.hub.Upsert(o, c.endpoint(r, s))
}

// forget removes everything about the owner from memory.
func (c *Core) forget(o workload.Owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(o)
	delete(c.unrepaired, o)
	c.hub.Delete(o)
}

// reserve reserves the addresses for the owner, unless a live endpoint has one. The first
// attachment of a namespace gets the default routes of its address families; the addresses of later
// ones become source-routed. devices are the node's devices, or nil if mayShare returned false: a
// creation that started since has no device either.
func (c *Core) reserve(r endpoint.Record, devices []endpoint.HostDevice) (endpoint.Record, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.inRange(r.Spec); err != nil {
		return r, err
	}
	for _, a := range r.Spec.Addrs {
		if holder, ok := c.holders[a]; ok && holder != r.Spec.Owner {
			return r, &endpoint.HeldError{Addr: a, Holder: holder}
		}
	}
	for o := range c.namespaces[r.Namespace] {
		other := c.records[o]
		if o == r.Spec.Owner || !other.Shares(r, devices) {
			continue
		}
		if c.cfg.RefuseSecond {
			return r, fmt.Errorf("%w: %s; secondInterfaces allows more", endpoint.ErrSecond, o)
		}
		for _, a := range r.Spec.Addrs {
			if other.Leads(a) && !slices.Contains(r.Device.SourceRouted, a) {
				r.Device.SourceRouted = append(r.Device.SourceRouted, a)
			}
		}
	}
	slices.SortFunc(r.Device.SourceRouted, netip.Addr.Compare)
	c.setLocked(r, endpoint.WaitingForIdentity)
	return r, nil
}

// inRange checks that the addresses lie in open ranges. It returns ErrUnavailable if ranges can
// change: sluice-ipam may have leased an address of a range that this process does not know yet.
func (c *Core) inRange(s endpoint.Spec) error {
	i := slices.IndexFunc(s.Addrs, func(a netip.Addr) bool { return !c.cfg.Ranges.Open(a) })
	if i < 0 {
		return nil
	}
	err := &endpoint.FieldError{
		Field:  "addresses",
		Reason: fmt.Sprintf("%v is not in the node's pod ranges %v", s.Addrs[i], c.cfg.Ranges.All()),
	}
	if c.cfg.Ranges.Changes() {
		return fmt.Errorf("%w: %s; sluice-ipam may still announce its range", endpoint.ErrUnavailable, err.Error())
	}
	return err
}

// CloseRange stops the creation of endpoints in a range. It returns false and changes nothing if an
// endpoint, or a creation in progress, has an address in the range.
func (c *Core) CloseRange(p netip.Prefix) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for a := range c.holders {
		if p.Contains(a) {
			return false
		}
	}
	c.cfg.Ranges.Close(p)
	return true
}

// device derives the pair's names and MAC addresses.
func (c *Core) device(s endpoint.Spec) endpoint.Device {
	sum := func(what string) []byte {
		h := sha256.Sum256([]byte(what + "\x00" + c.cfg.Instance + "\x00" + s.Owner.String()))
		return h[:]
	}
	mac := func(what string) (m endpoint.MAC) {
		copy(m[:], sum(what))
		m[0] = m[0]&^0x01 | 0x02 // unicast, locally administered
		return m
	}
	d := endpoint.Device{
		HostName: "sl" + hex.EncodeToString(sum("device"))[:11],
		HostMAC:  mac("host"),
		Name:     s.Owner.Interface,
		MAC:      s.MAC,
		MTU:      s.MTU,
		Addrs:    s.Addrs,
	}
	if d.MAC == (endpoint.MAC{}) {
		d.MAC = mac("container")
	}
	if d.MTU == 0 {
		d.MTU = c.cfg.MTU
	}
	return d
}

// wake wakes a worker that may be asleep.
func wake(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// pause waits for d. It returns an error if ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func ignore(err error, ok ...error) error {
	if slices.ContainsFunc(ok, func(target error) bool { return errors.Is(err, target) }) {
		return nil
	}
	return err
}
