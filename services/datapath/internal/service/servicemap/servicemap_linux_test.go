// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

func TestSaltIsTheStatedHash(t *testing.T) {
	for addr, want := range map[string]uint32{
		"10.244.0.1:8080":    0xe2dd6315,
		"10.244.0.2:8080":    0x0a95f55d,
		"10.244.0.1:8081":    0xd802930b,
		"[fd00:244::1]:8080": 0xc1a8100d,
	} {
		if got := Salt(netip.MustParseAddrPort(addr)); got != want {
			t.Errorf("%s: %#x, want %#x", addr, got, want)
		}
	}
}

func TestKernelPacketsFindTheFinalStateAlone(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			dir := kerneltest.NewBPFFS(t)
			i := start(t, dir, small)
			now := state{}
			for round := range 12 {
				next := randomState(r, 24)
				i.apply(t, now.to(next))
				now = next
				now.check(t, i)
				i.sound(t)
				switch round % 4 {
				case 1:
					if err := i.Barrier(t.Context()); err != nil {
						t.Fatal(err)
					}
				case 2:
					i.clock = i.clock.Add(time.Hour)
					if _, err := i.Collect(t.Context(), nil); err != nil {
						t.Fatal(err)
					}
				case 3:
					i.close(t)
					i = start(t, dir, small)
				}
				now.check(t, i)
				i.sound(t)
			}
			i.apply(t, now.to(nil))
			i.collectAll(t)
			if c, err := i.Counts(); err != nil || c != (Counts{}) {
				t.Errorf("with every frontend removed %+v, %v are in use", c, err)
			}
		})
	}
}

