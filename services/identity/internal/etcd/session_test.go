// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// TestRestartWritesNothing: a restarted node finds its references in etcd, under the lease of the previous process.
func TestRestartWritesNothing(t *testing.T) {
	t.Parallel() // it mostly waits
	const held = 200
	s := etcdtest.Start(t)
	admin := s.Client()
	cfg := quick()
	cfg.Reconcile = time.Hour // the collector key may be anyone's
	a := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	a.connected()
	for i := range held {
		if _, err := a.Hold(t.Context(), holder(i), storetest.Labels(t, fmt.Sprint(i)), false); err != nil {
			t.Fatal(err)
		}
	}
	a.stop()
	state := func() (revision int64, leases int) {
		t.Helper()
		get, err := admin.Get(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		l, err := admin.Leases(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return get.Header.Revision, len(l.Leases)
	}
	revision, leases := state()
	a = startNode(t, s.Endpoint, "a", a.dir, cfg)
	a.settled()
	if r, l := state(); r != revision || l != leases {
		t.Errorf("a restart with %d held identities: revision %d, %d leases; before it %d and %d", held, r, l, revision, leases)
	}
	// The adopted session is a whole one.
	id, err := a.Hold(t.Context(), holder(held), storetest.Labels(t, "new"), false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Release(t.Context(), holder(0)); err != nil {
		t.Fatal(err)
	}
	a.settled()
	if _, refs := content(t, admin); len(refs) != held || refs[fmt.Sprint("a/", id.Number)] != 1 {
		t.Errorf("%d references, want %d, one of them to %d", len(refs), held, id.Number)
	}
}

// TestSessionThatEndedWhileTheNodeWasOffIsNotAdopted: if the leases were revoked while the node was stopped, its next
// process opens a new session and writes the references again.
func TestSessionThatEndedWhileTheNodeWasOffIsNotAdopted(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	admin := s.Client()
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	id, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "web"), false)
	if err != nil {
		t.Fatal(err)
	}
	a.stop()
	revokeAll(t, admin)
	a = startNode(t, s.Endpoint, "a", a.dir, quick())
	a.settled()
	if _, refs := content(t, admin); refs[fmt.Sprint("a/", id.Number)] != 1 {
		t.Errorf("references %v, want that to %d again", refs, id.Number)
	}
}

func revokeAll(t *testing.T, admin *clientv3.Client) {
	t.Helper()
	leases, err := admin.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases.Leases {
		if _, err := admin.Revoke(t.Context(), l.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOneNodeHasAName: a second machine with the name of a live node gets no name, and does not take it from the first
// machine.
func TestOneNodeHasAName(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.aliveTTL = 15 * time.Second // longer than a restart takes
	first := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	id, err := first.Hold(t.Context(), holder(1), storetest.Labels(t, "web"), false)
	if err != nil {
		t.Fatal(err)
	}
	second := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	servicetest.Eventually(t, "the refusal", func() bool { return strings.Contains(second.Summary().StoreError, "is taken") })
	if ready, _ := second.Ready(); ready || second.Summary().Ready {
		t.Error("the second node calls itself ready")
	}
	if up, _ := second.Connected(); up || !second.Summary().Connected {
		t.Errorf("a session: %t, etcd reached: %t; want no session with an etcd that has answered", up, second.Summary().Connected)
	}
	for _, app := range []string{"web", "new"} { // known, and not
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := second.Hold(ctx, holder(1), storetest.Labels(t, app), false)
		cancel()
		if !errors.Is(err, allocator.ErrUnavailable) || !errors.Is(err, allocator.ErrNameTaken) || !strings.Contains(err.Error(), "--node") {
			t.Errorf("hold of %s: %v, want ErrNameTaken that says what to do", app, err)
		}
	}
	first.settled()
	if _, refs := content(t, s.Client()); len(refs) != 1 || refs[fmt.Sprint("a/", id.Number)] != 1 {
		t.Errorf("references %v, want the first node's reference", refs)
	}
	// A process with the same state directory is the same node, even if it starts at once.
	first.stop()
	first = startNode(t, s.Endpoint, "a", first.dir, cfg)
	first.connected()
	if up, _ := second.Connected(); up {
		t.Error("the second node took the name while the first restarted")
	}
	// Once the first is off, its name is free.
	first.stop()
	second.connected()
	if ready, _ := second.Ready(); !ready {
		t.Error("the second node owns the name and is not ready")
	}
	first = startNode(t, s.Endpoint, "a", first.dir, cfg)
	servicetest.Eventually(t, "the refusal of the first", func() bool { return errors.Is(nameError(t, first), allocator.ErrNameTaken) })
}

func nameError(t *testing.T, n *node) error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := n.Hold(ctx, holder(99), storetest.Labels(t, "another"), false)
	return err
}

// logged counts messages that contain a text, with their attributes.
type logged struct {
	slog.Handler
	mu   sync.Mutex
	said []string
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }

func (l *logged) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	said := r.Message
	r.Attrs(func(a slog.Attr) bool { said += " " + a.String(); return true })
	l.said = append(l.said, said)
	return nil
}

func (l *logged) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, m := range l.said {
		if strings.Contains(m, text) {
			n++
		}
	}
	return n
}

// TestCompactionOfOtherKeysMakesNoNodeListAgain: while identities do not change, the watch receives no events. Only
// progress notifications show that it has seen all revisions.
func TestCompactionOfOtherKeysMakesNoNodeListAgain(t *testing.T) {
	t.Parallel() // it mostly waits
	const nodes = 10
	s := etcdtest.Start(t)
	admin := s.Client()
	said := &logged{}
	cfg := quick()
	cfg.Log, cfg.Quarantine = slog.New(said), 2*time.Second
	var all []*node
	for i := range nodes {
		all = append(all, startNode(t, s.Endpoint, fmt.Sprint("n", i), t.TempDir(), cfg))
	}
	for _, n := range all {
		n.connected()
	}
	if _, err := all[0].Hold(t.Context(), holder(1), storetest.Labels(t, "x"), false); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if _, err := admin.Put(t.Context(), "/elsewhere", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	written := time.Now()
	heard := func(n *node) bool { return n.Summary().Connected && n.Summary().Heard.After(written) }
	for _, n := range all {
		servicetest.Eventually(t, "that a node has heard everything", func() bool { return heard(n) })
	}
	s.Compact()
	s.Down()
	s.Up()
	written = time.Now()
	for _, n := range all {
		servicetest.Eventually(t, "that a node hears etcd again", func() bool { return heard(n) })
	}
	// The collector's watch of references may be a moment behind.
	if n := said.count("listing again prefix=" + testPrefix + "/id/"); n != 0 {
		t.Errorf("%d of %d nodes listed everything again", n, nodes)
	}
}

// TestReferencesAreWrittenInFewTransactions: a node whose lease ended writes all its references again, as all nodes do
// after a long outage.
func TestReferencesAreWrittenInFewTransactions(t *testing.T) {
	t.Parallel() // it mostly waits
	const held = 200
	s := etcdtest.Start(t)
	admin := s.Client()
	cfg := quick()
	cfg.Reconcile = time.Hour
	a := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	for i := range held {
		if _, err := a.Hold(t.Context(), holder(i), storetest.Labels(t, fmt.Sprint(i)), false); err != nil {
			t.Fatal(err)
		}
	}
	a.stop()
	revokeAll(t, admin)
	revision := func() int64 {
		t.Helper()
		get, err := admin.Get(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		return get.Header.Revision
	}
	before := revision()
	a = startNode(t, s.Endpoint, "a", a.dir, cfg)
	a.settled()
	if n := revision() - before; n > 5 { // the name, and 64 in a transaction
		t.Errorf("%d transactions for %d references", n, held)
	}
	if _, refs := content(t, admin); len(refs) != held {
		t.Errorf("%d references, want %d", len(refs), held)
	}
	a.stop() // nothing is held any more, like after a reboot
	if _, err := admin.Delete(t.Context(), testPrefix+"/alive/a"); err != nil {
		t.Fatal(err)
	}
	before = revision()
	a = startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	a.settled()
	if _, refs := content(t, admin); len(refs) != 0 {
		t.Errorf("%d references, want none", len(refs))
	}
	if n := revision() - before; n > 5 {
		t.Errorf("%d transactions to drop %d references", n, held)
	}
}
