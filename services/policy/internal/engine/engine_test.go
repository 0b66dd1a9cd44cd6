// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/table"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

func TestAnIdentityOfAKnownKindIsOneWrite(t *testing.T) {
	s := shapes[0].Shape
	e := loaded(t, s)
	for i := range 50 {
		id := known(t, s, i)
		before := e.Counters()
		if err := e.Apply(Change{AddIdentities: []peer.Identity{id}}); err != nil {
			t.Fatal(err)
		}
		got := e.Counters()
		got.Evaluations = before.Evaluations
		want := before
		want.IdentityRows++
		if got != want {
			t.Fatalf("add: counters went from %+v to %+v", before, got)
		}
		if err := e.Apply(Change{RemoveIdentities: []identity.Numeric{id.Number}}); err != nil {
			t.Fatal(err)
		}
		got = e.Counters()
		got.Evaluations = before.Evaluations
		want.IdentityRows++
		if got != want {
			t.Fatalf("remove: counters went from %+v to %+v", before, got)
		}
	}
}

func TestSubjectsWithEqualPolicyShareOneTable(t *testing.T) {
	e := loaded(t, shapes[0].Shape)
	size := e.Size()
	directions := 2 * size.Subjects
	if size.Tables*4 > directions {
		t.Fatalf("%d tables for %d directions", size.Tables, directions)
	}
	hashes := make(map[string]*table.Table)
	for n := range e.subjects {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			b, _ := e.Bound(n, d)
			if b.Table == nil {
				continue
			}
			key := string(b.Hash[:])
			if old := hashes[key]; old != nil && old != b.Table {
				t.Fatal("two tables with one hash")
			}
			hashes[key] = b.Table
		}
	}
}

func TestManyPeersTimesManyPortsIsTheirSum(t *testing.T) {
	s := synthetic.Shape{Namespaces: 200, Apps: 50}
	c, err := synthetic.Make(s)
	if err != nil {
		t.Fatal(err)
	}
	var ports []string
	for i := range 40 {
		ports = append(ports, fmt.Sprintf(`{port: "%d", protocol: TCP}`, 1000+2*i))
	}
	o := decodeOne(t, `{apiVersion: cilium.io/v2, kind: CiliumNetworkPolicy, metadata: {name: p, namespace: ns-001},
spec: {endpointSelector: {}, ingress: [{fromEndpoints: [{matchExpressions: [
 {key: "k8s:io.kubernetes.pod.namespace", operator: Exists},
 {key: "k8s:io.cilium.k8s.namespace.labels.team", operator: In, values: [team-00, team-02, team-04, team-06, team-08, team-10, team-12, team-14, team-16, team-18]}]}],
 toPorts: [{ports: [`+strings.Join(ports, ",")+`]}]}]}}`)
	e := New(Config{Cluster: synthetic.Name})
	subject := identity.MinCluster + identity.Numeric(s.Apps)
	if err := e.Apply(Change{AddIdentities: c.Identities, AddSubjects: []identity.Numeric{subject}, UpsertPolicies: []policy.Object{o}}); err != nil {
		t.Fatal(err)
	}
	b, _ := e.Bound(subject, policytable.Ingress)
	selected := 0
	for _, id := range c.Identities {
		if _, ok := b.Table.Peers[e.Entry(id.Number).IdentityClass]; ok {
			selected++
		}
	}
	rows, intervals := len(b.Table.Peers), len(b.Table.Intervals(b.Table.Peers[e.Entry(identity.MinCluster).IdentityClass]))
	t.Logf("%d of %d identities are selected by %d peer rows; the class has %d intervals", selected, len(c.Identities), rows, intervals)
	if selected != 5000 || rows != 1 || intervals != 81 {
		t.Fatalf("selected %d, rows %d, intervals %d; want 5000, 1, 81", selected, rows, intervals)
	}
}

