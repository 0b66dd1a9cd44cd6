// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/snapshot"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// Tests of a process that continues where the previous one stopped.

// neighbours are a node with endpoints and one that follows it, of which the
// process has ended.
type neighbours struct {
	*etcdtest.Server
	t   testing.TB
	a   *node
	dir string // of b
	web identity.Identity
}

func newNeighbours(t *testing.T) *neighbours {
	n := &neighbours{Server: etcdtest.Start(t), t: t, dir: t.TempDir()}
	n.a = startNode(t, n.Endpoint, "a", t.TempDir(), quick())
	n.a.register(1, prefix(1))
	n.web = n.a.endpoint("c1", "web", address(1, 5))
	n.a.endpoint("c2", "web", address(1, 6))
	b := n.b()
	b.register(2, prefix(2))
	n.sees(b)
	b.published()
	b.seesNode("a", true)
	servicetest.Eventually(t, "both records", func() bool { return len(b.reg.Nodes()) == 2 })
	if got := b.store.Listings(); got != 1 {
		t.Errorf("%d listings of a new node", got)
	}
	b.stop()
	return n
}

// b returns the next process of the node that follows.
func (n *neighbours) b() *node { return startNode(n.t, n.Endpoint, "b", n.dir, quick()) }

// sees waits until b has the addresses that a has published.
func (n *neighbours) sees(b *node) {
	n.t.Helper()
	for _, host := range []int{5, 6} {
		b.seesMapping(address(1, host), fmt.Sprint("a ", n.web.Number))
	}
	b.seesMapping(nodeAddress(1), "a 6")
}

// changed lets a change while b is unavailable, and returns what b has to find.
func (n *neighbours) changed() func(b *node) {
	n.t.Helper()
	if _, err := n.a.Release(n.t.Context(), allocator.EndpointHolder("c2", "eth0")); err != nil {
		n.t.Fatal(err)
	}
	fresh := n.a.endpoint("c3", "fresh", address(1, 7))
	moved := n.a.endpoint("c1", "other", address(1, 5))
	n.a.published()
	return func(b *node) {
		n.t.Helper()
		b.seesMapping(address(1, 7), fmt.Sprint("a ", fresh.Number))
		b.seesMapping(address(1, 5), fmt.Sprint("a ", moved.Number))
		b.seesMapping(address(1, 6), "")
		for _, id := range []identity.Identity{fresh, moved} {
			if got, ok := b.hub.Get(id.Number); !ok || got.Labels.Text() != id.Labels.Text() {
				n.t.Errorf("identity %d is %v, want %v", id.Number, got, id)
			}
		}
	}
}

// TestRestartGoesOnWhereItWas (INV-87): a restarted node reads only the changes since its last revision.
func TestRestartGoesOnWhereItWas(t *testing.T) {
	t.Parallel() // it mostly waits
	n := newNeighbours(t)
	check := n.changed()
	b := n.b()
	b.connected()
	check(b)
	if got := b.store.Listings(); got != 0 {
		t.Errorf("%d listings", got)
	}
	// The process after that, whose point comes from a resumed watch, resumes, too.
	b.stop()
	again := n.b()
	again.connected()
	again.endpoint("c9", "web", address(2, 9))
	n.a.seesMapping(address(2, 9), fmt.Sprint("b ", n.web.Number))
	check(again)
	if got := again.store.Listings(); got != 0 {
		t.Errorf("%d listings of the process after that", got)
	}
}

// TestNodesAreKnownWhileEtcdIsAway (INV-87): the mappings of other nodes are served before etcd answers.
func TestNodesAreKnownWhileEtcdIsAway(t *testing.T) {
	t.Parallel()
	n := newNeighbours(t)
	n.Down()
	b := n.b()
	n.sees(b) // at once: nothing else can bring it
	if known := b.reg.Nodes(); len(known) != 2 {
		t.Errorf("nodes %+v", known)
	}
	if found, err := b.reg.Find(address(1, 5)); err != nil || found.Mapping.Node != "a" {
		t.Errorf("find: %+v, %v", found, err)
	}
	n.Up()
	check := n.changed()
	check(b)
	if got := b.store.Listings(); got != 0 {
		t.Errorf("%d listings after the outage", got)
	}
}

