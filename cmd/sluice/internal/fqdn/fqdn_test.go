// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fqdn

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func names() []*policyv1.LearnedName {
	now, shop := time.Now(), "shop"
	return []*policyv1.LearnedName{
		{
			Name: "api.example.com.", Namespace: &shop,
			Addresses: []*policyv1.LearnedAddress{
				{
					Address: "192.0.2.7", ExpireTime: timestamppb.New(now.Add(3*time.Hour + time.Second)),
					ForgetTime: timestamppb.New(now.Add(4*time.Hour + time.Second)),
				},
				{
					Address: "2001:db8::7", ExpireTime: timestamppb.New(now.Add(-time.Minute)),
					ForgetTime: timestamppb.New(now.Add(-time.Second)),
				},
			},
			UsedBy: []*policyv1.RuleSource{
				{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "web", Path: "spec.egress[0]"},
				{Kind: "AdminNetworkPolicy", Name: "all", Path: "spec.egress[1]"},
			},
			OmittedUseCount: 3,
		},
		{Name: "x\x1b[31m.", Addresses: []*policyv1.LearnedAddress{{Address: "192.0.2.8"}}},
	}
}

func TestLearnedNamesAreShown(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Policy.Names = names()
	out, _ := n.Want(t, 0, "fqdn", "list")
	nodetest.WantLines(t, out, "NAME FOR PODS OF ADDRESS VALID FOR FORGOTTEN IN USED BY",
		"- - 2001:db8::7 over now -", `x\x1b[31m. all namespaces 192.0.2.8 - - -`)
	const uses = "CiliumNetworkPolicy shop/web spec.egress[0], AdminNetworkPolicy all spec.egress[1], 3 more"
	if !strings.Contains(out, uses) || strings.Contains(out, "\x1b") {
		t.Errorf("printed\n%s", out)
	}
	out, _ = n.Want(t, 0, "fqdn", "list", "*.example.com", "--address", "192.0.2.7", "-o", "json")
	var decoded []struct {
		Addresses       []struct{ Address string }
		UsedBy          []struct{ Path string }
		OmittedUseCount int
	}
	if err := nodetest.UnmarshalItems(out, &decoded); err != nil || len(decoded) != 2 || len(decoded[0].UsedBy) != 2 ||
		decoded[0].OmittedUseCount != 3 || decoded[0].Addresses[0].Address != "192.0.2.7" {
		t.Errorf("%v, %s", err, out)
	}
	if r := n.Policy.Listed; r.GetPattern() != "*.example.com" || r.GetAddress() != "192.0.2.7" {
		t.Errorf("asked for %v", r)
	}
	n.Policy.Names = nil
	if out, _ := n.Want(t, 0, "fqdn", "list", "-o", "json"); strings.Join(strings.Fields(out), "") != `{"items":[]}` {
		t.Errorf("of none: %s", out)
	}
}

func TestLearnedNamesAreForgotten(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Policy.Names = names()
	out, _ := n.Want(t, 0, "fqdn", "delete", "*", "--dry-run")
	nodetest.WantLines(t, out, "Nothing was deleted: --dry-run. Would delete 2 names with 3 addresses.")
	if !n.Policy.Forgot.GetValidateOnly() {
		t.Error("--dry-run was not asked for")
	}
	out, _ = n.Want(t, 0, "fqdn", "delete", "--address", "192.0.2.7")
	nodetest.WantLines(t, out, "Deleted 2 names with 3 addresses, also from the kernel.")
	if r := n.Policy.Forgot; r.GetPattern() != "" || r.GetAddress() != "192.0.2.7" || r.GetValidateOnly() {
		t.Errorf("asked for %v", r)
	}
	n.Policy.Forgot = nil
	for _, bad := range [][]string{{}, {""}, {"a", "b"}, {"", "--address", "192.0.2.7"}, {"--dry-run"}} {
		n.Want(t, invocation.ExitUsage, append([]string{"fqdn", "delete"}, bad...)...)
	}
	if n.Policy.Forgot != nil {
		t.Errorf("a mistake asked for %v", n.Policy.Forgot)
	}
	n.Policy.ForgetOf = status.Error(codes.PermissionDenied, "uid 65534 may not call ForgetNames")
	_, errOut := n.Want(t, invocation.ExitFailed, "fqdn", "delete", "*")
	if !strings.Contains(errOut, "Only root may do this") {
		t.Errorf("of another user: %s", errOut)
	}
}

func TestNamesAndPatternsAreChecked(t *testing.T) {
	for text, want := range map[string]bool{
		"": true, "*": true, "api.example.com": true, "API.example.com.": true, "*.example.com": true, "**.example.com": true,
		"bad..name": false, "a b": false, ".": false, "x.": true, "a/b": false,
	} {
		if (checkPattern(text) == nil) != want {
			t.Errorf("%q: want %v", text, want)
		}
	}
}

