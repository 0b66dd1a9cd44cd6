// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package podshares

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

const unpaid = 0

// add adds n entries for an endpoint, and first removes entries of others if they do not fit. It returns how many
// entries each of the others lost, and false if the endpoint is refused.
func add(t *testing.T, a *Accounts, endpoint uint32, tenant string, n int) (lost map[uint32]int, admitted bool) {
	t.Helper()
	a.Open(endpoint, tenant)
	defer a.Close(endpoint)
	if !a.Admits(endpoint, 0, n) {
		return nil, false
	}
	lost = make(map[uint32]int)
	for a.Missing(0, n) > 0 {
		victim, count := a.Victim(0, n)
		if count == 0 {
			t.Fatalf("endpoint %d may add %d entries, %d are missing, and there is no victim", endpoint, n, a.Missing(0, n))
		}
		lost[victim] += count
		a.Charge(victim, 0, -count)
	}
	a.Charge(endpoint, 0, n)
	return lost, true
}

// fill adds single entries for an endpoint until it is refused, and returns how many it added.
func fill(t *testing.T, a *Accounts, endpoint uint32, tenant string) (n int) {
	t.Helper()
	for {
		if _, ok := add(t, a, endpoint, tenant, 1); !ok {
			return n
		}
		n++
	}
}

func uses(a *Accounts) map[uint32]int {
	out := make(map[uint32]int)
	for e := range a.All() {
		out[e] = a.Used(e, 0)
	}
	return out
}

// TestPodsOfOneTenantLeaveTheGuaranteesOfOthers: a single pod may use the whole limit. Pods that come later take
// exactly their guarantees from it.
func TestPodsOfOneTenantLeaveTheGuaranteesOfOthers(t *testing.T) {
	a := New(unpaid, 64)
	if n := fill(t, a, 1, "greedy"); n != 64 {
		t.Errorf("the first pod got %d entries, want the whole limit of 64", n)
	}
	if n := fill(t, a, 2, "small"); n != 16 {
		t.Errorf("a pod of a second tenant got %d entries, want its guarantee of 64/2/2", n)
	}
	if n := fill(t, a, 3, "greedy"); n != 8 {
		t.Errorf("a second pod of the first tenant got %d entries, want its guarantee of 64/2/2/2", n)
	}
	for i := range uint32(8) {
		fill(t, a, 10+i, "greedy")
	}
	if n := a.Used(2, 0); n != 16 {
		t.Errorf("further pods of the first tenant left %d entries of the second, want all 16", n)
	}
	if a.Total(0) != 64 || a.Missing(0, 1) != 1 || a.Missing(0, 5) != 5 {
		t.Errorf("%d entries; %d are missing for one more, and %d for five more",
			a.Total(0), a.Missing(0, 1), a.Missing(0, 5))
	}
}

// TestUnpaidEntriesAreRemovedFirst: entries that no pod pays for have no guarantee, so they are removed first.
func TestUnpaidEntriesAreRemovedFirst(t *testing.T) {
	for _, unpaid := range []uint32{0, ^uint32(0)} {
		a := New(unpaid, 16)
		a.Open(unpaid, "a tenant") // changes nothing
		a.Charge(unpaid, 0, 16)
		if n := a.Guarantee(unpaid, 0); n != 0 || a.Tenant(unpaid) != "" || len(a.tenants) != 0 {
			t.Errorf("unpaid has a guarantee of %d and the tenant %q", n, a.Tenant(unpaid))
		}
		if n := fill(t, a, 1, "a"); n != 8 || a.Used(unpaid, 0) != 8 {
			t.Errorf("a pod got %d entries, and %d are unpaid; want its guarantee of 8, and the rest",
				n, a.Used(unpaid, 0))
		}
		a.Close(unpaid)
		if !a.Has(unpaid) {
			t.Error("the account unpaid was removed")
		}
	}
}

