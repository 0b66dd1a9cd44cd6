// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// operation is one call of a client: it resolved a label set and got a number, released it, or claimed a range.
type operation struct {
	kind   string // "resolve", "release" or "claim"
	thing  int    // label set or range
	holder int    // number of the set, or node that has the range; -1: the claim was refused
}

// history records operations with the times between which they took effect.
type history struct {
	start time.Time
	mu    sync.Mutex
	all   []porcupine.Operation // guarded by mu
}

func (h *history) now() int64 { return time.Since(h.start).Nanoseconds() }

func (h *history) add(client int, op operation, call, ret int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, porcupine.Operation{ClientId: client, Input: op, Call: call, Output: op, Return: ret})
}

// inForce is the state of one label set, number or range: its binding, and the number of its holders. While it is held,
// it has no other binding.
type inForce struct{ bound, holders int }

// bindings returns the model of things that are each bound to one other thing while they are held. key and to return
// the two things of an operation.
func bindings(key, to func(operation) int) porcupine.Model {
	return porcupine.Model{
		Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
			parts := map[int][]porcupine.Operation{}
			for _, o := range all {
				k := key(o.Input.(operation))
				parts[k] = append(parts[k], o)
			}
			var out [][]porcupine.Operation
			for _, p := range parts {
				out = append(out, p)
			}
			return out
		},
		Init: func() any { return inForce{} },
		Step: func(state, input, _ any) (bool, any) {
			s, op := state.(inForce), input.(operation)
			switch {
			case op.kind == "release":
				return s.holders > 0 && s.bound == to(op), inForce{s.bound, s.holders - 1}
			case op.holder < 0: // the claim was refused, so another node has the range
				return s.holders > 0, s
			case s.holders > 0 && s.bound != to(op):
				return false, s
			}
			return true, inForce{to(op), s.holders + 1}
		},
	}
}

func thingOf(o operation) int  { return o.thing }
func holderOf(o operation) int { return o.holder }

// check fails the test if a set had two valid numbers, or a number two sets.
func (h *history) check(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for what, m := range map[string]porcupine.Model{
		"a set has one number":              bindings(thingOf, holderOf),
		"a number belongs to one label set": bindings(holderOf, thingOf),
	} {
		if r := porcupine.CheckOperationsTimeout(m, h.all, 2*time.Minute); r != porcupine.Ok {
			t.Errorf("%s: the history of %d operations is %s", what, len(h.all), r)
		}
	}
}

func TestTheHistoryCheckerFindsWhatItLooksFor(t *testing.T) {
	for name, c := range map[string]struct {
		ops  []operation
		want bool
	}{
		"one number": {[]operation{
			{"resolve", 1, 300},
			{"resolve", 1, 300},
			{"release", 1, 300},
			{"resolve", 2, 301},
		}, true},
		"again after collection": {[]operation{
			{"resolve", 1, 300},
			{"release", 1, 300},
			{"resolve", 1, 301},
			{"resolve", 2, 300},
		}, true},
		"two numbers of a set": {[]operation{{"resolve", 1, 300}, {"resolve", 1, 301}}, false},
		"two sets of a number": {[]operation{{"resolve", 1, 300}, {"resolve", 2, 300}}, false},
		"reused while held": {[]operation{
			{"resolve", 1, 300},
			{"resolve", 1, 300},
			{"release", 1, 300},
			{"resolve", 2, 300},
		}, false},
	} {
		h := &history{}
		for i, op := range c.ops {
			h.add(0, op, int64(2*i), int64(2*i+1))
		}
		got := porcupine.CheckOperations(bindings(thingOf, holderOf), h.all) &&
			porcupine.CheckOperations(bindings(holderOf, thingOf), h.all)
		if got != c.want {
			t.Errorf("%s: accepted %t, want %t", name, got, c.want)
		}
	}
}

// racers are nodes whose clients resolve and release label sets continuously.
type racers struct {
	t       *testing.T
	etcd    *etcdtest.Server
	cfg     nodeConfig
	dirs    []string
	nodes   []atomic.Pointer[node]
	history *history
	done    atomic.Int64 // operations

	collected uint64 // numbers, by processes that were restarted
}

func startRacers(t *testing.T, s *etcdtest.Server, nodes int, cfg nodeConfig) *racers {
	r := &racers{
		t: t, etcd: s, cfg: cfg, nodes: make([]atomic.Pointer[node], nodes),
		history: &history{start: time.Now()},
	}
	for i := range nodes {
		r.dirs = append(r.dirs, t.TempDir())
		r.start(i)
	}
	return r
}

func (r *racers) start(i int) {
	r.nodes[i].Store(startNode(r.t, r.etcd.Endpoint, fmt.Sprint("node", i), r.dirs[i], r.cfg))
}

