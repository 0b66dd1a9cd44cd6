// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// policy stores policies without evaluating them. It refuses documents with `spec: {refuse: why}`.
type policy struct {
	policyv1.UnimplementedPolicyServiceServer

	Mu           sync.Mutex
	Revision     uint64
	Subjects     uint32
	Unsupported  uint32
	Healthy      bool // no policies are refused or missing
	Policies     map[string]*policyv1.Policy
	Subscribers  []*policyv1.SubscriberStatus
	Disconnected []string
	Enforcing    []string
	Held         []string
	Confirmed    error // answer of WaitForRevision after a confirmation
	WaitError    error
	Explained    *policyv1.ExplainRequest
	Compared     *policyv1.DiffRequest
	Differences  []*policyv1.DiffResponse
	Table        *policyv1.GetPolicyTableResponse

	SelectsNothing bool
	NoDNSRule      bool                      // for fields that are not supported
	Lookup         *policyv1.ExplainResponse // for a query

	Names    []*policyv1.LearnedName
	Listed   *policyv1.ListNamesRequest
	Forgot   *policyv1.ForgetNamesRequest
	ForgetOf error
	Learned  *policyv1.LearnNamesRequest
	Used     bool // whether a policy uses names

	Missing map[string]string // files that were never read → reason
}

func newPolicy() *policy {
	return &policy{
		Revision: 6, Subjects: 2, Policies: map[string]*policyv1.Policy{},
		Subscribers: []*policyv1.SubscriberStatus{{Name: "datapath", Connected: true, Enforces: true, Revision: 6}},
		Enforcing:   []string{"datapath"},
	}
}

type document struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Spec     struct{ Refuse, Unknown, Unsupported string }
}

func (f *policy) UpsertPolicies(_ context.Context, r *policyv1.UpsertPoliciesRequest) (*policyv1.UpsertPoliciesResponse,
	error,
) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if r.IfRevision != nil && r.GetIfRevision() != f.Revision {
		return nil, status.Error(codes.Aborted, "the policy revision is another")
	}
	resp := &policyv1.UpsertPoliciesResponse{}
	bad := &errdetails.BadRequest{}
	var taken []*policyv1.Policy
	for i, text := range strings.Split(string(r.GetManifests()), "---\n")[1:] {
		var d document
		if err := yaml.Unmarshal([]byte(text), &d); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		if d.Spec.Refuse != "" {
			bad.FieldViolations = append(bad.FieldViolations,
				&errdetails.BadRequest_FieldViolation{
					Field:       fmt.Sprintf("manifests[%d].spec.refuse", i),
					Description: d.Spec.Refuse,
				})
		}
		if d.Metadata.Namespace == "" {
			d.Metadata.Namespace = r.GetDefaultNamespace()
		}
		key := &policyv1.PolicyKey{Kind: d.Kind, Namespace: d.Metadata.Namespace, Name: d.Metadata.Name}
		change := &policyv1.PolicyChange{Key: key, Type: policyv1.ChangeType_CHANGE_TYPE_CREATED}
		if old := f.Policies[policykind.KeyText(key)]; old != nil {
			change.Type = policyv1.ChangeType_CHANGE_TYPE_REPLACED
			if string(old.GetManifest()) == text {
				change.Type = policyv1.ChangeType_CHANGE_TYPE_UNCHANGED
			}
		}
		if d.Spec.Unknown != "" && !r.GetAllowUnknownFields() {
			bad.FieldViolations = append(bad.FieldViolations,
				&errdetails.BadRequest_FieldViolation{
					Field:       fmt.Sprintf("manifests[%d].spec.unknown", i),
					Description: "no such field",
				})
		}
		if d.Spec.Unknown != "" {
			change.DroppedFields = []string{"spec.unknown"}
		}
		if d.Spec.Unsupported != "" {
			change.Notes = []*policyv1.PolicyNote{{
				Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED, Field: "spec.unsupported",
				Text: "not supported by Sluice: " + d.Spec.Unsupported,
			}}
		}
		if d.Spec.Unsupported != "" && f.NoDNSRule {
			change.Notes = append(change.Notes,
				&policyv1.PolicyNote{
					Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_NO_DNS_RULE, Field: "spec.unsupported",
					Text: "no DNS rule selects these pods",
				})
		}
		if f.SelectsNothing {
			change.Notes = append(change.Notes,
				&policyv1.PolicyNote{
					Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_SELECTS_NOTHING,
					Text: "selects no endpoint of this node",
				})
		}
		resp.Changes = append(resp.Changes, change)
		taken = append(taken, &policyv1.Policy{
			Key: key, Source: "grpc", Accepted: true, Revision: f.Revision + 1, Subjects: []uint32{300}, Rules: 2,
			UpdateTime: timestamppb.New(time.Now().Add(-3 * time.Hour)), Manifest: []byte(text),
			Notes: change.GetNotes(), Manager: r.GetManager(),
		})
	}
	if len(bad.GetFieldViolations()) > 0 {
		st, err := status.New(codes.InvalidArgument, "manifests are wrong").WithDetails(bad)
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}
	if !r.GetValidateOnly() {
		f.Revision++
		for _, p := range taken {
			f.Policies[policykind.KeyText(p.GetKey())] = p
		}
	}
	resp.Revision = f.Revision
	return resp, nil
}

