// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Bounds on what the service can make the process store, derived from the capacity of the kernel's
// maps.
const (
	maxTables          = 4096
	maxIdentityClasses = 1 << 16
	maxIdentities      = 1 << 17
	maxSubjects        = 4096
	maxAllRows         = 1 << 21
	maxAllPrefixes     = 1 << 18
	maxAllRanges       = 1 << 19
	maxAllClasses      = 1 << 18
	maxAllRules        = 1 << 20
	// maxAllNames bounds the text of source locations, in bytes. Beyond it, rules have no
	// locations.
	maxAllNames = 128 << 20
)

// model is the service's state. Steps change it and are checked first; it changes nothing in the
// kernel.
type model struct {
	classes     map[policytable.IdentityClass]identityClass
	wants       map[uint32]want
	tables      map[policytable.ID]*serviceTable
	binds       map[uint32]*[2]binding
	missingRows map[*serviceTable]struct{} // tables with missing rows
	// kinds of the identities of a class, by the kernel's number of the class: bit n is kind n.
	kinds map[nodetable.IdentityClass]uint8
	// unnumbered counts identity classes without a number in the kernel.
	unnumbered int
	revision   uint64
	named      bool // the service sends the name of its state
	taken      [remembered]int
	names      int // size of names in bytes
}

// identityClass is an identity class of the service with its number in the kernel, 0 if all numbers
// were used.
type identityClass struct {
	key    policytable.ClassKey
	number nodetable.IdentityClass
}

// want is the service's entry for an identity, with the service's number of the identity class.
type want struct {
	class policytable.IdentityClass
	kind  identity.Kind
	scope identity.PeerScope
}

// binding is one direction of a subject.
type binding struct {
	heard    bool
	seq      uint64         // of the message
	id       policytable.ID // the service's number of the table
	table    *serviceTable  // nil: everything is allowed
	revision uint64
	rules    [][]policytable.Source
	names    int // bytes of rules
	tenant   shares.Tenant
}

// sourceBytes is the size of a Source in addition to its text.
const sourceBytes = 64

// serviceTable is a table as the service sent it, and its table in the kernel.
type serviceTable struct {
	id      policytable.ID
	content nodetable.Content
	kernel  *kernelTable // nil: not in the kernel
	// classes maps the service's classes to the kernel's; Absent for missing ones.
	classes []uint16
	same    bool  // classes and nodes have the same numbers
	part    *part // the part that the kernel has; nil: all of it
	// missing and missingPrefixes are the rows and prefixes for which the maps had no capacity. The value of a prefix
	// is true if the table allows something without the prefix that it denies with it.
	missing         map[nodetable.IdentityClass]struct{}
	missingPrefixes map[netip.Prefix]bool
	// unsafe: the peers of some missing rows may do more as unknown peers than with their rows, because an unknown peer
	// matches no pass rule with a selector.
	unsafe bool
	// forgotten: the table's content was dropped, because all tables together exceed a bound. need is the size of the
	// table in the units of the bounds.
	forgotten bool
	need      [remembered]int
	err       error // why the kernel does not have it, or not completely
	charge    charge
}

// allowsTooMuch reports whether the table in the kernel allows something that the service's table
// denies, because a prefix or row had no capacity.
func (t *serviceTable) allowsTooMuch() bool {
	if t.unsafe {
		return true
	}
	for _, denies := range t.missingPrefixes {
		if denies {
			return true
		}
	}
	return false
}

func newModel() *model {
	return &model{
		classes: map[policytable.IdentityClass]identityClass{}, wants: map[uint32]want{},
		tables: map[policytable.ID]*serviceTable{}, binds: map[uint32]*[2]binding{},
		missingRows: map[*serviceTable]struct{}{}, kinds: map[nodetable.IdentityClass]uint8{},
	}
}

// validIdentity reports whether the kernel has an entry for the number.
func validIdentity(id uint32) bool {
	return identity.Numeric(id).Scope() != identity.ScopeInvalid
}

