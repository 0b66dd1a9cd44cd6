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
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// probeTimeout is the timeout of the calls to other services in GetStatus.
const probeTimeout = 2 * time.Second

// Facts are values in GetStatus that do not change while the process runs.
type Facts struct {
	Version, NodeName, PolicyMode, KernelRelease string
	Start                                        time.Time
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

// GetStatus implements the API.
func (s *Server) GetStatus(ctx context.Context, _ *datapathv1.GetStatusRequest) (*datapathv1.GetStatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	of := s.readiness(ctx)
	resp := &datapathv1.GetStatusResponse{
		PolicyMode:    datapathv1.PolicyMode(datapathv1.PolicyMode_value["POLICY_MODE_"+strings.ToUpper(s.facts.PolicyMode)]),
		KernelRelease: s.facts.KernelRelease,
	}
	r := &report{
		GetStatusResponse: resp, ready: of,
		dependencies: map[string]error{"identity": of.identity, "ipam": s.called.IPAM.Err()},
	}
	for _, subject := range s.subjects {
		r.warn(subject.Warnings()...)
	}
	for _, part := range s.parts {
		if err := part.report(r); err != nil {
			return nil, statusOf(err)
		}
	}
	r.finish()
	problems := of.all()
	resp.Service = &statusv1.ServiceStatus{
		Version: s.facts.Version, StartTime: timestamppb.New(s.facts.Start), Problems: problems,
	}
	resp.AddReady, resp.KnownAddReady = len(problems) == 0, len(of.every) == 0
	if since := s.unreadySince(of); !since.IsZero() {
		resp.AddUnreadySince = timestamppb.New(since)
	}
	return resp, nil
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
		if r.identity = s.called.Identity.Ping(ctx); r.identity == nil {
			numbers = s.called.Identity.Ready(ctx)
		}
	})
	var p policysync.Status
	if s.policy != nil {
		p = s.policy.Tables.Status()
		if r.policy = p.Err; r.policy == nil {
			asked.Go(func() { r.policy = s.called.Policy.Ping(ctx) })
		}
	}
	asked.Wait()
	r.fresh = appendError(appendError(r.fresh, service, r.identity), service, numbers)
	if s.policy == nil {
		return r
	}
	if s.policy.Required {
		if errors.Is(r.policy, policystream.ErrWaits) && s.endpoints.Report.Counts().ByState[endpoint.Ready] == 0 {
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
	all := appendError(nil, statusv1.ProblemReason_PROBLEM_REASON_STORAGE, s.records.Err())
	pools, err := s.called.IPAM.Pools(ctx)
	if err != nil {
		return appendError(all, statusv1.ProblemReason_PROBLEM_REASON_SERVICE, err)
	}
	all = appendError(all, statusv1.ProblemReason_PROBLEM_REASON_SERVICE, s.called.IPAM.Writable(ctx))
	texts, ok := s.ranges.RangeProblems()
	if !ok {
		texts = differences(s.ranges.PodRanges().All(), pools)
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
