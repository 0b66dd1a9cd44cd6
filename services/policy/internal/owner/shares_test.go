// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// padding returns policies of another namespace that select no pods.
func padding(n, bytes int) map[policy.Key]policy.Written {
	all := make(map[policy.Key]policy.Written, n)
	for i := range n {
		k := policy.Key{Kind: "NetworkPolicy", Namespace: "evil", Name: fmt.Sprintf("p%05d", i)}
		spec := fmt.Sprintf(`"spec":{"podSelector":{"matchLabels":{"app":"%s"}}}`, strings.Repeat("x", bytes))
		all[k] = object("networking.k8s.io/v1", k, spec)
	}
	return all
}

// TestOneNamespaceCannotKeepThePoliciesOfOthersOut (INV-65): a user who may create policies in one namespace fills
// limits.policies with policies of a few bytes each. An isolating policy of another namespace must still isolate.
func TestOneNamespaceCannotKeepThePoliciesOfOthersOut(t *testing.T) {
	limit := func(c *Config) { c.MaxPolicies = 20 }
	t.Run("a new policy", func(t *testing.T) {
		d, _ := objects(t, t.TempDir(), limit)
		pods(t, d.owner, "shop")
		d.apply(padding(20, 10))
		d.apply(map[policy.Key]policy.Written{network("db"): isolating("db")})
		if passes(t, d.owner, 300, 301) {
			t.Error("shop/db isolates app=db, but app=web reaches it: the policies of namespace evil use all capacity")
		}
	})
	t.Run("a policy that older nodes enforce, on a new node", func(t *testing.T) {
		d, _ := objects(t, t.TempDir(), limit)
		pods(t, d.owner, "shop")
		all := padding(20, 10)
		all[network("db")] = isolating("db") // created a year before the policies of evil
		d.apply(all)
		keys := make([]policy.Key, 0, len(all))
		for k := range all {
			keys = append(keys, k)
		}
		d.complete(keys...)
		if passes(t, d.owner, 300, 301) {
			t.Error("a node that lists all policies omits the oldest one, and its pods are open")
		}
	})
	t.Run("by bytes", func(t *testing.T) {
		d, _ := objects(t, t.TempDir(), func(c *Config) { c.MaxManifestBytes = 100_000 })
		pods(t, d.owner, "shop")
		d.apply(padding(900, 1))
		long := object("networking.k8s.io/v1", network("db"), `"spec":{"podSelector":{"matchLabels":{"app":"db"}},`+
			`"policyTypes":["Ingress"],`+
			`"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"`+strings.Repeat("x", 63)+`"}}}]}]}`)
		d.apply(map[policy.Key]policy.Written{network("db"): long})
		if passes(t, d.owner, 300, 301) {
			t.Error("shop/db isolates app=db, but app=web reaches it: the manifests of namespace evil use all bytes")
		}
	})
	t.Run("a policy that becomes stricter", func(t *testing.T) {
		d, _ := objects(t, t.TempDir(), func(c *Config) { c.MaxManifestBytes = 100_000 })
		pods(t, d.owner, "shop")
		open := object("networking.k8s.io/v1", network("db"), `"spec":{"podSelector":{},"ingress":[{}]}`)
		d.apply(map[policy.Key]policy.Written{network("db"): open})
		d.apply(padding(900, 1))
		closed := object("networking.k8s.io/v1", network("db"), `"spec":{"podSelector":{},"policyTypes":["Ingress"],`+
			`"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"`+strings.Repeat("x", 63)+`"}}},`+
			`{"podSelector":{"matchLabels":{"app":"`+strings.Repeat("y", 63)+`"}}}]}]}`)
		d.apply(map[policy.Key]policy.Written{network("db"): closed})
		if passes(t, d.owner, 300, 301) {
			t.Error("shop/db is closed in the API but stays open here")
		}
	})
}

