// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package guard keeps a firewall table of walls and a masquerade.
//
// One drops what comes from an endpoint's device without having met an eBPF
// program. The programs mark everything that they give to the host's stack. If
// somebody takes a program off a device, its packets arrive without a mark:
// this table drops them, those to the node itself included, which no routing
// rule could.
//
// The other marks what the stack forwards to an endpoint's device. The programs
// know such a packet by the device that it came in by, but the stack forgets
// that of IPv6 fragments that it has to copy, and an address of the host as
// their source would make them the host's own.
//
// With a fabric, others stand between the node's devices and packets that claim to
// come from a pod: none of this node's comes by a device that is not an endpoint's,
// and those of other nodes come by the tunnel, or past a program of the uplink.
//
// The masquerade, if there is one, gives connections of pods to addresses beyond
// the node the node's own address.
//
// It is spoken to by netlink; no program is executed.
package guard

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/netns"
)

// Table is the guard of one instance. Its methods may be called concurrently.
type Table struct {
	home   *netns.Namespace
	name   string
	groups []uint32
	mask   uint32

	forwarded uint32

	kernel sync.Mutex // held while the kernel's table is compared or written; taken before mu
	seen   *seen      // guarded by kernel; nil: it may have changed

	mu  sync.Mutex
	set settings // guarded by mu
}

// settings are what the table is to hold besides the walls of endpoints.
type settings struct {
	masquerade *Masquerade // nil: there is none
	fabric     *Fabric     // nil: there is none
	others     *others     // nil: SetOthers has said nothing
	tracked    bool        // the node tracks connections, or has
}

func (t *Table) settings() settings {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.set
}

// New describes the table; Repair makes it. Packets from devices of the groups
// are dropped unless they have a bit of mask in their mark. Those that are
// forwarded to such devices get forwarded in place of these bits.
func New(home *netns.Namespace, instance string, groups []uint32, mask, forwarded uint32) *Table {
	name := "sluice"
	if instance != "" {
		name += "-" + instance
	}
	return &Table{home: home, name: name, groups: groups, mask: mask, forwarded: forwarded}
}

// Name of the table.
func (t *Table) Name() string { return t.name }

const (
	chainName   = "unmarked"
	forwardName = "forwarded"
)

// A wall is a chain and its rules.
type wall struct {
	chain *nftables.Chain
	rules [][]expr.Any
}

func (t *Table) walls(s settings, table *nftables.Table) []wall {
	unmarked, forwarded := wall{chain: t.chain(table)}, wall{chain: t.forwardChain(table)}
	for _, g := range t.groups {
		unmarked.rules = append(unmarked.rules, t.rule(g))
		forwarded.rules = append(forwarded.rules, t.forwardRule(g))
	}
	if s.fabric != nil {
		unmarked.rules = t.fabricRules(s.fabric, unmarked.rules)
	}
	ws := []wall{unmarked, forwarded}
	if s.masquerade != nil {
		ws = append(ws, t.masqueradeWall(s, table))
	}
	if s.fabric != nil {
		ws = append(ws, t.fabricWalls(s.fabric, s.tracked, table)...)
	}
	return ws
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// chain is `type filter hook prerouting priority raw; policy accept;`: before
// anything routes a packet, translates it or lets it through.
func (t *Table) chain(table *nftables.Table) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{
		Name: chainName, Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityRaw, Policy: &policy,
	}
}

// rule is `meta iifgroup G meta mark & M == 0 counter drop`.
func (t *Table) rule(group uint32) []expr.Any {
	return slices.Concat([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(group)},
	}, t.unmarked(), []expr.Any{
		&expr.Counter{},
		&expr.Verdict{Kind: expr.VerdictDrop},
	})
}

// unmarked is `meta mark & M == 0`: no program has looked at the packet.
func (t *Table) unmarked() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(t.mask), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(0)},
	}
}

// forwardChain is `type filter hook forward priority 300; policy accept;`: behind
// what others do to marks there.
func (t *Table) forwardChain(table *nftables.Table) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{
		Name: forwardName, Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityRef(300), Policy: &policy,
	}
}

// forwardRule is `meta oifgroup G meta mark set mark & ~M | F`.
func (t *Table) forwardRule(group uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFGROUP, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(group)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^t.mask), Xor: native(t.forwarded)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}
}

func (t *Table) conn(fn func(*nftables.Conn) error) error {
	c, err := nftables.New(nftables.WithNetNSFd(t.home.Fd()), nftables.AsLasting())
	if err != nil {
		return fmt.Errorf("open netfilter: %w", err)
	}
	return errors.Join(fn(c), c.CloseLasting())
}

// Repair makes the table as it should be, in one transaction: what was there
// under its name is replaced, and there is no moment without it.
func (t *Table) Repair() error {
	t.kernel.Lock()
	defer t.kernel.Unlock()
	return t.repair(t.plan())
}

func (t *Table) repair(p plan) error {
	if err := p.fabric.check(); err != nil {
		return fmt.Errorf("firewall table %s: %w", t.name, err)
	}
	t.seen = nil
	generation := t.generation()
	err := t.conn(func(c *nftables.Conn) error {
		table := t.table()
		// added first, so that the deletion cannot fail
		c.AddTable(table)
		c.DelTable(table)
		table = c.AddTable(t.table())
		for _, s := range p.sets {
			if err := s.add(c, table); err != nil {
				return fmt.Errorf("firewall set %s: %w", s.name, err)
			}
		}
		walls := t.walls(p.settings, table)
		for _, w := range walls { // before a rule leads to one
			c.AddChain(w.chain)
		}
		for _, w := range walls {
			for _, exprs := range w.rules {
				c.AddRule(&nftables.Rule{Table: table, Chain: w.chain, Exprs: exprs})
			}
		}
		if err := c.Flush(); err != nil {
			return fmt.Errorf("firewall table %s: %w", t.name, err)
		}
		return nil
	})
	if err == nil {
		t.remember(p, generation, 1)
	}
	return err
}

