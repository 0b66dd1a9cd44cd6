// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package verdict shows what one side's policy says of a packet, as the datapath reports it.
package verdict

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Side is what one side's policy said.
type Side struct {
	Verdict   string   `json:"verdict"`
	DecidedBy string   `json:"decidedBy"`
	Proxy     string   `json:"proxy,omitempty"`
	Rule      uint32   `json:"rule,omitempty"`
	Sources   []string `json:"ruleSources,omitempty"`
	Table     uint32   `json:"table"`
	Epoch     uint32   `json:"epoch"`
	Revision  uint64   `json:"revision"`
}

// SideOf shows a verdict of the datapath; nil if there is none.
func SideOf(v *datapathv1.SideVerdict) *Side {
	if v == nil {
		return nil
	}
	return &Side{
		Verdict: output.Enum(v.GetVerdict(), "VERDICT_"), DecidedBy: output.Enum(v.GetDecidedBy(), "DECIDED_BY_"),
		Proxy: output.Enum(v.GetProxy(), "PROXY_"), Rule: v.GetRule(),
		Sources: v.GetRuleSources(),
		Table:   v.GetTable(), Epoch: v.GetEpoch(), Revision: v.GetRevision(),
	}
}

// Because is what decided, in words.
func (v Side) Because() string {
	switch v.DecidedBy {
	case "rule":
		if len(v.Sources) > 0 {
			return "by " + strings.Join(v.Sources, " and ")
		}
		return fmt.Sprintf("by rule %d of table %d", v.Rule, v.Table)
	case "default":
		if v.Verdict == "forwarded" {
			return "because no rule denies it"
		}
		return "because no rule allows it"
	case "host-allow":
		return "because the local node may"
	case "unknown-identity":
		return "because the identity is not known"
	case "no-policy":
		switch v.Table {
		case TableAllow:
			return "because no policy selects it"
		case TableWaiting:
			return "because its policy is not known yet"
		default:
			return "because it has no table"
		}
	default:
		return strings.TrimSpace(v.DecidedBy)
	}
}

// Numbers of tables that are no tables.
const (
	TableDeny    = 0
	TableAllow   = 1
	TableWaiting = 2
)

// TableText is the number of a table, with what it stands for if it is none.
func TableText(n uint32) string {
	switch n {
	case TableDeny:
		return "0 (denies everything)"
	case TableAllow:
		return "1 (allows everything)"
	case TableWaiting:
		return "2 (waits for a policy)"
	default:
		return strconv.FormatUint(uint64(n), 10)
	}
}
