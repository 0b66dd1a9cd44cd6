// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"testing"

	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

func TestWhatDecidedIsNamed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		v        table.Verdict
		enforced bool
		want     netv1.DecidedBy
	}{
		{table.Verdict{Reason: table.ByRule, Rule: 1}, true, netv1.DecidedBy_DECIDED_BY_RULE},
		{table.Verdict{Reason: table.ByDefault}, true, netv1.DecidedBy_DECIDED_BY_DEFAULT},
		{table.Verdict{Reason: table.ByHostAllow}, true, netv1.DecidedBy_DECIDED_BY_HOST_ALLOW},
		{table.Verdict{Reason: table.ByUnknownIdentity, Rule: 2}, true, netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY},
		{table.Verdict{Reason: table.ByDefault}, false, netv1.DecidedBy_DECIDED_BY_NO_POLICY},
	} {
		if got := DecidedBy(c.v, c.enforced); got != c.want {
			t.Errorf("%+v, enforced %t: %s, want %s", c.v, c.enforced, got, c.want)
		}
	}
}