// TestTenantWithoutEntriesReducesNoGuarantee: when all entries of a tenant have moved to other accounts, the tenant
// has no part of the limit.
func TestTenantWithoutEntriesReducesNoGuarantee(t *testing.T) {
	a := New(unpaid, 16)
	fill(t, a, 1, "a")
	add(t, a, 2, "b", 1)
	if n := a.Guarantee(2, 0); n != 4 {
		t.Errorf("with two tenants, a pod has a guarantee of %d, want 4", n)
	}
	for range 15 {
		a.Move(1, unpaid, 0)
	}
	if n := a.Guarantee(2, 0); n != 8 || a.Used(unpaid, 0) != 15 {
		t.Errorf("without the other tenant, a pod has a guarantee of %d, and %d entries are unpaid; want 8 and 15",
			n, a.Used(unpaid, 0))
	}
}

// TestEndpointWithAnotherTenantCountsThere: an endpoint counts for the tenant of its last request, also during a
// request. Its entries stay.
func TestEndpointWithAnotherTenantCountsThere(t *testing.T) {
	a := New(unpaid, 48)
	add(t, a, 1, "a", 3)
	add(t, a, 2, "b", 3)
	add(t, a, 3, "c", 3)
	a.Open(2, "a")
	for e, want := range map[uint32]int{1: 6, 2: 6, 3: 12} {
		if got := a.Guarantee(e, 0); got != want {
			t.Errorf("endpoint %d has a guarantee of %d, want %d", e, got, want)
		}
	}
	if a.Tenant(2) != "a" || a.Used(2, 0) != 3 {
		t.Errorf("endpoint 2 has tenant %s and %d entries", a.Tenant(2), a.Used(2, 0))
	}
	a.Charge(2, 0, -3)
	if a.Close(2); a.Has(2) || a.Guarantee(1, 0) != 12 {
		t.Errorf("after the request, endpoint 2 has an account: %t; the guarantee of endpoint 1 is %d, want 12",
			a.Has(2), a.Guarantee(1, 0))
	}
}

// TestVictimDependsOnTheEntriesAlone: if several endpoints are equally far above their guarantees, Victim returns the
// first of them.
func TestVictimDependsOnTheEntriesAlone(t *testing.T) {
	a := New(unpaid, 48)
	for e := range uint32(6) {
		a.Open(1+e, "a")
		a.Charge(1+e, 0, 8)
		a.Close(1 + e)
	}
	for range 50 {
		if e, n := a.Victim(0, 3); e != 1 || n != 3 {
			t.Fatalf("endpoint %d must lose %d entries, want 3 of endpoint 1", e, n)
		}
	}
}

// TestAccountStaysDuringARequest: an endpoint may lose its last entry while it requests another. Its account stays
// until the end of the request.
func TestAccountStaysDuringARequest(t *testing.T) {
	a := New(unpaid, 8, 8)
	add(t, a, 1, "a", 1)
	a.Open(1, "a")
	a.Charge(1, 0, -1)
	if !a.Has(1) || a.Guarantee(1, 1) != 4 {
		t.Fatalf("the account is there: %t", a.Has(1))
	}
	a.Charge(1, 1, 1)
	if a.Close(1); !a.Has(1) || a.Used(1, 0) != 0 || a.Used(1, 1) != 1 || a.Total(1) != 1 || a.Size(1) != 8 {
		t.Errorf("the account is there: %t", a.Has(1))
	}
}

// TestManyEntriesAreRemovedAtATime: Victim returns many entries at once. Otherwise a table would search all its
// entries for each new one.
func TestManyEntriesAreRemovedAtATime(t *testing.T) {
	a := New(unpaid, 64*evictions)
	add(t, a, 1, "a", 64*evictions)
	lost, ok := add(t, a, 2, "b", 1)
	if want := map[uint32]int{1: 64}; !ok || !maps.Equal(lost, want) {
		t.Errorf("admitted %t, removed %v, want %v", ok, lost, want)
	}
	lost, ok = add(t, a, 3, "c", 1000)
	if want := map[uint32]int{1: 1000 - 63}; !ok || !maps.Equal(lost, want) {
		t.Errorf("admitted %t, removed %v, want %v", ok, lost, want)
	}
}

