// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package node puts the parts of the datapath together for one network
// namespace: programs and maps, devices, firewall, and the core that uses them.
// It owns the loops that keep the node as the records say.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/audit"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/guard"
	"github.com/sluice-net/sluice/services/datapath/internal/host"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policysync"
	"github.com/sluice-net/sluice/services/datapath/internal/record"
)

// Options describe the node.
type Options struct {
	Instance        string
	BPFDir          string
	PodCIDRs        []netip.Prefix
	MTU             uint16 // 0: that of the default route's device
	TunnelPorts     []uint16
	ServiceDevices  []string // names or patterns; their addresses are not the host's
	EventsPerSecond uint32
	// NodeSysctls is "set", "report" or "auto".
	NodeSysctls string
	// ProcSysNet is the directory that sysctls are written to.
	ProcSysNet string
	// RefuseSecond refuses a second interface for a container.
	RefuseSecond bool
	// ValidateOnly changes nothing.
	ValidateOnly bool

	// Policy judges endpoints; nil: everything is allowed.
	Policy *PolicyOptions
	// Connections say how long they are remembered.
	Connections conntrack.CollectorOptions

	Leases     endpoint.Leases
	Identities endpoint.Identities
	Records    endpoint.Records
	Log        *slog.Logger

	// Home is the node's network namespace; nil for that of the caller.
	Home *netns.Namespace
	// BootID of the running boot.
	BootID string
}

// PolicyOptions say where policies come from.
type PolicyOptions struct {
	Service policystream.Service
	// Wait has creations wait for their tables.
	Wait bool
	// Audit lets pass what policies deny, and reports it.
	Audit bool
	// Linger is how long tables stay after their last endpoint.
	Linger time.Duration
	// Timeout is how long a creation waits; 0 is 10 s.
	Timeout time.Duration
	// Memory keeps what was enforced; nil: nothing does.
	Memory policystream.Memory
}

// Node is a running datapath without its server.
type Node struct {
	Core *endpoint.Core
	// Policy keeps the tables; nil if nothing judges.
	Policy *policysync.Applier
	Kernel *kernel.Kernel
	// Collector of connections; nil with ValidateOnly.
	Collector *conntrack.Collector
	Ring      *observe.Ring
	Host      *host.Host
	Auditor   *audit.Auditor
	// NodeAddrs are the node's own addresses on the pod side, one per range.
	NodeAddrs []netip.Addr
	// KernelRelease as in uname -r.
	KernelRelease string

	o     Options
	log   *slog.Logger
	home  *netns.Namespace
	dev   *netdev.Netdev
	guard *guard.Table
}

