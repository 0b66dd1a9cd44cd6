// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"net/netip"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/model/identity"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// The enums count from 1 where the engine counts from 0, in the same order.
func TestEnumsAreThoseOfTheEnginePlusOne(t *testing.T) {
	t.Parallel()
	for kind, want := range map[identity.Kind]policyv1.PeerKind{
		identity.KindInCluster:     policyv1.PeerKind_PEER_KIND_IN_CLUSTER,
		identity.KindWorld4:        policyv1.PeerKind_PEER_KIND_WORLD_IPV4,
		identity.KindWorld6:        policyv1.PeerKind_PEER_KIND_WORLD_IPV6,
		identity.KindHost:          policyv1.PeerKind_PEER_KIND_HOST,
		identity.KindRemoteNode:    policyv1.PeerKind_PEER_KIND_REMOTE_NODE,
		identity.KindKubeAPIServer: policyv1.PeerKind_PEER_KIND_KUBE_APISERVER,
		identity.KindUnknown:       policyv1.PeerKind_PEER_KIND_UNKNOWN,
		identity.KindOther:         policyv1.PeerKind_PEER_KIND_OTHER,
	} {
		if got := Identity(1, table.Entry{Known: true, Kind: kind}).Kind; got != want {
			t.Errorf("kind %s is %s", kind, got)
		}
	}
	for scope, want := range map[identity.PeerScope]policyv1.PeerScope{
		identity.PeerScopeCluster: policyv1.PeerScope_PEER_SCOPE_CLUSTER,
		identity.PeerScopeNode:    policyv1.PeerScope_PEER_SCOPE_NODE,
		identity.PeerScopeOutside: policyv1.PeerScope_PEER_SCOPE_OUTSIDE,
	} {
		if got := Identity(1, table.Entry{Known: true, Scope: scope}).Scope; got != want {
			t.Errorf("scope %d is %s", scope, got)
		}
	}
	for proxy, want := range map[rule.Proxy]netv1.Proxy{
		rule.NoProxy: netv1.Proxy_PROXY_UNSPECIFIED, rule.ProxyDNS: netv1.Proxy_PROXY_DNS, rule.ProxyHTTP: netv1.Proxy_PROXY_HTTP,
		rule.ProxyTLS: netv1.Proxy_PROXY_TLS, rule.ProxyListener: netv1.Proxy_PROXY_LISTENER,
	} {
		if got := Proxy(proxy); got != want {
			t.Errorf("proxy %s is %s", proxy, got)
		}
	}
	for action, want := range map[rule.Action]policyv1.Action{
		rule.Deny: policyv1.Action_ACTION_DENY, rule.Redirect: policyv1.Action_ACTION_REDIRECT,
		rule.Allow: policyv1.Action_ACTION_ALLOW, rule.Pass: policyv1.Action_ACTION_PASS,
	} {
		if got := Action(action); got != want {
			t.Errorf("action %s is %s", action, got)
		}
	}
	if got := Identity(7, table.Entry{}); !proto.Equal(got, &policyv1.SetIdentity{Identity: 7}) {
		t.Errorf("unknown identity is %v", got)
	}
}