// spread returns a policy with n selectors that match independently of each other, each with its own port.
func spread(n int) policy.Object {
	spec := rule.Spec{Subject: selector.New(), Selects: [2]bool{true, false}, DefaultDeny: [2]bool{true, false}}
	for i := range n {
		r := &rule.Rule{Source: policytable.Source{Kind: "T", Name: "spread", Path: fmt.Sprint(i)}, Tier: policytable.Normal, Action: policytable.Allow}
		r.Peers.Selectors = []selector.Selector{selector.New(selector.Requirement{Key: fmt.Sprint("k", i), Op: selector.Exists})}
		r.Ports = []rule.Port{{Range: port.Ports(port.TCP, uint16(1000+2*i), uint16(1000+2*i))}}
		spec.Rules = append(spec.Rules, r.Seal())
	}
	return policy.Object{Key: policy.Key{Kind: "T", Name: "spread"}, Specs: []rule.Spec{spec}}
}

func combination(t *testing.T, number identity.Numeric, bits, n int) peer.Identity {
	t.Helper()
	ls := []label.Label{label.Kubernetes(label.KeyNamespace, "x")}
	for i := range n {
		if bits>>i&1 != 0 {
			ls = append(ls, label.Kubernetes(fmt.Sprint("k", i), "v"))
		}
	}
	id, err := peer.New(number, label.NewSet(ls...))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestATableTreatsAnIdentityThatDoesNotFitAsUnknownUntilItDoes(t *testing.T) {
	const selectors = 13
	e := New(Config{})
	subject := combination(t, 60000, 0, 0)
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{spread(selectors)}, AddIdentities: []peer.Identity{subject}, AddSubjects: []identity.Numeric{60000}}); err != nil {
		t.Fatal(err)
	}
	var ids []peer.Identity
	for i := range 5000 {
		ids = append(ids, combination(t, identity.MinCluster+identity.Numeric(i), i, selectors))
	}
	if err := e.Apply(Change{AddIdentities: ids}); err != nil {
		t.Fatal(err)
	}
	if full := len(ids) - e.Waiting(); full > table.MaxIdentityClasses || full < 3000 {
		t.Fatalf("%d of %d identities are waiting", e.Waiting(), len(ids))
	}
	last := ids[len(ids)-1]
	q := port.At(port.TCP, 1000)
	if v, _ := e.Lookup(60000, policytable.Ingress, last.Number, netip.MustParseAddr("10.0.0.1"), q); v.Action != policytable.Deny {
		t.Fatalf("a waiting identity gets %+v", v)
	}
	// Removing identities frees capacity, although a table does not reuse class numbers.
	var gone []identity.Numeric
	for _, id := range ids[:2500] {
		gone = append(gone, id.Number)
	}
	if err := e.Apply(Change{RemoveIdentities: gone}); err != nil {
		t.Fatal(err)
	}
	if e.Waiting() != 0 {
		t.Fatalf("%d still waiting", e.Waiting())
	}
	if v, _ := e.Lookup(60000, policytable.Ingress, last.Number, netip.MustParseAddr("10.0.0.1"), q); v.Action != policytable.Allow {
		t.Fatalf("with free capacity the identity gets %+v", v)
	}
}

func TestATableThatIsTooLargeIsRefusedWithThePolicysName(t *testing.T) {
	e := New(Config{})
	id := combination(t, 300, 0, 0)
	small := spread(3)
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{small}, AddIdentities: []peer.Identity{id}, AddSubjects: []identity.Numeric{300}}); err != nil {
		t.Fatal(err)
	}
	before, _ := e.Bound(300, policytable.Ingress)
	size := e.Size()

	large := spread(1)
	large.Key.Name = "large"
	r := *large.Specs[0].Rules[0]
	r.Source.Name = "large"
	r.Ports = nil
	for i := range 3000 { // 6,001 intervals
		r.Ports = append(r.Ports, rule.Port{Range: port.Ports(port.TCP, uint16(1000+2*i), uint16(1000+2*i))})
	}
	large.Specs[0].Rules = []*rule.Rule{r.Seal()}
	other := combination(t, 301, 1, 1)
	if err := e.Apply(Change{AddIdentities: []peer.Identity{other}}); err != nil {
		t.Fatal(err)
	}
	size.Identities++
	size.IdentityClasses++
	size.PeerRows++
	size.Classes, size.Nodes, size.Intervals = e.Size().Classes, e.Size().Nodes, e.Size().Intervals

	err := e.Apply(Change{Refuse: true, UpsertPolicies: []policy.Object{large}})
	var limit *table.ErrTooLarge
	if !errors.As(err, &limit) || limit.Got != 6001 || limit.Limit != table.MaxIntervals {
		t.Fatalf("error is %v", err)
	}
	if !strings.Contains(err.Error(), "T large") {
		t.Fatalf("error does not name the policy: %v", err)
	}
	after, _ := e.Bound(300, policytable.Ingress)
	if after.Table != before.Table || e.Size() != size {
		t.Fatalf("the refused policy left something: %+v, want %+v", e.Size(), size)
	}
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{spread(2)}}); err != nil {
		t.Fatalf("after the refusal: %v", err)
	}
}

