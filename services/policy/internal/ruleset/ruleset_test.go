// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ruleset

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
)

// set returns the i-th of different sets.
func set(i int) *layer7.Set {
	return layer7.Union(policytable.ProxyHTTP, false, &layer7.Rules{HTTP: []layer7.HTTP{{Path: fmt.Sprint("/", i)}}})
}

// clock is a time that the test controls.
type clock struct{ time.Time }

func (c *clock) now() time.Time { return c.Time }

func registry(size int) (*Registry, *clock) {
	c := &clock{time.Unix(1_795_000_000, 0)}
	return New(Config{Size: size, Now: c.now}), c
}

func TestEqualContentHasTheSameNumber(t *testing.T) {
	r, _ := registry(100)
	a, b := shares.Labelled("a"), shares.Labelled("b")
	r.Use(a, set(1))
	r.Use(b, set(1))
	r.Use(a, set(2))
	one := r.Number(set(1).Digest())
	if one == 0 || one != r.Number(set(1).Digest()) || one == r.Number(set(2).Digest()) {
		t.Fatalf("numbers %d, %d, %d", one, r.Number(set(1).Digest()), r.Number(set(2).Digest()))
	}
	if got := r.Changes(); len(got) != 2 || got[0].Number != one || got[0].Set == nil {
		t.Errorf("changes %+v", got)
	}
	// The number stays while one of the tenants uses it.
	r.Release(a, []layer7.Digest{set(1).Digest()})
	if got := r.Number(set(1).Digest()); got != one || len(r.Changes()) != 0 {
		t.Errorf("number %d, want %d", got, one)
	}
}

func TestNumberIsKeptForTheGrace(t *testing.T) {
	r, c := registry(1)
	a := shares.Labelled("a")
	use := func(i int) policytable.RuleSet {
		r.Use(a, set(i))
		return r.Number(set(i).Digest())
	}
	first := use(1)
	r.Release(a, []layer7.Digest{set(1).Digest()})
	if n := use(1); n != first {
		t.Fatalf("number %d after %d: the content is the same", n, first)
	}
	r.Release(a, []layer7.Digest{set(1).Digest()})
	r.Changes()
	if n := use(2); n != 0 {
		t.Fatalf("number %d: connections may still carry it", n)
	}
	if r.Expire(); !r.Next().After(c.Time) {
		t.Errorf("the next call is due at %v", r.Next())
	}
	c.Time = c.Add(Grace)
	r.Expire()
	if !r.Divide() {
		t.Fatal("nothing has changed, although a number is free")
	}
	if n := r.Number(set(2).Digest()); n != first {
		t.Errorf("number %d, want %d", n, first)
	}
	if got := r.Changes(); len(got) != 1 || got[0].Set == nil || got[0].Digest != set(2).Digest() {
		t.Errorf("changes %+v, want the new content of the number", got)
	}
}

func TestRestoredNumbersStay(t *testing.T) {
	r, c := registry(10)
	r.Restore(7, set(1).Digest())
	r.Restore(7, set(2).Digest()) // taken
	r.Restore(0, set(3).Digest())
	r.Restore(11, set(3).Digest())
	a := shares.Labelled("a")
	for i := 1; i <= 3; i++ {
		r.Use(a, set(i))
	}
	r.Divide()
	if n := r.Number(set(1).Digest()); n != 7 {
		t.Errorf("number %d, want the restored one", n)
	}
	for i := 2; i <= 3; i++ {
		if n := r.Number(set(i).Digest()); n == 0 || n == 7 || n > 10 {
			t.Errorf("set %d has the number %d", i, n)
		}
	}
	c.Time = c.Add(Grace)
	r.Expire()
	if n := r.Number(set(1).Digest()); n != 7 {
		t.Errorf("number %d after the grace, want the restored one, which is in use", n)
	}
}

