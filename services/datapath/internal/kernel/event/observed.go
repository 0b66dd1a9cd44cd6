// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observe"
)

// Observed is what one side said, as observers see it; empty if it was not
// evaluated.
func (s SideVerdict) Observed(slot slotmap.Slot) observe.Side {
	if s.By == ByNobody {
		return observe.Side{}
	}
	o := observe.Side{
		By: s.By.String(), Verdict: observe.Dropped, Rule: s.Rule, Table: uint16(s.Table), Generation: s.Gen, Slot: slot,
	}
	switch {
	case s.Audited:
		o.Verdict = observe.Audited
	case s.Redirects():
		o.Verdict = observe.Redirected
	case s.Action == ActionAllow:
		o.Verdict = observe.Forwarded
	}
	return o
}
