// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodereports sorts what nodes report: policies that they do not enforce as written, and disks that take no
// writes.
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

// Refused is a policy that a node does not enforce as written, or evaluation.NodeStorage.
type Refused struct {
	Key    evaluation.Key
	Reason string
}

// All are the reports of all nodes that have any.
type All map[string][]Refused

// Source follows the reports.
type Source interface {
	// Follow calls told with the reports of all nodes whenever they change, until ctx ends; it
	// then returns nil. While the identity service is away the last reports stay.
	Follow(ctx context.Context, told func(All)) error
}

// Policies takes the policies that some nodes do not enforce as written.
type Policies interface {
	SetRefused(refused map[evaluation.Key]policystatus.Nodes)
}

// Disks takes the reasons of nodes whose disks take no writes, by node.
type Disks interface {
	SetStorage(reasons map[string]string)
}

// Reports passes on what a source has.
type Reports struct {
	source   Source
	nodes    func() int // of the cluster
	policies Policies
	disks    Disks
}

// New returns Reports. nodes is the number of nodes of the cluster.
func New(s Source, nodes func() int, p Policies, d Disks) *Reports {
	return &Reports{source: s, nodes: nodes, policies: p, disks: d}
}

// Run passes the reports on until ctx ends; it then returns nil.
func (r *Reports) Run(ctx context.Context) error {
	var mu sync.Mutex
	var latest All
	changed := make(chan struct{}, 1)
	var following sync.WaitGroup
	defer following.Wait()
	following.Go(func() {
		_ = r.source.Follow(ctx, func(all All) { // it returns nothing but nil
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

// refusedEvery is the shortest time between two changes of what the status says of nodes.
const refusedEvery = 10 * time.Second

// maxNamedNodes is how many nodes a status names.
const maxNamedNodes = 10

// byPolicy are the nodes that do not enforce each policy as written, of so many nodes.
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

// disks are the reasons of nodes whose disks take no writes, by node.
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
