// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"runtime"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

func TestMain(m *testing.M) {
	// netnstest.New leaves its thread in the new namespace, which must not be the main thread.
	runtime.LockOSThread()
	leaktest.Main(m)
}

// testMarks are the marks of a node.
var testMarks = Marks{Mask: 0xf00, Pod: 0x200, Pods: 0x900, Tunnel: 0x300, Others: 0x100}

// pointer returns a pointer to a copy of v.
func pointer[T any](v T) *T { return &v }

// forge replaces the firewall's table by one that differs in one thing. at is the index of the chain that is changed.
func (t *Table) forge(at int, chain func(*nftables.Chain), rule func([]expr.Any), more func(*nftables.Conn, *nftables.Table)) error {
	s := t.settings()
	return t.conn(func(c *nftables.Conn) error {
		table := &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
		c.AddTable(table)
		c.DelTable(table)
		table = c.AddTable(&nftables.Table{Name: t.name, Family: nftables.TableFamilyINet})
		for _, set := range s.sets() {
			if err := set.add(c, table); err != nil {
				return err
			}
		}
		walls := t.walls(s, table)
		for i, w := range walls {
			if chain != nil && i == at {
				chain(w.chain)
			}
			c.AddChain(w.chain)
		}
		for i, w := range walls {
			for _, exprs := range w.rules {
				if rule != nil && i == at {
					rule(exprs)
				}
				c.AddRule(&nftables.Rule{Table: table, Chain: w.chain, Exprs: exprs})
			}
		}
		if more != nil {
			more(c, table)
		}
		return c.Flush()
	})
}

// replace changes each expression of a type in a rule.
func replace[E expr.Any](change func(E)) func([]expr.Any) {
	return func(exprs []expr.Any) {
		for _, e := range exprs {
			if e, ok := e.(E); ok {
				change(e)
			}
		}
	}
}

// TestKernelAnyOtherFirewallIsSeenAndRepaired: the check must notice a table that looks similar and drops less.
func TestKernelAnyOtherFirewallIsSeenAndRepaired(t *testing.T) {
	guard := New(netnstest.New(t), "test", []uint32{0x510, 0x511}, testMarks)
	clean := func(when string) {
		t.Helper()
		if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
			t.Fatalf("%s: %+v, %v", when, diffs, err)
		}
	}
	if diffs, err := guard.Check(); err != nil || len(diffs) != 1 {
		t.Errorf("before the first repair: %+v, %v", diffs, err)
	}
	if err := guard.Repair(); err != nil {
		t.Fatal(err)
	}
	clean("after the first repair")
	if err := guard.forge(0, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	clean("the same table, written by the test")

	for _, c := range []struct {
		name  string
		wall  int
		chain func(*nftables.Chain)
		rule  func([]expr.Any)
		more  func(*nftables.Conn, *nftables.Table)
	}{
		{name: "priority", chain: func(ch *nftables.Chain) { ch.Priority = nftables.ChainPriorityMangle }},
		{name: "hook", chain: func(ch *nftables.Chain) { ch.Hooknum = nftables.ChainHookInput }},
		{name: "hook of forwarded packets only", chain: func(ch *nftables.Chain) { ch.Hooknum = nftables.ChainHookForward }},
		{name: "policy", chain: func(ch *nftables.Chain) { ch.Policy = pointer(nftables.ChainPolicyDrop) }},
		// No other type exists for this hook and priority.
		{name: "no hook", chain: func(ch *nftables.Chain) { ch.Type, ch.Hooknum, ch.Priority, ch.Policy = "", nil, nil, nil }},
		{name: "name of the chain", chain: func(ch *nftables.Chain) { ch.Name = "other" }},
		{name: "an additional chain", more: func(c *nftables.Conn, table *nftables.Table) { c.AddChain(&nftables.Chain{Name: "more", Table: table}) }},
		{name: "a rule more", more: func(c *nftables.Conn, table *nftables.Table) {
			c.InsertRule(&nftables.Rule{Table: table, Chain: guard.chain(table), Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
		}},
		{name: "group", rule: func(e []expr.Any) { e[1].(*expr.Cmp).Data = native(0x512) }},
		{name: "comparison of the group", rule: func(e []expr.Any) { e[1].(*expr.Cmp).Op = expr.CmpOpNeq }},
		{name: "compared key", rule: func(e []expr.Any) { e[0].(*expr.Meta).Key = expr.MetaKeyOIFGROUP }},
		{name: "register of the group", rule: func(e []expr.Any) { e[0].(*expr.Meta).Register, e[1].(*expr.Cmp).Register = 2, 2 }},
		{name: "register of the mark", rule: func(e []expr.Any) {
			e[2].(*expr.Meta).Register, e[3].(*expr.Bitwise).SourceRegister = 2, 2
		}},
		{name: "register of the masked mark", rule: func(e []expr.Any) {
			e[3].(*expr.Bitwise).DestRegister, e[4].(*expr.Cmp).Register = 3, 3
		}},
		{name: "mask of the mark", rule: func(e []expr.Any) { e[3].(*expr.Bitwise).Mask = native(0xff00) }},
		{name: "exclusive or of the mark", rule: func(e []expr.Any) { e[3].(*expr.Bitwise).Xor = native(0x100) }},
		{name: "value of the mark", rule: func(e []expr.Any) { e[4].(*expr.Cmp).Data = native(0x100) }},
		{name: "comparison of the mark", rule: func(e []expr.Any) { e[4].(*expr.Cmp).Op = expr.CmpOpNeq }},
		{name: "verdict", rule: func(e []expr.Any) { e[6].(*expr.Verdict).Kind = expr.VerdictAccept }},
		{name: "hook of the forward chain", wall: 1, chain: func(ch *nftables.Chain) { ch.Hooknum = nftables.ChainHookOutput }},
		{name: "priority of the forward chain", wall: 1, chain: func(ch *nftables.Chain) { ch.Priority = nftables.ChainPriorityRaw }},
		{name: "name of the second chain", wall: 1, chain: func(ch *nftables.Chain) { ch.Name = "other" }},
		{name: "group of the forward chain", wall: 1, rule: replace(func(c *expr.Cmp) { c.Data = native(0x512) })},
		{name: "comparison of the forward chain", wall: 1, rule: replace(func(c *expr.Cmp) { c.Op = expr.CmpOpGt })},
		{name: "mark of the forward chain", wall: 1, rule: replace(func(b *expr.Bitwise) { b.Xor = native(0x400) })},
		{name: "bits of the mark that stay", wall: 1, rule: replace(func(b *expr.Bitwise) { b.Mask = native(0xffffffff) })},
		{name: "verdict of the forward chain", wall: 1, rule: replace(func(v *expr.Verdict) { v.Kind = expr.VerdictDrop })},
	} {
		if err := guard.forge(c.wall, c.chain, c.rule, c.more); err != nil {
			t.Errorf("%s: make it: %v", c.name, err)
			continue
		}
		if diffs, err := guard.Check(); err != nil || len(diffs) != 1 || diffs[0].Have == "" && c.name != "name of the chain" {
			t.Errorf("%s: not seen: %+v, %v", c.name, diffs, err)
		}
		if err := guard.Repair(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		clean("after the repair of another " + c.name)
	}
	if err := guard.Remove(); err != nil {
		t.Fatal(err)
	}
}
