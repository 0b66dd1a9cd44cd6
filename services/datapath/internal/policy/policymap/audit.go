// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// audit compares the maps with their expected contents, and repairs differences if repair is set.
func (s *tableStore) audit(c *contents, repair bool) (differences []string, err error) {
	a := &tableAudit{s: s, c: c, repair: repair}
	a.headers()
	a.keys()
	a.arrays()
	a.rows()
	a.prefixes()
	a.identities()
	if a.more > 0 {
		a.differences = append(a.differences, fmt.Sprintf("%d more", a.more))
	}
	return a.differences, errors.Join(a.errs...)
}

// maxDifferences bounds the differences that an audit names; it repairs all.
const maxDifferences = 1000

type tableAudit struct {
	s           *tableStore
	c           *contents
	repair      bool
	differences []string
	more        int
	errs        []error
}

func (a *tableAudit) differs(fix func() error, format string, args ...any) {
	if len(a.differences) < maxDifferences {
		a.differences = append(a.differences, fmt.Sprintf(format, args...))
	} else {
		a.more++
	}
	if a.repair && len(a.errs) < maxDifferences {
		if err := fix(); err != nil {
			a.errs = append(a.errs, err)
		}
	}
}

// drainingTables returns the tables that are retired but still in the maps.
func (s *tableStore) drainingTables() map[nodetable.ID]*liveTable {
	ts := map[nodetable.ID]*liveTable{}
	for _, r := range s.leaving() {
		if r.lt != nil && r.lt.id != 0 {
			ts[r.lt.id] = r.lt
		}
	}
	return ts
}

func (a *tableAudit) headers() {
	s := a.s
	draining := s.drainingTables()
	for i := firstTable; i < len(a.c.tableKeys); i++ {
		t := nodetable.ID(i)
		want := bpf.MapsSlTable{}
		switch {
		case draining[t] != nil:
			continue
		case s.tables[t] != nil:
			want = s.tables[t].header
		}
		got := s.header(t)
		for w := range headerWords(&want) {
			if headerWords(&got)[w] != headerWords(&want)[w] {
				a.differs(func() error { return s.storeHeaderWord(t, want, w) },
					"table %d: word %d of the header is %#x, should be %#x", t, w, headerWords(&got)[w], headerWords(&want)[w])
			}
		}
	}
}

func (a *tableAudit) keys() {
	s := a.s
	for i := firstTable; i < len(a.c.tableKeys); i++ {
		var want [32]byte
		if lt := s.tables[nodetable.ID(i)]; lt != nil {
			want = lt.hash
		}
		if got := a.c.tableKeys[i].Hash; got != want {
			a.differs(func() error { return s.storeTableKey(nodetable.ID(i), want) },
				"table %d: key is %x, should be %x", i, got, want)
		}
	}
	for i := range a.c.classKeys {
		want := s.classKey[nodetable.IdentityClass(i)]
		if got := a.c.classKeys[i].Key; got != [16]byte(want) {
			a.differs(func() error { return s.storeClassKey(nodetable.IdentityClass(i), want) },
				"identity class %d: key is %x, should be %x", i, got, want)
		}
	}
}

// arrays compares sl_class and sl_ports, which must be zero outside the ranges of tables, and the
// ranges of tables in sl_rule.
func (a *tableAudit) arrays() {
	s := a.s
	classes := make([]uint32, s.classRanges.size)
	ports := make([]bpf.MapsSlPortNode, s.nodeRanges.size)
	for _, lt := range s.tables {
		copy(classes[lt.classSpan.base:], lt.classValues())
		copy(ports[lt.nodeSpan.base:], nodeValues(lt.nodes, lt.nodeSpan.base))
	}
	skip := s.drainingSpans()
	for i, want := range classes {
		if got := s.class(i); got != want && !covers(skip.classes, i) {
			a.differs(func() error { return s.storeWord(bpf.MapsMapSlClass, s.classMem, i, want) },
				"map %s: element %d is %#x, should be %#x", bpf.MapsMapSlClass, i, got, want)
		}
	}
	for i, want := range ports {
		if a.c.ports[i] != want && !covers(skip.nodes, i) {
			a.differs(func() error { return s.writeNodes(i, []bpf.MapsSlPortNode{want}) },
				"map %s: element %d differs from the value written", bpf.MapsMapSlPorts, i)
		}
	}
	for _, lt := range s.tables {
		got, err := s.readRules(lt.ruleSpan)
		if err != nil {
			a.errs = append(a.errs, err)
			return
		}
		for i, want := range ruleValues(lt.rules) {
			if got[i] != want {
				a.differs(func() error {
					return writeArray(&s.tableMaps, s.tableMaps.rules, bpf.MapsMapSlRule, lt.ruleSpan.base+i, []bpf.MapsSlRule{want})
				}, "table %d: rule %d is %+v, should be %+v", lt.id, i+1, got[i], want)
			}
		}
	}
}

