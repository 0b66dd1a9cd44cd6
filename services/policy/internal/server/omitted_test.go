// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/managed"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

func TestTableSaysHowManyRulesHaveNoSourceLocation(t *testing.T) {
	s := serve(t)
	s.know(town)
	var ports strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&ports, "{ports: [{port: %d}]},", 1000+i)
	}
	// Equal rules of several policies become one rule with many sources. The policies have long names.
	long := strings.Repeat(strings.Repeat("x", 62)+".", 3)
	for i := range 8 {
		s.apply(fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\n"+
			"metadata: {name: %sp%d, namespace: shop}\n"+
			"spec: {podSelector: {matchLabels: {app: db}}, ingress: [%s]}\n", long, i, ports.String()))
	}
	got, err := s.GetPolicyTable(s.ctx(), &policyv1.GetPolicyTableRequest{Subject: 301})
	if err != nil {
		t.Fatal(err)
	}
	rules, shown := len(got.GetIngress().GetRules()), len(got.GetIngressRules())
	omitted := int(got.GetOmittedIngressRuleCount())
	if rules < 2000 || shown == 0 || omitted == 0 || shown+omitted != rules {
		t.Errorf("%d of %d rules have their sources and %d are left out", shown, rules, omitted)
	}
	if n := proto.Size(got); n > 4<<20 {
		t.Errorf("the answer has %d bytes", n)
	}
	if got.GetOmittedEgressRuleCount() != 0 {
		t.Errorf("%d egress rules are left out, although there are no egress rules", got.GetOmittedEgressRuleCount())
	}
}

func TestManyNotesAreCounted(t *testing.T) {
	s := serve(t)
	s.know(town)
	noted := "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: many, namespace: shop}\n" +
		"spec: {endpointSelector: {}, egress: [" + strings.Repeat("{toGroups: [{}]},", 52) + "]}\n"
	for _, validate := range []bool{true, false} {
		req := &policyv1.UpsertPoliciesRequest{Manifests: []byte(noted), ValidateOnly: validate}
		out, err := s.UpsertPolicies(s.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		// The service adds one note: that the policy selects no endpoint.
		if c := out.GetChanges()[0]; len(c.GetNotes()) != 41 || c.GetOmittedNoteCount() != 12 {
			t.Errorf("validate_only %v: %d notes and %d left out, want 41 and 12",
				validate, len(c.GetNotes()), c.GetOmittedNoteCount())
		}
	}
	if p := s.list()["many"]; len(p.GetNotes()) != 41 || p.GetOmittedNoteCount() != 12 {
		t.Errorf("listed with %d notes and %d left out, want 41 and 12", len(p.GetNotes()), p.GetOmittedNoteCount())
	}
}

func TestManyProblemsAreCounted(t *testing.T) {
	s := serve(t)
	s.stop()
	s.sources = []string{managed.SourceFile}
	s.start()
	feed := s.owner.Feed(managed.SourceFile)
	const most = summary.MaxProblems
	for _, c := range []struct{ files, listed, omitted int }{{most, most, 0}, {3000, most + 1, 3000 - most}} {
		var files []directory.File
		for i := range c.files {
			name := fmt.Sprintf("%04d.yaml", i)
			files = append(files, directory.File{Origin: name, Err: errors.New("not a regular file")})
		}
		if err := feed.Set(t.Context(), files); err != nil {
			t.Fatal(err)
		}
		st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, src := range st.GetSources() {
			if strings.TrimPrefix(src.GetKind().String(), "SOURCE_KIND_") != strings.ToUpper(src.GetName()) {
				t.Errorf("the source %q is of the kind %s", src.GetName(), src.GetKind())
			}
		}
		listed, omitted := len(st.GetService().GetProblems()), int(st.GetService().GetOmittedProblemCount())
		if listed != c.listed || omitted != c.omitted {
			t.Errorf("%d refused files: %d problems and %d left out, want %d and %d",
				c.files, listed, omitted, c.listed, c.omitted)
		}
	}
}
