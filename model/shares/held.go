// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

// Parts of what tenants share of a limit whose units nobody takes back.
const (
	heldFirst   = 16 // a tenant has one of so many parts in any case
	heldReserve = 8  // one of so many parts is only for the first parts of tenants
)

// Held is the use of a limit whose units a tenant keeps until it returns them, such as the
// host ports of running pods. No level takes such units back, so a bound for each tenant has
// to keep room for the tenants that come later.
type Held struct {
	Size     int
	Labelled int // used by tenants with the label
	Others   int // used by namespaces without the label
	System   int
}

// Add counts n more units of a tenant; n may be negative.
func (h *Held) Add(t Tenant, n int) {
	switch {
	case t == System:
		h.System += n
	case t.HasLabel():
		h.Labelled += n
	default:
		h.Others += n
	}
}

// Used returns how many units all tenants have.
func (h *Held) Used() int { return h.Labelled + h.Others + h.System }

// Most returns how many units a tenant that has some may have at present.
//
// System may have what is free. The others share nine tenths of the limit, or what system
// leaves of it. A tenant may have a sixteenth of that, and beyond it half of what its group
// leaves free, while an eighth stays free for the sixteenths of others. Labelled tenants are
// one group, which does not count what the namespaces without the label have. All namespaces
// without the label together may have one half, so they take nothing from labelled tenants
// that stay within the other half.
func (h *Held) Most(t Tenant, has int) int {
	free := max(0, h.Size-h.Used())
	if t == System {
		return has + free
	}
	whole := max(0, h.Size-max(h.Size/10, h.System))
	used := h.Labelled + h.Others
	group, room := whole-h.Labelled, whole-used
	if !t.HasLabel() {
		group = whole - used
		room = min(room, whole/2-h.Others)
	}
	first := max(1, whole/heldFirst)
	// Of n units, n - first are at most half of what the group then leaves free.
	most := has + min((group-2*(has-first))/3, whole-whole/heldReserve-used)
	return min(max(first, most), has+max(0, room))
}
