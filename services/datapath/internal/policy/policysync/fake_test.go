// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// fakeKernel has maps with limits, and rejects what the real one rejects. One call is one write,
// except for SetIdentities, in which each entry is one.
type fakeKernel struct {
	tables     map[nodetable.ID]*nodetable.Content
	next       nodetable.ID
	numbers    map[policytable.ClassKey]nodetable.IdentityClass
	entries    map[uint32]nodetable.Identity
	endpoints  map[uint16]*nodetable.Binding
	epoch      uint32
	retired    map[nodetable.ID]bool
	auditError error // of SetAudit
	audit      map[uint16]bool

	maxTables, maxRows, maxClasses int
	maxTableRows                   int            // of one table
	sizes                          nodetable.Size // of the divided maps
	maxPrefixes                    int            // of a table, for SetPrefix
	maxNumbers                     int            // of identity classes; 0: any
	writes                         int
	bumps                          int
	failAt                         int // number of the first failing write; all later ones fail, too; 0: none
	after                          func(what string)
	barriers                       int
}

var errKilled = errors.New("killed by the test")

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		tables: map[nodetable.ID]*nodetable.Content{}, next: nodetable.First, numbers: map[policytable.ClassKey]nodetable.IdentityClass{}, entries: map[uint32]nodetable.Identity{},
		endpoints: map[uint16]*nodetable.Binding{}, retired: map[nodetable.ID]bool{}, audit: map[uint16]bool{},
		maxTables: 100, maxRows: 1000, maxTableRows: 1000,
		sizes:      nodetable.Size{1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20},
		maxClasses: 1000, maxPrefixes: 1000,
	}
}

// write counts a write that is about to be made.
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

func (k *fakeKernel) TableSize(t nodetable.ID) (size nodetable.Size) {
	c := k.tables[t]
	if c == nil {
		return size
	}
	return k.SizeOf(*c)
}

func (k *fakeKernel) SizeOf(c nodetable.Content) (size nodetable.Size) {
	size = nodetable.Size{
		nodetable.LimitTables: 1, nodetable.LimitRules: len(c.Rules), nodetable.LimitPortNodes: countRanges(c.Classes),
		nodetable.LimitPeerClasses: len(c.Classes), nodetable.LimitPeerRows: len(c.Peers),
	}
	for p := range c.Prefixes {
		size[prefixLimit(p.Addr().Is4())]++
	}
	return size
}

func (k *fakeKernel) MapSizes() nodetable.Size { return k.sizes }

func (k *fakeKernel) endpoint(slot uint16, identity uint32, addr string) {
	k.epoch++
	k.endpoints[slot] = &nodetable.Binding{
		Slot: slot, Identity: identity, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Egress: nodetable.Pending, Ingress: nodetable.Pending, Epoch: k.epoch,
	}
}

func (k *fakeKernel) rows() (n int) {
	for _, c := range k.tables {
		n += len(c.Peers)
	}
	return n
}

func (k *fakeKernel) DefineTable(c nodetable.Content) (nodetable.ID, error) {
	switch {
	case len(k.tables) >= k.maxTables:
		return 0, fmt.Errorf("map tables: 1 needed, 0 free: %w", nodetable.ErrNoCapacity)
	case k.rows()+len(c.Peers) > k.maxRows || len(c.Peers) > k.maxTableRows:
		return 0, &nodetable.NoCapacityError{
			Map: nodetable.PeerMap, Need: len(c.Peers), Free: k.maxRows - k.rows(), Limit: k.maxTableRows,
		}
	}
	if err := c.Validate(); err != nil {
		return 0, err
	}
	if err := k.write(); err != nil {
		return 0, err
	}
	d := c.Clone()
	id := k.next
	k.next++
	k.tables[id] = &d
	k.done("define table %d", id)
	return id, nil
}

func (k *fakeKernel) table(t nodetable.ID) (*nodetable.Content, error) {
	c := k.tables[t]
	if c == nil {
		return nil, fmt.Errorf("there is no table %d", t)
	}
	return c, nil
}

