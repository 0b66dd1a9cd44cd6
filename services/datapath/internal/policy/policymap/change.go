// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// change runs f on a table with the lock held.
func (m *Maps) change(t nodetable.ID, f func(*tableStore, *liveTable) error) error {
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	lt, err := m.store.live(t)
	if err != nil {
		return err
	}
	if err := f(m.store, lt); err != nil {
		return fmt.Errorf("table %d: %w", t, err)
	}
	return nil
}

// GrowTable appends classes to a table. Its verdicts do not change, because no row refers to the new classes yet. After
// an error the table is unchanged.
//
// A table without spare capacity is copied to a larger range and moved by one store, which takes a
// grace period (8 to 16 ms).
func (m *Maps) GrowTable(t nodetable.ID, classes []policytable.Ranges) error {
	return m.change(t, func(s *tableStore, lt *liveTable) error {
		added := nodetable.Content{Table: policytable.Table{Rules: lt.rules, Classes: classes}}
		if err := added.ValidateClasses(0); err != nil {
			return fmt.Errorf("%w: %w", pin.ErrInvalid, err)
		}
		trees := newTreeBuilder(lt.nodes)
		roots := slices.Concat(lt.classes, trees.addAll(classes))
		if len(trees.nodes) <= lt.nodeCap() && len(roots) <= lt.classCap() {
			return s.growInPlace(lt, trees.nodes, roots)
		}
		return s.growByMove(lt, trees.nodes, roots)
	})
}

func (s *tableStore) growInPlace(lt *liveTable, nodes []portNode, classes []uint32) error {
	was := [2]int{len(lt.nodes), len(lt.classes)}
	base := lt.nodeSpan.base
	err := s.writeNodes(base+was[0], nodeValues(nodes, base)[was[0]:])
	// The last class first: the number of classes of a table is counted up to the first gap.
	for i := len(classes) - 1; i >= was[1] && err == nil; i-- {
		err = s.storeWord(bpf.MapsMapSlClass, s.classMem, lt.classSpan.base+classHead+i, classes[i]+uint32(base))
	}
	if err != nil {
		for i := was[1]; i < len(classes); i++ {
			err = errors.Join(err, s.storeWord(bpf.MapsMapSlClass, s.classMem, lt.classSpan.base+classHead+i, noRoot))
		}
		return errors.Join(err, s.clearNodes(span{base + was[0], len(nodes) - was[0]}))
	}
	lt.nodes, lt.classes = nodes, classes
	return nil
}

func (s *tableStore) clearNodes(sp span) error {
	return clearArray[bpf.MapsSlPortNode](&s.tableMaps, s.ports, bpf.MapsMapSlPorts, sp)
}

// growByMove writes the table's nodes and classes to a new range and points the header to it. The
// old range is freed once no program uses it; only then may programs see a larger number of classes
// than the old range has.
func (s *tableStore) growByMove(lt *liveTable, nodes []portNode, classes []uint32) error {
	moved := *lt
	moved.nodes, moved.classes = nodes, classes
	classNeed, classTotal := classHead+len(classes), classHead+len(classes)
	if err := errors.Join(
		fits(bpf.MapsMapSlPorts, len(nodes), len(nodes), s.nodeRanges.largest(), s.nodeRanges.size),
		fits(bpf.MapsMapSlClass, classNeed, classTotal, s.classRanges.largest(), s.classRanges.size),
	); err != nil {
		return err
	}
	moved.nodeSpan = takeWithHeadroom(&s.nodeRanges, len(nodes), headroom(len(nodes), 1))
	moved.classSpan = takeWithHeadroom(&s.classRanges, classNeed, headroom(len(classes), 2))
	moved.fillHeader()

	err := s.writeNodes(moved.nodeSpan.base, nodeValues(nodes, moved.nodeSpan.base))
	if err == nil {
		err = s.storeClasses(moved.classSpan.base, moved.classValues())
	}
	if err == nil {
		err = s.storeHeaderWord(lt.id, moved.header, basesWord)
	}
	if err != nil {
		if undo := s.clearPlace(moved.nodeSpan, moved.classSpan); undo != nil {
			return errors.Join(err, undo)
		}
		return err
	}
	old := *lt
	*lt = moved
	free := func() error { return s.clearPlace(old.nodeSpan, old.classSpan) }
	if err := pin.GracePeriod(context.Background()); err != nil {
		left := &liveTable{classSpan: old.classSpan, nodeSpan: old.nodeSpan} // belongs to no table any more
		s.draining = append(s.draining, &retired{what: fmt.Sprintf("the old range of table %d", lt.id), lt: left, free: free})
		return err
	}
	if err := s.storeHeaderWord(lt.id, lt.header, countsWord); err != nil {
		return err
	}
	return free()
}

