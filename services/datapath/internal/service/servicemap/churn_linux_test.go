// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// TestKernelListsOfOneTenantLeavePiecesForOthers: a tenant repeatedly creates many short lists and removes most of
// them, which fragments the free space. Longer lists of others that fit are still written, for new and for existing
// frontends.
func TestKernelListsOfOneTenantLeavePiecesForOthers(t *testing.T) {
	const members = 16384
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 65536, fronts: 32768, members: members, backends: 65536})
	s := state{}
	b := service(60000, false, listOf(false, 60000))
	s[b.Key] = b
	i.apply(t, s.all())
	for n, next := 0, 0; n < 3; n++ { // the attack: in each round, one of five lists stays
		was, with := s.without(), s.without()
		free := i.store.members.Free() - reserve(members)
		for range free {
			f := service(next, false, listOf(false, next))
			with[f.Key], next = f, next+1
			if next%5 == 0 {
				was[f.Key] = f
			}
		}
		i.apply(t, s.to(with))
		i.apply(t, with.to(was))
		if err := i.Barrier(t.Context()); err != nil {
			t.Fatal(err)
		}
		i.collectAll(t)
		s = was
	}
	run, ok := i.store.members.Take(64)
	if ok {
		t.Fatalf("the attack leaves a piece at %d of %d free places", run.Base, i.store.members.Free())
	}
	before := s
	s = s.without()
	grown := service(60000, false, listOf(false, numbersFrom(60000, 64)...))
	fresh := service(60001, false, listOf(false, numbersFrom(60100, 200)...))
	table := service(60002, false, tableList(false, numbersFrom(60400, 17)...))
	s[grown.Key], s[fresh.Key], s[table.Key] = grown, fresh, table
	tx := before.to(s)
	tx.Partial = true
	i.apply(t, tx)
	if err := i.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.check(t, i)
	i.sound(t)
	i.apply(t, s.to(state{}))
	if err := i.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	i.collectAll(t)
	if c, err := i.Counts(); err != nil || c.Members != 0 {
		t.Errorf("%+v, %v, want no members", c, err)
	}
}

// numbersFrom returns n numbers, starting with first.
func numbersFrom(first, n int) (ns []int) {
	for i := range n {
		ns = append(ns, first+i)
	}
	return ns
}

// TestKernelNumbersThatRestCountForTheTenantThatUsedThem: a tenant repeatedly removes its Services and creates others,
// faster than IDs become free. New frontends of other tenants and changed backends still get IDs, and the tenant gets
// its own when its IDs are free again.
func TestKernelNumbersThatRestCountForTheTenantThatUsedThem(t *testing.T) {
	const size, share = 1024, 300
	for name, tenant := range map[string]func(round int) shares.Tenant{
		"one tenant":               func(int) shares.Tenant { return shares.Labelled("noisy") },
		"one namespace":            func(int) shares.Tenant { return shares.Namespace("noisy") },
		"many namespaces":          func(round int) shares.Tenant { return shares.Namespace(fmt.Sprint("noisy", round)) },
		"all namespaces, together": func(int) shares.Tenant { return shares.TenantOf(shares.KindUnlabelled, "") },
	} {
		for _, is6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, IPv6 %t", name, is6), func(t *testing.T) {
				dir, sz := kerneltest.NewBPFFS(t), sizes{keys: 8192, fronts: size, members: 8192, backends: size}
				i := start(t, dir, sz)
				quiet := func(n int, backends ...int) *frontend.Frontend {
					f := service(60000+n, is6, listOf(is6, backends...))
					f.Tenant = shares.Labelled("quiet")
					return f
				}
				there := quiet(0, 60000)
				s := state{there.Key: there}
				i.apply(t, s.all())
				refused := 0
				for round := range 20 { // the attack
					with := state{there.Key: there}
					for n := range share {
						f := service(round*share+n, is6, listOf(is6, round*share+n))
						f.Tenant = tenant(round)
						with[f.Key] = f
					}
					res, err := i.Apply(t.Context(), s.to(with))
					if err != nil {
						t.Fatal(err)
					}
					refused += len(res.Refused)
					s = with
					if round == 0 { // the next process learns which tenant has which frontends
						i.close(t)
						i = start(t, dir, sz)
						i.apply(t, s.all())
					}
				}
				if refused == 0 {
					t.Fatal("the attack has used up no numbers")
				}
				tx := &frontendtx.Transaction{Partial: true}
				tx.Upsert(quiet(0, numbersFrom(60001, 20)...))
				for n := range 20 {
					tx.Upsert(quiet(1+n, 60100+n))
				}
				i.apply(t, tx)
				i.sound(t)

				if !i.Short() {
					t.Error("Short is not set")
				}
				i.clock = i.clock.Add(callTime)
				if _, err := i.Collect(t.Context(), nobody{}); err != nil { // the IDs go into quarantine
					t.Fatal(err)
				}
				i.clock = i.clock.Add(callTime)
				if n, err := i.Collect(t.Context(), nobody{}); err != nil || n == 0 {
					t.Fatalf("%d numbers are free (%v)", n, err)
				}
				select {
				case <-i.Freed():
				default:
					t.Error("Freed did not fire")
				}
				again := &frontendtx.Transaction{Partial: true}
				for _, f := range s {
					if f != there {
						again.Upsert(f)
					}
				}
				i.apply(t, again)
				i.sound(t)
				for kind := range i.store.removed {
					if r := i.store.removed[kind]; len(r.of) > 0 || r.others != 0 {
						t.Errorf("kind %d: %+v rest, want none", kind, r)
					}
				}
			})
		}
	}
}

