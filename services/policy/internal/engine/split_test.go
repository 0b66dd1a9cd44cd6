// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// byNamespace maps each namespace to a labelled tenant, except for kube-system, which belongs to the system.
func byNamespace(ns string) (shares.Tenant, int) {
	if ns == "" || ns == "kube-system" {
		return shares.System, 0
	}
	return shares.Labelled(ns), 0
}

// admission allows or denies one port for each of many selectors, and port 1 for all peers.
func admission(ns string, action policytable.Action, selectors ...selector.Selector) policy.Object {
	spec := rule.Spec{
		Namespace: ns, Subject: selector.New(selector.Requirement{Key: label.KeyNamespace, Op: selector.In, Values: []string{ns}}),
		Selects: [2]bool{true, false}, DefaultDeny: [2]bool{true, false},
	}
	add := func(r *rule.Rule, n uint16) {
		r.Source = policytable.Source{Kind: "T", Namespace: ns, Name: "p", Path: fmt.Sprint(n)}
		r.Tier, r.Ports = policytable.Normal, []rule.Port{{Range: port.Ports(port.TCP, n, n)}}
		spec.Rules = append(spec.Rules, r.Seal())
	}
	for i, s := range selectors {
		r := &rule.Rule{Action: action}
		r.Peers.Selectors = []selector.Selector{s}
		add(r, uint16(100+i)) //nolint:gosec // small
	}
	open := &rule.Rule{Action: policytable.Allow}
	open.Peers.Any = true
	add(open, 1)
	if action == policytable.Deny { // without the deny rules, these ports are allowed
		for i := range selectors {
			r := &rule.Rule{Action: policytable.Allow}
			r.Peers.Any = true
			add(r, uint16(100+i)) //nolint:gosec // small
		}
	}
	return policy.Object{Key: policy.Key{Kind: "T", Namespace: ns, Name: "p"}, Specs: []rule.Spec{spec}}
}

func exists(key string) selector.Selector {
	return selector.New(selector.Requirement{Key: key, Op: selector.Exists})
}