func (r *racers) restart(i int) {
	r.nodes[i].Load().stop()
	r.collected += r.nodes[i].Load().Counters().Collected
	r.start(i)
}

// resolve tries until the node answers, across restarts of its process.
func (r *racers) resolve(ctx context.Context, i int, client, set int) (identity.Numeric, bool) {
	call := r.history.now()
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, 10*time.Second)
		id, err := r.nodes[i].Load().Hold(limited, holder(client), storetest.Labels(r.t, fmt.Sprint(set)), false)
		cancel()
		if err == nil {
			r.history.add(client, operation{"resolve", set, int(id.Number)}, call, r.history.now())
			r.done.Add(1)
			return id.Number, true
		}
	}
	return 0, false
}

func (r *racers) release(ctx context.Context, i, client, set int, n identity.Numeric) bool {
	call := r.history.now()
	for ctx.Err() == nil {
		_, err := r.nodes[i].Load().Release(ctx, holder(client))
		if err == nil {
			r.history.add(client, operation{"release", set, int(n)}, call, r.history.now())
			r.done.Add(1)
			return true
		}
	}
	return false
}

// run lets clients of every node race for the sets until stop is called.
func (r *racers) run(clients, sets int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range r.nodes {
		for c := range clients {
			client := i*clients + c
			wg.Go(func() {
				for ctx.Err() == nil {
					set := rand.IntN(sets)
					n, ok := r.resolve(ctx, i, client, set)
					if !ok || !r.release(ctx, i, client, set, n) {
						return
					}
				}
			})
		}
	}
	return sync.OnceFunc(func() { cancel(); wg.Wait() })
}

// progress waits until the clients did some more.
func (r *racers) progress() {
	r.t.Helper()
	want := r.done.Load() + 100
	servicetest.Eventually(r.t, "more operations", func() bool { return r.done.Load() >= want })
}

// settled waits until no node has a request to etcd under way.
func (r *racers) settled() {
	r.t.Helper()
	for i := range r.nodes {
		r.nodes[i].Load().settled()
	}
}

// collecting returns the configuration of nodes that collect numbers at once and reuse them.
func collecting() nodeConfig {
	cfg := quick()
	cfg.Grace, cfg.Quarantine, cfg.Reconcile = 0, time.Second, 20*time.Millisecond
	cfg.StoreTimeout = 2 * time.Second
	return cfg
}

// TestNothingIsInTwoHandsOverFaultsOfEtcd injects faults while clients of four nodes resolve and release label sets and
// numbers are collected and reused. It checks the recorded history.
func TestNothingIsInTwoHandsOverFaultsOfEtcd(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.StartThree(t)
	r := startRacers(t, s, 4, collecting())
	stop := r.run(3, 8)
	defer stop()
	for _, fault := range []func(){
		func() { l := s.Leader(); l.Down(); r.progress(); l.Up() },
		func() { s.Compact() },
		func() { l := s.Leader(); l.Freeze(); r.progress(); l.Thaw() },
		func() { s.Full(true); s.Full(false) },
		func() { s.Down(); s.Up() },
		func() { r.restart(1) },
		func() { s.Down(); r.restart(2); s.Up() },
	} {
		r.progress()
		fault()
	}
	r.progress()
	stop()
	// While the clients run, every set may be held continuously. Now none is.
	r.settled()
	servicetest.Eventually(t, "a number to be collected", func() bool {
		collected := r.collected
		for i := range r.nodes {
			collected += r.nodes[i].Load().Counters().Collected
		}
		return collected > 0
	})
	again := r.run(3, 8)
	defer again()
	r.progress()
	again()
	r.settled()
	r.history.check(t)
	content(t, s.Client())
}

// TestKernelNothingIsInTwoHandsOnSlowDisks delays each sync on the disks of etcd's members, by up to more than an
// election timeout and more than the timeouts of the nodes.
func TestKernelNothingIsInTwoHandsOnSlowDisks(t *testing.T) {
	t.Parallel()
	s, disks := etcdtest.StartThreeOn(t)
	r := startRacers(t, s, 4, collecting())
	stop := r.run(3, 8)
	defer stop()
	slow := func(each time.Duration, slow ...*etcdtest.Disk) {
		for _, d := range slow {
			d.SyncsTake(each)
		}
	}
	ended := func() (n int64) {
		for _, d := range disks {
			n += d.Syncs()
		}
		return n
	}
	// Count the syncs of all disks, because a member writes nothing while the members cannot agree on a leader.
	syncs := func(n int64) {
		t.Helper()
		before := ended()
		servicetest.Eventually(t, "slow syncs", func() bool { return ended() >= before+n })
	}
	r.progress()
	for _, each := range []time.Duration{50 * time.Millisecond, 400 * time.Millisecond} {
		slow(each, disks...)
		syncs(15)
	}
	r.progress() // slowly
	slow(3*time.Second, disks...)
	syncs(3)
	r.restart(1) // a node that starts meanwhile
	slow(0, disks...)
	r.progress()
	// With one slow disk of three, the other two members are a majority and continue, whichever member is the leader.
	for i := range disks {
		slow(3*time.Second, disks[i])
		r.progress()
		slow(0, disks[i])
	}
	stop()
	r.settled()
	r.history.check(t)
	content(t, s.Client())
}

