// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"net/netip"

	"github.com/sluice-net/sluice/model/policytable"
)

// Shared by the tests on a real kernel and on the fake one.
type (
	TestState   = state
	TestService = service
)

var (
	TestStates     = testStates
	TestPath       = path
	NewTestService = newService
	TestAddrs      = testAddrs
	TestPoints     = testPoints
)

// Snapshot returns a message with a complete state.
func (s *service) Snapshot(st state) policytable.Message { return s.snapshot(st) }

// Change returns a message that leads to a state.
func (s *service) Change(st state) policytable.Message { return s.change(st) }

// Allows returns the expected verdict.
func (s state) Allows(subject uint32, d policytable.Direction, peer uint32, addr netip.Addr, point uint32) bool {
	return s.allows(subject, d, peer, addr, point)
}

// Figures returns how many tables and identities a state needs.
func (s state) Figures() (tables, identities int) {
	seen := map[string]bool{}
	for _, list := range s.policies {
		for _, p := range list.sides() {
			if p.enforce {
				seen[p.text()] = true
			}
		}
	}
	return len(seen), len(s.identities)
}

// Load applies a snapshot.
func (a *Applier) Load(m policytable.Message) error {
	_, err := a.load(m)
	return err
}

// Apply applies a later message.
func (a *Applier) Apply(ctx context.Context, m policytable.Message) error {
	_, err := a.apply(ctx, m)
	return err
}