// TestHeldNumbersStay: while the kernel may use tables that this process has removed, no number gets another set.
func TestHeldNumbersStay(t *testing.T) {
	r, c := registry(2)
	r.Hold(true)
	r.Restore(1, set(1).Digest())
	a := shares.Labelled("a")
	r.Use(a, set(2))
	r.Release(a, []layer7.Digest{set(2).Digest()})
	r.Changes()
	c.Time = c.Add(10 * Grace)
	r.Expire()
	if f := r.Figures(); f.Idle != 2 || !r.Next().IsZero() || len(r.changes) > 0 {
		t.Fatalf("%+v, a call is due at %v: numbers became free while they were held", f, r.Next())
	}
	r.Hold(false)
	if want := c.Add(Grace); !r.Next().Equal(want) {
		t.Fatalf("a call is due at %v, want %v", r.Next(), want)
	}
	c.Time = c.Add(Grace - 1)
	if r.Expire(); r.Figures().Idle != 2 {
		t.Fatal("the grace did not start again")
	}
	c.Time = c.Add(1)
	if r.Expire(); r.Figures().Idle != 0 || len(r.Changes()) != 2 {
		t.Errorf("%+v: numbers are kept after the grace", r.Figures())
	}
}

// TestBlockedNumbersAreNotGiven: if it is unknown which numbers connections carry, no set gets a number during the
// grace period.
func TestBlockedNumbersAreNotGiven(t *testing.T) {
	r, c := registry(10)
	r.Hold(true)
	r.Block()
	a := shares.Labelled("a")
	r.Use(a, set(1))
	c.Time = c.Add(10 * Grace)
	r.Hold(false)
	c.Time = c.Add(Grace - 1)
	r.Expire()
	if r.Divide() || r.Number(set(1).Digest()) != 0 || r.Figures().Without != 1 || len(r.changes) > 0 {
		t.Fatalf("number %d, %+v: connections may carry it", r.Number(set(1).Digest()), r.Figures())
	}
	if want := c.Add(1); !r.Next().Equal(want) {
		t.Errorf("a call is due at %v, want %v", r.Next(), want)
	}
	c.Time = c.Add(1)
	r.Expire()
	if !r.Divide() || r.Number(set(1).Digest()) == 0 || r.Figures() != (Figures{Numbered: 1}) {
		t.Errorf("number %d, %+v after the grace", r.Number(set(1).Digest()), r.Figures())
	}
}

// TestUnstoredNumberIsNotUsed: a number becomes free and then gets another set. The other set is what is finally
// stored, also if the disk fails in between.
func TestUnstoredNumberIsNotUsed(t *testing.T) {
	c := &clock{time.Unix(1_795_000_000, 0)}
	var failure error
	waiting, disk := make(map[policytable.RuleSet]layer7.Digest), make(map[policytable.RuleSet]layer7.Digest)
	r := New(Config{Size: 1, Now: c.now, Store: func(changes []Change) error {
		for _, x := range changes {
			waiting[x.Number] = layer7.Digest{}
			if x.Set != nil {
				waiting[x.Number] = x.Digest
			}
		}
		if failure == nil {
			maps.Copy(disk, waiting)
			clear(waiting)
		}
		return failure
	}})
	a := shares.Labelled("a")
	r.Use(a, set(1))
	if r.Number(set(1).Digest()) != 1 || disk[1] != set(1).Digest() {
		t.Fatalf("number %d, stored %v", r.Number(set(1).Digest()), disk)
	}
	r.Changes()
	failure = errors.New("disk full")
	r.Release(a, []layer7.Digest{set(1).Digest()})
	c.Time = c.Add(Grace)
	r.Expire()
	r.Use(a, set(2))
	if n := r.Number(set(2).Digest()); n != 0 || r.Figures() != (Figures{Without: 1}) {
		t.Errorf("number %d, %+v while the number is not stored", n, r.Figures())
	}
	if got := r.Changes(); len(got) != 1 || got[0].Set != nil {
		t.Errorf("changes %+v, want that the number has no content", got)
	}
	if r.Retry(); r.Divide() || len(r.Changes()) > 0 {
		t.Error("a number was given although it could not be stored")
	}
	failure = nil
	r.Retry()
	if !r.Divide() || r.Divide() {
		t.Error("want one report that numbers have changed")
	}
	if n := r.Number(set(2).Digest()); n != 1 || disk[1] != set(2).Digest() || r.Figures() != (Figures{Numbered: 1}) {
		t.Errorf("number %d, stored %v, %+v", n, disk, r.Figures())
	}
	if got := r.Changes(); len(got) != 1 || got[0].Set == nil {
		t.Errorf("changes %+v, want the content", got)
	}
}

