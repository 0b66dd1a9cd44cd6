// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package endpoints manages the endpoints of the datapath: it creates and removes them for callers,
// keeps their devices and maps as the records specify, and reports their state.
package endpoints

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/record"
	"github.com/sluice-net/sluice/services/datapath/internal/node/host"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

// Programs are the eBPF programs of the node.
type Programs interface {
	// Reload reloads the programs if nf_conntrack appeared since they were loaded. It returns true if the caller has to
	// attach newly loaded programs.
	Reload() (bool, error)
	// DropOldPrograms removes the pins of programs that no device uses any more.
	DropOldPrograms() error
}

// Options configure Open.
type Options struct {
	// Lifecycle configures the parts. Its Host must be Host.
	Lifecycle lifecycle.Config
	// PolicyEvents delivers the endpoint IDs whose policy has changed.
	PolicyEvents *endpoint.SlotEvents
	Devices      *netdev.Netdev
	Host         *host.Host
	Programs     Programs
	// FollowConntrack reloads the programs when nf_conntrack appears.
	FollowConntrack bool

	// Ranges are the node's pod ranges, Source announces changes to them, and Entries are their map
	// entries. Source is nil if the ranges come from the configuration.
	Ranges  *podrange.Set
	Source  podrange.Source
	Entries podrange.Entries

	// Overlay is set if other nodes reach this one through a tunnel. The node then needs an overlay
	// address from a pod range.
	Overlay bool

	// Follow opens the stream of the identities that the endpoints should have; nil: they do not change.
	Follow func(*lifecycle.Relabeller) IdentityStream
	// Allocator is sluice-ipam, Identities is sluice-identity: the endpoints' allocations are reconciled with both when
	// they answer again. If nil, they are not reconciled.
	Allocator  endpoint.Connection
	Identities endpoint.Service
	// Spool has the deletions that the CNI plugin could not deliver; nil: none.
	Spool *record.Spool

	AuditInterval time.Duration
	Repair        bool // repair differences, not only report them
	// Phase runs and reports the long step of a start; if nil, the step only runs.
	Phase func(name string, f func() error) error
	Log   *slog.Logger
}

// IdentityStream follows the identities that the endpoints should have.
type IdentityStream interface {
	Run(ctx context.Context) error
	// State reports whether the initial listing was received, and the last error of the stream.
	State() (complete bool, err error)
}

// Endpoints manages the endpoints of one node.
type Endpoints struct {
	lifecycle.Parts
	Auditor *Auditor
	Keeper  *podrange.Keeper // nil without Options.Source

	o        Options
	stream   IdentityStream // nil without Options.Follow
	compared chan struct{}
}

// Open returns Endpoints without an endpoint: call Restore.
func Open(o Options) *Endpoints {
	if o.Phase == nil {
		o.Phase = func(_ string, f func() error) error { return f() }
	}
	e := &Endpoints{Parts: lifecycle.New(o.Lifecycle), o: o, compared: make(chan struct{})}
	e.Auditor = &Auditor{parts: e.Parts, host: o.Host, changes: o.Devices, log: o.Log}
	if o.Follow != nil {
		e.stream = o.Follow(e.Relabeller)
	}
	if o.Source != nil {
		e.Keeper = podrange.New(podrange.Options{
			Set: o.Ranges, Source: o.Source, Entries: o.Entries, Host: o.Host, Endpoints: e.Lifecycle, Log: o.Log,
		})
	}
	return e
}

// Restore reconciles maps with records, so that calls can be served.
func (e *Endpoints) Restore(ctx context.Context) error {
	// Subscribe before the comparison of devices, so that no change is missed: the events queue until then.
	if err := e.o.Devices.Subscribe(); err != nil {
		return err
	}
	return e.Auditor.Restore(ctx)
}

// pause is the time before a failed comparison is retried.
const pause = time.Second

