// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// refused applies a transaction with one frontend that does not fit.
func (i *instance) refused(t *testing.T, tx *frontendtx.Transaction) frontendtx.Result {
	t.Helper()
	res, err := i.Apply(t.Context(), tx)
	if err != nil || len(res.Refused) != 1 {
		t.Fatalf("%+v, %v, want one refusal", res, err)
	}
	return res
}

// TestKernelBackendsThatGoLeaveThoughNewOnesDoNotFit: removed backends must leave the list even if new ones do not fit,
// because the addresses of deleted pods are assigned to other pods.
func TestKernelBackendsThatGoLeaveThoughNewOnesDoNotFit(t *testing.T) {
	many := func(first int) []int {
		var ns []int
		for n := range 17 {
			ns = append(ns, first+n)
		}
		return ns
	}
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 256, fronts: 256, members: 64, backends: 256})
	f := service(1, false, listOf(false, 1, 2, 3))
	i.apply(t, state{f.Key: f}.all())
	larger := service(1, false, listOf(false, append([]int{2, 3}, many(10)...)...))
	i.refused(t, state{f.Key: larger}.all())
	left := service(1, false, listOf(false, 2, 3))
	state{f.Key: left}.check(t, i)
	i.sound(t)
	other := service(1, false, listOf(false, many(10)...))
	i.refused(t, state{f.Key: other}.all())
	state{f.Key: service(1, false, listOf(false))}.check(t, i)
	if is, err := i.IsOfServices(f.Key.Addr); err != nil || !is {
		t.Errorf("the address of a closed frontend is a virtual IP: %t, %v", is, err)
	}
	i.apply(t, state{f.Key: left}.all())
	state{f.Key: left}.check(t, i)
	i.sound(t)
}

// TestKernelFrontendIsClosed: a closed frontend keeps its lists, kind and address, also in the next process.
func TestKernelFrontendIsClosed(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, small)
	f := service(1, false, listOf(false, 1, 2))
	lb := service(2, false, nil)
	lb.Kind, lb.Outside, lb.SourceRanges = frontend.LoadBalancer, listOf(false, 3), ranges[:]
	s := state{f.Key: f, lb.Key: lb}
	i.apply(t, s.all())
	adopted := false
	closes := func() {
		t.Helper()
		tx := &frontendtx.Transaction{Partial: true}
		for k := range s {
			tx.Upsert(frontendtx.Closed(k))
		}
		tx.Upsert(frontendtx.Closed(clusterIP(9, false))) // does not exist
		i.apply(t, tx)
		closed := state{f.Key: service(1, false, listOf(false)), lb.Key: service(2, false, nil)}
		closed[lb.Key].Kind, closed[lb.Key].Outside = frontend.LoadBalancer, listOf(false)
		closed.check(t, i)
		if is, err := i.IsOfServices(f.Key.Addr); err != nil || !is {
			t.Errorf("adopted %t: the address is a virtual IP: %t, %v", adopted, is, err)
		}
		if is, err := i.IsOfServices(lb.Key.Addr); err != nil || is {
			t.Errorf("adopted %t: the load balancer's own address is a virtual IP: %t, %v", adopted, is, err)
		}
		i.sound(t)
	}
	closes()
	i.apply(t, s.all())
	s.check(t, i)
	i.close(t)
	i, adopted = start(t, dir, small), true
	closes()
}

