// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

func bigEndian(port uint16) []byte { return binary.BigEndian.AppendUint16(nil, port) }

// TestKernelRulesForThePortAreNamed creates rules in each way in which nft writes them, and expects those
// that UDP packets to the port may match.
func TestKernelRulesForThePortAreNamed(t *testing.T) {
	const port = 4789
	home := netnstest.New(t)
	table := New(home, "test", []uint32{7}, testMarks)
	table.SetRouting(Routing{TunnelPort: port, TunnelGroup: 8, Own: func() []netip.Prefix { return nil }})
	if err := table.Repair(); err != nil {
		t.Fatal(err)
	}
	if found, err := table.PortRules(port); err != nil || len(found) != 0 {
		t.Fatalf("on a fresh node %q, %v", found, err)
	}
	c, err := nftables.New(nftables.WithNetNSFd(home.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	proto := func(number byte) []expr.Any {
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{number}},
		}
	}
	dport := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
	both := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 4}
	cmp := func(op expr.CmpOp, data []byte) *expr.Cmp { return &expr.Cmp{Op: op, Register: 1, Data: data} }
	within := func(op expr.CmpOp, first, last uint16) *expr.Range {
		return &expr.Range{Op: op, Register: 1, FromData: bigEndian(first), ToData: bigEndian(last)}
	}
	mine := c.AddTable(&nftables.Table{Name: "mine", Family: nftables.TableFamilyINet})
	set := func(s nftables.Set, elements ...nftables.SetElement) *expr.Lookup {
		t.Helper()
		s.Table, s.Anonymous, s.Constant = mine, true, true
		if err := c.AddSet(&s, elements); err != nil {
			t.Fatal(err)
		}
		return &expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID}
	}
	ports := func(list ...uint16) *expr.Lookup {
		var elements []nftables.SetElement
		for _, p := range list {
			elements = append(elements, nftables.SetElement{Key: bigEndian(p)})
		}
		return set(nftables.Set{KeyType: nftables.TypeInetService}, elements...)
	}
	interval := func(bounds ...uint16) *expr.Lookup {
		elements := []nftables.SetElement{{Key: bigEndian(0), IntervalEnd: true}}
		for i, b := range bounds {
			elements = append(elements, nftables.SetElement{Key: bigEndian(b), IntervalEnd: i%2 == 1})
		}
		return set(nftables.Set{KeyType: nftables.TypeInetService, Interval: true}, elements...)
	}
	protocols := set(nftables.Set{KeyType: nftables.TypeInetProto}, nftables.SetElement{Key: []byte{6}},
		nftables.SetElement{Key: []byte{17}})
	pair, err := nftables.ConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
	if err != nil {
		t.Fatal(err)
	}
	pairs := set(nftables.Set{KeyType: pair, Concatenation: true},
		nftables.SetElement{Key: append([]byte{192, 0, 2, 1}, append(bigEndian(port), 0, 0)...)})
	saddr := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
	at9 := &expr.Payload{DestRegister: 9, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
	input := c.AddChain(&nftables.Chain{
		Name: "input", Table: mine, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput,
		Priority: nftables.ChainPriorityFilter,
	})
	rule := func(parts ...any) (exprs []expr.Any) {
		for _, p := range parts {
			switch p := p.(type) {
			case []expr.Any:
				exprs = append(exprs, p...)
			case expr.Any:
				exprs = append(exprs, p)
			}
		}
		return append(exprs, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})
	}
	cases := []struct {
		name  string
		exprs []expr.Any
		want  bool
	}{
		{"udp dport 4789", rule(proto(17), dport, cmp(expr.CmpOpEq, bigEndian(port))), true},
		{"udp dport 4790", rule(proto(17), dport, cmp(expr.CmpOpEq, bigEndian(4790))), false},
		{"tcp dport 4789", rule(proto(6), dport, cmp(expr.CmpOpEq, bigEndian(port))), false},
		{"udp dport != 22", rule(proto(17), dport, cmp(expr.CmpOpNeq, bigEndian(22))), true},
		{"udp dport != 4789", rule(proto(17), dport, cmp(expr.CmpOpNeq, bigEndian(port))), false},
		{
			"udp dport >= 4000, <= 5000",
			rule(proto(17), dport, cmp(expr.CmpOpGte, bigEndian(4000)), cmp(expr.CmpOpLte, bigEndian(5000))), true,
		},
		{
			"udp dport 5000-6000",
			rule(proto(17), dport, within(expr.CmpOpEq, 5000, 6000)), false,
		},
		{
			"udp dport != 5000-6000",
			rule(proto(17), dport, within(expr.CmpOpNeq, 5000, 6000)), true,
		},
		{
			"udp sport 1 udp dport 4789",
			rule(proto(17), both, cmp(expr.CmpOpEq, append(bigEndian(1), bigEndian(port)...))), true,
		},
		{"udp dport { 53, 4789 }", rule(proto(17), dport, ports(53, port)), true},
		{"udp dport { 53, 67 }", rule(proto(17), dport, ports(53, 67)), false},
		{"udp dport { 100-200, 4000-5000 }", rule(proto(17), dport, interval(100, 201, 4000, 5001)), true},
		{"udp dport { 4000-4788 }", rule(proto(17), dport, interval(4000, port)), false},
		{"udp dport { 4788, 4789-4790 }", rule(proto(17), dport, interval(4788, port, port, 4791)), true},
		{
			"meta l4proto { tcp, udp } th dport 4789",
			rule(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, protocols, dport, cmp(expr.CmpOpEq, bigEndian(port))), true,
		},
		{"ip saddr . udp dport { ... }", rule(proto(17), saddr, at9, pairs), true},
		{"ip saddr 192.0.2.1", rule(saddr, cmp(expr.CmpOpEq, []byte{192, 0, 2, 1})), false},
		{"udp", rule(proto(17)), false},
	}
	for _, cs := range cases {
		c.AddRule(&nftables.Rule{Table: mine, Chain: input, Exprs: cs.exprs, UserData: []byte(cs.name)})
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	rules, err := c.GetRules(mine, input)
	if err != nil || len(rules) != len(cases) {
		t.Fatalf("%d rules, %v", len(rules), err)
	}
	found, err := table.PortRules(port)
	if err != nil {
		t.Fatal(err)
	}
	for i, cs := range cases {
		line := fmt.Sprintf("rule %d of chain input of table inet mine (input)", rules[i].Handle)
		if slices.Contains(found, line) != cs.want {
			t.Errorf("%s: named %t, want %t", cs.name, !cs.want, cs.want)
		}
	}

	// the hooks, and chains that these jump to
	udpTo4789 := rule(proto(17), dport, cmp(expr.CmpOpEq, bigEndian(port)))
	named := 0
	for _, h := range []struct {
		name string
		hook *nftables.ChainHook
		want bool
	}{
		{"pre", nftables.ChainHookPrerouting, true},
		{"out", nftables.ChainHookOutput, true},
		{"post", nftables.ChainHookPostrouting, true},
		{"fwd", nftables.ChainHookForward, false},
	} {
		for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
			tb := c.AddTable(&nftables.Table{Name: "hooks", Family: family})
			ch := c.AddChain(&nftables.Chain{
				Name: h.name, Table: tb, Type: nftables.ChainTypeFilter, Hooknum: h.hook, Priority: nftables.ChainPriorityFilter,
			})
			sub := c.AddChain(&nftables.Chain{Name: "sub-" + h.name, Table: tb})
			jump := []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: sub.Name}}
			c.AddRule(&nftables.Rule{Table: tb, Chain: ch, Exprs: jump})
			c.AddRule(&nftables.Rule{Table: tb, Chain: sub, Exprs: udpTo4789})
			if h.want && family == nftables.TableFamilyIPv4 {
				named++
			}
		}
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	after, err := table.PortRules(port)
	if err != nil || len(after) != len(found)+named {
		t.Errorf("found %q, %v, want %d rules more than %d", after, err, named, len(found))
	}
	for _, line := range after[len(found):] {
		if !strings.Contains(line, "of chain sub-") || !strings.Contains(line, "of table ip hooks") {
			t.Errorf("found %q", line)
		}
	}
}

