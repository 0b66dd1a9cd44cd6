// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package firewall maintains the nftables table of an instance: filter chains and a masquerade.
//
// One chain drops packets from endpoint devices that no eBPF program has processed. The programs mark every packet that
// they pass to the host stack. If another process detaches a program from a device, its packets arrive without a mark
// and this table drops them, including packets to the node itself, which no routing rule could stop.
//
// Another chain marks every packet that the stack forwards with the kind of device by which it arrived: an endpoint's
// device, the tunnel, or any other device. The programs otherwise recognise a packet by its ingress device, which
// fragments lose when the stack copies them. Without the mark, such a fragment would count as sent by the host if its
// source is an address of the host.
//
// With routing between nodes, further chains check packets whose source is a pod: a pod of this node can only send
// through its endpoint device, and packets of pods on other nodes arrive through the tunnel or an uplink's program.
//
// The optional masquerade replaces the source of connections from pods to destinations beyond the node by the node's
// address.
//
// The package uses netlink and executes no program.
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
	seen   *seen      // guarded by kernel; nil: the table may have changed

	mu  sync.Mutex
	set settings // guarded by mu
}

// settings define the content of the table in addition to the rules for endpoints.
type settings struct {
	masquerade *Masquerade // nil: none
	routing    *Routing    // nil: none
	others     *others     // nil before the first SetOthers
	tracked    bool        // the node tracks connections, or did
}

func (t *Table) settings() settings {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.set
}

// Marks are values of some bits of packet marks. The table writes one of the last four to each packet that the stack
// forwards.
type Marks struct {
	Mask uint32 // the bits that the table uses
	Pod  uint32 // arrived through an endpoint's device
	Pods uint32 // arrived through an endpoint's device and leaves through another
	// Tunnel: arrived through the tunnel.
	Tunnel uint32
	Others uint32 // arrived through any other device
}

// New returns a table; Repair creates it in the kernel. Packets from devices of the groups, which are the endpoints'
// devices, are dropped unless their mark has a bit of the mask.
func New(home *netns.Namespace, instance string, groups []uint32, marks Marks) *Table {
	name := "sluice"
	if instance != "" {
		name += "-" + instance
	}
	return &Table{home: home, name: name, groups: groups, marks: marks}
}

// Name returns the name of the table.
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
	if s.routing != nil {
		unmarked.rules = t.routingRules(s.routing, unmarked.rules)
	}
	ws := []wall{unmarked, forwarded}
	if s.masquerade != nil {
		ws = append(ws, t.masqueradeWall(s, table))
	}
	if s.routing != nil {
		ws = append(ws, t.routingWalls(s.routing, s.tracked, table)...)
	}
	return ws
}

func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// chain returns the chain `type filter hook prerouting priority raw; policy accept;`: before routing, NAT and other
// filters.
func (t *Table) chain(table *nftables.Table) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{
		Name: chainName, Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityRaw, Policy: &policy,
	}
}

// rule returns the expressions of `meta iifgroup G meta mark & M == 0 counter drop`.
func (t *Table) rule(group uint32) []expr.Any {
	return slices.Concat([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(group)},
	}, t.unmarked(), []expr.Any{
		&expr.Counter{},
		&expr.Verdict{Kind: expr.VerdictDrop},
	})
}

// unmarked returns the expressions of `meta mark & M == 0`: no program has processed the packet.
func (t *Table) unmarked() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(t.marks.Mask), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(0)},
	}
}

// forwardChain returns the chain `type filter hook forward priority 300; policy accept;`: after chains of others that
// may change marks.
func (t *Table) forwardChain(table *nftables.Table) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return &nftables.Chain{
		Name: forwardName, Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityRef(300), Policy: &policy,
	}
}

