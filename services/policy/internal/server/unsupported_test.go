// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// verdict returns the verdict for TCP from one identity to another.
func (s *service) verdict(from, to, port uint32) policyv1.Action {
	s.t.Helper()
	out, err := s.Explain(s.ctx(), &policyv1.ExplainRequest{From: &policyv1.Peer{Identity: from}, To: &policyv1.Peer{Identity: to}, Protocol: 6, Port: port})
	if err != nil {
		s.t.Fatal(err)
	}
	return out.GetVerdict()
}

func (s *service) wantVerdict(from, to, port uint32, want policyv1.Action) {
	s.t.Helper()
	if got := s.verdict(from, to, port); got != want {
		s.t.Errorf("%d → %d port %d: %s, want %s", from, to, port, got, want)
	}
}

const (
	allowed = policyv1.Action_ACTION_ALLOW
	denied  = policyv1.Action_ACTION_DENY
)

func TestUnsupportedConditionsAllowNothingAndDenyAll(t *testing.T) {
	s := serve(t)
	s.know(town)
	cilium := func(subject, rules string) string {
		return "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: shop}\nspec:\n  endpointSelector: {matchLabels: {app: " + subject + "}}\n" + rules
	}
	noted := func(manifest, want string) {
		t.Helper()
		for _, c := range s.apply(manifest).GetChanges() {
			if len(c.GetNotes()) != 2 || c.GetNotes()[1].GetKind() != policyv1.PolicyNoteKind_POLICY_NOTE_KIND_SELECTS_NOTHING || !strings.Contains(c.GetNotes()[0].GetText(), want) || c.GetNotes()[0].GetKind() != policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED {
				t.Errorf("noted %v, want %q", c.GetNotes(), want)
			}
		}
		if n := s.list()["p"].GetNotes(); len(n) != 2 || !strings.HasPrefix(n[0].GetText(), "not supported by Sluice: ") || n[0].GetField() == "" {
			t.Errorf("listed with %v", n)
		}
		st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
		if err != nil || st.GetPoliciesWithUnsupportedFields() != 1 {
			t.Errorf("status: %v, %v", st, err)
		}
	}
	for _, mode := range []string{"required", "test-always-fail"} {
		noted(cilium("db", "  ingress:\n  - {fromEndpoints: [{matchLabels: {app: web}}], authentication: {mode: "+mode+"}}\n"), "mutual authentication; the rule allows nothing")
		s.wantVerdict(300, 301, 80, denied)
	}
	s.apply(cilium("db", "  ingress:\n  - {fromEndpoints: [{matchLabels: {app: web}}], authentication: {mode: disabled}}\n"))
	s.wantVerdict(300, 301, 80, allowed)
	noted(cilium("web", "  egress: [{toEntities: [all]}]\n  egressDeny: [{toServices: [{k8sService: {serviceName: db, namespace: shop}}]}]\n"), "the rule denies all peers")
	s.wantVerdict(300, 301, 80, denied)
	noted(cilium("web", "  egress: [{toEntities: [all]}]\n  egressDeny: [{toGroups: [{aws: {}}], toPorts: [{ports: [{port: \"80\", protocol: TCP}]}]}]\n"), "the rule denies all peers")
	s.wantVerdict(300, 301, 80, denied)
	s.wantVerdict(300, 301, 81, allowed) // the ports are supported
	noted(cilium("db", "  ingress: [{fromEntities: [all]}]\n  ingressDeny: [{fromGroups: [{aws: {}}]}]\n"), "the rule denies all peers")
	s.wantVerdict(300, 301, 80, denied)
	_, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(
		"apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: host}\nspec: {nodeSelector: {}, ingressDeny: [{fromEntities: [all]}]}\n")})
	wantCode(t, err, codes.InvalidArgument, "spec.nodeSelector: not supported by Sluice: rules for nodes")
	s.stop()
	s.start()
	if n := s.list()["p"].GetNotes(); len(n) != 2 {
		t.Errorf("after a restart listed with %v", n)
	}
}

