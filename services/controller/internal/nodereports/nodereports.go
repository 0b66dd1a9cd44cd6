// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodereports evaluates the reports of nodes: policies that they do not enforce as written, and disks that
// cannot be written.
package nodereports

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Refused is a policy that a node does not enforce as written. With the key evaluation.NodeStorage it reports a disk.
type Refused struct {
	Key    evaluation.Key
	Reason string
}

// All holds the reports of all nodes that have any, by node.
type All map[string][]Refused

// Source follows the reports.
type Source interface {
	// Follow calls told with the reports of all nodes whenever they change, until ctx ends; it then returns nil.
	// While the identity service is unreachable, the last reports remain.
	Follow(ctx context.Context, told func(All)) error
}

// Policies receives the policies that some nodes do not enforce as written.
type Policies interface {
	SetRefused(refused map[evaluation.Key]policystatus.Nodes)
}

// Disks receives the errors of disks that cannot be written, by node.
type Disks interface {
	SetStorage(reasons map[string]string)
}

// Reports distributes the reports of a source.
type Reports struct {
	source   Source
	nodes    func() int // number of nodes of the cluster
	policies Policies
	disks    Disks
}

// New returns Reports. nodes returns the number of nodes of the cluster.
func New(s Source, nodes func() int, p Policies, d Disks) *Reports {
	return &Reports{source: s, nodes: nodes, policies: p, disks: d}
}

// Run distributes the reports until ctx ends; it then returns nil.
func (r *Reports) Run(ctx context.Context) error {
	var mu sync.Mutex
	var latest All
	changed := make(chan struct{}, 1)
	var following sync.WaitGroup
	defer following.Wait()
	following.Go(func() {
		_ = r.source.Follow(ctx, func(all All) { // always nil
			mu.Lock()
			defer mu.Unlock()
			latest = maps.Clone(all)
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	})
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		mu.Lock()
		reports := latest
		mu.Unlock()
		r.policies.SetRefused(byPolicy(reports, r.nodes()))
		r.disks.SetStorage(disks(reports))
		select {
		case <-time.After(refusedEvery):
		case <-ctx.Done():
			return nil
		}
	}
}

// refusedEvery is the shortest interval between two changes of a status because of reports.
const refusedEvery = 10 * time.Second

// maxNamedNodes limits the nodes that a status names.
const maxNamedNodes = 10

// byPolicy groups the reports by policy. nodes is the number of nodes of the cluster.
func byPolicy(reports All, nodes int) map[evaluation.Key]policystatus.Nodes {
	names := make(map[evaluation.Key][]string)
	out := make(map[evaluation.Key]policystatus.Nodes)
	for _, node := range slices.Sorted(maps.Keys(reports)) {
		for _, r := range reports[node] {
			if r.Key == evaluation.NodeStorage {
				continue
			}
			x := out[r.Key]
			if x.Count++; x.Count == 1 {
				x.All, x.Reason = nodes, r.Reason
			}
			if x.Count <= maxNamedNodes {
				names[r.Key] = append(names[r.Key], node)
			}
			out[r.Key] = x
		}
	}
	for k, x := range out {
		x.Names = strings.Join(names[k], ", ")
		if x.Count > maxNamedNodes {
			x.Names += ", …"
		}
		out[k] = x
	}
	return out
}

// disks returns the errors of disks that cannot be written, by node.
func disks(reports All) map[string]string {
	out := make(map[string]string)
	for node, all := range reports {
		for _, r := range all {
			if r.Key == evaluation.NodeStorage {
				out[node] = r.Reason
			}
		}
	}
	return out
}
