// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

var auditSchema = durable.Schema{Name: "sluice.datapath.audit-mode", Version: 1}

// maxAudit is the maximum size of the file in bytes: 4,095 endpoints with long names.
const maxAudit = 4 << 20

// AuditModes stores in one file which endpoints are in audit mode. Without the file no endpoint is in audit mode, so
// that policies are enforced.
type AuditModes struct{ path string }

// OpenAuditModes uses the file at path. Only one process may write it.
func OpenAuditModes(path string) AuditModes { return AuditModes{path} }

// Load implements auditmode.Store.
func (a AuditModes) Load() (auditmode.State, error) {
	var s auditmode.State
	err := durable.Load(a.path, maxAudit, auditSchema, &s)
	if errors.Is(err, fs.ErrNotExist) {
		return auditmode.State{}, nil
	}
	if err != nil {
		return auditmode.State{}, fmt.Errorf("read the audit modes: %w", err)
	}
	return s, nil
}

// Save implements auditmode.Store.
func (a AuditModes) Save(s auditmode.State) error {
	if s.Node == nil && len(s.Endpoints) == 0 {
		_, err := durable.Remove(a.path, durable.SyncAll)
		return err
	}
	return durable.Save(a.path, auditSchema, s, durable.SyncAll)
}

// Endpoints returns the endpoints in this boot's records that have an ID, for callers that run
// before the records are reconciled with the kernel.
func Endpoints(store endpoint.Records, bootID string) ([]endpoint.Endpoint, error) {
	records, _, err := store.Load()
	if err != nil {
		return nil, fmt.Errorf("read the records of endpoints: %w", err)
	}
	var all []endpoint.Endpoint
	for _, r := range records {
		if r.Phase == endpoint.PhaseReady && r.BootID == bootID && r.Slot != 0 {
			all = append(all, endpoint.Endpoint{Spec: r.Spec, Slot: r.Slot, Created: r.Created})
		}
	}
	return all, nil
}
