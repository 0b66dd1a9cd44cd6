// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Evaluated returns the endpoint IDs whose endpoints started, in this boot, with tables from a
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

// ForgetEvaluated clears Evaluated in every record, because policies are disabled and the endpoints
// now have the table that allows everything. When policies are enabled again, this table must not
// be taken for the policy service's.
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