// collectAll frees everything that was removed.
func (i *instance) collectAll(t testing.TB) {
	t.Helper()
	for range 2 {
		if _, err := i.Collect(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		i.clock = i.clock.Add(time.Hour)
	}
}

// TestKernelRestartWritesNothing proves INV-97.
func TestKernelRestartWritesNothing(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	s := randomState(rand.New(rand.NewPCG(7, 7)), 32)
	i.apply(t, randomState(rand.New(rand.NewPCG(8, 8)), 32).to(s))
	i.collectAll(t)
	want := i.image(t)
	list, err := i.List()
	if err != nil {
		t.Fatal(err)
	}
	i.close(t)

	i = open(t, dir, small)
	i.store.before = func(mapName string) { t.Errorf("map %s is written", mapName) }
	if err := i.RemoveLeftovers(); err != nil {
		t.Fatal(err)
	}
	// in the order of another process
	for _, tx := range []*frontendtx.Transaction{s.all(), s.all()} {
		if res := i.apply(t, tx); res.Changed != 0 {
			t.Errorf("%d frontends were changed", res.Changed)
		}
	}
	i.collectAll(t)
	if i.image(t) != want {
		t.Error("the maps have changed")
	}
	if again, err := i.List(); err != nil || !reflect.DeepEqual(again, list) {
		t.Errorf("listed %+v, %v, want %+v", again, err, list)
	}
	s.check(t, i)
}

// killed is the panic value that simulates the kill of the process.
type killed struct{}

// killAt runs f, and ends it before write n. It reports whether f completed.
func (i *instance) killAt(n int, f func()) (done bool) {
	defer func() {
		i.store.before = nil
		switch r := recover(); r {
		case nil:
			done = true
		case killed{}:
		default:
			panic(r)
		}
	}()
	i.store.before = func(string) {
		if n == 0 {
			panic(killed{})
		}
		n--
	}
	f()
	return true
}

// atEachWrite runs f with 0, step, 2*step, … until f reports that it completed, and returns the number of that call.
// Each call has its own maps, and mostly waits for the kernel or for running programs. Therefore several run in
// parallel, including a few after the last one.
func atEachWrite(t *testing.T, step int, f func(t *testing.T, n int) (done bool)) int {
	t.Helper()
	const atOnce = 4
	var next, last atomic.Int64
	last.Store(math.MaxInt64)
	var calls sync.WaitGroup
	for range atOnce {
		calls.Go(func() {
			for {
				n := step * int(next.Add(1)-1)
				if int64(n) > last.Load() || t.Failed() {
					return
				}
				t.Run(fmt.Sprint("write ", n), func(t *testing.T) {
					if !f(t, n) {
						return
					}
					for l := last.Load(); int64(n) < l && !last.CompareAndSwap(l, int64(n)); l = last.Load() {
					}
				})
			}
		})
	}
	calls.Wait()
	return int(last.Load())
}

// TestKernelKillAtEveryWriteLeavesWholeFrontends kills the process before each write of a transaction with every kind
// of change, and the next process before each write of its RemoveLeftovers.
func TestKernelKillAtEveryWriteLeavesWholeFrontends(t *testing.T) {
	was, is := state{}, state{}
	add := func(s state, f *frontend.Frontend) *frontend.Frontend { s[f.Key] = f; return f }
	for _, is6 := range []bool{false, true} {
		add(was, service(1, is6, listOf(is6, 1, 2, 3)))
		add(is, service(1, is6, listOf(is6, 2, 3, 4))) // one backend is removed, one added
		add(was, service(2, is6, listOf(is6, 1, 2, 3)))
		add(is, service(2, is6, listOf(is6, 1, 2, 3))) // the list was shared
		add(was, service(3, is6, listOf(is6, 5)))      // removed with its backend
		add(is, service(4, is6, listOf(is6, 6)))       // added with its backend
		add(was, service(5, is6, listOf(is6, 7))).Affinity = time.Hour
		f := add(is, service(5, is6, listOf(is6, 7))) // gets a front for outside
		f.Affinity, f.Outside = 2*time.Hour, listOf(is6, 8)
		f = add(was, service(6, is6, listOf(is6, 9)))
		f.Kind, f.Outside = frontend.LoadBalancer, listOf(is6, 9, 10)
		f = add(is, service(6, is6, nil)) // no longer used from inside
		f.Kind, f.Outside = frontend.LoadBalancer, &frontend.List{Drop: true}
	}
	tx := was.to(is)
	either := func(t *testing.T, i *instance) {
		t.Helper()
		for k := range maps.Keys(union(was, is)) {
			for _, outside := range []bool{false, true} {
				got := (reader{t, i}).find(k, outside)
				a, b := wanted(was[k], outside), wanted(is[k], outside)
				reshaped := was[k] != nil && is[k] != nil && (k == clusterIP(5, k.Addr.Is6()) || k == clusterIP(6, k.Addr.Is6()))
				if got == nil && reshaped {
					continue // between deleting and inserting its key
				}
				if got != nil {
					// the timeout is a packed entry of its own
					for _, l := range []*leads{a, b} {
						if l != nil && reflect.DeepEqual(got.backends, l.backends) && got.flags == l.flags {
							got.timeout = l.timeout
						}
					}
				}
				if !reflect.DeepEqual(got, a) && !reflect.DeepEqual(got, b) {
					t.Errorf("%v, outside %t: found %+v, neither %+v nor %+v", k, outside, got, a, b)
				}
			}
		}
	}
	atWrite := func(t *testing.T, n, m int) (appliedAll, settledAll bool) {
		dir := kerneltest.NewBPFFS(t)
		i := start(t, dir, small)
		i.apply(t, was.all())
		appliedAll = i.killAt(n, func() {
			i.apply(t, tx)
			i.collectAll(t)
		})
		either(t, i)
		i.close(t)

		i = open(t, dir, small)
		settledAll = i.killAt(m, func() {
			if err := i.RemoveLeftovers(); err != nil {
				t.Errorf("RemoveLeftovers: %v", err)
			}
		})
		either(t, i)
		i.close(t)

		i = start(t, dir, small)
		either(t, i)
		i.sound(t)
		i.apply(t, state(nil).to(is))
		for k := range was {
			if is[k] == nil {
				gone := &frontendtx.Transaction{}
				gone.Remove(k)
				i.apply(t, gone)
			}
		}
		is.check(t, i)
		i.collectAll(t)
		i.sound(t)
		is.check(t, i)
		want := Counts{Frontends: len(is), Fronts: 2 * (1 + 1 + 1 + 2 + 1), Members: 2 * (3 + 3 + 1 + 1 + 1), Backends: 2 * 7}
		if c, err := i.Counts(); err != nil || c != want {
			t.Errorf("in use are %+v, %v, want %+v", c, err, want)
		}
		return appliedAll, settledAll
	}
	var settles atomic.Int64
	writes := atEachWrite(t, 1, func(t *testing.T, n int) (done bool) {
		for settled, m := false, 0; !settled && !t.Failed(); m++ {
			t.Run(fmt.Sprint("and ", m), func(t *testing.T) { done, settled = atWrite(t, n, m) })
			settles.Add(1)
		}
		return done
	})
	t.Logf("killed ahead of each of %d writes, %d times in all", writes, settles.Load())
	if writes < 60 {
		t.Errorf("%d writes: the transaction writes more than that", writes)
	}
}

func union(a, b state) state {
	u := maps.Clone(a)
	maps.Copy(u, b)
	return u
}

// users are referenced IDs.
type users Numbers

func (u *users) Named(context.Context) (Numbers, error) { return Numbers(*u), nil }

func TestKernelNumbersRestUntilNothingNamesThem(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %t", restart), func(t *testing.T) {
			dir := kerneltest.NewBPFFS(t)
			i := start(t, dir, small)
			f := service(1, false, listOf(false, 1, 2))
			s := state{f.Key: f}
			i.apply(t, s.all())
			before := i.only(t, f.Key)
			i.apply(t, s.to(nil))
			again := func() {
				if restart {
					i.close(t)
					i = start(t, dir, small)
				}
			}
			// as many others as there are IDs, one after the other
			others := func(when string) {
				t.Helper()
				for n := range int(small.fronts) {
					o := service(100, false, listOf(false, 20+n))
					os := state{o.Key: o}
					i.apply(t, os.all())
					got := i.only(t, o.Key)
					if got.Inside.Number == before.Inside.Number {
						t.Fatalf("%s: front %d was reused", when, got.Inside.Number)
					}
					for _, b := range before.Inside.Backends {
						if b.Number == got.Inside.Backends[0].Number {
							t.Fatalf("%s: backend %d was reused", when, b.Number)
						}
					}
					i.apply(t, os.to(nil))
					i.store.dropRests(before)
				}
			}
			others("before the grace period")
			again()
			if err := i.Barrier(t.Context()); err != nil {
				t.Fatal(err)
			}
			others("after the grace period")
			named := &users{
				Fronts: map[uint32]struct{}{before.Inside.Number: {}},
				Backends: [families]map[uint32]struct{}{
					{before.Inside.Backends[0].Number: {}, before.Inside.Backends[1].Number: {}},
				},
			}
			if _, err := i.Collect(t.Context(), named); err != nil {
				t.Fatal(err)
			}
			others("while they are referenced")
			again()
			i.clock = i.clock.Add(DefaultRest - time.Second)
			if n, err := i.Collect(t.Context(), nil); err != nil || n != 0 && !restart {
				t.Fatalf("%d IDs were freed during their quarantine, %v", n, err)
			}
			others("during their quarantine")
			if restart { // otherwise the quarantine is over
				if n, err := i.Collect(t.Context(), &users{}); err != nil || n != 0 {
					t.Fatalf("%d IDs were freed while a call may have been in progress, %v", n, err)
				}
				i.clock = i.clock.Add(callTime)
			}
			if n, err := i.Collect(t.Context(), &users{}); err != nil || n < 3 {
				t.Fatalf("%d unreferenced IDs were freed, %v", n, err)
			}
			for _, b := range before.Inside.Backends {
				if raw := i.store.backend(ip4, b.Number); raw != freeBackend(b.Generation+1) {
					t.Errorf("backend %d is %+v, want a free one of generation %d", b.Number, raw, b.Generation+1)
				}
			}
			i.sound(t)
		})
	}
}

