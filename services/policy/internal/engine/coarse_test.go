// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// TestMergedAddressClassesGiveTheSameVerdicts: merging address classes with equal verdicts changes no verdict, and
// Explain still finds the deciding rule.
func TestMergedAddressClassesGiveTheSameVerdicts(t *testing.T) {
	t.Parallel()
	w := seeded(t, 61)
	for run := range runs(t, 300) {
		config := drawConfig(w)
		s := w.Draw()
		e := New(config)
		e.coarse = true
		before := s.Clone()
		for key := range before.Objects {
			if w.Chance(50) {
				delete(before.Objects, key)
			}
		}
		empty := w.Draw()
		clear(empty.Objects)
		clear(empty.Identities)
		clear(empty.Subjects)
		clear(empty.Located)
		clear(empty.Names)
		apply(t, e, diff(empty, before))
		apply(t, e, diff(before, s))
		n := &naive{config, s}
		for range 200 {
			q, ok := w.Question(s)
			if !ok {
				break
			}
			want := n.evaluate(q)
			got, err := e.Explain(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			if err != nil {
				t.Fatal(err)
			}
			if got.Verdict.Action != want.action || got.Verdict.Proxy != want.proxy || (got.Verdict.Rule != 0) != (want.rule != nil) {
				t.Fatalf("run %d: %+v: the table gives %+v, the rules %s %s by %+v\n%s", run, q, got.Verdict, want.action,
					want.proxy, want.rule, s)
			}
			if want.rule == nil {
				continue
			}
			named := false
			for _, m := range got.Matches {
				for _, src := range m.Sources {
					decides := src == want.rule.Source ||
						slices.ContainsFunc(want.members, func(m member7) bool { return m.Source == src })
					named = named || m.Number == got.Verdict.Rule && decides
				}
			}
			if !named {
				t.Fatalf("run %d: %+v: Explain gives rule %d of %+v, want %+v\n%s", run, q, got.Verdict.Rule, got.Matches,
					want.rule.Source, s)
			}
		}
	}
}

// listing returns a policy that allows egress to the given number of prefixes, with one rule for each, and denies a
// prefix inside every fifth of them.
func listing(t *testing.T, rules int) policy.Object {
	t.Helper()
	var b strings.Builder
	b.WriteString("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: listing, namespace: x}\nspec:\n  endpointSelector: {}\n  egress:\n")
	for i := range rules {
		fmt.Fprintf(&b, "  - toCIDR: [10.%d.%d.0/24]\n", i>>8, i&255)
	}
	b.WriteString("  - toFQDNs: [{matchName: a.example}]\n  egressDeny:\n")
	for i := 0; i < rules; i += 5 {
		fmt.Fprintf(&b, "  - toCIDR: [10.%d.%d.128/25]\n", i>>8, i&255)
	}
	return decodeOne(t, b.String())
}

func TestAddressClassesOfEqualVerdictAreMergedWhenThereAreTooMany(t *testing.T) {
	world, err := peer.New(identity.WorldIPv4, label.NewSet(label.Reserved(identity.NameWorldIPv4)))
	if err != nil {
		t.Fatal(err)
	}
	for _, rules := range []int{400, table.MaxAddressClasses + 1, 3000} {
		e := New(Config{})
		var events []policytable.BindSubject
		e.config.Events = func(ev policytable.Step) {
			if b, ok := ev.(policytable.BindSubject); ok && b.Direction == policytable.Egress {
				events = append(events, b)
			}
		}
		apply(t, e, Change{
			UpsertPolicies: []policy.Object{listing(t, rules)}, AddIdentities: []peer.Identity{combination(t, 300, 0, 0), world},
			AddSubjects: []identity.Numeric{300},
		})
		merged := rules > table.MaxAddressClasses
		b, _ := e.Bound(300, policytable.Egress)
		if got := e.Size().Merged; (got == 1) != merged {
			t.Errorf("%d rules: %d tables are merged, want %t", rules, got, merged)
		}
		if merged && len(b.Table.Classes) > 10 {
			t.Errorf("%d rules: %d classes are left", rules, len(b.Table.Classes))
		}
		for i := 0; i < rules; i += 1 + rules/200 {
			for _, last := range []byte{1, 129} {
				x, err := e.Explain(300, policytable.Egress, identity.WorldIPv4, netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), last}), port.At(port.TCP, 80))
				if err != nil {
					t.Fatal(err)
				}
				want, path := policytable.Allow, fmt.Sprintf("spec.egress[%d]", i)
				if last == 129 && i%5 == 0 {
					want, path = policytable.Deny, fmt.Sprintf("spec.egressDeny[%d]", i/5)
				}
				got := ""
				for _, m := range x.Matches {
					if m.Number == x.Verdict.Rule {
						got = m.Sources[0].Path
					}
				}
				if x.Verdict.Action != want || !strings.HasPrefix(got, path) {
					t.Fatalf("%d rules, 10.%d.%d.%d: %s by %s, want %s by %s", rules, i>>8, i&255, last, x.Verdict.Action, got, want, path)
				}
			}
		}
		last := events[len(events)-1].Rules
		if n := len(last[0]); merged != (n == maxMerged+1) || merged && last[0][n-1].String() != fmt.Sprintf("and %d more rules with the same verdict", (rules+4)/5-maxMerged) {
			t.Errorf("%d rules: the first number means %v", rules, last[0])
		}
	}
}

// TestALearnedAddressMergesTheClassesOfALiveTable: a table in use has the maximum number of address classes, and a
// learned address needs one more. The table then merges address classes with equal verdicts.
func TestALearnedAddressMergesTheClassesOfALiveTable(t *testing.T) {
	e := New(Config{})
	// The base needs a class for each prefix, and none for the denied ones: the table is full.
	o := listing(t, table.MaxAddressClasses-1)
	for i := range o.Specs {
		kept := o.Specs[i].Rules[:0]
		for _, r := range o.Specs[i].Rules {
			if r.Action == policytable.Allow {
				kept = append(kept, r)
			}
		}
		o.Specs[i].Rules = kept
	}
	apply(t, e, Change{UpsertPolicies: []policy.Object{o}, AddIdentities: []peer.Identity{combination(t, 300, 0, 0)}, AddSubjects: []identity.Numeric{300}})
	if e.Size().Merged != 0 {
		t.Fatal("the classes are merged already")
	}
	apply(t, e, Change{Learn: []Name{{Name: "a.example", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.7")}}}})
	if e.Size().Merged != 1 {
		t.Fatal("the classes are not merged")
	}
	b, _ := e.Bound(300, policytable.Egress)
	entry := table.Entry{IdentityClass: 1, Kind: identity.KindWorld4, Scope: identity.PeerScopeOutside, Known: true}
	for addr, want := range map[string]policytable.Action{"192.0.2.7": policytable.Allow, "192.0.2.8": policytable.Deny, "10.1.7.9": policytable.Allow} {
		if got := b.Table.Lookup(entry, netip.MustParseAddr(addr), port.At(port.TCP, 80)); got.Action != want {
			t.Errorf("%s: %s, want %s", addr, got.Action, want)
		}
	}
}
