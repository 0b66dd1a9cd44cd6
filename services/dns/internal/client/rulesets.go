// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// Sets are rules that package rulesets keeps up to date.
type Sets struct{ *rules.Rules }

// Upsert implements rulesets.Rules.
func (s Sets) Upsert(number uint16, m *policyv1.RuleSet) error {
	return s.Rules.Upsert(number, rules.Content{All: m.GetAll(), Names: m.GetDnsNames()})
}

// Want implements rulesets.Rules.
func (s Sets) Want(m *policyv1.WantedNames) error {
	if m == nil || m.GetAll() {
		return s.Rules.Want(nil)
	}
	return s.Rules.Want(append([]string{}, m.GetDnsNames()...))
}