// nobody is a set of sockets that reference no IDs.
type nobody struct{}

// Named implements Users.
func (nobody) Named(context.Context) (Numbers, error) { return NoNumbers(), nil }

// TestKernelTablesWithinTheLimitLeaveRoomForLists: a tenant has as many small, medium or large tables as nine tenths of
// the limit of backends allow, in two lists per Service. Lists of others fit into the last tenth, and every table can
// be exchanged.
func TestKernelTablesWithinTheLimitLeaveRoomForLists(t *testing.T) {
	for _, n := range []int{17, 33, 300, 2048} {
		t.Run(fmt.Sprint(n, " backends"), func(t *testing.T) {
			i := start(t, kerneltest.NewBPFFS(t), sizes{})
			c, ok := i.Capacity()
			if !ok {
				t.Fatal("there is no capacity for services")
			}
			limit := min(c.Backends, c.Members/2)
			s := state{}
			put := func(number int, units int, backends ...int) (left int) {
				var f *frontend.Frontend
				if table := len(backends) > 2; table {
					f = nodePort(uint16(number), false, tableList(false, backends...))
					f.Outside = tableList(false, backends[1:]...)
					left = units - frontend.Units(len(backends), 2)
				} else {
					f = nodePort(uint16(number), false, listOf(false, backends...))
					f.Outside = listOf(false, backends[1:]...)
					left = units - len(backends)
				}
				if left >= 0 {
					s[f.Key] = f
				}
				return left
			}
			number := 1
			for units := limit * 9 / 10; units >= 0; number++ {
				units = put(number, units, numbersFrom(number*(n+1), n)...)
			}
			tables := len(s)
			i.apply(t, s.all())
			for units := limit / 10; units >= 0 && number < 20000; number++ {
				units = put(number, units, 65000-number*2, 65001-number*2)
			}
			tx := state{}.to(s)
			tx.Partial = true
			i.apply(t, tx)
			i.sound(t)
			t.Logf("%d tables and %d lists", 2*tables, 2*(len(s)-tables))
		})
	}
}

// TestKernelSourceRangesOfOneTenantLeaveRoomForOthers: a tenant adds as many source ranges as it can, also across a
// restart and through many namespaces. Another tenant's source ranges fit, and frontends beyond the share reject every
// client.
func TestKernelSourceRangesOfOneTenantLeaveRoomForOthers(t *testing.T) {
	const size = 2048
	dir, sz := kerneltest.NewBPFFS(t), sizes{keys: size}
	i := start(t, dir, sz)
	balancer := func(n, sources int, of shares.Tenant) *frontend.Frontend {
		f := service(n, false, listOf(false, 1))
		f.Kind, f.Tenant = frontend.LoadBalancer, of
		for k := range sources {
			f.SourceRanges = append(f.SourceRanges, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(k), 0}), 24))
		}
		return f
	}
	s, refused := state{}, 0
	attack := func(first, n int, of func(n int) shares.Tenant) {
		t.Helper()
		tx := &frontendtx.Transaction{Partial: true}
		for k := range n {
			f := balancer(first+k, 50, of(k))
			s[f.Key] = f
			tx.Upsert(f)
		}
		res, err := i.Apply(t.Context(), tx)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range res.Refused {
			delete(s, r.Key)
			refused++
		}
	}
	attack(0, 30, func(int) shares.Tenant { return shares.Labelled("noisy") })
	attack(100, 30, func(n int) shares.Tenant { return shares.Namespace(fmt.Sprint("noisy", n)) })
	i.close(t)
	i = start(t, dir, sz)
	again := &frontendtx.Transaction{Partial: true}
	for _, f := range s {
		again.Upsert(f)
	}
	if res := i.apply(t, again); res.Changed != 0 {
		t.Errorf("%d changes after a restart", res.Changed)
	}
	attack(200, 30, func(int) shares.Tenant { return shares.Labelled("noisy") })
	if refused == 0 {
		t.Fatal("no change of the attack is refused")
	}
	tx := &frontendtx.Transaction{Partial: true}
	tx.Upsert(balancer(1000, 40, shares.Labelled("quiet")))
	i.apply(t, tx)
	i.sound(t)
	for _, f := range s {
		tx := &frontendtx.Transaction{Partial: true}
		tx.Remove(f.Key)
		i.apply(t, tx)
	}
	if r := i.store.sourceUse[ip4]; r.held.Used() != 80 || len(r.of) != 1 {
		t.Errorf("%+v are in use, want the 80 of the other tenant", r)
	}
}
