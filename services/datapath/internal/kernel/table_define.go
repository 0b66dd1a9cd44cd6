// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Limits of the numbers of rules.
const (
	maxRules      = 65534
	maxAdminRules = 32766
	noAdminRule   = 0x7fff
	noOtherRule   = 0xffff
	treeDepth     = 3
)

// DefineTable writes a table under an unused number and returns that. Room is
// checked before anything is written: a table that does not fit is a
// NoCapacityError, and after any error nothing of it remains. No packet is judged
// by the table before SetPolicy names it.
//
// Blocks that another table has too are stored once.
func (k *Kernel) DefineTable(c policytable.Content) (policytable.ID, error) {
	if err := validate(&c); err != nil {
		return 0, err
	}
	if err := k.lock(); err != nil {
		return 0, err
	}
	defer k.mu.Unlock()
	t, err := k.tables.define(&c)
	var full *policytable.NoCapacityError
	if errors.As(err, &full) && len(k.tables.draining) > 0 {
		// what was retired may make the room
		if err := k.drain(); err != nil {
			return 0, err
		}
		t, err = k.tables.define(&c)
	}
	if err != nil {
		return 0, fmt.Errorf("define a table: %w", err)
	}
	return t, nil
}

// drain waits for a grace period with the lock held and frees what it can.
func (k *Kernel) drain() error {
	rs := k.tables.beginDrain()
	err := pin.GracePeriod(context.Background())
	return errors.Join(err, k.tables.endDrain(rs, err == nil))
}

// headroom is what a table gets beyond its need, so that it may grow in place.
func headroom(n, least int) int { return max(least, n/4) }

// define plans, writes, and takes everything back if a write fails.
func (s *tableStore) define(c *policytable.Content) (_ policytable.ID, err error) {
	lt, fresh, err := s.plan(c)
	if err != nil {
		return 0, err
	}
	if err := s.write(lt, fresh); err != nil {
		if undo := s.erase(lt, fresh); undo != nil {
			// what could not be taken back stays reserved
			return 0, errors.Join(err, undo)
		}
		s.unplan(lt, fresh)
		return 0, err
	}
	s.tables[lt.id] = lt
	if lt.addresses != nil {
		lt.addresses.refs++
	}
	return lt.id, nil
}

// plan reserves everything that a table needs. fresh says that its address set
// is new.
func (s *tableStore) plan(c *policytable.Content) (_ *liveTable, fresh bool, err error) {
	var count [2]int
	for p := range c.Prefixes {
		count[family(p)]++
	}
	var set *addressSet
	if len(c.Prefixes) > 0 {
		set = s.equalSet(c.Prefixes)
		fresh = set == nil
	}

	if s.ids.free() == 0 {
		return nil, false, &policytable.NoCapacityError{Map: bpf.MapsMapSlTable, Need: 1, Limit: len(s.ids.used) - firstTable}
	}
	err = errors.Join(
		fitsRange(bpf.MapsMapSlRule, &s.ruleRoom, len(c.Rules)),
		fitsRange(bpf.MapsMapSlPorts, &s.nodeRoom, len(c.Nodes)),
		fitsRange(bpf.MapsMapSlClass, &s.classRoom, classHead+len(c.Classes)),
		fits(bpf.MapsMapSlPeer, len(c.Peers), len(c.Peers), max(s.rowRoom-reserve(s.rowRoom)-s.rows, 0), s.rowRoom),
	)
	if fresh {
		err = errors.Join(err, s.fitsSet(count, reserve(s.blockRoom)))
	}
	if err != nil {
		return nil, false, err
	}
	if fresh {
		if set, err = s.newSet(maps.Clone(c.Prefixes)); err != nil {
			return nil, false, err
		}
		s.keep(set)
	}

	id, _ := s.ids.take()
	lt := &liveTable{
		id:        policytable.ID(id),
		hash:      c.Hash,
		rules:     slices.Clone(c.Rules),
		classes:   slices.Clone(c.Classes),
		nodes:     slices.Clone(c.Nodes),
		peers:     maps.Clone(c.Peers),
		addresses: set,
	}
	if lt.peers == nil {
		lt.peers = map[policytable.IdentityClass]uint16{}
	}
	lt.header.Flags, lt.header.DefClass, lt.header.AddrDef = flags(c), c.DefaultClasses, c.AddressClasses
	lt.ruleSpan, _ = s.ruleRoom.take(len(c.Rules))
	lt.nodeSpan = takeWithHeadroom(&s.nodeRoom, len(c.Nodes), headroom(len(c.Nodes), 1))
	lt.classSpan = takeWithHeadroom(&s.classRoom, classHead+len(c.Classes), headroom(len(c.Classes), 2))
	s.rows += len(lt.peers)
	lt.fillHeader()
	return lt, fresh, nil
}

