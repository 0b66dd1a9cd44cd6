// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// TestRulesOfATableAreAdmittedOneByOne: the table of a pod exceeds the share of its tenant. The
// first rules are enforced, and connections that the other rules allow are denied.
func TestRulesOfATableAreAdmittedOneByOne(t *testing.T) {
	sizes := nodetable.Size{100, 1000, 120, 1000, 1000, 1000, 1000}
	c := newCrowd(t, sizes)
	var rules []testRule
	for i := range uint32(40) { // each port has another class
		rules = append(rules, testRule{uint8(i % 3), false, policytable.Allow, web + 10*i, web + 10*i})
	}
	st := state{map[uint32]props{300: 1, 301: 2, 302: 4, 303: 3, 304: 5, 305: 6, 306: 7}, map[uint32]testPolicies{
		firstOfFlood: {testPolicy{enforce: true, rules: rules}, testPolicy{}}, 300: {}, 301: {},
	}}
	for i, p := range []uint32{1, 2, 3} { // further tables of the tenant
		st.policies[firstOfFlood+1+uint32(i)] = testPolicies{
			testPolicy{enforce: true, rules: []testRule{{uint8(i), false, policytable.Allow, web + p, web + p}}}, testPolicy{},
		}
	}
	c.reach(st)
	c.settle(st)
	whole, parts := 0, 0
	for _, table := range c.a.model.tables {
		switch {
		case table.kernel == nil:
			t.Errorf("a table is not in the kernel: %v", table.err)
		case table.part != nil:
			parts++
			if n := table.part.Rules(); n == 0 || n == len(table.content.Rules) {
				t.Errorf("%d of %d rules are enforced", n, len(table.content.Rules))
			}
		default:
			whole++
		}
	}
	if parts == 0 {
		t.Errorf("%d tables have all rules, %d some", whole, parts)
	}
	s := c.a.endpoints.subjects[firstOfFlood]
	if s != nil && s.refusal != "" {
		t.Errorf("the direction is closed: %s", s.refusal)
	}
	if refusals := strings.Join(c.a.Status().Refusals, "\n"); !strings.Contains(refusals, "rules are enforced") {
		t.Errorf("refusals %q", refusals)
	}
}

// TestPartOfATableAllowsNoMoreAfterAnyWrite changes random states in small maps: after every write
// each connection gets the old or the new verdict, or is denied.
func TestPartOfATableAllowsNoMoreAfterAnyWrite(t *testing.T) {
	parts, kept := 0, 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 6))
		sizes := nodetable.Size{100, 1000, 1000, 1000, 1000, 1000, 1000}
		for _, limit := range []nodetable.MapLimit{
			nodetable.LimitRules, nodetable.LimitPortNodes, nodetable.LimitPeerClasses,
			nodetable.LimitPrefixes4, nodetable.LimitPrefixes6,
		} {
			if r.IntN(2) == 0 {
				sizes[limit] = 10 + r.IntN(40)
			}
		}
		c := newCrowd(t, sizes)
		draw := func(old state) state {
			st := state{maps.Clone(old.identities), maps.Clone(old.policies)}
			for id := uint32(300); id < 307; id++ {
				if _, ok := st.identities[id]; ok && r.IntN(5) == 0 {
					delete(st.identities, id)
				} else if !ok {
					st.identities[id] = props(1 + r.IntN(7)) //nolint:gosec // small
				}
			}
			for i := range uint32(5) {
				if r.IntN(2) == 0 {
					st.policies[firstOfFlood+i] = testPolicies{drawPolicy(r), drawPolicy(r)}
				}
			}
			return st
		}
		now := draw(state{map[uint32]props{}, map[uint32]testPolicies{300: {}, 301: {}}})
		c.reach(now)
		qs := questions(c.k)
		for change := range 6 {
			next := draw(now)
			if change%2 == 0 { // one change at a time, as a new policy may allow less to a new identity
				next.policies = now.policies
			} else {
				next.identities = now.identities
			}
			before, after := now.answers(c.k, qs), next.answers(c.k, qs)
			c.k.after = func(what string) {
				for i, got := range c.k.answers(qs) {
					if got && !before[i] && !after[i] {
						t.Fatalf("seed %d, change %d: after %q %+v is allowed", seed, change, what, qs[i])
					}
				}
			}
			if r.IntN(5) == 0 {
				c.begin()
			}
			c.reach(next)
			now = next
			before = after
			if r.IntN(2) == 0 {
				c.settle(now)
			}
			c.k.after = nil
			limited(t, fmt.Sprintf("seed %d, change %d", seed, change), c.k, c.a, qs, after)
			for _, table := range c.a.model.tables {
				if table.part != nil {
					parts++
					kept += table.part.Rules()
				}
			}
			c.now = c.now.Add(time.Duration(r.IntN(8)) * time.Second)
		}
	}
	if parts < 50 || kept < 50 {
		t.Errorf("%d tables with %d of their rules", parts, kept)
	}
	t.Logf("%d tables with %d of their rules", parts, kept)
}

