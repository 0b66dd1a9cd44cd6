// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// probeTimeout is the timeout of the calls to other services in GetStatus.
const probeTimeout = 2 * time.Second

// Facts are values in GetStatus that do not change while the process runs.
type Facts struct {
	Version, NodeName, PolicyMode, KernelRelease string
	Start                                        time.Time
	PolicyRequired                               bool // ADD needs the policy service
	PolicyAudit                                  bool // the configuration puts every endpoint in audit mode
}

// Called are clients of the services that the datapath calls, for GetStatus.
type Called struct {
	IPAM interface {
		Pools(ctx context.Context) ([]endpoint.Pool, error)
		// Writable returns the reason why ipam cannot write its state, and therefore cannot allocate addresses.
		Writable(ctx context.Context) error
		Err() error // of the last call
	}
	Identity interface {
		Ping(ctx context.Context) error
		// Ready returns the reason why a new label set would get no identity.
		Ready(ctx context.Context) error
	}
	Policy interface {
		Ping(ctx context.Context) error
	}
}

// MapUsage is the usage of a map; Entries is -1 if it is unknown.
type MapUsage struct {
	Name       string
	Entries    int64
	MaxEntries uint32
	Bytes      uint64
}

// Connections counts tracked connections.
type Connections struct {
	LiveIPv4, LiveIPv6                           uint64 // as of the last collection
	Created, Revoked, Expired, Evicted, PickedUp uint64
	Reevaluated, Related, Unremembered           uint64
	PickUpStopped                                int           // endpoints whose connections are not picked up
	Collected                                    time.Duration // how long the last collection took
	EvictedAt                                    time.Time     // when new evictions were last found; zero: never in this run
	OutsideSpent                                 time.Time     // when the external budget was last spent; zero: never in this run
}

// ClusterStream is the state of this node's view of the other nodes.
type ClusterStream struct {
	// Unpublished counts creations that returned before other nodes had the addresses, in modes that wait for that.
	Unpublished uint64
	cluster.State
	Prefixes, Waiting int   // prefixes of the cluster in the ipcache, and how many of them wait for their identity
	Resting           int   // node IDs in quarantine
	Numbers           error // error of reading or writing their file
	Registration      error // why the current state of the node is not registered
}

// maxRefused limits the number of reported invalid entries of the cluster.
const maxRefused = 16

func (c ClusterStream) proto() *datapathv1.ClusterStream {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return &datapathv1.ClusterStream{
		Complete: c.Complete, Error: text(c.Err), Nodes: uint32(c.Nodes), Prefixes: uint32(c.Prefixes),
		WaitingPrefixes: uint32(c.Waiting), RestingNumbers: uint32(c.Resting), RegistrationError: text(c.Registration),
		Refused: c.Refused[:min(len(c.Refused), maxRefused)],
	}
}

// warnings returns the warnings for an operator.
func (c ClusterStream) warnings() (all []string) {
	if c.Err != nil {
		all = append(all, fmt.Sprintf("cluster: using the last known state of other nodes: %v", c.Err))
	}
	if c.Registration != nil {
		all = append(all, fmt.Sprintf("cluster: the current state of this node is not registered: %v", c.Registration))
	}
	if c.Numbers != nil {
		all = append(all, fmt.Sprintf("cluster: node IDs: %v", c.Numbers))
	}
	for _, r := range c.Refused[:min(len(c.Refused), maxRefused)] {
		all = append(all, "cluster: not believed: "+r)
	}
	return all
}

// lossNews is how long a warning is shown after evictions or exhausted budgets were found.
const lossNews = 5 * time.Minute

