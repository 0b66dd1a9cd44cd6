// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// portPrefixes returns a policy that selects pods with a key, with n prefixes that have different ports: they need n
// address classes.
func portPrefixes(name, key string, n int) policy.Object {
	spec := rule.Spec{
		Subject: selector.New(selector.Requirement{Key: key, Op: selector.Exists}),
		Selects: [2]bool{true, false}, DefaultDeny: [2]bool{true, false},
	}
	for i := range n {
		r := &rule.Rule{Source: policytable.Source{Kind: "T", Name: name, Path: fmt.Sprint(i)}, Tier: policytable.Normal, Action: policytable.Allow}
		block := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
		r.Peers.Networks = []rule.Network{{Prefix: block, Reach: rule.ReachEveryone}}
		r.Ports = []rule.Port{{Range: port.Ports(port.TCP, uint16(1000+i), uint16(1000+i))}}
		spec.Rules = append(spec.Rules, r.Seal())
	}
	return policy.Object{Key: policy.Key{Kind: "T", Name: name}, Specs: []rule.Spec{spec}}
}

func TestARelabelledSubjectGetsTheRulesThatFit(t *testing.T) {
	const node, other = identity.Host, identity.Numeric(300)
	labelled := func(n identity.Numeric, key string) peer.Identity {
		t.Helper()
		ls := []label.Label{label.Kubernetes(key, "v")}
		if n == node {
			ls = append(ls, label.Reserved(identity.NameHost))
		}
		id, err := peer.New(n, label.NewSet(ls...))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	// policies applies policies for the host or for workloads.
	policies := func(n identity.Numeric, list ...policy.Object) Change {
		for i := range list {
			list[i].Specs[0].Host = n == node
		}
		return Change{UpsertPolicies: list}
	}
	for _, subject := range []identity.Numeric{node, other} {
		t.Run(fmt.Sprint("identity ", subject), func(t *testing.T) {
			bound := func(e *Engine) string {
				b, _ := e.Bound(subject, policytable.Ingress)
				if b.Table == nil {
					return "nothing"
				}
				return fmt.Sprintf("%s, %d rules", b.Sources[0][0].Name, len(b.Sources))
			}
			state := func(t *testing.T, e *Engine, wantBound string, wantReduced bool) {
				t.Helper()
				var large *table.ErrTooLarge
				r := e.Reduced()
				if len(r) > 0 != wantReduced || wantReduced &&
					(!errors.As(r[0].Err, &large) || r[0].Subject != subject || r[0].Largest != "T large") {
					t.Errorf("reduced: %v, want one: %t", r, wantReduced)
				}
				if got := bound(e); got != wantBound {
					t.Errorf("bound to %s, want %s", got, wantBound)
				}
			}
			begin := func(t *testing.T) *Engine {
				t.Helper()
				e := New(Config{})
				apply(t, e, policies(subject, portPrefixes("small", "a", 3), portPrefixes("large", "b", table.MaxAddressClasses+1), portPrefixes("fits", "c", 5)))
				apply(t, e, Change{AddIdentities: []peer.Identity{labelled(subject, "a"), labelled(301, "x")}, AddSubjects: []identity.Numeric{subject, 301}})
				state(t, e, "small, 3 rules", false)
				// In the same change, another subject gets other labels; its table fits.
				apply(t, e, Change{AddIdentities: []peer.Identity{labelled(subject, "b"), labelled(301, "c")}})
				state(t, e, "large, 512 rules", true)
				if b, _ := e.Bound(301, policytable.Ingress); subject == other && (b.Table == nil || len(b.Sources) != 5) {
					t.Errorf("the other subject of the change is not bound to its table")
				}
				return e
			}
			t.Run("it stays reduced", func(t *testing.T) {
				e := begin(t)
				apply(t, e, Change{AddIdentities: []peer.Identity{labelled(302, "x")}})
				apply(t, e, Change{RemoveIdentities: []identity.Numeric{302}})
				apply(t, e, policies(subject, portPrefixes("another", "d", 1)))
				state(t, e, "large, 512 rules", true)
				if _, err := e.Draft().Fork(nil, e.Draft().subjects...); err != nil {
					t.Errorf("queries about other identities fail: %v", err)
				}
			})
			t.Run("a policy that selects it too is not refused for it", func(t *testing.T) {
				e := begin(t)
				c := policies(subject, portPrefixes("more", "b", 1))
				c.Refuse = true
				apply(t, e, c)
				if r := e.Reduced(); len(r) != 1 {
					t.Errorf("reduced: %v, want one", r)
				}
			})
			t.Run("it fits after the policy becomes smaller", func(t *testing.T) {
				e := begin(t)
				apply(t, e, policies(subject, portPrefixes("large", "b", 4)))
				state(t, e, "large, 4 rules", false)
			})
			t.Run("it fits after the policy is deleted", func(t *testing.T) {
				e := begin(t)
				apply(t, e, Change{DeletePolicies: []policy.Key{{Kind: "T", Name: "large"}}})
				state(t, e, "nothing", false)
			})
			t.Run("it fits when it is relabelled again", func(t *testing.T) {
				e := begin(t)
				apply(t, e, Change{AddIdentities: []peer.Identity{labelled(subject, "c")}})
				state(t, e, "fits, 5 rules", false)
			})
			t.Run("it goes", func(t *testing.T) {
				e := begin(t)
				apply(t, e, Change{RemoveSubjects: []identity.Numeric{subject}})
				state(t, e, "nothing", false)
			})
			t.Run("its identity is removed and added again", func(t *testing.T) {
				e := begin(t)
				apply(t, e, Change{RemoveIdentities: []identity.Numeric{subject}})
				apply(t, e, Change{AddIdentities: []peer.Identity{labelled(subject, "b")}})
				state(t, e, "large, 512 rules", true)
			})
		})
	}
}

// full returns an engine in which a table has no capacity for the last identity of ids.
func full(t *testing.T) (e *Engine, ids []peer.Identity) {
	t.Helper()
	const selectors = 13
	e = New(Config{})
	apply(t, e, Change{
		UpsertPolicies: []policy.Object{spread(selectors)}, AddIdentities: []peer.Identity{combination(t, 60000, 0, 0)},
		AddSubjects: []identity.Numeric{60000},
	})
	for i := range table.MaxIdentityClasses + 10 {
		ids = append(ids, combination(t, identity.MinCluster+identity.Numeric(i), i, selectors))
	}
	apply(t, e, Change{AddIdentities: ids})
	if e.Waiting() == 0 || e.Waiting() > 1000 {
		t.Fatalf("%d identities wait: the test covers nothing", e.Waiting())
	}
	return e, ids
}

func TestOnlyIdentitiesThatAreThereAreWaiting(t *testing.T) {
	e, ids := full(t)
	waiting := e.Waiting()
	last := ids[len(ids)-1]
	apply(t, e, Change{RemoveIdentities: []identity.Numeric{last.Number}})
	if got := e.Waiting(); got != waiting-1 {
		t.Errorf("%d wait after one of %d was removed, want %d", got, waiting, waiting-1)
	}
	// When a waiting identity gets labels for which the table has capacity, it stops waiting.
	last = ids[len(ids)-2]
	apply(t, e, Change{AddIdentities: []peer.Identity{combination(t, last.Number, 1, 13)}})
	if got := e.Waiting(); got != waiting-2 || !e.Entry(last.Number).Known {
		t.Errorf("%d wait after another was relabelled, want %d; it is known: %t", got, waiting-2, e.Entry(last.Number).Known)
	}
}

// TestWaitingIdentitiesAreTriedWhenATableGoes: when the policy of a full table is deleted, the waiting identities get
// classes, although the deletion compiles no table and deletes no row.
func TestWaitingIdentitiesAreTriedWhenATableGoes(t *testing.T) {
	e, ids := full(t)
	apply(t, e, Change{DeletePolicies: []policy.Key{spread(1).Key}})
	if e.Waiting() != 0 || !e.Entry(ids[len(ids)-1].Number).Known {
		t.Errorf("%d identities wait although no table is left", e.Waiting())
	}
}

func TestRulesThatExceedATableAloneAreFoundWithoutASubject(t *testing.T) {
	many := func(name string, blocks int) policy.Object {
		o := portPrefixes(name, "a", 1)
		r := *o.Specs[0].Rules[0]
		r.Peers.Networks = nil
		for i := range blocks {
			at := netip.AddrFrom4([4]byte{byte(20 + i>>16), byte(i >> 8), byte(i), 0})
			r.Peers.Networks = append(r.Peers.Networks, rule.Network{Prefix: netip.PrefixFrom(at, 32), Reach: rule.ReachEveryone})
		}
		o.Specs[0].Rules = []*rule.Rule{r.Seal()}
		return o
	}
	ports := portPrefixes("ports", "a", 1)
	r := *ports.Specs[0].Rules[0]
	for i := range 3000 {
		r.Ports = append(r.Ports, rule.Port{Range: port.Ports(port.UDP, uint16(1000+2*i), uint16(1000+2*i))})
	}
	ports.Specs[0].Rules = []*rule.Rule{r.Seal()}
	for _, test := range []struct {
		o    policy.Object
		want string
	}{
		{portPrefixes("classes", "a", table.MaxAddressClasses-1), ""},
		{portPrefixes("classes", "a", table.MaxAddressClasses), "table needs 1025 address classes, the limit is 1024"},
		{many("prefixes", table.MaxPrefixes), ""},
		{many("prefixes", table.MaxPrefixes+1), "prefixes, the limit is 16384"},
		{ports, "intervals in one rule, the limit is 4096"},
		{listing(t, 5000), ""},
	} {
		err := Check(test.o)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.o.Key, err, test.want)
		}
	}
}