// forwardRules mark every forwarded packet by its ingress device, and replace any mark that it had:
//
//	iifgroup != G iifgroup != TUNNEL meta mark set mark & ~M | Others accept
//	iifgroup TUNNEL meta mark set mark & ~M | Tunnel accept
//	meta mark set mark & ~M | Pod
//	oifgroup G meta mark set mark & ~M | Pods
func (t *Table) forwardRules(s settings) [][]expr.Any {
	accept, groups := []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}, t.groups
	var rules [][]expr.Any
	if s.routing != nil && !s.routing.Native {
		groups = append(slices.Clone(groups), s.routing.TunnelGroup)
		tunnel := group(expr.MetaKeyIIFGROUP, s.routing.TunnelGroup)
		rules = append(rules, slices.Concat(tunnel, t.setMark(t.marks.Tunnel), accept))
	}
	rules = slices.Insert(rules, 0, slices.Concat(notOf(groups), t.setMark(t.marks.Others), accept))
	rules = append(rules, t.setMark(t.marks.Pod))
	for _, g := range t.groups {
		rules = append(rules, slices.Concat(group(expr.MetaKeyOIFGROUP, g), t.setMark(t.marks.Pods)))
	}
	return rules
}

// group returns the expressions of `meta KEY G`.
func group(key expr.MetaKey, g uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(g)},
	}
}

// setMark returns the expressions of `meta mark set mark & ~M | V`.
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

// Repair creates or repairs the table in one transaction. Chains with the right hook are kept and only their rules
// replaced, so that at any time, a packet passes either the old rules or the new ones.
func (t *Table) Repair() error {
	t.kernel.Lock()
	defer t.kernel.Unlock()
	return t.repair(t.plan())
}

func (t *Table) repair(p plan) error {
	if err := p.routing.check(); err != nil {
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
			// Another process has changed the ruleset since it was read, so write the whole table.
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

// write adds the table to a transaction: the whole table or, with kept, only what differs from it.
func (t *Table) write(c *nftables.Conn, p plan, kept *kept) error {
	table := t.table()
	// added first, so that deleting it cannot fail
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
	for _, w := range walls { // before rules refer to the chains
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

// kept is the part of the kernel's table that a repair keeps.
type kept struct {
	chains map[string]bool
	sets   map[string][]span // with their elements
}

func newKept() *kept { return &kept{map[string]bool{}, map[string][]span{}} }

// kept reads the part of the kernel's table that can be kept. It returns nil if the table is missing, or has chains or
// sets that differ from the plan.
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

// keptSets reads the sets that can be kept. It returns false if the table has other sets.
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

// chains returns the chains of the kernel's table, by name.
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

// table returns the name and family of the table.
func (t *Table) table() *nftables.Table {
	return &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
}

// Remove removes the table. It is used by uninstallation and tests.
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

// Check compares the table with the result of Repair.
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

// wanted describes the table for audits.
func (t *Table) wanted(s settings) string {
	words := fmt.Sprintf("drop packets of device groups %#x without a mark in %#x, mark forwarded packets",
		t.groups, t.marks.Mask)
	if s.routing != nil {
		words += ", " + s.routing.wanted(s.tracked)
	}
	if s.masquerade != nil {
		words += ", masquerade packets of pods to destinations beyond the node"
	}
	return words
}

// A difference is the first difference between the kernel's table and the plan.
type difference struct {
	have    string   // description; "": the table is missing
	changes []change // differences of sets, if there are no others
}

// and adds the difference of one set to d.
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

// compare reads the table at a generation. It returns nil if the table equals the plan.
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
		// A single flag makes the table dormant. Repair sets none, so any flag is a difference. The library (0.3.0) returns
		// flags in the wrong byte order.
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

// chainText describes type, hook, priority, policy and device of a chain.
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

// same compares two rules without the values of their counters.
func same(have, want []expr.Any) bool {
	return slices.EqualFunc(have, want, func(h, w expr.Any) bool {
		switch w := w.(type) {
		case *expr.Counter:
			_, ok := h.(*expr.Counter)
			return ok
		case *expr.Lookup: // the ID of a set is only valid within a transaction
			h, ok := h.(*expr.Lookup)
			return ok && h.SetName == w.SetName && h.Invert == w.Invert && h.SourceRegister == w.SourceRegister &&
				!h.IsDestRegSet
		}
		return reflect.DeepEqual(h, w)
	})
}
