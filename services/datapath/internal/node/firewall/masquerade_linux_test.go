// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

func prefixes(texts ...string) (all []netip.Prefix) {
	for _, s := range texts {
		all = append(all, netip.MustParsePrefix(s))
	}
	return all
}

// TestKernelAnyOtherMasqueradeIsSeenAndRepaired changes each part of a masquerade externally.
func TestKernelAnyOtherMasqueradeIsSeenAndRepaired(t *testing.T) {
	own := prefixes("10.1.0.0/24", "fd00:1::/64")
	guard := New(netnstest.New(t), "test", []uint32{0x510, 0x511}, testMarks)
	guard.SetMasquerade(Masquerade{
		Mark:   0x200,
		Own:    func() []netip.Prefix { return own },
		Except: prefixes("192.0.2.0/25", "192.0.2.128/25", "2001:db8::/32"),
		Others: prefixes("10.2.0.0/24"),
	})
	clean := func(when string) {
		t.Helper()
		if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
			t.Fatalf("%s: %+v, %v", when, diffs, err)
		}
	}
	if err := guard.Repair(); err != nil {
		t.Fatal(err)
	}
	clean("after the first repair")
	if err := guard.forge(0, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	clean("the same table, written by the test")

	element := func(set string, e ...nftables.SetElement) func(*nftables.Conn, *nftables.Table) {
		return func(c *nftables.Conn, table *nftables.Table) {
			kind := nftables.TypeIPAddr
			if strings.HasSuffix(set, "6") {
				kind = nftables.TypeIP6Addr
			}
			if err := c.SetAddElements(&nftables.Set{Table: table, Name: set, KeyType: kind, Interval: true}, e); err != nil {
				t.Error(err)
			}
		}
	}
	from := func(a, end string) []nftables.SetElement {
		return []nftables.SetElement{
			{Key: netip.MustParseAddr(a).AsSlice()}, {Key: netip.MustParseAddr(end).AsSlice(), IntervalEnd: true},
		}
	}
	only := func(length int, f func([]expr.Any)) func([]expr.Any) {
		return func(e []expr.Any) {
			if len(e) == length {
				f(e)
			}
		}
	}
	for _, c := range []struct {
		name  string
		chain func(*nftables.Chain)
		rule  func([]expr.Any)
		more  func(*nftables.Conn, *nftables.Table)
	}{
		{name: "priority", chain: func(ch *nftables.Chain) { ch.Priority = nftables.ChainPriorityLast }},
		{name: "name", chain: func(ch *nftables.Chain) { ch.Name = "other" }},
		{name: "mark", rule: only(4, func(e []expr.Any) { e[2].(*expr.Cmp).Data = native(0x100) })},
		{name: "comparison of the mark", rule: only(4, func(e []expr.Any) { e[2].(*expr.Cmp).Op = expr.CmpOpEq })},
		{name: "flags of TCP", rule: only(6, func(e []expr.Any) { e[3].(*expr.Bitwise).Mask = []byte{0x07} })},
		{name: "set of the source", rule: only(10, func(e []expr.Any) {
			l := e[3].(*expr.Lookup)
			l.SetName = strings.Replace(l.SetName, "own", "except", 1)
		})},
		{name: "exceptions alone", rule: only(10, func(e []expr.Any) { e[5].(*expr.Lookup).Invert = false })},
		{name: "ports", rule: only(10, func(e []expr.Any) { e[7].(*expr.Immediate).Data = []byte{0x10, 0} })},
		{name: "another range of ports", rule: only(10, func(e []expr.Any) { e[9].(*expr.Masq).RegProtoMin = 2 })},
		{name: "an additional own range", more: element("own4", from("10.9.0.0", "10.9.1.0")...)},
		{name: "an exception more", more: element("except6", from("fd00:9::", "fd00:a::")...)},
		{name: "a set more", more: func(c *nftables.Conn, table *nftables.Table) {
			if err := c.AddSet(&nftables.Set{Table: table, Name: "more", KeyType: nftables.TypeIPAddr}, nil); err != nil {
				t.Error(err)
			}
		}},
	} {
		if err := guard.forge(2, c.chain, c.rule, c.more); err != nil {
			t.Errorf("%s: make it: %v", c.name, err)
			continue
		}
		if diffs, err := guard.Check(); err != nil || len(diffs) != 1 || diffs[0].Have == "" {
			t.Errorf("%s: not seen: %+v, %v", c.name, diffs, err)
		}
		if err := guard.Repair(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		clean("after the repair of another " + c.name)
	}

	own = append(own, netip.MustParsePrefix("10.1.1.0/24"))
	if diffs, err := guard.Check(); err != nil || len(diffs) != 1 {
		t.Errorf("an added pod range is not reported as missing: %+v, %v", diffs, err)
	}
	many := prefixes("10.1.1.0/24")
	for i := range 5000 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>7), byte(i << 1), 0}), 24))
	}
	if err := guard.SetOthers(many, nil); err != nil {
		t.Fatal(err)
	}
	clean("5,000 ranges of other nodes")
	if n := len(guard.settings().sets()[1].ranges); n < 5000 {
		t.Errorf("%d spans, so that 5,000 ranges were not tried", n)
	}
	if err := guard.SetOthers(nil, nil); err != nil {
		t.Fatal(err)
	}
	clean("all of them removed")
}

// TestKernelClosedForwardingIsNamed uses chains as Docker and firewalld create them, and chains that drop only some
// packets.
func TestKernelClosedForwardingIsNamed(t *testing.T) {
	guard := New(netnstest.New(t), "test", nil, testMarks)
	if err := guard.Repair(); err != nil {
		t.Fatal(err)
	}
	add := func(family nftables.TableFamily, table, chain string, policy nftables.ChainPolicy, rules ...[]expr.Any) {
		t.Helper()
		err := guard.conn(func(c *nftables.Conn) error {
			tb := c.AddTable(&nftables.Table{Name: table, Family: family})
			ch := c.AddChain(&nftables.Chain{
				Name: chain, Table: tb, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
				Priority: nftables.ChainPriorityFilter, Policy: &policy,
			})
			for _, r := range rules {
				c.AddRule(&nftables.Rule{Table: tb, Chain: ch, Exprs: r})
			}
			return c.Flush()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	drop := &expr.Verdict{Kind: expr.VerdictDrop}
	add(nftables.TableFamilyINet, "some", "forward", nftables.ChainPolicyAccept, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{6}}, drop,
	})
	if found, err := guard.Closed(); err != nil || len(found) > 0 {
		t.Errorf("chains that drop some packets: %q, %v", found, err)
	}
	add(nftables.TableFamilyIPv4, "filter", "FORWARD", nftables.ChainPolicyDrop)
	add(nftables.TableFamilyINet, "firewalld", "filter_FORWARD", nftables.ChainPolicyAccept, []expr.Any{
		&expr.Counter{}, &expr.Reject{Type: 2, Code: 3},
	})
	add(nftables.TableFamilyIPv6, "mine", "fwd", nftables.ChainPolicyAccept, []expr.Any{drop})
	found, err := guard.Closed()
	if err != nil || len(found) != 3 {
		t.Fatalf("found %q, %v", found, err)
	}
	for _, want := range []string{
		"chain FORWARD of table ip filter", "chain filter_FORWARD of table inet firewalld", "chain fwd of table ip6 mine",
	} {
		if !slices.ContainsFunc(found, func(s string) bool { return strings.HasPrefix(s, want) }) {
			t.Errorf("%s is not among %q", want, found)
		}
	}
}
