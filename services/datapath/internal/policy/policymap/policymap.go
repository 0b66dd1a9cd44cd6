// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policymap writes and reads the maps of policy tables and of identities. It assigns IDs
// and ranges to tables, changes them so that a program sees either the old or the new table, and
// adopts what an earlier process wrote. It does not know which policies a table is made from, nor
// which endpoints use it.
package policymap

import (
	"fmt"
	"log/slog"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Maps are the maps of tables. Its methods may be called concurrently; changes are serialised.
type Maps struct {
	log       *slog.Logger
	endpoints *endpointmap.Maps // its policy entries refer to tables

	gate  pin.Gate
	store *tableStore
	left  *contents // of an earlier process, until RemoveLeftovers
}

// Open returns Maps on the pinned maps and adopts the tables in them. It writes nothing.
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

// Close makes every later call fail.
func (m *Maps) Close() { m.gate.Close() }
