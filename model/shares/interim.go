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

// room returns how many more units a tenant may use according to the last levels. It may be negative. first returns
// the part of a tenant before the first computation.
func (u interim) room(t Tenant, s Settings, first func(tenants int) int) int {
	system := u.got[System]
	if t == System {
		room := u.size - u.used
		if !u.allFit() {
			room = min(room, u.size/2-system)
		}
		return room
	}
	tenants := u.size - max(u.size/10, system)
	room := tenants - (u.used - system)
	switch {
	case u.division == nil:
		return min(room, first(tenants)-u.got[t])
	case u.allFit():
		return room
	}
	most := u.division.Levels[t.group()]
	if had, ok := u.division.Shares[t]; ok {
		most = max(most, had.Allotment)
	}
	if t.kind == KindLabelled {
		most = max(most, u.division.Tenants*s.Guarantees[t.name]/100)
	}
	return min(room, most-u.got[t])
}

// allFit reports whether all asks for the limit can be admitted.
func (u interim) allFit() bool {
	system := min(u.asked[System], u.size/2)
	return u.total-system <= u.size-max(u.size/10, system)
}