// takeWithHeadroom takes n elements, which are there, and some more if they
// are too and the reserve stays.
func takeWithHeadroom(r *rangeRoom, n, more int) span {
	more = max(0, min(more, quarter(r.size)-n, r.available()-reserve(r.size)-n))
	if s, ok := r.take(n + more); ok {
		return s
	}
	s, _ := r.take(n)
	return s
}

// unplan gives back what plan took.
func (s *tableStore) unplan(lt *liveTable, fresh bool) {
	s.ids.give(int(lt.id))
	s.ruleRoom.give(lt.ruleSpan)
	s.nodeRoom.give(lt.nodeSpan)
	s.classRoom.give(lt.classSpan)
	s.rows -= len(lt.peers)
	if fresh {
		s.forget(lt.addresses)
	}
}

// write puts a table into the maps, the key last: a table without a key is
// what a killed process left.
func (s *tableStore) write(lt *liveTable, fresh bool) error {
	if err := writeArray(&s.tableMaps, s.tableMaps.rules, bpf.MapsMapSlRule, lt.ruleSpan.base, ruleValues(lt.rules)); err != nil {
		return err
	}
	if err := s.writeNodes(lt.nodeSpan.base, nodeValues(lt.nodes, lt.nodeSpan.base)); err != nil {
		return err
	}
	if err := s.storeClasses(lt.classSpan.base, lt.classValues()); err != nil {
		return err
	}
	if fresh {
		if err := s.writeSet(lt.addresses); err != nil {
			return err
		}
	}
	for nc, class := range lt.peers {
		if err := s.insertPeer(lt.header.PeerSet, nc, class); err != nil {
			return err
		}
	}
	if err := s.storeHeader(lt.id, lt.header); err != nil {
		return err
	}
	return s.storeTableKey(lt.id, lt.hash)
}

func (s *tableStore) writeNodes(base int, vs []bpf.MapsSlPortNode) error {
	return writeArray(&s.tableMaps, s.ports, bpf.MapsMapSlPorts, base, vs)
}

// erase takes a table that no word names out of the maps, the key first. All
// of it is tried.
func (s *tableStore) erase(lt *liveTable, fresh bool) error {
	errs := []error{
		s.storeTableKey(lt.id, [32]byte{}),
		s.storeHeader(lt.id, bpf.MapsSlTable{}),
		s.eraseRows(lt),
	}
	if fresh {
		errs = append(errs, s.clearSet(lt.addresses))
	}
	errs = append(errs,
		s.clearClasses(lt.classSpan),
		clearArray[bpf.MapsSlPortNode](&s.tableMaps, s.ports, bpf.MapsMapSlPorts, lt.nodeSpan),
		clearArray[bpf.MapsSlRule](&s.tableMaps, s.tableMaps.rules, bpf.MapsMapSlRule, lt.ruleSpan))
	return errors.Join(errs...)
}

func (s *tableStore) eraseRows(lt *liveTable) error {
	for nc := range lt.peers {
		if err := s.deletePeer(lt.header.PeerSet, uint32(nc)); err != nil {
			return err
		}
	}
	return nil
}

// RetireTables ends tables that no endpoint uses; one that an endpoint's word
// still names is ErrInUse, and then none is retired. A table that does not
// exist is not an error. What the tables took, their numbers too, is free
// after the next Barrier.
func (k *Kernel) RetireTables(ts ...policytable.ID) error {
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	for _, t := range ts {
		if t < firstTable {
			return fmt.Errorf("%w: table %d is not made from a policy", pin.ErrInvalid, t)
		}
	}
	live := slices.DeleteFunc(slices.Clone(ts), func(t policytable.ID) bool { return k.tables.tables[t] == nil })
	if err := k.Endpoints.Withdraw(live...); err != nil {
		return fmt.Errorf("retire: %w", err)
	}
	for i, t := range live {
		if err := k.tables.retire(t, func() { k.Endpoints.Release(t) }); err != nil {
			for _, t := range live[i:] {
				k.Endpoints.Release(t)
			}
			return fmt.Errorf("retire table %d: %w", t, err)
		}
	}
	return nil
}

// retire forgets a table. Its key goes at once, so that a process that starts
// before the grace period has passed frees it too.
func (s *tableStore) retire(t policytable.ID, released func()) error {
	lt := s.tables[t]
	if lt == nil {
		return nil
	}
	if err := s.storeTableKey(t, [32]byte{}); err != nil {
		return err
	}
	delete(s.tables, t)
	s.draining = append(s.draining, &retired{what: fmt.Sprintf("table %d", t), lt: lt, free: func() error {
		if err := errors.Join(s.erase(lt, false), s.unref(lt.addresses)); err != nil {
			return err
		}
		released()
		s.unplan(lt, false)
		return nil
	}})
	return nil
}