// dropRests frees all removed IDs except the IDs of one frontend, so that a test can cycle through all IDs quickly. No
// program runs on the maps.
func (s *store) dropRests(but Frontend) {
	keep := func(r *rest) bool {
		if r.front != nil {
			return r.front.number == but.Inside.Number
		}
		for _, b := range but.Inside.Backends {
			if r.backend.number == b.Number {
				return true
			}
		}
		return false
	}
	d := s.left
	s.left = &departed{}
	var kept departed
	for _, sp := range d.spans {
		for m := range sp.N {
			s.storeMember(sp.Base+m, 0)
		}
		s.members.Give(sp)
	}
	for _, f := range d.fronts {
		if keep(&rest{front: f}) {
			kept.fronts = append(kept.fronts, f)
		} else {
			s.free(&rest{front: f})
		}
	}
	for _, b := range d.backends {
		if b.left != d {
			continue
		}
		if keep(&rest{backend: b}) {
			kept.backends = append(kept.backends, b)
			b.left = s.left
		} else {
			s.free(&rest{backend: b})
		}
	}
	s.left.fronts, s.left.backends = kept.fronts, kept.backends
}

// only returns one frontend in the kernel.
func (i *instance) only(t testing.TB, k frontend.Key) Frontend {
	t.Helper()
	fs, err := i.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fs {
		if f.Key == k {
			return f
		}
	}
	t.Fatalf("no frontend %v", k)
	return Frontend{}
}

