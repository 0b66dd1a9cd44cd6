// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wire writes the steps of the engine as the messages of the table
// stream. It knows both forms and nothing else: who gets a message, in which
// order and when, is for its callers.
//
// The enums of the messages are those of the engine plus one, since 0 means
// unspecified there.
package wire

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	protowire "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Format is what the messages look like.
const Format = policyv1.TableFormat_TABLE_FORMAT_RANGES

// Step writes one event. The revision is that of the policies which a binding
// belongs to; other events have none.
func Step(ev engine.Event, revision uint64) *policyv1.Step {
	switch x := ev.(type) {
	case engine.DefineIdentityClass:
		return &policyv1.Step{Step: &policyv1.Step_DefineIdentityClass{DefineIdentityClass: &policyv1.DefineIdentityClass{
			IdentityClass: uint32(x.IdentityClass), Key: slices.Clone(x.Key[:]),
		}}}
	case engine.RetireIdentityClass:
		return &policyv1.Step{Step: &policyv1.Step_RetireIdentityClass{
			RetireIdentityClass: &policyv1.RetireIdentityClass{IdentityClass: uint32(x.IdentityClass)},
		}}
	case engine.SetIdentity:
		return &policyv1.Step{Step: &policyv1.Step_SetIdentity{SetIdentity: Identity(x.Identity, x.Entry)}}
	case engine.DefineTable:
		return &policyv1.Step{Step: &policyv1.Step_DefineTable{DefineTable: Table(x)}}
	case engine.GrowTable:
		return &policyv1.Step{Step: &policyv1.Step_GrowTable{GrowTable: &policyv1.GrowTable{
			Table: uint64(x.Table), Classes: peerClasses(x.Classes),
		}}}
	case engine.RetireTable:
		return &policyv1.Step{Step: &policyv1.Step_RetireTable{RetireTable: &policyv1.RetireTable{Table: uint64(x.Table)}}}
	case engine.SetPeer:
		return &policyv1.Step{Step: &policyv1.Step_SetPeer{SetPeer: &policyv1.SetPeer{
			Table: uint64(x.Table), Row: &policyv1.PeerRow{IdentityClass: uint32(x.IdentityClass), Class: uint32(x.Class)},
		}}}
	case engine.DeletePeer:
		return &policyv1.Step{Step: &policyv1.Step_DeletePeer{DeletePeer: &policyv1.DeletePeer{
			Table: uint64(x.Table), IdentityClass: uint32(x.IdentityClass),
		}}}
	case engine.SetPrefix:
		return &policyv1.Step{Step: &policyv1.Step_SetPrefix{SetPrefix: &policyv1.SetPrefix{
			Table: uint64(x.Table), Prefix: prefix(x.Prefix, x.Classes),
		}}}
	case engine.DeletePrefix:
		return &policyv1.Step{Step: &policyv1.Step_DeletePrefix{DeletePrefix: &policyv1.DeletePrefix{
			Table: uint64(x.Table), Prefix: x.Prefix.String(),
		}}}
	case engine.BindSubject:
		return &policyv1.Step{Step: &policyv1.Step_BindSubject{BindSubject: &policyv1.BindSubject{
			Subject: uint32(x.Subject), Direction: Direction(x.Direction), Table: uint64(x.Table),
			PolicyRevision: revision, Rules: Sources(x.Sources), Tenant: protowire.Tenant(x.Tenant, x.Guarantee),
		}}}
	case engine.RemoveSubject:
		return &policyv1.Step{Step: &policyv1.Step_RemoveSubject{RemoveSubject: &policyv1.RemoveSubject{Subject: uint32(x.Subject)}}}
	}
	panic(fmt.Sprintf("event %T has no message", ev)) // a new kind of event needs one
}

// Identity writes the entry of an identity.
func Identity(n identity.Numeric, w table.Entry) *policyv1.SetIdentity {
	if !w.Known {
		return &policyv1.SetIdentity{Identity: uint32(n)}
	}
	return &policyv1.SetIdentity{
		Identity: uint32(n), IdentityClass: uint32(w.IdentityClass), Kind: policyv1.PeerKind(w.Kind) + 1, Scope: policyv1.PeerScope(w.Scope) + 1,
	}
}