// take checks a step and applies it to the model. number returns the kernel's number of an identity class.
func (m *model) take(st policytable.Step, seq uint64, number func(policytable.ClassKey) (nodetable.IdentityClass, error)) error {
	switch st := st.(type) {
	case policytable.DefineIdentityClass:
		return m.defineClass(st, number)
	case policytable.RetireIdentityClass:
		nc, ok := m.classes[st.IdentityClass]
		if !ok {
			return policytable.Invalid("retire_identity_class.identity_class: there is no identity class %d", st.IdentityClass)
		}
		if nc.number == 0 {
			m.unnumbered--
		}
		delete(m.kinds, nc.number)
		delete(m.classes, st.IdentityClass)
	case policytable.SetIdentity:
		return m.takeIdentity(st)
	case policytable.DefineTable:
		return m.defineTable(st)
	case policytable.GrowTable:
		return m.growTable(st)
	case policytable.RetireTable:
		t, ok := m.tables[st.Table]
		if !ok {
			return policytable.Invalid("retire_table.table: there is no %d", st.Table)
		}
		delete(m.tables, st.Table)
		delete(m.missingRows, t)
		m.release(t)
	case policytable.SetPeer:
		return m.setPeer(st)
	case policytable.DeletePeer:
		return m.deletePeer(st)
	case policytable.SetPrefix:
		return m.setPrefix(st)
	case policytable.DeletePrefix:
		return m.deletePrefix(st)
	case policytable.BindSubject:
		return m.bind(st, seq)
	case policytable.RemoveSubject:
		if list := m.binds[uint32(st.Subject)]; list != nil {
			list[policytable.Egress].leave()
			list[policytable.Ingress].leave()
			m.names -= list[policytable.Egress].names + list[policytable.Ingress].names
		}
		delete(m.binds, uint32(st.Subject))
	case policytable.Barrier:
		m.revision, m.named = st.PolicyRevision, st.State != ""
	case policytable.SnapshotComplete:
	default:
		return policytable.Invalid("step: %T", st)
	}
	return nil
}

func (m *model) defineClass(st policytable.DefineIdentityClass, number func(policytable.ClassKey) (nodetable.IdentityClass, error)) error {
	switch old, ok := m.classes[st.IdentityClass]; {
	case st.IdentityClass == 0:
		return policytable.Invalid("define_identity_class.identity_class is 0")
	case st.Key == policytable.ClassKey{}:
		return policytable.Invalid("define_identity_class.key is zero")
	case ok && old.key != st.Key:
		return policytable.Invalid("define_identity_class.identity_class: %d is already defined with another key",
			st.IdentityClass)
	case ok:
		return nil
	case len(m.classes) >= maxIdentityClasses:
		return policytable.Invalid("define_identity_class: more than %d identity classes", maxIdentityClasses)
	}
	nc, err := number(st.Key)
	if err != nil {
		return err
	}
	if nc == 0 {
		m.unnumbered++
	}
	m.classes[st.IdentityClass] = identityClass{st.Key, nc}
	return nil
}

func (m *model) takeIdentity(st policytable.SetIdentity) error {
	if st.Identity == 0 || st.Identity > identity.Max {
		return policytable.Invalid("set_identity.identity: %d is not an identity", st.Identity)
	}
	if st.IdentityClass == 0 {
		delete(m.wants, uint32(st.Identity))
		return nil
	}
	_, known := m.wants[uint32(st.Identity)]
	class, ok := m.classes[st.IdentityClass]
	switch {
	case !ok:
		return policytable.Invalid("set_identity.identity_class: there is no identity class %d", st.IdentityClass)
	case st.Kind >= identity.Kinds:
		return policytable.Invalid("set_identity.kind: there is no %d", st.Kind)
	case st.Scope >= identity.PeerScopes:
		return policytable.Invalid("set_identity.scope: there is no %d", st.Scope)
	case !known && len(m.wants) >= maxIdentities:
		return policytable.Invalid("set_identity: more than %d identities", maxIdentities)
	}
	m.wants[uint32(st.Identity)] = want{st.IdentityClass, st.Kind, st.Scope}
	m.kinds[class.number] |= 1 << st.Kind
	return nil
}

func (m *model) defineTable(st policytable.DefineTable) error {
	_, known := m.tables[st.Table]
	switch {
	case st.Table == 0:
		return policytable.Invalid("define_table.table is 0")
	case known:
		return policytable.Invalid("define_table.table: there is a table %d", st.Table)
	case len(m.tables) >= maxTables:
		return policytable.Invalid("define_table: more than %d tables", maxTables)
	}
	t := &serviceTable{id: st.Table, content: nodetable.NewContent(st.Content, len(st.Peers))}
	for i, row := range st.Peers {
		if int(row.Class) >= len(t.content.Classes) {
			return policytable.Invalid("define_table.peers[%d].class: there is no class %d", i, row.Class)
		}
		if err := m.row(t, row); err != nil {
			return fmt.Errorf("define_table.peers[%d].%w", i, err)
		}
	}
	if err := t.content.Validate(); err != nil {
		return fmt.Errorf("define_table of table %d: %w", st.Table, err)
	}
	m.tables[st.Table] = t
	m.remember(t, t.size())
	return nil
}

