// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package firewall keeps a firewall table of walls and a masquerade.
//
// One drops what comes from an endpoint's device without having met an eBPF
// program. The programs mark everything that they give to the host's stack. If
// somebody takes a program off a device, its packets arrive without a mark:
// this table drops them, those to the node itself included, which no routing
// rule could.
//
// The other marks every packet that the stack forwards, by the kind of device that it
// came in by: an endpoint's, the tunnel, or another one. The programs know a packet by
// its device of arrival, which fragments lose when the stack copies them. An address
// of the host as their source would make them the host's own; the mark says that they
// are not.
//
// With a fabric, others stand between the node's devices and packets that claim to
// come from a pod: none of this node's comes by a device that is not an endpoint's,
// and those of other nodes come by the tunnel, or past a program of the uplink.
//
// The masquerade, if there is one, gives connections of pods to addresses beyond
// the node the node's own address.
//
// It is spoken to by netlink; no program is executed.
package firewall

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
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
)

// Table is the firewall of one instance. Its methods may be called concurrently.
type Table struct {
	home   *netns.Namespace
	name   string
	groups []uint32
	marks  Marks

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

// Marks are the values of some bits of packet marks. The table writes one of the last
// four into each packet that the stack forwards.
type Marks struct {
	Mask uint32 // the bits
	Pod  uint32 // from a device of an endpoint
	Pods uint32 // from a device of an endpoint to another one
	// Tunnel is that of what came by the tunnel.
	Tunnel uint32
	Others uint32 // from a device that is neither
}

// New describes the table; Repair makes it. Packets from devices of the groups, which
// are those of endpoints, are dropped unless they have a bit of the mask in their mark.
func New(home *netns.Namespace, instance string, groups []uint32, marks Marks) *Table {
	name := "sluice"
	if instance != "" {
		name += "-" + instance
	}
	return &Table{home: home, name: name, groups: groups, marks: marks}
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
	unmarked, forwarded := wall{chain: t.chain(table)}, wall{chain: t.forwardChain(table), rules: t.forwardRules(s)}
	for _, g := range t.groups {
		unmarked.rules = append(unmarked.rules, t.rule(g))
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
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(t.marks.Mask), Xor: native(0)},
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

// forwardRules mark what is forwarded, wherever it leaves. No packet passes without a
// mark of the device that it came in by, whatever mark it has had:
//
//	iifgroup != G iifgroup != TUNNEL meta mark set mark & ~M | Others accept
//	iifgroup TUNNEL meta mark set mark & ~M | Tunnel accept
//	meta mark set mark & ~M | Pod
//	oifgroup G meta mark set mark & ~M | Pods
func (t *Table) forwardRules(s settings) [][]expr.Any {
	accept, groups := []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}, t.groups
	var rules [][]expr.Any
	if s.fabric != nil && !s.fabric.Native {
		groups = append(slices.Clone(groups), s.fabric.TunnelGroup)
		tunnel := group(expr.MetaKeyIIFGROUP, s.fabric.TunnelGroup)
		rules = append(rules, slices.Concat(tunnel, t.setMark(t.marks.Tunnel), accept))
	}
	rules = slices.Insert(rules, 0, slices.Concat(notOf(groups), t.setMark(t.marks.Others), accept))
	rules = append(rules, t.setMark(t.marks.Pod))
	for _, g := range t.groups {
		rules = append(rules, slices.Concat(group(expr.MetaKeyOIFGROUP, g), t.setMark(t.marks.Pods)))
	}
	return rules
}

// group is `meta KEY G`.
func group(key expr.MetaKey, g uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(g)},
	}
}

// setMark is `meta mark set mark & ~M | V`.
func (t *Table) setMark(value uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^t.marks.Mask), Xor: native(value)},
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