// validate checks everything that a program relies on.
func validate(c *policytable.Content) error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{pin.ErrInvalid}, args...)...))
	}
	if c.Hash == [32]byte{} {
		bad("Hash is zero")
	}
	if len(c.Rules) > maxRules {
		bad("Rules: %d, at most %d", len(c.Rules), maxRules)
	}
	for i, r := range c.Rules {
		if r.Action > 3 || r.Tier > 3 {
			bad("Rules: number %d has action %d and tier %d, at most 3 each", i+1, r.Action, r.Tier)
		}
	}
	if len(c.Classes) == 0 {
		bad("Classes is empty")
	}
	inRange := func(what string, class uint16) {
		if int(class) >= len(c.Classes) {
			bad("%s: class %d of %d", what, class, len(c.Classes))
		}
	}
	for _, class := range c.DefaultClasses {
		inRange("DefaultClasses", class)
	}
	for _, class := range c.AddressClasses {
		inRange("AddressClasses", class)
	}
	for nc, class := range c.Peers {
		inRange("Peers", class)
		if nc == 0 || nc > policytable.MaxIdentityClass {
			bad("Peers: identity class %d is not between 1 and %d", nc, policytable.MaxIdentityClass)
		}
	}
	for p, classes := range c.Prefixes {
		if ipmap.CheckPrefix(p) != nil {
			bad("Prefixes: %v is not masked", p)
		}
		for _, class := range classes {
			inRange("Prefixes", class)
		}
	}
	errs = append(errs, checkTrees(c.Classes, c.Nodes, len(c.Rules)))
	return errors.Join(errs...)
}

// checkTrees checks that every point leads to a value through each root, in at
// most treeDepth steps, and that the values name rules that there are.
func checkTrees(roots []uint32, nodes []policytable.PortNode, rules int) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{pin.ErrInvalid}, args...)...)
	}
	heights := make([]uint8, len(nodes)) // 0: not seen, 1: being seen
	var height func(i uint32) (uint8, error)
	height = func(i uint32) (uint8, error) {
		if i >= uint32(len(nodes)) {
			return 0, bad("Nodes: index %d of %d", i, len(nodes))
		}
		if heights[i] == 1 {
			return 0, bad("Nodes: node %d is below itself", i)
		}
		if heights[i] != 0 {
			return heights[i], nil
		}
		heights[i] = 1
		n := &nodes[i]
		top := uint8(1)
		if n.High[policytable.Fanout-1] == 0 {
			return 0, bad("Nodes: node %d has no entry", i)
		}
		for j, v := range n.Value {
			if j > 0 && n.High[j] < n.High[j-1] {
				return 0, bad("Nodes: node %d does not ascend", i)
			}
			if v&childBit == 0 {
				if !names(uint16(v>>16), noAdminRule, min(rules, maxAdminRules)) || !names(uint16(v), noOtherRule, rules) {
					return 0, bad("Nodes: node %d names a rule that is not there: %#x of %d", i, v, rules)
				}
				continue
			}
			below, err := height(v &^ childBit)
			if err != nil {
				return 0, err
			}
			if nodes[v&^childBit].High[policytable.Fanout-1] < n.High[j] {
				return 0, bad("Nodes: node %d does not cover its place in node %d", v&^childBit, i)
			}
			top = max(top, below)
		}
		heights[i] = top + 1
		if top > treeDepth {
			return 0, bad("Nodes: node %d is a tree of more than %d steps", i, treeDepth)
		}
		return heights[i], nil
	}
	for class, root := range roots {
		if _, err := height(root); err != nil {
			return fmt.Errorf("class %d: %w", class, err)
		}
		if nodes[root].High[policytable.Fanout-1] != ^uint32(0) {
			return bad("Classes: the list of class %d ends at %#x", class, nodes[root].High[policytable.Fanout-1])
		}
	}
	for i := range nodes {
		if _, err := height(uint32(i)); err != nil {
			return err
		}
	}
	return nil
}

// names reports whether a slot's number is "none" or that of a rule.
func names(number, none uint16, rules int) bool {
	return number == none || number >= 1 && int(number) <= rules
}

// Barrier waits until every program run that started before the call has
// ended (8 to 16 ms), then frees what was retired before it: policy tables and
// identity classes. One call covers any number of them. Nothing has to call it:
// DefineTable does when it runs out of room.
func (k *Kernel) Barrier(ctx context.Context) error {
	if err := k.lock(); err != nil {
		return err
	}
	tables := k.tables.beginDrain()
	k.mu.Unlock()

	err := pin.GracePeriod(ctx)

	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		// the next process frees the tables
		return errors.Join(err, pin.ErrClosed)
	}
	return errors.Join(err, k.tables.endDrain(tables, err == nil))
}
