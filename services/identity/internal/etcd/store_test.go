// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

func TestMain(m *testing.M) {
	code := leaktest.Run(m)
	etcdtest.Cleanup()
	os.Exit(code)
}

const testPrefix = "/test/identity"

// testKeys names the keys of identities; not of references, which have a node.
var testKeys = identityKeys{prefix: testPrefix}

// testCluster is a real etcd for the suite.
type testCluster struct {
	*etcdtest.Server
	t      *testing.T
	admin  *clientv3.Client
	stores map[string][]*Store
}

func newCluster(t *testing.T) *testCluster {
	s := etcdtest.Start(t)
	return &testCluster{Server: s, t: t, admin: s.Client(), stores: map[string][]*Store{}}
}

// newStore returns a store that is closed after the test.
func newStore(t testing.TB, endpoint, node string) *Store {
	t.Helper()
	s := newSession(t, endpoint, node)
	return New(s, NewNodes(s), Readers{})
}

// newSession returns a session that is closed after the test.
func newSession(t testing.TB, endpoint, node string) *session.Session {
	t.Helper()
	s, err := session.Open(session.Config{
		Client: session.Client{Endpoints: []string{endpoint}}, Prefix: testPrefix, Node: node, TTL: time.Hour,
		AliveTTL: time.Minute, Incarnation: "state-of-" + node, Boot: "boot",
		Timeout: 20 * time.Second, Listen: 50 * time.Millisecond, Log: log.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (c *testCluster) Node(name string) allocator.Store {
	s := newStore(c.t, c.Endpoint, name)
	c.stores[name] = append(c.stores[name], s)
	return s
}

func (c *testCluster) Expire(node string) {
	for _, s := range c.stores[node] {
		lease, err := s.session.Lease()
		if errors.Is(err, allocator.ErrSessionLost) {
			continue
		}
		if _, err := c.admin.Revoke(context.Background(), lease); err != nil {
			c.t.Fatal(err)
		}
	}
}

func TestEtcdIsAStore(t *testing.T) {
	t.Parallel() // it mostly waits
	storetest.Run(t, func(t *testing.T) storetest.Cluster { return newCluster(t) })
}

func TestKeysAreThoseOfTheDocumentation(t *testing.T) {
	c := newCluster(t)
	st := c.Node("node-1")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := storetest.Labels(t, "web")
	claim, err := st.Claim(t.Context(), l, 0, 300)
	if err != nil {
		t.Fatal(err)
	}
	keys := func() map[string]string {
		resp, err := c.admin.Get(t.Context(), "/", clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]string{}
		for _, kv := range resp.Kvs {
			out[strings.TrimPrefix(string(kv.Key), testPrefix)] = string(kv.Value)
			if isRef := strings.Contains(string(kv.Key), "/ref/") || strings.Contains(string(kv.Key), "/alive/"); isRef != (kv.Lease != 0) && !strings.Contains(string(kv.Key), "/rest/") {
				t.Errorf("%s has the lease %d", kv.Key, kv.Lease)
			}
		}
		return out
	}
	// printf 'cni:app=web;' | sha256sum
	const hash = "c835b05560143e9e8de568502817a33be31279a868e401a6d86bc1861516bf93"
	want := map[string]string{"/id/300": "cni:app=web;", "/labels/" + hash: "300", "/fence/300": "", "/ref/node-1/300": "", "/layout": "2", "/alive/node-1": "state-of-node-1 boot"}
	if got := keys(); !equal(got, want) {
		t.Errorf("keys %v, want %v", got, want)
	}
	if err := st.Release(t.Context(), allocator.Reference{Number: 300, Revision: claim.Revision}); err != nil {
		t.Fatal(err)
	}
	unused, err := storetest.Unused(t.Context(), st)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Collect(t.Context(), unused, time.Hour); err != nil {
		t.Fatal(err)
	}
	if got, want := keys(), (map[string]string{"/rest/300": hash, "/layout": "2", "/alive/node-1": "state-of-node-1 boot"}); !equal(got, want) {
		t.Errorf("keys after collection %v, want %v", got, want)
	}
}

func equal(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

func TestTwoSetsWithOneHashNeverShareANumber(t *testing.T) {
	c := newCluster(t)
	st := c.Node("a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	web, db := storetest.Labels(t, "web"), storetest.Labels(t, "db")
	for _, labels := range []string{"300", "300 " + db.Text()} { // both forms of the layout
		// Imitate a collision: the key with the hash of web has db's label set.
		for k, v := range map[string]string{"/labels/" + hashText(web): labels, "/id/300": db.Text()} {
			if _, err := c.admin.Put(t.Context(), testPrefix+k, v); err != nil {
				t.Fatal(err)
			}
		}
		if claim, err := st.Claim(t.Context(), web, 0, 301); !errors.Is(err, allocator.ErrCorrupt) {
			t.Errorf("labels/ is %q: claim: %+v, %v, want ErrCorrupt", labels, claim, err)
		}
	}
	if claim, err := st.Restore(t.Context(), identity.Identity{Number: 301, Labels: web}); !errors.Is(err, allocator.ErrCorrupt) {
		t.Errorf("restore: %+v, %v, want ErrCorrupt", claim, err)
	}
}

func TestDamagedKeysHideNothingElse(t *testing.T) {
	c := newCluster(t)
	st := c.Node("a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	for k, v := range map[string]string{
		"/id/301": "no labels", "/id/x": "cni:app=x;", "/id/12": "cni:app=y;", "/id/0302": "cni:app=z;", "/id/304": "reserved:host=;",
		"/labels/00": "junk", "/labels/01": "7 cni:app=q;", "/labels/02": "303 junk", "/ref/a/x": "",
	} {
		if _, err := c.admin.Put(t.Context(), testPrefix+k, v); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := st.Claim(t.Context(), storetest.Labels(t, "web"), 0, 300); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Claim(t.Context(), storetest.Labels(t, "db"), 0, 301); !errors.Is(err, allocator.ErrOccupied) {
		t.Errorf("claim of a corrupt number: %v, want ErrOccupied", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var first allocator.Update
	if err := st.Follow(ctx, func(u allocator.Update) { first = u; cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("follow: %v", err)
	}
	if len(first.Upserts) != 1 || first.Upserts[0].Identity.Number != 300 {
		t.Errorf("listing %+v, want only 300", first)
	}
	if refs, err := st.References(t.Context()); err != nil || len(refs) != 1 {
		t.Errorf("references %v, %v, want only 300", refs, err)
	}
	if unused, err := storetest.Unused(t.Context(), st); err != nil || len(unused) != 0 {
		t.Errorf("unreferenced %v, %v, want none", unused, err)
	}
}

func TestAnEmptiedEtcdIsNoticedAndListedAgain(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t)
	st := c.Node("a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	web := storetest.Labels(t, "web")
	for i := range 20 { // revisions that the new history has not reached
		if _, err := st.Claim(t.Context(), web, 0, identity.Numeric(300+i)); err != nil {
			t.Fatal(err)
		}
	}
	updates := make(chan allocator.Update, 64)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			st.Follow(ctx, func(u allocator.Update) { updates <- u }) //nolint:errcheck // tried again until the end
		}
	}()
	defer func() { cancel(); <-done }()
	first := <-updates
	if !first.Complete || len(first.Upserts) != 1 {
		t.Fatalf("first update %+v", first)
	}
	c.Down()
	c.Wipe()
	c.Up()
	servicetest.Eventually(t, "a new session", func() bool {
		fresh, err := st.Join(t.Context())
		return err == nil && fresh
	})
	servicetest.Eventually(t, "a listing without the identities", func() bool {
		select {
		case u := <-updates:
			if u.Complete && u.Cluster == first.Cluster {
				t.Errorf("the new etcd is cluster %x, as the one before", u.Cluster)
			}
			return u.Complete && u.Reset && len(u.Upserts) == 0
		default:
			return false
		}
	})
}
