// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package lifecycle creates and removes the endpoints of a node step by step, keeps their kernel
// state as recorded, and restores them after a restart.
//
// It owns the records and their order relative to the kernel: a record is written before the
// described object is created, and removed after the object is removed. It uses devices, maps,
// files and other services through the interfaces of package endpoint, and does not depend on
// netlink, eBPF or gRPC.
//
// The Index has the records in memory, with one lock for all of them and one for each owner. The other types are the
// parts that work on the Index, each on one subject. Lifecycle creates and deletes endpoints, and Relabeller changes
// their identities. Allocations keeps what other services have allocated to endpoints in step with the records.
// Reconciler, HostEnds and NodeState keep the kernel as recorded. Report answers callers.
package lifecycle

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/reaper"
)

// Config configures the parts that manage the endpoints of a node.
type Config struct {
	// Instance is part of device names, so that copies can run side by side.
	Instance string
	// BootID identifies the running boot.
	BootID string
	// Ranges are the node's pod ranges.
	Ranges Ranges
	// MTU in bytes of devices for which the caller requests none.
	MTU uint16
	// Index holds the records in memory; nil: New creates one.
	Index *Index
	// RefuseSecond rejects a second attachment to the same namespace.
	RefuseSecond bool
	// ReapDelay is how long a deleted endpoint's device waits for its namespace to vanish; the wait also lets devices
	// be deleted in batches. 0: one second.
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
	// Published returns when other nodes can know the addresses of an endpoint whose identity was resolved, or when
	// waiting longer makes no sense; nil: do not wait.
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

// device derives the pair's names and MAC addresses.
func (c *Config) device(s endpoint.Spec) endpoint.Device {
	sum := func(what string) []byte {
		h := sha256.Sum256([]byte(what + "\x00" + c.Instance + "\x00" + s.Owner.String()))
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
		d.MTU = c.MTU
	}
	return d
}

// Ranges are the node's pod ranges. An endpoint may be created in an open range.
type Ranges interface {
	Open(a netip.Addr) bool
	Close(p netip.Prefix)
	All() []netip.Prefix
	// Changes reports whether further ranges may be added.
	Changes() bool
}

// Parts are the parts that manage the endpoints of one node. All of their methods may be called concurrently, after
// Reconciler.Restore.
type Parts struct {
	Lifecycle   *Lifecycle
	Relabeller  *Relabeller
	Allocations *Allocations
	Reconciler  *Reconciler
	HostEnds    *HostEnds
	NodeState   *NodeState
	Report      *Report
}

// New returns parts that know no endpoint yet: call Reconciler.Restore.
func New(cfg Config) Parts {
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
	g := newRegistry(cfg.Index, cfg.Policies)
	resolver := &resolver{cfg: &cfg, registry: g}
	relabeller := &Relabeller{
		cfg: &cfg, registry: g, resolver: resolver, wishes: map[workload.Owner]wish{}, wake: make(chan struct{}, 1),
	}
	allocations := &Allocations{cfg: &cfg, registry: g, relabeller: relabeller, wake: make(chan struct{}, 1)}
	lifecycle := &Lifecycle{
		cfg: &cfg, registry: g, resolver: resolver, allocations: allocations,
		Reaper: reaper.New(cfg.Links.Remove, cfg.ReapDelay, cfg.Now, cfg.Log),
	}
	hostEnds, nodeState := &HostEnds{cfg: &cfg, registry: g, lifecycle: lifecycle}, &NodeState{cfg: &cfg, registry: g}
	reconciler := &Reconciler{
		cfg: &cfg, registry: g, lifecycle: lifecycle, relabeller: relabeller, allocations: allocations,
		hostEnds: hostEnds, nodeState: nodeState,
	}
	return Parts{
		Lifecycle: lifecycle, Relabeller: relabeller, Allocations: allocations,
		Reconciler: reconciler, HostEnds: hostEnds, NodeState: nodeState,
		Report: &Report{registry: g, relabeller: relabeller, allocations: allocations, reconciler: reconciler},
	}
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
