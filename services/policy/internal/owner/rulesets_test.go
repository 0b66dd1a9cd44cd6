// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/layer7"
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
	want := Subscription{Name: "datapath", Role: RoleEnforces, Interest: interest}
	_, err := o.Subscribers().Subscribe(t.Context(), want)
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

// TestRuleSetsKeepTheirNumbersAfterARestart: a policy was deleted before a restart. If the numbers were not stored,
// the remaining policy would get the number of the deleted policy, which existing connections may still carry.
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

func figuresOf(t *testing.T, o *Owner) ruleset.Figures {
	t.Helper()
	f, err := loop.Ask(t.Context(), o.loop, opOther, func() (ruleset.Figures, error) {
		return o.ruleSets.registry.Figures(), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// sent returns the numbers that have content for proxies.
func sent(o *Owner) map[policytable.RuleSet]layer7.Digest {
	out := make(map[policytable.RuleSet]layer7.Digest)
	for _, n := range o.RuleSets().Keys() {
		if s, ok := o.RuleSets().Get(n); ok && n != WantedNames {
			out[n] = s.Digest()
		}
	}
	return out
}

// TestNumbersStayWhileTheDatapathIsAway: while the datapath is disconnected, the kernel enforces older tables. So
// their numbers are not freed, although no table of this process has them.
func TestNumbersStayWhileTheDatapathIsAway(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	o, stop := run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a")
	if _, err := o.Upsert(t.Context(), []byte(webRequests("a", "/")), "", false); err != nil {
		t.Fatal(err)
	}
	before := numbersIn(t, o)
	stop()
	o, _ = run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	gone := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "a"}
	if _, err := o.Delete(t.Context(), []policy.Key{gone}, false); err != nil {
		t.Fatal(err)
	}
	c.add(3 * ruleset.Grace)
	if _, err := o.Upsert(t.Context(), []byte(webRequests("b", "/other")), "", false); err != nil {
		t.Fatal(err)
	}
	if f := figuresOf(t, o); f.Idle != 1 {
		t.Fatalf("%+v: the number became free while nothing followed the tables", f)
	}
	withApps(t, o, "a", "b")
	if after := numbersIn(t, o); after[301] == 0 || after[301] == before[300] {
		t.Errorf("number %d for another set, after %v", after[301], before)
	}
}

// TestUnstoredNumbersAreNotUsed: a number that could not be stored could belong to another set after a crash. So
// neither tables nor proxies get it before it is stored.
func TestUnstoredNumbersAreNotUsed(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	o, _ := run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a")
	path := blockNumbers(t, dir)
	if _, err := o.Upsert(t.Context(), []byte(webRequests("a", "/")), "", false); err != nil {
		t.Fatal(err)
	}
	if n, got := numbersIn(t, o), sent(o); len(n) != 1 || n[300] != 0 || len(got) > 0 {
		t.Errorf("numbers %v, and proxies have %v, before the number is stored", n, got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	c.add(retryStorage)
	for deadline := time.Now().Add(time.Minute); numbersIn(t, o)[300] == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the table has no number after it could be stored")
		}
	}
	if n, got := numbersIn(t, o)[300], sent(o); len(got) != 1 || got[n] == (layer7.Digest{}) {
		t.Errorf("number %d, and proxies have %v, after the number is stored", n, got)
	}
}

// TestUnstoredNumberIsNotGivenToAnotherSet: the kernel may still enforce tables from before the restart. A number in
// these tables must not get another set.
func TestUnstoredNumberIsNotGivenToAnotherSet(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	o, stop := run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a", "b")
	path := blockNumbers(t, dir)
	if _, err := o.Upsert(t.Context(), []byte(webRequests("a", "/a")), "", false); err != nil {
		t.Fatal(err)
	}
	before := numbersIn(t, o)[300]
	gone := policy.Key{Kind: "CiliumNetworkPolicy", Namespace: "shop", Name: "a"}
	if _, err := o.Delete(t.Context(), []policy.Key{gone}, false); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	o, _ = run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a", "b")
	if _, err := o.Upsert(t.Context(), []byte(webRequests("b", "/b")), "", false); err != nil {
		t.Fatal(err)
	}
	if after := numbersIn(t, o)[301]; after == 0 || after == before {
		t.Errorf("number %d for another set, after %d", after, before)
	}
}

// blockNumbers creates a directory at the path of the numbers file, so that it cannot be written.
func blockNumbers(t *testing.T, dir string) (path string) {
	t.Helper()
	boot, err := durable.BootID()
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "rulesets."+boot)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestCorruptNumbersRefuseConnections: if the stored numbers are corrupt, it is unknown which numbers connections
// carry. So no set gets a number for the grace period.
func TestCorruptNumbersRefuseConnections(t *testing.T) {
	c := &clock{now: time.Now()}
	dir := t.TempDir()
	boot, err := durable.BootID()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "rulesets."+boot), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, _ := run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a")
	if _, err := o.Upsert(t.Context(), []byte(webRequests("a", "/")), "", false); err != nil {
		t.Fatal(err)
	}
	if n, got := numbersIn(t, o), sent(o); len(n) != 1 || n[300] != 0 || len(got) > 0 {
		t.Fatalf("numbers %v, proxies have %v", n, got)
	}
	c.add(ruleset.Grace)
	for deadline := time.Now().Add(time.Minute); numbersIn(t, o)[300] == 0; {
		if time.Now().After(deadline) {
			t.Fatalf("%+v after the grace", figuresOf(t, o))
		}
	}
	if got := sent(o); len(got) != 1 {
		t.Errorf("proxies have %v", got)
	}
}

// TestUnusedRuleSetNumbersBecomeFree: an owner whose policies change continually does not run out of numbers.
func TestUnusedRuleSetNumbersBecomeFree(t *testing.T) {
	c := &clock{now: time.Now()}
	o, _ := run(t, t.TempDir(), func(cfg *Config) { cfg.Now = c.Now })
	withApps(t, o, "a")
	figures := func() ruleset.Figures { return figuresOf(t, o) }
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