func TestKernelBackendThatComesBackIsAnotherGeneration(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1, 2))
	i.apply(t, state{f.Key: f}.all())
	before := i.only(t, f.Key).Inside
	without := service(1, false, listOf(false, 1))
	i.apply(t, state{f.Key: without}.all())
	lost := before.Backends[1]
	if raw := i.store.backend(ip4, lost.Number); raw.state != backendGone || raw.gen != lost.Generation+1 ||
		raw.addr != lost.Addr() {
		t.Errorf("the removed backend is %+v", raw)
	}
	if i.Keeps(before.Number, false, lost.Number, lost.Generation) {
		t.Error("the front still has it")
	}
	kept := before.Backends[0]
	if !i.Keeps(before.Number, false, kept.Number, kept.Generation) {
		t.Error("the front does not have the remaining backend")
	}
	if i.Keeps(before.Number, true, kept.Number, kept.Generation) {
		t.Error("the front has an IPv6 backend")
	}
	i.apply(t, state{f.Key: f}.all())
	back := i.only(t, f.Key).Inside.Backends[1]
	if back.Number != lost.Number || back.Generation != lost.Generation+1 {
		t.Errorf("it was added again as %+v, was %+v", back, lost)
	}
	// The backend was added again, so the collection of its earlier removal must not free its entry.
	i.collectAll(t)
	i.sound(t)
	if raw := i.store.backend(ip4, back.Number); raw.state != backendActive {
		t.Errorf("the backend that was added again is %+v", raw)
	}
}

// TestKernelDrainingBackendStaysUntilItIsRemoved: it keeps the ID and generation, which sockets reference, for the
// fronts that drain it, across a restart, as long as one front does.
func TestKernelDrainingBackendStaysUntilItIsRemoved(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	key := clusterIP(1, false)
	// is returns a transaction that gives one frontend these active and draining backends, and keeps the other frontend.
	is := func(backends, draining []int) *frontendtx.Transaction {
		l := listOf(false, backends...)
		for _, n := range draining {
			l.Draining = append(l.Draining, backendAt(n, false))
		}
		return state{key: service(1, false, l)}.all()
	}
	other := func(backends ...int) *frontendtx.Transaction {
		f := service(2, false, listOf(false, backends...))
		return state{f.Key: f}.all()
	}
	i.apply(t, other(1, 2))
	i.apply(t, is([]int{1, 2}, nil))
	front, second := i.only(t, key).Inside, i.only(t, clusterIP(2, false)).Inside
	b := front.Backends[1]
	check := func(when string, active, keeps bool) {
		t.Helper()
		want := rawBackend{addr: b.Addr(), port: b.Port(), state: backendActive, gen: b.Generation}
		if !active {
			want.state, want.gen = backendGone, b.Generation+1
		}
		if raw := i.store.backend(ip4, b.Number); raw != want {
			t.Errorf("%s: the backend is %+v, want %+v", when, raw, want)
		}
		if got := i.Keeps(front.Number, false, b.Number, b.Generation); got != keeps {
			t.Errorf("%s: its front keeps it: %t", when, got)
		}
		if got := i.HasBackend(b.AddrPort); got != active {
			t.Errorf("%s: it is a backend: %t", when, got)
		}
		i.sound(t)
	}
	drained := func() {
		t.Helper()
		if d := i.only(t, key).Inside.Draining; len(d) != 1 || d[0] != b {
			t.Errorf("the front drains %+v, want %+v", d, b)
		}
	}

	i.apply(t, is([]int{1}, []int{2, 3})) // the third one never existed
	drained()
	i.apply(t, other(1))
	check("drained", true, true)
	if i.Keeps(second.Number, false, b.Number, b.Generation) {
		t.Error("a front that does not drain it keeps it")
	}
	if n := i.apply(t, is([]int{1}, []int{2, 3})).Changed; n != 0 {
		t.Errorf("repeating the change changes %d frontends", n)
	}
	i.apply(t, is([]int{1, 2}, nil))
	check("back in the list", true, true)
	i.apply(t, is([]int{1}, []int{2}))
	i.collectAll(t)

	before := i.image(t)
	i.close(t)
	i = start(t, dir, small)
	i.collectAll(t)
	// A partial transaction about other frontends does not end draining.
	partial := other(1)
	partial.Partial = true
	i.apply(t, partial)
	i.apply(t, is([]int{1}, []int{2}))
	check("after a restart", true, true)
	drained()
	if i.image(t) != before {
		t.Error("a restart with a draining backend has written to the maps")
	}
	if n := i.apply(t, is([]int{1}, nil)).Changed; n != 1 {
		t.Errorf("its removal changes %d frontends, so no socket would be ended", n)
	}
	check("removed", false, false)

	i.apply(t, is([]int{1, 2}, nil))
	b = i.only(t, key).Inside.Backends[1]
	i.apply(t, is([]int{1}, []int{2}))
	i.close(t)
	i = start(t, dir, small)
	check("after another restart", true, true)
	i.apply(t, is([]int{1}, nil))
	check("removed meanwhile", false, false)

	i.apply(t, is([]int{1, 2}, nil))
	b = i.only(t, key).Inside.Backends[1]
	i.apply(t, is([]int{1}, []int{2}))
	tx := &frontendtx.Transaction{}
	tx.Remove(key)
	i.apply(t, tx)
	check("with its frontend removed", false, false)
}

