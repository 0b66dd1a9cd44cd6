// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

// Fractions of the part of a limit that tenants share, for limits whose units are never taken back.
const (
	heldFirst   = 16 // a tenant may always use 1/heldFirst
	heldReserve = 8  // 1/heldReserve is reserved for the first parts of other tenants
)

// Held tracks the use of a limit whose units a tenant keeps until it returns them, such as the host ports of running
// pods. No level takes such units back, so the maximum of each tenant has to leave capacity for later tenants.
type Held struct {
	Size     int
	Labelled int // used by tenants with the label
	Others   int // used by namespaces without the label
	System   int
}

// Add adds n units to a tenant's use; n may be negative.
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

// Used returns the number of units in use by all tenants.
func (h *Held) Used() int { return h.Labelled + h.Others + h.System }

// Most returns how many units a tenant may have at present, given the units that it has.
//
// System may use all free units. The other tenants share nine tenths of the limit, or less if system uses more than a
// tenth. Of this, a tenant may use a sixteenth, plus half of what its group leaves free, while an eighth stays free
// for the sixteenths of other tenants. The group of labelled tenants does not count the units of namespaces without
// the label. All namespaces without the label together may use one half, so they take nothing from labelled tenants
// that stay within the other half.
func (h *Held) Most(t Tenant, has int) int {
	free := max(0, h.Size-h.Used())
	if t == System {
		return has + free
	}
	whole := max(0, h.Size-max(h.Size/10, h.System))
	used := h.Labelled + h.Others
	group, left := whole-h.Labelled, whole-used
	if !t.HasLabel() {
		group = whole - used
		left = min(left, whole/2-h.Others)
	}
	first := max(1, whole/heldFirst)
	// Of n units, n - first may be at most half of what the group then leaves free.
	most := has + min((group-2*(has-first))/3, whole-whole/heldReserve-used)
	return min(max(first, most), has+max(0, left))
}
