// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// sharing runs f in a bubble with nodes of one cluster. Namespaces that begin with "team-"
// have the tenant label, with what follows.
func sharing(t *testing.T, cfg allocator.Config, f func(t *testing.T, c *storetest.Fake, nodes [2]*node)) {
	sharingOf(t, cfg, identity.ClusterSize, f)
}

// sharingOf is like sharing, but with nodes of another quota.
func sharingOf(
	t *testing.T, cfg allocator.Config, quota int, f func(t *testing.T, c *storetest.Fake, nodes [2]*node),
) {
	synctest.Test(t, func(t *testing.T) {
		c := storetest.NewFake()
		cfg.Quota, cfg.Reconcile, cfg.Heartbeat = quota, time.Minute, 5*time.Second
		cfg.Tenant = func(namespace string) shares.Tenant {
			tenants := shares.NewTenants(shares.Settings{})
			if team, ok := strings.CutPrefix(namespace, "team-"); ok {
				tenants.Set(namespace, map[string]string{shares.DefaultTenantLabel: team})
			}
			return tenants.Of(namespace)
		}
		var nodes [2]*node
		for i, name := range []string{"a", "b"} {
			nodes[i] = start(t, c.Node(name), &memory{}, cfg)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		f(t, c, nodes)
		for _, n := range nodes {
			n.stop()
		}
	})
}

// of returns a label set of a namespace.
func of(t *testing.T, namespace string, i int) label.Canonical {
	t.Helper()
	l, err := label.Canonicalize(label.Kubernetes(label.KeyNamespace, namespace), label.Kubernetes("app", fmt.Sprint(i)))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// take takes numbers for a namespace until it gets no more, at most so many.
func (n *node) take(namespace string, most int) (got int, err error) {
	for i := range most {
		holder := allocator.ReferenceHolder(fmt.Sprint(namespace, "/", i))
		if _, err := n.Hold(n.t.Context(), holder, of(n.t.(*testing.T), namespace, i), false); err != nil {
			return i, err
		}
	}
	return most, nil
}

// fill creates label sets of a namespace, the last of so many.
func fill(t *testing.T, c *storetest.Fake, namespace string, from, to int) {
	t.Helper()
	var all []label.Canonical
	for i := from; i < to; i++ {
		all = append(all, of(t, namespace, i))
	}
	c.Fill(all...)
	synctest.Wait()
}

// most is the count of numbers that one tenant may have alone: 256, and a quarter of what is then free.
const most = 13_261

// TestATenantHasAQuarterOfTheFreeNumbersAtMost: beyond its first 256 numbers, a tenant gets at most a quarter of the
// free numbers. The rest stays for other tenants, even if they need numbers later or the tenant creates more
// namespaces.
func TestATenantHasAQuarterOfTheFreeNumbersAtMost(t *testing.T) {
	sharing(t, quick(), func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		fill(t, c, "team-a", 200, most+100)
		got, err := nodes[0].take("team-a", 200)
		if !errors.Is(err, allocator.ErrShare) || got != 100 {
			t.Fatalf("it got %d, want the last 100: %v", got, err)
		}
		if want := fmt.Sprintf("tenant a has %d, at most ", most); !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		synctest.Wait() // until the other node has seen them
		// A label set to which another node gave a number needs no other.
		if _, err := nodes[1].Hold(t.Context(), allocator.ReferenceHolder("x"), of(t, "team-a", 777), false); err != nil {
			t.Errorf("a label set that has a number: %v", err)
		}
		_, err = nodes[1].Hold(t.Context(), allocator.ReferenceHolder("y"), of(t, "team-a", -1), false)
		if !errors.Is(err, allocator.ErrShare) {
			t.Errorf("on another node: %v", err)
		}
		for _, namespace := range []string{"team-b", "plain", "kube-system"} {
			if n, err := nodes[1].take(namespace, 300); err != nil {
				t.Errorf("%s got %d: %v", namespace, n, err)
			}
		}
		usage := func() map[string]shares.Share {
			u := nodes[1].Usage()
			limit := shares.Limit{Name: "numbers", Size: identity.ClusterSize}
			if len(u) != 1 || u[0].Limit != limit || u[0].Used != most+900 {
				t.Fatalf("usage %+v, want %d used", u, most+900)
			}
			all := map[string]shares.Share{}
			for _, s := range u[0].Tenants {
				all[s.Tenant.String()] = s.Share
			}
			return all
		}
		all := usage()
		if s := all["tenant a"]; s.Admitted != most || s.Asked != most+1 || s.Guarantee != 256 {
			t.Errorf("tenant a: %+v, want %d and one that waits", s, most)
		}
		for _, tenant := range []string{"tenant b", "namespace plain", "system"} {
			if s := all[tenant]; s.Admitted != 300 || s.Asked != 300 || s.Allotment < 10_000 {
				t.Errorf("%s: %+v, want 300", tenant, s)
			}
		}
		time.Sleep(2 * time.Minute)
		if s := usage()["tenant a"]; s.Asked != most {
			t.Errorf("a label set that is not asked for any more: %+v", s)
		}
	})
}

// TestNamespacesWithoutTheLabelHaveHalfOfTheNumbersTogether: namespaces without the tenant label have at most half of
// the numbers together, however many there are.
func TestNamespacesWithoutTheLabelHaveHalfOfTheNumbersTogether(t *testing.T) {
	sharing(t, quick(), func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		const half = identity.ClusterSize / 2
		for i := range 160 {
			fill(t, c, fmt.Sprint("made-", i), 0, 204)
		}
		if n, err := nodes[0].take("another", 100); n != half-160*204 || !errors.Is(err, allocator.ErrShare) ||
			!strings.Contains(err.Error(), fmt.Sprintf("namespaces without a tenant has %d, at most %d", half, half)) {
			t.Errorf("it got %d, want %d: %v", n, half-160*204, err)
		}
		if n, err := nodes[1].take("team-b", 500); err != nil {
			t.Errorf("a labelled tenant got %d: %v", n, err)
		}
	})
}

