// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policymap writes and reads the maps of policy tables and of
// identities: it gives tables their numbers and places, changes them so that a
// program sees the table of before or of after, and adopts what an earlier
// process has written. It does not know from which policies a table is made, nor
// which endpoint it is for.
package policymap

import (
	"fmt"
	"log/slog"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Maps are the maps of tables. Its methods may be called concurrently; changes
// are applied one after the other.
type Maps struct {
	log       *slog.Logger
	endpoints *endpointmap.Maps // whose words name tables

	gate  pin.Gate
	store *tableStore
	left  *contents // of an earlier process, until Settle
}

// Open finds the maps of tables among all and adopts the tables that are in
// them. It writes nothing.
func Open(pm *pin.Maps, endpoints *endpointmap.Maps, log *slog.Logger) (*Maps, error) {
	m := &Maps{
		log: log, endpoints: endpoints,
		gate: pin.Gate{ValidateOnly: pm.ValidateOnly}, store: newTableStore(openTableMaps(pm)),
	}
	if pm.Adopted {
		if err := m.adopt(); err != nil {
			return nil, fmt.Errorf("adopt the policy tables: %w", err)
		}
	}
	return m, nil
}

// Close refuses every later call.
func (m *Maps) Close() { m.gate.Close() }