// TestRulesThatFitSurelyFit: whenever fitsSurely returns true, the rules do fit.
func TestRulesThatFitSurelyFit(t *testing.T) {
	t.Parallel()
	w := seeded(t, 71)
	skipped := 0
	for range 300 {
		o := portPrefixes("p", "a", 1+w.IntN(60))
		rules := o.Specs[0].Rules
		for i := range rules {
			r := *rules[i]
			for j := range w.IntN(6) {
				lo := uint16(1 + w.IntN(60000))
				r.Ports = append(r.Ports, rule.Port{Range: port.Ports(port.TCP, lo, lo+uint16(j))})
			}
			rules[i] = r.Seal()
		}
		if !fitsSurely(rules) {
			continue
		}
		skipped++
		p, err := compile.New(compile.Input{Rules: rules, Groups: compile.NewGroups()})
		if err == nil {
			_, failed := New(Config{}).build([]*compile.Program{p}, nil)
			err = failed[p.Hash]
		}
		if err != nil {
			t.Fatalf("%d rules: %v", len(rules), err)
		}
	}
	if skipped < 20 {
		t.Errorf("only %d were accepted without compiling", skipped)
	}
}

// TestFullTableOfOneSubjectLeavesPeersKnownToOthers fills the table of one tenant, so that it has no class for further
// identities. A new identity is unknown in this table, and known in the tables of other tenants.
func TestFullTableOfOneSubjectLeavesPeersKnownToOthers(t *testing.T) {
	e, ids := full(t)
	const other = identity.Numeric(60001)
	allow := rule.Spec{
		Subject: selector.New(selector.Requirement{Key: "mine", Op: selector.Exists}),
		Selects: [2]bool{true, false}, DefaultDeny: [2]bool{true, false},
	}
	r := &rule.Rule{Source: policytable.Source{Kind: "T", Name: "mine"}, Tier: policytable.Normal, Action: policytable.Allow, AllPorts: true}
	r.Peers.Selectors = []selector.Selector{selector.New(selector.Requirement{Key: "k0", Op: selector.Exists})}
	allow.Rules = []*rule.Rule{r.Seal()}
	own := spread(13)
	own.Specs[0].Subject = selector.New(selector.Requirement{Key: "mine", Op: selector.DoesNotExist})
	id, err := peer.New(other, label.NewSet(label.Kubernetes(label.KeyNamespace, "y"), label.Kubernetes("mine", "v")))
	if err != nil {
		t.Fatal(err)
	}
	apply(t, e, Change{
		UpsertPolicies: []policy.Object{own, {Key: policy.Key{Kind: "T", Name: "mine"}, Specs: []rule.Spec{allow}}},
		AddIdentities:  []peer.Identity{id}, AddSubjects: []identity.Numeric{other},
	})
	if e.Waiting() == 0 {
		t.Fatal("the table has a class for every identity: the test covers nothing")
	}
	unknown := 0
	for i, id := range ids {
		has := i&1 == 1 // has the label k0
		full, err := e.Lookup(60000, policytable.Ingress, id.Number, netip.MustParseAddr("10.0.0.1"), port.At(port.TCP, 1000))
		if err != nil {
			t.Fatal(err)
		}
		mine, err := e.Lookup(other, policytable.Ingress, id.Number, netip.MustParseAddr("10.0.0.1"), port.At(port.TCP, 1000))
		if err != nil {
			t.Fatal(err)
		}
		if (mine.Action == policytable.Allow) != has || !e.Entry(id.Number).Known {
			t.Fatalf("identity %d with k0 %t: %s by the table of the other", id.Number, has, mine.Action)
		}
		if full.Action == policytable.Allow && !has {
			t.Fatalf("identity %d without k0 is allowed by the full table", id.Number)
		}
		if full.Action != policytable.Allow && has {
			unknown++
		}
	}
	if unknown == 0 {
		t.Error("the full table treats no identity as unknown")
	}
}