// TestObjectBeyondTheShareIsolates: there is capacity for one policy, and an API server has two. The second isolates
// the pods that it selects.
func TestObjectBeyondTheShareIsolates(t *testing.T) {
	d, stop := objects(t, t.TempDir(), func(c *Config) { c.MaxPolicies = 1 })
	defer stop()
	pods(t, d.owner, "shop")
	d.apply(map[policy.Key]policy.Written{network("web"): isolating("web"), network("db"): isolating("db")})
	d.complete(network("web"), network("db"))
	if passes(t, d.owner, 301, 300) || passes(t, d.owner, 300, 301) {
		t.Errorf("a pod that a NetworkPolicy of the API server isolates is open")
	}
}

// TestOneNamespaceDoesNotTakeTheShareOfAnother: in the first listing, one namespace has more policies than the limit.
// The isolating policies of another namespace must still be enforced.
func TestOneNamespaceDoesNotTakeTheShareOfAnother(t *testing.T) {
	d, _ := objects(t, t.TempDir(), func(c *Config) { c.MaxPolicies = 5 })
	pods(t, d.owner, "shop")
	all := make(map[policy.Key]policy.Written)
	for i := range 8 {
		k := policy.Key{Kind: "NetworkPolicy", Namespace: "acme", Name: fmt.Sprint("flood", i)}
		all[k] = object("networking.k8s.io/v1", k, `"spec":{"podSelector":{"matchLabels":{"x":"y"}}}`)
	}
	all[network("web")] = isolating("web")
	d.apply(all)
	if passes(t, d.owner, 301, 300) {
		t.Error("shop/web isolates nothing")
	}
}

// TestOldestObjectsOfATenantAreEnforcedInEveryOrder applies the objects of a tenant in several orders. The oldest
// objects are always enforced as written.
func TestOldestObjectsOfATenantAreEnforcedInEveryOrder(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	all := make(map[policy.Key]policy.Written)
	var keys []policy.Key
	for i := range 12 {
		k := network(fmt.Sprintf("p%02d", i))
		w := isolating(k.Name)
		w.Created, w.UID = now.Add(-time.Duration(i)*time.Hour), fmt.Sprint("uid", i)
		all[k], keys = w, append(keys, k)
	}
	c := &clock{now: now}
	for _, order := range []string{"one by one", "backwards", "all at once", "all at once and again after a restart"} {
		t.Run(order, func(t *testing.T) {
			dir := t.TempDir()
			limit := func(cfg *Config) { cfg.MaxPolicies, cfg.Now = 10, c.Now }
			d, stop := objects(t, dir, limit)
			files := func() {
				if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
					t.Fatal(err)
				}
			}
			files()
			sorted := slices.Clone(keys)
			if order == "backwards" {
				slices.Reverse(sorted)
			}
			if strings.HasPrefix(order, "all") {
				d.apply(all)
			} else {
				for _, k := range sorted {
					d.apply(map[policy.Key]policy.Written{k: all[k]})
				}
			}
			d.complete(keys...)
			settle(t, d.owner, c)
			if strings.HasSuffix(order, "restart") {
				stop()
				d, _ = objects(t, dir, limit)
				files()
				d.apply(all)
				d.complete(keys...)
				settle(t, d.owner, c)
			}
			list, _, err := d.owner.Reader().List(t.Context(), Filter{})
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range list {
				if want := l.Key.Name >= "p03"; l.Accepted != want {
					t.Errorf("%s: enforced as written: %t, want %t", l.Key, l.Accepted, want)
				}
			}
		})
	}
}