func (f *policy) ReplacePolicies(ctx context.Context,
	r *policyv1.ReplacePoliciesRequest,
) (*policyv1.ReplacePoliciesResponse, error) {
	out, err := f.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
		Manifests: r.GetManifests(), Manager: r.GetManager(),
		IfRevision: r.IfRevision,
	})
	if err != nil {
		return nil, err
	}
	f.Mu.Lock()
	defer f.Mu.Unlock()
	for text, p := range f.Policies {
		if p.GetManager() == r.GetManager() && p.GetRevision() < f.Revision {
			delete(f.Policies, text)
			out.Changes = append(out.Changes, &policyv1.PolicyChange{
				Key:  p.GetKey(),
				Type: policyv1.ChangeType_CHANGE_TYPE_DELETED,
			})
		}
	}
	return &policyv1.ReplacePoliciesResponse{Revision: out.GetRevision(), Changes: out.GetChanges()}, nil
}

func (f *policy) DeletePolicies(_ context.Context, r *policyv1.DeletePoliciesRequest) (*policyv1.DeletePoliciesResponse,
	error,
) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Revision++
	resp := &policyv1.DeletePoliciesResponse{Revision: f.Revision}
	for _, key := range r.GetKeys() {
		change := &policyv1.PolicyChange{Key: key, Type: policyv1.ChangeType_CHANGE_TYPE_ABSENT}
		if f.Policies[policykind.KeyText(key)] != nil {
			change.Type = policyv1.ChangeType_CHANGE_TYPE_DELETED
			delete(f.Policies, policykind.KeyText(key))
		}
		resp.Changes = append(resp.Changes, change)
	}
	return resp, nil
}

func (f *policy) ListPolicies(r *policyv1.ListPoliciesRequest,
	s grpc.ServerStreamingServer[policyv1.ListPoliciesResponse],
) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	keep := func(want, have string) bool { return want == "" || want == have }
	for _, p := range output.Ordered(f.Policies) {
		if !keep(r.GetKind(), p.GetKey().GetKind()) || !keep(r.GetNamespace(), p.GetKey().GetNamespace()) ||
			!keep(r.GetName(), p.GetKey().GetName()) ||
			r.GetSubject() != 0 && !slices.Contains(p.GetSubjects(), r.GetSubject()) {
			continue
		}
		shown := &policyv1.Policy{
			Key: p.GetKey(), Source: p.GetSource(), Origin: p.GetOrigin(), Accepted: p.GetAccepted(), Error: p.GetError(),
			Revision: p.GetRevision(),
			Subjects: p.GetSubjects(), Rules: p.GetRules(), UpdateTime: p.GetUpdateTime(),
			Notes: p.GetNotes(), OmittedNoteCount: p.GetOmittedNoteCount(),
			Manager: p.GetManager(),
		}
		if r.GetWithManifests() {
			shown.Manifest = p.GetManifest()
		}
		if err := s.Send(&policyv1.ListPoliciesResponse{Policy: shown, Revision: f.Revision}); err != nil {
			return err
		}
	}
	return nil
}

func (f *policy) ConfirmPolicies(_ context.Context,
	r *policyv1.ConfirmPoliciesRequest,
) (*policyv1.ConfirmPoliciesResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if !r.GetValidateOnly() {
		f.WaitError = f.Confirmed
	}
	return &policyv1.ConfirmPoliciesResponse{Revision: f.Revision, Policies: uint32(len(f.Policies)), Held: f.Held}, nil
}

func (f *policy) AcceptWithoutFile(_ context.Context, r *policyv1.AcceptWithoutFileRequest) (
	*policyv1.AcceptWithoutFileResponse, error,
) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	why, ok := f.Missing[r.GetFile()]
	if !ok {
		return nil, status.Error(codes.FailedPrecondition, "nothing waits for "+r.GetFile())
	}
	if !r.GetValidateOnly() {
		delete(f.Missing, r.GetFile())
	}
	return &policyv1.AcceptWithoutFileResponse{
		File: r.GetFile(), Reason: why, WaitingFor: slices.Sorted(maps.Keys(f.Missing)),
	}, nil
}

