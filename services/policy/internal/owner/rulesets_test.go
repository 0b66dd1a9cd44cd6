// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/ruleset"
)

// webRequests returns a policy that allows the HTTP requests with a path to the pods of an app.
func webRequests(app, path string) string {
	return fmt.Sprintf("apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {name: %s, namespace: shop}\n"+
		"spec: {endpointSelector: {matchLabels: {app: %[1]s}}, ingress: [{fromEntities: [all], "+
		"toPorts: [{ports: [{port: '80', protocol: TCP}], rules: {http: [{path: %q}]}}]}]}\n---\n", app, path)
}

// withApps subscribes to the pods of some apps, numbered from 300.
func withApps(t *testing.T, o *Owner, apps ...string) {
	t.Helper()
	var all []peer.Identity
	interest := Interest{}
	for i, app := range apps {
		id, err := peer.New(identity.Numeric(300+i), label.NewSet(label.Kubernetes("app", app), //nolint:gosec // a few
			label.Kubernetes(label.KeyNamespace, "shop")))
		if err != nil {
			t.Fatal(err)
		}
		all, interest.Subjects = append(all, id), append(interest.Subjects, id.Number)
	}
	if err := o.Identities().SetIdentities(t.Context(), all, nil); err != nil {
		t.Fatal(err)
	}
	_, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Role: RoleEnforces, Interest: interest})
	if err != nil {
		t.Fatal(err)
	}
}

// numbersIn returns the numbers of the rule sets in the ingress tables of the subjects that have one.
func numbersIn(t *testing.T, o *Owner) map[identity.Numeric]policytable.RuleSet {
	t.Helper()
	out, err := loop.Ask(t.Context(), o.loop, opOther, func() (map[identity.Numeric]policytable.RuleSet, error) {
		out := make(map[identity.Numeric]policytable.RuleSet)
		for n := identity.Numeric(300); n < 310; n++ {
			b, ok := o.engine.Bound(n, policytable.Ingress)
			if !ok || b.Table == nil {
				continue
			}
			for _, r := range b.Table.Rules {
				if r.Action == policytable.Redirect {
					out[n] = r.RuleSet
				}
			}
		}
		return out, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestRuleSetsKeepTheirNumbersAfterARestart: without the stored numbers, the policy that is left would get the number
// of the deleted one, which connections may still carry.
func TestRuleSetsKeepTheirNumbersAfterARestart(t *testing.T) {
	dir := t.TempDir()
	o, stop := run(t, dir)
	withApps(t, o, "a", "b", "c")
	for _, app := range []string{"a", "b"} {
		if _, err := o.Upsert(t.Context(), []byte(webRequests(app, "/"+app)), "", false); err != nil {
			t.Fatal(err)
		}
	}
	before := numbersIn(t, o)
	if len(before) != 2 || before[300] == 0 || before[301] == 0 || before[300] == before[301] {
		t.Fatalf("numbers %v, want two different ones", before)
	}
	gone := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "a"}
	if _, err := o.Delete(t.Context(), []policy.Key{gone}, false); err != nil {
		t.Fatal(err)
	}
	stop()
	o, _ = run(t, dir)
	withApps(t, o, "a", "b", "c")
	if _, err := o.Upsert(t.Context(), []byte(webRequests("c", "/c")), "", false); err != nil {
		t.Fatal(err)
	}
	after := numbersIn(t, o)
	want := maps.Clone(before)
	delete(want, 300)
	want[302] = after[302]
	if !maps.Equal(after, want) || after[302] == 0 || after[302] == before[300] {
		t.Errorf("numbers after the restart %v, want %v, and not %d for the new set", after, want, before[300])
	}
}

// TestUnusedRuleSetNumbersBecomeFree: an owner whose policies change all the time does not run out of numbers.
func TestUnusedRuleSetNumbersBecomeFree(t *testing.T) {
	c := &clock{now: time.Now()}
	o, _ := run(t, t.TempDir(), func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a")
	figures := func() ruleset.Figures {
		t.Helper()
		f, err := loop.Ask(t.Context(), o.loop, opOther, func() (ruleset.Figures, error) { return o.ruleSets.registry.Figures(), nil })
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	for i := range 3 {
		if _, err := o.Upsert(t.Context(), []byte(webRequests("a", fmt.Sprint("/", i))), "", false); err != nil {
			t.Fatal(err)
		}
	}
	if f := figures(); f != (ruleset.Figures{Numbered: 1, Idle: 2}) {
		t.Fatalf("%+v, want one number in use and two that connections may carry", f)
	}
	c.add(ruleset.Grace)
	for deadline := time.Now().Add(time.Minute); figures().Idle > 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%+v: numbers are kept", figures())
		}
	}
	if f := figures(); f.Numbered != 1 {
		t.Errorf("%+v, want one number in use", f)
	}
}
