// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodereports evaluates the reports of nodes: policies and Services that they do not enforce as written, and
// disks that cannot be written.
package nodereports

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/services/controller/internal/policystatus"
	"github.com/sluice-net/sluice/services/policy/evaluation"
)

// Refused is an object that a node does not enforce as written. With the key evaluation.NodeStorage it reports a disk.
type Refused struct {
	Key    evaluation.Key
	Reason string
}

// Report is the report of a node on policies or on Services.
type Report struct {
	Refused []Refused
	Omitted int // number of further objects, which do not fit into the report
	// Reasons counts the omitted objects by reason code; nil: the node has an earlier version.
	Reasons map[string]uint32
	// Unreadable means that the report cannot be read. The other fields are then empty.
	Unreadable bool
}

// All contains the reports by node. A node without a report is missing.
type All map[string]Report

// Cluster contains the reports of all nodes by subject.
type Cluster struct{ Policies, Services All }

// Source follows the reports.
type Source interface {
	// Follow calls told with the reports of all nodes whenever they change, until ctx ends; it then returns nil.
	// While the identity service is unreachable, the last reports remain.
	Follow(ctx context.Context, told func(Cluster)) error
}

// Objects receives the policies or the Services that some nodes do not enforce as written.
type Objects interface {
	// others describes the nodes whose reports omit objects, so that they may not enforce an object that is not in
	// refused.
	SetRefused(refused map[evaluation.Key]policystatus.Nodes, others policystatus.Nodes)
}

// Disks receives the errors of disks that cannot be written, by node.
type Disks interface {
	SetStorage(reasons map[string]string)
}

// Reports distributes the reports of a source.
type Reports struct {
	source   Source
	nodes    func() int // number of nodes of the cluster
	policies Objects
	services Objects
	disks    Disks
}

// New returns Reports. nodes returns the number of nodes of the cluster.
func New(s Source, nodes func() int, policies, services Objects, d Disks) *Reports {
	return &Reports{source: s, nodes: nodes, policies: policies, services: services, disks: d}
}

// Run distributes the reports until ctx ends; it then returns nil.
func (r *Reports) Run(ctx context.Context) error {
	var mu sync.Mutex
	var latest Cluster
	var failing map[string]string // errors of disks, by node
	changed := make(chan struct{}, 1)
	var following sync.WaitGroup
	defer following.Wait()
	following.Go(func() {
		_ = r.source.Follow(ctx, func(all Cluster) { // always nil
			mu.Lock()
			defer mu.Unlock()
			latest = Cluster{Policies: maps.Clone(all.Policies), Services: maps.Clone(all.Services)}
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
		r.policies.SetRefused(byObject(reports.Policies, r.nodes()))
		r.services.SetRefused(byObject(reports.Services, r.nodes()))
		failing = disks(reports.Policies, failing)
		r.disks.SetStorage(failing)
		select {
		case <-time.After(refusedEvery):
		case <-ctx.Done():
			return nil
		}
	}
}

// refusedEvery is the minimum interval between two changes of statuses that are caused by reports.
const refusedEvery = 10 * time.Second

// maxNamedNodes limits the nodes that a status names.
const maxNamedNodes = 10

// byObject groups the reports by object. nodes is the number of nodes of the cluster. others describes the nodes
// whose reports omit objects; it applies to objects that no node reports.
func byObject(reports All, nodes int) (refused map[evaluation.Key]policystatus.Nodes, others policystatus.Nodes) {
	names := make(map[evaluation.Key][]string)
	refused = make(map[evaluation.Key]policystatus.Nodes)
	var omitting, unreadable []string
	omitted, reasons := 0, make(map[string]int)
	for _, node := range slices.Sorted(maps.Keys(reports)) {
		if reports[node].Unreadable {
			unreadable = append(unreadable, node)
			continue
		}
		if n := reports[node].Omitted; n > 0 {
			omitting = append(omitting, node)
			omitted += n
			for code, count := range reports[node].Reasons {
				reasons[code] += int(count)
			}
		}
		for _, r := range reports[node].Refused {
			if r.Key == evaluation.NodeStorage {
				continue
			}
			x := refused[r.Key]
			if x.Count++; x.Count == 1 {
				x.All, x.Reason = nodes, r.Reason
			}
			names[r.Key] = append(names[r.Key], node)
			refused[r.Key] = x
		}
	}
	of := policystatus.Nodes{All: nodes, Unreadable: list(unreadable), UnreadableCount: len(unreadable)}
	for k, x := range refused {
		x.Names, x.Unreadable, x.UnreadableCount = list(names[k]), of.Unreadable, of.UnreadableCount
		x = unknown(x, omitting, names[k], omitted, reasons)
		refused[k] = x
	}
	return refused, unknown(of, omitting, nil, omitted, reasons)
}

// unknown adds the nodes whose reports omit objects, without the nodes that report this object.
func unknown(x policystatus.Nodes, omitting, reporting []string, omitted int, reasons map[string]int,
) policystatus.Nodes {
	var all []string
	for _, node := range omitting {
		if _, reports := slices.BinarySearch(reporting, node); !reports {
			all = append(all, node)
		}
	}
	if x.UnknownCount = len(all); x.UnknownCount > 0 {
		x.Unknown = list(all)
		x.Omitted, x.Reasons = rounded(omitted), counts(reasons)
	}
	return x
}

// rounded returns the largest power of two up to n, or 0. With exact numbers, each change of a number would change
// every status.
func rounded(n int) int { return 1 << bits.Len(uint(n)) >> 1 }

// maxReasons limits the reason codes in a status.
const maxReasons = 5

// counts lists the most frequent reason codes: "TableTooLarge 128, NotStored 2".
func counts(reasons map[string]int) string {
	codes := slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		return cmp.Or(cmp.Compare(rounded(reasons[b]), rounded(reasons[a])), cmp.Compare(a, b))
	})
	var all []string
	for i, code := range codes {
		if i == maxReasons {
			all = append(all, "…")
			break
		}
		if n := rounded(reasons[code]); n > 0 {
			all = append(all, fmt.Sprintf("%s %d", code, n))
		}
	}
	return strings.Join(all, ", ")
}

// list returns the names of at most maxNamedNodes nodes.
func list(nodes []string) string {
	if len(nodes) <= maxNamedNodes {
		return strings.Join(nodes, ", ")
	}
	return strings.Join(nodes[:maxNamedNodes], ", ") + ", …"
}

// disks returns the errors of disks that cannot be written, by node. The error of a node whose report cannot be read
// stays.
func disks(reports All, before map[string]string) map[string]string {
	out := make(map[string]string)
	for node, report := range reports {
		if why, ok := before[node]; ok && report.Unreadable {
			out[node] = why
		}
		for _, r := range report.Refused {
			if r.Key == evaluation.NodeStorage {
				out[node] = r.Reason
			}
		}
	}
	return out
}
