// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Limits of the numbers of rules.
const (
	noAdminRule = 0x7fff
	noOtherRule = 0xffff
	treeDepth   = 3
)

// DefineTable writes a table under an unused number and returns that. Room is
// checked before anything is written: a table that does not fit is a
// NoCapacityError, and after any error nothing of it remains. No packet is evaluated
// by the table before SetPolicy names it.
//
// Prefixes that another table has too are stored once.
func (m *Maps) DefineTable(c nodetable.Content) (nodetable.ID, error) {
	if err := c.Validate(); err != nil {
		return 0, fmt.Errorf("%w: %w", pin.ErrInvalid, err)
	}
	if err := m.gate.Lock(); err != nil {
		return 0, err
	}
	defer m.gate.Unlock()
	trees := newTreeBuilder(nil)
	roots := trees.addAll(c.Classes)
	t, err := m.store.define(&c, roots, trees.nodes)
	var full *nodetable.NoCapacityError
	if errors.As(err, &full) && len(m.store.draining) > 0 {
		// what was retired may make the room
		if err := m.drain(); err != nil {
			return 0, err
		}
		t, err = m.store.define(&c, roots, trees.nodes)
	}
	if err != nil {
		return 0, fmt.Errorf("define a table: %w", err)
	}
	return t, nil
}

// drain waits for a grace period with the lock held and frees what it can.
func (m *Maps) drain() error {
	rs := m.store.beginDrain()
	err := pin.GracePeriod(context.Background())
	return errors.Join(err, m.store.endDrain(rs, err == nil))
}

// headroom is what a table gets beyond its need, so that it may grow in place.
func headroom(n, least int) int { return max(least, n/4) }

// define plans, writes, and takes everything back if a write fails.
func (s *tableStore) define(c *nodetable.Content, roots []uint32, nodes []portNode) (_ nodetable.ID, err error) {
	lt, fresh, err := s.plan(c, roots, nodes)
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
func (s *tableStore) plan(c *nodetable.Content, roots []uint32, nodes []portNode) (_ *liveTable, fresh bool, err error) {
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
		return nil, false, &nodetable.NoCapacityError{Map: bpf.MapsMapSlTable, Need: 1, Limit: len(s.ids.used) - firstTable}
	}
	err = errors.Join(
		fitsRange(bpf.MapsMapSlRule, &s.ruleRoom, len(c.Rules)),
		fitsRange(bpf.MapsMapSlPorts, &s.nodeRoom, len(nodes)),
		fitsRange(bpf.MapsMapSlClass, &s.classRoom, classHead+len(roots)),
		fits(bpf.MapsMapSlPeer, len(c.Peers), len(c.Peers), max(s.rowRoom-reserve(s.rowRoom)-s.rows, 0), s.rowRoom),
	)
	if fresh {
		err = errors.Join(err, s.fitsSet(count, reserve(s.prefixRoom)))
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
		id:        nodetable.ID(id),
		hash:      c.Hash,
		rules:     slices.Clone(c.Rules),
		classes:   roots,
		nodes:     nodes,
		peers:     maps.Clone(c.Peers),
		addresses: set,
	}
	if lt.peers == nil {
		lt.peers = map[nodetable.IdentityClass]uint16{}
	}
	lt.header.Flags, lt.header.DefClass, lt.header.AddrDef = flags(c), c.DefaultClasses, c.AddressClasses
	lt.ruleSpan, _ = s.ruleRoom.take(len(c.Rules))
	lt.nodeSpan = takeWithHeadroom(&s.nodeRoom, len(nodes), headroom(len(nodes), 1))
	lt.classSpan = takeWithHeadroom(&s.classRoom, classHead+len(roots), headroom(len(roots), 2))
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
func (m *Maps) RetireTables(ts ...nodetable.ID) error {
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	for _, t := range ts {
		if t < firstTable {
			return fmt.Errorf("%w: table %d is not made from a policy", pin.ErrInvalid, t)
		}
	}
	live := slices.DeleteFunc(slices.Clone(ts), func(t nodetable.ID) bool { return m.store.tables[t] == nil })
	if err := m.endpoints.Withdraw(live...); err != nil {
		return fmt.Errorf("retire: %w", err)
	}
	for i, t := range live {
		if err := m.store.retire(t, func() { m.endpoints.Release(t) }); err != nil {
			for _, t := range live[i:] {
				m.endpoints.Release(t)
			}
			return fmt.Errorf("retire table %d: %w", t, err)
		}
	}
	return nil
}

// retire forgets a table. Its key goes at once, so that a process that starts
// before the grace period has passed frees it too.
func (s *tableStore) retire(t nodetable.ID, released func()) error {
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

// Barrier waits until every program run that started before the call has
// ended (8 to 16 ms), then frees what was retired before it: policy tables and
// identity classes. One call covers any number of them. Nothing has to call it:
// DefineTable does when it runs out of room.
func (m *Maps) Barrier(ctx context.Context) error {
	if err := m.gate.Lock(); err != nil {
		return err
	}
	tables := m.store.beginDrain()
	m.gate.Unlock()

	err := pin.GracePeriod(ctx)

	if lerr := m.gate.Lock(); lerr != nil {
		// the next process frees the tables
		return errors.Join(err, lerr)
	}
	defer m.gate.Unlock()
	return errors.Join(err, m.store.endDrain(tables, err == nil))
}