// TestNothingIsInTwoHandsAfterLostLeases revokes every lease repeatedly. Collected numbers stay in quarantine for
// longer than the test runs, as in production they stay in quarantine for longer than a lease.
func TestNothingIsInTwoHandsAfterLostLeases(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	cfg := quick()
	cfg.Grace, cfg.Reconcile = 0, 20*time.Millisecond
	r := startRacers(t, s, 4, cfg)
	stop := r.run(3, 8)
	defer stop()
	admin := s.Client()
	for range 4 {
		r.progress()
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
	r.progress()
	stop()
	r.history.check(t)
}

// raceSets is the number of label sets for which the nodes race; SLUICE_RACE_SETS overrides it.
const raceSets = 300

// TestEightNodesRaceForTheSameSets resolves every label set on all nodes, on each in another order, while the leader of
// etcd is killed.
func TestEightNodesRaceForTheSameSets(t *testing.T) {
	t.Parallel()
	const nodes, clients = 8, 8
	sets := raceSets
	if text := os.Getenv("SLUICE_RACE_SETS"); text != "" {
		var err error
		if sets, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	s := etcdtest.StartThree(t)
	cfg := quick()
	cfg.Quota, cfg.Reconcile = sets, time.Second
	r := startRacers(t, s, nodes, cfg)
	var wg sync.WaitGroup
	for i := range nodes {
		todo := make(chan int, sets)
		for _, set := range rand.Perm(sets) {
			todo <- set
		}
		close(todo)
		for range clients {
			wg.Go(func() {
				for set := range todo {
					r.resolve(t.Context(), i, i*sets+set, set)
				}
			})
		}
	}
	servicetest.Eventually(t, "the first quarter", func() bool { return r.done.Load() > int64(nodes*sets/4) })
	l := s.Leader()
	l.Down()
	l.Up()
	wg.Wait()
	if got := r.done.Load(); got != int64(nodes*sets) {
		t.Errorf("%d of %d sets were resolved", got, nodes*sets)
	}
	r.history.check(t)
	numbers, _ := content(t, s.Client())
	if len(numbers) != sets {
		t.Errorf("etcd has %d identities, want %d", len(numbers), sets)
	}
}

// proxy is the way from a node to the members of etcd, which a test cuts.
type proxy struct {
	t    *testing.T
	mu   sync.Mutex
	cut  bool                  // guarded by mu
	open map[net.Conn]struct{} // guarded by mu
}

// newProxy returns endpoints by which the members are reached through it.
func newProxy(t *testing.T, s *etcdtest.Server) (p *proxy, endpoint string) {
	t.Helper()
	p = &proxy{t: t, open: map[net.Conn]struct{}{}}
	dir, err := os.MkdirTemp("", "proxy-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	var endpoints []string
	for i, m := range s.Members {
		path := filepath.Join(dir, fmt.Sprint(i))
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { p.carry(c, strings.TrimPrefix(m.Endpoint, "unix://")) })
			}
		})
		t.Cleanup(func() {
			l.Close()
			p.Cut()
			p.Heal()
			wg.Wait()
		})
		endpoints = append(endpoints, "unix://"+path)
	}
	return p, strings.Join(endpoints, ",")
}

func (p *proxy) carry(c net.Conn, to string) {
	defer c.Close()
	p.mu.Lock()
	p.open[c] = struct{}{}
	cut := p.cut
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.open, c)
	}()
	if cut {
		io.Copy(io.Discard, c) //nolint:errcheck // the copy ends with the connection
		return
	}
	d, err := net.Dial("unix", to)
	if err != nil {
		return
	}
	defer d.Close()
	go func() {
		io.Copy(d, c) //nolint:errcheck // the copy ends with the connection
		d.Close()
	}()
	io.Copy(c, d) //nolint:errcheck // the copy ends with the connection
}

// Cut ends every connection. New connections get no answer until Heal.
func (p *proxy) Cut() { p.set(true) }

// Heal ends Cut.
func (p *proxy) Heal() { p.set(false) }