// table is what names it to the kernel.
func (t *Table) table() *nftables.Table {
	return &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
}

// Remove takes the table away. It is for an uninstallation, and tests.
func (t *Table) Remove() error {
	t.kernel.Lock()
	defer t.kernel.Unlock()
	return t.conn(func(c *nftables.Conn) error {
		table := t.table()
		c.AddTable(table)
		c.DelTable(table)
		return c.Flush()
	})
}

// Check compares the table with what Repair makes.
func (t *Table) Check() ([]endpoint.Difference, error) {
	t.kernel.Lock()
	defer t.kernel.Unlock()
	p := t.plan()
	d, err := t.compare(p, t.generation())
	if d == nil || err != nil {
		return nil, err
	}
	return []endpoint.Difference{{Subject: "firewall", Key: t.name, Want: t.wanted(p.settings), Have: d.have}}, nil
}

// wanted is what the table does, in words.
func (t *Table) wanted(s settings) string {
	words := fmt.Sprintf("drop packets of device groups %#x without a mark in %#x, mark what is forwarded to them",
		t.groups, t.mask)
	if s.fabric != nil {
		words += ", " + s.fabric.wanted(s.tracked)
	}
	if s.masquerade != nil {
		words += ", masquerade what pods send beyond the node"
	}
	return words
}

// A difference is how the table is not what it is to be.
type difference struct {
	have    string   // in words; "": nothing
	changes []change // what sets lack or have too many, if that is all
}

// and adds what a set has too many, and what it lacks.
func (d *difference) and(ch change) *difference {
	if len(ch.remove)+len(ch.more) == 0 {
		return d
	}
	if d == nil {
		d = &difference{have: "other elements in set " + ch.set.name}
	}
	d.changes = append(d.changes, ch)
	return d
}

// compare reads the table in a generation and gives nil if it is like the plan.
func (t *Table) compare(p plan, generation uint32) (d *difference, err error) {
	t.seen = nil
	err = t.conn(func(c *nftables.Conn) error {
		for _, compare := range []func(*nftables.Conn, plan) (*difference, error){
			t.compareTable, t.compareWalls, t.compareSets,
		} {
			if d, err = compare(c, p); d != nil || err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && d == nil {
		t.remember(p, generation, 0)
	}
	return d, err
}

func (t *Table) compareTable(c *nftables.Conn, _ plan) (*difference, error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list firewall tables: %w", err)
	}
	for _, table := range tables {
		// One flag puts it to sleep. Repair sets none, so no flag is right; the
		// library (0.3.0) gives them in the wrong byte order.
		if table.Name == t.name && table.Flags != 0 {
			return &difference{have: fmt.Sprintf("a table with flags %#x, perhaps dormant", table.Flags)}, nil
		}
	}
	return nil, nil
}

func (t *Table) compareWalls(c *nftables.Conn, p plan) (*difference, error) {
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list firewall chains: %w", err)
	}
	ours := map[string]*nftables.Chain{}
	for _, ch := range chains {
		if ch.Table.Name == t.name {
			ours[ch.Name] = ch
		}
	}
	if len(ours) == 0 {
		return &difference{}, nil
	}
	for _, want := range t.walls(p.settings, t.table()) {
		have := ours[want.chain.Name]
		delete(ours, want.chain.Name)
		if have == nil {
			return &difference{have: "no chain " + want.chain.Name}, nil
		}
		if have, want := chainText(have), chainText(want.chain); have != want {
			return &difference{have: "a chain of " + have}, nil
		}
		rules, err := c.GetRules(have.Table, have)
		if err != nil {
			return nil, fmt.Errorf("list firewall rules: %w", err)
		}
		if len(rules) != len(want.rules) {
			return &difference{have: fmt.Sprintf("%d rules in chain %s", len(rules), have.Name)}, nil
		}
		for i, r := range rules {
			if !same(r.Exprs, want.rules[i]) {
				return &difference{have: "another rule in chain " + have.Name}, nil
			}
		}
	}
	for name := range ours {
		return &difference{have: "another chain, " + name}, nil
	}
	return nil, nil
}

// chainText is where a chain hooks in and what it does at its end, in words.
func chainText(ch *nftables.Chain) string {
	hook, priority, policy := "no hook", "none", "none"
	if ch.Hooknum != nil {
		hook = fmt.Sprintf("hook %d", *ch.Hooknum)
	}
	if ch.Priority != nil {
		priority = fmt.Sprint(*ch.Priority)
	}
	if ch.Policy != nil {
		policy = fmt.Sprint(*ch.Policy)
	}
	return fmt.Sprintf("type %s, %s, priority %s, policy %s, device %q", ch.Type, hook, priority, policy, ch.Device)
}

// same compares two rules in everything but what their counters have counted.
func same(have, want []expr.Any) bool {
	return slices.EqualFunc(have, want, func(h, w expr.Any) bool {
		switch w := w.(type) {
		case *expr.Counter:
			_, ok := h.(*expr.Counter)
			return ok
		case *expr.Lookup: // the number of a set means something in one transaction only
			h, ok := h.(*expr.Lookup)
			return ok && h.SetName == w.SetName && h.Invert == w.Invert && h.SourceRegister == w.SourceRegister &&
				!h.IsDestRegSet
		}
		return reflect.DeepEqual(h, w)
	})
}
