// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wire converts verdicts to messages.
package wire

import (
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// DecidedBy converts the reason of a verdict. enforced is false for a side without a table.
func DecidedBy(v table.Verdict, enforced bool) netv1.DecidedBy {
	switch {
	case !enforced:
		return netv1.DecidedBy_DECIDED_BY_NO_POLICY
	case v.Reason == table.ByRule:
		return netv1.DecidedBy_DECIDED_BY_RULE
	case v.Reason == table.ByHostAllow:
		return netv1.DecidedBy_DECIDED_BY_HOST_ALLOW
	case v.Reason == table.ByUnknownIdentity:
		return netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY
	}
	return netv1.DecidedBy_DECIDED_BY_DEFAULT
}
