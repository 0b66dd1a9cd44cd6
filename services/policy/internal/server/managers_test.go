// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// put applies manifests as a manager.
func (s *service) put(manager, manifests string) (*policyv1.UpsertPoliciesResponse, error) {
	return s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(manifests), Manager: manager})
}

// mustPut is put and must succeed.
func (s *service) mustPut(manager, manifests string) *policyv1.UpsertPoliciesResponse {
	s.t.Helper()
	out, err := s.put(manager, manifests)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// owners returns the names of all policies with their managers.
func (s *service) owners() string {
	s.t.Helper()
	var out []string
	for name, p := range s.list() {
		out = append(out, name+"="+p.GetManager())
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (s *service) wantOwners(what, want string) {
	s.t.Helper()
	if got := s.owners(); got != want {
		s.t.Errorf("%s: there are %q, want %q", what, got, want)
	}
}

func TestManagersKeepTheirPoliciesApart(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.mustPut("argo", allowWeb)
	other := strings.Replace(allowWeb, "5432", "80", 1)
	for _, manager := range []string{"", "flux"} {
		_, err := s.put(manager, other)
		wantCode(t, err, codes.AlreadyExists, `NetworkPolicy shop/db belongs to the manager "argo"`)
		_, err = s.DeletePolicies(s.ctx(), &policyv1.DeletePoliciesRequest{
			Keys: []*policyv1.PolicyKey{{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}}, Manager: manager,
		})
		wantCode(t, err, codes.FailedPrecondition, `the manager "argo"`)
	}
	s.apply(named("by-hand", allowWeb))
	_, err := s.put("argo", named("by-hand", allowWeb))
	wantCode(t, err, codes.AlreadyExists, "calls without a manager")
	s.mustPut("argo", other)
	s.stop()
	s.start()
	s.wantOwners("after a restart", "by-hand= db=argo")
	for _, bad := range []string{"Argo", "a/b", "-a", strings.Repeat("a", 64)} {
		_, err := s.put(bad, allowWeb)
		wantCode(t, err, codes.InvalidArgument, "manager")
	}
	stream, err := s.ListPolicies(s.ctx(), &policyv1.ListPoliciesRequest{Manager: proto.String("argo")})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.GetPolicy().GetKey().GetName() != "db" {
		t.Errorf("of argo: %v, %v", m, err)
	}
	if m, err := stream.Recv(); err == nil {
		t.Errorf("other policies of argo: %v", m)
	}
}

func TestReplaceLeavesNothingElseOfTheManager(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.mustPut("argo", named("a", allowWeb)+"---\n"+named("b", allowWeb))
	s.mustPut("flux", named("f", allowWeb))
	s.apply(named("hand", allowWeb))
	replace := func(manifests string, validate bool) *policyv1.ReplacePoliciesResponse {
		t.Helper()
		out, err := s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manager: "argo", Manifests: []byte(manifests), ValidateOnly: validate})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	want := func(out *policyv1.ReplacePoliciesResponse, want string) {
		t.Helper()
		var got []string
		for _, c := range out.GetChanges() {
			got = append(got, c.GetKey().GetName()+" "+strings.TrimPrefix(c.GetType().String(), "CHANGE_TYPE_"))
		}
		if text := strings.Join(got, ", "); text != want {
			t.Errorf("changes: %s, want %s", text, want)
		}
	}
	next := named("b", allowWeb) + "---\n" + named("c", allowWeb)
	want(replace(next, true), "b UNCHANGED, c CREATED, a DELETED")
	s.wantOwners("validated only", "a=argo b=argo f=flux hand=")
	want(replace(next, false), "b UNCHANGED, c CREATED, a DELETED")
	s.wantOwners("replaced", "b=argo c=argo f=flux hand=")
	again := replace(next, false)
	want(again, "b UNCHANGED, c UNCHANGED")
	if again.GetRevision() != 4 {
		t.Errorf("the same again has revision %d", again.GetRevision())
	}
	// If a part of a set is invalid, no part of it is applied.
	_, err := s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manager: "argo", Manifests: []byte(named("f", allowWeb))})
	wantCode(t, err, codes.AlreadyExists, `"flux"`)
	s.wantOwners("another's policy in it", "b=argo c=argo f=flux hand=")
	for _, validate := range []bool{true, false} {
		_, err := s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manager: "argo", ValidateOnly: validate})
		wantCode(t, err, codes.FailedPrecondition, "allow_empty")
	}
	s.wantOwners("an empty set without the confirming flag", "b=argo c=argo f=flux hand=")
	for range 2 { // it may be repeated, with or without the flag
		empty := &policyv1.ReplacePoliciesRequest{Manager: "another", AllowEmpty: true}
		if out, err := s.ReplacePolicies(s.ctx(), empty); err != nil || len(out.GetChanges()) > 0 {
			t.Errorf("the empty set of a manager that has nothing: %v, %v", out, err)
		}
	}
	s.wantOwners("another manager's empty set", "b=argo c=argo f=flux hand=")
	out, err := s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manager: "argo", AllowEmpty: true})
	if err != nil {
		t.Fatal(err)
	}
	want(out, "b DELETED, c DELETED")
	want(replace("", false), "")
	s.wantOwners("an empty set", "f=flux hand=")
	// Policies that users applied belong to no manager.
	_, err = s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{})
	wantCode(t, err, codes.InvalidArgument, "manager")
}