// warnings returns the warnings for an operator.
func (c Connections) warnings(now time.Time) (all []string) {
	if !c.EvictedAt.IsZero() && now.Sub(c.EvictedAt) < lossNews {
		all = append(all, fmt.Sprintf("connections were evicted because the map is full, found at %s, %d in all: answers "+
			"that come late to UDP may be dropped, TCP connections continue; `sluice map list` shows how full it is, `sluice observe "+
			"--reason connection-budget` which containers use it up", c.EvictedAt.UTC().Format(time.RFC3339), c.Evicted))
	}
	if !c.OutsideSpent.IsZero() && now.Sub(c.OutsideSpent) < lossNews {
		all = append(all, fmt.Sprintf("more connections from outside than their budget, last at %s: new ones from outside were "+
			"dropped, also those that policies allow; open connections and new ones of containers are not affected; `sluice "+
			"observe --reason connection-budget` shows who begins them", c.OutsideSpent.UTC().Format(time.RFC3339)))
	}
	if c.PickUpStopped > 0 {
		all = append(all, fmt.Sprintf("more connections were ended by policy than the node can remember, %d so far: TCP "+
			"connections of %d endpoints that it does not know are not picked up, and have to be opened again", c.Unremembered,
			c.PickUpStopped))
	}
	return all
}

// Counts reads the kernel's counters.
type Counts interface {
	Packets() ([]event.Counter, error)
	EventsLost() (uint64, error)
	MapUsage() ([]MapUsage, error)
	Connections() (Connections, error)
}

