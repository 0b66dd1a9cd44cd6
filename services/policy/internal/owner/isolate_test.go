// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// pods adds pods of a namespace to the owner: 300 is app=web, 301 app=db.
func pods(t *testing.T, o *Owner, namespace string) {
	t.Helper()
	var ids []peer.Identity
	for i, app := range []string{"web", "db"} {
		id, err := peer.New(identity.Numeric(300+i), label.NewSet(label.Kubernetes("app", app), label.Kubernetes(label.KeyNamespace, namespace)))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := o.Identities().SetIdentities(t.Context(), ids, nil); err != nil {
		t.Fatal(err)
	}
}

// passes reports whether TCP from one pod to the other passes.
func passes(t *testing.T, o *Owner, from, to identity.Numeric) bool {
	t.Helper()
	x, err := o.Reader().Explain(t.Context(), query.Peer{Identity: from}, query.Peer{Identity: to}, port.At(port.TCP, 80))
	if err != nil {
		t.Fatal(err)
	}
	return x.Action == policytable.Allow
}

// only returns the only policy.
func only(t *testing.T, o *Owner) Listed {
	t.Helper()
	list, _, err := o.Reader().List(t.Context(), Filter{})
	if err != nil || len(list) != 1 {
		t.Fatalf("there are %d policies: %v", len(list), err)
	}
	return list[0]
}

func TestKubernetesObjectThatCannotBeConvertedIsolatesWhatItSelects(t *testing.T) {
	dir := t.TempDir()
	start := func() (*Owner, deltas, func()) {
		d, stop := objects(t, dir)
		return d.owner, d, stop
	}
	o, feed, stop := start()
	pods(t, o, "shop")
	set := func(cidr string) uint64 {
		t.Helper()
		spec := fmt.Sprintf(`"spec":{"podSelector":{"matchLabels":{"app":"db"}},`+
			`"ingress":[{"from":[{"podSelector":{}},{"ipBlock":{"cidr":%q}}]}]}`, cidr)
		db := object("networking.k8s.io/v1", network("db"), spec)
		feed.apply(map[policy.Key]policy.Written{network("db"): db})
		return only(t, o).Revision
	}
	check := func(what string, accepted bool) {
		t.Helper()
		p := only(t, o)
		if p.Accepted != accepted || passes(t, o, 300, 301) != accepted || !passes(t, o, 301, 300) {
			t.Errorf("%s: accepted %t, %q, web to db %t, db to web %t", what, p.Accepted, p.Error, passes(t, o, 300, 301), passes(t, o, 301, 300))
		}
		st, err := o.Reader().Status(t.Context())
		said := slices.ContainsFunc(st.Problems, func(p summary.Problem) bool {
			return p.Kind == summary.ProblemPolicy && strings.HasPrefix(p.Text, "NetworkPolicy shop/db cannot be converted, and what it selects is isolated: ")
		})
		if err != nil || said == accepted {
			t.Errorf("%s: problems %v, %v", what, st.Problems, err)
		}
	}
	set("10.0.0.1/24")
	check("a prefix that is not canonical", true)
	if p := only(t, o); len(p.Notes) != 2 || !strings.Contains(p.Notes[0].Text, "it means 10.0.0.0/24") {
		t.Errorf("noted: %v", p.Notes)
	}
	first := set("10.0.0.0/33")
	check("an invalid prefix", false)
	if again := set("10.0.0.0/33"); again != first {
		t.Errorf("applying it unchanged gives revision %d, before %d", again, first)
	}
	stop()
	o, feed, stop = start()
	check("after a restart", false)
	if again := set("10.0.0.0/33"); again != first {
		t.Errorf("after a restart it has revision %d, before %d", again, first)
	}
	set("10.0.0.0/24")
	check("repaired", true)
	set("10.0.0.0/33")
	// An unreadable text isolates the namespace, even after a restart.
	feed.apply(map[policy.Key]policy.Written{
		network("db"): {Key: network("db"), APIVersion: "networking.k8s.io/v1", Text: []byte("\x01")},
	})
	for range 2 {
		if p := only(t, o); p.Accepted || !p.inForce() || passes(t, o, 300, 301) || passes(t, o, 301, 300) {
			t.Errorf("no text: accepted %t, %q, web to db %t", p.Accepted, p.Error, passes(t, o, 300, 301))
		}
		stop()
		o, feed, stop = start()
	}
	feed.complete()
	if !passes(t, o, 300, 301) {
		t.Error("deleted, but still isolated")
	}
	stop()
}

// TestStoredPolicyThatIsNotUnderstoodIsolatesWhatItSelects: because the configuration or the version has changed, a
// stored policy can no longer be decoded. It isolates the pods that it selects, so that nothing more is allowed than
// before.
func TestStoredPolicyThatIsNotUnderstoodIsolatesWhatItSelects(t *testing.T) {
	dir := t.TempDir()
	labels := func(c *Config) { c.Rules.NodeLabels = true }
	o, stop := run(t, dir, labels)
	pods(t, o, "shop")
	const manifest = "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: db, namespace: shop}\nspec:\n" +
		"  endpointSelector: {matchLabels: {app: db}}\n  ingress: [{fromNodes: [{}]}]\n"
	if _, err := o.Upsert(t.Context(), []byte(manifest), "", false); err != nil {
		t.Fatal(err)
	}
	stop()
	o, stop = run(t, dir)
	p := only(t, o)
	if p.Accepted || !strings.Contains(p.Error, "fromNodes") || len(p.Notes) != 2 || passes(t, o, 300, 301) {
		t.Errorf("accepted %t, %q, %v, web to db %t", p.Accepted, p.Error, p.Notes, passes(t, o, 300, 301))
	}
	_, err := o.Delete(t.Context(), []policy.Key{p.Key}, false)
	if err != nil || !passes(t, o, 300, 301) {
		t.Errorf("deleted: %v, web to db %t", err, passes(t, o, 300, 301))
	}
	stop()
}
