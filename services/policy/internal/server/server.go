// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements sluice.policy.v1 for the owner.
//
// It only converts: requests to types of the core and, in one function, errors of the core to status codes.
package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	words "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
	"github.com/sluice-net/sluice/services/policy/internal/wire"
)

// Server implements policyv1.PolicyServiceServer.
type Server struct {
	policyv1.UnimplementedPolicyServiceServer
	sharesv1.UnimplementedSharesServiceServer

	Owner   *owner.Owner
	Version string
	Started time.Time
	// Process describes the settings of this process.
	Process words.Process
	// Addresses resolves peers that are given only by address.
	Addresses Addresses
}

// Addresses resolves addresses of the cluster.
type Addresses interface {
	// IdentityOf returns the identity of an address; 0 if the address is outside of the cluster. It returns
	// peer.ErrUnresolved if the identity cannot be determined.
	IdentityOf(ctx context.Context, a netip.Addr) (identity.Numeric, error)
}

// Register adds the service.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	policyv1.RegisterPolicyServiceServer(r, s)
	sharesv1.RegisterSharesServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.Process)
}

// Methods returns who may call which method. Root may change policies, the datapath's user may receive the tables to
// enforce, sluice-dns may pass on the addresses that it learns, and the group may read.
func Methods() rpc.Methods {
	change := rpc.Limit{InFlight: 4, Waiting: 64}
	proxies := rpc.RootAnd(instance.HTTPID, instance.DNSID)
	read := rpc.Limit{InFlight: 16, Waiting: 128}
	// These methods are costly, because they compile tables only for their answers.
	costly := rpc.Limit{InFlight: 2, Waiting: 16}
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:        {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName:      {Access: rpc.Root()},
		policyv1.PolicyService_UpsertPolicies_FullMethodName:    {Access: rpc.Root(), Limit: change},
		policyv1.PolicyService_DeletePolicies_FullMethodName:    {Access: rpc.Root(), Limit: change},
		policyv1.PolicyService_ReplacePolicies_FullMethodName:   {Access: rpc.Root(), Limit: change},
		policyv1.PolicyService_CompleteSource_FullMethodName:    {Access: rpc.Root(), Limit: change},
		policyv1.PolicyService_ConfirmPolicies_FullMethodName:   {Access: rpc.Root(), Limit: change},
		policyv1.PolicyService_AcceptWithoutFile_FullMethodName: {Access: rpc.Root(), Limit: change},
		policyv1.PolicyService_WatchPolicyTables_FullMethodName: {Access: rpc.RootAnd(instance.DatapathID), Limit: rpc.Limit{InFlight: 32}},
		policyv1.PolicyService_WatchRuleSets_FullMethodName:     {Access: proxies, Limit: rpc.Limit{InFlight: 8}},
		policyv1.PolicyService_LearnNames_FullMethodName:        {Access: rpc.RootAnd(instance.DNSID), Limit: rpc.Limit{InFlight: 256, Waiting: 1024}},
		policyv1.PolicyService_HoldAddresses_FullMethodName:     {Access: rpc.RootAnd(instance.DatapathID), Limit: change},
		policyv1.PolicyService_ForgetNames_FullMethodName:       {Access: rpc.RootAnd(instance.DNSID), Limit: change},
		policyv1.PolicyService_ListNames_FullMethodName:         {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 32}},
		sharesv1.SharesService_ListShares_FullMethodName:        {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 4, Waiting: 32}},
		policyv1.PolicyService_ListPolicies_FullMethodName:      {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 8, Waiting: 32}},
		policyv1.PolicyService_GetPolicyTable_FullMethodName:    {Access: rpc.Group(), Limit: costly},
		policyv1.PolicyService_WaitForRevision_FullMethodName:   {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 64, Waiting: 64}},
		policyv1.PolicyService_Explain_FullMethodName:           {Access: rpc.Group(), Limit: costly},
		// Diff keeps two sets of tables in memory until its reader has received everything.
		policyv1.PolicyService_Diff_FullMethodName:      {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 1, Waiting: 16}},
		policyv1.PolicyService_GetStatus_FullMethodName: {Access: rpc.Group(), Limit: read},
	}
}