func TestKernelFrontendMadeAgainKeepsItsFront(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1, 2))
	i.apply(t, state{f.Key: f}.all())
	before := i.only(t, f.Key)
	deletions := 0
	i.store.before = func(mapName string) {
		if mapName == bpf.MapsMapSlFe4 {
			deletions++
		}
	}
	tx := &frontendtx.Transaction{}
	tx.Remove(f.Key)
	f2 := service(1, false, listOf(false, 3))
	f2.Service = "shop/other:http"
	tx.Upsert(f2)
	i.apply(t, tx)
	i.store.before = nil
	after := i.only(t, f.Key)
	if deletions != 0 || after.Inside.Number != before.Inside.Number {
		t.Errorf("the key was written %d times, front %d was %d", deletions, after.Inside.Number, before.Inside.Number)
	}
	state{f.Key: f2}.check(t, i)
}

func TestKernelOutsideListComesAndGoesWithoutItsKeyChanging(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1, 2))
	f.Kind = frontend.LoadBalancer
	i.apply(t, state{f.Key: f}.all())
	i.store.before = func(mapName string) {
		if mapName == bpf.MapsMapSlFe4 {
			t.Error("the key is written")
		}
	}
	local := *f
	local.Outside = &frontend.List{Drop: true}
	for _, next := range []*frontend.Frontend{&local, f, &local} {
		i.apply(t, state{f.Key: next}.all())
		state{f.Key: next}.check(t, i)
	}
}

func TestKernelFrontendsWithEqualListsShareMembers(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	s := state{}
	for n := range 10 {
		f := service(n, false, listOf(false, 1, 2, 3))
		s[f.Key] = f
	}
	i.apply(t, s.all())
	if c, err := i.Counts(); err != nil || c.Members != 3 || c.Backends != 3 {
		t.Errorf("%+v, %v", c, err)
	}
	next := maps.Clone(s)
	f := service(4, false, listOf(false, 1, 2))
	next[f.Key] = f
	i.apply(t, s.to(next))
	next.check(t, i)
	i.sound(t)
}

func TestKernelFrontendsOfOneServiceShareWhatAffinityRemembers(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	with := func(n int, name string, d time.Duration) *frontend.Frontend {
		f := service(n, false, listOf(false, 1))
		f.Service, f.Affinity = name, d
		return f
	}
	a, b, c, d := with(
		1,
		"shop/a:x",
		time.Hour,
	), with(
		2,
		"shop/a:x",
		time.Hour,
	), with(
		3,
		"shop/b:x",
		time.Hour,
	), with(
		4,
		"shop/c:x",
		0,
	)
	s := state{a.Key: a, b.Key: b, c.Key: c, d.Key: d}
	i.apply(t, s.all())
	groups := func() (g [4]uint16) {
		for n, f := range []*frontend.Frontend{a, b, c, d} {
			g[n] = i.only(t, f.Key).Group
		}
		return g
	}
	g := groups()
	if g[0] == 0 || g[0] != g[1] || g[2] == 0 || g[2] == g[0] || g[3] != 0 {
		t.Errorf("groups %v", g)
	}
	i.close(t)
	i = start(t, dir, small)
	// a new frontend of a service comes before those that know its group
	e := with(5, "shop/a:x", time.Hour)
	s[e.Key] = e
	tx := &frontendtx.Transaction{}
	for _, f := range []*frontend.Frontend{e, d, c, b, a} {
		tx.Upsert(f)
	}
	i.apply(t, tx)
	if after := groups(); after != g || i.only(t, e.Key).Group != g[0] {
		t.Errorf("after a restart %v and %d, were %v", after, i.only(t, e.Key).Group, g)
	}
	s.check(t, i)
}