func (k *fakeKernel) GrowTable(t nodetable.ID, classes []policytable.Ranges) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if len(c.Classes)+len(classes) > k.maxClasses {
		return fmt.Errorf("map classes: %d needed: %w", len(classes), nodetable.ErrNoCapacity)
	}
	d := *c
	d.Classes = slices.Concat(c.Classes, classes)
	if err := d.Validate(); err != nil {
		return err
	}
	if err := k.write(); err != nil {
		return err
	}
	*c = d
	k.done("grow table %d", t)
	return nil
}

func (k *fakeKernel) SetPeer(t nodetable.ID, nc nodetable.IdentityClass, class uint16) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if _, ok := c.Peers[nc]; ok || int(class) >= len(c.Classes) || nc == 0 {
		return fmt.Errorf("row %d -> %d of table %d: there is %v", nc, class, t, c.Peers)
	}
	if k.rows() >= k.maxRows || len(c.Peers) >= k.maxTableRows {
		return fmt.Errorf("map rows: 1 needed, 0 free: %w", nodetable.ErrNoCapacity)
	}
	if err := k.write(); err != nil {
		return err
	}
	c.Peers[nc] = class
	k.done("table %d: row %d -> %d", t, nc, class)
	return nil
}

func (k *fakeKernel) DeletePeer(t nodetable.ID, nc nodetable.IdentityClass) error {
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

func (k *fakeKernel) SetDefaults(t nodetable.ID, classes [identity.Kinds]policytable.Class) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	for kind, class := range classes { // one store each
		if c.DefaultClasses[kind] == class {
			continue
		}
		if err := k.write(); err != nil {
			return err
		}
		c.DefaultClasses[kind] = class
		k.done("table %d: kind %d -> %d", t, kind, class)
	}
	return c.Validate()
}

func (k *fakeKernel) SetPrefix(t nodetable.ID, p netip.Prefix, classes policytable.PrefixClasses) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if err := c.ValidatePrefix(p, classes); err != nil {
		return err
	}
	if _, ok := c.Prefixes[p]; !ok && len(c.Prefixes) >= k.maxPrefixes {
		return fmt.Errorf("map prefixes: 1 needed, 0 free: %w", nodetable.ErrNoCapacity)
	}
	if err := k.write(); err != nil {
		return err
	}
	c.Prefixes[p] = classes
	k.done("table %d: prefix %v -> %v", t, p, classes)
	return nil
}

func (k *fakeKernel) DeletePrefix(t nodetable.ID, p netip.Prefix) error {
	c, err := k.table(t)
	if err != nil {
		return err
	}
	if err := k.write(); err != nil {
		return err
	}
	delete(c.Prefixes, p)
	k.done("table %d: no prefix %v", t, p)
	return nil
}