// clearPlace frees a range of nodes and classes that no header refers to.
func (s *tableStore) clearPlace(nodes, classes span) error {
	if err := errors.Join(s.clearClasses(classes), s.clearNodes(nodes)); err != nil {
		return err
	}
	s.nodeRanges.give(nodes)
	s.classRanges.give(classes)
	return nil
}

// SetPeer adds a row, which assigns a class to the peers of an identity class. If the row exists
// with the same class, it succeeds; with another class it returns pin.ErrExists, because rows are
// never replaced.
func (m *Maps) SetPeer(t nodetable.ID, nc nodetable.IdentityClass, class uint16) error {
	if nc == 0 || nc > nodetable.MaxIdentityClass {
		return fmt.Errorf("%w: identity class %d is not between 1 and %d", pin.ErrInvalid, nc, nodetable.MaxIdentityClass)
	}
	return m.change(t, func(s *tableStore, lt *liveTable) error {
		if int(class) >= len(lt.classes) {
			return fmt.Errorf("%w: class %d of %d", pin.ErrInvalid, class, len(lt.classes))
		}
		if have, ok := lt.peers[nc]; ok {
			if have != class {
				return fmt.Errorf("row of identity class %d: %w with class %d", nc, pin.ErrExists, have)
			}
			return nil
		}
		if err := fits(bpf.MapsMapSlPeer, 1, len(lt.peers)+1, s.rowLimit-s.rows, s.rowLimit); err != nil {
			return err
		}
		if err := s.insertPeer(lt.header.PeerSet, nc, class); err != nil {
			return err
		}
		lt.peers[nc] = class
		s.rows++
		return nil
	})
}

// DeletePeer deletes a row: peers of the identity class then have the default class of their kind.
// A missing row is not an error.
func (m *Maps) DeletePeer(t nodetable.ID, nc nodetable.IdentityClass) error {
	return m.change(t, func(s *tableStore, lt *liveTable) error {
		if _, ok := lt.peers[nc]; !ok {
			return nil
		}
		if err := s.deletePeer(lt.header.PeerSet, uint32(nc)); err != nil {
			return err
		}
		delete(lt.peers, nc)
		s.rows--
		return nil
	})
}

// SetDefaults replaces the classes of peers without a row. The class of each kind changes by one
// store.
func (m *Maps) SetDefaults(t nodetable.ID, classes [identity.Kinds]policytable.Class) error {
	return m.change(t, func(s *tableStore, lt *liveTable) error {
		for kind, class := range classes {
			if int(class) >= len(lt.classes) {
				return fmt.Errorf("%w: class %d of kind %d: the table has %d", pin.ErrInvalid, class, kind, len(lt.classes))
			}
		}
		next := lt.header
		next.DefClass = classes
		for word := defaultsWord; word < defaultsWord+defaultWords; word++ {
			if headerWords(&next)[word] == headerWords(&lt.header)[word] {
				continue
			}
			if err := s.storeHeaderWord(lt.id, next, word); err != nil {
				var undo error
				for done := defaultsWord; done < word; done++ {
					undo = errors.Join(undo, s.storeHeaderWord(lt.id, lt.header, done))
				}
				return errors.Join(fmt.Errorf("classes of peers without a row: %w", err), undo)
			}
		}
		lt.header = next
		return nil
	})
}