func TestEveryEventBecomesItsStep(t *testing.T) {
	t.Parallel()
	prefix := netip.MustParsePrefix("10.1.0.0/16")
	content := &table.Table{
		Header: table.Header{
			Flags:   table.DefaultAllow | table.HasAddresses,
			Default: [identity.Kinds]table.Class{0, 1, 0, 1, 0, 1, 0, 1}, Address: [identity.PeerScopes]table.Class{1, 0, 1},
		},
		Rules: []table.Rule{{Action: rule.Pass, Tier: rule.Admin}, {Action: rule.Redirect, Tier: rule.Normal, Proxy: rule.ProxyHTTP}},
		Peers: map[table.IdentityClass]table.Class{9: 1, 3: 0, 5: 1},
	}
	lists := [][]table.Interval{
		{{Hi: port.Last, Value: table.MakeValue(1, 2)}},
		{{Hi: 79, Value: table.Nothing}, {Hi: 80, Value: table.MakeValue(table.NoAdmin, 2)}, {Hi: 90, Value: table.MakeValue(1, table.NoRest)}, {Hi: port.Last, Value: table.Nothing}},
	}
	b := table.NewBuilder()
	for _, list := range lists {
		if _, err := b.Class(content, list); err != nil {
			t.Fatal(err)
		}
	}
	classes := []*policyv1.PeerClass{
		{Ranges: []*policyv1.PortRange{{First: 0, Last: 0xFFFFFFFF, Admin: 1, Rest: 2}}},
		{Ranges: []*policyv1.PortRange{{First: 80, Last: 80, Rest: 2}, {First: 81, Last: 90, Admin: 1}}},
	}
	scopes := func(classes ...uint32) (out []*policyv1.ScopeClass) {
		for i, c := range classes {
			out = append(out, &policyv1.ScopeClass{Scope: policyv1.PeerScope(i + 1), Class: c})
		}
		return out
	}
	var kinds []*policyv1.KindClass
	for i := range uint32(8) {
		kinds = append(kinds, &policyv1.KindClass{Kind: policyv1.PeerKind(i + 1), Class: i % 2})
	}
	content.Prefixes.Set(netip.MustParsePrefix("fd00::/8"), [identity.PeerScopes]table.Class{1, 1, 1})
	content.Prefixes.Set(prefix, [identity.PeerScopes]table.Class{0, 1, 0})
	content.Prefixes.Set(netip.MustParsePrefix("10.1.0.0/24"), [identity.PeerScopes]table.Class{1, 1, 0})
	key, hash := engine.ClassKey{1, 2}, [32]byte{3, 31: 4}
	for _, c := range []struct {
		event engine.Event
		want  *policyv1.Step
	}{
		{engine.DefineIdentityClass{IdentityClass: 4, Key: key}, &policyv1.Step{Step: &policyv1.Step_DefineIdentityClass{
			DefineIdentityClass: &policyv1.DefineIdentityClass{IdentityClass: 4, Key: key[:]},
		}}},
		{engine.RetireIdentityClass{IdentityClass: 4}, &policyv1.Step{Step: &policyv1.Step_RetireIdentityClass{RetireIdentityClass: &policyv1.RetireIdentityClass{IdentityClass: 4}}}},
		{engine.SetIdentity{Identity: 300, Entry: table.Entry{IdentityClass: 4, Kind: identity.KindHost, Scope: identity.PeerScopeNode, Known: true}}, &policyv1.Step{
			Step: &policyv1.Step_SetIdentity{SetIdentity: &policyv1.SetIdentity{
				Identity: 300, IdentityClass: 4, Kind: policyv1.PeerKind_PEER_KIND_HOST, Scope: policyv1.PeerScope_PEER_SCOPE_NODE,
			}},
		}},
		{engine.DefineTable{Table: 6, Hash: hash, Content: content}, &policyv1.Step{Step: &policyv1.Step_DefineTable{DefineTable: &policyv1.PolicyTable{
			Table: 6, StructureHash: hash[:], DefaultAllow: true, HasAddresses: true, DefaultClasses: kinds, AddressClasses: scopes(1, 0, 1),
			Rules: []*policyv1.TableRule{
				{Action: policyv1.Action_ACTION_PASS, Tier: policyv1.Tier_TIER_ADMIN}, {Action: policyv1.Action_ACTION_REDIRECT, Tier: policyv1.Tier_TIER_NORMAL, Proxy: netv1.Proxy_PROXY_HTTP},
			},
			Classes: classes,
			Peers:   []*policyv1.PeerRow{{IdentityClass: 3}, {IdentityClass: 5, Class: 1}, {IdentityClass: 9, Class: 1}},
			Prefixes: []*policyv1.PrefixClasses{
				{Prefix: "10.1.0.0/16", Classes: scopes(0, 1, 0)},
				{Prefix: "10.1.0.0/24", Classes: scopes(1, 1, 0)},
				{Prefix: "fd00::/8", Classes: scopes(1, 1, 1)},
			},
		}}}},
		{engine.GrowTable{Table: 6, Classes: lists[1:]}, &policyv1.Step{Step: &policyv1.Step_GrowTable{GrowTable: &policyv1.GrowTable{Table: 6, Classes: classes[1:]}}}},
		{engine.RetireTable{Table: 6}, &policyv1.Step{Step: &policyv1.Step_RetireTable{RetireTable: &policyv1.RetireTable{Table: 6}}}},
		{engine.SetPeer{Table: 6, IdentityClass: 4, Class: 1}, &policyv1.Step{Step: &policyv1.Step_SetPeer{
			SetPeer: &policyv1.SetPeer{Table: 6, Row: &policyv1.PeerRow{IdentityClass: 4, Class: 1}},
		}}},
		{engine.DeletePeer{Table: 6, IdentityClass: 4}, &policyv1.Step{Step: &policyv1.Step_DeletePeer{
			DeletePeer: &policyv1.DeletePeer{Table: 6, IdentityClass: 4},
		}}},
		{engine.SetPrefix{Table: 6, Prefix: prefix, Classes: table.PrefixClasses{1, 2, 3}}, &policyv1.Step{Step: &policyv1.Step_SetPrefix{
			SetPrefix: &policyv1.SetPrefix{Table: 6, Prefix: &policyv1.PrefixClasses{Prefix: "10.1.0.0/16", Classes: scopes(1, 2, 3)}},
		}}},
		{engine.DeletePrefix{Table: 6, Prefix: prefix}, &policyv1.Step{Step: &policyv1.Step_DeletePrefix{
			DeletePrefix: &policyv1.DeletePrefix{Table: 6, Prefix: "10.1.0.0/16"},
		}}},
		{engine.BindSubject{Subject: 300, Direction: rule.Egress, Table: 6, Sources: [][]rule.Source{{{Kind: "K", Name: "n", Path: "p"}, {Kind: "L", Namespace: "s"}}}}, &policyv1.Step{
			Step: &policyv1.Step_BindSubject{BindSubject: &policyv1.BindSubject{
				Subject: 300, Direction: netv1.Direction_DIRECTION_EGRESS, Table: 6, PolicyRevision: 12,
				Rules: []*policyv1.RuleSources{{Sources: []*policyv1.RuleSource{{Kind: "K", Name: "n", Path: "p"}, {Kind: "L", Namespace: "s"}}}},
			}},
		}},
		{engine.RemoveSubject{Subject: 300}, &policyv1.Step{Step: &policyv1.Step_RemoveSubject{RemoveSubject: &policyv1.RemoveSubject{Subject: 300}}}},
	} {
		if got := Step(c.event, 12); !proto.Equal(got, c.want) {
			t.Errorf("%T is\n%v, want\n%v", c.event, got, c.want)
		}
	}
}

func TestWhatDecidedIsNamed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		v        table.Verdict
		enforced bool
		want     netv1.DecidedBy
	}{
		{table.Verdict{Reason: table.ByRule, Rule: 1}, true, netv1.DecidedBy_DECIDED_BY_RULE},
		{table.Verdict{Reason: table.ByDefault}, true, netv1.DecidedBy_DECIDED_BY_DEFAULT},
		{table.Verdict{Reason: table.ByHostAllow}, true, netv1.DecidedBy_DECIDED_BY_HOST_ALLOW},
		{table.Verdict{Reason: table.ByUnknownIdentity, Rule: 2}, true, netv1.DecidedBy_DECIDED_BY_UNKNOWN_IDENTITY},
		{table.Verdict{Reason: table.ByDefault}, false, netv1.DecidedBy_DECIDED_BY_NO_POLICY},
	} {
		if got := DecidedBy(c.v, c.enforced); got != c.want {
			t.Errorf("%+v, enforced %t: %s, want %s", c.v, c.enforced, got, c.want)
		}
	}
}