type drainingSpans struct{ classes, nodes []span }

// drainingSpans returns the ranges of retired tables that are still in the maps.
func (s *tableStore) drainingSpans() drainingSpans {
	var d drainingSpans
	for _, r := range s.leaving() {
		if r.lt != nil {
			d.classes = append(d.classes, r.lt.classSpan)
			d.nodes = append(d.nodes, r.lt.nodeSpan)
		}
	}
	return d
}

func covers(spans []span, i int) bool {
	return slices.ContainsFunc(spans, func(s span) bool { return s.base <= i && i < s.end() })
}

func (a *tableAudit) rows() {
	s := a.s
	draining := s.drainingTables()
	for id, lt := range s.tables {
		got := a.c.peers[uint32(id)]
		for nc, class := range lt.peers {
			switch have, ok := got[uint32(nc)]; {
			case !ok:
				a.differs(func() error { return s.insertPeer(uint32(id), nc, class) },
					"table %d: row of identity class %d is missing, should be %d", id, nc, class)
			case have != uint32(class):
				a.differs(func() error {
					// rows are never replaced; in between, the default class applies
					if err := s.deletePeer(uint32(id), uint32(nc)); err != nil {
						return err
					}
					return s.insertPeer(uint32(id), nc, class)
				}, "table %d: row of identity class %d is %d, should be %d", id, nc, have, class)
			}
		}
	}
	for set, rows := range a.c.peers {
		var lt *liveTable
		if set <= 0xffff {
			if draining[nodetable.ID(set)] != nil {
				continue
			}
			lt = s.tables[nodetable.ID(set)]
		}
		for nc, class := range rows {
			if lt != nil && nc <= uint32(nodetable.MaxIdentityClass) {
				if _, ok := lt.peers[nodetable.IdentityClass(nc)]; ok {
					continue
				}
			}
			a.differs(func() error { return s.deletePeer(set, nc) },
				"table %d: row of identity class %d to %d should not be there", set, nc, class)
		}
	}
}

func (a *tableAudit) prefixes() {
	s := a.s
	for id, set := range s.sets {
		got := a.c.prefixes[id]
		for p, classes := range set.prefixes {
			if v, ok := got[p]; !ok || v != (bpf.MapsSlCidr{Class: classes}) {
				a.differs(func() error { return s.putPrefix(id, p, classes) },
					"address set %d: prefix %v is %v, should be %v", id, p, v.Class, classes)
			}
		}
	}
	for id, blocks := range a.c.prefixes {
		set := s.sets[id]
		for p := range blocks {
			if set != nil {
				if _, ok := set.prefixes[p]; ok {
					continue
				}
			}
			a.differs(func() error { return s.deletePrefix(id, p) },
				"address set %d: prefix %v should not be there", id, p)
		}
	}
}

func (a *tableAudit) identities() {
	s := a.s
	for i, want := range s.identities {
		if got := s.identity(i); got != want {
			a.differs(func() error { return s.storeWord(bpf.MapsMapSlId, s.idMem, i, want) },
				"identity %d: entry is %#x, should be %#x", nodetable.IdentityAt(i), got, want)
		}
	}
}

// Audit compares the maps of tables with what was written to them and describes each difference:
// missing, foreign or changed rows and prefixes, and array elements with unexpected values. With
// repair it repairs each. It describes at most 1,000.
func (m *Maps) Audit(repair bool) (differences []string, err error) {
	if err := m.gate.Lock(); err != nil {
		return nil, err
	}
	defer m.gate.Unlock()
	c, err := m.store.read()
	if err != nil {
		return nil, err
	}
	return m.store.audit(c, repair)
}
