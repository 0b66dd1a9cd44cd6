// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Evaluated gives the slots whose endpoints began, in this boot, with tables from a
// policy service.
func Evaluated(store endpoint.Records, bootID string) (map[uint16]bool, error) {
	records, _, err := store.Load()
	if err != nil {
		return nil, fmt.Errorf("read the records of endpoints: %w", err)
	}
	evaluated := map[uint16]bool{}
	for _, r := range records {
		if r.Phase == endpoint.PhaseReady && r.Evaluated && r.BootID == bootID {
			evaluated[r.Slot] = true
		}
	}
	return evaluated, nil
}

// ForgetEvaluated has no record say that the tables of its endpoint came from a
// policy service: the one that allows everything, which they get now, would
// seem to be a policy's when policies are wanted again.
func ForgetEvaluated(store endpoint.Records) error {
	records, _, err := store.Load()
	if err != nil {
		return fmt.Errorf("read the records of endpoints: %w", err)
	}
	for _, r := range records {
		if !r.Evaluated {
			continue
		}
		r.Evaluated = false
		if err := store.Save(r); err != nil {
			return fmt.Errorf("record of %s: %w", r.Spec.Owner, err)
		}
	}
	return nil
}
