// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
)

// Limits on the reported paths to other nodes.
const (
	maxPaths        = 4096
	maxPathWarnings = 16
)

// byTrouble sorts paths with trouble before the others, and keeps the order otherwise.
func byTrouble(paths []probe.Path) []probe.Path {
	well := func(p probe.Path) int {
		if p.Trouble == "" {
			return 1
		}
		return 0
	}
	paths = slices.Clone(paths)
	slices.SortStableFunc(paths, func(a, b probe.Path) int { return cmp.Compare(well(a), well(b)) })
	return paths
}

// nodeProbes returns the state of probes for GetStatus, and the warnings for an operator.
func nodeProbes(s probe.State) (*datapathv1.NodeProbes, []string) {
	paths := byTrouble(s.Paths)
	m := &datapathv1.NodeProbes{
		Nodes: uint32(s.Nodes), AnsweringNodes: uint32(s.Answering), SlowestUs: micros(s.Slowest),
		PathCount: uint32(len(paths)),
	}
	var warnings []string
	troubled := 0
	for i, p := range paths {
		if p.Trouble != "" {
			if troubled++; troubled <= maxPathWarnings {
				warnings = append(warnings, fmt.Sprintf("node %s at %v: %s", p.Node, p.Address, p.Trouble))
			}
		}
		if i < maxPaths {
			m.Paths = append(m.Paths, protoPath(p))
		}
	}
	if more := troubled - maxPathWarnings; more > 0 {
		warnings = append(warnings, fmt.Sprintf("paths to other nodes with problems: %d more", more))
	}
	return m, warnings
}

func micros(d time.Duration) uint64 { return uint64(max(d, 0) / time.Microsecond) }

var protoReach = map[probe.Reach]datapathv1.NodePathState{
	probe.Unknown:     datapathv1.NodePathState_NODE_PATH_STATE_UNKNOWN,
	probe.Reachable:   datapathv1.NodePathState_NODE_PATH_STATE_REACHABLE,
	probe.Unreachable: datapathv1.NodePathState_NODE_PATH_STATE_UNREACHABLE,
}

func protoPath(p probe.Path) *datapathv1.NodePath {
	m := &datapathv1.NodePath{
		Node: p.Node, Address: p.Address.String(), State: protoReach[p.State], StateSince: timestamppb.New(p.Since),
		LatencyUs: micros(p.Latency), SmoothedLatencyUs: micros(p.Smoothed), PathMtu: uint32(p.MTU),
		ExpectedMtu: uint32(p.ExpectedMTU), SearchingMtu: p.Searching, Losses: uint32(p.Losses),
		RecentLosses: uint32(p.Lost), RecentQuestions: uint32(p.Asked), Trouble: p.Trouble,
	}
	if !p.LastAnswer.IsZero() {
		m.LastAnswer = timestamppb.New(p.LastAnswer)
	}
	return m
}

// probeMetrics are metrics of probes, summed over all paths: a label per node would create as many series on each node
// as the cluster has nodes.
type probeMetrics struct {
	paths, below, latency, slowest, questions, answers, dropped *prometheus.Desc
}

var probeDescs = probeMetrics{
	paths:     desc("node_paths", "Probed addresses of other nodes, by state.", "family", "state"),
	below:     desc("node_paths_below_mtu", "Paths that answer, with an MTU below the expected one.", "family"),
	latency:   desc("node_latency_seconds", "Round-trip times of answered probes.", "family"),
	slowest:   desc("node_latency_max_seconds", "Largest smoothed latency of a path that answers."),
	questions: desc("node_probes_total", "Probes by size and result.", "size", "result"),
	answers:   desc("node_probe_answers_total", "Probes of other nodes that were answered."),
	dropped:   desc("node_probes_dropped_total", "Packets to the probe port that were ignored.", "reason"),
}

func (m probeMetrics) all() []*prometheus.Desc {
	return []*prometheus.Desc{m.paths, m.below, m.latency, m.slowest, m.questions, m.answers, m.dropped}
}

func (m probeMetrics) collect(ch chan<- prometheus.Metric, s probe.State) {
	for _, f := range []probe.Family{probe.IPv4, probe.IPv6} {
		states, below := map[probe.Reach]int{}, 0
		for _, p := range s.Paths {
			if p.Family != f {
				continue
			}
			states[p.State]++
			if p.State == probe.Reachable && p.MTU != 0 && p.MTU < p.ExpectedMTU {
				below++
			}
		}
		for r := range protoReach {
			gauge(ch, m.paths, float64(states[r]), f.String(), r.String())
		}
		gauge(ch, m.below, float64(below), f.String())
		count, sum, buckets := s.Counts.Latency[f].Cumulative()
		ch <- prometheus.MustNewConstHistogram(m.latency, count, sum, buckets, f.String())
	}
	gauge(ch, m.slowest, s.Slowest.Seconds())
	for size := range s.Counts.Answered {
		counter(ch, m.questions, s.Counts.Answered[size], probe.Size(size).String(), "answered")
		counter(ch, m.questions, s.Counts.Lost[size], probe.Size(size).String(), "lost")
	}
	counter(ch, m.answers, s.Counts.Answers)
	for why, n := range s.Counts.Dropped {
		counter(ch, m.dropped, n, probe.Drop(why).String())
	}
}
