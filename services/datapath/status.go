// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/event"
	"github.com/sluice-net/sluice/services/datapath/internal/node"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

// probeTimeout bounds what GetStatus asks other services.
const probeTimeout = 2 * time.Second

func statusOf(p *process.Process, cfg Config, n *node.Node, called services) func(context.Context) server.Status {
	start := time.Now()
	return func(ctx context.Context) server.Status {
		st := server.Status{
			Version: version.Get().String(), Start: start, PolicyMode: cfg.Policy.Mode, KernelRelease: n.KernelRelease,
		}
		for _, c := range cfg.PodCIDRs {
			st.PodCIDRs = append(st.PodCIDRs, c.String())
		}
		for _, a := range n.NodeAddrs {
			st.NodeAddrs = append(st.NodeAddrs, a.AsSlice())
		}
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		st.Problems, st.Warnings = n.Problems(ctx, called.ipam), append(n.Warnings(), p.MissingLayers()...)
		st.KnownReady = len(st.Problems) == 0 // those that follow are about new labels
		ierr := called.identity.Ping(ctx)
		if ierr != nil {
			st.Problems = append(st.Problems, ierr.Error())
		}
		st.Dependencies = []server.Dependency{{Name: "identity", Err: ierr}, {Name: "ipam", Err: called.ipam.Err()}}
		if n.Policy != nil {
			ps := n.Policy.Status()
			perr := ps.Err
			if perr == nil {
				perr = called.policy.Ping(ctx)
			}
			if perr != nil && cfg.Policy.Mode == policyRequired {
				st.Problems = append(st.Problems, perr.Error())
			}
			st.Dependencies = append(st.Dependencies, server.Dependency{Name: "policy", Err: perr})
			st.PolicyRevision, st.PolicyRefusals = ps.Revision, ps.Refusals
			if ps.Held != "" {
				if cfg.Policy.Mode == policyRequired {
					st.Problems = append(st.Problems, "policy: "+ps.Held)
				} else {
					st.Warnings = append(st.Warnings, "policy: "+ps.Held)
				}
			}
			if ps.Unsaved != "" {
				st.Warnings = append(st.Warnings, "policy: "+ps.Unsaved)
			}
			if ps.Waiting > 0 {
				st.PolicyRefusals = append(st.PolicyRefusals, fmt.Sprintf("%d identities stay unknown, because tables have no room for them", ps.Waiting))
			}
		}
		return st
	}
}

// counts implements server.Counts.
type counts struct{ node *node.Node }

// Packets implements server.Counts.
func (c counts) Packets() ([]server.Counter, error) {
	counters, err := c.node.Kernel.Events.Metrics()
	if err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	var all []server.Counter
	for _, k := range counters {
		all = append(all, server.Counter{
			Reason: k.Reason.String(), Egress: k.Direction == event.Egress, Dropped: k.Reason.Dropped(), Packets: k.Packets, Bytes: k.Bytes,
		})
	}
	return all, nil
}

// EventsLost implements server.Counts.
func (c counts) EventsLost() (uint64, error) {
	lost, err := c.node.Kernel.Events.Lost()
	if err != nil {
		return 0, fmt.Errorf("read lost events: %w", err)
	}
	return lost, nil
}

// MapUsage implements server.Counts.
func (c counts) MapUsage() ([]server.MapUsage, error) {
	usage, err := c.node.Kernel.MapUsage()
	if err != nil {
		return nil, fmt.Errorf("read the usage of maps: %w", err)
	}
	var all []server.MapUsage
	for _, u := range usage {
		all = append(all, server.MapUsage{Name: u.Name, Entries: int64(u.Entries), MaxEntries: u.MaxEntries, Bytes: u.Bytes})
	}
	return all, nil
}

// Connections implements server.Counts.
func (c counts) Connections() (server.Connections, error) {
	k, err := c.node.Kernel.Connections.Counters()
	if err != nil {
		return server.Connections{}, fmt.Errorf("read the counters of connections: %w", err)
	}
	stopped, err := c.node.Kernel.Endpoints.PickUpStopped()
	if err != nil {
		return server.Connections{}, err
	}
	last := c.node.Collector.Last()
	return server.Connections{
		LiveIPv4: uint64(last.Live[0]), LiveIPv6: uint64(last.Live[1]), Created: k.Created, Revoked: k.Revoked, Expired: k.Expired,
		Evicted: last.Evicted, PickedUp: k.PickedUp, Redecided: k.Redecided, Related: k.Related, Unremembered: k.Unremembered,
		PickUpStopped: stopped, Collected: last.Took,
	}, nil
}
