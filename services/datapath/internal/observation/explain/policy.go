// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policymap"
)

// Side is the verdict of one side's table.
type Side struct {
	event.SideVerdict
	// Place is the entry of the table that matches the other end; zero for tables with a fixed verdict.
	Place policymap.Place
}

// policies looks up both ends in the policy tables: their identities, and the entry of each side's table for the other
// end.
type policies struct {
	tables *policymap.Maps
}

func (policies) reads() facts { return ends | verdict }
func (policies) sets() facts  { return 0 }

func (p policies) explain(_ *query, x *Explanation) (err error) {
	x.Source.Word, x.Destination.Word = p.tables.Identity(x.Source.Identity), p.tables.Identity(x.Destination.Identity)
	if s := x.Egress; s != nil {
		if s.Place, err = p.tables.Place(s.Table, x.Destination.Word, x.Destination.Addr); err != nil {
			return err
		}
	}
	if s := x.Ingress; s != nil {
		s.Place, err = p.tables.Place(s.Table, x.Source.Word, x.Source.Addr)
	}
	return err
}