// TestSetWithANumberHasItForAllTenants: a set that has a number for one tenant has it for all tenants that use the
// set, including a tenant above its share.
func TestSetWithANumberHasItForAllTenants(t *testing.T) {
	const size = 16
	r, c := registry(size)
	greedy, small := shares.Labelled("greedy"), shares.Labelled("small")
	for i := range 3 * size {
		r.Use(greedy, set(i))
	}
	r.Divide()
	last := set(3*size - 1)
	if n := r.Number(last.Digest()); n != 0 {
		t.Fatalf("number %d for a set beyond the share", n)
	}
	r.Use(small, last)
	changed := false
	for range 3 { // the numbers that the greedy tenant loses become free after the grace period
		c.Time = c.Add(Grace)
		r.Expire()
		changed = r.Divide() || changed
	}
	if n := r.Number(last.Digest()); n == 0 || !changed || r.ledger.Admitted(user{tenant: greedy, digest: last.Digest()}) {
		t.Fatalf("number %d, changed %t; want a number although the greedy tenant may not have it", n, changed)
	}
	before := r.Figures()
	r.Release(small, []layer7.Digest{last.Digest()})
	if f := r.Figures(); r.Number(last.Digest()) != 0 || f.Numbered != before.Numbered-1 || f.Without != before.Without+1 {
		t.Errorf("%+v, before %+v: only the greedy tenant uses the set now", f, before)
	}
	if !r.Divide() {
		t.Error("it is not reported that the greedy tenant has lost the number")
	}
}

// TestOneTenantDoesNotTakeTheNumbersOfAnother: one tenant uses all numbers. When another tenant needs its share, the
// first tenant loses numbers.
func TestOneTenantDoesNotTakeTheNumbersOfAnother(t *testing.T) {
	const size = 40
	r, c := registry(size)
	greedy, small := shares.Labelled("greedy"), shares.Labelled("small")
	for i := range 3 * size {
		r.Use(greedy, set(i))
	}
	r.Divide()
	if f := r.Figures(); f.Numbered < size*9/10 || f.Numbered+f.Without != 3*size {
		t.Fatalf("%+v: one tenant alone may use nine tenths of %d numbers", f, size)
	}
	for i := range size / 4 {
		r.Use(small, set(1000+i))
	}
	for range 3 { // the numbers that the first tenant loses become free after the grace period
		c.Time = c.Add(Grace)
		r.Expire()
		r.Divide()
	}
	for i := range size / 4 {
		if r.Number(set(1000+i).Digest()) == 0 {
			t.Errorf("set %d of the small tenant has no number: %+v", i, r.Usage())
		}
	}
	seen := make(map[policytable.RuleSet]layer7.Digest)
	for u := range r.users {
		if n := r.Number(u.digest); n != 0 {
			if d, ok := seen[n]; ok && d != u.digest {
				t.Fatalf("two sets have the number %d", n)
			}
			seen[n] = u.digest
		}
	}
	if len(seen) < size*9/10 {
		t.Errorf("%d sets have a number, want nine tenths of %d", len(seen), size)
	}
}