// GetStatus implements the API.
func (s *Server) GetStatus(ctx context.Context, _ *datapathv1.GetStatusRequest) (*datapathv1.GetStatusResponse, error) {
	n := s.Core.Counts()
	packets, err := s.Counts.Packets()
	if err != nil {
		return nil, statusOf(err)
	}
	lost, err := s.Counts.EventsLost()
	if err != nil {
		return nil, statusOf(err)
	}
	usage, err := s.Counts.MapUsage()
	if err != nil {
		return nil, statusOf(err)
	}
	conns, err := s.Counts.Connections()
	if err != nil {
		return nil, statusOf(err)
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	of := s.readiness(ctx)
	var warnings []string
	for _, part := range s.Subjects {
		warnings = append(warnings, part.Warnings()...)
	}
	warnings = slices.Concat(warnings, n.BadRecords, n.Unrepaired, n.Waiting, conns.warnings(time.Now()))
	resp := &datapathv1.GetStatusResponse{
		PolicyMode:        datapathv1.PolicyMode(datapathv1.PolicyMode_value["POLICY_MODE_"+strings.ToUpper(s.Facts.PolicyMode)]),
		AttachmentRepairs: n.Repairs, PendingReleases: uint32(n.PendingReleases),
		KernelRelease: s.Facts.KernelRelease, NodeAddresses: wire.Addresses(s.Ranges.NodeAddrs()), EventsLost: lost,
		DeviceRepairs: n.DeviceRepairs, NodeRepairs: n.NodeRepairs,
		Connections: &datapathv1.ConnectionCounts{
			Live: conns.LiveIPv4 + conns.LiveIPv6, Created: conns.Created, Revoked: conns.Revoked,
			Expired: conns.Expired, Evicted: conns.Evicted, PickedUp: conns.PickedUp,
		},
	}
	if s.Cluster != nil {
		c := s.Cluster()
		resp.ClusterStream, warnings = c.proto(), append(warnings, c.warnings()...)
	}
	if s.Frontends != nil {
		services := s.Frontends.Status()
		counts, err := s.Services.Counts()
		if err != nil {
			return nil, statusOf(err)
		}
		resp.FrontendStream, warnings = frontendStream(services, counts), append(warnings, frontendWarnings(services)...)
	}
	if s.Probes != nil {
		probes, troubles := nodeProbes(s.Probes())
		resp.NodeProbes, warnings = probes, append(warnings, troubles...)
	}
	if s.Routing != nil {
		resp.PodRouting = s.Routing()
	}
	complete, serr := s.Owners.State()
	resp.IdentityStream = &datapathv1.IdentityStream{
		Complete: complete, Changed: n.Relabels, Pending: uint32(n.PendingRelabels),
	}
	if serr != nil {
		resp.IdentityStream.Error = serr.Error()
	}
	for _, c := range s.Ranges.All() {
		resp.PodPrefixes = append(resp.PodPrefixes, c.String())
	}
	addCounts(resp, n.ByState, usage, packets)
	depend := func(name string, err error) {
		d := &datapathv1.Dependency{Name: name, Serving: err == nil}
		if err != nil {
			d.Error = err.Error()
		}
		resp.Dependencies = append(resp.Dependencies, d)
	}
	depend("identity", of.identity)
	depend("ipam", s.Called.IPAM.Err())
	if s.Policy != nil {
		p := s.Policy.Status()
		depend("policy", of.policy)
		resp.PolicyRevision, resp.PolicyRefusals = p.Revision, p.Refusals
		if p.Waiting > 0 {
			resp.PolicyRefusals = append(resp.PolicyRefusals,
				fmt.Sprintf("%d identities stay unknown, because they do not fit into the tables", p.Waiting))
		}
		if p.Held != "" && !s.Facts.PolicyRequired {
			warnings = append(warnings, "policy: "+p.Held)
		}
		if p.Unsaved != "" {
			warnings = append(warnings, "policy: "+p.Unsaved)
		}
		resp.AuditMode, warnings = s.auditMode(), append(warnings, s.auditWarnings()...)
	}
	if s.Frontends != nil {
		depend("loadbalancer", s.Frontends.Status().Err)
	}
	problems := of.all()
	resp.Service = &statusv1.ServiceStatus{
		Version: s.Facts.Version, StartTime: timestamppb.New(s.Facts.Start), Problems: problems,
	}
	resp.AddReady, resp.KnownAddReady, resp.Warnings = len(problems) == 0, len(of.every) == 0, warnings
	if since := s.unreadySince(of); !since.IsZero() {
		resp.AddUnreadySince = timestamppb.New(since)
	}
	return resp, nil
}

// addCounts adds the counts of maps, endpoints and packets.
func addCounts(
	resp *datapathv1.GetStatusResponse, byState map[endpoint.State]int, usage []MapUsage, packets []event.Counter,
) {
	for _, m := range usage {
		resp.Maps = append(resp.Maps, &datapathv1.MapUsage{Name: m.Name, Entries: m.Entries, MaxEntries: m.MaxEntries, Bytes: m.Bytes})
	}
	for state := endpoint.Restoring; state <= endpoint.Damaged; state++ {
		resp.Endpoints = append(resp.Endpoints, &datapathv1.EndpointStateCount{
			State: protoState(state), Count: uint32(byState[state]),
		})
	}
	for _, c := range packets {
		resp.PacketCounters = append(resp.PacketCounters, &datapathv1.PacketCounter{
			Reason: datapathv1.Reason(c.Reason), Direction: netv1.Direction(c.Direction), Dropped: c.Reason.Dropped(),
			Packets: c.Packets, Bytes: c.Bytes,
		})
	}
}

// readiness lists the reasons why an ADD cannot be served now.
type readiness struct {
	every            []*statusv1.Problem // for all labels
	fresh            []*statusv1.Problem // for labels that no endpoint of this node has
	identity, policy error               // why the services do not answer
}

func (r readiness) all() []*statusv1.Problem { return slices.Concat(r.every, r.fresh) }

// readiness calls the services that an ADD needs.
func (s *Server) readiness(ctx context.Context) (r readiness) {
	const service = statusv1.ProblemReason_PROBLEM_REASON_SERVICE
	// In parallel, so that a service that hangs until the deadline does not hide the state of the others.
	var asked sync.WaitGroup
	asked.Go(func() { r.every = s.problems(ctx) })
	var numbers error // why new label sets get no identity
	asked.Go(func() {
		if r.identity = s.Called.Identity.Ping(ctx); r.identity == nil {
			numbers = s.Called.Identity.Ready(ctx)
		}
	})
	var p policysync.Status
	if s.Policy != nil {
		p = s.Policy.Status()
		if r.policy = p.Err; r.policy == nil {
			asked.Go(func() { r.policy = s.Called.Policy.Ping(ctx) })
		}
	}
	asked.Wait()
	r.fresh = appendError(appendError(r.fresh, service, r.identity), service, numbers)
	if s.Policy == nil {
		return r
	}
	if s.Facts.PolicyRequired {
		if errors.Is(r.policy, policystream.ErrWaits) && s.Core.Counts().ByState[endpoint.Ready] == 0 {
			// After a restart, no label set has tables yet.
			r.every = appendError(r.every, statusv1.ProblemReason_PROBLEM_REASON_POLICY, r.policy)
		} else {
			r.fresh = appendError(r.fresh, service, r.policy)
		}
		if p.Held != "" {
			r.fresh = append(r.fresh, problem(statusv1.ProblemReason_PROBLEM_REASON_POLICY, "policy: "+p.Held))
		}
	}
	return r
}

// unreadySince returns since when no ADD at all can be served; zero if some can.
func (s *Server) unreadySince(r readiness) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(r.every) == 0:
		s.unready = time.Time{}
	case s.unready.IsZero():
		s.unready = time.Now()
	}
	return s.unready
}

