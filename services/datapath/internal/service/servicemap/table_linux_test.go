// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
)

// withTables are maps with space for tables.
var withTables = sizes{keys: 1024, fronts: 256, members: maxMembers, backends: 8192}

// maxMembers is SL_MAX_MEMBERS of service_abi.h.
const maxMembers = 622592

// numbersTo returns the numbers from 0 to n-1.
func numbersTo(n int) (ns []int) {
	for i := range n {
		ns = append(ns, i)
	}
	return ns
}

// tableList returns a list with a table, of backends by their numbers.
func tableList(is6 bool, ns ...int) *frontend.List {
	l := listOf(is6, ns...)
	l.Table = true
	return l
}

// without returns the numbers without n.
func without(ns []int, n int) []int {
	return slices.DeleteFunc(slices.Clone(ns), func(o int) bool { return o == n })
}

// addressesOf returns the addresses of a list.
func addressesOf(l *frontend.List) (as []netip.AddrPort) {
	for _, b := range l.Backends {
		as = append(as, b.AddrPort)
	}
	return as
}

// ownersOf returns the expected owners of the slots in a list's table.
func ownersOf(l *frontend.List) (owners []netip.AddrPort) {
	as := addressesOf(l)
	for _, o := range rendezvous.New(rendezvous.Bits(len(as)), as).Owners() {
		owners = append(owners, as[o])
	}
	return owners
}

// slotsOf reads the table of a frontend as the programs do.
func slotsOf(t *testing.T, i *instance, k frontend.Key) (owners []netip.AddrPort) {
	t.Helper()
	f := i.only(t, k).Inside
	r := reader{t, i}
	for slot := range f.Slots {
		var m uint64
		if err := i.pins.Map(bpf.MapsMapSlMember).Lookup(uint32(f.Base+len(f.Backends)+slot), &m); err != nil {
			t.Fatal(err)
		}
		owners = append(owners, r.backend(k.Addr.Is4(), uint32(m)))
	}
	return owners
}

// TestKernelTablesOfTwoNodesAgree: one node gets the backends at once; the other gets them one by one, together with
// others that are removed again, and has used IDs before.
func TestKernelTablesOfTwoNodesAgree(t *testing.T) {
	for _, is6 := range []bool{false, true} {
		one, other := start(t, kerneltest.NewBPFFS(t), withTables), start(t, kerneltest.NewBPFFS(t), withTables)
		ns := numbersTo(100)
		f := service(1, is6, tableList(is6, ns...))
		one.apply(t, state{f.Key: f}.all())

		r := rand.New(rand.NewPCG(5, 5))
		apply := func(ns []int) {
			ns = slices.Sorted(slices.Values(ns))
			tx := &frontendtx.Transaction{Partial: true}
			tx.Upsert(service(1, is6, tableList(is6, ns...)))
			other.apply(t, tx)
			other.sound(t)
		}
		var has []int
		for _, n := range r.Perm(130) {
			has = append(has, n)
			if len(has) > 60 && len(has)%9 == 0 {
				apply(has)
			}
		}
		for _, n := range r.Perm(130) {
			if n >= 100 {
				has = without(has, n)
				apply(has)
			}
		}
		want := ownersOf(f.Inside)
		if got := slotsOf(t, one, f.Key); !slices.Equal(got, want) {
			t.Errorf("IPv6 %t: the table of the node with all at once differs", is6)
		}
		if got := slotsOf(t, other, f.Key); !slices.Equal(got, want) {
			t.Errorf("IPv6 %t: the table of the node with one by one differs", is6)
		}
		one.sound(t)
		other.collectAll(t)
		other.sound(t)
		if c, err := other.Counts(); err != nil || c.Members != 8192*17/16 || c.Backends != 100 {
			t.Errorf("in use are %+v, %v", c, err)
		}
	}
}

