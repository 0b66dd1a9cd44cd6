// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.yaml.in/yaml/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// fakePolicy keeps policies as the policy service does, without a look at what
// is in them: `spec: {refuse: why}` makes a document wrong.
type fakePolicy struct {
	policyv1.UnimplementedPolicyServiceServer

	mu           sync.Mutex
	revision     uint64
	subjects     uint32
	unsupported  uint32
	policies     map[string]*policyv1.Policy
	subscribers  []*policyv1.SubscriberStatus
	disconnected []string
	enforcing    []string
	held         []string
	confirmed    error // what WaitForRevision answers after a confirmation
	waitError    error
	explained    *policyv1.ExplainRequest
	compared     *policyv1.DiffRequest
	differences  []*policyv1.DiffResponse
	table        *policyv1.GetPolicyTableResponse

	selectsNothing bool
}

func newFakePolicy() *fakePolicy {
	return &fakePolicy{
		revision: 6, subjects: 2, policies: map[string]*policyv1.Policy{},
		subscribers: []*policyv1.SubscriberStatus{{Name: "datapath", Connected: true, Enforces: true, Revision: 6}},
		enforcing:   []string{"datapath"},
	}
}

type fakeDocument struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Spec     struct{ Refuse, Unknown, Unsupported string }
}

func (f *fakePolicy) UpsertPolicies(_ context.Context, r *policyv1.UpsertPoliciesRequest) (*policyv1.UpsertPoliciesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.IfRevision != nil && r.GetIfRevision() != f.revision {
		return nil, status.Error(codes.Aborted, "the policy revision is another")
	}
	resp := &policyv1.UpsertPoliciesResponse{}
	bad := &errdetails.BadRequest{}
	var taken []*policyv1.Policy
	for i, text := range strings.Split(string(r.GetManifests()), "---\n")[1:] {
		var d fakeDocument
		if err := yaml.Unmarshal([]byte(text), &d); err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		if d.Spec.Refuse != "" {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: fmt.Sprintf("manifests[%d].spec.refuse", i), Description: d.Spec.Refuse})
		}
		if d.Metadata.Namespace == "" {
			d.Metadata.Namespace = r.GetDefaultNamespace()
		}
		key := &policyv1.PolicyKey{Kind: d.Kind, Namespace: d.Metadata.Namespace, Name: d.Metadata.Name}
		change := &policyv1.PolicyChange{Key: key, Type: policyv1.ChangeType_CHANGE_TYPE_CREATED}
		if old := f.policies[keyText(key)]; old != nil {
			change.Type = policyv1.ChangeType_CHANGE_TYPE_REPLACED
			if string(old.GetManifest()) == text {
				change.Type = policyv1.ChangeType_CHANGE_TYPE_UNCHANGED
			}
		}
		if d.Spec.Unknown != "" && !r.GetAllowUnknownFields() {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: fmt.Sprintf("manifests[%d].spec.unknown", i), Description: "no such field"})
		}
		if d.Spec.Unknown != "" {
			change.DroppedFields = []string{"spec.unknown"}
		}
		if d.Spec.Unsupported != "" {
			change.Notes = []*policyv1.PolicyNote{{
				Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED, Field: "spec.unsupported", Text: "not supported by Sluice: " + d.Spec.Unsupported,
			}}
		}
		if f.selectsNothing {
			change.Notes = append(change.Notes, &policyv1.PolicyNote{Kind: policyv1.PolicyNoteKind_POLICY_NOTE_KIND_SELECTS_NOTHING, Text: "selects no endpoint of this node"})
		}
		resp.Changes = append(resp.Changes, change)
		taken = append(taken, &policyv1.Policy{
			Key: key, Source: "grpc", Accepted: true, Revision: f.revision + 1, Subjects: []uint32{300}, Rules: 2, UpdateTime: timestamppb.Now(), Manifest: []byte(text),
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
		f.revision++
		for _, p := range taken {
			f.policies[keyText(p.GetKey())] = p
		}
	}
	resp.Revision = f.revision
	return resp, nil
}

func (f *fakePolicy) ReplacePolicies(ctx context.Context, r *policyv1.ReplacePoliciesRequest) (*policyv1.ReplacePoliciesResponse, error) {
	out, err := f.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{Manifests: r.GetManifests(), Manager: r.GetManager(), IfRevision: r.IfRevision})
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for text, p := range f.policies {
		if p.GetManager() == r.GetManager() && p.GetRevision() < f.revision {
			delete(f.policies, text)
			out.Changes = append(out.Changes, &policyv1.PolicyChange{Key: p.GetKey(), Type: policyv1.ChangeType_CHANGE_TYPE_DELETED})
		}
	}
	return &policyv1.ReplacePoliciesResponse{Revision: out.GetRevision(), Changes: out.GetChanges()}, nil
}

func (f *fakePolicy) DeletePolicies(_ context.Context, r *policyv1.DeletePoliciesRequest) (*policyv1.DeletePoliciesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.revision++
	resp := &policyv1.DeletePoliciesResponse{Revision: f.revision}
	for _, key := range r.GetKeys() {
		change := &policyv1.PolicyChange{Key: key, Type: policyv1.ChangeType_CHANGE_TYPE_ABSENT}
		if f.policies[keyText(key)] != nil {
			change.Type = policyv1.ChangeType_CHANGE_TYPE_DELETED
			delete(f.policies, keyText(key))
		}
		resp.Changes = append(resp.Changes, change)
	}
	return resp, nil
}

