// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/confirmed"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/server"
	"github.com/sluice-net/sluice/services/identity/internal/snapshot"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// Tests of whole nodes over a real etcd: store, allocator, files, readers.

type hub = watch.Hub[identity.Numeric, identity.Identity]

type node struct {
	*allocator.Allocator
	t       testing.TB
	reg     *registry.Registry
	hub     *hub
	cluster *server.ClusterHub
	session *session.Session
	store   *Store
	dir     string
	stop    func()

	files    *snapshot.Dir
	exchange *confirmed.Exchange
}

type nodeConfig struct {
	allocator.Config
	ttl, aliveTTL, holdLosses time.Duration
	stale                     time.Duration  // StaleMappings
	client                    session.Client // with what etcd asks for; without endpoints
}

func quick() nodeConfig {
	return nodeConfig{ttl: time.Hour, aliveTTL: time.Minute, holdLosses: time.Hour, Config: allocator.Config{
		Quota: 10_000, StoreTimeout: 20 * time.Second, Heartbeat: 100 * time.Millisecond, Reconcile: 50 * time.Millisecond,
		Grace: time.Hour, Quarantine: time.Hour, KnownDelay: 10 * time.Millisecond, RetryMin: 20 * time.Millisecond, RetryMax: 200 * time.Millisecond,
		Log: log.Discard(),
	}}
}

// startNode starts a process of a node on the state that dir has.
func startNode(t testing.TB, endpoint, name, dir string, cfg nodeConfig) *node {
	t.Helper()
	files, err := snapshot.Open(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	last, err := files.Load()
	if err != nil {
		t.Fatal(err)
	}
	cfg.client.Endpoints = strings.Split(endpoint, ",")
	sess, err := session.Open(session.Config{
		Client: cfg.client, Prefix: testPrefix, Node: name,
		TTL: cfg.ttl, AliveTTL: cfg.aliveTTL,
		Incarnation: last.Incarnation, Boot: files.BootID(), Last: last.Holds.Session,
		Timeout: cfg.StoreTimeout, Listen: cfg.Quarantine / 4, Log: cfg.Log,
	})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, dir: dir, hub: server.NewHub(), cluster: server.NewClusterHub(), session: sess}
	nodes := NewNodes(sess)
	n.reg = registry.New(registry.Config{
		Node: name, Incarnation: last.Incarnation, Version: "test", Timeout: cfg.StoreTimeout, Pause: time.Millisecond,
		RetryMin: cfg.RetryMin, RetryMax: cfg.RetryMax, RetryRanges: cfg.Reconcile, HoldLosses: cfg.holdLosses,
		StaleMappings: cfg.stale, Log: cfg.Log,
	}, nodes, files, n.cluster, last.Registration)
	n.files = files
	n.exchange = confirmed.New(confirmed.Options{
		Store: NewConfirmed(sess), Node: mappings{n}, Incarnation: last.Incarnation, Rest: 100 * time.Millisecond,
		Interval: 50 * time.Millisecond, Log: cfg.Log,
	})
	cfg.Leading = n.exchange.Lead
	n.store = New(sess, nodes, Readers{Mirror: files, Observe: n.reg.Observe})
	n.Allocator, err = allocator.New(cfg.Config, n.store, files, n.hub,
		server.EndpointPublisher{EndpointHub: server.NewEndpointHub(), Registry: n.reg}, last.Holds, last.Known,
		last.Cached)
	if err != nil {
		t.Fatal(err)
	}
	n.store.Resume(last.Keys)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { n.Run(ctx) })                  //nolint:errcheck // nil
	running.Go(func() { n.reg.Run(ctx, n.Connected) }) //nolint:errcheck // nil
	running.Go(func() { n.exchange.Run(ctx) })         //nolint:errcheck // nil
	n.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		if err := errors.Join(sess.Close(), files.Close()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(n.stop)
	return n
}

func (n *node) connected() {
	n.t.Helper()
	servicetest.Eventually(n.t, "the session", func() bool { s := n.Summary(); return s.Connected && s.Ready })
}

