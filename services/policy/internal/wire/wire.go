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
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Step writes one event. The revision is that of the policies which a binding
// belongs to; other events have none.
func Step(ev engine.Event, revision uint64) *policyv1.Step {
	switch x := ev.(type) {
	case engine.DefineIdentityClass:
		return &policyv1.Step{Step: &policyv1.Step_NodeClassDefine{NodeClassDefine: &policyv1.NodeClassDefine{
			NodeClass: uint32(x.IdentityClass), Key: slices.Clone(x.Key[:]),
		}}}
	case engine.RetireIdentityClass:
		return &policyv1.Step{Step: &policyv1.Step_NodeClassRetire{NodeClassRetire: &policyv1.NodeClassRetire{NodeClass: uint32(x.IdentityClass)}}}
	case engine.SetIdentity:
		return &policyv1.Step{Step: &policyv1.Step_IdentityUpdate{IdentityUpdate: Identity(x.Identity, x.Word)}}
	case engine.DefineTable:
		return &policyv1.Step{Step: &policyv1.Step_TableDefine{TableDefine: Table(x)}}
	case engine.GrowTable:
		return &policyv1.Step{Step: &policyv1.Step_TableGrow{TableGrow: &policyv1.TableGrow{
			Table: uint64(x.Table), Nodes: nodes(x.Nodes), Classes: x.Classes,
		}}}
	case engine.RetireTable:
		return &policyv1.Step{Step: &policyv1.Step_TableRetire{TableRetire: &policyv1.TableRetire{Table: uint64(x.Table)}}}
	case engine.SetPeer:
		return &policyv1.Step{Step: &policyv1.Step_PeerUpdate{PeerUpdate: &policyv1.PeerUpdate{
			Table: uint64(x.Table), Row: &policyv1.PeerRow{NodeClass: uint32(x.IdentityClass), Class: uint32(x.Class)},
		}}}
	case engine.DeletePeer:
		return &policyv1.Step{Step: &policyv1.Step_PeerUpdate{PeerUpdate: &policyv1.PeerUpdate{
			Table: uint64(x.Table), Row: &policyv1.PeerRow{NodeClass: uint32(x.IdentityClass)}, Delete: true,
		}}}
	case engine.SetPrefix:
		return &policyv1.Step{Step: &policyv1.Step_AddressUpdate{AddressUpdate: &policyv1.AddressUpdate{
			Table: uint64(x.Table), Block: block(x.Prefix, x.Classes),
		}}}
	case engine.DeletePrefix:
		return &policyv1.Step{Step: &policyv1.Step_AddressUpdate{AddressUpdate: &policyv1.AddressUpdate{
			Table: uint64(x.Table), Delete: true,
			Block: &policyv1.AddressBlock{Address: x.Prefix.Addr().AsSlice(), Bits: uint32(x.Prefix.Bits())},
		}}}
	case engine.BindSubject:
		return &policyv1.Step{Step: &policyv1.Step_Bind{Bind: &policyv1.Bind{
			Subject: uint32(x.Subject), Direction: Direction(x.Direction), Table: uint64(x.Table),
			PolicyRevision: revision, Rules: Sources(x.Sources),
		}}}
	case engine.RemoveSubject:
		return &policyv1.Step{Step: &policyv1.Step_SubjectGone{SubjectGone: &policyv1.SubjectGone{Subject: uint32(x.Subject)}}}
	}
	panic(fmt.Sprintf("event %T has no message", ev)) // a new kind of event needs one
}

// Identity writes the word of an identity.
func Identity(n identity.Numeric, w table.Word) *policyv1.IdentityUpdate {
	if !w.Known {
		return &policyv1.IdentityUpdate{Identity: uint32(n)}
	}
	return &policyv1.IdentityUpdate{
		Identity: uint32(n), NodeClass: uint32(w.IdentityClass), Kind: policyv1.PeerKind(w.Kind) + 1, Scope: policyv1.PeerScope(w.Scope) + 1,
	}
}

