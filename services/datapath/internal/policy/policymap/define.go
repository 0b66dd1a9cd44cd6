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

// Values for "no rule", and the depth of trees.
const (
	noAdminRule = 0x7fff
	noOtherRule = 0xffff
	treeDepth   = 3
)

// DefineTable writes a table under an unused ID and returns the ID. It checks the capacity before
// it writes: it returns a NoCapacityError if the table does not fit. After any error no part of the
// table remains. The table evaluates no packets before SetPolicy refers to it.
//
// Tables with equal prefixes share one set of them.
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
		// retired tables may free enough space
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

// drain waits for a grace period with the lock held and frees retired tables.
func (m *Maps) drain() error {
	rs := m.store.beginDrain()
	err := pin.GracePeriod(context.Background())
	return errors.Join(err, m.store.endDrain(rs, err == nil))
}

// headroom returns the spare capacity that a table gets, so that it can grow in place.
func headroom(n, least int) int { return max(least, n/4) }

// define plans and writes a table, and undoes both if a write fails.
func (s *tableStore) define(c *nodetable.Content, roots []uint32, nodes []portNode) (_ nodetable.ID, err error) {
	lt, fresh, err := s.plan(c, roots, nodes)
	if err != nil {
		return 0, err
	}
	if err := s.write(lt, fresh); err != nil {
		if undo := s.erase(lt, fresh); undo != nil {
			// If a part could not be undone, its space stays reserved.
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

// plan reserves everything that a table needs. fresh reports that its address set is new.
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
		fitsRange(bpf.MapsMapSlRule, &s.ruleRanges, len(c.Rules)),
		fitsRange(bpf.MapsMapSlPorts, &s.nodeRanges, len(nodes)),
		fitsRange(bpf.MapsMapSlClass, &s.classRanges, classHead+len(roots)),
		fits(bpf.MapsMapSlPeer, len(c.Peers), len(c.Peers), max(s.rowLimit-reserve(s.rowLimit)-s.rows, 0), s.rowLimit),
	)
	if fresh {
		err = errors.Join(err, s.fitsSet(count, reserve(s.prefixLimit)))
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
	lt.ruleSpan, _ = s.ruleRanges.take(len(c.Rules))
	lt.nodeSpan = takeWithHeadroom(&s.nodeRanges, len(nodes), headroom(len(nodes), 1))
	lt.classSpan = takeWithHeadroom(&s.classRanges, classHead+len(roots), headroom(len(roots), 2))
	s.rows += len(lt.peers)
	lt.fillHeader()
	return lt, fresh, nil
}

// takeWithHeadroom takes n elements, and up to more spare ones if they are free and the reserve is
// kept. The caller checks that n are free.
func takeWithHeadroom(r *rangeAllocator, n, more int) span {
	more = max(0, min(more, quarter(r.size)-n, r.available()-reserve(r.size)-n))
	if s, ok := r.take(n + more); ok {
		return s
	}
	s, _ := r.take(n)
	return s
}

// unplan frees what plan reserved.
func (s *tableStore) unplan(lt *liveTable, fresh bool) {
	s.ids.give(int(lt.id))
	s.ruleRanges.give(lt.ruleSpan)
	s.nodeRanges.give(lt.nodeSpan)
	s.classRanges.give(lt.classSpan)
	s.rows -= len(lt.peers)
	if fresh {
		s.forget(lt.addresses)
	}
}

// write writes a table to the maps, the key last: a table without a key was not completed.
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

// erase removes a table that no endpoint refers to from the maps, the key first. It continues after
// errors.
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

// RetireTables retires tables that no endpoint uses. If an endpoint still refers to one, it returns
// ErrInUse and retires none. A missing table is not an error. The tables' space and IDs are free
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

// retire removes a table from the store. It clears the table's key at once, so that a process that
// starts before the grace period has passed frees the table, too.
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

// Barrier waits until every program run that started before the call has ended (8 to 16 ms), then
// frees the policy tables and identity classes that were retired before it. DefineTable calls it
// when it runs out of space.
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