func (n *node) settled() {
	n.t.Helper()
	servicetest.Eventually(n.t, "that nothing waits for etcd", func() bool { s := n.Summary(); return s.Connected && s.PendingWrites == 0 })
}

func holder(i int) allocator.Holder { return allocator.EndpointHolder(fmt.Sprint("c", i), "eth0") }

// content reads what etcd has and checks that id and labels agree.
func content(t testing.TB, admin *clientv3.Client) (numbers map[string]identity.Numeric, refs map[string]int) {
	t.Helper()
	resp, err := admin.Get(t.Context(), testPrefix+"/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	numbers, refs = map[string]identity.Numeric{}, map[string]int{}
	byLabels := map[string]string{}
	for _, kv := range resp.Kvs {
		kind, rest, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), testPrefix+"/"), "/")
		switch kind {
		case "id":
			n, err := strconv.Atoi(rest)
			if err != nil {
				t.Fatal(err)
			}
			if _, twice := numbers[string(kv.Value)]; twice {
				t.Errorf("%s has two numbers", kv.Value)
			}
			numbers[string(kv.Value)] = identity.Numeric(n)
		case "labels":
			byLabels[rest] = string(kv.Value)
		case "ref":
			refs[rest]++
		}
	}
	if len(byLabels) != len(numbers) {
		t.Errorf("%d label sets and %d numbers", len(byLabels), len(numbers))
	}
	for text, n := range numbers {
		l, err := label.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := byLabels[hashText(l)]; got != fmt.Sprint(n) {
			t.Errorf("%s is %d below id/ and %q below labels/", text, n, got)
		}
	}
	return numbers, refs
}

// TestEightNodesAgreeOnEveryNumber proves INV-13.
func TestEightNodesAgreeOnEveryNumber(t *testing.T) {
	t.Parallel() // it mostly waits
	const nodes, sets = 8, 60
	s := etcdtest.Start(t)
	var all [nodes]*node
	cfg := quick()
	cfg.StoreTimeout = time.Minute // eight nodes send all their requests at once
	for i := range nodes {
		all[i] = startNode(t, s.Endpoint, fmt.Sprint("node", i), t.TempDir(), cfg)
	}
	var got [nodes][sets]identity.Numeric
	var wg sync.WaitGroup
	for i, n := range all {
		hold := func(k int) {
			id, err := n.Hold(t.Context(), holder(k), storetest.Labels(t, fmt.Sprint(k)), false)
			if err != nil {
				t.Errorf("node %d, set %d: %v", i, k, err)
			}
			got[i][k] = id.Number
		}
		if i%2 == 0 { // the calls are made one after the other, or all at once
			wg.Go(func() {
				for _, k := range rand.Perm(sets) {
					hold(k)
				}
			})
			continue
		}
		for _, k := range rand.Perm(sets) {
			wg.Go(func() { hold(k) })
		}
	}
	wg.Wait()
	unique := map[identity.Numeric]int{}
	for k := range sets {
		for i := range nodes {
			if got[i][k] != got[0][k] {
				t.Errorf("set %d is %d on node 0 and %d on node %d", k, got[0][k], got[i][k], i)
			}
		}
		unique[got[0][k]] = k
	}
	if len(unique) != sets {
		t.Errorf("%d numbers for %d sets", len(unique), sets)
	}
	numbers, refs := content(t, s.Client())
	if len(numbers) != sets || len(refs) != nodes*sets {
		t.Errorf("etcd has %d identities and %d references, want %d and %d", len(numbers), len(refs), sets, nodes*sets)
	}
	created := uint64(0)
	for _, n := range all {
		created += n.Counters().Allocated
	}
	if created != sets {
		t.Errorf("%d identities were created, want %d", created, sets)
	}
}

