// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func words(vs ...uint32) *xt.Unknown {
	var b xt.Unknown
	for _, v := range vs {
		b = append(b, word(v)...)
	}
	return &b
}

func TestChangesOfThePacketMark(t *testing.T) {
	setMark := &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1}
	getMark := &expr.Meta{Key: expr.MetaKeyMARK, Register: 1}
	ctMark := &expr.Ct{Key: expr.CtKeyMARK, Register: 1}
	and := func(mask, xor uint32) *expr.Bitwise {
		return &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: word(mask), Xor: word(xor)}
	}
	const all = ^uint32(0)
	for name, c := range map[string]struct {
		exprs []expr.Any
		want  uint32
	}{
		"a comparison":                {[]expr.Any{getMark, &expr.Cmp{Register: 1, Data: word(1)}, &expr.Verdict{Kind: expr.VerdictDrop}}, 0},
		"mark set ct mark":            {[]expr.Any{ctMark, setMark}, all},
		"mark set ct mark & 0xff0000": {[]expr.Any{ctMark, and(0xff0000, 0), setMark}, all},
		"ct mark set mark":            {[]expr.Any{getMark, &expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: 1}}, 0},
		"mark set 1":                  {[]expr.Any{&expr.Immediate{Register: 1, Data: word(1)}, setMark}, all},
		"mark set mark | 0x4000":      {[]expr.Any{getMark, and(^uint32(0x4000), 0x4000), setMark}, 0x4000},
		"mark set mark & 0xff":        {[]expr.Any{getMark, and(0xff, 0), setMark}, ^uint32(0xff)},
		"iptables --or-mark 0x4000":   {[]expr.Any{&expr.Target{Name: "MARK", Rev: 2, Info: words(0x4000, 0x4000)}}, 0x4000},
		"iptables --restore-mark":     {[]expr.Any{&expr.Target{Name: "CONNMARK", Rev: 1, Info: words(0, all, 0xff0000, 2)}}, 0xff0000},
		"iptables --save-mark":        {[]expr.Any{&expr.Target{Name: "CONNMARK", Rev: 1, Info: words(0, all, all, 1)}}, 0},
		"a target without its data":   {[]expr.Any{&expr.Target{Name: "CONNMARK", Rev: 1, Info: words()}}, all},
	} {
		if _, got := markChange(c.exprs); got != c.want {
			t.Errorf("%s: changes %#x, want %#x", name, got, c.want)
		}
	}
}

// TestKernelRulesThatChangeTheMarkAreNamed uses the rule that wg-quick creates for a default route, and a rule that is
// reached by a jump.
func TestKernelRulesThatChangeTheMarkAreNamed(t *testing.T) {
	home := netnstest.New(t)
	table := New(home, "test", []uint32{7}, testMarks)
	if err := table.Repair(); err != nil {
		t.Fatal(err)
	}
	if found, err := table.MarkRules(0xf000); err != nil || len(found) != 0 {
		t.Fatalf("on a fresh node %q, %v", found, err)
	}
	c, err := nftables.New(nftables.WithNetNSFd(home.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	wg := c.AddTable(&nftables.Table{Name: "wg-quick-wg0", Family: nftables.TableFamilyIPv4})
	pre := c.AddChain(&nftables.Chain{
		Name: "premangle", Table: wg, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	l4 := &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}
	udp := &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}}
	restore := []expr.Any{l4, udp, &expr.Ct{Key: expr.CtKeyMARK, Register: 1}, &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1}}
	c.AddRule(&nftables.Rule{Table: wg, Chain: pre, Exprs: restore})

	mine := c.AddTable(&nftables.Table{Name: "mine", Family: nftables.TableFamilyINet})
	forward := c.AddChain(&nftables.Chain{
		Name: "forward", Table: mine, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	})
	sub := c.AddChain(&nftables.Chain{Name: "sub", Table: mine})
	c.AddChain(&nftables.Chain{Name: "alone", Table: mine})
	input := c.AddChain(&nftables.Chain{
		Name: "input", Table: mine, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	c.AddRule(&nftables.Rule{Table: mine, Chain: forward, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: "sub"}}})
	c.AddRule(&nftables.Rule{Table: mine, Chain: sub, Exprs: []expr.Any{
		&expr.Immediate{Register: 1, Data: word(0x51)}, &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}})
	// harmless: the host's own input, and a free bit
	c.AddRule(&nftables.Rule{Table: mine, Chain: input, Exprs: restore})
	c.AddRule(&nftables.Rule{Table: mine, Chain: forward, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: word(^uint32(0x4000)), Xor: word(0x4000)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	found, err := table.MarkRules(0xf000)
	if err != nil || len(found) != 2 {
		t.Fatalf("found %q, %v, want two rules", found, err)
	}
	for _, want := range []string{"chain premangle of table ip wg-quick-wg0 (prerouting) restores a connection's mark", "chain sub of table inet mine (forward) sets the mark"} {
		if !slices.ContainsFunc(found, func(s string) bool { return strings.Contains(s, want) }) {
			t.Errorf("found %q, want %q", found, want)
		}
	}
}