func TestKernelBatchReplacesNoKey(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), sizes{})
	values := func() map[rawKey]bpf.MapsSlFe {
		vs := map[rawKey]bpf.MapsSlFe{}
		if err := i.store.eachKey(func(k rawKey, v bpf.MapsSlFe) { vs[k] = v }); err != nil {
			t.Fatal(err)
		}
		return vs
	}
	s := state{}
	for n := range 2000 {
		f := service(n, n%2 == 1, listOf(n%2 == 1, n%50))
		s[f.Key] = f
	}
	i.apply(t, s.all())
	before := values()
	if want := len(s) + len(s.alone()); len(before) != want {
		t.Fatalf("%d keys, want %d", len(before), want)
	}
	next := state{}
	for n := range 4000 {
		f := service(n, n%2 == 1, listOf(n%2 == 1, n%50, n%50+100))
		next[f.Key] = f
	}
	calls := map[string]int{}
	i.store.before = func(mapName string) { calls[mapName]++ }
	i.apply(t, next.all())
	if calls[bpf.MapsMapSlFe4] != 2 || calls[bpf.MapsMapSlFe6] != 2 {
		t.Errorf("keys were written by %d and %d calls, want one each for frontends and for addresses",
			calls[bpf.MapsMapSlFe4], calls[bpf.MapsMapSlFe6])
	}
	i.store.before = nil
	after := values()
	for k, v := range before {
		if after[k] != v {
			t.Fatalf("frontend %v had %+v, has %+v", k.frontend(), v, after[k])
		}
	}
	next.check(t, i)
	i.sound(t)
}

// TestKernelKeyOfAnotherIsNotReplaced: a key that another process wrote is refused when keys are inserted one by one,
// and reported by the audit.
func TestKernelKeyOfAnotherIsNotReplaced(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1))
	key := key4(f.Key)
	foreign := bpf.MapsSlFe{Inside: 200, Outside: 200}
	if err := pin.InsertOnce(i.pins.Map(bpf.MapsMapSlFe4), &key, &foreign); err != nil {
		t.Fatal(err)
	}
	res, err := i.Apply(t.Context(), state{f.Key: f}.all())
	if err != nil || len(res.Refused) != 1 || !errors.Is(res.Refused[0].Err, pin.ErrExists) || res.Changed != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	var got bpf.MapsSlFe
	if err := i.pins.Map(bpf.MapsMapSlFe4).Lookup(&key, &got); err != nil || got != foreign {
		t.Errorf("the key has %+v, %v", got, err)
	}
	if ds, err := i.Audit(true); err != nil || len(ds) != 1 ||
		!strings.Contains(ds[0], "frontend 10.96.0.1:80/tcp should not be there") {
		t.Errorf("audit: %q, %v", ds, err)
	}
	i.apply(t, state{f.Key: f}.all())
	i.sound(t)
}

func TestKernelFrontendWithoutRoomIsRefusedByFigures(t *testing.T) {
	sequence := func(n int) (ns []int) {
		for i := range n {
			ns = append(ns, i)
		}
		return ns
	}
	refusal := func(t *testing.T, i *instance, s state) string {
		t.Helper()
		res, err := i.Apply(t.Context(), s.all())
		if err != nil || len(res.Refused) != 1 {
			t.Fatalf("%+v, %v, want one refusal", res, err)
		}
		return fmt.Sprintf("%v: %v", res.Refused[0].Key, res.Refused[0].Err)
	}
	t.Run("no list takes over a quarter", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 256, fronts: 256, members: 64, backends: 256})
		f := service(1, false, listOf(false, sequence(3)...))
		s := state{f.Key: f}
		i.apply(t, s.all())
		large := service(1, false, listOf(false, sequence(17)...))
		got := refusal(t, i, state{f.Key: large})
		if want := "10.96.0.1:80/tcp: map sl_member: 17 elements needed, 61 free, at most 16 for one list"; got != want {
			t.Errorf("refused with %q, want %q", got, want)
		}
		s.check(t, i) // the old list stays
		i.sound(t)
	})
	t.Run("a tenth is reserved for existing frontends", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 256, fronts: 256, members: 40, backends: 256})
		s := state{}
		for n := range 4 {
			f := service(n, false, listOf(false, 4*n, 4*n+1, 4*n+2, 4*n+3, 100+n, 110+n, 120+n, 130+n, 140+n))
			s[f.Key] = f
		}
		i.apply(t, s.all())
		f := service(9, false, listOf(false, 200))
		if got, want := refusal(t, i, state{f.Key: f}), "map sl_member: 1 elements needed, 0 free"; !strings.Contains(
			got,
			want,
		) {
			t.Errorf("refused with %q, want %q", got, want)
		}
		next := maps.Clone(s)
		f = service(2, false, listOf(false, 201, 202, 203, 204))
		next[f.Key] = f
		i.apply(t, s.to(next))
		next.check(t, i)
	})
	t.Run("keys", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 20, fronts: 256, members: 64, backends: 256})
		s := state{}
		for n := range 9 {
			f := service(n, false, listOf(false, 1))
			s[f.Key] = f
		}
		i.apply(t, s.all())
		f := service(9, false, listOf(false, 1))
		if got, want := refusal(t, i, state{f.Key: f}), "map sl_fe4: 2 elements needed, 0 free"; !strings.Contains(
			got,
			want,
		) {
			t.Errorf("refused with %q, want %q", got, want)
		}
		// another one is removed in the same transaction
		tx := &frontendtx.Transaction{}
		tx.Upsert(f)
		tx.Remove(clusterIP(3, false))
		i.apply(t, tx)
	})
	t.Run("Apply waits for space that the transaction frees", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 256, fronts: 256, members: 40, backends: 256})
		s, next := state{}, state{}
		for n := range 4 {
			f := service(n, false, listOf(false, 10*n, 10*n+1, 10*n+2, 10*n+3, 10*n+4, 10*n+5, 10*n+6, 10*n+7, 10*n+8))
			s[f.Key] = f
			g := service(n+10, false, listOf(false, 10*n+50, 10*n+51, 10*n+52, 10*n+53, 10*n+54, 10*n+55, 10*n+56, 10*n+57))
			next[g.Key] = g
		}
		i.apply(t, s.all())
		i.apply(t, s.to(next))
		next.check(t, i)
		i.sound(t)
	})
	t.Run("services are off", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), sizes{1, 1, 1, 1})
		f := service(9, false, listOf(false, 200))
		refusal(t, i, state{f.Key: f})
		i.sound(t)
	})
}

