// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// Bounds of what the service may make the process remember: some of what the
// kernel holds at most.
const (
	maxTables      = 4096
	maxNodeClasses = 1 << 16
	maxIdentities  = 1 << 17
	maxSubjects    = 4096
	maxAllRows     = 1 << 19
	maxAllBlocks   = 1 << 18
	maxAllNodes    = 1 << 16
	maxAllClasses  = 1 << 18
	maxAllRules    = 1 << 20
	// maxAllNames is the text of rules' places, in bytes. They are for people:
	// beyond it, rules have none.
	maxAllNames = 128 << 20
)

// model is what the service has said. It is changed by taking steps, which
// checks them; nothing of it reaches the kernel by that.
type model struct {
	classes map[uint32]nodeClass
	wants   map[uint32]want
	tables  map[uint64]*serviceTable
	binds   map[uint32]*[2]binding
	lacking map[*serviceTable]struct{} // tables with missing rows
	// unnumbered counts node classes without a number in the kernel.
	unnumbered int
	revision   uint64
	named      bool // the service names its state
	rows       int
	blocks     int
	nodes      int
	trees      int // classes of all tables
	rules      int
	names      int // bytes
}

// nodeClass is a node class of the service with its number in the kernel, 0 if
// there was no room.
type nodeClass struct {
	key    ClassKey
	number NodeClass
}

// want is what an identity is, with the service's number of its class.
type want struct {
	class       uint32
	kind, scope uint8
}

// binding is one direction of a subject.
type binding struct {
	heard    bool
	seq      uint64        // of the message
	id       uint64        // the service's number of the table
	table    *serviceTable // nil: everything is allowed
	revision uint64
	rules    [][]Source
	names    int // bytes of rules
}

// sourceBytes is what a Source takes beside its text.
const sourceBytes = 64

// serviceTable is a table as the service has it, and where it is in the kernel.
type serviceTable struct {
	id      uint64
	content Content
	kernel  *kernelTable // nil: it is not there
	// classes leads from the service's classes to the kernel's; absent are those
	// that the kernel has not.
	classes []uint16
	same    bool // classes and nodes are numbered alike
	// missing rows and blocks had no room.
	missing       map[NodeClass]struct{}
	missingBlocks map[netip.Prefix]struct{}
	err           error // why it is not in the kernel, or not wholly
}

const absent = 0xFFFF

func newModel() *model {
	return &model{
		classes: map[uint32]nodeClass{}, wants: map[uint32]want{}, tables: map[uint64]*serviceTable{}, binds: map[uint32]*[2]binding{},
		lacking: map[*serviceTable]struct{}{},
	}
}

// validIdentity says whether the kernel has a place for the number.
func validIdentity(id uint32) bool {
	return id > 0 && id < 1<<16 || id >= 0xFF0000 && id < 0xFF1000
}

// take checks a step and remembers it. Node classes come with the number that
// the kernel gave.
func (m *model) take(st Step, seq uint64, number func(ClassKey) (NodeClass, error)) error {
	switch st := st.(type) {
	case NodeClassDefine:
		return m.defineClass(st, number)
	case NodeClassRetire:
		nc, ok := m.classes[st.NodeClass]
		if !ok {
			return invalid("node_class_retire.node_class: there is no %d", st.NodeClass)
		}
		if nc.number == 0 {
			m.unnumbered--
		}
		delete(m.classes, st.NodeClass)
	case IdentityUpdate:
		return m.takeIdentity(st)
	case TableDefine:
		return m.defineTable(st)
	case TableGrow:
		return m.growTable(st)
	case TableRetire:
		t, ok := m.tables[st.Table]
		if !ok {
			return invalid("table_retire.table: there is no %d", st.Table)
		}
		delete(m.tables, st.Table)
		delete(m.lacking, t)
		m.rows -= len(t.content.Peers)
		m.blocks -= len(t.content.Blocks)
		m.nodes -= len(t.content.Nodes)
		m.trees -= len(t.content.Classes)
		m.rules -= len(t.content.Rules)
	case PeerUpdate:
		return m.takePeer(st)
	case AddressUpdate:
		return m.takeBlock(st)
	case Bind:
		return m.bind(st, seq)
	case SubjectGone:
		if list := m.binds[st.Subject]; list != nil {
			m.names -= list[Egress].names + list[Ingress].names
		}
		delete(m.binds, st.Subject)
	case Barrier:
		m.revision, m.named = st.PolicyRevision, st.State != ""
	case SnapshotComplete:
	default:
		return invalid("step: %T", st)
	}
	return nil
}