// Table writes a table, its rows and blocks in order.
func Table(d engine.DefineTable) *policyv1.TableDefine {
	t := d.Content
	out := &policyv1.TableDefine{
		Table: uint64(d.Table), StructureHash: slices.Clone(d.Hash[:]),
		DefaultAllow:   t.Flags&table.DefaultAllow != 0,
		HostAllow:      t.Flags&table.HostAllow != 0,
		HasAddresses:   t.Flags&table.HasAddresses != 0,
		DefaultClasses: classes(t.Default[:]),
		AddressClasses: classes(t.Address[:]),
		Rules:          make([]*policyv1.TableRule, len(t.Rules)),
		Classes:        slices.Clone(t.Classes),
		Nodes:          nodes(t.Nodes),
		Peers:          make([]*policyv1.PeerRow, 0, len(t.Peers)),
		Blocks:         make([]*policyv1.AddressBlock, 0, t.Blocks.Len()),
	}
	rules := make([]policyv1.TableRule, len(t.Rules))
	for i, r := range t.Rules {
		rules[i].Action, rules[i].Tier, rules[i].Proxy = Action(r.Action), uint32(r.Tier), uint32(r.Proxy)
		out.Rules[i] = &rules[i]
	}
	for n, c := range t.Peers {
		out.Peers = append(out.Peers, &policyv1.PeerRow{NodeClass: uint32(n), Class: uint32(c)})
	}
	slices.SortFunc(out.Peers, func(a, b *policyv1.PeerRow) int { return cmp.Compare(a.NodeClass, b.NodeClass) })
	t.Blocks.All(func(p netip.Prefix, v [identity.PeerScopes]table.Class) { out.Blocks = append(out.Blocks, block(p, v)) })
	slices.SortFunc(out.Blocks, func(a, b *policyv1.AddressBlock) int {
		return cmp.Or(cmp.Compare(len(a.Address), len(b.Address)), slices.Compare(a.Address, b.Address), cmp.Compare(a.Bits, b.Bits))
	})
	return out
}

func classes(list []table.Class) []uint32 {
	out := make([]uint32, len(list))
	for i, c := range list {
		out[i] = uint32(c)
	}
	return out
}

func nodes(list []table.Node) []*policyv1.PortNode {
	out := make([]*policyv1.PortNode, len(list))
	all := make([]policyv1.PortNode, len(list))
	for i := range list {
		all[i].High, all[i].Value = slices.Clone(list[i].Hi[:]), slices.Clone(list[i].Value[:])
		out[i] = &all[i]
	}
	return out
}

func block(p netip.Prefix, v [identity.PeerScopes]table.Class) *policyv1.AddressBlock {
	return &policyv1.AddressBlock{Address: p.Addr().AsSlice(), Bits: uint32(p.Bits()), Classes: classes(v[:])}
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

// Direction writes the side that a table judges.
func Direction(d rule.Direction) policyv1.TableDirection {
	if d == rule.Egress {
		return policyv1.TableDirection_TABLE_DIRECTION_EGRESS
	}
	return policyv1.TableDirection_TABLE_DIRECTION_INGRESS
}

// Action writes what a rule or a verdict says.
func Action(a rule.Action) policyv1.Action { return policyv1.Action(a) + 1 }

// DecidedBy writes what a verdict comes from. Enforced is false of a side
// without a table.
func DecidedBy(v table.Verdict, enforced bool) policyv1.DecidedBy {
	switch {
	case !enforced:
		return policyv1.DecidedBy_DECIDED_BY_NOT_ENFORCED
	case v.Reason == table.ByRule:
		return policyv1.DecidedBy_DECIDED_BY_RULE
	case v.Reason == table.ByHostAllow:
		return policyv1.DecidedBy_DECIDED_BY_HOST_ALLOW
	case v.Reason == table.ByUnknownIdentity:
		return policyv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY
	}
	return policyv1.DecidedBy_DECIDED_BY_DEFAULT
}