// UpsertPolicies implements the service.
func (s *Server) UpsertPolicies(ctx context.Context, req *policyv1.UpsertPoliciesRequest) (*policyv1.UpsertPoliciesResponse, error) {
	out, err := s.Owner.Apply(ctx, owner.Request{
		Caller:    managed.Caller{Manager: req.GetManager(), IfRevision: req.IfRevision, ValidateOnly: req.GetValidateOnly()},
		Manifests: req.GetManifests(), Namespace: req.GetDefaultNamespace(), AllowUnknown: req.GetAllowUnknownFields(),
	})
	if err != nil {
		return nil, statusOf(err)
	}
	run := s.Owner.Incarnation()
	return &policyv1.UpsertPoliciesResponse{Revision: out.Revision, Changes: changes(out), Incarnation: run[:]}, nil
}

// ReplacePolicies implements the service.
func (s *Server) ReplacePolicies(ctx context.Context, req *policyv1.ReplacePoliciesRequest) (*policyv1.ReplacePoliciesResponse, error) {
	out, err := s.Owner.Replace(ctx, owner.Request{
		Caller: managed.Caller{
			Manager: req.GetManager(), IfRevision: req.IfRevision, ValidateOnly: req.GetValidateOnly(), AllowEmpty: req.GetAllowEmpty(),
		},
		Manifests: req.GetManifests(), Namespace: req.GetDefaultNamespace(), AllowUnknown: req.GetAllowUnknownFields(),
	})
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.ReplacePoliciesResponse{Revision: out.Revision, Changes: changes(out)}, nil
}