func TestKernelFrontendIsAskedFromItsSourceRanges(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	f := service(1, false, listOf(false, 1))
	f.Kind, f.Outside = frontend.LoadBalancer, listOf(false, 1, 2)
	i.apply(t, state{f.Key: f}.all())
	for _, sources := range [][]netip.Prefix{
		{ranges[0]},
		{ranges[1], ranges[3]},
		{ranges[3]}, // only the other family: no clients
		{ranges[2], ranges[1], ranges[2]},
		nil,
		{ranges[1]},
	} {
		ranged := *f
		ranged.SourceRanges = sources
		s := state{f.Key: &ranged}
		i.apply(t, s.all())
		s.check(t, i)
		i.sound(t)
		// an existing state is not written again, and adopted unchanged
		before := i.image(t)
		i.close(t)
		i = start(t, dir, small)
		i.apply(t, s.all())
		s.check(t, i)
		if i.image(t) != before {
			t.Errorf("%v: a restart has changed the maps", sources)
		}
	}
	tx := &frontendtx.Transaction{}
	tx.Remove(f.Key)
	i.apply(t, tx)
	if err := i.store.eachSource(func(s source) { t.Errorf("left behind: %v", s) }); err != nil {
		t.Error(err)
	}
	i.sound(t)
}

func TestKernelSourceRangesBeyondTheRoomAreRefused(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1))
	i.apply(t, state{f.Key: f}.all())
	many := *f
	for n := range int(i.pins.Map(sourceMap[ip4]).MaxEntries())/4 + 1 {
		many.SourceRanges = append(many.SourceRanges,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(n >> 16), byte(n >> 8), byte(n)}), 32))
	}
	res, err := i.Apply(t.Context(), state{f.Key: &many}.all())
	var room *frontendtx.NoRoomError
	if err != nil || len(res.Refused) != 1 || !errors.As(res.Refused[0].Err, &room) || room.Map != sourceMap[ip4] {
		t.Fatalf("%+v, %v", res, err)
	}
	// It is closed: otherwise every client could use it.
	closed := service(1, false, listOf(false))
	state{f.Key: closed}.check(t, i)
	i.sound(t)
}

