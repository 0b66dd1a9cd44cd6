// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package verdict formats the verdict that the policies of one side give a packet, as the datapath reports it.
package verdict

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Text returns the verdict of a side and its reason; empty if the side was not evaluated.
func Text(v *datapathv1.SideVerdict) string {
	if v == nil {
		return ""
	}
	return output.Enum(v.GetVerdict(), "VERDICT_") + " " + because(v)
}

// because returns the reason for the verdict.
func because(v *datapathv1.SideVerdict) string {
	switch v.GetDecidedBy() {
	case netv1.DecidedBy_DECIDED_BY_RULE:
		if len(v.GetRuleSources()) > 0 {
			return "by " + strings.Join(v.GetRuleSources(), " and ")
		}
		return fmt.Sprintf("by rule %d of table %d", v.GetRule(), v.GetTable())
	case netv1.DecidedBy_DECIDED_BY_DEFAULT:
		if v.GetVerdict() == datapathv1.Verdict_VERDICT_FORWARDED {
			return "because no rule denies it"
		}
		return "because no rule allows it"
	case netv1.DecidedBy_DECIDED_BY_HOST_ALLOW:
		return "because the local node is always allowed"
	case netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY:
		return "because the identity is not known"
	case netv1.DecidedBy_DECIDED_BY_NO_POLICY:
		switch v.GetTable() {
		case TableAllow:
			return "because no policy selects it"
		case TableWaiting:
			return "because its policy is not known yet"
		}
		return "because it has no table"
	}
	return output.Enum(v.GetDecidedBy(), "DECIDED_BY_")
}

// Reserved table numbers.
const (
	TableDeny    = 0
	TableAllow   = 1
	TableWaiting = 2
)

// TableText returns a table number, with an explanation of reserved numbers.
func TableText(n uint32) string {
	switch n {
	case TableDeny:
		return "0 (denies everything)"
	case TableAllow:
		return "1 (allows everything)"
	case TableWaiting:
		return "2 (waiting for a policy)"
	default:
		return strconv.FormatUint(uint64(n), 10)
	}
}
