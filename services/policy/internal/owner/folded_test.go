// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/query"
)

// flood returns n policies of a namespace, numbered from first, with selectors of the given size.
func flood(namespace string, first, n, bytes int) map[policy.Key]policy.Written {
	all := make(map[policy.Key]policy.Written, n)
	for i := first; i < first+n; i++ {
		k := policy.Key{Kind: "NetworkPolicy", Namespace: namespace, Name: fmt.Sprintf("p%05d", i)}
		var values strings.Builder
		for j := 0; values.Len() < bytes; j++ {
			fmt.Fprintf(&values, `,"v%05d-%05d"`, i, j)
		}
		all[k] = object("networking.k8s.io/v1", k, `"spec":{"podSelector":{"matchExpressions":[`+
			`{"key":"app","operator":"In","values":["flood"`+values.String()+`]}]},"policyTypes":["Ingress"]}`)
	}
	return all
}

// heap returns the bytes of the heap in use.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestPoliciesBeyondTheShareTakeBoundedMemory (INV-65) applies 5,000 policies of one tenant, of 1 KiB each, with
// capacity for 250. The process keeps only a limited number of the policies that exceed the share. For the rest, it
// isolates their namespaces.
func TestPoliciesBeyondTheShareTakeBoundedMemory(t *testing.T) {
	const count, each = 5000, 1 << 10
	c := &clock{now: time.Now()}
	d, _ := objects(t, t.TempDir(), func(cfg *Config) {
		cfg.MaxPolicies, cfg.MaxManifestBytes, cfg.Now = 250, 1<<20, c.Now
	})
	pods(t, d.owner, "shop")
	before := heap()
	var keys []policy.Key
	for part := range 20 { // in parts, as from a source
		some := flood("evil", count/20*part, count/20, each)
		for k := range some {
			keys = append(keys, k)
		}
		d.apply(some)
	}
	d.complete(keys...)
	if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	settle(t, d.owner, c)
	grown := int64(heap()) - int64(before)
	t.Logf("%d policies of %d bytes: the owner has grown by %d KiB, %d bytes for each",
		count, each, grown>>10, grown/count)
	const most = 6 << 20 // 250 enforced policies, 128 KiB of policies that isolate, and ledger entries of the rest
	if grown > most {
		t.Errorf("%d policies beyond the share use %d MiB, limit %d", count, grown>>20, most>>20)
	}
	judged, err := d.Judged(t.Context(), keys)
	if err != nil {
		t.Fatal(err)
	}
	folded := 0
	for k, j := range judged {
		if !j.InForce {
			t.Fatalf("%s is not enforced: %+v", k, j)
		}
		if strings.Contains(j.Exceeds, "whole namespace "+k.Namespace+" is isolated") {
			folded++
		}
	}
	if folded < count/2 {
		t.Errorf("the conditions of %d policies report that their namespace is isolated", folded)
	}
}