// TestKernelTableIsThereFromSeventeenBackendsOn: with fewer backends, the programs use rendezvous hashing over the
// members.
func TestKernelTableIsThereFromSeventeenBackendsOn(t *testing.T) {
	i := start(t, kerneltest.NewBPFFS(t), withTables)
	for _, c := range []struct {
		list  *frontend.List
		slots int
	}{
		{tableList(false, numbersTo(16)...), 0},
		{tableList(false, numbersTo(17)...), 2048},
		{listOf(false, numbersTo(17)...), 0},
		{tableList(false, numbersTo(17)...), 2048},
		{tableList(false), 0},
	} {
		f := service(1, false, c.list)
		s := state{f.Key: f}
		i.apply(t, s.all())
		s.check(t, i)
		i.sound(t)
		got, there, err := i.Lookup(f.Key)
		if err != nil || !there || got.Inside.Slots != c.slots || len(got.Inside.Backends) != len(c.list.Backends) {
			t.Errorf("%d backends, table %t: %+v, %t, %v, want %d slots", len(c.list.Backends), c.list.Table, got.Inside,
				there, err, c.slots)
		}
		if got := slotsOf(t, i, f.Key); c.slots > 0 && !slices.Equal(got, ownersOf(c.list)) {
			t.Errorf("%d backends: the table differs from the list's", len(c.list.Backends))
		}
		i.collectAll(t)
		n, members := len(c.list.Backends), len(c.list.Backends)
		if c.slots > 0 {
			members = c.slots * 17 / 16
		}
		if c, err := i.Counts(); err != nil || c.Members != members || c.Backends != n {
			t.Errorf("in use are %+v, %v, want %d backends and %d members", c, err, n, members)
		}
	}
}

// TestKernelRestartAdoptsTables: a restart writes nothing (INV-97), and later changes have the same result as without
// the restart.
func TestKernelRestartAdoptsTables(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, withTables)
	s := state{}
	for n := range 6 {
		f := service(n, n%2 == 1, tableList(n%2 == 1, numbersTo(15+5*n)...))
		s[f.Key] = f
	}
	i.apply(t, s.all())
	i.collectAll(t)
	want := i.image(t)
	list, err := i.List()
	if err != nil {
		t.Fatal(err)
	}
	i.close(t)

	i = open(t, dir, withTables)
	i.store.before = func(mapName string) { t.Fatalf("map %s is written", mapName) }
	if err := i.RemoveLeftovers(); err != nil {
		t.Fatal(err)
	}
	if res := i.apply(t, s.all()); res.Changed != 0 {
		t.Errorf("%d frontends were changed", res.Changed)
	}
	i.collectAll(t)
	i.sound(t)
	if i.image(t) != want {
		t.Error("the maps have changed")
	}
	if again, err := i.List(); err != nil || !reflect.DeepEqual(again, list) {
		t.Errorf("listed %+v, %v, want %+v", again, err, list)
	}
	i.store.before = nil
	f := service(5, true, tableList(true, without(numbersTo(40), 7)...))
	s[f.Key] = f
	i.apply(t, s.all())
	s.check(t, i)
	i.sound(t)
	if got := slotsOf(t, i, f.Key); !slices.Equal(got, ownersOf(f.Inside)) {
		t.Error("the incrementally changed table differs from the list's")
	}
}

// TestKernelKillWhileATableIsExchangedLeavesOneOfBoth kills the process before writes of a transaction that exchanges a
// table, and the next process before writes of its RemoveLeftovers.
func TestKernelKillWhileATableIsExchangedLeavesOneOfBoth(t *testing.T) {
	was := service(1, false, tableList(false, numbersTo(20)...))
	is := service(1, false, tableList(false, numbersTo(21)...))
	either := func(t *testing.T, i *instance) {
		t.Helper()
		got := slotsOf(t, i, was.Key)
		if !slices.Equal(got, ownersOf(was.Inside)) && !slices.Equal(got, ownersOf(is.Inside)) {
			t.Errorf("the table is neither the old one nor the new one")
		}
	}
	atEachWrite(t, 97, func(t *testing.T, n int) (done bool) {
		dir := kerneltest.NewBPFFS(t)
		i := start(t, dir, withTables)
		i.apply(t, state{was.Key: was}.all())
		done = i.killAt(n, func() {
			i.apply(t, state{is.Key: is}.all())
			i.collectAll(t)
		})
		either(t, i)
		i.close(t)
		i = open(t, dir, withTables)
		i.killAt(n/2, func() {
			if err := i.RemoveLeftovers(); err != nil {
				t.Errorf("RemoveLeftovers: %v", err)
			}
		})
		either(t, i)
		i.close(t)
		i = start(t, dir, withTables)
		either(t, i)
		i.sound(t)
		i.apply(t, state{is.Key: is}.all())
		i.collectAll(t)
		i.sound(t)
		if got := slotsOf(t, i, is.Key); !slices.Equal(got, ownersOf(is.Inside)) {
			t.Errorf("killed ahead of write %d: the final table differs", n)
		}
		if c, err := i.Counts(); err != nil || c.Members != 2048*17/16 || c.Backends != 21 {
			t.Errorf("killed ahead of write %d: in use are %+v, %v", n, c, err)
		}
		i.close(t)
		return done
	})
}