func TestKernelInvalidFrontendIsRefused(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	for name, change := range map[string]func(*frontend.Frontend){
		"port 0":            func(f *frontend.Frontend) { f.Key.Port = 0 },
		"other family":      func(f *frontend.Frontend) { f.Inside = listOf(true, 1) },
		"unsorted":          func(f *frontend.Frontend) { f.Inside = listOf(false, 2, 1) },
		"twice":             func(f *frontend.Frontend) { f.Inside = listOf(false, 2, 2) },
		"no list":           func(f *frontend.Frontend) { f.Inside = nil },
		"ICMP":              func(f *frontend.Frontend) { f.Key.Protocol = 1 },
		"node port at VIP":  func(f *frontend.Frontend) { f.Key.Node = true },
		"affinity too long": func(f *frontend.Frontend) { f.Affinity = 25 * time.Hour },
		"no port of backend": func(f *frontend.Frontend) {
			f.Inside.Backends[0].AddrPort = netip.MustParseAddrPort("10.0.0.1:0")
		},
		"draining, of the other family": func(f *frontend.Frontend) {
			f.Inside.Draining = []frontend.Backend{backendAt(2, true)}
		},
		"draining, unsorted": func(f *frontend.Frontend) {
			f.Inside.Draining = []frontend.Backend{backendAt(3, false), backendAt(2, false)}
		},
		"draining and in the list": func(f *frontend.Frontend) {
			f.Inside.Draining = []frontend.Backend{f.Inside.Backends[0]}
		},
	} {
		f := service(1, false, listOf(false, 1))
		change(f)
		tx := &frontendtx.Transaction{}
		tx.Upsert(f)
		res, err := i.Apply(t.Context(), tx)
		if err != nil || len(res.Refused) != 1 || !errors.Is(res.Refused[0].Err, frontend.ErrInvalid) {
			t.Errorf("%s: %+v, %v", name, res, err)
		}
	}
	if i.image(t) != start(t, kerneltest.NewBPFFS(t), small).image(t) {
		t.Error("something was written")
	}
}

func TestKernelAuditFindsAndRepairsEveryKindOfDamage(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	f6 := service(3, true, listOf(true, 1, 2))
	f := service(1, false, listOf(false, 1, 2))
	s := state{f.Key: f, f6.Key: f6}
	i := start(t, dir, small)
	i.apply(t, s.all())
	want := i.image(t)
	got := i.only(t, f.Key).Inside
	got6 := i.only(t, f6.Key).Inside
	st := i.store
	for text, damage := range map[string]func(){
		"word 0 of the front":  func() { st.storeFrontWord(got.Number, listWord, 1<<countShift) },
		"free front":           func() { st.storeFrontWord(200, groupWord, 7) },
		"member":               func() { st.storeMember(got.Base, 77) },
		"free member":          func() { st.storeMember(400, 77) },
		"backend":              func() { st.storeBackendWord(ip4, got.Backends[0].Number, 77) },
		"free backend":         func() { st.storeBackendWord(ip4, 200, 77) },
		"address of a backend": func() { st.storeBackendAddr(got6.Backends[0].Number, [2]uint64{1, 2}) },
		"missing key": func() {
			if err := st.deleteKey(rawKeyOf(f6.Key)); err != nil {
				t.Error(err)
			}
		},
		"missing key of an address": func() {
			if err := st.deleteKey(rawKeyOf(keyOfAddress(f.Key.Addr))); err != nil {
				t.Error(err)
			}
		},
		"foreign key of an address": func() {
			if err := st.insertKey(numbered{key: keyOfAddress(clusterIP(9, false).Addr)}); err != nil {
				t.Error(err)
			}
		},
		"foreign key": func() {
			if err := st.insertKey(numbered{clusterIP(9, false), bpf.MapsSlFe{Inside: 9, Outside: 9}}); err != nil {
				t.Error(err)
			}
		},
		"other key": func() {
			err := errors.Join(st.deleteKey(rawKeyOf(f.Key)), st.insertKey(numbered{f.Key, bpf.MapsSlFe{Inside: 9, Outside: 9}}))
			if err != nil {
				t.Error(err)
			}
		},
	} {
		damage()
		if ds, err := i.Audit(true); err != nil || len(ds) != 1 {
			t.Errorf("%s: %q, %v, want one difference", text, ds, err)
		}
		i.sound(t)
		if i.image(t) != want {
			t.Errorf("%s: the maps are not as before", text)
		}
	}
}

// TestKernelDamagedListIsEmptyAfterARestart: the elements of an invalid list are not reused while a front refers to it.
func TestKernelDamagedListIsEmptyAfterARestart(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	f, g := service(1, false, listOf(false, 1, 2)), service(2, false, listOf(false, 3, 4))
	s := state{f.Key: f, g.Key: g}
	i.apply(t, s.all())
	i.store.storeMember(i.only(t, f.Key).Inside.Base+1, 1<<20)
	i.close(t)
	i = start(t, dir, small)
	i.sound(t)
	damaged := service(1, false, listOf(false))
	state{f.Key: damaged, g.Key: g}.check(t, i)
	i.apply(t, s.all())
	s.check(t, i)
	i.collectAll(t)
	i.sound(t)
}

func TestKernelClosedMapsRefuseCalls(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	i.Close()
	if _, err := i.Apply(t.Context(), &frontendtx.Transaction{}); !errors.Is(err, pin.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
