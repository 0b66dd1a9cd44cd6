// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// fakeKernel has maps with limits, and refuses what the real one refuses. One
// write is one call, but for words, of which each is one.
type fakeKernel struct {
	tables    map[Table]*Content
	next      Table
	numbers   map[ClassKey]NodeClass
	words     map[uint32]Word
	endpoints map[uint16]*Endpoint
	gen       uint32
	retired   map[Table]bool
	audit     map[uint16]bool

	maxTables, maxRows, maxClasses int
	maxNumbers                     int // of node classes; 0: any
	writes                         int
	bumps                          int
	failAt                         int // number of the write that fails, and all after it; 0: none
	after                          func(what string)
	barriers                       int
}

var errKilled = errors.New("killed by the test")

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		tables: map[Table]*Content{}, next: First, numbers: map[ClassKey]NodeClass{}, words: map[uint32]Word{},
		endpoints: map[uint16]*Endpoint{}, retired: map[Table]bool{}, audit: map[uint16]bool{},
		maxTables: 100, maxRows: 1000, maxClasses: 1000,
	}
}

// write counts a write that is about to be done.
func (k *fakeKernel) write() error {
	if k.failAt > 0 && k.writes+1 >= k.failAt {
		return errKilled
	}
	k.writes++
	return nil
}

func (k *fakeKernel) done(what string, args ...any) {
	if k.after != nil {
		k.after(fmt.Sprintf(what, args...))
	}
}

func (k *fakeKernel) endpoint(slot uint16, identity uint32, addr string) {
	k.gen++
	k.endpoints[slot] = &Endpoint{
		Slot: slot, Identity: identity, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Egress: Pending, Ingress: Pending, Generation: k.gen,
	}
}

func (k *fakeKernel) rows() (n int) {
	for _, c := range k.tables {
		n += len(c.Peers)
	}
	return n
}

func (k *fakeKernel) DefineTable(c Content) (Table, error) {
	switch {
	case len(k.tables) >= k.maxTables:
		return 0, fmt.Errorf("map tables: 1 needed, 0 free: %w", ErrNoRoom)
	case k.rows()+len(c.Peers) > k.maxRows:
		return 0, fmt.Errorf("map rows: %d needed, %d free: %w", len(c.Peers), k.maxRows-k.rows(), ErrNoRoom)
	}
	if err := c.validate(); err != nil {
		return 0, err
	}
	if err := k.write(); err != nil {
		return 0, err
	}
	d := c.copied()
	id := k.next
	k.next++
	k.tables[id] = &d
	k.done("define table %d", id)
	return id, nil
}

func (k *fakeKernel) table(t Table) (*Content, error) {
	c := k.tables[t]
	if c == nil {
		return nil, fmt.Errorf("there is no table %d", t)
	}
	return c, nil
}

func (k *fakeKernel) GrowTable(t Table, nodes []Node, classes []uint32) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if len(c.Classes)+len(classes) > k.maxClasses {
		return fmt.Errorf("map classes: %d needed: %w", len(classes), ErrNoRoom)
	}
	d := *c
	d.Nodes, d.Classes = slices.Concat(c.Nodes, nodes), slices.Concat(c.Classes, classes)
	if err := d.validate(); err != nil {
		return err
	}
	if err := k.write(); err != nil {
		return err
	}
	*c = d
	k.done("grow table %d", t)
	return nil
}

func (k *fakeKernel) SetPeer(t Table, nc NodeClass, class uint16) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if _, ok := c.Peers[nc]; ok || int(class) >= len(c.Classes) || nc == 0 {
		return fmt.Errorf("row %d -> %d of table %d: there is %v", nc, class, t, c.Peers)
	}
	if k.rows() >= k.maxRows {
		return fmt.Errorf("map rows: 1 needed, 0 free: %w", ErrNoRoom)
	}
	if err := k.write(); err != nil {
		return err
	}
	c.Peers[nc] = class
	k.done("table %d: row %d -> %d", t, nc, class)
	return nil
}

func (k *fakeKernel) DeletePeer(t Table, nc NodeClass) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if _, ok := c.Peers[nc]; !ok {
		return fmt.Errorf("table %d has no row of %d", t, nc)
	}
	if err := k.write(); err != nil {
		return err
	}
	delete(c.Peers, nc)
	k.done("table %d: no row of %d", t, nc)
	return nil
}

func (k *fakeKernel) SetBlock(t Table, p netip.Prefix, classes [Scopes]uint16) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if err := c.validateBlock(p, classes); err != nil {
		return err
	}
	if err := k.write(); err != nil {
		return err
	}
	c.Blocks[p] = classes
	k.done("table %d: block %v -> %v", t, p, classes)
	return nil
}

func (k *fakeKernel) DeleteBlock(t Table, p netip.Prefix) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if err := k.write(); err != nil {
		return err
	}
	delete(c.Blocks, p)
	k.done("table %d: no block %v", t, p)
	return nil
}

func (k *fakeKernel) RetireTables(ts ...Table) error {
	for _, t := range ts {
		if _, err := k.table(t); err != nil {
			return err
		}
		for _, e := range k.endpoints {
			if e.Egress == t || e.Ingress == t {
				return fmt.Errorf("table %d is in use by slot %d", t, e.Slot)
			}
		}
	}
	if err := k.write(); err != nil {
		return err
	}
	for _, t := range ts {
		delete(k.tables, t)
	}
	k.done("retire tables %v", ts)
	return nil
}