// TestClosedGroupDeniesEveryAddressAndAllowsNone evaluates rules with a closed group, whose addresses are unknown.
func TestClosedGroupDeniesEveryAddressAndAllowsNone(t *testing.T) {
	group := func(closed bool) policy.Object {
		v := label.Label{Source: label.SourceCIDRGroup, Key: "g", Value: "v"}
		g := &policy.Group{Name: "g", Labels: label.NewSet(v), Closed: closed}
		if !closed {
			g.Prefixes = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
		}
		return policy.Object{Key: policy.Key{Kind: "G", Name: "g"}, Group: g}
	}
	for _, c := range []struct {
		action      policytable.Action
		op          selector.Op
		open, shut  bool // 192.0.2.1 is allowed, with the group and with the closed group
		elsewhere   bool // 198.51.100.1 is allowed with the group
		elsewhereIn bool // 198.51.100.1 is allowed with the closed group
	}{
		{policytable.Allow, selector.Exists, true, false, false, false},
		{policytable.Allow, selector.DoesNotExist, false, false, true, false},
		{policytable.Deny, selector.Exists, false, false, true, false},
		{policytable.Deny, selector.DoesNotExist, true, false, false, false},
	} {
		spec := rule.Spec{
			Subject:     selector.New(),
			Selects:     [2]bool{true, false},
			DefaultDeny: [2]bool{c.action == policytable.Allow, false},
		}
		r := &rule.Rule{Source: policytable.Source{Kind: "T", Name: "p"}, Tier: policytable.Normal, Action: c.action, AllPorts: true}
		r.Peers.Groups = []rule.GroupPeer{{Selector: selector.New(selector.Requirement{Key: "g", Op: c.op})}}
		spec.Rules = []*rule.Rule{r.Seal()}
		world, err := peer.New(9, label.NewSet(label.Reserved(identity.NameWorldIPv4)))
		if err != nil {
			t.Fatal(err)
		}
		e := New(Config{})
		apply(t, e, Change{
			UpsertPolicies: []policy.Object{{Key: policy.Key{Kind: "T", Name: "p"}, Specs: []rule.Spec{spec}}, group(false)},
			AddIdentities:  []peer.Identity{world, combination(t, 300, 0, 0)}, AddSubjects: []identity.Numeric{300},
		})
		for _, closed := range []bool{false, true, false} {
			apply(t, e, Change{UpsertPolicies: []policy.Object{group(closed)}})
			in, out := c.open, c.elsewhere
			if closed {
				in, out = c.shut, c.elsewhereIn
			}
			for addr, want := range map[string]bool{"192.0.2.1": in, "198.51.100.1": out} {
				v, err := e.Lookup(300, policytable.Ingress, 9, netip.MustParseAddr(addr), port.At(port.TCP, 80))
				if err != nil || (v.Action == policytable.Allow) != want {
					t.Errorf("%s, %v, closed %t: %s is %s, want allowed %t: %v", c.action, c.op, closed, addr, v.Action, want, err)
				}
			}
		}
	}
}
