// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policywire converts policy tables and their steps to the messages of sluice.policy.v1 and
// back.
//
// The enum values of the messages are the values of model/policytable plus one, because 0 means
// unspecified there.
package policywire

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// Format is the table format that this release writes and reads.
const Format = policyv1.TableFormat_TABLE_FORMAT_RANGES

// Step writes a step. It panics if given an UnknownStep.
func Step(st policytable.Step) *policyv1.Step {
	switch x := st.(type) {
	case policytable.DefineIdentityClass:
		return &policyv1.Step{Step: &policyv1.Step_DefineIdentityClass{DefineIdentityClass: &policyv1.DefineIdentityClass{
			IdentityClass: uint32(x.IdentityClass), Key: slices.Clone(x.Key[:]),
		}}}
	case policytable.RetireIdentityClass:
		return &policyv1.Step{Step: &policyv1.Step_RetireIdentityClass{
			RetireIdentityClass: &policyv1.RetireIdentityClass{IdentityClass: uint32(x.IdentityClass)},
		}}
	case policytable.SetIdentity:
		return &policyv1.Step{Step: &policyv1.Step_SetIdentity{SetIdentity: Identity(x)}}
	case policytable.DefineTable:
		return &policyv1.Step{Step: &policyv1.Step_DefineTable{DefineTable: Table(x)}}
	case policytable.GrowTable:
		return &policyv1.Step{Step: &policyv1.Step_GrowTable{GrowTable: &policyv1.GrowTable{
			Table: uint64(x.Table), Classes: peerClasses(x.Classes),
		}}}
	case policytable.RetireTable:
		return &policyv1.Step{Step: &policyv1.Step_RetireTable{RetireTable: &policyv1.RetireTable{Table: uint64(x.Table)}}}
	case policytable.SetPeer:
		return &policyv1.Step{Step: &policyv1.Step_SetPeer{SetPeer: &policyv1.SetPeer{
			Table: uint64(x.Table), Row: row(x.Row),
		}}}
	case policytable.DeletePeer:
		return &policyv1.Step{Step: &policyv1.Step_DeletePeer{DeletePeer: &policyv1.DeletePeer{
			Table: uint64(x.Table), IdentityClass: uint32(x.IdentityClass),
		}}}
	case policytable.SetPrefix:
		return &policyv1.Step{Step: &policyv1.Step_SetPrefix{SetPrefix: &policyv1.SetPrefix{
			Table: uint64(x.Table), Prefix: prefix(x.Prefix, x.Classes),
		}}}
	case policytable.DeletePrefix:
		return &policyv1.Step{Step: &policyv1.Step_DeletePrefix{DeletePrefix: &policyv1.DeletePrefix{
			Table: uint64(x.Table), Prefix: x.Prefix.String(),
		}}}
	case policytable.BindSubject:
		return &policyv1.Step{Step: &policyv1.Step_BindSubject{BindSubject: &policyv1.BindSubject{
			Subject: uint32(x.Subject), Direction: Direction(x.Direction), Table: uint64(x.Table),
			PolicyRevision: x.Revision, Rules: Sources(x.Rules), Tenant: wire.Tenant(x.Tenant, x.Guarantee),
		}}}
	case policytable.RemoveSubject:
		return &policyv1.Step{Step: &policyv1.Step_RemoveSubject{RemoveSubject: &policyv1.RemoveSubject{
			Subject: uint32(x.Subject),
		}}}
	case policytable.Barrier:
		return &policyv1.Step{Step: &policyv1.Step_Barrier{Barrier: &policyv1.Barrier{
			PolicyRevision: x.PolicyRevision, IdentityRevision: x.IdentityRevision, AddressRevision: x.AddressRevision,
			State: []byte(x.State), Sources: x.Sources, Incomplete: x.Incomplete,
		}}}
	case policytable.SnapshotComplete:
		return &policyv1.Step{Step: &policyv1.Step_SnapshotComplete{SnapshotComplete: &policyv1.SnapshotComplete{}}}
	}
	panic(fmt.Sprintf("step %T has no message", st)) // a new kind of step needs one
}

// Identity writes what an identity is.
func Identity(x policytable.SetIdentity) *policyv1.SetIdentity {
	if x.IdentityClass == 0 {
		return &policyv1.SetIdentity{Identity: uint32(x.Identity)}
	}
	return &policyv1.SetIdentity{
		Identity: uint32(x.Identity), IdentityClass: uint32(x.IdentityClass),
		Kind: policyv1.PeerKind(x.Kind) + 1, Scope: policyv1.PeerScope(x.Scope) + 1,
	}
}

