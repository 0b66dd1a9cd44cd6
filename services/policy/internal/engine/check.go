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

// Check returns an error if the rules of one policy alone exceed a limit of a table, whatever the subjects and peers
// are. Apply would detect this only once the policy has a subject.
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
				_, failed := New(Config{}).build([]*compile.Program{p}, nil)
				err = failed[p.Hash]
			}
			if err != nil {
				return fmt.Errorf("the %s rules alone, for any subject: %w", d, err)
			}
		}
	}
	return nil
}

// fitsSurely reports whether there are too few rules to exceed a limit: a prefix adds at most two classes, and a port
// adds at most two intervals to each class. If it returns false, the rules may still fit.
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

// maxTried limits how many identities without endpoints a trial compiles tables for.
const maxTried = 256

// trySelected compiles the tables of identities that the policies of the change select and that have no endpoint on
// this node. It returns an error if a table exceeds a limit. other is an engine in which the change was applied.
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
		// If the same table fails without the change, the change is not the cause.
		if before, ferr := d.Fork(nil, id.Number); ferr == nil && len(before.Reduced()) == 0 {
			return fmt.Errorf("for an identity that has no endpoint here: %w", err)
		}
	}
	return nil
}