// CompleteSource implements the service.
func (s *Server) CompleteSource(ctx context.Context, req *policyv1.CompleteSourceRequest) (*policyv1.CompleteSourceResponse, error) {
	caller := managed.Caller{
		Manager: req.GetManager(), ValidateOnly: req.GetValidateOnly(), AllowEmpty: req.GetAllowEmpty(),
	}
	out, err := s.Owner.Complete(ctx, caller, [16]byte(req.GetIncarnation()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.CompleteSourceResponse{Revision: out.Revision, Changes: changes(out)}, nil
}

// DeletePolicies implements the service.
func (s *Server) DeletePolicies(ctx context.Context, req *policyv1.DeletePoliciesRequest) (*policyv1.DeletePoliciesResponse, error) {
	caller := managed.Caller{Manager: req.GetManager(), IfRevision: req.IfRevision, ValidateOnly: req.GetValidateOnly()}
	out, err := s.Owner.Remove(ctx, caller, keys(req.GetKeys()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.DeletePoliciesResponse{Revision: out.Revision, Changes: changes(out)}, nil
}

// ConfirmPolicies implements the service.
func (s *Server) ConfirmPolicies(
	ctx context.Context, req *policyv1.ConfirmPoliciesRequest,
) (*policyv1.ConfirmPoliciesResponse, error) {
	out, err := s.Owner.Confirm(ctx, req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.ConfirmPoliciesResponse{Revision: out.Revision, Policies: uint32(out.Policies), Held: out.Held}, nil
}

// AcceptWithoutFile implements the service.
func (s *Server) AcceptWithoutFile(
	ctx context.Context, req *policyv1.AcceptWithoutFileRequest,
) (*policyv1.AcceptWithoutFileResponse, error) {
	out, err := s.Owner.AcceptWithout(ctx, req.GetFile(), req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.AcceptWithoutFileResponse{File: out.File, Reason: out.Why, WaitingFor: out.Waiting}, nil
}

// ListPolicies implements the service.
func (s *Server) ListPolicies(req *policyv1.ListPoliciesRequest, stream grpc.ServerStreamingServer[policyv1.ListPoliciesResponse]) error {
	list, revision, err := s.Owner.Reader().List(stream.Context(), owner.Filter{
		Kind: req.GetKind(), Namespace: req.GetNamespace(), Name: req.GetName(), Subject: identity.Numeric(req.GetSubject()),
		Manager: req.Manager,
	})
	if err != nil {
		return statusOf(err)
	}
	for i := range list {
		p := toPolicy(&list[i])
		if req.GetWithManifests() {
			p.Manifest = list[i].Manifest
		}
		if err := stream.Send(&policyv1.ListPoliciesResponse{Policy: p, Revision: revision}); err != nil {
			return err
		}
	}
	return nil
}

// GetPolicyTable implements the service.
func (s *Server) GetPolicyTable(ctx context.Context, req *policyv1.GetPolicyTableRequest) (*policyv1.GetPolicyTableResponse, error) {
	j, err := s.Owner.Reader().Table(ctx, identity.Numeric(req.GetSubject()))
	if err != nil {
		return nil, statusOf(err)
	}
	return policyTable(j), nil
}

// policyTable returns the tables of a subject as one message. The message is small enough for clients, because
// the size of tables is limited, and maxSources limits the source locations of their rules.
func policyTable(j query.Evaluated) *policyv1.GetPolicyTableResponse {
	out := &policyv1.GetPolicyTableResponse{Revision: j.Revision, StoreRevision: storeRevision(j.Store)}
	side := func(d policytable.Direction) (t *policyv1.PolicyTable, rules []*policyv1.RuleSources, omitted uint32) {
		if !j.Bound[d] {
			return nil, nil, 0
		}
		first := firstSources(j.Sources[d])
		return policywire.Table(j.Tables[d]), policywire.Sources(first), uint32(len(j.Sources[d]) - len(first))
	}
	out.Egress, out.EgressRules, out.OmittedEgressRuleCount = side(policytable.Egress)
	out.Ingress, out.IngressRules, out.OmittedIngressRuleCount = side(policytable.Ingress)
	return out
}

// WaitForRevision implements the service.
func (s *Server) WaitForRevision(ctx context.Context, req *policyv1.WaitForRevisionRequest) (*policyv1.WaitForRevisionResponse, error) {
	out, err := s.Owner.Subscribers().Wait(ctx, req.GetRevision(), numbers(req.GetSubjects()))
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.WaitForRevisionResponse{
		Revision: out.Revision, Disconnected: out.Disconnected, Enforcing: out.Enforcing,
		StoreRevision: storeRevision(out.Store),
	}, nil
}

// LearnNames implements the service.
func (s *Server) LearnNames(ctx context.Context, req *policyv1.LearnNamesRequest) (*policyv1.LearnNamesResponse, error) {
	addrs, err := addressesOf("addresses", req.GetAddresses())
	if err != nil {
		return nil, statusOf(err)
	}
	if err := req.GetTtl().CheckValid(); req.GetTtl() != nil && err != nil {
		return nil, statusOf(&failure.FieldError{Field: "ttl", Err: err})
	}
	var used bool
	if req.GetValidateOnly() {
		used, err = s.Owner.Names().ValidateLearn(ctx, req.GetName())
	} else {
		used, err = s.Owner.Names().Learn(ctx, asker(req.GetAsker()), req.GetName(), addrs, req.GetTtl().AsDuration())
	}
	if errors.Is(err, owner.ErrNotSelected) {
		return &policyv1.LearnNamesResponse{NotSelected: true}, nil
	}
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.LearnNamesResponse{Used: used}, nil
}

// HoldAddresses implements the service.
func (s *Server) HoldAddresses(
	ctx context.Context, req *policyv1.HoldAddressesRequest,
) (*policyv1.HoldAddressesResponse, error) {
	inUse, err := addressesOf("in_use", req.GetInUse())
	if err != nil {
		return nil, statusOf(err)
	}
	expiring, err := s.Owner.Names().HoldAddresses(ctx, inUse)
	if err != nil {
		return nil, statusOf(err)
	}
	return &policyv1.HoldAddressesResponse{Expiring: words.Addresses(expiring)}, nil
}

// addressesOf parses the addresses of a field.
func addressesOf(field string, texts []string) ([]netip.Addr, error) {
	addrs := make([]netip.Addr, 0, len(texts))
	for i, text := range texts {
		a, err := words.AddressOf(text)
		if err != nil {
			return nil, &failure.FieldError{Field: fmt.Sprintf("%s[%d]", field, i), Err: err}
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}

// Explain implements the service.
func (s *Server) Explain(ctx context.Context, req *policyv1.ExplainRequest) (*policyv1.ExplainResponse, error) {
	q := port.At(port.Protocol(req.GetProtocol()), uint16(req.GetPort()))
	if p := port.Protocol(req.GetProtocol()); !p.HasPorts() && p != port.ICMP && p != port.ICMPv6 {
		q = port.At(p, 0) // only the protocol number affects the verdict
	}
	from, err := s.peerOf(ctx, "from", req.GetFrom())
	if err != nil {
		return nil, statusOf(err)
	}
	to, err := s.peerOf(ctx, "to", req.GetTo())
	if err != nil {
		return nil, statusOf(err)
	}
	name := req.GetDnsName()
	if name != "" {
		if _, err := dnsname.Name(name); err != nil {
			return nil, statusOf(&failure.FieldError{Field: "dns_name", Err: err})
		}
	}
	x, err := s.Owner.Reader().ExplainLookup(ctx, from, to, q, name)
	if err != nil {
		return nil, statusOf(err)
	}
	out := &policyv1.ExplainResponse{
		Verdict: policywire.Action(x.Action), Egress: side(x.Egress), Ingress: side(x.Ingress), Revision: x.Revision,
	}
	if x.DNS != nil {
		out.Dns = lookup(x.DNS)
		for _, m := range out.GetEgress().GetMatches() {
			if allows, decides := x.DNS.Allows[uint16(m.GetNumber())]; decides { //nolint:gosec // was a uint16
				m.AllowsName = &allows
			}
		}
	}
	return out, nil
}

// outcomes are the outcomes of queries.
var outcomes = map[engine.QueryOutcome]policyv1.QueryOutcome{
	engine.QueryDenied:       policyv1.QueryOutcome_QUERY_OUTCOME_DENIED,
	engine.QueryAllowed:      policyv1.QueryOutcome_QUERY_OUTCOME_ALLOWED,
	engine.QueryRefused:      policyv1.QueryOutcome_QUERY_OUTCOME_REFUSED,
	engine.QueryNotEvaluated: policyv1.QueryOutcome_QUERY_OUTCOME_NOT_EVALUATED,
	engine.QueryNoProxy:      policyv1.QueryOutcome_QUERY_OUTCOME_NO_PROXY,
}

// lookup returns the message about a query.
func lookup(x *engine.NameExplanation) *policyv1.LookupExplanation {
	out := &policyv1.LookupExplanation{Name: x.Name, Outcome: outcomes[x.Outcome]}
	for _, m := range x.Rules {
		out.Rules = append(out.Rules, matching(m))
	}
	for _, a := range x.Addresses {
		one := &policyv1.ReachableAddress{Address: a.Addr.String()}
		for _, r := range a.Allowed {
			one.Ports = append(one.Ports, rule.PortsText(r))
		}
		out.Addresses = append(out.Addresses, one)
	}
	return out
}

// matching returns the message about a rule.
func matching(m engine.Match) *policyv1.MatchingRule {
	r := &policyv1.MatchingRule{
		Number: uint32(m.Number), Action: policywire.Action(m.Rule.Action), Tier: policywire.Tier(m.Rule.Tier),
		Text: m.Rule.Text(),
	}
	for _, src := range m.Sources {
		r.Sources = append(r.Sources, policywire.Source(src))
	}
	return r
}

// Diff implements the service.
func (s *Server) Diff(req *policyv1.DiffRequest, stream grpc.ServerStreamingServer[policyv1.DiffResponse]) error {
	change := owner.Request{Manifests: req.GetManifests(), Namespace: req.GetDefaultNamespace(), AllowUnknown: req.GetAllowUnknownFields()}
	err := s.Owner.Reader().Diff(stream.Context(), change, keys(req.GetDelete()), func(d query.Difference) error {
		for _, m := range differences(&d) {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		return nil
	})
	if _, ok := status.FromError(err); ok {
		return err
	}
	return statusOf(err)
}

// problems converts problems to the API.
func problems(all []summary.Problem) []*statusv1.Problem {
	reasons := map[summary.ProblemKind]statusv1.ProblemReason{
		summary.ProblemPolicy:   statusv1.ProblemReason_PROBLEM_REASON_POLICY,
		summary.ProblemStorage:  statusv1.ProblemReason_PROBLEM_REASON_STORAGE,
		summary.ProblemSettings: statusv1.ProblemReason_PROBLEM_REASON_SETTINGS,
	}
	out := make([]*statusv1.Problem, 0, len(all))
	for _, p := range all {
		out = append(out, &statusv1.Problem{Reason: reasons[p.Kind], Text: p.Text})
	}
	return out
}

// GetStatus implements the service.
func (s *Server) GetStatus(ctx context.Context, _ *policyv1.GetStatusRequest) (*policyv1.GetStatusResponse, error) {
	st, err := s.Owner.Reader().Status(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	out := &policyv1.GetStatusResponse{
		Service: &statusv1.ServiceStatus{
			Version: s.Version, StartTime: timestamppb.New(s.Started), Problems: problems(st.Problems),
			OmittedProblemCount: uint32(max(0, st.ProblemCount-summary.MaxProblems)),
		},
		Revision: st.Revision,
		Policies: uint32(st.Policies), Refused: uint32(st.Refused), Identities: uint32(st.Identities),
		WaitingIdentities: uint32(st.Waiting), Subjects: uint32(st.Size.Subjects), Tables: uint32(st.Size.Tables),
		PoliciesWithUnsupportedFields: uint32(st.Unsupported), StoreRevision: storeRevision(st.Store),
		WaitingFor: st.WaitsFor, SkippedDocuments: st.Skipped,
	}
	run := s.Owner.Incarnation()
	out.Incarnation = run[:]
	for _, src := range st.Sources {
		out.Sources = append(out.Sources, &policyv1.SourceStatus{
			Name: src.Name, Kind: sourceKinds[src.Name], Manager: src.Manager,
			Synced: src.Synced, Error: src.Error, Policies: uint32(src.Policies),
		})
	}
	for _, sub := range st.Subscribers {
		out.Subscribers = append(out.Subscribers, &policyv1.SubscriberStatus{
			Name: sub.Name, Connected: sub.Connected, Revision: sub.Revision, Behind: sub.Behind, Refusals: sub.Refusals, Enforces: sub.Enforces,
			Held: sub.Held, StoreRevision: storeRevision(sub.Store),
		})
	}
	return out, nil
}

var sourceKinds = map[string]policyv1.SourceKind{
	source.Identity:          policyv1.SourceKind_SOURCE_KIND_IDENTITY,
	managed.SourceGRPC:       policyv1.SourceKind_SOURCE_KIND_GRPC,
	managed.SourceFile:       policyv1.SourceKind_SOURCE_KIND_FILE,
	managed.SourceKubernetes: policyv1.SourceKind_SOURCE_KIND_KUBERNETES,
}

func changes(o owner.Outcome) []*policyv1.PolicyChange {
	out := make([]*policyv1.PolicyChange, len(o.Changes))
	for i, c := range o.Changes {
		out[i] = &policyv1.PolicyChange{
			Key: toKey(c.Key), Type: policyv1.ChangeType(c.Type), DroppedFields: c.Dropped,
			Notes: notes(c.Notes), OmittedNoteCount: uint32(c.Notes.Omitted()),
		}
	}
	return out
}

func notes(list manifest.Notes) []*policyv1.PolicyNote {
	var out []*policyv1.PolicyNote
	for _, n := range list {
		out = append(out, &policyv1.PolicyNote{Kind: policyv1.PolicyNoteKind(n.Kind), Field: n.Path, Text: n.Text})
	}
	return out
}

func toKey(k policy.Key) *policyv1.PolicyKey {
	return &policyv1.PolicyKey{Kind: k.Kind, Namespace: k.Namespace, Name: k.Name}
}

func keys(in []*policyv1.PolicyKey) []policy.Key {
	out := make([]policy.Key, len(in))
	for i, k := range in {
		out[i] = policy.Key{Kind: k.GetKind(), Namespace: k.GetNamespace(), Name: k.GetName()}
	}
	return out
}

func numbers(in []uint32) []identity.Numeric {
	out := make([]identity.Numeric, len(in))
	for i, n := range in {
		out[i] = identity.Numeric(n)
	}
	return out
}

func toPolicy(l *owner.Listed) *policyv1.Policy {
	p := &policyv1.Policy{
		Key: toKey(l.Key), Source: l.Source, Origin: l.Origin, Manager: l.Manager, Accepted: l.Accepted, Error: l.Error,
		Revision: l.Revision, Rules: uint32(l.Rules), DroppedFields: l.Dropped,
		Notes: notes(l.Notes), OmittedNoteCount: uint32(l.Notes.Omitted()),
	}
	for _, n := range l.Subjects {
		p.Subjects = append(p.Subjects, uint32(n))
	}
	if !l.Updated.IsZero() {
		p.UpdateTime = timestamppb.New(l.Updated)
	}
	return p
}

// peerOf converts a peer of the API. A peer with only an address is resolved: its identity stays 0 only if the
// address is outside of the cluster.
func (s *Server) peerOf(ctx context.Context, field string, p *policyv1.Peer) (query.Peer, error) {
	out := query.Peer{Identity: identity.Numeric(p.GetIdentity()), Labels: words.LabelsOf(p.GetLabels())}
	if p.GetAddress() == "" {
		return out, nil
	}
	var err error
	if out.Addr, err = words.AddressOf(p.GetAddress()); err != nil {
		return out, &failure.FieldError{Field: field + ".address", Err: err}
	}
	if out.Identity == 0 && len(out.Labels) == 0 {
		if out.Identity, err = s.Addresses.IdentityOf(ctx, out.Addr); err != nil {
			return out, fmt.Errorf("%s.address %s: %w", field, out.Addr, err)
		}
	}
	return out, nil
}

// labels returns the labels of a workload, or the label for a workload without labels.
func labels(id peer.Identity) []*workloadv1.Label {
	return words.Labels(slices.DeleteFunc(slices.Clone(id.Given().All()), func(l label.Label) bool {
		return l.Source == label.SourceGenerated && l.Key != label.KeyNoLabels
	}))
}

func side(x query.Side) *policyv1.SideExplanation {
	if !x.Evaluated {
		return nil
	}
	out := &policyv1.SideExplanation{
		Subject: uint32(x.Subject.Number), SubjectLabels: labels(x.Subject), Peer: uint32(x.Peer.Number), PeerLabels: labels(x.Peer),
		Action: policywire.Action(x.Verdict.Action), DecidedBy: wire.DecidedBy(x.Verdict, x.Enforced), Rule: uint32(x.Verdict.Rule), Enforced: x.Enforced,
	}
	if x.Verdict.Action == policytable.Redirect {
		out.Proxy = policywire.Proxy(x.Verdict.Proxy)
	}
	for _, m := range x.Matches {
		r := matching(m)
		r.Decides = m.Number == x.Verdict.Rule
		out.Matches = append(out.Matches, r)
	}
	return out
}

// lastPoint is the last point that a packet can have.
const lastPoint = port.Point(255<<16 | 65_535)

// maxDiffPeers limits the number of peers in one message of a difference.
const maxDiffPeers = 2048

func differences(d *query.Difference) []*policyv1.DiffResponse {
	base := &policyv1.DiffResponse{
		Subject: uint32(d.Subject.Number), SubjectLabels: labels(d.Subject), Direction: policywire.Direction(d.Direction),
	}
	for _, c := range d.Changes {
		last := min(c.Ports.Hi, lastPoint)
		base.Ports = append(base.Ports, &policyv1.DiffPorts{
			FirstProtocol: c.Ports.Lo >> 16, FirstPort: c.Ports.Lo & 0xffff, LastProtocol: last >> 16, LastPort: last & 0xffff,
			Before: policywire.Action(c.Before.Action), After: policywire.Action(c.After.Action),
		})
	}
	var out []*policyv1.DiffResponse
	for i := 0; i < len(d.Peers); i += maxDiffPeers {
		m := &policyv1.DiffResponse{Subject: base.Subject, SubjectLabels: base.SubjectLabels, Direction: base.Direction, Ports: base.Ports}
		for _, p := range d.Peers[i:min(i+maxDiffPeers, len(d.Peers))] {
			m.Peers = append(m.Peers, diffPeer(p))
		}
		out = append(out, m)
	}
	return out
}

func diffPeer(p query.DifferentPeer) *policyv1.DiffPeer {
	out := &policyv1.DiffPeer{Identity: uint32(p.Identity.Number), Labels: labels(p.Identity)}
	if p.Prefix.IsValid() {
		out.Prefix = p.Prefix.String()
	}
	if p.Identity.Scope == identity.PeerScopeOutside {
		out.Identity = 0
		switch {
		case p.Prefix.IsValid():
		case p.Identity.Kind == identity.KindWorld4:
			out.Prefix = "0.0.0.0/0"
		case p.Identity.Kind == identity.KindWorld6:
			out.Prefix = "::/0"
		}
	}
	return out
}

// ListShares implements SharesService.
func (s *Server) ListShares(
	req *sharesv1.ListSharesRequest, stream grpc.ServerStreamingServer[sharesv1.ListSharesResponse],
) error {
	all, err := s.Owner.Reader().Shares(stream.Context())
	if err != nil {
		return statusOf(err)
	}
	return words.SendShares(all, req, stream)
}