// Table writes a table, with its rows and prefixes in order.
func Table(x policytable.DefineTable) *policyv1.PolicyTable {
	t := x.Content
	out := &policyv1.PolicyTable{
		Table: uint64(x.Table), StructureHash: slices.Clone(t.Hash[:]),
		DefaultAllow: t.DefaultAllow, HostAllow: t.HostAllow, HasAddresses: t.HasAddresses,
		DefaultClasses: make([]*policyv1.KindClass, len(t.DefaultClasses)),
		AddressClasses: scopeClasses(t.AddressClasses),
		Rules:          make([]*policyv1.TableRule, len(t.Rules)),
		Classes:        peerClasses(t.Classes),
		Peers:          make([]*policyv1.PeerRow, len(x.Peers)),
		Prefixes:       make([]*policyv1.PrefixClasses, 0, len(t.Prefixes)),
	}
	for kind, class := range t.DefaultClasses {
		out.DefaultClasses[kind] = &policyv1.KindClass{Kind: policyv1.PeerKind(kind) + 1, Class: uint32(class)}
	}
	rules := make([]policyv1.TableRule, len(t.Rules))
	for i, r := range t.Rules {
		rules[i].Action, rules[i].Tier, rules[i].Proxy = Action(r.Action), Tier(r.Tier), Proxy(r.Proxy)
		rules[i].RuleSet, rules[i].PassesWithoutProxy = uint32(r.RuleSet), r.PassesWithoutProxy
		out.Rules[i] = &rules[i]
	}
	for i, r := range x.Peers {
		out.Peers[i] = row(r)
	}
	prefixes := make([]netip.Prefix, 0, len(t.Prefixes))
	for p := range t.Prefixes {
		prefixes = append(prefixes, p)
	}
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	for _, p := range prefixes {
		out.Prefixes = append(out.Prefixes, prefix(p, t.Prefixes[p]))
	}
	return out
}

func row(r policytable.Row) *policyv1.PeerRow {
	return &policyv1.PeerRow{IdentityClass: uint32(r.IdentityClass), Class: uint32(r.Class)}
}

func scopeClasses(classes policytable.PrefixClasses) []*policyv1.ScopeClass {
	out := make([]*policyv1.ScopeClass, len(classes))
	for scope, class := range classes {
		out[scope] = &policyv1.ScopeClass{Scope: policyv1.PeerScope(scope) + 1, Class: uint32(class)}
	}
	return out
}

func peerClasses(classes []policytable.Ranges) []*policyv1.PeerClass {
	out := make([]*policyv1.PeerClass, len(classes))
	for i, ranges := range classes {
		out[i] = &policyv1.PeerClass{Ranges: make([]*policyv1.PortRange, len(ranges))}
		for j, r := range ranges {
			out[i].Ranges[j] = &policyv1.PortRange{First: r.First, Last: r.Last, Admin: uint32(r.Admin), Rest: uint32(r.Rest)}
		}
	}
	return out
}

func prefix(p netip.Prefix, classes policytable.PrefixClasses) *policyv1.PrefixClasses {
	return &policyv1.PrefixClasses{Prefix: p.String(), Classes: scopeClasses(classes)}
}

// Sources writes source locations of rules, beginning with number 1.
func Sources(list [][]policytable.Source) []*policyv1.RuleSources {
	out := make([]*policyv1.RuleSources, len(list))
	for i, sources := range list {
		s := make([]*policyv1.RuleSource, len(sources))
		for j, src := range sources {
			s[j] = Source(src)
		}
		out[i] = &policyv1.RuleSources{Sources: s}
	}
	return out
}

// Source writes where a rule was written.
func Source(s policytable.Source) *policyv1.RuleSource {
	return &policyv1.RuleSource{Kind: s.Kind, Namespace: s.Namespace, Name: s.Name, Path: s.Path}
}

// Direction writes a direction.
func Direction(d policytable.Direction) netv1.Direction {
	if d == policytable.Egress {
		return netv1.Direction_DIRECTION_EGRESS
	}
	return netv1.Direction_DIRECTION_INGRESS
}

// Proxy writes the kind of a proxy.
func Proxy(p policytable.Proxy) netv1.Proxy { return netv1.Proxy(p) }

// Tier writes a tier.
func Tier(t policytable.Tier) policyv1.Tier { return policyv1.Tier(t) + 1 }

// Action writes what a rule or a verdict says.
func Action(a policytable.Action) policyv1.Action { return policyv1.Action(a) + 1 }