// Repair makes the table as it should be, in one transaction. Chains that hook in where
// they should stay and get their rules anew, so that a packet in such a chain meets its
// former rules or its new ones, also while Repair runs.
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
		kept, err := t.kept(c, p)
		if err != nil {
			return err
		}
		if err := t.write(c, p, kept); err != nil {
			return err
		}
		err = c.Flush()
		if err != nil && kept != nil {
			// Another has changed the table since it was read.
			if err = t.write(c, p, nil); err == nil {
				err = c.Flush()
			}
		}
		if err != nil {
			return fmt.Errorf("firewall table %s: %w", t.name, err)
		}
		return nil
	})
	if err == nil {
		t.remember(p, generation, 1)
	}
	return err
}

// write puts the table into a transaction: as a whole in place of another one, or into
// what is kept of it.
func (t *Table) write(c *nftables.Conn, p plan, kept *kept) error {
	table := t.table()
	// added first, so that the deletion cannot fail
	c.AddTable(table)
	if kept == nil {
		c.DelTable(table)
		table = c.AddTable(t.table())
		kept = newKept()
	}
	for _, s := range p.sets {
		have, ok := kept.sets[s.name]
		var err error
		if ok {
			err = set{ranges: have}.change(s).write(c, table)
		} else {
			err = s.add(c, table)
		}
		if err != nil {
			return fmt.Errorf("firewall set %s: %w", s.name, err)
		}
	}
	walls := t.walls(p.settings, table)
	for _, w := range walls { // before a rule leads to one
		if kept.chains[w.chain.Name] {
			c.FlushChain(w.chain)
		} else {
			c.AddChain(w.chain)
		}
	}
	for _, w := range walls {
		for _, exprs := range w.rules {
			c.AddRule(&nftables.Rule{Table: table, Chain: w.chain, Exprs: exprs})
		}
	}
	return nil
}

// kept is what of the kernel's table can stay when it is repaired.
type kept struct {
	chains map[string]bool
	sets   map[string][]span // and their elements
}

func newKept() *kept { return &kept{map[string]bool{}, map[string][]span{}} }

// kept reads what of the kernel's table can stay; nil: nothing can, because the table is
// not there, or has chains or sets that the plan has not or has otherwise.
func (t *Table) kept(c *nftables.Conn, p plan) (*kept, error) {
	if d, err := t.compareTable(c, p); d != nil || err != nil {
		return nil, err
	}
	ours, err := t.chains(c)
	if len(ours) == 0 || err != nil {
		return nil, err
	}
	k := newKept()
	for _, w := range t.walls(p.settings, t.table()) {
		if have := ours[w.chain.Name]; have != nil {
			if chainText(have) != chainText(w.chain) {
				return nil, nil
			}
			k.chains[w.chain.Name] = true
			delete(ours, w.chain.Name)
		}
	}
	if len(ours) > 0 {
		return nil, nil
	}
	whole, err := t.keptSets(c, p, k)
	if !whole || err != nil {
		return nil, err
	}
	return k, nil
}

// keptSets reads the sets that can stay. It is false if the table has others.
func (t *Table) keptSets(c *nftables.Conn, p plan, k *kept) (bool, error) {
	have, err := c.GetSets(t.table())
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return false, fmt.Errorf("list firewall sets: %w", err)
	}
	for _, h := range have {
		at := slices.IndexFunc(p.sets, func(s set) bool { return s.name == h.Name })
		if at < 0 || setText(h) != setText(p.sets[at].named(t.table())) {
			return false, nil
		}
		elements, err := c.GetSetElements(h)
		if err != nil {
			return false, fmt.Errorf("list the elements of firewall set %s: %w", h.Name, err)
		}
		ranges, whole := spansOf(elements)
		if !whole {
			return false, nil
		}
		k.sets[h.Name] = ranges
	}
	return true, nil
}

// chains are those of the kernel's table.
func (t *Table) chains(c *nftables.Conn) (map[string]*nftables.Chain, error) {
	all, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list firewall chains: %w", err)
	}
	ours := map[string]*nftables.Chain{}
	for _, ch := range all {
		if ch.Table.Name == t.name {
			ours[ch.Name] = ch
		}
	}
	return ours, nil
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
	words := fmt.Sprintf("drop packets of device groups %#x without a mark in %#x, mark what is forwarded",
		t.groups, t.marks.Mask)
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
	ours, err := t.chains(c)
	if err != nil {
		return nil, err
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