// TestChangesOfOneTenantDoNotTakeTheNumbers: a tenant changes its rules continually, and each change leaves unused
// numbers that connections may still carry. The tenant cannot use up the numbers of other tenants in this way.
func TestChangesOfOneTenantDoNotTakeTheNumbers(t *testing.T) {
	const size = 40
	r, c := registry(size)
	greedy, small := shares.Labelled("greedy"), shares.Labelled("small")
	for i := range 5 * size {
		r.Use(greedy, set(i))
		r.Divide()
		r.Release(greedy, []layer7.Digest{set(i).Digest()})
	}
	if f := r.Figures(); f.Idle > size*9/10 || f.Idle < size/2 {
		t.Fatalf("%+v: one tenant alone may use nine tenths of %d numbers", f, size)
	}
	for i := range 4 {
		r.Use(small, set(1000+i))
	}
	c.Time = c.Add(shares.LevelInterval)
	r.Divide()
	for i := range 4 {
		if r.Number(set(1000+i).Digest()) == 0 {
			t.Errorf("set %d of the small tenant has no number: %+v", i, r.Usage())
		}
	}
	c.Time = c.Add(Grace)
	r.Expire()
	if f := r.Figures(); f.Idle != 0 || f.Numbered != 4 {
		t.Errorf("%+v after the grace", f)
	}
	for i := range size / 2 {
		r.Use(greedy, set(2000+i))
		if r.Number(set(2000+i).Digest()) == 0 {
			t.Errorf("set %d has no number after the grace: %+v", i, r.Usage())
		}
	}
}

// TestUnusedNumberCountsOnce: an unused number counts only once: for its last user, or for the user that uses it
// again.
func TestUnusedNumberCountsOnce(t *testing.T) {
	r, c := registry(1000)
	a, b := shares.Labelled("a"), shares.Labelled("b")
	used := func() int { return r.Usage()[0].Used }
	r.Use(a, set(1))
	first := r.Number(set(1).Digest())
	r.Release(a, []layer7.Digest{set(1).Digest()})
	for _, tenant := range []shares.Tenant{a, b, a} {
		if n := used(); n != 1 {
			t.Fatalf("%d numbers count while one is unused", n)
		}
		r.Use(tenant, set(1))
		if n := r.Number(set(1).Digest()); n != first || used() != 1 {
			t.Fatalf("number %d, want %d; %d numbers count", n, first, used())
		}
		r.Release(tenant, []layer7.Digest{set(1).Digest()})
	}
	c.Time = c.Add(Grace)
	if r.Expire(); used() != 0 {
		t.Errorf("%d numbers count after the grace", used())
	}
}

func TestNothingIsLeftAfterAllTablesAreGone(t *testing.T) {
	r, c := registry(8)
	for i := range 20 {
		r.Use(shares.Labelled(fmt.Sprint(i%3)), set(i))
	}
	r.Divide()
	for i := range 20 {
		r.Release(shares.Labelled(fmt.Sprint(i%3)), []layer7.Digest{set(i).Digest()})
	}
	c.Time = c.Add(Grace)
	if r.Expire(); !r.Next().IsZero() {
		t.Errorf("a call is due at %v", r.Next())
	}
	left := len(r.users) + len(r.content) + len(r.taken) + len(r.numbers) + len(r.lacking) + r.refused
	if left != 0 || r.Figures() != (Figures{}) {
		t.Errorf("left: %+v", r)
	}
}

func TestSetThatIsTooLargeHasNoNumber(t *testing.T) {
	r, _ := registry(8)
	var rules layer7.Rules
	for i := range layer7.MaxEntries + 1 {
		rules.HTTP = append(rules.HTTP, layer7.HTTP{Path: fmt.Sprint("/", i)})
	}
	s := layer7.Union(policytable.ProxyHTTP, false, &rules)
	r.Use(shares.System, s)
	if n := r.Number(s.Digest()); n != 0 || r.Figures().Without != 1 {
		t.Errorf("number %d, %+v", n, r.Figures())
	}
	r.Release(shares.System, []layer7.Digest{s.Digest()})
	if r.Figures() != (Figures{}) {
		t.Errorf("left: %+v", r.Figures())
	}
}