func TestEtcdKilledInTheMiddleChangesNoAnswer(t *testing.T) {
	t.Parallel() // it mostly waits
	const nodes, sets = 3, 40
	s := etcdtest.Start(t)
	var all [nodes]*node
	for i := range nodes {
		all[i] = startNode(t, s.Endpoint, fmt.Sprint("node", i), t.TempDir(), quick())
		all[i].connected()
	}
	var mu sync.Mutex
	got := map[int]identity.Numeric{}
	answered := 0
	progress := make(chan struct{}, nodes*sets)
	var wg sync.WaitGroup
	for i, n := range all {
		wg.Go(func() {
			for _, k := range rand.Perm(sets) {
				var id identity.Identity
				for {
					var err error
					id, err = n.Hold(t.Context(), holder(k), storetest.Labels(t, fmt.Sprint(k)), false)
					if err == nil {
						break
					}
					if !errors.Is(err, allocator.ErrUnavailable) {
						t.Errorf("node %d, set %d: %v", i, k, err)
						return
					}
				}
				mu.Lock()
				if was, ok := got[k]; ok && was != id.Number {
					t.Errorf("set %d is %d and %d", k, was, id.Number)
				}
				got[k] = id.Number
				answered++
				mu.Unlock()
				progress <- struct{}{}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for kills := 0; kills < 3; {
		for range 15 {
			select {
			case <-progress:
			case <-done:
			}
		}
		s.Down()
		s.Up()
		kills++
	}
	<-done
	for _, n := range all {
		n.settled()
	}
	numbers, refs := content(t, s.Client())
	for k, n := range got {
		if have := numbers[storetest.Labels(t, fmt.Sprint(k)).Text()]; have != n {
			t.Errorf("set %d was answered with %d and is %d", k, n, have)
		}
	}
	if answered != nodes*sets || len(refs) != nodes*sets {
		t.Errorf("%d answers and %d references, want %d of each", answered, len(refs), nodes*sets)
	}
	for i, n := range all {
		if c := n.Counters(); c.Conflicts != 0 {
			t.Errorf("node %d had %d conflicts", i, c.Conflicts)
		}
	}
}

// TestCollectionNeverTakesWhatIsHeld proves INV-14.
func TestCollectionNeverTakesWhatIsHeld(t *testing.T) {
	t.Parallel() // it mostly waits
	const workers, sets, rounds = 4, 6, 120
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.Grace, cfg.Quarantine, cfg.Reconcile = 0, time.Second, 10*time.Millisecond
	var all [workers]*node
	for i := range workers {
		all[i] = startNode(t, s.Endpoint, fmt.Sprint("node", i), t.TempDir(), cfg)
		all[i].connected()
	}
	admin := s.Client()
	stands := func(id identity.Identity) {
		resp, err := admin.Get(t.Context(), testPrefix+"/id/"+fmt.Sprint(id.Number))
		if err != nil {
			t.Error(err)
		} else if len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != id.Labels.Text() {
			t.Errorf("%s is held, and etcd has %v", id, resp.Kvs)
		}
	}
	var collectors, work sync.WaitGroup
	// Next to the collector, run a node that collects without the role: safety must not depend on a single collector.
	rogue := newStore(t, s.Endpoint, "rogue")
	stop := make(chan struct{})
	rogueTook := 0
	collectors.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			unused, err := storetest.Unused(t.Context(), rogue)
			if err == nil {
				var gone []identity.Numeric
				gone, err = rogue.Collect(t.Context(), unused, time.Second)
				rogueTook += len(gone)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for i, n := range all {
		work.Go(func() {
			for r := range rounds {
				id, err := n.Hold(t.Context(), holder(r), storetest.Labels(t, fmt.Sprint(rand.IntN(sets))), true)
				if err != nil {
					t.Errorf("node %d: %v", i, err)
					return
				}
				stands(id)
				if _, err := n.Release(t.Context(), holder(r)); err != nil {
					t.Errorf("node %d: %v", i, err)
					return
				}
			}
			id, err := n.Hold(t.Context(), holder(-1), storetest.Labels(t, fmt.Sprint("last", i)), true)
			if err != nil {
				t.Errorf("node %d: %v", i, err)
				return
			}
			stands(id)
		})
	}
	work.Wait()
	close(stop)
	collectors.Wait()
	servicetest.Eventually(t, "only what is held is left", func() bool {
		numbers, refs := content(t, admin)
		return len(numbers) == workers && len(refs) == workers
	})
	took := rogueTook
	for i, n := range all {
		c := n.Counters()
		took += int(c.Collected)
		if c.Conflicts != 0 {
			t.Errorf("node %d had %d conflicts", i, c.Conflicts)
		}
	}
	if took < sets {
		t.Errorf("%d identities were collected: the race was not run", took)
	}
	t.Logf("%d holds, %d collections", workers*rounds, took)
}

func TestLeaseThatRanOutIsRestoredBeforeAnythingIsCollected(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.Heartbeat, cfg.Reconcile = time.Hour, time.Hour // no background work looks at the lease
	dir := t.TempDir()
	silent := startNode(t, s.Endpoint, "silent", dir, cfg)
	id, err := silent.Hold(t.Context(), holder(1), storetest.Labels(t, "web"), true)
	if err != nil {
		t.Fatal(err)
	}
	admin := s.Client()
	revokeAll(t, admin)
	if _, refs := content(t, admin); len(refs) != 0 {
		t.Fatalf("references %v without leases", refs)
	}
	// The node wakes up: it finds its lease gone at the next thing it does.
	other, err := silent.Hold(t.Context(), holder(2), storetest.Labels(t, "db"), true)
	if err != nil {
		t.Fatal(err)
	}
	silent.settled()
	numbers, refs := content(t, admin)
	if len(refs) != 2 || numbers[id.Labels.Text()] != id.Number || numbers[other.Labels.Text()] != other.Number {
		t.Errorf("etcd has %v and references %v, want only the identities of %s and %s", numbers, refs, id, other)
	}
}

func TestGraceStartsOverWhenTheStoreComesBack(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.StoreTimeout = 2 * time.Second // waited for while etcd is unavailable
	cfg.Grace = 8 * time.Second
	n := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	id, err := n.Hold(t.Context(), holder(1), storetest.Labels(t, "web"), true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Release(t.Context(), holder(1)); err != nil {
		t.Fatal(err)
	}
	released := time.Now()
	n.settled()
	s.Down()
	servicetest.Eventually(t, "the node notices", func() bool { return !n.Summary().Connected })
	servicetest.Eventually(t, "the end of the grace period", func() bool { return time.Since(released) > cfg.Grace })
	s.Up()
	n.connected()
	if got, err := n.Hold(t.Context(), holder(1), id.Labels, true); err != nil || got.Number != id.Number {
		t.Errorf("hold: %s, %v, want %s: the grace period begins with the session", got, err, id)
	}
}

func TestWatchersSeeWhatHappenedWhileEtcdWasAway(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.Grace, cfg.Quarantine = 0, time.Second
	a, b := startNode(t, s.Endpoint, "a", t.TempDir(), cfg), startNode(t, s.Endpoint, "b", t.TempDir(), cfg)
	a.connected()
	b.connected()
	sub, err := a.hub.Subscribe(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	have := map[identity.Numeric]string{}
	var token []byte
	until := func(what string, ok func() bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), servicetest.Patience)
		defer cancel()
		for !ok() {
			e, err := sub.Next(ctx)
			if err != nil {
				t.Fatalf("waiting for %s: %v; have %v", what, err, have)
			}
			switch e.Kind {
			case watch.Upsert:
				have[e.Key] = e.Value.Labels.Text()
			case watch.Delete:
				delete(have, e.Key)
			}
			if e.Token != nil {
				token = e.Token
			}
		}
	}
	until("the end of the listing", func() bool { return token != nil })
	web, err := b.Hold(t.Context(), holder(1), storetest.Labels(t, "web"), true)
	if err != nil {
		t.Fatal(err)
	}
	until("web", func() bool { return have[web.Number] == web.Labels.Text() })
	sub.Close()

	s.Down()
	s.Up()
	b.connected()
	if _, err := b.Release(t.Context(), holder(1)); err != nil {
		t.Fatal(err)
	}
	db, err := b.Hold(t.Context(), holder(2), storetest.Labels(t, "db"), true)
	if err != nil {
		t.Fatal(err)
	}
	b.settled()
	s.Compact()

	if sub, err = a.hub.Subscribe(token); err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	until("db instead of web", func() bool { return have[db.Number] == db.Labels.Text() && have[web.Number] == "" })
}

// TestRestartWithoutEtcdKnowsWhatItKnew proves INV-15.
func TestRestartWithoutEtcdKnowsWhatItKnew(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	a, b := startNode(t, s.Endpoint, "a", t.TempDir(), quick()), startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.connected()
	web, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "web"), true)
	if err != nil {
		t.Fatal(err)
	}
	db, err := b.Hold(t.Context(), holder(1), storetest.Labels(t, "db"), true)
	if err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a knows b's", func() bool { _, _, err := a.Get(db.Number); return err == nil })
	a.stop() // writes the cache at the end
	s.Down()
	a = startNode(t, s.Endpoint, "a", a.dir, quick())
	if ready, _ := a.Ready(); !ready {
		t.Fatal("not ready, although there is a cache")
	}
	for i, want := range []identity.Identity{web, db} {
		if got, err := a.Hold(servicetest.Context(t), holder(10+i), want.Labels, true); err != nil || !got.Equal(want) {
			t.Errorf("hold: %s, %v, want %s", got, err, want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = a.Hold(ctx, holder(20), storetest.Labels(t, "new"), true)
	if !errors.Is(err, allocator.ErrUnavailable) || !strings.Contains(err.Error(), s.Endpoint) {
		t.Errorf("new set: %v, want ErrUnavailable with %s", err, s.Endpoint)
	}
	s.Up()
	a.settled()
	if _, refs := content(t, s.Client()); refs["a/"+fmt.Sprint(db.Number)] != 1 || refs["a/"+fmt.Sprint(web.Number)] != 1 {
		t.Errorf("references %v, want node a's references to both", refs)
	}
}

// cutOff returns a node that knows the set "admin" and does not hold it, on a cluster that collected it and gave its
// number to "guest" while the node was down. The node and etcd are down.
func cutOff(t *testing.T, s *etcdtest.Server, cfg nodeConfig) (dir string, admin identity.Identity) {
	t.Helper()
	b := startNode(t, s.Endpoint, "b", t.TempDir(), cfg)
	b.connected()
	a := startNode(t, s.Endpoint, "a", t.TempDir(), cfg)
	a.connected()
	admin, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "admin"), false)
	if err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "b knows", func() bool { _, _, err := b.Get(admin.Number); return err == nil })
	b.stop()
	if _, err := a.Release(t.Context(), holder(1)); err != nil {
		t.Fatal(err)
	}
	other := newStore(t, s.Endpoint, "c")
	if _, err := other.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the end of the quarantine", func() bool {
		unused, err := storetest.Unused(t.Context(), other)
		if err == nil {
			_, err = other.Collect(t.Context(), unused, cfg.Quarantine)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = other.Claim(t.Context(), storetest.Labels(t, "guest"), 0, admin.Number)
		return err == nil
	})
	s.Down()
	return b.dir, admin
}

// TestOldCacheAnswersNothing: while the node was down, a number was collected, left its quarantine and was allocated to
// another label set. The node must not use the number from its cache.
func TestOldCacheAnswersNothing(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.Grace, cfg.Quarantine = 0, time.Second
	dir, admin := cutOff(t, s, cfg)
	b := startNode(t, s.Endpoint, "b", dir, cfg)
	got, err := b.Hold(t.Context(), holder(7), admin.Labels, false)
	var stale *allocator.StaleError
	if !errors.As(err, &stale) || !errors.Is(err, allocator.ErrUnavailable) || stale.Number != admin.Number || stale.Never || stale.Age < cfg.Quarantine {
		t.Errorf("hold: %v, %v, want a StaleError: the number is another set's by now", got, err)
	}
	s.Up()
	b.connected()
	if got, err := b.Hold(t.Context(), holder(7), admin.Labels, false); err != nil || got.Number == admin.Number {
		t.Errorf("with etcd back: %v, %v, want another number than %d", got, err, admin.Number)
	}
}

// TestLongOutageEndsAnswersForSetsThatAreNotHeld: after a long outage of etcd, a running node no longer returns numbers
// for label sets that it does not hold.
func TestLongOutageEndsAnswersForSetsThatAreNotHeld(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	// The first request after the loss waits for the store, and must be answered within the quarantine time.
	cfg.StoreTimeout, cfg.Quarantine = 2*time.Second, 10*time.Second
	a, b := startNode(t, s.Endpoint, "a", t.TempDir(), cfg), startNode(t, s.Endpoint, "b", t.TempDir(), cfg)
	a.connected()
	held, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "held"), false)
	if err != nil {
		t.Fatal(err)
	}
	known, err := b.Hold(t.Context(), holder(1), storetest.Labels(t, "known"), false)
	if err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a knows b's", func() bool { _, _, err := a.Get(known.Number); return err == nil })
	// As long as etcd answers, time does not make the mirror old.
	joined := time.Now()
	servicetest.Eventually(t, "more than the quarantine time", func() bool { return time.Since(joined) > cfg.Quarantine+time.Second })
	s.Down()
	ask := func(h int, l label.Canonical) (identity.Identity, error) {
		return a.Hold(servicetest.Context(t), holder(h), l, false)
	}
	if got, err := ask(2, known.Labels); err != nil || got.Number != known.Number {
		t.Errorf("just after the loss: %v, %v, want %v", got, err, known)
	}
	if _, err := a.Release(t.Context(), holder(2)); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the cache is too old", func() bool {
		_, err := ask(2, known.Labels)
		var stale *allocator.StaleError
		if err == nil {
			if _, err := a.Release(t.Context(), holder(2)); err != nil {
				t.Fatal(err)
			}
		}
		return errors.As(err, &stale)
	})
	if got, err := ask(3, held.Labels); err != nil || got.Number != held.Number {
		t.Errorf("held set: %v, %v, want %v however long it takes", got, err, held)
	}
}