// TestLargeObjectBeyondTheShareIsReduced: a policy of an API server that exceeds the share is stored only with its
// selectors. The source sends it again once there is capacity.
func TestLargeObjectBeyondTheShareIsReduced(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	limit := func(cfg *Config) { cfg.MaxManifestBytes, cfg.Now = 100_000, c.Now }
	start := func() (deltas, func()) {
		d, stop := objects(t, dir, limit)
		pods(t, d.owner, "shop")
		if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		return d, stop
	}
	d, stop := start()
	filler, k := policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: "filler"}, network("db")
	long := func(k policy.Key, n int, more string) policy.Written {
		return object("networking.k8s.io/v1", k, `"spec":{"podSelector":{"matchLabels":{"app":"`+k.Name+`"}},`+
			`"policyTypes":["Ingress"],"ingress":[{"from":[{"ipBlock":{"cidr":"10.0.0.0/8"}}`+
			strings.Repeat(`,{"ipBlock":{"cidr":"192.0.2.0/24"}}`, n)+`]}`+more+`]}`)
	}
	web := `,{"from":[{"podSelector":{"matchLabels":{"app":"web"}}}]}`
	all := map[policy.Key]policy.Written{filler: long(filler, 2000, ""), k: long(k, 2000, web)}
	d.apply(map[policy.Key]policy.Written{filler: all[filler]})
	d.complete(filler)
	settle(t, d.owner, c)
	d.apply(map[policy.Key]policy.Written{k: all[k]})
	d.complete(filler, k)
	judge := func(d deltas) Judged {
		t.Helper()
		judged, err := d.Judged(t.Context(), []policy.Key{k})
		if err != nil {
			t.Fatal(err)
		}
		return judged[k]
	}
	list, _, err := d.owner.Reader().List(t.Context(), Filter{Name: "db"})
	if err != nil || len(list) != 1 || len(list[0].Manifest) > maxReduced {
		t.Fatalf("%d policies, want one of at most %d bytes: %v", len(list), maxReduced, err)
	}
	const why = "exceeds the share of namespace shop of limits.manifests (100000)"
	if j := judge(d); j.Exceeds != why || passes(t, d.owner, 300, 301) {
		t.Errorf("%+v; web reaches db: %t", j, passes(t, d.owner, 300, 301))
	}
	stop()
	d, _ = start()
	if j := judge(d); j.Exceeds == "" || passes(t, d.owner, 300, 301) {
		t.Errorf("after a restart %+v; web reaches db: %t", j, passes(t, d.owner, 300, 301))
	}
	d.apply(all)
	d.complete(filler, k)
	d.apply(nil, filler)
	settle(t, d.owner, c)
	if j := judge(d); j.Exceeds == "" || passes(t, d.owner, 300, 301) {
		t.Errorf("before the object is delivered again %+v; web reaches db: %t", j, passes(t, d.owner, 300, 301))
	}
	d.apply(map[policy.Key]policy.Written{k: all[k]})
	if j := judge(d); j.Exceeds != "" || !passes(t, d.owner, 300, 301) {
		t.Errorf("with capacity %+v; web reaches db: %t", j, passes(t, d.owner, 300, 301))
	}
}

// TestPoliciesThatGrewDuringARestartStay: before a restart, a tenant uses more than an eighth of a limit. While its
// policies are listed afterwards, they stay enforced, even if they have grown.
func TestPoliciesThatGrewDuringARestartStay(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	start := func() (deltas, func()) {
		d, stop := objects(t, dir, func(cfg *Config) { cfg.MaxPolicies, cfg.Now = 10, c.Now })
		if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		return d, stop
	}
	d, stop := start()
	all := make(map[policy.Key]policy.Written)
	var keys []policy.Key
	for i := range 8 {
		k := network(fmt.Sprint("p", i))
		all[k], keys = isolating(k.Name), append(keys, k)
	}
	d.apply(all)
	d.complete(keys...)
	settle(t, d.owner, c)
	stop()
	d, _ = start()
	grown := all[keys[3]]
	grown.Text = append(slices.Clone(grown.Text), "  "...)
	d.apply(map[policy.Key]policy.Written{keys[3]: grown})
	judged, err := d.Judged(t.Context(), keys)
	if err != nil {
		t.Fatal(err)
	}
	for k, j := range judged {
		if !j.InForce || j.Exceeds != "" {
			t.Errorf("%s: %+v", k, j)
		}
	}
}
