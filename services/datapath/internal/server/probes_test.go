// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
)

// probed returns a node of each kind: reachable, behind a black hole, unreachable, and new.
func probed() probe.State {
	at := func(n byte) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, n}) }
	return probe.State{
		Nodes: 3, Answering: 2, Slowest: 1500 * time.Microsecond,
		Paths: []probe.Path{
			{
				Node: "a", Address: at(1), State: probe.Reachable, Since: time.Unix(5, 0), LastAnswer: time.Unix(9, 0),
				Latency: 1700 * time.Nanosecond, Smoothed: 1500 * time.Microsecond, MTU: 1500, ExpectedMTU: 1500,
				Lost: 2, Asked: 64,
			},
			{
				Node: "a", Address: netip.MustParseAddr("2001:db8::1"), Family: probe.IPv6, State: probe.Reachable,
				MTU: 1400, ExpectedMTU: 1500, Trouble: "path MTU 1400 < 1500 expected",
			},
			{
				Node: "b", Address: at(2), State: probe.Unreachable, ExpectedMTU: 1500, Losses: 3,
				Trouble: "no answer to 3 probes",
			},
			{Node: "c", Address: at(3)},
		},
		Counts: probe.Counts{
			Answered: [2]uint64{7, 5}, Lost: [2]uint64{3, 1}, Answers: 9, Dropped: [8]uint64{probe.Unregistered: 4},
		},
	}
}

func TestStatusHasEveryPathThoseWithTroubleFirst(t *testing.T) {
	got, warnings := nodeProbes(probed())
	var names []string
	for _, p := range got.GetPaths() {
		names = append(names, p.GetNode()+" "+p.GetAddress())
	}
	if want := []string{"a 2001:db8::1", "b 192.0.2.2", "a 192.0.2.1", "c 192.0.2.3"}; !slices.Equal(names, want) {
		t.Errorf("paths %q, want %q", names, want)
	}
	want := &datapathv1.NodePath{
		Node: "a", Address: "192.0.2.1", State: datapathv1.NodePathState_NODE_PATH_STATE_REACHABLE,
		StateSince: timestamppb.New(time.Unix(5, 0)), LastAnswer: timestamppb.New(time.Unix(9, 0)), LatencyUs: 1,
		SmoothedLatencyUs: 1500, PathMtu: 1500, ExpectedMtu: 1500, RecentLosses: 2, RecentQuestions: 64,
	}
	if !proto.Equal(got.GetPaths()[2], want) {
		t.Errorf("path %v, want %v", got.GetPaths()[2], want)
	}
	const unknown = datapathv1.NodePathState_NODE_PATH_STATE_UNKNOWN
	if p := got.GetPaths()[3]; p.GetState() != unknown || p.GetLastAnswer() != nil {
		t.Errorf("a new path %v", p)
	}
	if got.GetNodes() != 3 || got.GetAnsweringNodes() != 2 || got.GetSlowestUs() != 1500 || got.GetPathCount() != 4 {
		t.Errorf("sums %v", got)
	}
	if want := []string{
		"node a at 2001:db8::1: path MTU 1400 < 1500 expected", "node b at 192.0.2.2: no answer to 3 probes",
	}; !slices.Equal(warnings, want) {
		t.Errorf("warnings %q, want %q", warnings, want)
	}
}

func TestStatusOfManyPathsIsBounded(t *testing.T) {
	var s probe.State
	for i := range 5000 {
		s.Paths = append(s.Paths, probe.Path{Node: fmt.Sprintf("node-%04d", i), Trouble: "no answer"})
	}
	s.Paths[0].Trouble = ""
	got, warnings := nodeProbes(s)
	if len(got.GetPaths()) != maxPaths || got.GetPathCount() != 5000 || got.GetPaths()[0].GetNode() != "node-0001" {
		t.Errorf("%d of %d paths, the first %v", len(got.GetPaths()), got.GetPathCount(), got.GetPaths()[0])
	}
	if len(warnings) != maxPathWarnings+1 || !strings.HasSuffix(warnings[maxPathWarnings], ": 4983 more") {
		t.Errorf("warnings %q", warnings)
	}
}

// TestProbeMetricsAreSums tests that no series belongs to a single node.
func TestProbeMetricsAreSums(t *testing.T) {
	r := prometheus.NewRegistry()
	r.MustRegister(ProbesPart{func() (probe.State, bool) { return probed(), true }})
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			value := m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			if value != 0 || m.GetHistogram() != nil {
				name := strings.TrimPrefix(f.GetName(), "sluice_datapath_node_")
				got = append(got, strings.TrimSpace(fmt.Sprintln(name, strings.Join(labels, " "), value)))
			}
		}
	}
	want := []string{
		"latency_max_seconds  0.0015", "latency_seconds ipv4 0", "latency_seconds ipv6 0", "paths ipv4 reachable 1",
		"paths ipv4 unknown 1", "paths ipv4 unreachable 1", "paths ipv6 reachable 1", "paths_below_mtu ipv6 1",
		"probe_answers_total  9", "probes_dropped_total unregistered 4", "probes_total answered large 5",
		"probes_total answered small 7", "probes_total lost large 1", "probes_total lost small 3",
	}
	if !slices.Equal(got, want) {
		t.Errorf("metrics\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