func TestChangesCanBeBoundToARevision(t *testing.T) {
	s := serve(t)
	s.know(town)
	first, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(allowWeb), IfRevision: proto.Uint64(0)})
	if err != nil {
		t.Fatal(err)
	}
	s.apply(named("other", allowWeb))
	seen := proto.Uint64(first.GetRevision())
	key := []*policyv1.PolicyKey{{Kind: "NetworkPolicy", Namespace: "shop", Name: "db"}}
	for _, validate := range []bool{true, false} {
		_, err = s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(allowWeb), IfRevision: seen, ValidateOnly: validate})
		wantCode(t, err, codes.Aborted, "the revision is 2, not 1")
		_, err = s.DeletePolicies(s.ctx(), &policyv1.DeletePoliciesRequest{Keys: key, IfRevision: seen, ValidateOnly: validate})
		wantCode(t, err, codes.Aborted, "the revision is 2, not 1")
		_, err = s.ReplacePolicies(s.ctx(), &policyv1.ReplacePoliciesRequest{Manager: "a", IfRevision: seen, ValidateOnly: validate})
		wantCode(t, err, codes.Aborted, "the revision is 2, not 1")
	}
	s.wantOwners("nothing changed", "db= other=")
	if _, err := s.DeletePolicies(s.ctx(), &policyv1.DeletePoliciesRequest{Keys: key, IfRevision: proto.Uint64(2)}); err != nil {
		t.Error(err)
	}
}

func TestCompletedSourceLosesWhatItDidNotRepeat(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.mustPut("argo", named("a", allowWeb)+"---\n"+named("b", allowWeb))
	s.mustPut("flux", named("f", allowWeb))
	s.apply(named("hand", allowWeb))
	synced := func(want string) {
		t.Helper()
		st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, src := range st.GetSources() {
			if src.GetManager() != "" && src.GetSynced() {
				got = append(got, src.GetManager())
			}
		}
		if text := strings.Join(got, " "); text != want {
			t.Errorf("completed are %q, want %q: %v", text, want, st.GetSources())
		}
	}
	complete := func(manager string, run []byte) (*policyv1.CompleteSourceResponse, error) {
		return s.CompleteSource(s.ctx(), &policyv1.CompleteSourceRequest{Manager: manager, Incarnation: run})
	}
	synced("")
	s.stop()
	s.start()
	// After the restart, the manager lists its policies again: one is unchanged, one is new, and b is missing.
	run := s.mustPut("argo", named("a", allowWeb)).GetIncarnation()
	s.mustPut("argo", named("c", allowWeb))
	s.wantOwners("not complete yet", "a=argo b=argo c=argo f=flux hand=")
	out, err := complete("argo", run)
	if err != nil {
		t.Fatal(err)
	}
	if c := out.GetChanges(); len(c) != 1 || c[0].GetKey().GetName() != "b" || out.GetRevision() != s.list()["c"].GetRevision()+1 {
		t.Errorf("complete: %v", out)
	}
	s.wantOwners("complete", "a=argo c=argo f=flux hand=")
	synced("argo")
	if out, err = complete("argo", run); err != nil || len(out.GetChanges()) != 0 {
		t.Errorf("complete again: %v, %v", out, err)
	}
	// An incomplete listing of the previous run does not count.
	s.mustPut("argo", named("d", allowWeb))
	s.stop()
	s.start()
	_, err = complete("argo", run)
	wantCode(t, err, codes.Aborted, "the service was restarted")
	s.wantOwners("another run", "a=argo c=argo d=argo f=flux hand=")
	synced("")
	_, err = complete("", run)
	wantCode(t, err, codes.InvalidArgument, "manager")
	// An empty listing is rejected unless the manager confirms it.
	st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = complete("argo", st.GetIncarnation())
	wantCode(t, err, codes.FailedPrecondition, "allow_empty")
	synced("")
	s.wantOwners("nothing named", "a=argo c=argo d=argo f=flux hand=")
	empty := &policyv1.CompleteSourceRequest{Manager: "argo", Incarnation: st.GetIncarnation(), AllowEmpty: true}
	if out, err = s.CompleteSource(s.ctx(), empty); err != nil || len(out.GetChanges()) != 3 {
		t.Errorf("an empty listing: %v, %v", out, err)
	}
	s.wantOwners("an empty listing", "f=flux hand=")
}