// TestKernelRefusedChangeAllowsNoMoreThanBefore: for frontends that do not fit, packets find only what both the
// previous and the new state allow.
func TestKernelRefusedChangeAllowsNoMoreThanBefore(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 64, fronts: 64, members: 48, backends: 64})
	find := func(k frontend.Key, outside bool) *leads { return reader{t, i}.find(k, outside) }
	// Some seeds make only a few refusals in 150 rounds, so go on until there are enough to prove something.
	const rounds, enough, most = 150, 20, 3000
	refusals := 0
	for round := 0; round < rounds || refusals < enough; round++ {
		if round == most {
			t.Fatalf("only %d refusals in %d rounds", refusals, round)
		}
		next := randomState(r, 16)
		before := make(map[frontend.Key][2]*leads)
		keys, err := i.Keys()
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range keys {
			before[k] = [2]*leads{find(k, false), find(k, true)}
		}
		res, err := i.Apply(t.Context(), next.all())
		if err != nil {
			t.Fatal(err)
		}
		refused := make(map[frontend.Key]bool)
		for _, x := range res.Refused {
			refused[x.Key] = true
		}
		for k, f := range next {
			for n, outside := range []bool{false, true} {
				got, want := find(k, outside), wanted(f, outside)
				old, was := before[k]
				switch {
				case !refused[k]:
					continue // covered by TestKernelPacketsFindTheFinalStateAlone
				case !was && got != nil && len(got.backends) > 0:
					t.Fatalf("%v, outside %t: a frontend that is refused has backends: %+v", k, outside, got)
				case !was || got == nil && (want == nil || old[n] == nil):
					continue
				case got == nil:
					t.Fatalf("%v, outside %t: it is no longer found: packets pass", k, outside)
				}
				refusals++
				for _, b := range got.backends {
					if want == nil || !slices.Contains(want.backends, b) || old[n] == nil || !slices.Contains(old[n].backends, b) {
						t.Fatalf("%v, outside %t: found backend %v, before %+v, new state %+v", k, outside, b, old[n], want)
					}
				}
				allows := func(l *leads, asker int) bool { return l.flags&flagSources == 0 || l.asked[asker] }
				for asker := range got.asked {
					if len(got.backends) > 0 && allows(got, asker) && !(allows(want, asker) && allows(old[n], asker)) {
						t.Fatalf("%v, outside %t: asker %d is allowed, before %+v, new state %+v", k, outside, asker, old[n], want)
					}
				}
			}
		}
		// Refused frontends may be removed.
		if r.IntN(4) == 0 {
			tx := &frontendtx.Transaction{}
			for _, k := range slices.SortedFunc(maps.Keys(next), frontend.Key.Compare) { // the seed decides
				if r.IntN(2) == 0 {
					tx.Remove(k)
				}
			}
			tx.Partial = true
			i.apply(t, tx)
		}
		i.clock = i.clock.Add(DefaultRest)
		if err := i.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	i.sound(t)
}

// TestKernelRefusedFrontendTakesNothing: it keeps neither an affinity group nor space that another frontend of the
// transaction needs.
func TestKernelRefusedFrontendTakesNothing(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 256, fronts: 256, members: 64, backends: 256})
	var ns []int
	for n := range 17 {
		ns = append(ns, n)
	}
	f := service(1, false, listOf(false, ns...))
	f.Affinity = time.Hour
	i.refused(t, state{f.Key: f}.all())
	if n := i.store.groupNumbers.Used(); n != 0 || len(i.store.groups) != 0 {
		t.Errorf("%d groups are in use after a refusal", n)
	}

	// Two new frontends that need one address key each, and space for three keys.
	i = start(t, kerneltest.NewBPFFS(t), sizes{keys: 20, fronts: 256, members: 64, backends: 256})
	s := state{}
	for n := range 7 {
		f := service(n, false, listOf(false, 1))
		s[f.Key] = f
	}
	f = service(0, false, listOf(false, 1))
	f.Key.Port = 81
	s[f.Key] = f
	i.apply(t, s.all())
	more := state{}
	for n := 7; n < 9; n++ {
		f := service(n, false, listOf(false, 1))
		more[f.Key] = f
	}
	tx := more.all()
	tx.Partial = true
	res := i.refused(t, tx)
	var room *frontendtx.NoRoomError
	if !errors.As(res.Refused[0].Err, &room) || room.Map != bpf.MapsMapSlFe4 {
		t.Errorf("refused: %v", res.Refused[0].Err)
	}
	i.sound(t)
}