func TestMorePrefixesThanATableTakesAreRefused(t *testing.T) {
	e := New(Config{})
	id := combination(t, 300, 0, 0)
	if err := e.Apply(Change{AddIdentities: []peer.Identity{id}, AddSubjects: []identity.Numeric{300}}); err != nil {
		t.Fatal(err)
	}
	o := spread(1)
	r := *o.Specs[0].Rules[0]
	for i := range table.MaxPrefixes + 1 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0})
		r.Peers.Networks = append(r.Peers.Networks, rule.Network{Prefix: netip.PrefixFrom(a, 24), Reach: rule.ReachOutside})
	}
	o.Specs[0].Rules = []*rule.Rule{r.Seal()}
	var limit *table.ErrTooLarge
	err := e.Apply(Change{Refuse: true, UpsertPolicies: []policy.Object{o}})
	if !errors.As(err, &limit) || limit.Limit != table.MaxPrefixes {
		t.Fatalf("error is %v", err)
	}
	if b, _ := e.Bound(300, policytable.Ingress); b.Table != nil {
		t.Fatal("the refused policy is enforced")
	}
}

func TestOwnNodeIsLetInOnlyWhereAPolicySelectsTheSubject(t *testing.T) {
	host, err := peer.New(identity.Host, label.NewSet(label.Reserved(identity.NameHost)))
	if err != nil {
		t.Fatal(err)
	}
	pod := combination(t, 300, 0, 0)
	addr := netip.MustParseAddr("192.0.2.1")
	for _, tc := range []struct {
		name     string
		config   Config
		policies []policy.Object
		want     policytable.Action
	}{
		{"nothing enforced", Config{AllowHost: true}, nil, policytable.Allow},
		{"selected", Config{AllowHost: true}, []policy.Object{spread(1)}, policytable.Allow},
		{"selected, local node not special", Config{}, []policy.Object{spread(1)}, policytable.Deny},
		{"enforced always, not selected", Config{AllowHost: true, Enforcement: EnforceAlways}, nil, policytable.Deny},
		{"enforced never", Config{Enforcement: EnforceNever}, []policy.Object{spread(1)}, policytable.Allow},
	} {
		e := New(tc.config)
		if err := e.Apply(Change{AddIdentities: []peer.Identity{host, pod}, AddSubjects: []identity.Numeric{300}, UpsertPolicies: tc.policies}); err != nil {
			t.Fatal(err)
		}
		if v, _ := e.Lookup(300, policytable.Ingress, identity.Host, addr, port.At(port.TCP, 22)); v.Action != tc.want {
			t.Errorf("%s: %+v, want %s", tc.name, v, tc.want)
		}
	}
}

