// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policywire

import (
	"fmt"
	"net/netip"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// Limits on the content of one message, checked before it is read.
const (
	maxIncarnation = 16
	maxSteps       = 1 << 20
	maxState       = 16
	maxSources     = 1024
	maxSource      = 128 // bytes
)

// MessageOf reads a message of the stream. It checks lengths, value ranges and enums. Errors name
// the field and wrap policytable.ErrInvalid. The caller must check that referenced tables and
// classes exist.
func MessageOf(m *policyv1.WatchPolicyTablesResponse) (policytable.Message, error) {
	out := policytable.Message{Incarnation: string(m.GetIncarnation()), Seq: m.GetSeq()}
	if m.GetFormat() != Format {
		return out, policytable.Invalid("format: the policy service sends tables as %v, this subscriber understands %v: "+
			"both must be of one release", m.GetFormat(), Format)
	}
	if n := len(m.GetIncarnation()); n == 0 || n > maxIncarnation {
		return out, policytable.Invalid("incarnation: %d bytes, want 1 to %d", n, maxIncarnation)
	}
	if n := len(m.GetSteps()); n > maxSteps {
		return out, policytable.Invalid("steps: %d, at most %d", n, maxSteps)
	}
	out.Steps = make([]policytable.Step, len(m.GetSteps()))
	for i, s := range m.GetSteps() {
		st, err := stepOf(s)
		if err != nil {
			return out, fmt.Errorf("steps[%d].%w", i, err)
		}
		out.Steps[i] = st
	}
	return out, nil
}

func stepOf(s *policyv1.Step) (policytable.Step, error) {
	switch s := s.GetStep().(type) {
	case *policyv1.Step_DefineIdentityClass:
		x := s.DefineIdentityClass
		if len(x.GetKey()) != len(policytable.ClassKey{}) {
			return nil, policytable.Invalid("define_identity_class.key: %d bytes, want %d",
				len(x.GetKey()), len(policytable.ClassKey{}))
		}
		return policytable.DefineIdentityClass{
			IdentityClass: policytable.IdentityClass(x.GetIdentityClass()), Key: policytable.ClassKey(x.GetKey()),
		}, nil
	case *policyv1.Step_RetireIdentityClass:
		return policytable.RetireIdentityClass{
			IdentityClass: policytable.IdentityClass(s.RetireIdentityClass.GetIdentityClass()),
		}, nil
	case *policyv1.Step_SetIdentity:
		return setIdentityOf(s.SetIdentity)
	case *policyv1.Step_DefineTable:
		st, err := defineTableOf(s.DefineTable)
		if err != nil {
			return nil, fmt.Errorf("define_table.%w", err)
		}
		return st, nil
	case *policyv1.Step_GrowTable:
		classes, err := peerClassesOf(s.GrowTable.GetClasses())
		if err != nil {
			return nil, fmt.Errorf("grow_table.%w", err)
		}
		return policytable.GrowTable{Table: policytable.ID(s.GrowTable.GetTable()), Classes: classes}, nil
	case *policyv1.Step_RetireTable:
		return policytable.RetireTable{Table: policytable.ID(s.RetireTable.GetTable())}, nil
	case *policyv1.Step_SetPeer:
		r, err := rowOf(s.SetPeer.GetRow())
		if err != nil {
			return nil, fmt.Errorf("set_peer.row.%w", err)
		}
		return policytable.SetPeer{Table: policytable.ID(s.SetPeer.GetTable()), Row: r}, nil
	case *policyv1.Step_DeletePeer:
		return policytable.DeletePeer{
			Table:         policytable.ID(s.DeletePeer.GetTable()),
			IdentityClass: policytable.IdentityClass(s.DeletePeer.GetIdentityClass()),
		}, nil
	case *policyv1.Step_SetPrefix:
		p, classes, err := prefixClassesOf(s.SetPrefix.GetPrefix())
		if err != nil {
			return nil, fmt.Errorf("set_prefix.prefix.%w", err)
		}
		return policytable.SetPrefix{Table: policytable.ID(s.SetPrefix.GetTable()), Prefix: p, Classes: classes}, nil
	case *policyv1.Step_DeletePrefix:
		p, err := prefixOf(s.DeletePrefix.GetPrefix())
		if err != nil {
			return nil, fmt.Errorf("delete_prefix.%w", err)
		}
		return policytable.DeletePrefix{Table: policytable.ID(s.DeletePrefix.GetTable()), Prefix: p}, nil
	case *policyv1.Step_BindSubject:
		return bindSubjectOf(s.BindSubject)
	case *policyv1.Step_RemoveSubject:
		return policytable.RemoveSubject{Subject: identity.Numeric(s.RemoveSubject.GetSubject())}, nil
	case *policyv1.Step_Barrier:
		return barrierOf(s.Barrier)
	case *policyv1.Step_SnapshotComplete:
		return policytable.SnapshotComplete{}, nil
	}
	field, _, _ := protowire.ConsumeTag(s.ProtoReflect().GetUnknown())
	return policytable.UnknownStep{Field: int32(field)}, nil
}

func barrierOf(x *policyv1.Barrier) (policytable.Step, error) {
	if n := len(x.GetState()); n > maxState {
		return nil, policytable.Invalid("barrier.state: %d bytes, at most %d", n, maxState)
	}
	has, err := sourceNames("sources", x.GetSources())
	if err != nil {
		return nil, err
	}
	incomplete, err := sourceNames("incomplete", x.GetIncomplete())
	if err != nil {
		return nil, err
	}
	return policytable.Barrier{
		PolicyRevision:   x.GetPolicyRevision(),
		IdentityRevision: x.GetIdentityRevision(),
		AddressRevision:  x.GetAddressRevision(),
		State:            string(x.GetState()), Sources: has, Incomplete: incomplete,
	}, nil
}

// sourceNames checks names of sources. Names beyond the limit are dropped: one incomplete source
// has the same effect as all.
func sourceNames(field string, names []string) ([]string, error) {
	names = names[:min(len(names), maxSources)]
	for i, name := range names {
		if len(name) > maxSource {
			return nil, policytable.Invalid("barrier.%s[%d]: %d bytes, at most %d", field, i, len(name), maxSource)
		}
	}
	return names, nil
}

func setIdentityOf(x *policyv1.SetIdentity) (policytable.Step, error) {
	st := policytable.SetIdentity{
		Identity: identity.Numeric(x.GetIdentity()), IdentityClass: policytable.IdentityClass(x.GetIdentityClass()),
	}
	if x.GetIdentityClass() == 0 {
		return st, nil
	}
	if x.GetKind() < 1 || x.GetKind() > policyv1.PeerKind(identity.Kinds) {
		return nil, policytable.Invalid("set_identity.kind: %d", x.GetKind())
	}
	if x.GetScope() < 1 || x.GetScope() > policyv1.PeerScope(identity.PeerScopes) {
		return nil, policytable.Invalid("set_identity.scope: %d", x.GetScope())
	}
	st.Kind, st.Scope = identity.Kind(x.GetKind()-1), identity.PeerScope(x.GetScope()-1) //nolint:gosec // checked
	return st, nil
}

func defineTableOf(x *policyv1.PolicyTable) (policytable.Step, error) {
	st := policytable.DefineTable{Table: policytable.ID(x.GetTable())}
	c := &st.Content
	if len(x.GetStructureHash()) != len(c.Hash) {
		return nil, policytable.Invalid("structure_hash: %d bytes, want %d", len(x.GetStructureHash()), len(c.Hash))
	}
	c.Hash = [32]byte(x.GetStructureHash())
	c.DefaultAllow, c.HostAllow, c.HasAddresses = x.GetDefaultAllow(), x.GetHostAllow(), x.GetHasAddresses()
	err := keyed("default_classes", len(x.GetDefaultClasses()), c.DefaultClasses[:], func(i int) (int32, uint32) {
		e := x.GetDefaultClasses()[i]
		return int32(e.GetKind()), e.GetClass()
	})
	if err != nil {
		return nil, err
	}
	if c.AddressClasses, err = scopeClassesOf("address_classes", x.GetAddressClasses()); err != nil {
		return nil, err
	}
	c.Rules = make([]policytable.Rule, len(x.GetRules()))
	for i, r := range x.GetRules() {
		if r.GetAction() < 1 || r.GetAction() > policyv1.Action_ACTION_PASS ||
			r.GetTier() < 1 || r.GetTier() > policyv1.Tier_TIER_BASELINE || r.GetProxy() < 0 || r.GetProxy() > 0xFFFF {
			return nil, policytable.Invalid("rules[%d]: action %d, tier %d, proxy %d",
				i, r.GetAction(), r.GetTier(), r.GetProxy())
		}
		if r.GetRuleSet() > 0xFFFF {
			return nil, policytable.Invalid("rules[%d]: rule set %d, at most %d", i, r.GetRuleSet(), 0xFFFF)
		}
		c.Rules[i] = policytable.Rule{
			Action:             policytable.Action(r.GetAction() - 1), //nolint:gosec // checked
			Tier:               policytable.Tier(r.GetTier() - 1),     //nolint:gosec // checked
			Proxy:              policytable.Proxy(r.GetProxy()),       //nolint:gosec // checked
			RuleSet:            policytable.RuleSet(r.GetRuleSet()),   //nolint:gosec // checked
			PassesWithoutProxy: r.GetPassesWithoutProxy(),
		}
	}
	if c.Classes, err = peerClassesOf(x.GetClasses()); err != nil {
		return nil, err
	}
	st.Peers = make([]policytable.Row, len(x.GetPeers()))
	for i, p := range x.GetPeers() {
		if st.Peers[i], err = rowOf(p); err != nil {
			return nil, fmt.Errorf("peers[%d].%w", i, err)
		}
	}
	c.Prefixes = make(map[netip.Prefix]policytable.PrefixClasses, len(x.GetPrefixes()))
	for i, b := range x.GetPrefixes() {
		p, cs, err := prefixClassesOf(b)
		if err != nil {
			return nil, fmt.Errorf("prefixes[%d].%w", i, err)
		}
		if _, twice := c.Prefixes[p]; twice {
			return nil, policytable.Invalid("prefixes[%d]: %v occurs twice", i, p)
		}
		c.Prefixes[p] = cs
	}
	return st, nil
}

// keyed reads a list with exactly one entry for each enum value except 0. entry returns value and
// class of an entry.
func keyed(field string, n int, to []policytable.Class, entry func(i int) (key int32, class uint32)) error {
	if n != len(to) {
		return policytable.Invalid("%s: %d entries, want %d", field, n, len(to))
	}
	seen := make([]bool, len(to))
	for i := range n {
		key, class := entry(i)
		switch {
		case key < 1 || int(key) > len(to):
			return policytable.Invalid("%s[%d]: there is no %d", field, i, key)
		case seen[key-1]:
			return policytable.Invalid("%s[%d]: %d occurs twice", field, i, key)
		case class > 0xFFFF:
			return policytable.Invalid("%s[%d].class: there is no class %d", field, i, class)
		}
		seen[key-1], to[key-1] = true, policytable.Class(class)
	}
	return nil
}

func scopeClassesOf(field string, list []*policyv1.ScopeClass) (out policytable.PrefixClasses, err error) {
	err = keyed(field, len(list), out[:], func(i int) (int32, uint32) {
		return int32(list[i].GetScope()), list[i].GetClass()
	})
	return out, err
}

func peerClassesOf(list []*policyv1.PeerClass) ([]policytable.Ranges, error) {
	out := make([]policytable.Ranges, len(list))
	for i, c := range list {
		out[i] = make(policytable.Ranges, len(c.GetRanges()))
		for j, r := range c.GetRanges() {
			if r.GetAdmin() > 0xFFFF || r.GetRest() > 0xFFFF {
				return nil, policytable.Invalid("classes[%d].ranges[%d]: rules %d and %d", i, j, r.GetAdmin(), r.GetRest())
			}
			out[i][j] = policytable.PortRange{
				First: r.GetFirst(), Last: r.GetLast(),
				Admin: uint16(r.GetAdmin()), Rest: uint16(r.GetRest()), //nolint:gosec // checked
			}
		}
	}
	return out, nil
}

func rowOf(r *policyv1.PeerRow) (policytable.Row, error) {
	if r.GetIdentityClass() == 0 {
		return policytable.Row{}, policytable.Invalid("identity_class is 0")
	}
	if r.GetClass() > 0xFFFF {
		return policytable.Row{}, policytable.Invalid("class: there is no class %d", r.GetClass())
	}
	return policytable.Row{
		IdentityClass: policytable.IdentityClass(r.GetIdentityClass()),
		Class:         policytable.Class(r.GetClass()), //nolint:gosec // checked
	}, nil
}

func prefixClassesOf(b *policyv1.PrefixClasses) (p netip.Prefix, cs policytable.PrefixClasses, err error) {
	if p, err = prefixOf(b.GetPrefix()); err != nil {
		return p, cs, err
	}
	cs, err = scopeClassesOf("classes", b.GetClasses())
	return p, cs, err
}

func prefixOf(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Addr().Is4In6() || p != p.Masked() {
		return netip.Prefix{}, policytable.Invalid("prefix: %q is none", text)
	}
	return p, nil
}

func bindSubjectOf(x *policyv1.BindSubject) (policytable.Step, error) {
	st := policytable.BindSubject{
		Subject: identity.Numeric(x.GetSubject()), Table: policytable.ID(x.GetTable()), Revision: x.GetPolicyRevision(),
	}
	st.Tenant, st.Guarantee = wire.ReadTenant(x.GetTenant())
	var ok bool
	if st.Direction, ok = DirectionOf(x.GetDirection()); !ok {
		return nil, policytable.Invalid("bind_subject.direction: %d", x.GetDirection())
	}
	st.Rules = make([][]policytable.Source, len(x.GetRules()))
	for i, r := range x.GetRules() {
		st.Rules[i] = make([]policytable.Source, len(r.GetSources()))
		for j, src := range r.GetSources() {
			st.Rules[i][j] = SourceOf(src)
		}
	}
	return st, nil
}

// DirectionOf reads a direction. ok is false if it is unspecified or unknown.
func DirectionOf(d netv1.Direction) (_ policytable.Direction, ok bool) {
	switch d {
	case netv1.Direction_DIRECTION_EGRESS:
		return policytable.Egress, true
	case netv1.Direction_DIRECTION_INGRESS:
		return policytable.Ingress, true
	}
	return 0, false
}

// SourceOf reads where a rule was written.
func SourceOf(s *policyv1.RuleSource) policytable.Source {
	return policytable.Source{Kind: s.GetKind(), Namespace: s.GetNamespace(), Name: s.GetName(), Path: s.GetPath()}
}
