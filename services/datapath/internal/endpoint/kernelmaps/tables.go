// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernelmaps

import "github.com/sluice-net/sluice/services/datapath/internal/endpoint"

// SubjectTable is the subject of differences in the maps of policy tables. Subjects from policysync
// concern the references to tables.
const SubjectTable = "policy-table"

// SubjectIPCache is the subject of a difference in the ipcache.
const SubjectIPCache = "ipcache"

// SubjectService is the subject of a difference in the maps of services.
const SubjectService = "service"

// AuditTables compares, in this order: the ipcache with the expected entries of prefixes and other
// nodes; the service maps; the maps of policy tables, classes, rows, prefixes and identities with
// what was written to them; and the policy entry of every endpoint with its expected tables.
func (m Maps) AuditTables(repair bool) ([]endpoint.Finding, error) {
	var findings []endpoint.Finding
	entries, err := m.IPCache.Audit(repair)
	for _, d := range entries {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: SubjectIPCache, Key: d.Prefix.String(), Want: d.Want, Have: d.Have},
			Repaired:   repair && err == nil, Err: err,
		})
	}
	if err != nil {
		return findings, err
	}
	services, err := m.Services.Audit(repair)
	for _, d := range services {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: SubjectService, Key: d}, Repaired: repair && err == nil, Err: err,
		})
	}
	if err != nil {
		return findings, err
	}
	differences, err := m.Tables.Audit(repair)
	for _, d := range differences {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: SubjectTable, Key: d}, Repaired: repair && err == nil, Err: err,
		})
	}
	if err != nil || m.Policy == nil {
		return findings, err
	}
	// Under the applier's lock, so that no change of tables interferes.
	mismatches, err := m.Policy.Check(repair)
	for _, d := range mismatches {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: d.Subject, Key: d.Key, Want: d.Want, Have: d.Have},
			Repaired:   repair && err == nil, Err: err,
		})
	}
	return findings, err
}