// TestKernelGainedTableTakesNoReserve: a list works without a table, so a new table must not use the reserve for
// changes.
func TestKernelGainedTableTakesNoReserve(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 256, fronts: 256, members: 60_000, backends: 256})
	list := func(first int) *frontend.List {
		var ns []int
		for n := range 20 {
			ns = append(ns, first+n)
		}
		return listOf(false, ns...)
	}
	s := state{}
	for n := range 25 { // 24 tables of 2,176 elements leave 7,776, of which 6,000 are reserved for changes
		f := service(n, false, list(n))
		f.Inside.Table = n > 0
		s[f.Key] = f
	}
	i.apply(t, s.all())
	f := service(0, false, list(0))
	f.Inside.Table = true
	tx := state{f.Key: f}.all()
	tx.Partial = true
	i.refused(t, tx)
	s.check(t, i)
	i.sound(t)
}

// TestKernelSourcesLeaveAfterTheListThatAsksForThem: a packet between the two writes must not be dropped because the
// prefix is deleted while the list still needs it.
func TestKernelSourcesLeaveAfterTheListThatAsksForThem(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, listOf(false, 1))
	f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	i.apply(t, state{f.Key: f}.all())
	number := i.store.entries[f.Key].inside.number
	deletions := 0
	i.store.before = func(mapName string) {
		if mapName != bpf.MapsMapSlSrc4 {
			return
		}
		if deletions++; i.store.front(number)[listWord]>>flagsShift&flagSources != 0 {
			t.Error("a prefix is deleted while the list needs it")
		}
	}
	open := service(1, false, listOf(false, 1))
	i.apply(t, state{f.Key: open}.all())
	if i.store.before = nil; deletions != 1 {
		t.Errorf("%d prefixes are deleted", deletions)
	}
	i.sound(t)
}

// TestKernelEmptyListIsNeverForgotten: an empty list uses no elements, so no elements may be freed for it.
func TestKernelEmptyListIsNeverForgotten(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	for range 3 {
		f := service(1, false, listOf(false))
		i.apply(t, state{f.Key: f}.all())
		i.apply(t, state{}.all())
		if n := len(i.store.left.spans); n != 0 {
			t.Errorf("%d runs were removed", n)
		}
		i.apply(t, func() *frontendtx.Transaction {
			tx := &frontendtx.Transaction{}
			tx.Remove(f.Key)
			return tx
		}())
		if n := len(i.store.left.spans) + len(i.store.lists); n != 0 {
			t.Errorf("the empty list was removed: %d runs or lists", n)
		}
	}
	i.sound(t)
}

// TestKernelKeyThatCannotBeInsertedAgainIsNotCounted: a frontend starts to be used from inside, and another key takes
// its place in the map meanwhile.
func TestKernelKeyThatCannotBeInsertedAgainIsNotCounted(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), small)
	f := service(1, false, nil)
	f.Kind, f.Outside = frontend.LoadBalancer, listOf(false, 1)
	i.apply(t, state{f.Key: f}.all())
	keys := i.store.nKeys[ip4]
	writes := 0
	i.store.before = func(mapName string) {
		if mapName != bpf.MapsMapSlFe4 {
			return
		}
		if writes++; writes == 2 { // the key is deleted, and is about to be inserted
			raw := key4(f.Key)
			if err := i.pins.Map(bpf.MapsMapSlFe4).Put(&raw, &bpf.MapsSlFe{}); err != nil {
				t.Error(err)
			}
		}
	}
	inside := *f
	inside.Inside = listOf(false, 1)
	tx := &frontendtx.Transaction{Partial: true}
	tx.Upsert(&inside)
	res, err := i.Apply(t.Context(), tx)
	i.store.before = nil
	if err != nil || len(res.Refused) != 1 {
		t.Fatalf("%+v, %v, want one refusal", res, err)
	}
	// the address refuses connections instead
	if is, err := i.IsOfServices(f.Key.Addr); err != nil || !is {
		t.Errorf("the address is a virtual IP: %t, %v", is, err)
	}
	if got := i.store.nKeys[ip4]; got != keys-1+1 {
		t.Errorf("%d keys are counted, want %d: one was lost, and the key of its address was added", got, keys)
	}
}
