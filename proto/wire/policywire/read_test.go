// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policywire

import (
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

type response = policyv1.WatchPolicyTablesResponse

// ints returns n times v.
func ints[T any](n int, v T) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = v
	}
	return out
}

func wholeMessage() *response {
	key, hash := ints(16, byte(1)), ints(32, byte(2))
	classes := []*policyv1.PeerClass{
		{Ranges: []*policyv1.PortRange{{First: 5, Last: 9, Admin: 1}, {First: 12, Last: 12, Rest: 1}}}, {},
	}
	scopes := func() []*policyv1.ScopeClass {
		return []*policyv1.ScopeClass{{Scope: 3, Class: 1}, {Scope: 1}, {Scope: 2}}
	}
	prefix := &policyv1.PrefixClasses{Prefix: "10.0.0.0/8", Classes: scopes()}
	kinds := make([]*policyv1.KindClass, 8)
	for i := range kinds { // in any order
		kinds[i] = &policyv1.KindClass{Kind: policyv1.PeerKind(8 - i), Class: uint32(i % 2)}
	}
	return &response{Format: Format, Incarnation: []byte("run"), Seq: 1, Steps: []*policyv1.Step{
		{Step: &policyv1.Step_DefineIdentityClass{
			DefineIdentityClass: &policyv1.DefineIdentityClass{IdentityClass: 5, Key: key},
		}},
		{Step: &policyv1.Step_SetIdentity{
			SetIdentity: &policyv1.SetIdentity{Identity: 300, IdentityClass: 5, Kind: 4, Scope: 2},
		}},
		{Step: &policyv1.Step_SetIdentity{SetIdentity: &policyv1.SetIdentity{Identity: 301}}},
		{Step: &policyv1.Step_DefineTable{DefineTable: &policyv1.PolicyTable{
			Table: 9, StructureHash: hash, DefaultAllow: true, HostAllow: true, HasAddresses: true,
			DefaultClasses: kinds, AddressClasses: scopes(),
			Rules: []*policyv1.TableRule{
				{Action: 3, Tier: policyv1.Tier_TIER_NORMAL, Proxy: 2},
				{Action: 2, Tier: policyv1.Tier_TIER_NORMAL, Proxy: 1, RuleSet: 65535, PassesWithoutProxy: true},
			}, Classes: classes,
			Peers: []*policyv1.PeerRow{{IdentityClass: 5}}, Prefixes: []*policyv1.PrefixClasses{prefix},
		}}},
		{Step: &policyv1.Step_GrowTable{GrowTable: &policyv1.GrowTable{Table: 9, Classes: classes[:1]}}},
		{Step: &policyv1.Step_SetPeer{
			SetPeer: &policyv1.SetPeer{Table: 9, Row: &policyv1.PeerRow{IdentityClass: 5, Class: 1}},
		}},
		{Step: &policyv1.Step_SetPrefix{SetPrefix: &policyv1.SetPrefix{Table: 9, Prefix: prefix}}},
		{Step: &policyv1.Step_BindSubject{BindSubject: &policyv1.BindSubject{
			Subject: 300, Direction: netv1.Direction_DIRECTION_INGRESS, Table: 9, PolicyRevision: 4,
			Rules: []*policyv1.RuleSources{{Sources: []*policyv1.RuleSource{{Kind: "K", Namespace: "n", Name: "m", Path: "p"}}}},
		}}},
		{Step: &policyv1.Step_DeletePeer{DeletePeer: &policyv1.DeletePeer{Table: 9, IdentityClass: 5}}},
		{Step: &policyv1.Step_DeletePrefix{DeletePrefix: &policyv1.DeletePrefix{Table: 9, Prefix: "10.0.0.0/8"}}},
		{Step: &policyv1.Step_RemoveSubject{RemoveSubject: &policyv1.RemoveSubject{Subject: 300}}},
		{Step: &policyv1.Step_RetireTable{RetireTable: &policyv1.RetireTable{Table: 9}}},
		{Step: &policyv1.Step_RetireIdentityClass{RetireIdentityClass: &policyv1.RetireIdentityClass{IdentityClass: 5}}},
		{Step: &policyv1.Step_SnapshotComplete{SnapshotComplete: &policyv1.SnapshotComplete{}}},
		{Step: &policyv1.Step_Barrier{Barrier: &policyv1.Barrier{
			PolicyRevision: 4, IdentityRevision: 5, AddressRevision: 6,
			State: []byte("fedcba9876543210"), Sources: []string{"file", "grpc"}, Incomplete: []string{"identity"},
		}}},
	}}
}