// TestSelectorsOfOneTenantSplitClassesWithinItsShare: the first tenant selects the peers of a second tenant by many
// labels, until its share of classes is used up. The policies of the second tenant stay fully enforced. For peers
// whose classes it cannot split, no allow rule of the first tenant matches, and every deny rule does.
func TestSelectorsOfOneTenantSplitClassesWithinItsShare(t *testing.T) {
	const limit, keys = 160, 8
	for i := range 4 {
		action := []policytable.Action{policytable.Allow, policytable.Deny}[i%2]
		prepared := i >= 2
		e := New(Config{Tenant: byNamespace, IdentityClasses: limit})
		var all []selector.Selector
		for i := range keys {
			all = append(all, exists(fmt.Sprint("k", i)))
		}
		pod := func(number identity.Numeric, ns string, bits int, more ...label.Label) peer.Identity {
			ls := append(more, label.Kubernetes(label.KeyNamespace, ns))
			for i := range keys {
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
		const first, shop, flood, second = identity.MinCluster, identity.MinCluster + 1000, identity.MinCluster + 1001,
			identity.MinCluster + 1002
		peers := []peer.Identity{
			pod(shop, "shop", 0), pod(flood, "flood", 0), pod(second, "flood", 0, label.Kubernetes("second", "pod")),
		}
		for bits := range 1 << keys {
			var more []label.Label
			if bits%3 == 0 {
				more = append(more, label.Kubernetes("web", "yes"))
			}
			peers = append(peers, pod(first+identity.Numeric(bits), "shop", bits, more...)) //nolint:gosec // small
		}
		apply := func(c Change) {
			t.Helper()
			p := e.Prepare(c)
			for prepared && p.Mark(1) { //nolint:revive // until all were marked
			}
			for prepared && p.Step(8) { //nolint:revive // until all were compiled
			}
			if err := e.Apply(c); err != nil {
				t.Fatal(err)
			}
			for p.Release(8) { //nolint:revive // until all are released
			}
		}
		apply(Change{UpsertPolicies: []policy.Object{admission("shop", policytable.Allow, exists("web"))}})
		apply(Change{AddIdentities: peers[:len(peers)/2], AddSubjects: []identity.Numeric{shop, flood}})
		apply(Change{UpsertPolicies: []policy.Object{admission("flood", action, all...)}})
		apply(Change{AddIdentities: peers[len(peers)/2:]})
		allows := func(subject, number identity.Numeric, tcp uint16) bool {
			t.Helper()
			v, err := e.Lookup(subject, policytable.Ingress, number, netip.MustParseAddr("10.0.0.1"), port.At(port.TCP, tcp))
			if err != nil {
				t.Fatal(err)
			}
			return v.Action == policytable.Allow
		}
		check := func(what string) (closed int) {
			t.Helper()
			for bits := range 1 << keys {
				number := first + identity.Numeric(bits) //nolint:gosec // small
				if got := allows(shop, number, 100); got != (bits%3 == 0) {
					t.Fatalf("%s: shop allows port 100 to peer %d: %v", what, bits, got)
				}
				if !allows(flood, number, 1) {
					t.Fatalf("%s: flood denies port 1, which no selector decides, to peer %d", what, bits)
				}
				for i := range keys {
					want := bits>>i&1 != 0 == (action == policytable.Allow)
					got := allows(flood, number, uint16(100+i)) //nolint:gosec // small
					if got && !want {
						t.Fatalf("%s: flood allows port %d to peer %d", what, 100+i, bits)
					}
					if !got && want {
						closed++
					}
				}
			}
			return closed
		}
		if closed := check("flood"); closed == 0 || e.Waiting() == 0 {
			t.Errorf("%d verdicts are closed, %d peers wait", closed, e.Waiting())
		}
		for _, l := range slices.Collect(maps.Values(e.tables)) {
			if !e.replaceTable(l) {
				t.Fatal("a table was not renewed")
			}
		}
		apply(Change{AddSubjects: []identity.Numeric{second}})
		if closed := check("a second pod, with renewed tables"); closed == 0 {
			t.Error("flood has all classes after its tables were renewed")
		}
		usage, _ := e.Splits()
		if usage.Used > limit || len(e.classes) != usage.Used || usage.Asked <= usage.Used {
			t.Errorf("%d classes, usage %+v", len(e.classes), usage)
		}
		// Some peers are removed, which frees capacity for the others.
		var gone []identity.Numeric
		for bits := range 1 << keys {
			if bits >= 40 {
				gone = append(gone, first+identity.Numeric(bits)) //nolint:gosec // small
			}
		}
		apply(Change{RemoveIdentities: gone})
		if n := e.Waiting(); n != 0 {
			t.Errorf("with free capacity, %d peers wait", n)
		}
		apply(Change{AddIdentities: peers})
		check("again")
		apply(Change{DeletePolicies: []policy.Key{{Kind: "T", Namespace: "flood", Name: "p"}}})
		if n := len(e.classes); n != 2 || e.Waiting() != 0 || len(e.splits.marks) != 0 {
			t.Errorf("without the flood there are %d classes, %d peers wait, %d marks", n, e.Waiting(), len(e.splits.marks))
		}
	}
}

// sourced adds the namespaces of policies to the sources of their rules.
func sourced(s *scenario.State) *scenario.State {
	for _, o := range s.Objects {
		for _, spec := range o.Specs {
			for _, r := range spec.Rules {
				r.Source.Namespace = spec.Namespace
			}
		}
	}
	return s
}

// TestTablesAllowNoMoreWhileTenantsHaveNoRoomForClasses applies random states with capacity for a few classes. Subjects
// of tenants without capacity are allowed no more than their rules allow; all other subjects are allowed exactly what
// their rules allow.
func TestTablesAllowNoMoreWhileTenantsHaveNoRoomForClasses(t *testing.T) {
	t.Parallel()
	w := seeded(t, 11)
	marked, exact, closed := 0, 0, 0
	for run := range runs(t, 60) {
		config := configs[0]
		config.IdentityClasses = 2 + w.IntN(20)
		config.Tenant = func(ns string) (shares.Tenant, int) {
			if ns == "" {
				return shares.System, 0
			}
			return shares.Labelled(ns), 0
		}
		s := sourced(w.Draw())
		e := fresh(t, config, s)
		for step := range 30 {
			next := s.Clone()
			for range 1 + w.IntN(3) {
				w.Mutate(next)
			}
			sourced(next)
			if err := e.Apply(diff(s, next)); err != nil {
				t.Fatalf("run %d step %d: %v", run, step, err)
			}
			s = next
			n := &naive{config, s}
			for range 60 {
				q, ok := w.Question(s)
				if !ok {
					break
				}
				ns, _ := s.Identities[q.Subject].Labels.Value(label.SourceKubernetes, label.KeyNamespace)
				tenant, _ := config.Tenant(ns)
				want := n.evaluate(q)
				got, err := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
				if err != nil {
					t.Fatal(err)
				}
				switch {
				case got.Action == want.action && got.Proxy == want.proxy:
					exact++
				case e.splits.marks[tenant] != nil && got.Action < want.action: // a redirect allows less than an allow
					closed++
				default:
					t.Fatalf("run %d step %d: %+v: %+v, but the rules give %+v; mark %+v", run, step, q, got, want,
						e.splits.marks[tenant])
				}
			}
			marked += len(e.splits.marks)
		}
		if err := e.Apply(diff(s, scenario.NewState())); err != nil {
			t.Fatal(err)
		}
		if e.splits.all != 0 || e.splits.system != 0 || len(e.splits.of) != 0 || len(e.splits.marks) != 0 {
			t.Fatalf("run %d: left: %+v", run, e.splits)
		}
	}
	if marked == 0 || closed == 0 {
		t.Errorf("%d marks, %d verdicts are closed, %d exact", marked, closed, exact)
	}
	t.Logf("%d marks, %d verdicts are closed, %d exact", marked, closed, exact)
}

// TestSelectorsOfTwoTenantsSplitForBoth: a tenant without capacity uses the same selector as another tenant. The
// selector still splits classes, and the other tenant's rules are enforced exactly.
func TestSelectorsOfTwoTenantsSplitForBoth(t *testing.T) {
	const limit, keys = 32, 6
	e := New(Config{Tenant: byNamespace, IdentityClasses: limit})
	var all []selector.Selector
	for i := range keys {
		all = append(all, exists(fmt.Sprint("k", i)))
	}
	const first, shop = identity.MinCluster, identity.MinCluster + 1000
	c := Change{AddSubjects: []identity.Numeric{shop, shop + 1}}
	for _, ns := range []string{"shop", "flood"} {
		id, err := peer.New(shop+identity.Numeric(len(c.AddIdentities)), label.NewSet(label.Kubernetes(label.KeyNamespace, ns)))
		if err != nil {
			t.Fatal(err)
		}
		c.AddIdentities = append(c.AddIdentities, id)
	}
	for bits := range 1 << keys {
		c.AddIdentities = append(c.AddIdentities, combination(t, first+identity.Numeric(bits), bits, keys)) //nolint:gosec // small
	}
	for _, next := range []Change{
		c,
		{UpsertPolicies: []policy.Object{admission("flood", policytable.Allow, all...)}},
		{UpsertPolicies: []policy.Object{admission("shop", policytable.Deny, all[2])}},
	} {
		if err := e.Apply(next); err != nil {
			t.Fatal(err)
		}
	}
	if e.Waiting() == 0 {
		t.Fatal("flood has capacity for all classes")
	}
	for bits := range 1 << keys {
		number := first + identity.Numeric(bits) //nolint:gosec // small
		v, err := e.Lookup(shop, policytable.Ingress, number, netip.MustParseAddr("10.0.0.1"), port.At(port.TCP, 100))
		if err != nil {
			t.Fatal(err)
		}
		if got, want := v.Action == policytable.Allow, bits>>2&1 == 0; got != want {
			t.Errorf("shop allows peer %d: %v", bits, got)
		}
	}
}

// TestTenantSplitsItsClassesBesideTenantsThatSplitAll: a labelled tenant splits 256 of 1,600 classes, less than half
// of the part for labelled tenants. Another labelled tenant, and namespaces without the label, select their pods by
// more label combinations than there are classes. The first tenant's allow rules match as if there were no other
// tenants, whether its policies are applied first or last.
func TestTenantSplitsItsClassesBesideTenantsThatSplitAll(t *testing.T) {
	const limit, namespaces = 1600, 500
	tenant := func(ns string) (shares.Tenant, int) {
		switch {
		case ns == "":
			return shares.System, 0
		case ns == "a" || ns == "b":
			return shares.Labelled(ns), 0
		}
		return shares.Namespace(ns), 0
	}
	number := identity.MinCluster - 1
	// change returns the change for a namespace that selects its pods by each combination of labels.
	change := func(ns string, keys int) (c Change) {
		var all []selector.Selector
		for i := range keys {
			all = append(all, exists(fmt.Sprint(ns, ".", i)))
		}
		for bits := range 1 << keys {
			ls := []label.Label{label.Kubernetes(label.KeyNamespace, ns)}
			for i := range keys {
				if bits>>i&1 != 0 {
					ls = append(ls, label.Kubernetes(fmt.Sprint(ns, ".", i), "v"))
				}
			}
			number++
			id, err := peer.New(number, label.NewSet(ls...))
			if err != nil {
				t.Fatal(err)
			}
			c.AddIdentities = append(c.AddIdentities, id)
		}
		c.AddSubjects = []identity.Numeric{number}
		c.UpsertPolicies = []policy.Object{admission(ns, policytable.Allow, all...)}
		return c
	}
	for _, first := range []bool{true, false} {
		for _, noisy := range []string{"namespaces", "labelled", "both"} {
			e := New(Config{Tenant: tenant, IdentityClasses: limit})
			apply := func(c Change) {
				t.Helper()
				if err := e.Apply(c); err != nil {
					t.Fatal(err)
				}
			}
			b := change("b", 8)
			if first {
				apply(b)
			}
			if noisy != "namespaces" {
				apply(change("a", 11))
			}
			if noisy != "labelled" {
				for i := range namespaces {
					apply(change(fmt.Sprint("n", i), 2))
				}
			}
			if !first {
				apply(b)
			}
			for bits, id := range b.AddIdentities {
				for i := range 8 {
					v, err := e.Lookup(b.AddSubjects[0], policytable.Ingress, id.Number, netip.MustParseAddr("10.0.0.1"),
						port.At(port.TCP, uint16(100+i))) //nolint:gosec // small
					if err != nil {
						t.Fatal(err)
					}
					if got, want := v.Action == policytable.Allow, bits>>i&1 != 0; got != want {
						t.Fatalf("first %t, with %s: b allows port %d to peer %d: %t", first, noisy, 100+i, bits, got)
					}
				}
			}
			if n := len(e.classes); n > limit {
				t.Errorf("first %t, with %s: %d classes of %d", first, noisy, n, limit)
			}
			usage, waiting := e.Splits()
			if waiting == 0 || usage.Used != len(e.classes) {
				t.Errorf("first %t, with %s: no peers wait; %d used, %d classes", first, noisy, usage.Used, len(e.classes))
			}
		}
	}
}

// TestSplitClassesFillNoTablesOfAnotherTenant: a tenant selects each pod of another tenant by a separate label. The
// other tenant's tables, which select all these pods by one selector, get a row for each class. The number of rows in
// tables of other tenants is limited, and all tables still allow the same connections.
func TestSplitClassesFillNoTablesOfAnotherTenant(t *testing.T) {
	const pods, tables, limit = 256, 20, 640
	for _, first := range []bool{true, false} {
		e := New(Config{Tenant: byNamespace, SplitRows: limit})
		apply := func(c Change) {
			t.Helper()
			if err := e.Apply(c); err != nil {
				t.Fatal(err)
			}
		}
		id := func(number identity.Numeric, labels ...label.Label) peer.Identity {
			x, err := peer.New(number, label.NewSet(labels...))
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		in := func(ns string) label.Label { return label.Kubernetes(label.KeyNamespace, ns) }
		number := func(n int) identity.Numeric { return identity.MinCluster + identity.Numeric(n) } //nolint:gosec // small
		var victim, noisy Change
		const flood = pods + tables
		for i := range pods {
			victim.AddIdentities = append(victim.AddIdentities,
				id(number(i), in("b"), label.Kubernetes("app", "web"), label.Kubernetes(fmt.Sprint("pod", i), "v")))
		}
		for i := range tables { // each has its own port and therefore its own table
			name := fmt.Sprint("s", i)
			victim.AddIdentities = append(victim.AddIdentities, id(number(pods+i), in("b"), label.Kubernetes(name, "v")))
			victim.AddSubjects = append(victim.AddSubjects, number(pods+i))
			r := &rule.Rule{Action: policytable.Allow, Tier: policytable.Normal}
			r.Source = policytable.Source{Kind: "T", Namespace: "b", Name: name}
			r.Peers.Selectors = []selector.Selector{exists("app")}
			r.Ports = []rule.Port{{Range: port.Ports(port.TCP, uint16(100+i), uint16(100+i))}} //nolint:gosec // small
			o := policy.Object{Key: policy.Key{Kind: "T", Namespace: "b", Name: name}, Specs: []rule.Spec{{
				Namespace: "b", Subject: exists(name), Selects: [2]bool{true, false}, DefaultDeny: [2]bool{true, false},
				Rules: []*rule.Rule{r.Seal()},
			}}}
			victim.UpsertPolicies = append(victim.UpsertPolicies, o)
		}
		var all []selector.Selector
		for i := range pods {
			all = append(all, exists(fmt.Sprint("pod", i)))
		}
		noisy.AddIdentities = []peer.Identity{id(number(flood), in("a"))}
		noisy.AddSubjects = []identity.Numeric{number(flood)}
		noisy.UpsertPolicies = []policy.Object{admission("a", policytable.Allow, all...)}
		if first {
			apply(victim)
		}
		apply(noisy)
		if !first {
			apply(victim)
		}
		rows := 0
		for _, l := range e.tables {
			if l.tenant == shares.Labelled("b") {
				rows += len(l.table.Peers)
			}
		}
		if rows > limit || len(e.splits.marks) != 1 {
			t.Errorf("first %t: tables of b have %d rows; %d tenants do not split", first, rows, len(e.splits.marks))
		}
		if rows < limit/2 {
			t.Errorf("first %t: tables of b have only %d rows", first, rows)
		}
		allows := func(subject, n identity.Numeric, tcp uint16) bool {
			t.Helper()
			v, err := e.Lookup(subject, policytable.Ingress, n, netip.MustParseAddr("10.0.0.1"), port.At(port.TCP, tcp))
			if err != nil {
				t.Fatal(err)
			}
			return v.Action == policytable.Allow
		}
		closed := 0
		for i := range pods {
			for s := range tables {
				if !allows(number(pods+s), number(i), uint16(100+s)) { //nolint:gosec // small
					t.Fatalf("first %t: b's subject %d denies pod %d", first, s, i)
				}
			}
			if !allows(number(flood), number(i), uint16(100+i)) { //nolint:gosec // small
				closed++
			}
			if allows(number(flood), number(i), uint16(101+i)) { //nolint:gosec // small
				t.Fatalf("first %t: a allows pod %d a port of another pod", first, i)
			}
		}
		if closed == 0 || closed == pods {
			t.Errorf("first %t: a allows %d of %d pods", first, pods-closed, pods)
		}
		// Without a change of the inputs, no row is written.
		before := e.Counters().PeerRows
		for range 3 {
			apply(Change{AddIdentities: []peer.Identity{id(number(flood+1), in("c"))}})
			apply(Change{RemoveIdentities: []identity.Numeric{number(flood + 1)}})
		}
		if after := e.Counters().PeerRows; after != before {
			t.Errorf("first %t: %d rows are written without a change", first, after-before)
		}
		// When the tables of the other tenant are removed, the classes of all pods are split.
		var gone []policy.Key
		for _, o := range victim.UpsertPolicies {
			gone = append(gone, o.Key)
		}
		apply(Change{DeletePolicies: gone})
		for i := range pods {
			if !allows(number(flood), number(i), uint16(100+i)) { //nolint:gosec // small
				t.Fatalf("first %t: a denies pod %d, although no tables of others are left", first, i)
			}
		}
	}
}

// TestClassesCountForTheTenantThatSplitsThem: tenant a selects each pod of tenant b, or each of its own pods, by a
// label of its own. Tenant b selects the same pods by fewer labels. The classes are charged to a, although b had more
// classes before.
func TestClassesCountForTheTenantThatSplitsThem(t *testing.T) {
	const pods, keys = 200, 4
	for _, owner := range []string{"a", "b"} {
		for _, first := range []bool{true, false} {
			e := New(Config{Tenant: byNamespace})
			c := Change{AddSubjects: []identity.Numeric{identity.MinCluster, identity.MinCluster + 1}}
			for i := range pods + 2 {
				ns := owner
				if i < 2 {
					ns = []string{"a", "b"}[i]
				}
				ls := []label.Label{label.Kubernetes(label.KeyNamespace, ns), label.Kubernetes(fmt.Sprint("pod", i), "v")}
				for k := range keys {
					if i>>k&1 != 0 {
						ls = append(ls, label.Kubernetes(fmt.Sprint("k", k), "v"))
					}
				}
				id, err := peer.New(identity.MinCluster+identity.Numeric(i), label.NewSet(ls...)) //nolint:gosec // small
				if err != nil {
					t.Fatal(err)
				}
				c.AddIdentities = append(c.AddIdentities, id)
			}
			var each, few []selector.Selector
			for i := range pods {
				each = append(each, exists(fmt.Sprint("pod", i)))
			}
			for k := range keys {
				few = append(few, exists(fmt.Sprint("k", k)))
			}
			changes := []Change{
				{UpsertPolicies: []policy.Object{admission("b", policytable.Allow, few...)}},
				c,
				{UpsertPolicies: []policy.Object{admission("a", policytable.Allow, each...)}},
			}
			if !first {
				changes[0], changes[2] = changes[2], changes[0]
			}
			for _, next := range changes {
				if err := e.Apply(next); err != nil {
					t.Fatal(err)
				}
			}
			if n := e.splits.of[shares.Labelled("b")]; n > 2<<keys {
				t.Errorf("pods of %s, b first %t: %d of %d classes count for b", owner, first, n, e.splits.all)
			}
			if n := e.splits.of[shares.Labelled("a")]; n < pods-2<<keys {
				t.Errorf("pods of %s, b first %t: %d of %d classes count for a", owner, first, n, e.splits.all)
			}
		}
	}
}
