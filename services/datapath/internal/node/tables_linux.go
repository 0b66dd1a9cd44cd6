// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/policysync"
)

// Subjects of what auditTables finds.
const (
	subjectTable = "policy-table"
	subjectWord  = policysync.SubjectEndpoint
)

// auditTables compares the maps of tables, classes, rows, blocks and
// identities with what was written into them, and the policy word of every
// endpoint with the tables that it should name.
func (n *Node) auditTables(repair bool) ([]endpoint.Finding, error) {
	if n.o.ValidateOnly {
		return nil, nil // its maps are its own
	}
	var findings []endpoint.Finding
	differences, err := n.Kernel.Tables.Audit(repair)
	for _, d := range differences {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: subjectTable, Key: d}, Repaired: repair && err == nil, Err: err,
		})
	}
	if err != nil || n.Policy == nil {
		return findings, err
	}
	// Under the applier's lock, so that no change of tables comes in between.
	mismatches, err := n.Policy.Check(repair)
	for _, d := range mismatches {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: d.Subject, Key: d.Key, Want: d.Want, Have: d.Have}, Repaired: repair && err == nil, Err: err,
		})
	}
	return findings, err
}
