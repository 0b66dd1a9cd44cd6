// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"fmt"
	"strconv"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
)

// Subjects of what auditTables finds.
const (
	subjectTable = "policy-table"
	subjectWord  = "policy-word"
)

// auditTables compares the maps of tables, classes, rows, blocks and
// identities with what was written into them, and the policy word of every
// endpoint with the tables that it should name.
func (n *Node) auditTables(repair bool) ([]endpoint.Finding, error) {
	if n.o.ValidateOnly {
		return nil, nil // its maps are its own
	}
	var findings []endpoint.Finding
	differences, err := n.Kernel.AuditTables(repair)
	for _, d := range differences {
		findings = append(findings, endpoint.Finding{
			Difference: endpoint.Difference{Subject: subjectTable, Key: d}, Repaired: repair && err == nil, Err: err,
		})
	}
	if err != nil || n.Policy == nil {
		return findings, err
	}
	list, err := n.Kernel.Endpoints()
	if err != nil {
		return findings, err
	}
	for _, e := range list {
		if _, _, differs := n.compareWord(e); !differs {
			continue
		}
		// it may have changed since the listing
		if e, err = n.Kernel.Lookup(e.Slot); err != nil {
			continue // nobody has the slot any more
		}
		d, want, differs := n.compareWord(e)
		if !differs {
			continue
		}
		f := endpoint.Finding{Difference: d}
		if repair {
			_, f.Err = n.Kernel.SetPolicy(e.Slot, want.Egress, want.Ingress)
			f.Repaired = f.Err == nil
		}
		findings = append(findings, f)
	}
	return findings, nil
}

// compareWord compares the tables that an endpoint's word names with those
// that the applier has given it.
func (n *Node) compareWord(e kernel.Endpoint) (d endpoint.Difference, want kernel.Policy, differs bool) {
	p, ok := n.Policy.Of(uint16(e.Slot))
	if !ok {
		return d, want, false // it is being published or removed
	}
	want = kernel.Policy{Egress: kernel.Table(p.Egress), Ingress: kernel.Table(p.Ingress)}
	words := func(p kernel.Policy) string {
		return fmt.Sprintf("egress table %d ingress table %d", p.Egress, p.Ingress)
	}
	d = endpoint.Difference{Subject: subjectWord, Key: strconv.Itoa(int(e.Slot)), Want: words(want), Have: words(e.Policy)}
	return d, want, d.Want != d.Have
}
