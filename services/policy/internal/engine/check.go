// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Check returns an error if the rules of a policy by themselves exceed a limit of a table, whatever the subjects and
// peers are. Apply would find this only once there is a subject.
func Check(o policy.Object) error {
	for i := range o.Specs {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			in := compile.Input{Direction: d, Groups: compile.NewGroups()}
			for _, r := range o.Specs[i].Rules {
				if r.Direction == d {
					in.Rules = append(in.Rules, r)
				}
			}
			if fitsSurely(in.Rules) {
				continue
			}
			p, err := compile.New(in)
			if err == nil {
				_, failed := New(Config{}).build([]*compile.Program{p})
				err = failed[p.Hash]
			}
			if err != nil {
				return fmt.Errorf("the %s rules alone, for any subject: %w", d, err)
			}
		}
	}
	return nil
}

// fitsSurely reports whether the rules are so few that they cannot exceed a limit: a prefix adds at most two classes,
// and a port at most two intervals to each class.
func fitsSurely(rules []*rule.Rule) bool {
	prefixes, ports := 0, 0
	for _, r := range rules {
		ports += len(r.Ports)
		for _, n := range r.Peers.Networks {
			prefixes += 1 + len(n.Except)
		}
		for _, g := range r.Peers.Groups {
			prefixes += 2 + len(g.Except)
		}
	}
	return len(rules) < table.MaxAddressClasses && prefixes < table.MaxAddressClasses/2 && (2*prefixes+2)*(ports+2) < table.MaxNodes
}

// maxTried limits the identities without endpoints that a trial checks.
const maxTried = 256

// trySelected returns an error if an identity without an endpoint here, which the change's policies select, could not
// get tables. other is an engine with the change.
func (d Draft) trySelected(other *Engine, c Change) error {
	tried := 0
	for _, id := range d.change.AddIdentities {
		if tried == maxTried {
			break
		}
		if other.IsSubject(id.Number) || id.Kind != identity.KindInCluster && id.Kind != identity.KindOther {
			continue
		}
		if !slices.ContainsFunc(c.UpsertPolicies, func(o policy.Object) bool { return Selects(&o, id) }) {
			continue
		}
		tried++
		err := other.Apply(Change{Refuse: true, AddSubjects: []identity.Numeric{id.Number}})
		if err == nil {
			continue
		}
		// If it fails without the change, too, the change is not the cause.
		if before, ferr := d.Fork(nil, id.Number); ferr == nil && len(before.Reduced()) == 0 {
			return fmt.Errorf("for an identity that has no endpoint here: %w", err)
		}
	}
	return nil
}
