// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package publish

import (
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/observe"
)

// Side is what one side said, as observers see it; empty if it was not asked.
func Side(s kernel.SideVerdict, slot kernel.Slot) observe.Side {
	if s.By == kernel.ByNobody {
		return observe.Side{}
	}
	o := observe.Side{
		By: s.By.String(), Verdict: observe.Dropped, Rule: s.Rule, Table: uint16(s.Table), Generation: s.Gen, Slot: uint16(slot),
	}
	switch {
	case s.Audited:
		o.Verdict = observe.Audited
	case s.Redirects():
		o.Verdict = observe.Redirected
	case s.Action == kernel.ActionAllow:
		o.Verdict = observe.Forwarded
	}
	return o
}