// TestAccountsFollowTheRule makes random requests. It compares each answer with the rule, computed only from the
// entries.
func TestAccountsFollowTheRule(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	refused, victims := 0, 0
	for range 200 {
		size := 1 + r.IntN(60)
		a, used, tenants := New(unpaid, size), map[uint32]int{unpaid: 0}, map[uint32]string{}
		guarantee := func(endpoint uint32) int {
			if endpoint == unpaid {
				return 0
			}
			of := map[string]int{}
			for e := range used {
				if e != unpaid {
					of[tenants[e]]++
				}
			}
			return size / 2 / len(of) / of[tenants[endpoint]]
		}
		for step := range 200 {
			e, n := uint32(1+r.IntN(6)), 1+r.IntN(4)
			if r.IntN(3) == 0 { // entries expire
				if n = min(n, used[e]); n > 0 {
					a.Charge(e, 0, -n)
					if used[e] -= n; used[e] == 0 {
						delete(used, e)
					}
				}
				if had := used[e]; r.IntN(8) == 0 && had > 0 { // the pod is removed
					for range had {
						a.Move(e, unpaid, 0)
					}
					used[unpaid] += had
					delete(used, e)
				}
			} else {
				tenants[e] = fmt.Sprint("t", (int(e)+r.IntN(20)/19)%3) // seldom another tenant
				had := used[e]
				used[e] = had // counts from now on
				within := had+n <= guarantee(e)
				// Entries above the guarantees must fit into the half that is not guaranteed.
				above := max(0, had+n-guarantee(e))
				for other, u := range used {
					if other != e {
						above += max(0, u-guarantee(other))
					}
				}
				want := within || above <= size-size/2
				before, missing := maps.Clone(used), a.Missing(0, n)
				guarantees := map[uint32]int{}
				for other := range used {
					guarantees[other] = guarantee(other)
				}
				lost, admitted := add(t, a, e, tenants[e], n)
				if admitted != want {
					t.Fatalf("step %d of size %d: endpoint %d of %v with %d more: admitted %t, want %t",
						step, size, e, before, n, admitted, want)
				}
				if len(lost) > 0 && (!within || missing == 0) {
					t.Fatalf("step %d of size %d: endpoint %d of %v with %d more: others lost %v", step, size, e, before, n, lost)
				}
				for victim, count := range lost {
					victims++
					if used[victim] -= count; used[victim] < guarantees[victim] {
						t.Fatalf("step %d of size %d: endpoint %d lost %d of %v, its guarantee is %d",
							step, size, victim, count, before, guarantees[victim])
					}
					if used[victim] == 0 && victim != unpaid {
						delete(used, victim)
					}
				}
				if admitted {
					used[e] += n
				} else {
					refused++
				}
				if used[e] == 0 {
					delete(used, e)
				}
			}
			total := 0
			for _, n := range used {
				total += n
			}
			if got := uses(a); !maps.Equal(got, used) || a.Total(0) != total || total > size {
				t.Fatalf("step %d of size %d: accounts %v with a total of %d, want %v", step, size, got, a.Total(0), used)
			}
			for e := range used {
				if got, want := a.Guarantee(e, 0), guarantee(e); got != want || a.Within(e, 0, 1) != (used[e] < want) {
					t.Fatalf("step %d of size %d: endpoint %d of %v has a guarantee of %d, want %d",
						step, size, e, slices.Sorted(maps.Keys(used)), got, want)
				}
			}
		}
	}
	if refused < 100 || victims < 100 {
		t.Errorf("%d requests were refused, and entries of %d endpoints removed: too few to test the rule", refused, victims)
	}
}