func (p *proxy) set(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	for c := range p.open {
		c.Close()
	}
}

// TestNodePartitionedBeyondEveryTimeout partitions a node until its references are gone, its number was collected and
// left quarantine, and another node has its range.
func TestNodePartitionedBeyondEveryTimeout(t *testing.T) {
	t.Parallel()
	s := etcdtest.StartThree(t)
	p, endpoint := newProxy(t, s)
	cfg := quick()
	cfg.Grace, cfg.Quarantine, cfg.Reconcile = 0, time.Second, 50*time.Millisecond
	cut := cfg
	cut.ttl, cut.aliveTTL, cut.StoreTimeout = 2*time.Second, time.Second, time.Second
	a := startNode(t, endpoint, "a", t.TempDir(), cut)
	b := startNode(t, s.Endpoint, "b", t.TempDir(), cfg)
	watcher := startNode(t, s.Endpoint, "w", t.TempDir(), cfg)
	a.register(1, prefix(1), prefix(3))
	servicetest.Eventually(t, "etcd to answer within the second", func() bool {
		_, err := a.Hold(t.Context(), holder(9), storetest.Labels(t, "web"), false)
		return err == nil
	})
	web := a.endpoint("c1", "web", address(1, 5))
	kept := a.endpoint("c3", "web", address(3, 5))
	watcher.seesMapping(address(1, 5), fmt.Sprint("a ", web.Number))
	admin := s.Client()
	p.Cut()
	servicetest.Eventually(t, "the number of the node to be free again", func() bool {
		return len(keysBelow(t, admin, fmt.Sprint("/id/", web.Number))) == 0 &&
			len(keysBelow(t, admin, fmt.Sprint("/rest/", web.Number))) == 0
	})
	// No other key of the node was deleted with its references.
	if got, want := watcher.mapping(address(3, 5)), fmt.Sprint("a ", kept.Number); got != want {
		t.Errorf("the mapping of a node that is cut off is %q, want %q", got, want)
	}
	b.register(2, prefix(2), prefix(1))
	b.published()
	db := b.endpoint("c2", "db", address(1, 5))
	watcher.seesMapping(address(1, 5), fmt.Sprint("b ", db.Number))
	// The node itself continues with what it holds.
	if id, err := a.Hold(t.Context(), holder(9), storetest.Labels(t, "web"), false); err != nil ||
		id.Number != web.Number {
		t.Errorf("a set that the node holds is %v, %v", id, err)
	}
	p.Heal()
	a.settled()
	// Until the watch delivers the node's own record, the node assumes that its ranges are valid.
	servicetest.Eventually(t, "the range to be refused to the node that was cut off", func() bool {
		r := a.refusedRanges()
		return len(r) == 1 && r[0].Range == prefix(1) && r[0].Holder == "b"
	})
	a.published()
	watcher.seesMapping(address(3, 5), fmt.Sprint("a ", kept.Number))
	watcher.seesMapping(address(1, 5), fmt.Sprint("b ", db.Number))
	numbers, _ := content(t, admin)
	if numbers[web.Labels.Text()] != web.Number {
		t.Errorf("etcd has %d for the set of %d", numbers[web.Labels.Text()], web.Number)
	}
}

// TestNoRangeInTwoHandsOverFaults claims the same ranges from several nodes while members of etcd are killed. In the
// history of granted and refused claims, each range has at most one holder at a time.
func TestNoRangeInTwoHandsOverFaults(t *testing.T) {
	t.Parallel()
	const nodes, ranges = 6, 5
	s := etcdtest.StartThree(t)
	h := &history{start: time.Now()}
	var all [nodes]*node
	for i := range all {
		all[i] = startNode(t, s.Endpoint, fmt.Sprint("node", i), t.TempDir(), quick())
	}
	var want []netip.Prefix
	for i := range ranges {
		want = append(want, prefix(i))
	}
	var wg sync.WaitGroup
	for i, n := range all {
		wg.Go(func() {
			call := h.now()
			n.register(100+i, want...)
			refused := map[netip.Prefix]bool{}
			for _, r := range n.refusedRanges() {
				refused[r.Range] = true
			}
			for k, p := range want {
				op := operation{"claim", k, i}
				if refused[p] {
					op.holder = -1
				}
				h.add(i, op, call, h.now())
			}
		})
	}
	l := s.Leader()
	l.Down()
	l.Up()
	s.Leader().Down()
	s.Up()
	wg.Wait()
	if !porcupine.CheckOperations(bindings(thingOf, holderOf), h.all) {
		t.Errorf("a range has two holders: %v", h.all)
	}
	if len(h.all) != nodes*ranges {
		t.Errorf("%d claims, want %d", len(h.all), nodes*ranges)
	}
}