// TestChurnDoesNotGrowTheEngine: after a million identities were added and removed, neither the engine's counts nor the
// heap have grown.
func TestChurnDoesNotGrowTheEngine(t *testing.T) {
	s := synthetic.Shape{Namespaces: 20, Apps: 10, Policies: 200, Subjects: 50}
	e := loaded(t, s)
	size := e.Size()
	churn := func(rounds int) {
		for i := range rounds {
			id := known(t, s, i%200)
			if err := e.Apply(Change{AddIdentities: []peer.Identity{id}}); err != nil {
				t.Fatal(err)
			}
			if err := e.Apply(Change{RemoveIdentities: []identity.Numeric{id.Number}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	churn(2000) // maps have reached their size
	before := heap()
	churn(runs(t, 500_000))
	if got := e.Size(); got != size {
		t.Fatalf("size went from %+v to %+v", size, got)
	}
	if after := heap(); after > before+512<<10 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
}

func TestASubjectWhoseIdentityComesBackIsCompiledAgain(t *testing.T) {
	e := New(Config{})
	a := combination(t, 300, 0, 0)
	if err := e.Apply(Change{AddIdentities: []peer.Identity{a}, AddSubjects: []identity.Numeric{300}}); err != nil {
		t.Fatal(err)
	}
	if err := e.Apply(Change{RemoveIdentities: []identity.Numeric{300}}); err != nil {
		t.Fatal(err)
	}
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{spread(1)}}); err != nil {
		t.Fatal(err)
	}
	if err := e.Apply(Change{AddIdentities: []peer.Identity{a}}); err != nil {
		t.Fatal(err)
	}
	if b, ok := e.Bound(300, policytable.Ingress); !ok || b.Table == nil {
		t.Fatal("nothing is enforced")
	}
}

// TestRulesTimesPrefixesAreRefusedByTheirProduct: the work for a table is the number of rules for all addresses times
// the number of prefixes. A policy for which this product is too large is refused before the work starts.
func TestRulesTimesPrefixesAreRefusedByTheirProduct(t *testing.T) {
	const rules, nets = 2000, 3000
	o := spread(1)
	o.Key.Name, o.Specs[0].Rules = "product", nil
	for i := range rules {
		hole := netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}), 32)
		r := &rule.Rule{
			Source: policytable.Source{Kind: "K", Name: "product"}, Tier: policytable.Normal, Action: policytable.Allow, AllPorts: true,
			Peers: rule.Peers{Networks: []rule.Network{{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Reach: rule.ReachOutside, Except: []netip.Prefix{hole}}}},
		}
		o.Specs[0].Rules = append(o.Specs[0].Rules, r.Seal())
	}
	many := &rule.Rule{Source: policytable.Source{Kind: "K", Name: "product"}, Tier: policytable.Normal, Action: policytable.Deny, AllPorts: true}
	for i := range nets {
		many.Peers.Networks = append(many.Peers.Networks, rule.Network{
			Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24), Reach: rule.ReachOutside,
		})
	}
	o.Specs[0].Rules = append(o.Specs[0].Rules, many.Seal())
	e := New(Config{})
	err := e.Apply(Change{
		Refuse:         true,
		UpsertPolicies: []policy.Object{o},
		AddIdentities:  []peer.Identity{combination(t, 300, 0, 0)},
		AddSubjects:    []identity.Numeric{300},
	})
	var large *table.ErrTooLarge
	if !errors.As(err, &large) || large.Limit != 5_000_000 || !strings.Contains(err.Error(), "the largest share is from K product") {
		t.Fatalf("%v", err)
	}
}

func TestASubjectThatMovesToAnotherNamespaceIsFoundThere(t *testing.T) {
	in := func(ns string) peer.Identity {
		id, err := peer.New(300, label.NewSet(label.Kubernetes(label.KeyNamespace, ns)))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	e := New(Config{})
	if err := e.Apply(Change{AddIdentities: []peer.Identity{in("a")}, AddSubjects: []identity.Numeric{300}}); err != nil {
		t.Fatal(err)
	}
	if err := e.Apply(Change{AddIdentities: []peer.Identity{in("b")}}); err != nil {
		t.Fatal(err)
	}
	o := spread(1)
	o.Specs[0].Namespace = "b"
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{o}}); err != nil {
		t.Fatal(err)
	}
	if b, _ := e.Bound(300, policytable.Ingress); b.Table == nil {
		t.Fatal("the policy of the new namespace is not enforced")
	}
	if err := e.Apply(Change{DeletePolicies: []policy.Key{o.Key}}); err != nil {
		t.Fatal(err)
	}
	if b, _ := e.Bound(300, policytable.Ingress); b.Table != nil {
		t.Fatal("the deleted policy is still enforced")
	}
}