func (m *model) defineClass(st NodeClassDefine, number func(ClassKey) (NodeClass, error)) error {
	switch old, ok := m.classes[st.NodeClass]; {
	case st.NodeClass == 0:
		return invalid("node_class_define.node_class is 0")
	case st.Key == ClassKey{}:
		return invalid("node_class_define.key is zero")
	case ok && old.key != st.Key:
		return invalid("node_class_define.node_class: %d is another one", st.NodeClass)
	case ok:
		return nil
	case len(m.classes) >= maxNodeClasses:
		return invalid("node_class_define: more than %d node classes", maxNodeClasses)
	}
	nc, err := number(st.Key)
	if err != nil {
		return err
	}
	if nc == 0 {
		m.unnumbered++
	}
	m.classes[st.NodeClass] = nodeClass{st.Key, nc}
	return nil
}

func (m *model) takeIdentity(st IdentityUpdate) error {
	if st.Identity == 0 || st.Identity >= 1<<24 {
		return invalid("identity_update.identity: %d is none", st.Identity)
	}
	if st.NodeClass == 0 {
		delete(m.wants, st.Identity)
		return nil
	}
	_, known := m.wants[st.Identity]
	switch _, ok := m.classes[st.NodeClass]; {
	case !ok:
		return invalid("identity_update.node_class: there is no %d", st.NodeClass)
	case st.Kind >= Kinds:
		return invalid("identity_update.kind: there is no %d", st.Kind)
	case st.Scope >= Scopes:
		return invalid("identity_update.scope: there is no %d", st.Scope)
	case !known && len(m.wants) >= maxIdentities:
		return invalid("identity_update: more than %d identities", maxIdentities)
	}
	m.wants[st.Identity] = want{st.NodeClass, st.Kind, st.Scope}
	return nil
}

func (m *model) defineTable(st TableDefine) error {
	_, known := m.tables[st.Table]
	switch {
	case st.Table == 0:
		return invalid("table_define.table is 0")
	case known:
		return invalid("table_define.table: there is a table %d", st.Table)
	case len(m.tables) >= maxTables:
		return invalid("table_define: more than %d tables", maxTables)
	}
	t := &serviceTable{id: st.Table, content: st.Content.copied()}
	t.content.Peers = make(map[NodeClass]uint16, len(st.Peers))
	for i, row := range st.Peers {
		if int(row.Class) >= len(t.content.Classes) {
			return invalid("table_define.peers[%d].class: there is no class %d", i, row.Class)
		}
		if err := m.row(t, row); err != nil {
			return fmt.Errorf("table_define.peers[%d]: %w", i, err)
		}
	}
	if err := t.content.validate(); err != nil {
		return fmt.Errorf("table_define of table %d: %w", st.Table, err)
	}
	if m.rows+len(t.content.Peers) > maxAllRows || m.blocks+len(t.content.Blocks) > maxAllBlocks {
		return invalid("table_define of table %d: more than %d rows or %d blocks in all", st.Table, maxAllRows, maxAllBlocks)
	}
	if err := m.roomFor(len(t.content.Nodes), len(t.content.Classes), len(t.content.Rules)); err != nil {
		return fmt.Errorf("table_define of table %d: %w", st.Table, err)
	}
	m.rows += len(t.content.Peers)
	m.blocks += len(t.content.Blocks)
	m.nodes += len(t.content.Nodes)
	m.trees += len(t.content.Classes)
	m.rules += len(t.content.Rules)
	m.tables[st.Table] = t
	return nil
}

// roomFor says whether so much more of all tables may be remembered.
func (m *model) roomFor(nodes, classes, rules int) error {
	switch {
	case m.nodes+nodes > maxAllNodes:
		return invalid("nodes: more than %d in all tables", maxAllNodes)
	case m.trees+classes > maxAllClasses:
		return invalid("classes: more than %d in all tables", maxAllClasses)
	case m.rules+rules > maxAllRules:
		return invalid("rules: more than %d in all tables", maxAllRules)
	}
	return nil
}

// row adds a row to a table, if the kernel has a number for its node class.
func (m *model) row(t *serviceTable, row Row) error {
	nc, ok := m.classes[row.NodeClass]
	if !ok {
		return invalid("node_class: there is no %d", row.NodeClass)
	}
	if nc.number == 0 {
		return nil // who has the class stays unknown
	}
	if old, ok := t.content.Peers[nc.number]; ok && old != row.Class {
		return invalid("node_class: %d has a row already", row.NodeClass)
	}
	t.content.Peers[nc.number] = row.Class
	return nil
}

func (m *model) growTable(st TableGrow) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return invalid("table_grow.table: there is no %d", st.Table)
	}
	if err := m.roomFor(len(st.Nodes), len(st.Classes), 0); err != nil {
		return fmt.Errorf("table_grow of table %d: %w", st.Table, err)
	}
	grown := t.content
	from := len(grown.Classes)
	grown.Nodes = slices.Concat(grown.Nodes, st.Nodes)
	grown.Classes = slices.Concat(grown.Classes, st.Classes)
	if err := grown.validateClasses(from); err != nil {
		return fmt.Errorf("table_grow of table %d: %w", st.Table, err)
	}
	t.content = grown
	m.nodes += len(st.Nodes)
	m.trees += len(st.Classes)
	return nil
}

