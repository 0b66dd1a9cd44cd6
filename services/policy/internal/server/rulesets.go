// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
)

// WatchRuleSets implements the service.
func (s *Server) WatchRuleSets(req *policyv1.WatchRuleSetsRequest,
	conn grpc.ServerStreamingServer[policyv1.WatchRuleSetsResponse],
) error {
	return watch.Serve(conn.Context(), s.Owner.RuleSets(), req.GetResumeToken(),
		func(e watch.Event[policytable.RuleSet, *layer7.Set]) error {
			m := &policyv1.WatchRuleSetsResponse{ResumeToken: e.Token}
			switch {
			case e.Kind == watch.Upsert && e.Key == owner.WantedNames:
				m.Event = &policyv1.WatchRuleSetsResponse_WantedNames{WantedNames: &policyv1.WantedNames{
					All: e.Value.All, DnsNames: patterns(e.Value.DNS),
				}}
			case e.Kind == watch.Upsert:
				m.Event = &policyv1.WatchRuleSetsResponse_Upsert{Upsert: toRuleSet(e.Key, e.Value)}
			case e.Kind == watch.Delete:
				m.Event = &policyv1.WatchRuleSetsResponse_Delete{Delete: uint32(e.Key)}
			default:
				m.Event = &policyv1.WatchRuleSetsResponse_Bookmark{Bookmark: &policyv1.RuleSetBookmark{
					SnapshotComplete: e.SnapshotComplete,
					Revision:         uint64(e.Origin.Revision), //nolint:gosec // a policy revision
				}}
			}
			return conn.Send(m)
		})
}

func toRuleSet(number policytable.RuleSet, s *layer7.Set) *policyv1.RuleSet {
	out := &policyv1.RuleSet{
		Number: uint32(number), Proxy: policywire.Proxy(s.Proxy), All: s.All,
		DnsNames: patterns(s.DNS), ServerNames: patterns(s.ServerNames),
	}
	for i := range s.HTTP {
		r := &s.HTTP[i]
		h := &policyv1.HTTPRule{Method: r.Method, Path: r.Path, Host: r.Host}
		for _, x := range r.Headers {
			header := &policyv1.HTTPHeader{Name: x.Name}
			if x.HasValue {
				header.Value = &x.Value
			}
			h.Headers = append(h.Headers, header)
		}
		for _, x := range r.Matches {
			h.HeaderMatches = append(h.HeaderMatches, &policyv1.HTTPHeaderMatch{
				Name: x.Name, Value: x.Value, Mismatch: policyv1.HeaderMismatch(x.Mismatch),
			})
		}
		out.Http = append(out.Http, h)
	}
	return out
}

func patterns(list []dnsname.Pattern) []string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return out
}