// Table writes a table, its rows and prefixes in order.
func Table(d engine.DefineTable) *policyv1.PolicyTable {
	t := d.Content
	out := &policyv1.PolicyTable{
		Table: uint64(d.Table), StructureHash: slices.Clone(d.Hash[:]),
		DefaultAllow:   t.Flags&table.DefaultAllow != 0,
		HostAllow:      t.Flags&table.HostAllow != 0,
		HasAddresses:   t.Flags&table.HasAddresses != 0,
		DefaultClasses: make([]*policyv1.KindClass, len(t.Default)),
		AddressClasses: scopeClasses(t.Address),
		Rules:          make([]*policyv1.TableRule, len(t.Rules)),
		Classes:        peerClasses(t.Lists(0)),
		Peers:          make([]*policyv1.PeerRow, 0, len(t.Peers)),
		Prefixes:       make([]*policyv1.PrefixClasses, 0, t.Prefixes.Len()),
	}
	for kind, class := range t.Default {
		out.DefaultClasses[kind] = &policyv1.KindClass{Kind: policyv1.PeerKind(kind) + 1, Class: uint32(class)}
	}
	rules := make([]policyv1.TableRule, len(t.Rules))
	for i, r := range t.Rules {
		rules[i].Action, rules[i].Tier, rules[i].Proxy = Action(r.Action), Tier(r.Tier), Proxy(r.Proxy)
		out.Rules[i] = &rules[i]
	}
	for n, c := range t.Peers {
		out.Peers = append(out.Peers, &policyv1.PeerRow{IdentityClass: uint32(n), Class: uint32(c)})
	}
	slices.SortFunc(out.Peers, func(a, b *policyv1.PeerRow) int { return cmp.Compare(a.IdentityClass, b.IdentityClass) })
	type block struct {
		prefix  netip.Prefix
		classes table.PrefixClasses
	}
	blocks := make([]block, 0, t.Prefixes.Len())
	t.Prefixes.All(func(p netip.Prefix, v table.PrefixClasses) { blocks = append(blocks, block{p, v}) })
	slices.SortFunc(blocks, func(a, b block) int { return a.prefix.Compare(b.prefix) })
	for _, b := range blocks {
		out.Prefixes = append(out.Prefixes, prefix(b.prefix, b.classes))
	}
	return out
}

// scopeClasses writes the classes of addresses.
func scopeClasses(classes table.PrefixClasses) []*policyv1.ScopeClass {
	out := make([]*policyv1.ScopeClass, len(classes))
	for scope, class := range classes {
		out[scope] = &policyv1.ScopeClass{Scope: policyv1.PeerScope(scope) + 1, Class: uint32(class)}
	}
	return out
}

// peerClasses writes lists of intervals; those without a rule are left out.
func peerClasses(lists [][]table.Interval) []*policyv1.PeerClass {
	out := make([]*policyv1.PeerClass, len(lists))
	for i, list := range lists {
		out[i] = &policyv1.PeerClass{}
		first := uint32(0)
		for _, in := range list {
			r := &policyv1.PortRange{First: first, Last: in.Hi}
			first = r.Last + 1
			if admin := in.Value.Admin(); admin != table.NoAdmin {
				r.Admin = uint32(admin)
			}
			if rest := in.Value.Rest(); rest != table.NoRest {
				r.Rest = uint32(rest)
			}
			if in.Value != table.Nothing {
				out[i].Ranges = append(out[i].Ranges, r)
			}
		}
	}
	return out
}

func prefix(p netip.Prefix, classes table.PrefixClasses) *policyv1.PrefixClasses {
	return &policyv1.PrefixClasses{Prefix: p.String(), Classes: scopeClasses(classes)}
}

// Sources writes the places of rules, number 1 first.
func Sources(list [][]rule.Source) []*policyv1.RuleSources {
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

// Source writes the place of a rule.
func Source(s rule.Source) *policyv1.RuleSource {
	return &policyv1.RuleSource{Kind: s.Kind, Namespace: s.Namespace, Name: s.Name, Path: s.Path}
}

// Direction writes the side that a table evaluates.
func Direction(d rule.Direction) netv1.Direction {
	if d == rule.Egress {
		return netv1.Direction_DIRECTION_EGRESS
	}
	return netv1.Direction_DIRECTION_INGRESS
}

// Proxy writes where a redirect leads to.
func Proxy(p rule.Proxy) netv1.Proxy { return netv1.Proxy(p) }

// Tier writes the tier of a rule.
func Tier(t rule.Tier) policyv1.Tier { return policyv1.Tier(t) + 1 }

// Action writes what a rule or a verdict says.
func Action(a rule.Action) policyv1.Action { return policyv1.Action(a) + 1 }

// DecidedBy writes what a verdict comes from. Enforced is false of a side
// without a table.
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