// TestRestoredBackupIsNoticed: an etcd that was restored to an older state has the leases of that state, so every
// session seems to be alive.
func TestRestoredBackupIsNoticed(t *testing.T) {
	t.Parallel() // it mostly waits
	const late = 50
	s := etcdtest.Start(t)
	a, b := startNode(t, s.Endpoint, "a", t.TempDir(), quick()), startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.connected()
	b.connected()
	one, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "one"), false)
	if err != nil {
		t.Fatal(err)
	}
	s.Down()
	s.Backup()
	s.Up()
	a.settled()
	b.settled()
	backup := a.hub.Origin()
	var after []identity.Identity
	for i := range late {
		id, err := a.Hold(t.Context(), holder(100+i), storetest.Labels(t, fmt.Sprint("late", i)), false)
		if err != nil {
			t.Fatal(err)
		}
		after = append(after, id)
	}
	servicetest.Eventually(t, "b knows them", func() bool { return b.Summary().Known == late+1 })
	for i := range late - 1 { // the last one stays held
		if _, err := a.Release(t.Context(), holder(100+i)); err != nil {
			t.Fatal(err)
		}
	}
	a.settled()
	for name, n := range map[string]*node{"a": a, "b": b} {
		servicetest.Eventually(t, name+" reaches a later revision", func() bool {
			at := n.hub.Origin()
			return at.Store == backup.Store && at.Revision >= backup.Revision+late
		})
	}
	s.Down()
	s.Restore()
	s.Up()
	last := after[late-1]
	for name, n := range map[string]*node{"a": a, "b": b} {
		servicetest.Eventually(t, name+" knows what is left", func() bool { return n.Summary().Connected && n.Summary().Known == 2 })
	}
	numbers, refs := content(t, s.Client())
	if numbers[last.Labels.Text()] != last.Number || refs["a/"+fmt.Sprint(last.Number)] != 1 || refs["a/"+fmt.Sprint(one.Number)] != 1 {
		t.Errorf("etcd has %v and references %v, want %v claimed again", numbers, refs, last)
	}
	fresh, err := startNode(t, s.Endpoint, "c", t.TempDir(), quick()).Hold(t.Context(), holder(1), storetest.Labels(t, "after"), false)
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range map[string]*node{"a": a, "b": b} {
		servicetest.Eventually(t, name+" sees a new identity", func() bool { _, _, err := n.Get(fresh.Number); return err == nil })
		if at := n.hub.Origin(); at.Store != backup.Store || at.Revision > backup.Revision+late {
			t.Errorf("%s is at %v in the restored etcd, want one near %v", name, at, backup)
		}
	}
}