// SetPrefix adds a prefix to a table, or replaces its classes. If other tables share the table's set of prefixes, the
// set is copied first, unless an existing set equals the changed one.
func (m *Maps) SetPrefix(t nodetable.ID, p netip.Prefix, classes policytable.PrefixClasses) error {
	if err := ipmap.CheckPrefix(p); err != nil {
		return err
	}
	return m.change(t, func(s *tableStore, lt *liveTable) error {
		for _, class := range classes {
			if int(class) >= len(lt.classes) {
				return fmt.Errorf("prefix %v: %w: class %d of %d", p, pin.ErrInvalid, class, len(lt.classes))
			}
		}
		a := lt.addresses
		var have policytable.PrefixClasses
		found := false
		if a != nil {
			have, found = a.prefixes[p]
		}
		switch f := family(p); {
		case found && have == classes:
			return nil
		case a == nil || a.refs > 1:
			blocks := map[netip.Prefix]policytable.PrefixClasses{p: classes}
			if a != nil {
				blocks = maps.Clone(a.prefixes)
				blocks[p] = classes
			}
			return s.replaceSet(lt, blocks)
		case !found:
			if err := fits(familyMap[f], 1, a.count[f]+1, s.prefixLimit-s.prefixes[f], s.prefixLimit); err != nil {
				return err
			}
		}
		if err := s.putPrefix(a.id, p, classes); err != nil {
			return err
		}
		s.edit(a, func() {
			if found {
				a.sum -= s.sumOf(p, have)
			} else {
				a.count[family(p)]++
				s.prefixes[family(p)]++
			}
			a.sum += s.sumOf(p, classes)
			a.prefixes[p] = classes
		})
		return nil
	})
}

// DeletePrefix deletes a prefix from a table. A missing prefix is not an error.
func (m *Maps) DeletePrefix(t nodetable.ID, p netip.Prefix) error {
	if err := ipmap.CheckPrefix(p); err != nil {
		return err
	}
	return m.change(t, func(s *tableStore, lt *liveTable) error {
		a := lt.addresses
		if a == nil {
			return nil
		}
		have, found := a.prefixes[p]
		if !found {
			return nil
		}
		if a.refs > 1 {
			blocks := maps.Clone(a.prefixes)
			delete(blocks, p)
			return s.replaceSet(lt, blocks)
		}
		if err := s.deletePrefix(a.id, p); err != nil {
			return err
		}
		s.edit(a, func() {
			a.sum -= s.sumOf(p, have)
			a.count[family(p)]--
			s.prefixes[family(p)]--
			delete(a.prefixes, p)
		})
		return nil
	})
}

// edit changes a set and updates bySum, because the change may alter the sum of the set.
func (s *tableStore) edit(a *addressSet, change func()) {
	s.unlist(a)
	change()
	s.bySum[a.sum] = append(s.bySum[a.sum], a)
}

// replaceSet switches a table to a new set, or to an existing equal one, with one atomic write.
func (s *tableStore) replaceSet(lt *liveTable, blocks map[netip.Prefix]policytable.PrefixClasses) error {
	a := s.equalSet(blocks)
	fresh := a == nil
	if fresh {
		var count [2]int
		for p := range blocks {
			count[family(p)]++
		}
		if err := s.fitsSet(count, 0); err != nil {
			return err
		}
		var err error
		if a, err = s.newSet(blocks); err != nil {
			return err
		}
		s.keep(a)
		if err := s.writeSet(a); err != nil {
			s.forget(a)
			return err
		}
	}
	was := lt.header
	lt.header.CidrSet = a.id
	if err := s.storeHeaderWord(lt.id, lt.header, setsWord); err != nil {
		lt.header = was
		if fresh {
			if undo := s.clearSet(a); undo != nil {
				return errors.Join(err, undo)
			}
			s.forget(a)
		}
		return err
	}
	a.refs++
	if lt.addresses != nil {
		s.release(lt.addresses)
	}
	lt.addresses = a
	return nil
}