// TestKernelSlotThatIsDamagedIsPutRight: a corrupt slot is repaired by an audit, and after a restart without losing the
// list.
func TestKernelSlotThatIsDamagedIsPutRight(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	i := start(t, dir, withTables)
	f := service(1, false, tableList(false, numbersTo(30)...))
	s := state{f.Key: f}
	i.apply(t, s.all())
	want := i.image(t)
	damage := func() {
		front := i.only(t, f.Key).Inside
		i.store.storeMember(front.Base+len(front.Backends)+1000, i.store.member(front.Base))
		i.store.storeMember(front.Base+len(front.Backends)+1001, 1<<20)
	}
	damage()
	if ds, err := i.Audit(true); err != nil || len(ds) == 0 {
		t.Errorf("%q, %v, want a difference", ds, err)
	}
	if i.image(t) != want {
		t.Error("the audit has not repaired it")
	}
	damage()
	i.close(t)
	i = start(t, dir, withTables)
	i.sound(t)
	s.check(t, i)
	if i.image(t) != want {
		t.Error("the restart has not repaired it")
	}
}

func TestKernelTableWithoutRoomIsRefusedAndTheRestIsApplied(t *testing.T) {
	refusals := func(t *testing.T, i *instance, s state) (texts []string) {
		t.Helper()
		res, err := i.Apply(t.Context(), s.all())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range res.Refused {
			texts = append(texts, fmt.Sprintf("%v: %v", r.Key, r.Err))
		}
		return texts
	}
	t.Run("the map is too small", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), small)
		plain := service(1, false, listOf(false, numbersTo(17)...))
		table := service(2, false, tableList(false, numbersTo(17)...))
		got := refusals(t, i, state{plain.Key: plain, table.Key: table})
		want := "10.96.0.2:80/tcp: service shop/web2:http needs a table of 2048 slots: " +
			"map sl_member: 2176 elements needed, 0 free, at most 128 for one list"
		if len(got) != 1 || got[0] != want {
			t.Errorf("refused: %q, want %q", got, want)
		}
		state{plain.Key: plain}.check(t, i)
		i.sound(t)
	})
	t.Run("too many backends", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), withTables)
		f := service(1, false, tableList(false, numbersTo(rendezvous.MaxBackends)...))
		s := state{f.Key: f}
		i.apply(t, s.all())
		larger := service(1, false, tableList(false, numbersTo(rendezvous.MaxBackends+1)...))
		got := refusals(t, i, state{f.Key: larger})
		want := "10.96.0.1:80/tcp: service shop/web1:http needs a table of 32768 slots: " +
			"2049 backends, at most 2048 have a table"
		if len(got) != 1 || got[0] != want {
			t.Errorf("refused: %q, want %q", got, want)
		}
		s.check(t, i) // the old list stays
	})
	t.Run("existing tables can be exchanged", func(t *testing.T) {
		i := start(t, kerneltest.NewBPFFS(t), withTables)
		// short lists are added and removed, and fragment the free space
		s := state{}
		for n := range 200 {
			f := service(n, false, listOf(false, 20*n, 20*n+1, 20*n+2, 20*n+3))
			s[f.Key] = f
		}
		i.apply(t, s.all())
		var refused []string
		kept := map[frontend.Key]bool{}
		for n := range 20 {
			f := service(300+n, false, tableList(false, numbersTo(600+n)...))
			tx := &frontendtx.Transaction{Partial: true}
			tx.Upsert(f)
			res, err := i.Apply(t.Context(), tx)
			if err != nil {
				t.Fatal(err)
			}
			if len(res.Refused) > 0 {
				refused = append(refused, res.Refused[0].Err.Error())
				continue
			}
			kept[f.Key], s[f.Key] = true, f
		}
		if len(kept) < 5 || len(refused) == 0 || !strings.Contains(refused[0], "service shop/web3") {
			t.Fatalf("%d tables fit, refused: %q", len(kept), refused)
		}
		t.Logf("%d tables of 32,768 slots fit; then: %s", len(kept), refused[0])
		for n := range 20 {
			if f := service(300+n, false, tableList(false, numbersTo(900+n)...)); kept[f.Key] {
				tx := &frontendtx.Transaction{Partial: true}
				tx.Upsert(f)
				i.apply(t, tx)
				s[f.Key] = f
			}
		}
		s.check(t, i)
		i.sound(t)
	})
}