// TestNodesViewsAreComparedByTheRevisionOfEtcd: the readers of each node receive a revision that only grows, with the
// ID of etcd's cluster, and have every identity up to it.
func TestNodesViewsAreComparedByTheRevisionOfEtcd(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	admin := s.Client()
	a, b := startNode(t, s.Endpoint, "a", t.TempDir(), quick()), startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	a.connected()
	b.connected()
	ctx, cancel := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	for name, n := range map[string]*node{"a": a, "b": b} {
		sub, err := n.hub.Subscribe(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Close()
		readers.Go(func() {
			var last watch.Origin
			for {
				e, err := sub.Next(ctx)
				if err != nil {
					return
				}
				if last.Store != 0 && (e.Origin.Store != last.Store || e.Origin.Revision < last.Revision) {
					t.Errorf("a reader of %s goes from %v to %v", name, last, e.Origin)
				}
				last = e.Origin
			}
		})
	}
	for i := range 20 {
		id, err := a.Hold(t.Context(), holder(i), storetest.Labels(t, fmt.Sprint("set", i)), false)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := admin.Get(t.Context(), testPrefix+"/id/"+fmt.Sprint(id.Number))
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatalf("identity %d in etcd: %v, %v", id.Number, resp, err)
		}
		want := watch.Origin{Store: resp.Header.ClusterId, Revision: resp.Kvs[0].ModRevision}
		for name, n := range map[string]*node{"a": a, "b": b} {
			servicetest.Eventually(t, name+" reaches the revision", func() bool {
				at := n.hub.Origin()
				return at.Store == want.Store && at.Revision >= want.Revision
			})
			if _, ok := n.hub.Get(id.Number); !ok {
				t.Errorf("%s is at %v without identity %d, which is from %v", name, n.hub.Origin(), id.Number, want)
			}
		}
	}
}

