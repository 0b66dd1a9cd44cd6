// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
)

// required are policies that ADD needs.
type required struct {
	warning
	Tables
}

func (required) AuditModes() *auditmode.Modes     { return nil }
func (*required) History() *policyhistory.History { return &policyhistory.History{} }
func (required) Required() bool                   { return true }
func (required) AuditsAll() bool                  { return false }

type ring struct{ *observe.Ring }

func (r ring) EventRing() *observe.Ring { return r.Ring }

// TestServerAsksTheSubjectsThatExist tests that a call, a status or a metric about a subject needs no more than the
// subject in the list, and that a subject that is turned off leaves them out.
func TestServerAsksTheSubjectsThatExist(t *testing.T) {
	all := []Subject{
		struct {
			warning
			Endpoints
		}{Endpoints: configured{parts: lifecycle.New(lifecycle.Config{Links: noLinks{}})}},
		struct {
			warning
			Events
			Ends
		}{Events: ring{observe.NewRing()}, Ends: ends{}},
		struct {
			warning
			Bounds
			Maps
		}{Bounds: noBounds{}, Maps: &fakeMaps{}},
		struct {
			warning
			Cluster
		}{},
	}
	s := New(Options{Subjects: all})
	if s.ends == nil || s.maps == nil || s.ring == nil || s.endpoints.Report == nil {
		t.Errorf("a subject was not found: %+v", s)
	}
	if s.policy != nil || s.rules != nil || s.backends != nil || s.explainer != nil {
		t.Errorf("subjects that do not exist were found: %v, %v, %v, %v", s.policy, s.rules, s.backends, s.explainer)
	}
	parts := len(s.parts)
	s = New(Options{Subjects: append(all, &required{}, struct {
		warning
		Frontends
		Backends
	}{})})
	if s.policy == nil || !s.policy.Required || s.rules == nil || s.backends == nil {
		t.Errorf("policies and services were not found: %v, %v, %v", s.policy, s.rules, s.backends)
	}
	if len(s.parts) != parts+2 || s.parts[len(s.parts)-1] != Part(s.policy) {
		t.Errorf("%d parts, without policies and services %d: want two more, policies last", len(s.parts), parts)
	}
}