// TestTheUnknownPodIsEvaluatedAsAnUnknownNumber: the identity service may announce the reserved number for pods
// without a known identity. Its labels and named ports are ignored, and it is treated as unknown.
func TestTheUnknownPodIsEvaluatedAsAnUnknownNumber(t *testing.T) {
	unknown, err := peer.New(identity.UnknownInCluster, label.NewSet(label.Reserved("unknown-in-cluster")))
	if err != nil {
		t.Fatal(err)
	}
	subject := combination(t, 300, 0, 0)
	for _, a := range []policytable.Action{policytable.Deny, policytable.Allow} {
		r := &rule.Rule{Direction: policytable.Egress, Tier: policytable.Normal, Action: a, Ports: []rule.Port{{Name: "http", Protocol: port.TCP}}}
		r.Peers.Selectors = []selector.Selector{selector.New(selector.Requirement{Key: "k1", Op: selector.DoesNotExist})}
		o := policy.Object{Key: policy.Key{Kind: "K", Name: "n"}, Specs: []rule.Spec{{Selects: [2]bool{true, true}, Rules: []*rule.Rule{r.Seal()}}}}
		e := New(Config{})
		if err := e.Apply(Change{
			UpsertPolicies: []policy.Object{o}, AddIdentities: []peer.Identity{subject, unknown}, AddSubjects: []identity.Numeric{300},
		}); err != nil {
			t.Fatal(err)
		}
		for _, p := range []uint16{80, 8080} {
			q := port.At(port.TCP, p)
			x, err := e.Explain(300, policytable.Egress, unknown.Number, netip.MustParseAddr("10.0.0.1"), q)
			if err != nil {
				t.Fatal(err)
			}
			want, err := e.Lookup(300, policytable.Egress, 60000, netip.MustParseAddr("10.0.0.1"), q)
			if err != nil {
				t.Fatal(err)
			}
			if x.Verdict != want || (len(x.Matches) == 1) != (a == policytable.Deny) {
				t.Errorf("%s port %d: %+v, for a nonexistent number %+v", a, p, x, want)
			}
		}
	}
}

func TestARefusedPolicyDoesNotHoldBackOtherChanges(t *testing.T) {
	only := spread(1)
	only.Key.Name = "only"
	only.Specs[0].Subject = selector.New(selector.Requirement{Key: "k9", Op: selector.Exists})
	before := combination(t, 300, 0, 10)
	e := New(Config{})
	if err := e.Apply(Change{UpsertPolicies: []policy.Object{only}, AddIdentities: []peer.Identity{before}, AddSubjects: []identity.Numeric{300}}); err != nil {
		t.Fatal(err)
	}
	if b, _ := e.Bound(300, policytable.Ingress); b.Table != nil {
		t.Fatal("the policy selects the subject too early")
	}
	large := spread(1)
	large.Key.Name = "large"
	r := *large.Specs[0].Rules[0]
	for i := range 3000 {
		r.Ports = append(r.Ports, rule.Port{Range: port.Ports(port.UDP, uint16(1000+2*i), uint16(1000+2*i))})
	}
	large.Specs[0].Rules = []*rule.Rule{r.Seal()}
	after := combination(t, 300, 1<<9, 10) // the same number with other labels
	change := Change{Refuse: true, UpsertPolicies: []policy.Object{large}, AddIdentities: []peer.Identity{after}}
	if err := e.Apply(change); err == nil {
		t.Fatal("the policy is accepted")
	}
	b, _ := e.Bound(300, policytable.Ingress)
	if b.Table == nil || len(b.Table.Rules) != 1 || b.Sources[0][0].Name != "spread" {
		t.Fatalf("the subject is evaluated by %+v", b.Sources)
	}
}