func (k *fakeKernel) Tables() (map[Table][32]byte, error) {
	out := map[Table][32]byte{}
	for t, c := range k.tables {
		out[t] = c.Hash
	}
	return out, nil
}

func (k *fakeKernel) TableContent(t Table) (Content, error) {
	c, err := k.table(t)
	if err != nil {
		return Content{}, err
	}
	return c.copied(), nil
}

func (k *fakeKernel) NodeClass(key ClassKey) (NodeClass, error) {
	if nc, ok := k.numbers[key]; ok {
		return nc, nil
	}
	if k.maxNumbers > 0 && len(k.numbers) >= k.maxNumbers {
		return 0, fmt.Errorf("map node classes: 1 needed, 0 free: %w", ErrNoRoom)
	}
	if err := k.write(); err != nil {
		return 0, err
	}
	for nc := NodeClass(1); ; nc++ {
		taken := false
		for _, n := range k.numbers {
			taken = taken || n == nc
		}
		if !taken {
			k.numbers[key] = nc
			k.done("node class %d", nc)
			return nc, nil
		}
	}
}

func (k *fakeKernel) NodeClasses() (map[ClassKey]NodeClass, error) { return maps.Clone(k.numbers), nil }

func (k *fakeKernel) RetireNodeClasses(ncs ...NodeClass) error {
	for _, nc := range ncs {
		for t, c := range k.tables {
			if _, ok := c.Peers[nc]; ok {
				return fmt.Errorf("node class %d has a row in table %d", nc, t)
			}
		}
		for id, w := range k.words {
			if w.Class == nc {
				return fmt.Errorf("identity %d has node class %d", id, nc)
			}
		}
	}
	if err := k.write(); err != nil {
		return err
	}
	maps.DeleteFunc(k.numbers, func(_ ClassKey, nc NodeClass) bool { return slices.Contains(ncs, nc) })
	k.done("retire node classes %v", ncs)
	return nil
}

func (k *fakeKernel) SetWords(ws map[uint32]Word) error {
	for id, w := range ws { // in any order, as the real one may
		if err := k.write(); err != nil {
			return err
		}
		if w == (Word{}) {
			delete(k.words, id)
		} else {
			k.words[id] = w
		}
		k.done("identity %d is %+v", id, w)
	}
	return nil
}

func (k *fakeKernel) Words() (map[uint32]Word, error) { return maps.Clone(k.words), nil }

func (k *fakeKernel) SetPolicy(slot uint16, egress, ingress Table) (uint32, error) {
	for _, t := range []Table{egress, ingress} {
		if t >= First && k.tables[t] == nil {
			return 0, fmt.Errorf("there is no table %d", t)
		}
	}
	if err := k.write(); err != nil {
		return 0, err
	}
	k.gen++
	e := k.endpoints[slot]
	e.Egress, e.Ingress, e.Generation = egress, ingress, k.gen
	k.done("slot %d: egress %d ingress %d", slot, egress, ingress)
	return k.gen, nil
}

func (k *fakeKernel) BumpGens(slots ...uint16) error {
	if k.failAt > 0 && k.writes+1 >= k.failAt {
		return errKilled
	}
	k.bumps++
	for n, e := range k.endpoints {
		if len(slots) == 0 || slices.Contains(slots, n) {
			k.gen++
			e.Generation = k.gen
		}
	}
	return nil
}

func (k *fakeKernel) SetAudit(slot uint16, on bool) error {
	k.audit[slot] = on
	return nil
}

func (k *fakeKernel) Endpoints() ([]Endpoint, error) {
	var out []Endpoint
	for _, e := range k.endpoints {
		out = append(out, *e)
	}
	return out, nil
}

func (k *fakeKernel) Barrier(context.Context) error {
	k.barriers++
	return nil
}

// allows judges a new connection as the programs do, for the identity side and
// one address.
func (k *fakeKernel) allows(slot uint16, d Direction, peer uint32, addr netip.Addr, point uint32) bool {
	e := k.endpoints[slot]
	t := e.Egress
	if d == Ingress {
		t = e.Ingress
	}
	w := k.words[peer]
	switch t {
	case Deny:
		return false
	case Allow:
		return true
	case Pending:
		return d == Ingress && w.Kind == KindHost && w.Known
	}
	c := k.tables[t]
	if c == nil {
		panic(fmt.Sprintf("slot %d has table %d, which is not there", slot, t))
	}
	v := c.at(c.classOf(w), point)
	if c.HasAddresses {
		classes, best := c.AddressClasses, -1
		for p, cs := range c.Blocks {
			if p.Contains(addr) && p.Bits() > best {
				classes, best = cs, p.Bits()
			}
		}
		x := c.at(classes[w.Scope], point)
		v = min(v>>16, x>>16)<<16 | min(v&0xFFFF, x&0xFFFF)
	}
	for _, n := range []uint32{v >> 16, v & 0xFFFF} {
		if n == noAdmin && n == v>>16 || n == noRest {
			continue
		}
		if a := c.Rules[n-1].Action; a != ActionPass {
			return a != ActionDeny
		}
	}
	return c.DefaultAllow || c.HostAllow && w.Known && w.Kind == KindHost
}