// TestNamesWithoutDNSRuleAreNotedBesideOthers: the note about DNS names without a DNS rule depends on the DNS rules
// of all accepted policies, and changes with them.
func TestNamesWithoutDNSRuleAreNotedBesideOthers(t *testing.T) {
	s := serve(t)
	s.know(town)
	const head = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: NAME, namespace: shop}\n" +
		"spec:\n  endpointSelector: {matchLabels: {app: db}}\n  egress:\n"
	policy := func(name, egress string) string { return strings.Replace(head, "NAME", name, 1) + egress }
	names := policy("names", "  - {toFQDNs: [{matchName: a.b}]}\n")
	dns := policy("dns", "  - {toEntities: [all], toPorts: [{ports: [{port: '53', protocol: ANY}], "+
		"rules: {dns: [{matchPattern: '*'}]}}]}\n")
	plain := policy("dns", "  - {toEntities: [all]}\n")
	missing := func(notes []*policyv1.PolicyNote) (n int) {
		for _, x := range notes {
			if x.GetKind() == policyv1.PolicyNoteKind_POLICY_NOTE_KIND_NO_DNS_RULE {
				n++
			}
		}
		return n
	}
	try := func(what, manifests string, validate bool, want int) {
		t.Helper()
		out, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{
			Manifests: []byte(manifests), ValidateOnly: validate,
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := missing(out.GetChanges()[0].GetNotes()); got != want {
			t.Errorf("%s: %d notes about a missing DNS rule, want %d", what, got, want)
		}
	}
	listed := func(what string, want int) {
		t.Helper()
		if got := missing(s.list()["names"].GetNotes()); got != want {
			t.Errorf("%s: listed with %d notes about a missing DNS rule, want %d", what, got, want)
		}
	}
	try("alone", names, true, 1)
	try("with the rule", names+"---\n"+dns, true, 0)
	try("alone", names, false, 1)
	listed("alone", 1)
	s.apply(dns)
	listed("with the accepted rule", 0)
	try("with the accepted rule", names, true, 0)
	try("with a request that removes the rule", names+"---\n"+plain, true, 1)
	s.apply(plain)
	listed("without the rule again", 1)
}

// TestFieldWithoutEffectIsNotConverted: a text for flow logs changes no rule, so the policy gets no warning.
func TestFieldWithoutEffectIsNotConverted(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.watch(subscribe("datapath", 301)).snapshot()
	s.apply("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: p, namespace: shop}\nspec:\n" +
		"  endpointSelector: {matchLabels: {app: db}}\n  log: {value: x}\n  ingress: [{fromEntities: [all]}]\n")
	n := s.list()["p"].GetNotes()
	const noEffect = policyv1.PolicyNoteKind_POLICY_NOTE_KIND_NO_EFFECT
	if len(n) != 1 || n[0].GetKind() != noEffect || n[0].GetField() != "spec.log" {
		t.Errorf("listed with %v", n)
	}
	st, err := s.GetStatus(s.ctx(), &policyv1.GetStatusRequest{})
	if err != nil || st.GetPoliciesWithUnsupportedFields() != 0 {
		t.Errorf("status: %v, %v", st, err)
	}
	s.wantVerdict(300, 301, 80, allowed)
}

func TestPolicyThatSelectsNothingIsAcceptedWithANote(t *testing.T) {
	s := serve(t)
	s.know(town)
	s.watch(subscribe("datapath", 300, 301)).snapshot()
	const impossible = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: never, namespace: shop}\nspec:\n" +
		"  endpointSelector: {matchExpressions: [{key: 'k8s:io.kubernetes.pod.namespace', operator: In, values: [other]}]}\n  ingress: [{}]\n"
	const group = "apiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g}\nspec: {externalCIDRs: []}\n"
	manifests := allowWeb + "---\n" + strings.Replace(named("elsewhere", allowWeb), "app: db", "app: gone", 1) + "---\n" + impossible + "---\n" + group
	texts := func(notes []*policyv1.PolicyNote) string {
		var out []string
		for _, n := range notes {
			if n.GetKind() != policyv1.PolicyNoteKind_POLICY_NOTE_KIND_SELECTS_NOTHING {
				t.Errorf("note %v", n)
			}
			out = append(out, n.GetText())
		}
		return strings.Join(out, "; ")
	}
	const here = "selects no endpoint of this node"
	want := map[string]string{
		"db": "", "elsewhere": here, "g": "",
		"never": `selects nothing: no labels match k8s:io.kubernetes.pod.namespace In "other" and k8s:io.kubernetes.pod.namespace In "shop"; ` + here,
	}
	for _, validate := range []bool{true, false} {
		out, err := s.UpsertPolicies(s.ctx(), &policyv1.UpsertPoliciesRequest{Manifests: []byte(manifests), ValidateOnly: validate})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range out.GetChanges() {
			if got := texts(c.GetNotes()); got != want[c.GetKey().GetName()] {
				t.Errorf("%s: noted %q, want %q", c.GetKey().GetName(), got, want[c.GetKey().GetName()])
			}
		}
	}
	for name, p := range s.list() {
		if got := texts(p.GetNotes()); !p.GetAccepted() || got != want[name] {
			t.Errorf("%s: listed with %q, want %q", name, got, want[name])
		}
	}
}