// Open adopts or makes maps and programs and opens everything else. It changes
// no endpoint.
func Open(ctx context.Context, o Options) (_ *Node, err error) {
	n := &Node{o: o, log: o.Log, home: o.Home, Ring: observe.NewRing()}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	if n.home == nil {
		if n.home, err = netns.Current(); err != nil {
			return nil, fmt.Errorf("open the node's network namespace: %w", err)
		}
	}
	if o.MTU == 0 {
		if o.MTU, err = netdev.DefaultMTU(n.home); err != nil {
			return nil, fmt.Errorf("find the MTU of the uplink: %w", err)
		}
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return nil, fmt.Errorf("uname: %w", err)
	}
	n.KernelRelease = unix.ByteSliceToString(uts.Release[:])
	for _, p := range o.PodCIDRs {
		n.NodeAddrs = append(n.NodeAddrs, p.Addr().Next())
	}
	n.Kernel, err = kernel.Open(ctx, kernel.Options{
		Dir: o.BPFDir, PodCIDRs: o.PodCIDRs, TunnelPorts: o.TunnelPorts, EventsPerSecond: o.EventsPerSecond,
		ValidateOnly: o.ValidateOnly, Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	if !o.ValidateOnly {
		o.Connections.Log = o.Log
		if n.Collector, err = n.Kernel.Connections.NewCollector(o.Connections); err != nil {
			return nil, err
		}
	}
	set := o.NodeSysctls == "set"
	if o.NodeSysctls == "auto" {
		if err := n.home.Do(func() error { set = !netdev.InitialNamespace(); return nil }); err != nil {
			return nil, err
		}
	}
	n.dev, err = netdev.Open(netdev.Options{
		Home: n.home, Instance: o.Instance, Programs: n.Kernel.Programs.On(program.Endpoints),
		PodCIDRs: o.PodCIDRs, NodeAddrs: n.NodeAddrs, ServiceDevices: o.ServiceDevices, SetGlobal: set,
		ProcSysNet: o.ProcSysNet,
	})
	if err != nil {
		return nil, err
	}
	group := netdev.Group(o.Instance)
	n.guard = guard.New(n.home, o.Instance, []uint32{group, group | 1}, netdev.MarkMask, netdev.MarkForwarded)
	judges, err := n.openPolicy(o)
	if err != nil {
		return nil, err
	}
	n.Host = &host.Host{Devices: n.dev, Firewall: n.guard, Addresses: n.Kernel.Endpoints, Own: n.NodeAddrs, Log: o.Log}
	maps := endpointmap.Maps{Endpoints: n.Kernel.Endpoints, Tables: n.Kernel.Tables, Policy: n.Policy}
	tables := maps.AuditTables
	if o.ValidateOnly {
		tables = nil // its maps are its own, and have no pins
	} else {
		n.Host.Pins = n.Kernel.Pins
	}
	n.Core = endpoint.New(endpoint.Config{
		Instance: o.Instance, BootID: o.BootID, PodCIDRs: o.PodCIDRs, MTU: o.MTU,
		Maps: maps, Policies: judges, Links: n.dev, Leases: o.Leases, Identities: o.Identities,
		RefuseSecond: o.RefuseSecond, Records: o.Records, Host: n.Host, Tables: tables, Repaired: n.Ring.AddRepair, Log: o.Log,
	})
	n.Auditor = &audit.Auditor{Core: n.Core, Host: n.Host, Changes: n.dev, Log: o.Log}
	return n, nil
}

// openPolicy takes over the tables that are in the kernel, or removes them if
// nothing shall judge.
func (n *Node) openPolicy(o Options) (endpoint.Policies, error) {
	if o.Policy == nil {
		if o.ValidateOnly {
			return nil, nil
		}
		if err := record.ForgetJudged(o.Records); err != nil {
			return nil, err
		}
		if err := policysync.Unenforce(n.Kernel.Policies()); err != nil {
			return nil, fmt.Errorf("remove policies: %w", err)
		}
		return nil, nil
	}
	n.Policy = policysync.New(policysync.Config{
		Name: "datapath", Kernel: n.Kernel.Policies(), Service: o.Policy.Service,
		Wait: o.Policy.Wait, Audit: o.Policy.Audit, Linger: o.Policy.Linger, Timeout: o.Policy.Timeout, Memory: o.Policy.Memory, Log: o.Log,
		Changed: func(slots []uint16) { n.Core.PolicyChanged(slots) },
	})
	judged, err := record.Judged(o.Records, o.BootID)
	if err != nil {
		return nil, err
	}
	if err := n.Policy.Adopt(func(slot uint16) bool { return judged[slot] }); err != nil {
		return nil, fmt.Errorf("take over policies: %w", err)
	}
	return endpointmap.Policies{Policy: n.Policy}, nil
}

// Close lets go of everything and leaves the kernel as it is.
func (n *Node) Close() error {
	var errs []error
	if n.dev != nil {
		n.dev.Close()
	}
	if n.Kernel != nil {
		errs = append(errs, n.Kernel.Close())
	}
	if n.home != nil && n.o.Home == nil {
		errs = append(errs, n.home.Close())
	}
	return errors.Join(errs...)
}

// Restore brings records and kernel together, and reports what it did.
func (n *Node) Restore(ctx context.Context) error {
	if err := n.Auditor.Restore(ctx); err != nil {
		return err
	}
	if err := n.Kernel.DropOldPrograms(); err != nil {
		n.log.Warn("old programs stay pinned", log.Err(err))
	}
	return nil
}

// spoolInterval is how often the spool is looked at while the process serves.
const spoolInterval = 3 * time.Second

// ReplayLoop does the deletions that the plugin spooled between the replay at
// the start and the first accepted connection, or because the socket's queue
// was full. It returns when ctx ends.
func (n *Node) ReplayLoop(ctx context.Context, s *record.Spool) error {
	return n.every(ctx, spoolInterval, "replay deletions", func() error { return s.Replay(ctx, n.Core) })
}

// AuditLoop compares and repairs from time to time, until ctx ends.
func (n *Node) AuditLoop(ctx context.Context, interval time.Duration, repair bool) error {
	return n.every(ctx, interval, "audit", func() error { return n.Auditor.Audit(ctx, repair) })
}

// every calls fn at intervals until ctx ends. What fails is logged, and tried
// again the next time.
func (n *Node) every(ctx context.Context, interval time.Duration, work string, fn func() error) error {
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if err := fn(); err != nil && ctx.Err() == nil {
			n.log.Error("work incomplete, trying again later", "work", work, log.Err(err))
		}
	}
}
