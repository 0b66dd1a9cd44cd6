// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// portPrefixes returns a policy of namespace shop with as many address classes as prefixes: each prefix has its own
// port.
func portPrefixes(name, app string, first, n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: %s, namespace: shop}\nspec:\n"+
		"  podSelector: {matchLabels: {app: %s}}\n  ingress:\n", name, app)
	for i := first; i < first+n; i++ {
		fmt.Fprintf(&b, "  - {from: [{ipBlock: {cidr: 10.%d.%d.0/24}}], ports: [{port: %d}]}\n", i>>8, i&255, 1000+i)
	}
	return b.String()
}

func shopPod(t *testing.T, number identity.Numeric, app string) peer.Identity {
	t.Helper()
	id, err := peer.New(number, label.NewSet(label.Kubernetes("app", app), label.Kubernetes(label.KeyNamespace, "shop")))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestTheProblemOfARelabelledSubjectStaysUntilItIsResolved: a subject gets other labels, and its new tables do not
// fit. The status shows this problem until they fit.
func TestTheProblemOfARelabelledSubjectStaysUntilItIsResolved(t *testing.T) {
	o, _ := run(t, t.TempDir())
	set := func(ids ...peer.Identity) {
		t.Helper()
		if err := o.Identities().SetIdentities(t.Context(), ids, nil); err != nil {
			t.Fatal(err)
		}
	}
	shown := func(when string, want bool) {
		t.Helper()
		st, err := o.Reader().Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.ContainsFunc(st.Problems, func(p summary.Problem) bool {
			return strings.Contains(p.Text, "identity 300") && strings.Contains(p.Text, "1025 address classes, the limit is 1024")
		}); got != want {
			t.Errorf("%s: the problem is shown: %t, want %t; all: %v", when, got, want, st.Problems)
		}
	}
	for _, m := range []string{portPrefixes("small", "small", 0, 3), portPrefixes("one", "large", 0, 600), portPrefixes("two", "large", 600, 600)} {
		if _, err := o.Upsert(t.Context(), []byte(m), "", false); err != nil {
			t.Fatal(err)
		}
	}
	set(shopPod(t, 300, "small"))
	session, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Interest: Interest{Subjects: []identity.Numeric{300}}})
	if err != nil {
		t.Fatal(err)
	}
	defer o.Subscribers().Unsubscribe("datapath", session)
	shown("before", false)
	set(shopPod(t, 300, "large"))
	shown("relabelled", true)
	set(shopPod(t, 301, "other"))
	shown("another identity came", true)
	if err := o.Identities().SetIdentities(t.Context(), nil, []identity.Numeric{301}); err != nil {
		t.Fatal(err)
	}
	shown("it went", true)
	if _, err := o.Delete(t.Context(), []policy.Key{{Kind: "NetworkPolicy", Namespace: "shop", Name: "two"}}, false); err != nil {
		t.Fatal(err)
	}
	shown("a policy was deleted", false)
	table, err := o.Reader().Table(t.Context(), 300)
	if err != nil || len(table.Sources[policytable.Ingress]) < 600 {
		t.Errorf("the subject has a table of %d rules, %v; want the table for its labels",
			len(table.Sources[policytable.Ingress]), err)
	}
}

// TestAPolicyTooLargeForAnyTableIsRefusedWithoutASubject: a policy that is too large for any table is refused even if
// it selects no pod yet, because such a pod could not start later. This applies to calls, files and validate_only.
func TestAPolicyTooLargeForAnyTableIsRefusedWithoutASubject(t *testing.T) {
	o, _ := run(t, t.TempDir())
	large := portPrefixes("large", "large", 0, 1100)
	for _, validateOnly := range []bool{true, false} {
		_, err := o.Upsert(t.Context(), []byte(large), "", validateOnly)
		var bad *decode.Error
		if !errors.As(err, &bad) || len(bad.Violations) != 1 || bad.Violations[0].Path != "spec" ||
			!strings.Contains(err.Error(), "1025 address classes, the limit is 1024") {
			t.Errorf("validate only %t: %v", validateOnly, err)
		}
	}
	listing := []directory.File{{Origin: "large.yaml", Data: []byte(large)}, {Origin: "good.yaml", Data: []byte(portPrefixes("good", "good", 0, 1))}}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), listing); err != nil {
		t.Fatal(err)
	}
	list, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || len(list) != 2 {
		t.Fatalf("%d are listed, %v; want the good one and the file that is refused", len(list), err)
	}
	for _, l := range list {
		if refused := l.Origin == "large.yaml"; l.Accepted == refused || refused && !strings.Contains(l.Error, "the limit is 1024") {
			t.Errorf("%s: accepted %t, %s", l.Origin, l.Accepted, l.Error)
		}
	}
}

// TestATrialCompilesForIdentitiesWithoutEndpointsHere: validate_only also considers pods on other nodes, and does not
// report problems that existed before the change.
func TestATrialCompilesForIdentitiesWithoutEndpointsHere(t *testing.T) {
	o, _ := run(t, t.TempDir())
	if err := o.Identities().SetIdentities(t.Context(), []peer.Identity{shopPod(t, 300, "large"), shopPod(t, 301, "other")}, nil); err != nil {
		t.Fatal(err)
	}
	try := func(manifests string) error {
		t.Helper()
		_, err := o.Upsert(t.Context(), []byte(manifests), "", true)
		return err
	}
	if _, err := o.Upsert(t.Context(), []byte(portPrefixes("one", "large", 0, 600)), "", false); err != nil {
		t.Fatal(err)
	}
	two := portPrefixes("two", "large", 600, 600)
	if err := try(two); !errors.Is(err, failure.ErrLimit) || !strings.Contains(err.Error(), "identity 300") || !strings.Contains(err.Error(), "1025 address classes") {
		t.Errorf("a second policy of a pod elsewhere: %v", err)
	}
	if err := try(portPrefixes("two", "other", 600, 600)); err != nil {
		t.Errorf("the same for another pod: %v", err)
	}
	if _, err := o.Upsert(t.Context(), []byte(two), "", false); err != nil {
		t.Fatal(err)
	}
	if err := try(portPrefixes("three", "large", 0, 1)); err != nil {
		t.Errorf("a policy that does not fit even without the change: %v", err)
	}
}

// TestAStoredPolicyTooLargeForAnyTableStays: an earlier version stored a policy that is too large for any table. The
// policy stays enforced, and the pods that it selects cannot start.
func TestAStoredPolicyTooLargeForAnyTableStays(t *testing.T) {
	o, _ := run(t, t.TempDir())
	p := o.forms.decode(record.Policy{
		Key: record.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: "large"}, Source: managed.SourceGRPC,
		Manifest: []byte(strings.TrimPrefix(portPrefixes("large", "large", 0, 1100), "---\n")),
	})
	if p.Broken != "" {
		t.Errorf("it is not enforced: %s", p.Broken)
	}
}