// TestKilledNodeKnowsWhatItToldReaders proves INV-15 for identities received just before a kill: the state directory is
// copied while the process runs.
func TestKilledNodeKnowsWhatItToldReaders(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.KnownDelay = time.Hour // the cache is never written but at the end
	a := startNode(t, s.Endpoint, "a", t.TempDir(), quick())
	a.connected()
	b := startNode(t, s.Endpoint, "b", t.TempDir(), quick())
	b.connected()
	b.stop() // the node has a cache
	b = startNode(t, s.Endpoint, "b", b.dir, cfg)
	b.connected()
	id, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "x"), false)
	if err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "b tells readers", func() bool { _, _, err := b.Get(id.Number); return err == nil })
	killed := filepath.Join(t.TempDir(), "state")
	if err := os.CopyFS(killed, os.DirFS(b.dir)); err != nil { // the files that a kill -9 leaves
		t.Fatal(err)
	}
	s.Down()
	b.stop()
	b = startNode(t, s.Endpoint, "b", killed, cfg)
	if ready, _ := b.Ready(); !ready {
		t.Error("not ready, although there is a cache")
	}
	if got, err := b.Hold(t.Context(), holder(2), id.Labels, false); err != nil || got.Number != id.Number {
		t.Errorf("hold: %v, %v, want %v", got, err, id)
	}
}