func wholeSteps() policytable.Message {
	ranges := policytable.Ranges{{First: 5, Last: 9, Admin: 1}, {First: 12, Last: 12, Rest: 1}}
	byScope := policytable.PrefixClasses{0, 0, 1}
	prefix := netip.MustParsePrefix("10.0.0.0/8")
	c := policytable.Table{
		DefaultAllow: true, HostAllow: true, HasAddresses: true,
		Rules: []policytable.Rule{
			{Action: policytable.Allow, Tier: 1, Proxy: 2},
			{Action: policytable.Redirect, Tier: 1, Proxy: 1, RuleSet: 65535, PassesWithoutProxy: true},
		},
		Classes: []policytable.Ranges{ranges, {}}, Prefixes: map[netip.Prefix]policytable.PrefixClasses{prefix: byScope},
		DefaultClasses: [identity.Kinds]policytable.Class{1, 0, 1, 0, 1, 0, 1, 0}, AddressClasses: byScope,
	}
	for i := range c.Hash {
		c.Hash[i] = 2
	}
	return policytable.Message{Incarnation: "run", Seq: 1, Steps: []policytable.Step{
		policytable.DefineIdentityClass{IdentityClass: 5, Key: policytable.ClassKey(ints(16, byte(1)))},
		policytable.SetIdentity{Identity: 300, IdentityClass: 5, Kind: identity.KindHost, Scope: 1},
		policytable.SetIdentity{Identity: 301},
		policytable.DefineTable{Table: 9, Content: c, Peers: []policytable.Row{{IdentityClass: 5}}},
		policytable.GrowTable{Table: 9, Classes: []policytable.Ranges{ranges}},
		policytable.SetPeer{Table: 9, Row: policytable.Row{IdentityClass: 5, Class: 1}},
		policytable.SetPrefix{Table: 9, Prefix: prefix, Classes: byScope},
		policytable.BindSubject{
			Subject: 300, Direction: policytable.Ingress, Table: 9, Revision: 4,
			Rules: [][]policytable.Source{{{Kind: "K", Namespace: "n", Name: "m", Path: "p"}}},
		},
		policytable.DeletePeer{Table: 9, IdentityClass: 5},
		policytable.DeletePrefix{Table: 9, Prefix: prefix},
		policytable.RemoveSubject{Subject: 300},
		policytable.RetireTable{Table: 9},
		policytable.RetireIdentityClass{IdentityClass: 5},
		policytable.SnapshotComplete{},
		policytable.Barrier{
			PolicyRevision: 4, IdentityRevision: 5, AddressRevision: 6,
			State: "fedcba9876543210", Sources: []string{"file", "grpc"}, Incomplete: []string{"identity"},
		},
	}}
}

// TestStepsAreReadAsTheyWereWritten checks that writing and reading a step loses nothing.
func TestStepsAreReadAsTheyWereWritten(t *testing.T) {
	want := wholeSteps()
	m := &response{Format: Format, Incarnation: []byte(want.Incarnation), Seq: want.Seq}
	for _, st := range want.Steps {
		m.Steps = append(m.Steps, Step(st))
	}
	for _, m := range []*response{m, wholeMessage()} {
		got, err := MessageOf(m)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("read\n%+v, want\n%+v", got, want)
		}
	}
}

// tableOf is the table that wholeMessage defines.
func tableOf(m *response) *policyv1.PolicyTable { return m.Steps[3].GetDefineTable() }