func (m *model) takePeer(st PeerUpdate) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return invalid("peer_update.table: there is no %d", st.Table)
	}
	if st.Delete {
		nc, ok := m.classes[st.Row.NodeClass]
		if !ok {
			return invalid("peer_update.row.node_class: there is no %d", st.Row.NodeClass)
		}
		if _, ok := t.content.Peers[nc.number]; ok {
			delete(t.content.Peers, nc.number)
			m.rows--
		}
		return nil
	}
	switch {
	case int(st.Row.Class) >= len(t.content.Classes):
		return invalid("peer_update.row.class: there is no class %d", st.Row.Class)
	case len(t.content.Peers) >= maxPeers || m.rows >= maxAllRows:
		return invalid("peer_update of table %d: more than %d rows, or %d in all", st.Table, maxPeers, maxAllRows)
	}
	before := len(t.content.Peers)
	if err := m.row(t, st.Row); err != nil {
		return fmt.Errorf("peer_update.row: %w", err)
	}
	m.rows += len(t.content.Peers) - before
	return nil
}

func (m *model) takeBlock(st AddressUpdate) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return invalid("address_update.table: there is no %d", st.Table)
	}
	if st.Delete {
		if _, ok := t.content.Blocks[st.Prefix]; ok {
			delete(t.content.Blocks, st.Prefix)
			m.blocks--
		}
		return nil
	}
	if err := t.content.validateBlock(st.Prefix, st.Classes); err != nil {
		return fmt.Errorf("address_update: %w", err)
	}
	if _, ok := t.content.Blocks[st.Prefix]; !ok {
		if len(t.content.Blocks) >= maxBlocks || m.blocks >= maxAllBlocks {
			return invalid("address_update of table %d: more than %d blocks, or %d in all", st.Table, maxBlocks, maxAllBlocks)
		}
		m.blocks++
	}
	t.content.Blocks[st.Prefix] = st.Classes
	return nil
}

func (m *model) bind(st Bind, seq uint64) error {
	b := binding{heard: true, seq: seq, id: st.Table, revision: st.Revision, rules: st.Rules}
	if st.Table != 0 {
		t, ok := m.tables[st.Table]
		if !ok {
			return invalid("bind.table: there is no %d", st.Table)
		}
		b.table = t
	}
	switch {
	case st.Subject == 0 || st.Subject >= 1<<24:
		return invalid("bind.subject: %d is no identity", st.Subject)
	case st.Direction > Ingress:
		return invalid("bind.direction: there is no %d", st.Direction)
	case len(st.Rules) > maxRules:
		return invalid("bind.rules: %d, at most %d", len(st.Rules), maxRules)
	}
	list := m.binds[st.Subject]
	if list == nil {
		if len(m.binds) >= maxSubjects {
			return invalid("bind: more than %d subjects", maxSubjects)
		}
		list = &[2]binding{}
		m.binds[st.Subject] = list
	}
	m.names -= list[st.Direction].names
	for _, sources := range b.rules {
		for _, src := range sources {
			b.names += sourceBytes + len(src.Kind) + len(src.Namespace) + len(src.Name) + len(src.Path)
		}
	}
	if m.names+b.names > maxAllNames {
		b.rules, b.names = nil, 0
	}
	m.names += b.names
	list[st.Direction] = b
	return nil
}

// blocked says whether a table lacks the row of a node class, so that nobody
// may have the class.
func (m *model) blocked(nc NodeClass) bool {
	for t := range m.lacking {
		if _, ok := t.missing[nc]; ok {
			return true
		}
	}
	return false
}

// word is what the kernel shall know of an identity, and whether that is less
// than the service wants.
func (m *model) word(id uint32) (w Word, waits bool) {
	want, ok := m.wants[id]
	if !ok {
		return Word{}, false
	}
	nc, ok := m.classes[want.class]
	if !validIdentity(id) {
		return Word{}, false // of another cluster, for which the kernel has no place
	}
	if !ok || nc.number == 0 || m.blocked(nc.number) {
		return Word{}, true
	}
	return Word{Class: nc.number, Kind: want.kind, Scope: want.scope, Known: true}, false
}

// sortedTables is for an order that does not depend on chance.
func (m *model) sortedTables() []*serviceTable {
	out := make([]*serviceTable, 0, len(m.tables))
	for _, id := range slices.Sorted(maps.Keys(m.tables)) {
		out = append(out, m.tables[id])
	}
	return out
}
