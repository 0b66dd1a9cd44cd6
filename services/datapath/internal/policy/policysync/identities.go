// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// identities holds the kernel's entries of identities and the numbers of identity classes, as this
// process wrote or found them. The lock of the Applier guards it.
type identities struct {
	kernel    Kernel
	addresses Addresses // nil: no node addresses wait

	numbers map[policytable.ClassKey]nodetable.IdentityClass
	entries map[uint32]nodetable.Identity   // no entry is zero
	members map[nodetable.IdentityClass]int // number of identities with the class
}

func newIdentities(k Kernel, a Addresses) *identities {
	return &identities{
		kernel: k, addresses: a, numbers: map[policytable.ClassKey]nodetable.IdentityClass{},
		entries: map[uint32]nodetable.Identity{}, members: map[nodetable.IdentityClass]int{},
	}
}

// adopt reads the kernel's entries, and reports to Addresses which identities the adopted tables include.
func (x *identities) adopt() error {
	maps.Copy(x.numbers, x.kernel.IdentityClasses())
	entries, err := x.kernel.Identities()
	if err != nil {
		return fmt.Errorf("list identities: %w", err)
	}
	for id, entry := range entries {
		x.set(id, entry)
	}
	if x.addresses == nil {
		return nil
	}
	known := make([]identity.Numeric, 0, len(x.entries))
	for id := range x.entries {
		known = append(known, identity.Numeric(id))
	}
	if err := x.addresses.Gate(known); err != nil {
		return fmt.Errorf("withhold the addresses of unknown identities: %w", err)
	}
	return nil
}

// set stores the entry of an identity; zero removes it.
func (x *identities) set(id uint32, entry nodetable.Identity) {
	if old, ok := x.entries[id]; ok {
		if x.members[old.Class]--; x.members[old.Class] == 0 {
			delete(x.members, old.Class)
		}
		delete(x.entries, id)
	}
	if entry != (nodetable.Identity{}) {
		x.entries[id] = entry
		x.members[entry.Class]++
	}
}

// number returns the kernel's number of an identity class, 0 if all numbers are used.
func (x *identities) number(key policytable.ClassKey) (nodetable.IdentityClass, error) {
	if nc, ok := x.numbers[key]; ok {
		return nc, nil
	}
	nc, err := x.kernel.DefineIdentityClass(key)
	if errors.Is(err, nodetable.ErrNoCapacity) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("number of an identity class: %w", err)
	}
	x.numbers[key] = nc
	return nc, nil
}

// store writes entries. Before, it withdraws the addresses of identities that become unknown. Call
// publish after everything that depends on the entries.
func (x *identities) store(changes map[uint32]nodetable.Identity) error {
	if going := x.where(changes, false); len(going) > 0 {
		if err := x.addresses.Unknown(going...); err != nil {
			return fmt.Errorf("addresses of %d identities that are about to be unknown: %w", len(going), err)
		}
	}
	if err := x.kernel.SetIdentities(changes); err != nil {
		return fmt.Errorf("entries of %d identities: %w", len(changes), err)
	}
	for id, entry := range changes {
		x.set(id, entry)
	}
	return nil
}

// publish publishes the addresses of identities that all tables include now.
func (x *identities) publish(changes map[uint32]nodetable.Identity) error {
	known := x.where(changes, true)
	if len(known) == 0 {
		return nil
	}
	if err := x.addresses.Known(known...); err != nil {
		return fmt.Errorf("addresses of %d identities that are known now: %w", len(known), err)
	}
	return nil
}

// where returns the identities that become known by the changes or, if known is false, the identities that become
// unknown. Without Addresses it returns none.
func (x *identities) where(changes map[uint32]nodetable.Identity, known bool) (list []identity.Numeric) {
	if x.addresses == nil {
		return nil
	}
	for id, to := range changes {
		if to.Known == known {
			list = append(list, identity.Numeric(id))
		}
	}
	return list
}

// differing returns the expected entries that differ from the kernel's.
func (x *identities) differing(have map[uint32]nodetable.Identity) map[uint32]nodetable.Identity {
	changes := map[uint32]nodetable.Identity{}
	for id := range have {
		changes[id] = x.entries[id]
	}
	maps.Copy(changes, x.entries)
	maps.DeleteFunc(changes, func(id uint32, entry nodetable.Identity) bool { return have[id] == entry })
	return changes
}

// retireUnused retires the identity classes that no identity has and that are not in use, and
// returns how many.
func (x *identities) retireUnused(inUse func(nodetable.IdentityClass) bool) (int, error) {
	var classes []nodetable.IdentityClass
	for key, nc := range x.numbers {
		if x.members[nc] == 0 && !inUse(nc) {
			classes = append(classes, nc)
			delete(x.numbers, key)
		}
	}
	if len(classes) == 0 {
		return 0, nil
	}
	slices.Sort(classes)
	if err := x.kernel.RetireIdentityClasses(classes...); err != nil {
		return 0, fmt.Errorf("retire %d identity classes: %w", len(classes), err)
	}
	return len(classes), nil
}
