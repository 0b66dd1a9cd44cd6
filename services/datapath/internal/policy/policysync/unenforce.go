// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Remove switches every endpoint to the table that allows everything and removes all state of the policy service,
// because policies are disabled.
func Remove(k Kernel) error {
	bindings, err := k.Bindings()
	if err != nil {
		return fmt.Errorf("list endpoints: %w", err)
	}
	for _, b := range bindings {
		if b.Blocked() || b.Egress == nodetable.Allow && b.Ingress == nodetable.Allow {
			continue
		}
		if _, err := k.SetPolicy(b.Slot, nodetable.Allow, nodetable.Allow); err != nil {
			return fmt.Errorf("set the policy of endpoint ID %d: %w", b.Slot, err)
		}
	}
	infos, err := k.Tables()
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	var tables []nodetable.ID
	for _, t := range infos {
		tables = append(tables, t.ID)
	}
	identities, err := k.Identities()
	if err != nil {
		return fmt.Errorf("list identities: %w", err)
	}
	for id := range identities {
		identities[id] = nodetable.Identity{}
	}
	var classes []nodetable.IdentityClass
	for _, ic := range k.IdentityClasses() {
		classes = append(classes, ic)
	}
	return errors.Join(k.RetireTables(tables...), k.SetIdentities(identities), k.RetireIdentityClasses(classes...))
}
