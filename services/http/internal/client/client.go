// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client decodes the rule sets of sluice-policy.
package client

import (
	"errors"
	"fmt"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/http/internal/rules"
)

// Sets are rules that package rulesets keeps up to date.
type Sets struct{ *rules.Rules }

// Upsert implements rulesets.Rules. A set that cannot be decoded allows nothing.
func (s Sets) Upsert(number uint16, m *policyv1.RuleSet) error {
	content, err := decode(m)
	if err != nil {
		s.Rules.Upsert(number, false, &layer7.Rules{})
		return fmt.Errorf("rule set %d: %w", number, err)
	}
	s.Rules.Upsert(number, m.GetAll(), content)
	return nil
}

// Want implements rulesets.Rules. It does nothing: no names are learned here.
func (Sets) Want(*policyv1.WantedNames) error { return nil }

func decode(m *policyv1.RuleSet) (*layer7.Rules, error) {
	out := &layer7.Rules{}
	for _, name := range m.GetServerNames() {
		p, err := dnsname.Parse(name)
		if err != nil {
			return nil, fmt.Errorf("server name %q: %w", name, err)
		}
		out.ServerNames = append(out.ServerNames, p)
	}
	for _, x := range m.GetHttp() {
		h := layer7.HTTP{Method: x.GetMethod(), Path: x.GetPath(), Host: x.GetHost()}
		for _, y := range x.GetHeaders() {
			h.Headers = append(h.Headers, layer7.Header{Name: y.GetName(), Value: y.GetValue(), HasValue: y.Value != nil})
		}
		for _, y := range x.GetHeaderMatches() {
			action, ok := mismatches[y.GetMismatch()]
			if !ok {
				return nil, fmt.Errorf("unknown action %d for header %s", y.GetMismatch(), y.GetName())
			}
			h.Matches = append(h.Matches, layer7.HeaderMatch{Name: y.GetName(), Value: y.GetValue(), Mismatch: action})
		}
		out.HTTP = append(out.HTTP, h)
	}
	if len(out.HTTP)+len(out.ServerNames) > layer7.MaxEntries {
		return nil, errors.New("too many rules")
	}
	return out, nil
}

var mismatches = map[policyv1.HeaderMismatch]layer7.Mismatch{
	policyv1.HeaderMismatch_HEADER_MISMATCH_UNSPECIFIED: layer7.Refuse,
	policyv1.HeaderMismatch_HEADER_MISMATCH_LOG:         layer7.Log,
	policyv1.HeaderMismatch_HEADER_MISMATCH_ADD:         layer7.Add,
	policyv1.HeaderMismatch_HEADER_MISMATCH_DELETE:      layer7.Delete,
	policyv1.HeaderMismatch_HEADER_MISMATCH_REPLACE:     layer7.Replace,
}