// Bounded quantities of all tables together.
const (
	rememberedRows = iota
	rememberedPrefixes
	rememberedRanges
	rememberedClasses
	rememberedRules
	remembered // the number of them
)

var (
	maxRemembered = [remembered]int{maxAllRows, maxAllPrefixes, maxAllRanges, maxAllClasses, maxAllRules}
	nameOf        = [remembered]string{"rows", "prefixes", "ranges", "classes", "rules"}
)

// size returns the table's size against the bounds.
func (t *serviceTable) size() [remembered]int {
	c := &t.content
	return [remembered]int{len(c.Peers), len(c.Prefixes), countRanges(c.Classes), len(c.Classes), len(c.Rules)}
}

// full returns the first bound that would be exceeded; -1 if none.
func (m *model) full(more [remembered]int) int {
	for i, n := range more {
		if n > 0 && m.taken[i]+n > maxRemembered[i] {
			return i
		}
	}
	return -1
}

// remember adds to the size of a table. If a bound is exceeded, it drops the content of the table:
// its subjects are isolated, and all other tables stay.
func (m *model) remember(t *serviceTable, added [remembered]int) {
	over := m.full(added)
	for i, n := range added {
		m.taken[i] += n
	}
	if over < 0 {
		return
	}
	t.need = t.size()
	m.release(t)
	t.content, t.forgotten = nodetable.Content{Table: policytable.Table{Hash: t.content.Hash}}, true
	t.missing, t.missingPrefixes, t.unsafe, t.part = nil, nil, false, nil
	delete(m.missingRows, t)
	t.err = fmt.Errorf("%w: all tables of this node would have more than %d %s",
		nodetable.ErrNoCapacity, maxRemembered[over], nameOf[over])
}

// release subtracts the size of a table.
func (m *model) release(t *serviceTable) {
	for i, n := range t.size() {
		m.taken[i] -= n
	}
}

// remembers reports whether a dropped table would fit within the bounds now.
func (m *model) remembers() bool {
	for _, t := range m.tables {
		if t.forgotten && m.full(t.need) < 0 {
			return true
		}
	}
	return false
}

// countRanges counts ranges against the bound; an empty class counts as one.
func countRanges(classes []policytable.Ranges) int {
	n := len(classes)
	for _, ranges := range classes {
		n += len(ranges)
	}
	return n
}

// row adds a row to a table, if the kernel has a number for its identity class.
func (m *model) row(t *serviceTable, row policytable.Row) error {
	nc, ok := m.classes[row.IdentityClass]
	if !ok {
		return policytable.Invalid("identity_class: there is no identity class %d", row.IdentityClass)
	}
	if nc.number == 0 {
		return nil // peers of the class stay unknown
	}
	if old, ok := t.content.Peers[nc.number]; ok && old != row.Class {
		return policytable.Invalid("identity_class: %d has a row already", row.IdentityClass)
	}
	t.content.Peers[nc.number] = row.Class
	return nil
}

func (m *model) growTable(st policytable.GrowTable) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return policytable.Invalid("grow_table.table: there is no %d", st.Table)
	}
	if t.forgotten {
		return nil
	}
	grown := t.content
	from := len(grown.Classes)
	grown.Classes = slices.Concat(grown.Classes, st.Classes)
	if err := grown.ValidateClasses(from); err != nil {
		return fmt.Errorf("grow_table of table %d: %w", st.Table, err)
	}
	t.content = grown
	m.remember(t, [remembered]int{rememberedRanges: countRanges(st.Classes), rememberedClasses: len(st.Classes)})
	return nil
}

func (m *model) setPeer(st policytable.SetPeer) error {
	t, ok := m.tables[st.Table]
	switch {
	case !ok:
		return policytable.Invalid("set_peer.table: there is no %d", st.Table)
	case t.forgotten:
		return nil
	case int(st.Row.Class) >= len(t.content.Classes):
		return policytable.Invalid("set_peer.row.class: there is no class %d", st.Row.Class)
	case len(t.content.Peers) >= nodetable.MaxPeers:
		return policytable.Invalid("set_peer of table %d: more than %d rows", st.Table, nodetable.MaxPeers)
	}
	before := len(t.content.Peers)
	if err := m.row(t, st.Row); err != nil {
		return fmt.Errorf("set_peer.row.%w", err)
	}
	m.remember(t, [remembered]int{rememberedRows: len(t.content.Peers) - before})
	return nil
}