func (f *policy) WaitForRevision(ctx context.Context,
	r *policyv1.WaitForRevisionRequest,
) (*policyv1.WaitForRevisionResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	if r.GetRevision() > f.Revision {
		return nil, status.Error(codes.OutOfRange, "there is no such revision yet")
	}
	if status.Code(f.WaitError) == codes.DeadlineExceeded {
		<-ctx.Done() // the kernel is slow
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return &policyv1.WaitForRevisionResponse{Revision: f.Revision, Disconnected: f.Disconnected, Enforcing: f.Enforcing},
		f.WaitError
}

func (f *policy) Explain(_ context.Context, r *policyv1.ExplainRequest) (*policyv1.ExplainResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Explained = r
	if r.GetTo().GetIdentity() == 999 {
		return nil, status.Error(codes.NotFound, "identity 999 is not known")
	}
	if r.GetDnsName() != "" && f.Lookup != nil {
		return f.Lookup, nil
	}
	if r.GetPort() == 53 {
		return &policyv1.ExplainResponse{
			Verdict: policyv1.Action_ACTION_REDIRECT, Revision: f.Revision,
			Egress: &policyv1.SideExplanation{Action: policyv1.Action_ACTION_REDIRECT, Proxy: netv1.Proxy_PROXY_DNS},
		}, nil
	}
	if r.GetPort() == 8080 {
		return &policyv1.ExplainResponse{Verdict: policyv1.Action_ACTION_REDIRECT, Revision: f.Revision}, nil
	}
	return &policyv1.ExplainResponse{
		Verdict: policyv1.Action_ACTION_DENY, Revision: f.Revision,
		Egress: &policyv1.SideExplanation{
			Subject: 300, SubjectLabels: []*workloadv1.Label{Label("app", "web")}, Peer: 301,
			Action: policyv1.Action_ACTION_ALLOW, DecidedBy: netv1.DecidedBy_DECIDED_BY_NO_POLICY,
		},
		Ingress: &policyv1.SideExplanation{
			Subject: 301, SubjectLabels: []*workloadv1.Label{Label("app", "db\x1b[2J")}, Peer: 300,
			Action: policyv1.Action_ACTION_DENY, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: 2, Enforced: true,
			Matches: []*policyv1.MatchingRule{{
				Number: 2, Action: policyv1.Action_ACTION_DENY, Tier: policyv1.Tier_TIER_ISOLATION, Decides: true,
				Text:    "everything from everybody",
				Sources: []*policyv1.RuleSource{{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}},
			}},
		},
	}, nil
}

func (f *policy) Diff(r *policyv1.DiffRequest, s grpc.ServerStreamingServer[policyv1.DiffResponse]) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Compared = r
	if strings.Contains(string(r.GetManifests()), "refuse") {
		return status.Error(codes.ResourceExhausted, "a table has no capacity")
	}
	for _, d := range f.Differences {
		if err := s.Send(d); err != nil {
			return err
		}
	}
	return nil
}

func (f *policy) GetPolicyTable(context.Context, *policyv1.GetPolicyTableRequest) (*policyv1.GetPolicyTableResponse,
	error,
) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	return f.Table, nil
}

func (f *policy) GetStatus(context.Context, *policyv1.GetStatusRequest) (*policyv1.GetStatusResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	r := &policyv1.GetStatusResponse{
		Service: serviceStatus(), Revision: f.Revision, Policies: 3, Refused: 1, Identities: 12,
		Subjects: f.Subjects, Tables: 4, PoliciesWithUnsupportedFields: f.Unsupported,
		Sources: []*policyv1.SourceStatus{
			{Name: "identity", Synced: true},
			{Name: "file", Synced: false, Error: "the directory is gone"},
		}, Subscribers: f.Subscribers,
	}
	if f.Healthy {
		r.Refused, r.Sources[1] = 0, &policyv1.SourceStatus{Name: "file", Synced: true}
	}
	return r, nil
}

// ListNames implements the service.
func (f *policy) ListNames(req *policyv1.ListNamesRequest,
	stream grpc.ServerStreamingServer[policyv1.ListNamesResponse],
) error {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Listed = req
	for _, n := range f.Names {
		if err := stream.Send(&policyv1.ListNamesResponse{Name: n}); err != nil {
			return err
		}
	}
	return nil
}

// LearnNames implements the service.
func (f *policy) LearnNames(
	_ context.Context, req *policyv1.LearnNamesRequest,
) (*policyv1.LearnNamesResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Learned = req
	return &policyv1.LearnNamesResponse{Used: f.Used}, nil
}

// ForgetNames implements the service.
func (f *policy) ForgetNames(
	_ context.Context, req *policyv1.ForgetNamesRequest,
) (*policyv1.ForgetNamesResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Forgot = req
	out := &policyv1.ForgetNamesResponse{NameCount: uint32(len(f.Names))}
	for _, n := range f.Names {
		out.AddressCount += uint32(len(n.GetAddresses()))
	}
	return out, f.ForgetOf
}