// Compare reconciles devices with records, while calls are served. It retries until it succeeds or
// ctx ends: endpoints have traffic meanwhile.
func (e *Endpoints) Compare(ctx context.Context) error {
	for {
		err := e.Auditor.Compare(ctx)
		if err == nil {
			break
		}
		e.o.Log.Error("cannot reconcile devices with the endpoint records; retrying", log.Err(err))
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := e.o.Programs.DropOldPrograms(); err != nil {
		e.o.Log.Warn("cannot remove the pins of old programs", log.Err(err))
	}
	close(e.compared)
	return nil
}

// Compared is closed when Compare has succeeded.
func (e *Endpoints) Compared() <-chan struct{} { return e.compared }

// Awaits returns the conditions of readiness: the comparison of devices, and the pod ranges if they come from
// sluice-ipam.
func (e *Endpoints) Awaits() []work.Await {
	all := []work.Await{{What: "the comparison of devices", Done: e.compared}}
	if e.Keeper != nil {
		all = append(all, work.Await{What: "the pod ranges of sluice-ipam", Done: e.Keeper.Known()})
		if e.o.Overlay {
			all = append(all, work.Await{What: "the overlay addresses of sluice-ipam", Done: e.Keeper.Overlay()})
		}
	}
	return all
}

// Tasks returns the background work. It begins with a comparison of everything.
func (e *Endpoints) Tasks() []work.Task {
	tasks := []work.Task{
		{Name: "release", Run: e.Allocations.Releases},
		{Name: "reap", Run: e.Lifecycle.Reaper.Run},
		{Name: "identities", Run: e.Relabeller.Run},
		{Name: "policies of endpoints", Run: func(ctx context.Context) error {
			return e.Report.FollowPolicies(ctx, e.o.PolicyEvents)
		}},
		{Name: "kernel changes", Run: func(ctx context.Context) error {
			// Events wait: changes during the comparison are handled afterwards.
			if err := e.o.Phase("compare devices", func() error { return e.Compare(ctx) }); err != nil {
				return err
			}
			return e.Auditor.Watch(ctx, e.o.Repair)
		}},
		{Name: "audit", Run: func(ctx context.Context) error {
			return work.Every(ctx, e.o.AuditInterval, e.o.Log, "audit", func() error { return e.Auditor.Audit(ctx, e.o.Repair) })
		}},
	}
	if e.Keeper != nil {
		tasks = append(tasks, work.Task{Name: "pod ranges", Run: e.Keeper.Run})
	}
	if e.stream != nil {
		tasks = append(tasks, work.Task{Name: "identity stream", Run: e.stream.Run})
	}
	if e.o.Spool != nil {
		tasks = append(tasks, work.Task{Name: "replay deletions", Run: func(ctx context.Context) error {
			return e.Replay(ctx, e.o.Spool)
		}})
	}
	if e.o.Allocator != nil && e.o.Identities != nil {
		tasks = append(tasks, work.Task{Name: "reconcile", Run: func(ctx context.Context) error {
			return e.Allocations.ReconcileLoop(ctx, e.o.Allocator, e.o.Identities)
		}})
	}
	if e.o.FollowConntrack {
		tasks = append(tasks, work.Task{Name: "conntrack of the host", Run: e.followConntrack})
	}
	return tasks
}

// reloadInterval is the interval between checks whether nf_conntrack is loaded.
const reloadInterval = 5 * time.Second

// followConntrack reloads and attaches the programs when nf_conntrack appears: a firewall rule on
// the node may load the module at any time.
func (e *Endpoints) followConntrack(ctx context.Context) error {
	select {
	case <-e.compared:
	case <-ctx.Done():
		return ctx.Err()
	}
	attach := false // stays true after a failure, until the programs are attached
	return work.Every(ctx, reloadInterval, e.o.Log, "load programs that ask nf_conntrack", func() error {
		changed, err := e.o.Programs.Reload()
		attach = attach || changed
		if err != nil || !attach {
			return err
		}
		if err := e.Auditor.Compare(ctx); err != nil {
			return err
		}
		attach = false
		return e.o.Programs.DropOldPrograms()
	})
}

// spoolInterval is the interval at which a serving process reads the spool.
const spoolInterval = 3 * time.Second

// Replay executes deletions that the plugin spools after the replay at the start, until ctx ends:
// before the first accepted connection, or because the socket's queue was full.
func (e *Endpoints) Replay(ctx context.Context, s *record.Spool) error {
	return work.Every(ctx, spoolInterval, e.o.Log, "replay deletions", func() error {
		return s.Replay(ctx, e.Report, e.Lifecycle)
	})
}

// Calls returns the parts that serve calls about endpoints.
func (e *Endpoints) Calls() lifecycle.Parts { return e.Parts }

// PodRanges returns the node's pod ranges.
func (e *Endpoints) PodRanges() *podrange.Set { return e.o.Ranges }

// RangeProblems lists the reasons why an ADD has to wait for pod ranges; ok is false if the ranges are configured.
func (e *Endpoints) RangeProblems() (texts []string, ok bool) {
	if e.Keeper == nil {
		return nil, false
	}
	return e.Keeper.Problems(), true
}

// IdentityStream reports whether the desired identities of all endpoints are known, and the last error of their stream.
func (e *Endpoints) IdentityStream() (complete bool, err error) {
	if e.stream == nil {
		return false, nil
	}
	return e.stream.State()
}

// Warnings name the endpoints whose host ports are not forwarded because loadBalancing.mode is off.
func (e *Endpoints) Warnings() (lines []string) {
	if _, none := e.o.Lifecycle.HostPorts.(endpoint.NoHostPorts); !none {
		return nil
	}
	for _, ep := range e.Report.List() {
		if len(ep.Spec.PortMappings) > 0 {
			lines = append(lines,
				fmt.Sprintf("endpoint %s: its host ports are not forwarded, because loadBalancing.mode is off", ep.Spec.Owner))
		}
	}
	return lines
}