func (m *model) deletePeer(st policytable.DeletePeer) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return policytable.Invalid("delete_peer.table: there is no %d", st.Table)
	}
	ic, ok := m.classes[st.IdentityClass]
	if !ok {
		return policytable.Invalid("delete_peer.identity_class: there is no identity class %d", st.IdentityClass)
	}
	if _, ok := t.content.Peers[ic.number]; ok {
		delete(t.content.Peers, ic.number)
		m.taken[rememberedRows]--
	}
	return nil
}

func (m *model) setPrefix(st policytable.SetPrefix) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return policytable.Invalid("set_prefix.table: there is no %d", st.Table)
	}
	if t.forgotten {
		return nil
	}
	if err := t.content.ValidatePrefix(st.Prefix, st.Classes); err != nil {
		return fmt.Errorf("set_prefix.%w", err)
	}
	_, there := t.content.Prefixes[st.Prefix]
	if !there && len(t.content.Prefixes) >= nodetable.MaxPrefixes {
		return policytable.Invalid("set_prefix of table %d: more than %d prefixes", st.Table, nodetable.MaxPrefixes)
	}
	t.content.Prefixes[st.Prefix] = st.Classes
	if !there {
		m.remember(t, [remembered]int{rememberedPrefixes: 1})
	}
	return nil
}

func (m *model) deletePrefix(st policytable.DeletePrefix) error {
	t, ok := m.tables[st.Table]
	if !ok {
		return policytable.Invalid("delete_prefix.table: there is no %d", st.Table)
	}
	if _, ok := t.content.Prefixes[st.Prefix]; ok {
		delete(t.content.Prefixes, st.Prefix)
		m.taken[rememberedPrefixes]--
	}
	return nil
}

func (m *model) bind(st policytable.BindSubject, seq uint64) error {
	b := binding{heard: true, seq: seq, id: st.Table, revision: st.Revision, rules: st.Rules, tenant: st.Tenant}
	if st.Table != 0 {
		t, ok := m.tables[st.Table]
		if !ok {
			return policytable.Invalid("bind_subject.table: there is no %d", st.Table)
		}
		b.table = t
	}
	switch {
	case st.Subject == 0 || st.Subject > identity.Max:
		return policytable.Invalid("bind_subject.subject: %d is not an identity", st.Subject)
	case st.Direction >= policytable.Directions:
		return policytable.Invalid("bind_subject.direction: there is no %d", st.Direction)
	case len(st.Rules) > nodetable.MaxRules:
		return policytable.Invalid("bind_subject.rules: %d, at most %d", len(st.Rules), nodetable.MaxRules)
	}
	list := m.binds[uint32(st.Subject)]
	if list == nil {
		if len(m.binds) >= maxSubjects {
			return policytable.Invalid("bind_subject: more than %d subjects", maxSubjects)
		}
		list = &[2]binding{}
		m.binds[uint32(st.Subject)] = list
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
	before := list[st.Direction]
	list[st.Direction] = b
	if before.table == b.table && before.tenant == b.tenant {
		return nil
	}
	before.leave()
	if b.table != nil {
		b.table.charge.join(st)
	}
	return nil
}

// leave records that the subject no longer uses its table.
func (b *binding) leave() {
	if b.table != nil {
		b.table.charge.leave(b.tenant)
	}
}

// entry returns the expected kernel entry of an identity. waits reports that the kernel has no
// capacity for the service's entry.
func (m *model) entry(id uint32) (w nodetable.Identity, waits bool) {
	want, ok := m.wants[id]
	if !ok {
		return nodetable.Identity{}, false
	}
	nc, ok := m.classes[want.class]
	if !validIdentity(id) {
		return nodetable.Identity{}, false // of another cluster: the kernel has no entry for it
	}
	if !ok || nc.number == 0 {
		return nodetable.Identity{}, true
	}
	return nodetable.Identity{Class: nc.number, Kind: want.kind, Scope: want.scope, Known: true}, false
}

// sortedTables returns the tables sorted by ID, for a deterministic order.
func (m *model) sortedTables() []*serviceTable {
	out := make([]*serviceTable, 0, len(m.tables))
	for _, id := range slices.Sorted(maps.Keys(m.tables)) {
		out = append(out, m.tables[id])
	}
	return out
}