// TestRestartListsWhatItCannotGoOnFrom: a restarted node lists everything if etcd's history was compacted, is another
// history, or is shorter.
func TestRestartListsWhatItCannotGoOnFrom(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(n *neighbours) (check func(*node)){
		"compacted": func(n *neighbours) func(*node) {
			check := n.changed()
			n.Compact()
			return check
		},
		"back to a backup": func(n *neighbours) func(*node) {
			n.Down()
			n.Backup()
			n.Up()
			n.further()
			n.Down()
			n.Restore()
			n.Up()
			return n.changed()
		},
		"back to a backup, and further than what was saved": func(n *neighbours) func(*node) {
			n.Down()
			n.Backup()
			n.Up()
			saved := n.further()
			n.Down()
			n.Restore()
			n.Up()
			check := n.changed()
			admin := n.Client()
			for revision := int64(0); revision <= saved+10; {
				resp, err := admin.Put(n.t.Context(), "/elsewhere", "x")
				if err != nil {
					n.t.Fatal(err)
				}
				revision = resp.Header.Revision
			}
			return check
		},
		"back to a backup that lacks a deletion only": func(n *neighbours) func(*node) {
			b := n.b() // it writes its record, so the backup must come later
			b.connected()
			b.published()
			n.Down()
			n.Backup()
			n.Up()
			n.a.published()
			if _, err := n.a.Release(n.t.Context(), allocator.EndpointHolder("c2", "eth0")); err != nil {
				n.t.Fatal(err)
			}
			b.seesMapping(address(1, 6), "")
			b.stop()
			saved := b.cluster.Origin().Revision
			n.a.stop() // it would delete the address again
			n.Down()
			n.Restore()
			n.Up()
			admin := n.Client()
			for revision := int64(0); revision <= saved+10; {
				resp, err := admin.Put(n.t.Context(), "/elsewhere", "x")
				if err != nil {
					n.t.Fatal(err)
				}
				revision = resp.Header.Revision
			}
			// The backup has the address, and so must every node, until its own node deletes it again.
			return func(b *node) { b.seesMapping(address(1, 6), fmt.Sprint("a ", n.web.Number)) }
		},
		"another etcd": func(n *neighbours) func(*node) {
			n.Down()
			n.Wipe()
			n.Up()
			return n.changed()
		},
		"a file of a version without nodes": func(n *neighbours) func(*node) {
			if err := os.Remove(filepath.Join(n.dir, snapshot.KnownFile)); err != nil {
				n.t.Fatal(err)
			}
			return n.changed()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNeighbours(t)
			check := prepare(n)
			b := n.b()
			b.connected()
			check(b)
			if got := b.store.Listings(); got != 1 {
				t.Errorf("%d listings", got)
			}
		})
	}
}

// further lets b see another endpoint of a, and returns the revision that b was at
// in the end.
func (n *neighbours) further() int64 {
	n.t.Helper()
	late := n.a.endpoint("c4", "late", address(1, 8))
	b := n.b()
	b.seesMapping(address(1, 8), fmt.Sprint("a ", late.Number))
	b.stop()
	return b.cluster.Origin().Revision
}

// TestCompactionBehindAnIdleNodeCostsNoListing: progress notifications advance the position of a node that receives no
// changes.
func TestCompactionBehindAnIdleNodeCostsNoListing(t *testing.T) {
	t.Parallel()
	n := newNeighbours(t)
	cfg := quick()
	cfg.Quarantine = 400 * time.Millisecond // asks for progress each 100 ms
	b := startNode(t, n.Endpoint, "b", n.dir, cfg)
	b.connected()
	admin := n.Client()
	if _, err := admin.Put(t.Context(), "/elsewhere", "x"); err != nil {
		t.Fatal(err)
	}
	// Nodes still write for a moment: the point has to reach the newest revision.
	servicetest.Eventually(t, "the point to move on", func() bool {
		resp, err := admin.Get(t.Context(), "/elsewhere")
		if err != nil {
			t.Fatal(err)
		}
		return b.cluster.Origin().Revision >= resp.Header.Revision
	})
	point := b.cluster.Origin().Revision
	b.stop()
	// Not beyond the point: a node may have written since.
	if _, err := admin.Compact(t.Context(), point, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	again := n.b()
	again.connected()
	check := n.changed()
	check(again)
	if got := b.store.Listings() + again.store.Listings(); got != 0 {
		t.Errorf("%d listings", got)
	}
}

// TestListingsAreSpread: a listing is delayed randomly, and a resumed watch is not.
func TestListingsAreSpread(t *testing.T) {
	t.Parallel()
	s := etcdtest.Start(t)
	sess, err := session.Open(session.Config{
		Client: session.Client{Endpoints: []string{s.Endpoint}}, Prefix: testPrefix, Node: "n", TTL: time.Hour,
		AliveTTL: time.Minute, Incarnation: "i", Boot: "boot",
		Timeout: 20 * time.Second, Listen: time.Second, Log: log.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sess.Close(); err != nil {
			t.Error(err)
		}
	}()
	asked := 0
	store := New(sess, NewNodes(sess), Readers{
		Observe: func(registry.Update) {},
		Spread:  func() time.Duration { asked++; return time.Millisecond },
	})
	for _, want := range []int{1, 2} {
		ctx, cancel := context.WithCancel(t.Context())
		err := store.Follow(ctx, func(allocator.Update) { cancel() })
		if ctx.Err() == nil {
			t.Fatalf("follow: %v", err)
		}
		if asked != want || store.Listings() != uint64(want) {
			t.Errorf("asked %d times, %d listings", asked, store.Listings())
		}
	}
}
