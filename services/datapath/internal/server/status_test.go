// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// surroundings are the services and the disk, with their failures.
type surroundings struct {
	pools               []endpoint.Pool
	ipam, identity, own error
	store, ipamDisk     error // errors of identity's store and of ipam's disk
}

func (s *surroundings) Pools(context.Context) ([]endpoint.Pool, error) { return s.pools, s.ipam }

func (s *surroundings) Err() error { return s.own }

func (s *surroundings) IdentityStream() (bool, error) { return s.identity == nil, s.identity }

func (s *surroundings) Ping(context.Context) error { return s.identity }

func (s *surroundings) Writable(context.Context) error { return s.ipamDisk }

func (s *surroundings) Ready(context.Context) error { return s.store }

// configured are endpoints whose pod ranges are configured.
type configured struct {
	*surroundings

	parts  lifecycle.Parts
	ranges *podrange.Set
}

func (c configured) Calls() lifecycle.Parts        { return c.parts }
func (c configured) PodRanges() *podrange.Set      { return c.ranges }
func (configured) RangeProblems() ([]string, bool) { return nil, false }

// noLinks are the links of a node without devices.
type noLinks struct{ endpoint.Links }

// counted is a kernel whose counters are zero.
type counted struct{}

func (counted) PacketCounters() ([]event.Counter, error) { return nil, nil }
func (counted) LostEvents() (uint64, error)              { return 0, nil }
func usage() ([]pin.Usage, error)                        { return nil, nil }
func connections() (Connections, error)                  { return Connections{}, nil }