func TestMalformedStepsNameTheField(t *testing.T) {
	for want, change := range map[string]func(m *response){
		"incarnation": func(m *response) { m.Incarnation = nil },
		"format: the policy service sends tables as TABLE_FORMAT_UNSPECIFIED": func(m *response) { m.Format = 0 },
		"format: the policy service sends tables as 3":                        func(m *response) { m.Format = 3 },
		"steps[0].define_identity_class.key": func(m *response) {
			m.Steps[0].GetDefineIdentityClass().Key = nil
		},
		"steps[1].set_identity.kind": func(m *response) {
			m.Steps[1].GetSetIdentity().Kind = 9
		},
		"steps[1].set_identity.scope": func(m *response) {
			m.Steps[1].GetSetIdentity().Scope = 0
		},
		"steps[3].define_table.structure_ha": func(m *response) {
			tableOf(m).StructureHash = nil
		},
		"define_table.default_classes: 7 entries": func(m *response) {
			t := tableOf(m)
			t.DefaultClasses = t.DefaultClasses[1:]
		},
		"define_table.default_classes[0]: there is no 9":  func(m *response) { tableOf(m).DefaultClasses[0].Kind = 9 },
		"define_table.default_classes[1]: 8 occurs twice": func(m *response) { tableOf(m).DefaultClasses[1].Kind = 8 },
		"define_table.address_classes[0].class": func(m *response) {
			tableOf(m).AddressClasses[0].Class = 1 << 16
		},
		"define_table.address_classes[2]: there is no 0": func(m *response) { tableOf(m).AddressClasses[2] = nil },
		"define_table.rules[0]":                          func(m *response) { tableOf(m).Rules[0].Action = 0 },
		"define_table.rules[1]: rule set 65536":          func(m *response) { tableOf(m).Rules[1].RuleSet = 1 << 16 },
		"define_table.classes[0].ranges[1]": func(m *response) {
			tableOf(m).Classes[0].Ranges[1].Rest = 1 << 16
		},
		"define_table.peers[0].identity_class": func(m *response) { tableOf(m).Peers[0].IdentityClass = 0 },
		"define_table.prefixes[0].prefix": func(m *response) {
			tableOf(m).Prefixes[0].Prefix = "10.0.0.0/33"
		},
		"grow_table.classes[0].ranges[0]": func(m *response) {
			m.Steps[4].GetGrowTable().Classes[0].Ranges[0].Admin = 1 << 16
		},
		"set_peer.row.class":        func(m *response) { m.Steps[5].GetSetPeer().Row.Class = 1 << 16 },
		"set_prefix.prefix.prefix":  func(m *response) { m.Steps[6].GetSetPrefix().Prefix.Prefix = "10.0.0.0" },
		"set_prefix.prefix.classes": func(m *response) { m.Steps[6].GetSetPrefix().Prefix.Classes = nil },
		"bind_subject.direction":    func(m *response) { m.Steps[7].GetBindSubject().Direction = 3 },
		"delete_prefix.prefix":      func(m *response) { m.Steps[9].GetDeletePrefix().Prefix = "10.1.0.0/8" },
	} {
		m := proto.Clone(wholeMessage()).(*response)
		change(m)
		if _, err := MessageOf(m); !errors.Is(err, policytable.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestUnknownStepIsAStepWithItsNumber: a step of a later release is not an error here; the caller
// refuses the message.
func TestUnknownStepIsAStepWithItsNumber(t *testing.T) {
	m := wholeMessage()
	later := &policyv1.Step{}
	later.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 40, protowire.VarintType), 1))
	m.Steps = []*policyv1.Step{m.Steps[0], later, {}}
	got, err := MessageOf(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := (policytable.UnknownStep{Field: 40}); got.Steps[1] != want {
		t.Errorf("step 40 is %#v", got.Steps[1])
	}
	if want := (policytable.UnknownStep{}); got.Steps[2] != want {
		t.Errorf("a step without anything is %#v", got.Steps[2])
	}
}

// FuzzMessage: arbitrary bytes give a message or an error.
func FuzzMessage(f *testing.F) {
	whole, err := proto.Marshal(wholeMessage())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m response
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		out, err := MessageOf(&m)
		if err != nil && !errors.Is(err, policytable.ErrInvalid) {
			t.Errorf("%v is no ErrInvalid", err)
		}
		if err == nil && len(out.Steps) != len(m.GetSteps()) {
			t.Errorf("%d steps of %d", len(out.Steps), len(m.GetSteps()))
		}
	})
}