// TestNamespaceIsIsolatedForPoliciesThatAreNotKept applies more policies beyond a tenant's share than the process
// keeps. Every pod of the namespace is isolated, even after a restart, until the policies are removed.
func TestNamespaceIsIsolatedForPoliciesThatAreNotKept(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	start := func() (deltas, func()) {
		d, stop := objects(t, dir, func(cfg *Config) { cfg.MaxPolicies, cfg.Now = 4, c.Now })
		pods(t, d.owner, "shop")
		if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		return d, stop
	}
	d, stop := start()
	var asked []string
	d.owner.OnAgain(func(kind string) { asked = append(asked, kind) })
	all := flood("shop", 0, 20, 1)
	var keys []policy.Key
	for k := range all {
		keys = append(keys, k)
	}
	d.apply(all)
	d.complete(keys...)
	settle(t, d.owner, c)
	closed := func(when string, want bool) {
		t.Helper()
		if passes(t, d.owner, 300, 301) == want {
			t.Errorf("%s: the pods of the namespace are isolated: %t, want %t", when, !want, want)
		}
		if passes(t, d.owner, 301, 300) == want {
			t.Errorf("%s: the other direction is isolated: %t, want %t", when, !want, want)
		}
	}
	closed("with 20 policies and capacity for 4", true)
	list, _, err := d.owner.Reader().List(t.Context(), Filter{Namespace: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	if len(list) > 9 {
		t.Errorf("%d policies are kept", len(list))
	}
	stop()

	d, stop = start()
	closed("after a restart", true)
	d.apply(all)
	d.complete(keys...)
	settle(t, d.owner, c)
	closed("listed again", true)
	d.apply(nil, keys[10:]...)
	settle(t, d.owner, c)
	closed("with 10 policies", true)
	d.apply(nil, keys[3:10]...)
	settle(t, d.owner, c)
	rest := map[policy.Key]policy.Written{keys[0]: all[keys[0]], keys[1]: all[keys[1]], keys[2]: all[keys[2]]}
	d.apply(rest) // the source delivers the policies that were not kept
	settle(t, d.owner, c)
	closed("with 3 policies that select no pod", false)
	stop()

	d, _ = start()
	closed("after another restart", false)
	d.apply(all)
	d.complete(keys...)
	settle(t, d.owner, c)
	closed("20 again", true)
	d.complete()
	closed("without policies", false)
	d.want("without policies")
}

// TestGroupBeyondTheShareIsClosed: CIDR groups exceed the limit in bytes. Deny rules that refer to such a group apply
// to every address, and allow rules to no address, even if the rules refer to the former labels of the group.
func TestGroupBeyondTheShareIsClosed(t *testing.T) {
	dir := t.TempDir()
	c := &clock{now: time.Now()}
	start := func() (deltas, func()) {
		d, stop := objects(t, dir, func(cfg *Config) { cfg.MaxManifestBytes, cfg.Now = 20_000, c.Now })
		pods(t, d.owner, "shop")
		world, err := peer.New(9, label.NewSet(label.Reserved(identity.NameWorldIPv4)))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.owner.Identities().SetIdentities(t.Context(), []peer.Identity{world}, nil); err != nil {
			t.Fatal(err)
		}
		if err := d.owner.Feed(managed.SourceFile).Set(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		return d, stop
	}
	d, stop := start()
	group := func(name, color string, n int) (policy.Key, policy.Written) {
		k := policy.Key{Kind: "CiliumCIDRGroup", Name: name}
		text := fmt.Appendf(nil, `{"apiVersion":"cilium.io/v2","kind":"CiliumCIDRGroup",`+
			`"metadata":{"name":%q,"labels":{"color":%q}},`+
			`"spec":{"externalCIDRs":["192.0.2.0/24"%s]}}`, name, color, strings.Repeat(`,"198.51.100.0/24"`, n))
		return k, policy.Written{Key: k, APIVersion: "cilium.io/v2", Text: text}
	}
	deny := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "deny"}
	allow := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "allow"}
	small, smallText := group("small", "green", 0)
	large, before := group("large", "red", 0)
	_, after := group("large", "blue", 2000)
	policies := map[policy.Key]policy.Written{
		deny: object("cilium.io/v2", deny, `"spec":{"endpointSelector":{"matchLabels":{"app":"web"}},`+
			`"egress":[{"toEntities":["all"]}],`+
			`"egressDeny":[{"toCIDRSet":[{"cidrGroupSelector":{"matchLabels":{"color":"red"}}}]}]}`),
		allow: object("cilium.io/v2", allow, `"spec":{"endpointSelector":{"matchLabels":{"app":"db"}},`+
			`"egress":[{"toCIDRSet":[{"cidrGroupRef":"large"}]}]}`),
		small: smallText, large: before,
	}
	d.apply(policies)
	d.complete(deny, allow, small, large)
	reach := func(when string, denied, allowed bool) {
		t.Helper()
		if passesTo(t, d.owner, 300, "203.0.113.1") == denied {
			t.Errorf("%s: an address outside of the group is denied: %t, want %t", when, !denied, denied)
		}
		if passesTo(t, d.owner, 301, "192.0.2.1") != allowed {
			t.Errorf("%s: an address of the group is allowed: %t, want %t", when, !allowed, allowed)
		}
	}
	reach("with capacity", false, true)
	d.apply(map[policy.Key]policy.Written{large: after})
	judge := func() Judged {
		t.Helper()
		judged, err := d.Judged(t.Context(), []policy.Key{large})
		if err != nil {
			t.Fatal(err)
		}
		return judged[large]
	}
	if j := judge(); !strings.Contains(j.Exceeds, "limits.manifests") {
		t.Errorf("the group is %+v", j)
	}
	reach("beyond the share", true, false)
	stop()
	d, _ = start()
	reach("after a restart", true, false)
	policies[large] = before
	d.apply(policies)
	d.complete(deny, allow, small, large)
	settle(t, d.owner, c)
	reach("with capacity again", false, true)
}

// passesTo reports whether a TCP connection from a pod to an external address is allowed.
func passesTo(t *testing.T, o *Owner, from identity.Numeric, to string) bool {
	t.Helper()
	x, err := o.Reader().Explain(t.Context(), query.Peer{Identity: from}, query.Peer{Addr: netip.MustParseAddr(to)},
		port.At(port.TCP, 80))
	if err != nil {
		t.Fatal(err)
	}
	return x.Action == policytable.Allow
}
