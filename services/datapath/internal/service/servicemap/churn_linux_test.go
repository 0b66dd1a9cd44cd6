// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelListsOfOneTenantLeavePiecesForOthers: a tenant makes many short lists and removes most
// of them, again and again, so that what is free is in short pieces. Longer lists of others that
// fit are written nevertheless, new ones and those of frontends that are there.
func TestKernelListsOfOneTenantLeavePiecesForOthers(t *testing.T) {
	const members = 16384
	i := start(t, kerneltest.NewBPFFS(t), sizes{keys: 65536, fronts: 32768, members: members, backends: 65536})
	s := state{}
	b := service(60000, false, listOf(false, 60000))
	s[b.Key] = b
	i.apply(t, s.all())
	for n, next := 0, 0; n < 3; n++ { // the attack: each time, one list of five stays
		was, with := s.without(), s.without()
		free := i.store.places.Free() - reserve(members)
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
	run, ok := i.store.places.Take(64)
	if ok {
		t.Fatalf("the attack leaves a piece at %d of %d free places", run.Base, i.store.places.Free())
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

// numbersFrom are n numbers from the first on.
func numbersFrom(first, n int) (ns []int) {
	for i := range n {
		ns = append(ns, first+i)
	}
	return ns
}
