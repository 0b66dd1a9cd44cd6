// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

// interim is the use of one limit between two computations of its levels.
type interim struct {
	size        int
	total, used int // sums over all tenants
	asked, got  map[Tenant]int
	division    *Division // of the last computation; nil before the first
}

// available returns how many more units a tenant may use according to the last levels. It may be negative. first
// returns the part of a tenant before the first computation.
func (u interim) available(t Tenant, s Settings, first func(tenants int) int) int {
	system := u.got[System]
	if t == System {
		free := u.size - u.used
		if !u.allFit() {
			free = min(free, u.size/2-system)
		}
		return free
	}
	tenants := u.size - max(u.size/10, system)
	free := tenants - (u.used - system)
	switch {
	case u.division == nil:
		return min(free, first(tenants)-u.got[t])
	case u.allFit():
		return free
	}
	most := u.division.Levels[t.group()]
	if had, ok := u.division.Shares[t]; ok {
		most = max(most, had.Allotment)
	}
	if t.kind == KindLabelled {
		most = max(most, u.division.Tenants*s.Guarantees[t.name]/100)
	}
	return min(free, most-u.got[t])
}

// surelyFit reports whether tenants may use all units that they ask for in addition, in any order. It is an
// approximation without a copy of the sums: false means that only an attempt shows the result. It is never true if an
// attempt would refuse a unit.
func (u interim) surelyFit(more map[Tenant]int, s Settings, first func(tenants int) int) bool {
	if more[System] > 0 {
		return false
	}
	for _, n := range more {
		u.total, u.used = u.total+n, u.used+n
	}
	if u.division != nil && !u.allFit() {
		return false
	}
	for t, n := range more {
		if n > 0 && u.available(t, s, func(tenants int) int { return first(tenants) - n }) < 0 {
			return false
		}
	}
	return true
}

// allFit reports whether all asks for the limit can be admitted.
func (u interim) allFit() bool {
	system := min(u.asked[System], u.size/2)
	return u.total-system <= u.size-max(u.size/10, system)
}