// TestMatchesOfIptablesMeetThePort evaluates the data of matches, whose modules need not be present.
func TestMatchesOfIptablesMeetThePort(t *testing.T) {
	const source, dest, either = 0, 1, 2
	all := [2]uint16{0, 65535}
	udp := func(from, to [2]uint16, invert xt.UdpInvFlagset) *expr.Match {
		return &expr.Match{Name: "udp", Info: &xt.Udp{SrcPorts: from, DstPorts: to, InvFlags: invert}}
	}
	multiport := func(flags, invert byte, ranges []byte, ports ...uint16) *expr.Match {
		info := make(xt.Unknown, 48)
		info[0], info[1], info[47] = flags, byte(len(ports)), invert
		for i, p := range ports {
			binary.NativeEndian.PutUint16(info[2+2*i:], p)
		}
		copy(info[32:], ranges)
		return &expr.Match{Name: "multiport", Rev: 1, Info: &info}
	}
	for name, c := range map[string]struct {
		match        *expr.Match
		about, meets bool
	}{
		"-m udp":                          {udp(all, all, 0), false, false},
		"-m udp --dport 4000:5000":        {udp(all, [2]uint16{4000, 5000}, 0), true, true},
		"-m udp --dport 53":               {udp(all, [2]uint16{53, 53}, 0), true, false},
		"-m udp ! --dport 4789":           {udp(all, [2]uint16{4789, 4789}, xt.UdpInvDestPorts), true, false},
		"-m udp --sport 4789":             {udp([2]uint16{4789, 4789}, all, 0), false, false},
		"-m tcp --dport 4789":             {&expr.Match{Name: "tcp", Info: &xt.Tcp{}}, true, false},
		"-m comment":                      {&expr.Match{Name: "comment", Info: &xt.Unknown{}}, false, false},
		"multiport --dports 53,4789":      {multiport(dest, 0, nil, 53, 4789), true, true},
		"multiport --dports 53,67":        {multiport(dest, 0, nil, 53, 67), true, false},
		"multiport --dports 53,4000:5000": {multiport(dest, 0, []byte{0, 1}, 53, 4000, 5000), true, true},
		"multiport --dports 100:200,5000": {multiport(dest, 0, []byte{1}, 100, 200, 5000), true, false},
		"multiport ! --dports 4789":       {multiport(dest, 1, nil, 4789), true, false},
		"multiport ! --dports 53":         {multiport(dest, 1, nil, 53), true, true},
		"multiport --ports 4789":          {multiport(either, 0, nil, 4789), true, true},
		"multiport --sports 4789":         {multiport(source, 0, nil, 4789), false, false},
		"multiport, truncated":            {&expr.Match{Name: "multiport", Info: &xt.Unknown{1, 1}}, false, false},
	} {
		about, meets := matchPort(c.match, 4789)
		if about != c.about || about && meets != c.meets {
			t.Errorf("%s: about %t, meets %t, want %t, %t", name, about, meets, c.about, c.meets)
		}
	}
}