// Unready returns the reason why an ADD with labels that are new to the node cannot be served now; nil if it can.
func (s *Server) Unready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	r := s.readiness(ctx)
	s.unreadySince(r)
	if problems := r.all(); len(problems) > 0 {
		return errors.New(problems[0].GetText())
	}
	return nil
}

func problem(reason statusv1.ProblemReason, text string) *statusv1.Problem {
	return &statusv1.Problem{Reason: reason, Text: text}
}

func appendError(all []*statusv1.Problem, reason statusv1.ProblemReason, err error) []*statusv1.Problem {
	if err == nil {
		return all
	}
	return append(all, problem(reason, err.Error()))
}

// problems returns the reasons why no ADD can succeed now, whatever its labels.
func (s *Server) problems(ctx context.Context) []*statusv1.Problem {
	all := appendError(nil, statusv1.ProblemReason_PROBLEM_REASON_STORAGE, s.Records.Err())
	pools, err := s.Called.IPAM.Pools(ctx)
	if err != nil {
		return appendError(all, statusv1.ProblemReason_PROBLEM_REASON_SERVICE, err)
	}
	all = appendError(all, statusv1.ProblemReason_PROBLEM_REASON_SERVICE, s.Called.IPAM.Writable(ctx))
	var texts []string
	if s.Keeper != nil {
		texts = s.Keeper.Problems()
	} else {
		texts = differences(s.Ranges.All(), pools)
	}
	for _, text := range texts {
		all = append(all, problem(statusv1.ProblemReason_PROBLEM_REASON_SETTINGS, text))
	}
	return all
}

// differences describes differences between the pod ranges and ipam's pools.
func differences(cidrs []netip.Prefix, pools []endpoint.Pool) (all []string) {
	for _, c := range cidrs {
		i := slices.IndexFunc(pools, func(p endpoint.Pool) bool { return p.CIDR == c })
		switch {
		case i < 0:
			all = append(all, fmt.Sprintf("podCIDRs: ipam has no pool %v; it has %v", c, pools))
		case pools[i].Gateway != c.Addr().Next():
			all = append(all, fmt.Sprintf("podCIDRs: ipam's gateway of %v is %v, the node's address here is %v", c, pools[i].Gateway, c.Addr().Next()))
		}
	}
	for _, p := range pools {
		if !slices.Contains(cidrs, p.CIDR) {
			all = append(all, fmt.Sprintf("podCIDRs: ipam has the pool %v, which is not among them", p.CIDR))
		}
	}
	return all
}