// TestATenantLeavesPartOfTheQuotaOfANodeToOthers allocates label sets on one node for one tenant, and then for
// namespaces without the label, until they get no more. Other tenants still get numbers.
func TestATenantLeavesPartOfTheQuotaOfANodeToOthers(t *testing.T) {
	sharingOf(t, quick(), 1024, func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		n, err := nodes[0].take("team-a", 1024)
		// The limit is 64, and half of the units that are then free.
		if want := "tenant a has 384, at most "; n != 384 || !errors.Is(err, allocator.ErrQuota) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("a tenant got %d, want 384: %v", n, err)
		}
		all := 0
		for i := range 100 {
			n, err = nodes[0].take(fmt.Sprint("made-", i), 20)
			all += n
		}
		if all != 512 || !errors.Is(err, allocator.ErrQuota) ||
			!strings.Contains(err.Error(), "namespaces without a tenant has 512") {
			t.Errorf("namespaces without the label got %d, want 512: %v", all, err)
		}
		for _, namespace := range []string{"team-b", "kube-system"} {
			if n, err := nodes[0].take(namespace, 50); err != nil {
				t.Errorf("%s got %d: %v", namespace, n, err)
			}
		}
		// Returned numbers no longer count.
		for i := range 384 {
			if _, err := nodes[0].Release(t.Context(), allocator.ReferenceHolder(fmt.Sprint("team-a/", i))); err != nil {
				t.Fatal(err)
			}
		}
		if n, err := nodes[0].take("team-a", 150); err != nil {
			t.Errorf("after it gave back its numbers it got %d: %v", n, err)
		}
	})
}

// TestNumbersInQuarantineCountForTheirTenant: the numbers of short-lived label sets stay in quarantine for an hour.
// Only the collector sees them, and publishes their count to all nodes.
func TestNumbersInQuarantineCountForTheirTenant(t *testing.T) {
	cfg := quick()
	cfg.Grace, cfg.Quarantine = 15*time.Minute, time.Hour
	sharing(t, cfg, func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		const many = 200
		for round := range 3 {
			for i := range many {
				holder, labels := allocator.ReferenceHolder(fmt.Sprint(i)), of(t, "team-a", round*many+i)
				if _, err := nodes[0].Hold(t.Context(), holder, labels, true); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(18 * time.Minute)
			synctest.Wait()
		}
		if p := c.Published(); p.Tenants["tenant a"] != 3*many || p.Used != 3*many || p.Unlabelled != 0 {
			t.Errorf("published %+v, want %d of tenant a", p, 3*many)
		}
		// The next collector knows the count of numbers in quarantine, but not their tenants.
		before := c.Published()
		c.Expire("a")
		c.Expire("b")
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if p := c.Published(); p.Used != 3*many || p.Tenants["tenant a"] != many || p.Revision < before.Revision {
			t.Errorf("the next collector published %+v, want %d used, and %d of tenant a", p, 3*many, many)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if p := c.Published(); p.Tenants["tenant a"] != many || p.Used != many {
			t.Errorf("after the quarantine: %+v, want %d", p, many)
		}
		revision := c.Published().Revision
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if now := c.Published().Revision; now != revision {
			t.Error("it was published again without a change")
		}
	})
}

// TestWhatIsPublishedBoundsATenantOnAllNodes: every node counts the published numbers of a tenant, and the numbers that
// the node itself has allocated since.
func TestWhatIsPublishedBoundsATenantOnAllNodes(t *testing.T) {
	cfg := quick()
	cfg.Grace, cfg.Quarantine = 15*time.Minute, time.Hour
	sharing(t, cfg, func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		fill(t, c, "team-a", 0, most-100)
		time.Sleep(20 * time.Minute) // collected: all rest
		synctest.Wait()
		if p := c.Published(); p.Tenants["tenant a"] != most-100 {
			t.Fatalf("published %+v", p)
		}
		got, err := nodes[1].take("team-a", 300)
		if !errors.Is(err, allocator.ErrShare) || got != 100 {
			t.Errorf("it got %d, want 100: %v", got, err)
		}
		time.Sleep(15 * time.Second) // published again
		synctest.Wait()
		if got, err := nodes[0].take("team-a", 1); !errors.Is(err, allocator.ErrShare) && got == 0 {
			t.Errorf("on another node: %d, %v", got, err)
		}
		if n, err := nodes[1].take("team-b", 300); err != nil {
			t.Errorf("another tenant got %d: %v", n, err)
		}
	})
}

