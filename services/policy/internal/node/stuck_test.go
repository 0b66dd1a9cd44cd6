// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/policy/internal/identity"
	"github.com/sluice-net/sluice/services/policy/internal/label"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// portBlocks is a policy of namespace shop with as many address classes as it
// has blocks: each has a port of its own.
func portBlocks(name, app string, first, n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s, namespace: shop}\nspec:\n"+
		"  podSelector: {matchLabels: {app: %s}}\n  ingress:\n", name, app)
	for i := first; i < first+n; i++ {
		fmt.Fprintf(&b, "  - {from: [{ipBlock: {cidr: 10.%d.%d.0/24}}], ports: [{port: %d}]}\n", i>>8, i&255, 1000+i)
	}
	return b.String()
}

func shopPod(t *testing.T, number identity.Numeric, app string) identity.Identity {
	t.Helper()
	id, err := identity.New(number, label.NewSet(label.Kubernetes("app", app), label.Kubernetes(label.KeyNamespace, "shop")))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// The problem of a subject whose new tables have no room is shown until they
// have.
func TestTheProblemOfARelabelledSubjectStaysUntilItIsResolved(t *testing.T) {
	n, _ := run(t, t.TempDir())
	set := func(ids ...identity.Identity) {
		t.Helper()
		if err := n.SetIdentities(t.Context(), ids, nil); err != nil {
			t.Fatal(err)
		}
	}
	shown := func(when string, want bool) {
		t.Helper()
		st, err := n.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.ContainsFunc(st.Problems, func(p string) bool {
			return strings.Contains(p, "identity 300") && strings.Contains(p, "1025 address classes, the limit is 1024")
		}); got != want {
			t.Errorf("%s: the problem is shown: %t, want %t; all: %q", when, got, want, st.Problems)
		}
	}
	for _, m := range []string{portBlocks("small", "small", 0, 3), portBlocks("one", "large", 0, 600), portBlocks("two", "large", 600, 600)} {
		if _, err := n.Upsert(t.Context(), []byte(m), "", false); err != nil {
			t.Fatal(err)
		}
	}
	set(shopPod(t, 300, "small"))
	session, err := n.Subscribe(t.Context(), Subscription{Name: "datapath", Interest: Interest{Subjects: []identity.Numeric{300}}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Unsubscribe("datapath", session)
	shown("before", false)
	set(shopPod(t, 300, "large"))
	shown("relabelled", true)
	set(shopPod(t, 301, "other"))
	shown("another identity came", true)
	if err := n.SetIdentities(t.Context(), nil, []identity.Numeric{301}); err != nil {
		t.Fatal(err)
	}
	shown("it went", true)
	if _, err := n.Delete(t.Context(), []policy.Key{{Kind: "NetworkPolicy", Namespace: "shop", Name: "two"}}, false); err != nil {
		t.Fatal(err)
	}
	shown("a policy was deleted", false)
	table, err := n.Table(t.Context(), 300)
	if err != nil || len(table.Sources[rule.Ingress]) < 600 {
		t.Errorf("the subject has a table of %d rules, %v; want that of its labels", len(table.Sources[rule.Ingress]), err)
	}
}