// drawPolicy draws rules and prefixes.
func drawPolicy(r *rand.Rand) testPolicy {
	p := testPolicy{enforce: true}
	for range r.IntN(12) {
		from := web + uint32(r.IntN(30)) //nolint:gosec // small
		action := policytable.Allow
		if r.IntN(4) == 0 {
			action = policytable.Deny
		}
		bit := uint8(r.IntN(3)) //nolint:gosec // small
		if r.IntN(6) == 0 {
			bit = 8
		}
		p.rules = append(p.rules, testRule{bit, bit != 8 && r.IntN(4) == 0, action, from, from + uint32(r.IntN(5))}) //nolint:gosec // small
	}
	if r.IntN(2) == 0 {
		p.prefixes = map[netip.Prefix]policytable.Action{}
		for _, text := range []string{
			"10.0.0.0/8", "10.0.0.0/16", "10.0.0.0/24", "10.0.0.5/32", "192.0.2.0/24", "fd00::/8", "fd00::/64",
		} {
			if r.IntN(2) == 0 {
				actions := []policytable.Action{policytable.Allow, policytable.Deny}
				p.prefixes[netip.MustParsePrefix(text)] = actions[r.IntN(2)]
			}
		}
	}
	return p
}

// TestATenantWhoseShareGrowsHasItsWholeTableAgain: when another tenant leaves, the partial table of a tenant becomes
// complete again.
func TestATenantWhoseShareGrowsHasItsWholeTableAgain(t *testing.T) {
	sizes := nodetable.Size{100, 1000, 300, 1000, 1000, 1000, 1000}
	c := newCrowd(t, sizes)
	rules := func(n, from uint32) (list []testRule) {
		for i := range n {
			list = append(list, testRule{uint8(i % 3), false, policytable.Allow, web + from + 10*i, web + from + 10*i})
		}
		return list
	}
	alone := state{map[uint32]props{300: 1, 301: 2, 302: 3, 303: 4, 304: 5, 305: 6, 306: 7}, map[uint32]testPolicies{
		firstOfFlood: {testPolicy{enforce: true, rules: rules(40, 0)}, testPolicy{}}, 300: {}, 301: {},
	}}
	crowded := state{alone.identities, maps.Clone(alone.policies)}
	for i := range uint32(3) {
		crowded.policies[firstOfFlood+1+i] = testPolicies{testPolicy{enforce: true, rules: rules(10, 1+i)}, testPolicy{}}
	}
	crowded.policies[300] = testPolicies{testPolicy{enforce: true, rules: rules(20, 5)}, testPolicy{}}
	c.reach(alone)
	c.settle(alone)
	part := func() (n int) {
		for _, table := range c.a.model.tables {
			if table.part != nil {
				n++
			}
		}
		return n
	}
	if n := part(); n != 0 {
		t.Fatalf("alone, %d tables lack rules", n)
	}
	c.reach(crowded)
	c.settle(crowded)
	if n := part(); n == 0 {
		t.Fatal("with the other tenant, every table has all rules")
	}
	qs := questions(c.k)
	for i, got := range c.k.answers(qs) {
		if q := qs[i]; c.k.endpoints[q.slot].Identity < firstOfFlood && got != crowded.answers(c.k, qs)[i] {
			t.Fatalf("shop: %+v is %v", q, got)
		}
	}
	for subject := range crowded.policies { // nothing is enforced for the others
		if _, ok := alone.policies[subject]; !ok {
			alone.policies[subject] = testPolicies{}
		}
	}
	c.reach(alone)
	c.settle(alone)
	if n := part(); n != 0 {
		t.Errorf("alone again, %d tables lack rules", n)
	}
	want := alone.answers(c.k, qs)
	for i, got := range c.k.answers(qs) {
		if _, bound := alone.policies[c.k.endpoints[qs[i].slot].Identity]; bound && got != want[i] {
			t.Fatalf("alone again: %+v is %v, want %v", qs[i], got, want[i])
		}
	}
}