// TestNewEndpointsWaitForANumber: new endpoints wait for a free number of their tenant, and the error contains the
// tenant and its count.
func TestNewEndpointsWaitForANumber(t *testing.T) {
	sharing(t, quick(), func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		fill(t, c, "team-a", 0, most)
		hold := func(patience time.Duration) (time.Duration, error) {
			began := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := nodes[0].HoldEndpoint(ctx, c1, of(t, "team-a", -1), allocator.Workload{})
			return time.Since(began), err
		}
		for patience, most := range map[time.Duration]time.Duration{
			5 * time.Second: 5 * time.Second, time.Minute: 10 * time.Second,
		} {
			waited, err := hold(patience)
			if !errors.Is(err, allocator.ErrShare) || waited < most-2*time.Second || waited >= most ||
				!strings.Contains(err.Error(), "tenant a has 13261") {
				t.Errorf("of %s it waited %s: %v", patience, waited, err)
			}
		}
		go func() {
			time.Sleep(2 * time.Second)
			c.Forget(of(t, "team-a", 0))
		}()
		if waited, err := hold(10 * time.Second); err != nil || waited < 2*time.Second || waited > 4*time.Second {
			t.Errorf("with a number after 2 s it waited %s: %v", waited, err)
		}
	})
}

// TestAMissingGrantIsNamed: a role of an earlier version does not allow the publication of counts. Tenants are then
// limited by the counts of the mirror, and the status of the collector contains the missing grant.
func TestAMissingGrantIsNamed(t *testing.T) {
	sharing(t, quick(), func(t *testing.T, c *storetest.Fake, nodes [2]*node) {
		c.Deny(true)
		if _, err := nodes[0].take("team-a", 200); err != nil {
			t.Fatal(err)
		}
		denied := func() (n int) {
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			for _, node := range nodes {
				if errors.Is(node.Summary().Denied, allocator.ErrDenied) {
					n++
				}
			}
			return n
		}
		if n := denied(); n != 1 {
			t.Errorf("%d nodes name the grant, want the collector", n)
		}
		fill(t, c, "team-a", 300, most+300)
		if _, err := nodes[1].take("team-a", 300); !errors.Is(err, allocator.ErrShare) {
			t.Errorf("without a publication: %v", err)
		}
		c.Deny(false)
		if n := denied(); n != 0 || c.Published().Used < 200 {
			t.Errorf("%d nodes name a grant; published %+v", n, c.Published())
		}
	})
}

// TestNumbersOfShortLivesAreGivenOutLast: a pod that changes its labels continuously must not cause reuse of the
// numbers that other pods had.
func TestNumbersOfShortLivesAreGivenOutLast(t *testing.T) {
	cfg := quick()
	cfg.Grace, cfg.Quarantine = 15*time.Minute, time.Hour
	sharing(t, cfg, func(t *testing.T, _ *storetest.Fake, nodes [2]*node) {
		short := map[identity.Numeric]bool{}
		id, err := nodes[0].Hold(t.Context(), allocator.ReferenceHolder("long"), of(t, "team-a", 0), false)
		if err != nil {
			t.Fatal(err)
		}
		long := id.Number
		for i := range 50 {
			id, err := nodes[0].Hold(t.Context(), allocator.ReferenceHolder("flips"), of(t, "team-a", 1+i), true)
			if err != nil {
				t.Fatal(err)
			}
			short[id.Number] = true
			time.Sleep(10 * time.Second)
		}
		for _, name := range []string{"flips", "long"} {
			if _, err := nodes[0].Release(t.Context(), allocator.ReferenceHolder(name)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		for _, n := range nodes {
			first, last := n.Free(), n.FreeLast()
			if first != identity.ClusterSize-len(short) || last != len(short) || !n.IsFree(long) {
				t.Errorf("%d numbers are assigned first and %d last, want %d last", first, last, len(short))
			}
		}
		for n := range short {
			if nodes[0].IsFree(n) {
				t.Errorf("%d is assigned like any other", n)
			}
		}
	})
}
