// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// fill writes keys in large transactions.
func fill(t testing.TB, admin *clientv3.Client, n int, put func(i int) []clientv3.Op) {
	t.Helper()
	var ops []clientv3.Op
	for i := range n {
		ops = append(ops, put(i)...)
		if len(ops) > maxOps-8 || i == n-1 {
			if _, err := admin.Txn(t.Context()).Then(ops...).Commit(); err != nil {
				t.Fatal(err)
			}
			ops = nil
		}
	}
}

// counts sums the updates of FollowReferences, as a collector does.
type counts struct {
	mu       sync.Mutex
	listings int
	numbers  map[identity.Numeric]int
	nodes    map[string]int
}

func (c *counts) observe(r allocator.References) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Complete {
		c.listings++
		c.numbers, c.nodes = r.Numbers, r.Nodes
		return
	}
	for n, by := range r.Numbers {
		c.numbers[n] += by
	}
	for n, by := range r.Nodes {
		c.nodes[n] += by
	}
}

func (c *counts) are(node string, nodeHas int, n identity.Numeric, nodes int) func() bool {
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.nodes[node] == nodeHas && c.numbers[n] == nodes
	}
}

// TestReferencesAreListedOnceAndThenCounted: references are listed in several pages and then watched, also across a
// compaction of revisions that a watch without progress notifications has not reached.
func TestReferencesAreListedOnceAndThenCounted(t *testing.T) {
	t.Parallel() // it mostly waits
	const nodes, each = 250, 100
	c := newCluster(t)
	fill(t, c.admin, nodes*each, func(i int) []clientv3.Op {
		return []clientv3.Op{clientv3.OpPut(fmt.Sprintf("%s/ref/node-%03d/%d", testPrefix, i/each, 300+i%each), "")}
	})
	st := newStore(t, c.Endpoint, "a")
	got := &counts{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := st.FollowReferences(ctx, got.observe); !errors.Is(err, context.Canceled) {
			t.Errorf("follow: %v", err)
		}
	}()
	defer func() { cancel(); <-done }()
	servicetest.Eventually(t, "the listing", got.are("node-000", each, 300, nodes))
	put := func(key string, opts ...clientv3.OpOption) {
		t.Helper()
		if _, err := c.admin.Put(t.Context(), testPrefix+key, "", opts...); err != nil {
			t.Fatal(err)
		}
	}
	lease, err := c.admin.Grant(t.Context(), 3600)
	if err != nil {
		t.Fatal(err)
	}
	put("/ref/node-000/300") // writing the same key again adds no second reference
	put("/ref/new/300", clientv3.WithLease(lease.ID))
	put("/ref/new/301", clientv3.WithLease(lease.ID))
	put("/ref/new/x")
	servicetest.Eventually(t, "a new node", got.are("new", 2, 300, nodes+1))
	for i := range 50 { // make changes that the watch does not see
		put(fmt.Sprint("/elsewhere/", i))
	}
	seen := got.listings
	c.Down()
	c.Up()
	servicetest.Eventually(t, "etcd is back", func() bool { _, err := c.admin.Get(t.Context(), "x"); return err == nil })
	if _, err := c.admin.Revoke(t.Context(), lease.ID); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a lease that ended", got.are("new", 0, 300, nodes))
	if _, err := c.admin.Delete(t.Context(), testPrefix+"/ref/node-000/300"); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a release", got.are("node-000", each-1, 300, nodes-1))
	got.mu.Lock()
	defer got.mu.Unlock()
	if got.listings != seen || seen != 1 {
		t.Errorf("%d listings, want 1: a watch that was cut goes on where it was", got.listings)
	}
}

// oldNode does what a node of layout 1 did with one label set.
type oldNode struct {
	t     *testing.T
	admin *clientv3.Client
	name  string
}

func (o oldNode) create(n identity.Numeric, l label.Canonical) {
	o.t.Helper()
	for k, v := range map[string]string{"/labels/" + hashText(l): labelsValue1(n, l), "/id/" + fmt.Sprint(n): l.Text(), o.ref(n): ""} {
		if _, err := o.admin.Put(o.t.Context(), testPrefix+k, v); err != nil {
			o.t.Fatal(err)
		}
	}
}