func TestNamesAreLearnedByHand(t *testing.T) {
	n := nodetest.New(t, Command)
	for _, c := range []struct {
		args []string
		used bool
		want string
	}{
		{nil, true, "Added 2 addresses to api.example.com, also to the kernel."},
		{nil, false, "Added 2 addresses to api.example.com. No policy of this node selects the name."},
		{[]string{"--dry-run"}, true, "Nothing was added: --dry-run. Policies of this node select api.example.com."},
		{[]string{"--dry-run"}, false, "Nothing was added: --dry-run. No policy of this node selects api.example.com."},
	} {
		n.Policy.Used = c.used
		args := append([]string{"fqdn", "learn", "api.example.com", "192.0.2.7", "2001:DB8::7", "--ttl", "90m"}, c.args...)
		out, _ := n.Want(t, 0, args...)
		nodetest.WantLines(t, out, c.want)
		if r := n.Policy.Learned; r.GetName() != "api.example.com" || r.GetTtl().AsDuration() != 90*time.Minute ||
			strings.Join(r.GetAddresses(), " ") != "192.0.2.7 2001:db8::7" || r.GetValidateOnly() != (len(c.args) > 0) {
			t.Errorf("asked for %v", r)
		}
	}
	n.Policy.Learned = nil
	for _, bad := range [][]string{
		{},
		{"a"},
		{"", "192.0.2.7"},
		{"*.a", "192.0.2.7"},
		{"a", "b"},
		{"a", "fe80::1%eth0"},
		{"a", "192.0.2.7", "--ttl", "0s"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"fqdn", "learn"}, bad...)...)
	}
	if n.Policy.Learned != nil {
		t.Errorf("a mistake asked for %v", n.Policy.Learned)
	}
}

func TestNameIsExplained(t *testing.T) {
	n := nodetest.New(t, Command)
	const none = "sluice-policy has no addresses for api.example.com, so no policy allows a connection by this name."
	out, _ := n.Want(t, 0, "fqdn", "explain", "api.example.com")
	nodetest.WantLines(t, out, none, "sluice-dns has no valid answer for the name.")
	without := nodetest.New(t, Command)
	without.Stop("dns")
	out, _ = without.Want(t, 0, "fqdn", "explain", "api.example.com")
	nodetest.WantLines(t, out, none,
		"sluice-dns does not run on this node: only `sluice fqdn learn` and LearnNames add addresses.")
	n.Policy.Names = names()[:1]
	asker := &dnsv1.Asker{EndpointIndex: 7, Tenant: "namespace shop"}
	dns := n.DNS
	dns.Explanation = &dnsv1.ExplainNameResponse{
		Name: &dnsv1.TaughtName{
			Name: "api.example.com.", Chain: []string{"edge.example.", "cdn.example."},
			Addresses: []*dnsv1.TaughtAddress{{Address: "192.0.2.7", Asker: asker}},
		},
		AllowingSets: []uint32{3}, RefusingSetCount: 2,
	}
	for reason := range dnsv1.RefusalReason_name {
		if reason != 0 {
			dns.Explanation.Refused = append(dns.Explanation.Refused, &dnsv1.RefusedAddress{
				Address: "127.0.0.1", Reason: dnsv1.RefusalReason(reason), Asker: asker, Time: timestamppb.Now(),
			})
		}
	}
	out, _ = n.Want(t, 0, "fqdn", "explain", "API.example.com.")
	nodetest.WantLines(t, out, "NAME FOR PODS OF ADDRESS VALID FOR FORGOTTEN IN USED BY",
		"sluice-dns has 1 valid address from answers.",
		"The last answer led to edge.example. and cdn.example. by CNAME.",
		"No policy selects the name, so its addresses are not learned.", "Of 3 rule sets, 1 allow queries for the name.",
		"NOT LEARNED ENDPOINT TENANT LAST ANSWER REASON",
		"127.0.0.1 7 namespace shop 0s ago loopback, link-local, multicast or another special address")
	if strings.Contains(out, "REFUSAL_REASON") {
		t.Errorf("a reason has no text: %s", out)
	}
	out, _ = n.Want(t, 0, "fqdn", "explain", "api.example.com", "-o", "json")
	if !strings.Contains(out, `"reason": "special-address"`) || !strings.Contains(out, `"usedBy"`) {
		t.Errorf("printed %s", out)
	}
	for _, bad := range [][]string{{}, {""}, {"*"}, {"a", "b"}} {
		n.Want(t, invocation.ExitUsage, append([]string{"fqdn", "explain"}, bad...)...)
	}
}

func TestNameIsExplainedWhileTheProxyIsAway(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Policy.Names = names()[:1]
	n.Crash(t, "dns")
	out, _ := n.Want(t, 0, "fqdn", "explain", "api.example.com")
	nodetest.WantLines(t, out, "- - 2001:db8::7 over now -")
	if !strings.Contains(out, "sluice-dns does not answer, so what it knows is not shown: ") {
		t.Errorf("printed %s", out)
	}
	out, _ = n.Want(t, 0, "fqdn", "explain", "api.example.com", "-o", "json")
	if !strings.Contains(out, `"dnsError": "`) || strings.Contains(out, `"dns":`) || !strings.Contains(out, `"usedBy"`) {
		t.Errorf("printed %s", out)
	}
	n.Stop("policy") // without it the command has nothing to show
	n.Want(t, invocation.ExitFailed, "fqdn", "explain", "api.example.com")
}

func TestNamesAreDeletedFromTheProxyToo(t *testing.T) {
	n := nodetest.New(t, Command)
	dns := n.DNS
	n.Want(t, 0, "fqdn", "delete", "*", "--dry-run")
	if dns.Deleted != nil {
		t.Errorf("--dry-run deleted %v", dns.Deleted)
	}
	n.Want(t, 0, "fqdn", "delete", "a.example.com", "--address", "192.0.2.7")
	if r := dns.Deleted; r.GetPattern() != "a.example.com" || r.GetAddress() != "192.0.2.7" {
		t.Errorf("asked for %v", r)
	}
	dns.DeleteError = status.Error(codes.Unavailable, "stopping")
	_, errOut := n.Want(t, invocation.ExitFailed, "fqdn", "delete", "*")
	if !strings.Contains(errOut, "may still have the names") {
		t.Errorf("printed %s", errOut)
	}
}