func (k *fakeKernel) RetireTables(ts ...nodetable.ID) error {
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

func (k *fakeKernel) Tables() ([]nodetable.Info, error) {
	var out []nodetable.Info
	for _, t := range slices.Sorted(maps.Keys(k.tables)) {
		out = append(out, nodetable.Info{ID: t, Hash: k.tables[t].Hash})
	}
	return out, nil
}

func (k *fakeKernel) TableContent(t nodetable.ID) (nodetable.Content, error) {
	c, err := k.table(t)
	if err != nil {
		return nodetable.Content{}, err
	}
	return c.Clone(), nil
}

func (k *fakeKernel) DefineIdentityClass(key policytable.ClassKey) (nodetable.IdentityClass, error) {
	if nc, ok := k.numbers[key]; ok {
		return nc, nil
	}
	if k.maxNumbers > 0 && len(k.numbers) >= k.maxNumbers {
		return 0, fmt.Errorf("map identity classes: 1 needed, 0 free: %w", nodetable.ErrNoCapacity)
	}
	if err := k.write(); err != nil {
		return 0, err
	}
	for nc := nodetable.IdentityClass(1); ; nc++ {
		taken := false
		for _, n := range k.numbers {
			taken = taken || n == nc
		}
		if !taken {
			k.numbers[key] = nc
			k.done("identity class %d", nc)
			return nc, nil
		}
	}
}

func (k *fakeKernel) IdentityClasses() map[policytable.ClassKey]nodetable.IdentityClass {
	return maps.Clone(k.numbers)
}

func (k *fakeKernel) RetireIdentityClasses(ncs ...nodetable.IdentityClass) error {
	for _, nc := range ncs {
		for t, c := range k.tables {
			if _, ok := c.Peers[nc]; ok {
				return fmt.Errorf("identity class %d has a row in table %d", nc, t)
			}
		}
		for id, w := range k.entries {
			if w.Class == nc {
				return fmt.Errorf("identity %d has identity class %d", id, nc)
			}
		}
	}
	if err := k.write(); err != nil {
		return err
	}
	maps.DeleteFunc(k.numbers, func(_ policytable.ClassKey, nc nodetable.IdentityClass) bool { return slices.Contains(ncs, nc) })
	k.done("retire identity classes %v", ncs)
	return nil
}

func (k *fakeKernel) SetIdentities(ws map[uint32]nodetable.Identity) error {
	for id, w := range ws { // in random order, as the real one may
		if err := k.write(); err != nil {
			return err
		}
		if w == (nodetable.Identity{}) {
			delete(k.entries, id)
		} else {
			k.entries[id] = w
		}
		k.done("identity %d is %+v", id, w)
	}
	return nil
}

func (k *fakeKernel) Identities() (map[uint32]nodetable.Identity, error) {
	return maps.Clone(k.entries), nil
}

func (k *fakeKernel) SetPolicy(slot uint16, egress, ingress nodetable.ID) (uint32, error) {
	for _, t := range []nodetable.ID{egress, ingress} {
		if t >= nodetable.First && k.tables[t] == nil {
			return 0, fmt.Errorf("there is no table %d", t)
		}
	}
	if err := k.write(); err != nil {
		return 0, err
	}
	k.epoch++
	e := k.endpoints[slot]
	e.Egress, e.Ingress, e.Epoch = egress, ingress, k.epoch
	k.done("slot %d: egress %d ingress %d", slot, egress, ingress)
	return k.epoch, nil
}

func (k *fakeKernel) BumpEpochs(slots ...uint16) error {
	if k.failAt > 0 && k.writes+1 >= k.failAt {
		return errKilled
	}
	k.bumps++
	for n, e := range k.endpoints {
		if len(slots) == 0 || slices.Contains(slots, n) {
			k.epoch++
			e.Epoch = k.epoch
		}
	}
	return nil
}

func (k *fakeKernel) SetAudit(_ context.Context, on bool, slots ...uint16) error {
	if k.auditError != nil {
		return k.auditError
	}
	for _, s := range slots {
		k.audit[s] = on
	}
	return nil
}

func (k *fakeKernel) Bindings() ([]nodetable.Binding, error) {
	var out []nodetable.Binding
	for _, e := range k.endpoints {
		out = append(out, *e)
	}
	return out, nil
}

func (k *fakeKernel) Barrier(context.Context) error {
	k.barriers++
	return nil
}

// allows evaluates a new connection as the programs do, for the identity side and one address.
func (k *fakeKernel) allows(slot uint16, d policytable.Direction, peer uint32, addr netip.Addr, point uint32) bool {
	e := k.endpoints[slot]
	t := e.Egress
	if d == policytable.Ingress {
		t = e.Ingress
	}
	w := k.entries[peer]
	switch t {
	case nodetable.Deny:
		return false
	case nodetable.Allow:
		return true
	case nodetable.Pending:
		return d == policytable.Ingress && w.Kind == identity.KindHost && w.Known
	}
	c := k.tables[t]
	if c == nil {
		panic(fmt.Sprintf("slot %d has table %d, which does not exist", slot, t))
	}
	v := c.Classes[c.ClassOf(w)].At(point)
	best := func(x, y uint16) uint16 {
		if x == 0 || y != 0 && y < x {
			return y
		}
		return x
	}
	if c.HasAddresses {
		classes, longest := c.AddressClasses, -1
		for p, cs := range c.Prefixes {
			if p.Contains(addr) && p.Bits() > longest {
				classes, longest = cs, p.Bits()
			}
		}
		x := c.Classes[classes[w.Scope]].At(point)
		v.Admin, v.Rest = best(v.Admin, x.Admin), best(v.Rest, x.Rest)
	}
	for _, n := range []uint16{v.Admin, v.Rest} {
		if n == 0 {
			continue
		}
		if a := c.Rules[n-1].Action; a != policytable.Pass {
			return a != policytable.Deny
		}
	}
	return c.DefaultAllow || c.HostAllow && w.Known && w.Kind == identity.KindHost
}