func (o oldNode) ref(n identity.Numeric) string { return "/ref/" + o.name + "/" + fmt.Sprint(n) }

// refer runs the transaction of layout 1 that refers to an identity.
func (o oldNode) refer(n identity.Numeric, l label.Canonical) bool {
	o.t.Helper()
	labels, id := testPrefix+"/labels/"+hashText(l), testPrefix+"/id/"+fmt.Sprint(n)
	resp, err := o.admin.Txn(o.t.Context()).If(
		clientv3.Compare(clientv3.Value(labels), "=", labelsValue1(n, l)), clientv3.Compare(clientv3.Value(id), "=", l.Text()),
	).Then(clientv3.OpPut(labels, labelsValue1(n, l)), clientv3.OpPut(testPrefix+o.ref(n), "")).Commit()
	if err != nil {
		o.t.Fatal(err)
	}
	return resp.Succeeded
}

func (o oldNode) release(n identity.Numeric) {
	o.t.Helper()
	if _, err := o.admin.Delete(o.t.Context(), testPrefix+o.ref(n)); err != nil {
		o.t.Fatal(err)
	}
}

// TestNodesOfBothLayoutsShareIdentities: during a rolling update, nodes of each version refer to identities that the
// other version created, and do not collect identities that the other version uses.
func TestNodesOfBothLayoutsShareIdentities(t *testing.T) {
	c := newCluster(t)
	old := oldNode{t, c.admin, "old"}
	web, db := storetest.Labels(t, "web"), storetest.Labels(t, "db")
	old.create(300, web)
	st := newStore(t, c.Endpoint, "new")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	claim, err := st.Claim(t.Context(), web, 0, 400)
	if err != nil || claim.Number != 300 || claim.Created {
		t.Fatalf("claim of what an old node made: %+v, %v, want 300", claim, err)
	}
	made, err := st.Claim(t.Context(), db, 0, 301)
	if err != nil || made.Number != 301 || !made.Created {
		t.Fatalf("claim of a new set: %+v, %v", made, err)
	}
	if !old.refer(301, db) || !old.refer(300, web) {
		t.Error("the old node cannot refer to what the new one made or used")
	}
	// The fence of the old collector moves with a reference of the new node.
	before, err := c.admin.Get(t.Context(), testKeys.labels(web))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Claim(t.Context(), web, 300, 300); err != nil {
		t.Fatal(err)
	}
	if after, err := c.admin.Get(t.Context(), testKeys.labels(web)); err != nil || after.Kvs[0].ModRevision <= before.Kvs[0].ModRevision {
		t.Errorf("labels/ was not written with a reference: %v, %v", after, err)
	}
	// And the other way: what was unused, and an old node touches.
	for _, n := range []identity.Numeric{300, 301} {
		old.release(n)
	}
	refs, err := st.References(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range refs {
		if err := st.Release(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	unused, err := storetest.Unused(t.Context(), st)
	if err != nil || len(unused) != 2 {
		t.Fatalf("unused %v, %v, want both", unused, err)
	}
	if !old.refer(300, web) {
		t.Fatal("the old node cannot refer")
	}
	if gone, err := st.Collect(t.Context(), unused, time.Hour); err != nil || len(gone) != 1 || gone[0] != 301 {
		t.Errorf("collected %v, %v, want only 301: an old node refers to 300", gone, err)
	}
}

// TestLayoutBecomesFinalWhenAllNodesKnowIt: the identities are converted to the final layout once every node supports
// it.
func TestLayoutBecomesFinalWhenAllNodesKnowIt(t *testing.T) {
	c := newCluster(t)
	old := oldNode{t, c.admin, "b"}
	web, db := storetest.Labels(t, "web"), storetest.Labels(t, "db")
	old.create(300, web)
	st := newStore(t, c.Endpoint, "a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.admin.Put(t.Context(), testPrefix+"/alive/a", "x"); err != nil {
		t.Fatal(err)
	}
	value := func(key string) string {
		t.Helper()
		resp, err := c.admin.Get(t.Context(), testPrefix+key)
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) == 0 {
			return ""
		}
		return string(resp.Kvs[0].Value)
	}
	tidy := func() {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		var refs allocator.References
		st.FollowReferences(ctx, func(r allocator.References) { refs = r; cancel() }) //nolint:errcheck // ends by cancel
		if err := st.Tidy(t.Context(), refs); err != nil {
			t.Fatal(err)
		}
	}
	tidy()
	if got := value("/layout"); got != "" {
		t.Fatalf("layout %q while a node of the old version refers to something", got)
	}
	if _, err := c.admin.Put(t.Context(), testPrefix+"/alive/b", "x"); err != nil { // it was updated
		t.Fatal(err)
	}
	tidy()
	if got := value("/layout"); got != "2" {
		t.Errorf("layout %q, want 2", got)
	}
	if got := value("/labels/" + hashText(web)); got != "300" {
		t.Errorf("labels/ of the old identity is %q, want 300 alone", got)
	}
	if claim, err := st.Claim(t.Context(), web, 0, 400); err != nil || claim.Number != 300 {
		t.Errorf("claim of a converted identity: %+v, %v, want 300", claim, err)
	}
	if _, err := st.Claim(t.Context(), db, 0, 301); err != nil {
		t.Fatal(err)
	}
	if got := value("/labels/" + hashText(db)); got != "301" {
		t.Errorf("labels/ of a new identity is %q, want 301 alone", got)
	}
	// A node of the old version that was forgotten gets no number at all.
	if old.refer(300, web) {
		t.Error("a node of the old version refers to a converted identity")
	}
}

func TestLayoutOfANewerVersionIsRefused(t *testing.T) {
	c := newCluster(t)
	if _, err := c.admin.Put(t.Context(), testPrefix+"/layout", "3"); err != nil {
		t.Fatal(err)
	}
	if _, err := newStore(t, c.Endpoint, "a").Join(t.Context()); !errors.Is(err, allocator.ErrLayout) {
		t.Errorf("join: %v, want ErrLayout", err)
	}
}

// fillCluster writes identities, and references of nodes, as if they had been
// claimed. It returns a store of one more node.
func fillCluster(b *testing.B, s *etcdtest.Server, identities, nodes, each int) *Store {
	b.Helper()
	admin, seed := s.Client(), newStore(b, s.Endpoint, "seed")
	if _, err := seed.Join(b.Context()); err != nil {
		b.Fatal(err)
	}
	fill(b, admin, identities, func(i int) []clientv3.Op {
		n, l := identity.MinCluster+identity.Numeric(i), storetest.Labels(b, fmt.Sprint("app", i))
		return []clientv3.Op{
			clientv3.OpPut(testKeys.id(n), l.Text()), clientv3.OpPut(testKeys.labels(l), labelsValue(n)), clientv3.OpPut(testKeys.fence(n), ""),
		}
	})
	fill(b, admin, nodes*each, func(i int) []clientv3.Op {
		return []clientv3.Op{clientv3.OpPut(fmt.Sprintf("%s/ref/node-%04d/%d", testPrefix, i/each, 256+(i*7)%60_000), "")}
	})
	return seed
}

// BenchmarkCollection measures one round of collection on a full cluster: 65,000 identities, 200,000 references of
// 2,000 nodes.
func BenchmarkCollection(b *testing.B) {
	const identities, nodes, each = 65_000, 2000, 100
	s := etcdtest.Start(b)
	seed := fillCluster(b, s, identities, nodes, each)
	for b.Loop() {
		began := time.Now()
		unused, err := storetest.Unused(b.Context(), seed)
		if err != nil {
			b.Fatal(err)
		}
		listed := time.Since(began)
		began = time.Now()
		if err := seed.Tidy(b.Context(), allocator.References{}); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(listed.Milliseconds()), "ms/listing")
		b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/tidying")
		b.ReportMetric(float64(len(unused)), "unused")
	}
	cfg := quick()
	cfg.StoreTimeout, cfg.Reconcile, cfg.Grace = 3*time.Second, time.Second, 0
	began := time.Now()
	n := startNode(b, s.Endpoint, "a", b.TempDir(), cfg)
	n.connected()
	servicetest.Eventually(b, "the collection of what is unused", func() bool { return n.Counters().Collected >= 5000 })
	b.ReportMetric(float64(time.Since(began).Milliseconds()), "ms/collected-5000")
}