func (f *fakePolicy) ListPolicies(r *policyv1.ListPoliciesRequest, s grpc.ServerStreamingServer[policyv1.ListPoliciesResponse]) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	keep := func(want, have string) bool { return want == "" || want == have }
	for _, p := range ordered(f.policies) {
		if !keep(r.GetKind(), p.GetKey().GetKind()) || !keep(r.GetNamespace(), p.GetKey().GetNamespace()) || !keep(r.GetName(), p.GetKey().GetName()) ||
			r.GetSubject() != 0 && !slices.Contains(p.GetSubjects(), r.GetSubject()) {
			continue
		}
		shown := &policyv1.Policy{
			Key: p.GetKey(), Source: p.GetSource(), Origin: p.GetOrigin(), Accepted: p.GetAccepted(), Error: p.GetError(), Revision: p.GetRevision(),
			Subjects: p.GetSubjects(), Rules: p.GetRules(), UpdateTime: p.GetUpdateTime(), Notes: p.GetNotes(), Manager: p.GetManager(),
		}
		if r.GetWithManifests() {
			shown.Manifest = p.GetManifest()
		}
		if err := s.Send(&policyv1.ListPoliciesResponse{Policy: shown, Revision: f.revision}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakePolicy) ConfirmPolicies(context.Context, *policyv1.ConfirmPoliciesRequest) (*policyv1.ConfirmPoliciesResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.waitError = f.confirmed
	return &policyv1.ConfirmPoliciesResponse{Revision: f.revision, Policies: uint32(len(f.policies)), Held: f.held}, nil
}

func (f *fakePolicy) WaitForRevision(ctx context.Context, r *policyv1.WaitForRevisionRequest) (*policyv1.WaitForRevisionResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.GetRevision() > f.revision {
		return nil, status.Error(codes.OutOfRange, "there is no such revision yet")
	}
	if status.Code(f.waitError) == codes.DeadlineExceeded {
		<-ctx.Done() // the kernel is slow
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return &policyv1.WaitForRevisionResponse{Revision: f.revision, Disconnected: f.disconnected, Enforcing: f.enforcing}, f.waitError
}

func (f *fakePolicy) Explain(_ context.Context, r *policyv1.ExplainRequest) (*policyv1.ExplainResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.explained = r
	if r.GetTo().GetIdentity() == 999 {
		return nil, status.Error(codes.NotFound, "identity 999 is not known")
	}
	return &policyv1.ExplainResponse{
		Verdict: policyv1.Action_ACTION_DENY, Revision: f.revision,
		Egress: &policyv1.SideExplanation{Subject: 300, SubjectLabels: []string{"k8s:app=web"}, Peer: 301, Action: policyv1.Action_ACTION_ALLOW, DecidedBy: policyv1.DecidedBy_DECIDED_BY_NOT_ENFORCED},
		Ingress: &policyv1.SideExplanation{
			Subject: 301, SubjectLabels: []string{"k8s:app=db\x1b[2J"}, Peer: 300, Action: policyv1.Action_ACTION_DENY, DecidedBy: policyv1.DecidedBy_DECIDED_BY_RULE, Rule: 2, Enforced: true,
			Matches: []*policyv1.MatchingRule{{
				Number: 2, Action: policyv1.Action_ACTION_DENY, Tier: "Isolation", Decides: true, Text: "everything from everybody",
				Sources: []*policyv1.RuleSource{{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}},
			}},
		},
	}, nil
}

func (f *fakePolicy) Diff(r *policyv1.DiffRequest, s grpc.ServerStreamingServer[policyv1.DiffResponse]) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.compared = r
	if strings.Contains(string(r.GetManifests()), "refuse") {
		return status.Error(codes.ResourceExhausted, "a table has no room")
	}
	for _, d := range f.differences {
		if err := s.Send(d); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakePolicy) GetPolicyTable(context.Context, *policyv1.GetPolicyTableRequest) (*policyv1.GetPolicyTableResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table, nil
}

func (f *fakePolicy) GetStatus(context.Context, *policyv1.GetStatusRequest) (*policyv1.GetStatusResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &policyv1.GetStatusResponse{
		Version: "v1", StartTime: timestamppb.Now(), Revision: f.revision, Policies: 3, Refused: 1, Identities: 12, Subjects: f.subjects, Tables: 4, PoliciesWithUnsupportedFields: f.unsupported,
		Sources: []*policyv1.SourceStatus{{Name: "identity", Synced: true}, {Name: "file", Synced: false, Error: "the directory is gone"}}, Subscribers: f.subscribers,
	}, nil
}

// write puts a file into a directory of the test.
func write(t *testing.T, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const webPolicy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec: {podSelector: {}}\n"

func TestConfirmEndsWhatTheKernelHolds(t *testing.T) {
	n := newFakeNode(t)
	file := write(t, t.TempDir(), "web.yaml", webPolicy)
	n.policy.held = []string{"datapath: the kernel goes on enforcing revision 12: the policy service began another state"}
	n.policy.waitError = status.Error(codes.FailedPrecondition, "an earlier state stays enforced: "+n.policy.held[0])
	out, _ := n.want(t, exitNotReady, "policy", "apply", "-f", file)
	if !strings.Contains(out, "Revision 7 is stored, but the kernel does not enforce it: an earlier state stays enforced: datapath: the kernel goes on enforcing revision 12") {
		t.Errorf("apply says\n%s", out)
	}
	out, _ = n.want(t, 0, "policy", "confirm")
	for _, want := range []string{"Until now datapath: the kernel goes on enforcing revision 12", "The kernel enforces revision 7, of "} {
		if !strings.Contains(out, want) {
			t.Errorf("confirm says\n%s, want %q", out, want)
		}
	}
	n.policy.held, n.policy.confirmed = nil, status.Error(codes.FailedPrecondition, "incomplete: identity")
	out, _ = n.want(t, exitNotReady, "policy", "confirm")
	if !strings.Contains(out, "nothing was held") || !strings.Contains(out, "Revision 7 is confirmed, but the kernel does not enforce it: incomplete: identity") {
		t.Errorf("confirm says\n%s", out)
	}
}

func TestApplyWaitsUntilTheKernelEnforces(t *testing.T) {
	n := newFakeNode(t)
	file := write(t, t.TempDir(), "web.yaml", webPolicy)
	out, _ := n.want(t, 0, "policy", "apply", "-f", file)
	wantLines(t, out, "NetworkPolicy shop/web created")
	if !strings.Contains(out, "The kernel enforces revision 7, after ") {
		t.Errorf("apply says\n%s", out)
	}
	out, _ = n.want(t, 0, "policy", "apply", "-f", file, "--wait=false", "-o", "json")
	var done policyChanges
	if err := json.Unmarshal([]byte(out), &done); err != nil {
		t.Fatal(err)
	}
	if done.Enforced != nil || len(done.Changes) != 1 || done.Changes[0].Change != "unchanged" || done.Changes[0].File != file {
		t.Errorf("apply --wait=false: %+v", done)
	}
	out, _ = n.want(t, 0, "policy", "apply", "-f", file, "--validate-only")
	wantLines(t, out, "Nothing was changed: --validate-only.")

	for _, c := range []struct {
		what string
		set  func()
		want string
	}{
		{"a datapath that is away", func() { n.policy.disconnected = []string{"datapath"} }, "not connected: datapath"},
		{"no datapath at all", func() {
			// A subscriber that only watches, and was asked for by a debugging session, is no datapath.
			n.policy.enforcing, n.policy.subscribers = nil, []*policyv1.SubscriberStatus{{Name: "nc-sub", Connected: true}}
		}, "no datapath is connected"},
		{"a refused table", func() {
			n.policy.waitError = status.Error(codes.FailedPrecondition, "identity 300: table of NetworkPolicy shop/web: 9 of 8 rows")
		}, "9 of 8 rows"},
		{"a slow kernel", func() { n.policy.waitError = status.Error(codes.DeadlineExceeded, "") }, "not within 50ms"},
	} {
		n.policy.mu.Lock()
		n.policy.disconnected, n.policy.waitError, n.policy.enforcing = nil, nil, []string{"datapath"}
		c.set()
		n.policy.mu.Unlock()
		out, _ = n.want(t, exitNotReady, "policy", "apply", "-f", file, "--wait=50ms")
		if !strings.Contains(out, c.want) || !strings.Contains(out, "does not enforce it") {
			t.Errorf("with %s, apply says\n%s", c.what, out)
		}
	}
}

func TestProblemsNameFileDocumentAndField(t *testing.T) {
	n := newFakeNode(t)
	dir := t.TempDir()
	good := write(t, dir, "a.yaml", "# a comment alone\n---\n"+webPolicy)
	bad := write(t, dir, "b.yaml", webPolicy+"---\n# nothing\n---\nkind: NetworkPolicy\nmetadata: {name: db}\nspec: {refuse: \"is no port\"}\n")
	_, errOut := n.want(t, exitFailed, "policy", "apply", "-f", good, "-f", bad)
	wantLines(t, errOut, "sluice: "+bad+": document 2 (line 8): NetworkPolicy db: spec.refuse: is no port")
	if len(n.policy.policies) != 0 {
		t.Errorf("something was applied: %v", n.policy.policies)
	}

	dropped := write(t, dir, "c.yaml", "kind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec: {unknown: x}\n")
	_, errOut = n.want(t, exitFailed, "policy", "apply", "-f", dropped)
	wantLines(t, errOut, "sluice: "+dropped+": document 1 (line 1): NetworkPolicy shop/web: spec.unknown: no such field")
	_, errOut = n.want(t, 0, "policy", "apply", "-f", dropped, "--allow-unknown-fields")
	wantLines(t, errOut, "warning: "+dropped+": document 1 (line 1): NetworkPolicy shop/web: spec.unknown: no such field; it is ignored")

	for name, content := range map[string]string{
		"syntax.yaml":  "kind: NetworkPolicy\n---\n\nmetadata: name: x\n",
		"empty.yaml":   "# nothing\n---\n",
		"two.json":     `{"kind": "NetworkPolicy"}` + "\n" + `{"kind": "NetworkPolicy"}`,
		"large.yaml":   "kind: NetworkPolicy\n#" + strings.Repeat("x", maxManifests),
		"trailing.yml": "kind: A\n...\nkind: [\n",
	} {
		path := write(t, dir, name, content)
		_, errOut := n.want(t, exitFailed, "policy", "apply", "-f", path)
		if !strings.HasPrefix(errOut, "sluice: "+path+": ") {
			t.Errorf("%s: standard error %q", name, errOut)
		}
		if name == "syntax.yaml" && !strings.Contains(errOut, "line 4") {
			t.Errorf("the message does not give the file's line: %q", errOut)
		}
	}
	_, errOut = n.want(t, exitFailed, "policy", "apply", "-f", filepath.Join(dir, "absent"))
	if !strings.Contains(errOut, "absent: no such file or directory") {
		t.Errorf("an absent file: %q", errOut)
	}
	n.want(t, exitUsage, "policy", "apply")
}

func TestUnsupportedFieldsStayInSight(t *testing.T) {
	n := newFakeNode(t)
	file := write(t, t.TempDir(), "a.yaml", "kind: NetworkPolicy\nmetadata: {name: web, namespace: shop}\nspec: {unsupported: such peers}\n")
	const text = "NetworkPolicy shop/web: spec.unsupported: not supported by Sluice: such peers"
	_, errOut := n.want(t, 0, "policy", "apply", "-f", file)
	wantLines(t, errOut, "warning: "+file+": document 1 (line 1): "+text)
	out, _ := n.want(t, 0, "policy", "list")
	wantLines(t, out, "NetworkPolicy shop/web accepted, 1 note 7 1 identity 2 0s grpc", text)
	out, _ = n.want(t, 0, "policy", "list", "-o", "json")
	var all []policyState
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 || len(all[0].Notes) != 1 || all[0].Notes[0].Kind != "unsupported" {
		t.Errorf("list -o json: %v, %s", err, out)
	}
	_, errOut = n.want(t, 0, "policy", "get", "netpol", "shop/web")
	wantLines(t, errOut, "warning: spec.unsupported: not supported by Sluice: such peers")
	n.policy.mu.Lock()
	n.policy.unsupported = 1
	n.policy.mu.Unlock()
	out, _ = n.want(t, 0, "status")
	wantLines(t, out, "Warning: sluice-policy: policies with fields that Sluice does not support: 1; `sluice policy list` names them")
}

func TestListsAndOtherKindsAreRead(t *testing.T) {
	n := newFakeNode(t)
	dir := t.TempDir()
	list := write(t, dir, "list.yaml", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: networking.k8s.io/v1\n  kind: NetworkPolicy\n  metadata: {name: a, namespace: shop}\n"+
		"- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: b, namespace: shop}, spec: {refuse: is no port}}\n")
	_, errOut := n.want(t, exitFailed, "policy", "apply", "-f", list)
	wantLines(t, errOut, "sluice: "+list+": document 1, item 2 (line 7): NetworkPolicy shop/b: spec.refuse: is no port")
	typed := write(t, dir, "typed.json", `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicyList", "items": [{"metadata": {"name": "c", "namespace": "shop"}}]}`)
	out, _ := n.want(t, 0, "policy", "apply", "-f", typed)
	wantLines(t, out, "NetworkPolicy shop/c created")

	mixed := write(t, dir, "mixed.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n---\n"+webPolicy+"---\napiVersion: crd.projectcalico.org/v1\nkind: NetworkPolicy\nmetadata: {name: x}\n")
	out, errOut = n.want(t, 0, "policy", "apply", "-f", mixed, "--skip-other-kinds")
	wantLines(t, out, "NetworkPolicy shop/web created")
	wantLines(t, errOut, "note: "+mixed+": document 1 (line 1): Service s: is no policy, and left out",
		"note: "+mixed+": document 3 (line 10): NetworkPolicy x: is no policy, and left out")
	none := write(t, dir, "none.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n")
	_, errOut = n.want(t, exitFailed, "policy", "apply", "-f", none, "--skip-other-kinds")
	wantLines(t, errOut, "sluice: there is no policy among the objects")
}

func TestBrokenFilesHideNoOthers(t *testing.T) {
	n := newFakeNode(t)
	dir := t.TempDir()
	write(t, dir, "a.yaml", "{")
	write(t, dir, "b.yaml", webPolicy)
	write(t, dir, "c.yaml", "kind: [\n")
	_, errOut := n.want(t, exitFailed, "policy", "apply", "-f", dir)
	for _, name := range []string{"a.yaml", "c.yaml"} {
		if !strings.Contains(errOut, filepath.Join(dir, name)+": ") {
			t.Errorf("apply does not name %s: %q", name, errOut)
		}
	}
	if len(n.policy.policies) > 0 {
		t.Error("the other file was applied")
	}
	var failure struct{ Error string }
	_, errOut = n.want(t, exitFailed, "policy", "apply", "-f", dir, "-o", "json")
	if err := json.Unmarshal([]byte(errOut), &failure); err != nil || !strings.Contains(failure.Error, "a.yaml") {
		t.Errorf("apply -o json: %v: %q", err, errOut)
	}
	_, errOut = n.want(t, exitUsage, "policy", "apply", "-o", "json")
	if err := json.Unmarshal([]byte(errOut), &failure); err != nil || !strings.Contains(failure.Error, "nothing to apply") {
		t.Errorf("wrong usage with -o json: %v: %q", err, errOut)
	}

	bin := t.TempDir()
	script := "#!/bin/sh\n/bin/cat > /dev/null\necho '{\"problems\":[]}'\n"
	if err := os.WriteFile(filepath.Join(bin, "sluice-policy"), []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	out, _ := n.want(t, exitFailed, "policy", "validate", "-f", dir)
	if !strings.Contains(out, filepath.Join(dir, "a.yaml")+": ") || !strings.Contains(out, filepath.Join(dir, "c.yaml")+": ") ||
		!strings.Contains(out, "0 of 1 policies would be refused; files that cannot be read: 2.") {
		t.Errorf("validate says\n%s", out)
	}
	out, _ = n.want(t, exitFailed, "policy", "validate", "-f", dir, "-o", "json")
	var all []checked
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 3 || all[0].Name != "web" || len(all[0].Problems) != 0 || len(all[2].Problems) != 1 {
		t.Errorf("validate -o json: %v, %s", err, out)
	}
}

func TestApplyAsAManager(t *testing.T) {
	n := newFakeNode(t)
	dir := t.TempDir()
	a := write(t, dir, "a.yaml", "kind: NetworkPolicy\nmetadata: {name: a, namespace: shop}\n")
	b := write(t, dir, "b.yaml", "kind: NetworkPolicy\nmetadata: {name: b, namespace: shop}\n")
	n.want(t, 0, "policy", "apply", "-f", a, "-f", b, "--manager", "argo", "--if-revision", "6")
	out, _ := n.want(t, 0, "policy", "list")
	wantLines(t, out, "NetworkPolicy shop/a accepted 7 1 identity 2 0s grpc:argo")
	_, errOut := n.want(t, exitFailed, "policy", "apply", "-f", a, "--manager", "argo", "--if-revision", "6")
	wantLines(t, errOut, "sluice: the policy revision is another")
	out, _ = n.want(t, 0, "policy", "apply", "-f", b, "--manager", "argo", "--prune")
	wantLines(t, out, "NetworkPolicy shop/b unchanged", "NetworkPolicy shop/a deleted")
	_, errOut = n.want(t, exitUsage, "policy", "apply", "-f", b, "--prune")
	wantLines(t, errOut, "sluice: --prune deletes what else a program brought: name it with --manager NAME")
}

func TestPolicyThatSelectsNothingIsNoted(t *testing.T) {
	n := newFakeNode(t)
	n.policy.selectsNothing = true
	file := write(t, t.TempDir(), "web.yaml", webPolicy)
	_, errOut := n.want(t, 0, "policy", "apply", "-f", file)
	wantLines(t, errOut, "note: "+file+": document 1 (line 1): NetworkPolicy shop/web: selects no endpoint of this node")
	// The list has a column for it.
	out, _ := n.want(t, 0, "policy", "list")
	wantLines(t, out, "NetworkPolicy shop/web accepted 7 1 identity 2 0s grpc")
}

func TestApplyTakesDirectoriesAndStandardInput(t *testing.T) {
	n := newFakeNode(t)
	dir := t.TempDir()
	write(t, dir, "b.yml", "kind: NetworkPolicy\nmetadata: {name: b}\n")
	write(t, dir, "a.json", `{"kind": "NetworkPolicy", "metadata": {"name": "a"}}`)
	write(t, dir, "notes.txt", "{")
	write(t, dir, ".hidden.yaml", "{")
	if err := os.Mkdir(filepath.Join(dir, "sub.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	out, _ := n.want(t, 0, "policy", "apply", "-f", dir, "-n", "shop")
	if got := strings.Join(strings.Fields(out)[:6], " "); got != "NetworkPolicy shop/a created NetworkPolicy shop/b created" {
		t.Errorf("apply says\n%s", out)
	}
	docs, err := readManifests([]string{"-"}, strings.NewReader(webPolicy))
	if err != nil || len(docs) != 1 || docs[0].place() != "standard input: document 1 (line 1)" || string(join(docs)) != "---\n"+webPolicy {
		t.Errorf("standard input: %+v, %v", docs, err)
	}
	if _, err := readManifests([]string{"-"}, strings.NewReader("{")); err == nil || !strings.HasPrefix(err.Error(), "standard input: yaml: ") {
		t.Errorf("no YAML on standard input: %v", err)
	}
	if _, err := readManifests([]string{t.TempDir()}, nil); err == nil || !strings.Contains(err.Error(), "no .yaml, .yml or .json file") {
		t.Errorf("an empty directory: %v", err)
	}
}

func TestPoliciesAreNamedAsPeopleDo(t *testing.T) {
	for _, c := range []struct{ kind, name, namespace, want string }{
		{"NetworkPolicy", "web", "", "NetworkPolicy default/web"},
		{"netpol", "shop/web", "", "NetworkPolicy shop/web"},
		{"networkpolicies", "web", "shop", "NetworkPolicy shop/web"},
		{"CNP", "web", "shop", "CiliumNetworkPolicy shop/web"},
		{"ccnp", "all", "shop", "CiliumClusterwideNetworkPolicy all"},
		{"banp", "default", "", "BaselineAdminNetworkPolicy default"},
		{"ccnp", "shop/all", "", ""},
		{"pod", "web", "", ""},
		{"netpol", "", "", ""},
		{"netpol", "/web", "", ""},
		{"netpol", "a/b/c", "", ""},
	} {
		key, err := keyNamed(c.kind, c.name, c.namespace)
		if (err == nil) != (c.want != "") || err == nil && keyText(key) != c.want {
			t.Errorf("%s %q in %q: %v, %v, want %q", c.kind, c.name, c.namespace, keyText(key), err, c.want)
		}
	}
}

func TestDeleteListAndGet(t *testing.T) {
	n := newFakeNode(t)
	file := write(t, t.TempDir(), "web.yaml", webPolicy)
	n.want(t, 0, "policy", "apply", "-f", file)
	n.policy.mu.Lock()
	n.policy.policies["NetworkPolicy shop/x"] = &policyv1.Policy{
		Key: &policyv1.PolicyKey{Kind: "NetworkPolicy", Namespace: "shop", Name: "x"}, Source: "file", Origin: "x.yaml", Error: "spec.ingress: is a number", Accepted: true, Revision: 2,
	}
	n.policy.policies["z"] = &policyv1.Policy{Key: &policyv1.PolicyKey{}, Source: "file", Origin: "z.yaml", Error: "is no YAML"}
	n.policy.mu.Unlock()

	out, _ := n.want(t, 0, "policy", "list")
	wantLines(t, out, "POLICY STATE REVISION SELECTS RULES AGE SOURCE", "NetworkPolicy shop/web accepted 7 1 identity 2 0s grpc",
		"NetworkPolicy shop/x outdated 2 0 identities 0 - file:x.yaml", "file:z.yaml refused 0 0 identities 0 - file:z.yaml", "file:z.yaml was refused: is no YAML",
		"NetworkPolicy shop/x stays as it is; a newer form was refused: spec.ingress: is a number")
	out, _ = n.want(t, 0, "policy", "list", "--subject", "300", "-o", "json")
	var all []policyState
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 || all[0].Name != "web" {
		t.Errorf("list --subject 300: %v %s", err, out)
	}
	out, _ = n.want(t, 0, "policy", "list", "--refused")
	if strings.Contains(out, "shop/web") || !strings.Contains(out, "z.yaml") {
		t.Errorf("list --refused\n%s", out)
	}

	out, _ = n.want(t, 0, "policy", "get", "netpol", "shop/web")
	if out != webPolicy {
		t.Errorf("get gives\n%s", out)
	}
	_, errOut := n.want(t, exitFailed, "policy", "get", "netpol", "web")
	wantLines(t, errOut, "sluice: there is no NetworkPolicy default/web; see `sluice policy list`")

	out, _ = n.want(t, 0, "policy", "delete", "netpol", "shop/web", "nope")
	wantLines(t, out, "NetworkPolicy shop/web deleted", "NetworkPolicy default/nope absent")
	out, _ = n.want(t, 0, "policy", "delete", "-f", file)
	wantLines(t, out, "NetworkPolicy shop/web absent")
	for _, bad := range [][]string{{}, {"netpol"}, {"netpol", "a", "-f", file}, {"pod", "a"}} {
		n.want(t, exitUsage, append([]string{"policy", "delete"}, bad...)...)
	}
}

func TestPolicyExplainFindsWhoIsMeant(t *testing.T) {
	n := newFakeNode(t)
	type want struct {
		identity uint32
		address  string
		labels   int
	}
	for _, c := range []struct {
		text string
		want want
	}{
		{"0123", want{300, "10.244.0.2", 0}},
		{"0123456789ab/eth0", want{300, "10.244.0.2", 0}},
		{"10.244.0.3", want{300, "10.244.0.3", 0}},
		{"300", want{300, "", 0}},
		{"192.0.2.7", want{0, "192.0.2.7", 0}},
		{"10.244.0.1", want{identityHost, "10.244.0.1", 0}},
		{"10.244.0.99", want{identityUnknownInCluster, "10.244.0.99", 0}},
		{"k8s:app=web,tier", want{0, "", 2}},
		{"reserved:host", want{1, "", 0}},
	} {
		n.want(t, 0, "policy", "explain", "--from", c.text, "--to", "301", "--port", "80")
		from := n.policy.explained.GetFrom()
		got := want{from.GetIdentity(), addressText(from.GetAddress()), len(from.GetLabels())}
		if got != c.want {
			t.Errorf("--from %s is asked as %+v, want %+v", c.text, got, c.want)
		}
	}
	n.want(t, 0, "policy", "explain", "--from", "0123", "--to", "fd00:244::9", "--icmp", "echo")
	r := n.policy.explained
	if addressText(r.GetFrom().GetAddress()) != "fd00:244::2" || r.GetProtocol() != 58 || r.GetPort() != 128<<8 {
		t.Errorf("IPv6 is asked as %v", r)
	}
	n.want(t, 0, "policy", "explain", "--from", "300", "--to", "301", "--port", "53/UDP")
	if r := n.policy.explained; r.GetProtocol() != 17 || r.GetPort() != 53 {
		t.Errorf("53/UDP is asked as %v", r)
	}
	for _, bad := range [][]string{
		{"--from", "0123", "--to", "301"},
		{"--from", "0123", "--port", "80"},
		{"--from", "", "--to", "301", "--port", "80"},
		{"--from", "0123", "--to", "301", "--port", "0"},
		{"--from", "0123", "--to", "301", "--port", "80/gre"},
		{"--from", "0123", "--to", "301", "--protocol", "6"},
		{"--from", "0123", "--to", "301", "--icmp", "300"},
		{"--from", "0123", "--to", "301", "--port", "80", "--icmp", "8"},
		{"--from", "k8s:=x", "--to", "301", "--port", "80"},
		{"--from", "reserved:nobody", "--to", "301", "--port", "80"},
		{"--from", "a=b,a=c", "--to", "301", "--port", "80"},
		{"--from", "16777216", "--to", "301", "--port", "80"},
		{"--from", "192.0.2.7", "--to", "fd00::1", "--port", "80"},
		{"--from", "192.0.2.7", "--to", "192.0.2.8", "--port", "80", "-6"},
	} {
		n.want(t, exitUsage, append([]string{"policy", "explain"}, bad...)...)
	}
	_, errOut := n.want(t, exitFailed, "policy", "explain", "--from", "300", "--to", "999", "--port", "80")
	wantLines(t, errOut, "sluice: identity 999 is not known")
}

func TestPolicyExplainShowsBothSidesAndEveryRule(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "policy", "explain", "--from", "0123", "--to", "301", "--port", "80")
	wantLines(t, out,
		"0123456789abc/eth0 10.244.0.2 -> 301, tcp port 80: DENIED by policy revision 6",
		"Egress, what app=web (300) may send: allowed, because no policy selects it",
		`Ingress, what app=db\x1b[2J (301) may receive: denied by rule 2`,
		"> 2 deny Isolation NetworkPolicy shop/db everything from everybody")
	out, _ = n.want(t, 0, "policy", "explain", "--from", "0123", "--to", "301", "--port", "80", "-o", "json")
	var x explanation
	if err := json.Unmarshal([]byte(out), &x); err != nil {
		t.Fatal(err)
	}
	if x.Verdict != "denied" || x.Ingress.Rule != 2 || x.Ingress.Matches[0].Sources[0] != "NetworkPolicy shop/db" || !x.Ingress.Matches[0].Decides {
		t.Errorf("JSON %+v", x)
	}
}

func TestDiffExitsAsDiffDoes(t *testing.T) {
	n := newFakeNode(t)
	file := write(t, t.TempDir(), "web.yaml", webPolicy)
	out, _ := n.want(t, 0, "policy", "diff", "-f", file)
	wantLines(t, out, "No verdict would change for the pods of this node.")
	n.policy.mu.Lock()
	n.policy.subjects = 0
	n.policy.mu.Unlock()
	_, errOut := n.want(t, 0, "policy", "diff", "-f", file)
	if !strings.HasPrefix(errOut, "warning: the policy service knows no pod of this node") {
		t.Errorf("without a subject, standard error says %q", errOut)
	}

	n.policy.differences = []*policyv1.DiffResponse{{
		Subject: 300, SubjectLabels: []string{"k8s:app=web"}, Direction: policyv1.TableDirection_TABLE_DIRECTION_INGRESS,
		Peers: []*policyv1.DiffPeer{{Identity: 301, Labels: []string{"k8s:app=client"}, Prefix: "0.0.0.0/0"}, {Identity: 301, Labels: []string{"k8s:app=client"}, Prefix: "::/0"}, {Identity: 302, Prefix: "::/0"}, {Identity: 302, Prefix: "10.0.0.7/32"}, {Prefix: "192.0.2.0/24"}, {Identity: 1, Labels: []string{"reserved:host="}}, {}},
		Ports: []*policyv1.DiffPorts{
			{FirstProtocol: 0, FirstPort: 0, LastProtocol: 6, LastPort: 79, Before: policyv1.Action_ACTION_ALLOW, After: policyv1.Action_ACTION_DENY},
			{FirstProtocol: 6, FirstPort: 80, LastProtocol: 6, LastPort: 80, Before: policyv1.Action_ACTION_ALLOW, After: policyv1.Action_ACTION_REDIRECT},
			{FirstProtocol: 6, FirstPort: 81, LastProtocol: 65535, LastPort: 65535, Before: policyv1.Action_ACTION_ALLOW, After: policyv1.Action_ACTION_DENY},
		},
	}}
	// The same for other peers, of which one was named.
	n.policy.differences = append(n.policy.differences, proto.Clone(n.policy.differences[0]).(*policyv1.DiffResponse))
	n.policy.differences[1].Peers = []*policyv1.DiffPeer{{Identity: 301, Labels: []string{"k8s:app=client"}}, {Identity: 7, Labels: []string{"reserved:a", "reserved:b="}}}
	out, _ = n.want(t, exitDiffers, "policy", "diff", "-f", file, "--delete", "NetworkPolicy/shop/old", "--delete", "ccnp/all")
	wantLines(t, out, "What app=web (300) may receive", "everything but tcp 80: allowed -> denied", "tcp 80: allowed -> redirected",
		"from app=client (301)", "from identity 302 at ::/0, 10.0.0.7", "from reserved:host, reserved:a+reserved:b", "from 192.0.2.0/24, every other address outside")
	if strings.Count(out, "What ") != 1 {
		t.Errorf("one subject and direction is said more than once:\n%s", out)
	}
	if d := n.policy.compared.GetDelete(); len(d) != 2 || keyText(d[0]) != "NetworkPolicy shop/old" || keyText(d[1]) != "CiliumClusterwideNetworkPolicy all" {
		t.Errorf("deletions %v", d)
	}
	out, _ = n.want(t, exitDiffers, "policy", "diff", "-f", file, "-o", "json")
	var all []difference
	if err := json.Unmarshal([]byte(out), &all); err != nil || len(all) != 1 || len(all[0].Ports) != 2 {
		t.Errorf("JSON %v %s", err, out)
	}

	trouble := write(t, t.TempDir(), "trouble.yaml", "kind: X\nspec: {refuse: x}\n")
	n.want(t, exitTrouble, "policy", "diff", "-f", trouble)
	n.want(t, exitTrouble, "policy", "diff", "-f", "absent.yaml")
	n.want(t, exitTrouble, "policy", "diff")
	n.want(t, exitTrouble, "policy", "diff", "--delete", "web")
	n.want(t, exitTrouble, "policy", "diff", "--nonsense")
}

func TestPortsReadWell(t *testing.T) {
	for _, c := range []struct {
		set  intervals
		want string
	}{
		{intervals{{0, lastPoint}}, "everything"},
		{intervals{{point(6, 80), point(6, 80)}}, "tcp 80"},
		{intervals{{point(6, 80), point(6, 90)}, {point(17, 0), point(17, 65535)}}, "tcp 80-90, udp"},
		{intervals{{point(1, 8<<8), point(1, 8<<8|255)}}, "icmp type 8"},
		{intervals{{point(1, 3<<8|4), point(1, 3<<8|4)}}, "icmp type 3 code 4"},
		{intervals{{point(6, 1), point(7, 65535)}}, "tcp 1-65535, protocol 7"},
		{intervals{{point(0, 0), point(5, 65535)}}, "protocols 0 to 5"},
		{intervals{{0, point(6, 442)}, {point(6, 444), lastPoint}}, "everything but tcp 443"},
		{intervals{{point(6, 81), point(6, 90)}, {point(6, 80), point(6, 80)}}, "tcp 80-90"},
	} {
		if got := strings.Join(c.set.texts(), ", "); got != c.want {
			t.Errorf("%v reads %q, want %q", c.set, got, c.want)
		}
	}
}

func TestLabelsAreShortenedForPeople(t *testing.T) {
	for want, labels := range map[string][]string{
		"shop/app=web,tier": {"k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop", "k8s:tier="},
		"shop/app=db":       {"k8s:app=db", "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop", "k8s:io.kubernetes.pod.namespace=shop"},
		"shop/io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=b": {
			"k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=b", "k8s:io.kubernetes.pod.namespace=shop",
		},
		"cni:app=web":          {"cni:app=web"},
		"reserved:host":        {"reserved:host="},
		"shop/cni:a=b,tier=up": {"cni:a=b", "k8s:io.kubernetes.pod.namespace=shop", "k8s:tier=up"},
		"":                     nil,
	} {
		if got := workloadText(labels); got != want {
			t.Errorf("%q are shown as %q, want %q", labels, got, want)
		}
	}
}

func TestPolicyTableReadsTheTree(t *testing.T) {
	n := newFakeNode(t)
	node := func(entries ...[2]uint32) *policyv1.PortNode {
		p := &policyv1.PortNode{}
		for i := range 16 {
			e := entries[min(i, len(entries)-1)]
			p.High, p.Value = append(p.High, e[0]), append(p.Value, e[1])
		}
		return p
	}
	const nothing = 0x7FFF<<16 | 0xFFFF
	n.policy.table = &policyv1.GetPolicyTableResponse{
		Revision: 9,
		Ingress: &policyv1.TableDefine{
			HostAllow: true, HasAddresses: true,
			Rules:          []*policyv1.TableRule{{Action: policyv1.Action_ACTION_ALLOW, Tier: 1}, {Action: policyv1.Action_ACTION_DENY, Tier: 2}},
			Classes:        []uint32{0, 1},
			Nodes:          []*policyv1.PortNode{node([2]uint32{0xFFFFFFFF, 0x7FFF<<16 | 2}), node([2]uint32{point(6, 0) - 1, nothing}, [2]uint32{point(6, 65535), 1<<31 | 2}, [2]uint32{0xFFFFFFFF, nothing}), node([2]uint32{point(6, 79), nothing}, [2]uint32{point(6, 80), 0x7FFF<<16 | 1}, [2]uint32{point(6, 65535), 3<<16 | 1})},
			DefaultClasses: make([]uint32, 8), AddressClasses: make([]uint32, 3),
			Peers:  []*policyv1.PeerRow{{NodeClass: 5, Class: 1}},
			Blocks: []*policyv1.AddressBlock{{Address: []byte{192, 0, 2, 0}, Bits: 24, Classes: []uint32{0, 0, 1}}},
		},
		IngressRules: []*policyv1.RuleSources{{Sources: []*policyv1.RuleSource{{Kind: "NetworkPolicy", Namespace: "shop", Name: "web", Path: "spec.ingress[0]"}}}},
	}
	out, _ := n.want(t, 0, "policy", "table", "300")
	wantLines(t, out, "Identity 300, policy revision 9", "Egress: nothing is enforced", "Ingress: what no rule decides is denied, but for the own node",
		"rule 1 allow Normal NetworkPolicy shop/web spec.ingress[0]", "rule 2 deny Isolation -",
		"class 0 everything rule 2", "tcp 80 rule 1", "tcp 81-65535 rule 3, else rule 1", "node class 5 class 1", "192.0.2.0/24 cluster: class 0, node: class 0, outside: class 1")

	n.policy.table.Ingress.Nodes[2].Value[1] = 1<<31 | 2 // a tree that never ends
	_, errOut := n.want(t, exitFailed, "policy", "table", "300")
	if !strings.Contains(errOut, "ingress table of 300: node 2 at depth 3") {
		t.Errorf("a broken tree: %q", errOut)
	}
}

func TestStatusTellsOfPolicies(t *testing.T) {
	n := newFakeNode(t)
	n.policyMode = "required"
	out, _ := n.want(t, 0, "status")
	wantLines(t, out, "Policies 3 in force, 1 refused, revision 6", "Tables 4 for 2 subjects, 12 identities known", "Sources identity, file (not complete yet)",
		"Policy required; the kernel enforces revision 5 of 6", "Connections 7 live; 9 begun, 1 ended by policy, 1 expired, 0 evicted", "Maps 2, 1.5 KiB",
		"Warning: sluice-policy: 1 policies or files were refused; see `sluice policy list --refused`", "Warning: sluice-policy: source file: the directory is gone",
		"Warning: sluice-datapath: not enforced: identity 300: no room", "Warning: sluice-datapath: a/eth0: tcx program sl1 egress: expected nothing, found passes, program 113")

	n.servers["policy"].Stop()
	out, _ = n.want(t, exitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-policy: ") {
		t.Errorf("without the policy service that is required\n%s", out)
	}
	n.policyMode = "none"
	out, _ = n.want(t, 0, "status")
	if strings.Contains(out, "sluice-policy") {
		t.Errorf("without the policy service that nobody uses\n%s", out)
	}
}

func TestValidateNeedsNoService(t *testing.T) {
	var out, errOut bytes.Buffer
	t.Setenv("PATH", t.TempDir())
	file := write(t, t.TempDir(), "web.yaml", webPolicy)
	if code := run([]string{"--run-dir", "/nonexistent", "policy", "validate", "-f", file}, &out, &errOut, commands...); code != exitFailed ||
		!strings.Contains(errOut.String(), "sluice-policy, which checks manifests, is neither ") {
		t.Errorf("without the program: exit code %d\n%s%s", code, out.String(), errOut.String())
	}
	// A stand-in for the program answers as it does.
	bin := t.TempDir()
	program := filepath.Join(bin, "sluice-policy")
	script := "#!/bin/sh\n[ \"$*\" = 'validate --namespace=shop' ] || exit 2\n/bin/cat > " + filepath.Join(bin, "stdin") + "\n" +
		`echo '{"problems":["spec.ingress[0].ports[0].port: is no port"]}'` + "\n" + `echo '{"problems":["metadata.name: document 0 is the same policy"],"droppedFields":["spec.x"]}'` + "\n"
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // executable
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	out.Reset()
	errOut.Reset()
	if code := run([]string{"policy", "validate", "-n", "shop", "-f", file, "-f", file}, &out, &errOut, commands...); code != exitFailed {
		t.Errorf("with two wrong documents: exit code %d\n%s%s", code, out.String(), errOut.String())
	}
	place := file + ": document 1 (line 1): NetworkPolicy shop/web: "
	wantLines(t, out.String(), place+"spec.ingress[0].ports[0].port: is no port", place+"metadata.name: is the same policy as "+file+": document 1 (line 1)",
		place+"warning: spec.x: no such field; it would be ignored", "2 of 2 policies would be refused.")
	if given, err := os.ReadFile(filepath.Join(bin, "stdin")); err != nil || string(given) != "---\n"+webPolicy+"---\n"+webPolicy {
		t.Errorf("the program was given %q, %v", given, err)
	}
	if code := run([]string{"policy", "validate", "-f", file}, &out, &errOut, commands...); code != exitFailed {
		t.Errorf("a program of another mind: exit code %d", code)
	}
}
