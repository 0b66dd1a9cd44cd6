// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
)

func TestSharesOfEveryProcessAreListed(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "shares")
	nodetest.WantLines(t, out, "LIMIT SIZE TENANT ASKS FOR HAS GUARANTEED MAY USE",
		"policy/policies 100 all 140 90 - -", "policy/policies 100 system 10 10 0 10",
		"policy/policies 100 acme 20 20 10 20", "policy/policies 100 namespace shop 110 60 0 -",
		"loadbalancer/frontends 100 all 140 90 - -", "identity/numbers 100 all 140 90 - -",
		"datapath/tables 100 all 140 90 - -", "LIMIT SIZE ENDPOINT HAS GUARANTEED MAY USE REFUSED",
		"datapath/translations-ipv4 14336 pod shop/web 7168 3584 7168 12",
		"datapath/translations-ipv4 14336 container fedcba9876543210/eth0 32 3584 3584 0",
		"datapath/translations-ipv4 14336 outside 40 - 16384 0")

	out, _ = n.Want(t, 0, "shares", "acme", "-o", "json")
	var all []*Limit
	if err := nodetest.UnmarshalItems(out, &all); err != nil || len(all) != 5 || len(all[0].GetTenants()) != 1 ||
		!proto.Equal(all[0].GetTenants()[0], &sharesv1.TenantShare{
			Kind: sharesv1.TenantKind_TENANT_KIND_LABELLED, Name: "acme", Asked: 20, Admitted: 20, Guarantee: 10, Allotment: 20,
		}) {
		t.Errorf("shares of acme: %v, %s", err, out)
	}
	out, _ = n.Want(t, 0, "shares", "--exceeded")
	if strings.Contains(out, "acme") || !strings.Contains(out, "shop") {
		t.Errorf("--exceeded lists\n%s", out)
	}
}

// TestSharesAreListedWithoutOneProcess stops a process: the shares of the others are listed, and the exit code is not
// 0.
func TestSharesAreListedWithoutOneProcess(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Stop("policy")
	out, errOut := n.Want(t, invocation.ExitFailed, "shares")
	if !strings.Contains(out, "frontends") || !strings.Contains(errOut, "policy") {
		t.Errorf("without sluice-policy:\n%s%s", out, errOut)
	}
}
