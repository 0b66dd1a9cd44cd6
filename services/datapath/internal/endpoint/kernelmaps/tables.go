// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernelmaps

import "github.com/sluice-net/sluice/services/datapath/internal/endpoint"

// SubjectTable is the subject of a difference in the maps of policy tables;
// those of policysync are of what names the tables.
const SubjectTable = "policy-table"

// SubjectIPCache is the subject of a difference in the ipcache.
const SubjectIPCache = "ipcache"

// SubjectService is the subject of a difference in the maps of services.
const SubjectService = "service"

// AuditTables compares the ipcache with what it is to say of ranges and of other
// nodes, then the maps of tables, classes, rows, prefixes and
// identities with what was written into them, and the policy word of every
// endpoint with the tables that it should name. The maps of services come before
// those of tables.
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
	// Under the applier's lock, so that no change of tables comes in between.
	mismatches, err := m.Policy.Check(repair)
	for _, d := range mismatches {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: d.Subject, Key: d.Key, Want: d.Want, Have: d.Have},
			Repaired:   repair && err == nil, Err: err,
		})
	}
	return findings, err
}