func TestStatusSaysWhyAnAddCannotBeServed(t *testing.T) {
	const (
		storage  = statusv1.ProblemReason_PROBLEM_REASON_STORAGE
		service  = statusv1.ProblemReason_PROBLEM_REASON_SERVICE
		settings = statusv1.ProblemReason_PROBLEM_REASON_SETTINGS
	)
	own := netip.MustParsePrefix("10.1.0.0/24")
	good := endpoint.Pool{CIDR: own, Gateway: netip.MustParseAddr("10.1.0.1")}
	other := endpoint.Pool{CIDR: netip.MustParsePrefix("10.2.0.0/24"), Gateway: netip.MustParseAddr("10.2.0.1")}
	for name, c := range map[string]struct {
		around surroundings
		want   []statusv1.ProblemReason
		known  bool // an ADD of known labels can be served
		text   string
	}{
		"all is well":      {surroundings{pools: []endpoint.Pool{good}}, nil, true, ""},
		"without identity": {surroundings{pools: []endpoint.Pool{good}, identity: errors.New("identity: away")}, []statusv1.ProblemReason{service}, true, "identity: away"},
		"without etcd": {
			surroundings{pools: []endpoint.Pool{good}, store: errors.New("identity: not ready")},
			[]statusv1.ProblemReason{service},
			true, "identity: not ready",
		},
		"without ipam":     {surroundings{ipam: errors.New("ipam: away")}, []statusv1.ProblemReason{service}, false, "ipam: away"},
		"the disk is full": {surroundings{pools: []endpoint.Pool{good}, own: errors.New("no space left")}, []statusv1.ProblemReason{storage}, false, "no space left"},
		"the disk of ipam is full": {
			surroundings{pools: []endpoint.Pool{good}, ipamDisk: errors.New("ipam: no space left")},
			[]statusv1.ProblemReason{service},
			false, "ipam: no space left",
		},
		"another gateway":        {surroundings{pools: []endpoint.Pool{{CIDR: own, Gateway: netip.MustParseAddr("10.1.0.9")}}}, []statusv1.ProblemReason{settings}, false, "10.1.0.9"},
		"one pool too many":      {surroundings{pools: []endpoint.Pool{good, other}}, []statusv1.ProblemReason{settings}, false, "10.2.0.0/24"},
		"a range without a pool": {surroundings{pools: nil}, []statusv1.ProblemReason{settings}, false, "no pool 10.1.0.0/24"},
	} {
		endpoints, ranges := lifecycle.New(lifecycle.Config{Links: noLinks{}}), podrange.Of([]netip.Prefix{own}, false)
		pods := configured{&c.around, endpoints, ranges}
		s := &Server{
			endpoints: endpoints, records: &c.around, facts: Facts{Version: "v1"}, ranges: pods,
			called: Called{IPAM: &c.around, Identity: &c.around}, subjects: []Subject{warning("w")},
			parts: []Part{
				EndpointsPart{pods},
				PacketsPart{counted{}},
				MapsPart{usage},
				ConnectionsPart{connections},
				ClusterPart{func() ClusterStream {
					return ClusterStream{
						State: cluster.State{
							Complete: c.around.identity == nil, Err: c.around.identity, Nodes: 3, Refused: []string{"a"},
						},
						Prefixes: 7, Waiting: 2, Resting: 1, Registration: c.around.identity,
					}
				}},
				ProbesPart{func() (probe.State, bool) {
					return probe.State{Nodes: 1, Paths: []probe.Path{{Node: "b", Trouble: "no answer"}}}, true
				}},
			},
		}
		st, err := s.GetStatus(t.Context(), &datapathv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var got []statusv1.ProblemReason
		var text []string
		for _, p := range st.GetService().GetProblems() {
			got, text = append(got, p.GetReason()), append(text, p.GetText())
		}
		if !slices.Equal(got, c.want) || !strings.Contains(strings.Join(text, "\n"), c.text) {
			t.Errorf("%s: problems %v %q, want %v and %q", name, got, text, c.want, c.text)
		}
		well := c.around.identity == nil
		if stream := st.GetIdentityStream(); stream.GetComplete() != well || (stream.GetError() == "") != well {
			t.Errorf("%s: stream %v", name, stream)
		}
		others, warnings := st.GetClusterStream(), 3 // one each of a subject, of invalid entries, and of probes
		if !well {
			warnings += 2
		}
		if others.GetComplete() != well || (others.GetError() == "") != well ||
			(others.GetRegistrationError() == "") != well ||
			others.GetNodes() != 3 || others.GetPrefixes() != 7 || others.GetWaitingPrefixes() != 2 ||
			others.GetRestingNumbers() != 1 ||
			len(st.GetWarnings()) != warnings {
			t.Errorf("%s: other nodes %v, warnings %q", name, others, st.GetWarnings())
		}
		if p := st.GetNodeProbes(); p.GetNodes() != 1 || len(p.GetPaths()) != 1 {
			t.Errorf("%s: probes %v", name, p)
		}
		if (st.GetAddUnreadySince() == nil) != c.known {
			t.Errorf("%s: no ADD can be served since %v", name, st.GetAddUnreadySince())
		}
		if err := s.Unready(t.Context()); (err == nil) != (len(c.want) == 0) {
			t.Errorf("%s: Unready returns %v", name, err)
		}
		if st.GetAddReady() != (len(c.want) == 0) || st.GetKnownAddReady() != c.known || st.GetService().GetVersion() != "v1" {
			t.Errorf("%s: ready %t, for known labels %t, want %t and %t", name, st.GetAddReady(), st.GetKnownAddReady(), len(c.want) == 0, c.known)
		}
	}
}

func TestStatusWarnsOfConnectionsThatWereLost(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		conns Connections
		want  string
	}{
		{Connections{Evicted: 7}, ""}, // of an earlier run
		{Connections{Evicted: 7, EvictedAt: now.Add(-time.Hour)}, ""},
		{Connections{Evicted: 7, EvictedAt: now.Add(-2 * time.Second)}, ", 7 in all"},
		{Connections{OutsideSpent: now.Add(-time.Hour)}, ""},
		{Connections{OutsideSpent: now.Add(-2 * time.Second)}, "connections from outside exceeded their budget, last at "},
		{Connections{PickUpStopped: 3, Unremembered: 9}, "9 so far: TCP connections of 3 endpoints"},
	} {
		got := strings.Join(c.conns.warnings(now), "\n")
		if !strings.Contains(got, c.want) || (c.want == "") != (got == "") {
			t.Errorf("%+v: %q, want %q", c.conns, got, c.want)
		}
	}
}

// warning is a subject with a warning.
type warning string

func (w warning) Warnings() []string { return []string{string(w)} }
