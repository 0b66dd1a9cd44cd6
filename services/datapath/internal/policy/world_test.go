// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
)

// A world is a small policy service: identities with properties, rules that
// select them, and the steps that say so. It is written for tests and shares no
// code with the real one.

// props are bits.
type props uint8

// testRule allows or denies ports to whoever has a property, or has it not.
type testRule struct {
	bit      uint8 // property; 8: everybody
	not      bool
	action   uint8
	from, to uint32 // points
}

func (r testRule) selector() string { return fmt.Sprintf("%d/%v", r.bit, r.not) }

func (r testRule) matches(p props) bool { return r.bit == 8 || p>>r.bit&1 == 1 != r.not }

// testPolicy is one direction; nil rules with enforce: default deny.
type testPolicy struct {
	enforce bool
	rules   []testRule
	blocks  map[netip.Prefix]uint8 // action for everybody there, after the rules
}

func (p testPolicy) text() string {
	return fmt.Sprintf("%v %v %v", p.enforce, p.rules, len(p.blocks) > 0)
}

type state struct {
	identities map[uint32]props
	policies   map[uint32][2]testPolicy // by subject
}

// allows is the truth, asked without tables.
func (s state) allows(subject uint32, d Direction, peer uint32, addr netip.Addr, point uint32) bool {
	p := s.policies[subject][d]
	if !p.enforce {
		return true
	}
	who, known := s.identities[peer]
	for _, r := range p.rules {
		if point < r.from || point > r.to {
			continue
		}
		if r.bit == 8 || known && r.matches(who) || !known && r.action == ActionDeny {
			return r.action == ActionAllow
		}
	}
	best, action := -1, uint8(ActionDeny)
	for b, a := range p.blocks {
		if b.Contains(addr) && b.Bits() > best {
			best, action = b.Bits(), a
		}
	}
	return best >= 0 && action == ActionAllow
}

// selectors in use, sorted.
func (s state) selectors() map[string]testRule {
	out := map[string]testRule{}
	for _, list := range s.policies {
		for _, p := range list {
			for _, r := range p.rules {
				if r.bit != 8 {
					out[r.selector()] = testRule{bit: r.bit, not: r.not}
				}
			}
		}
	}
	return out
}

// matched are the selectors that select somebody.
func matched(p props, selectors map[string]testRule) (out []string) {
	for text, r := range selectors {
		if r.matches(p) {
			out = append(out, text)
		}
	}
	slices.Sort(out)
	return out
}

func classKey(p props, selectors map[string]testRule) ClassKey {
	sum := sha256.Sum256([]byte("class " + strings.Join(matched(p, selectors), " ")))
	return ClassKey(sum[:16])
}

// service numbers things at random, as one that began anew does.
type service struct {
	rng       *rand.Rand
	run       string
	seq       uint64
	selectors map[string]testRule
	numbers   map[ClassKey]uint32
	members   map[ClassKey][]string // selectors that the class matches
	nextClass uint32
	tables    map[string]uint64 // text of the policy → table
	contents  map[uint64]*builder
	nextTable uint64
	state     state
}

func newService(seed uint64) *service {
	s := &service{
		rng: rand.New(rand.NewPCG(seed, 1)), run: fmt.Sprintf("run%d", seed), numbers: map[ClassKey]uint32{}, members: map[ClassKey][]string{}, //nolint:gosec // a test
		tables: map[string]uint64{}, contents: map[uint64]*builder{}, selectors: map[string]testRule{},
		seq: seed * 1000, nextTable: seed * 100, nextClass: uint32(seed * 10), //nolint:gosec // small
	}
	return s
}

// builder compiles one policy.
type builder struct {
	id      uint64
	policy  testPolicy
	content Content
	classes map[string]uint16
	peers   map[ClassKey]uint16
	sent    [2]int // nodes and classes that the reader has
}

// class is the class of what matches.
func (b *builder) class(matches func(testRule) bool) uint16 {
	cuts := map[uint32]struct{}{lastTop: {}}
	for _, r := range b.policy.rules {
		cuts[r.to] = struct{}{}
		if r.from > 0 {
			cuts[r.from-1] = struct{}{}
		}
	}
	var list []interval
	for _, high := range slices.Sorted(maps.Keys(cuts)) {
		v := uint32(noAdmin)<<16 | noRest
		for i, r := range b.policy.rules {
			if high >= r.from && high <= r.to && matches(r) {
				v = uint32(noAdmin)<<16 | uint32(i+1) //nolint:gosec // small
				break
			}
		}
		if n := len(list); n > 0 && list[n-1].value == v {
			list[n-1].high = high
		} else {
			list = append(list, interval{high, v})
		}
	}
	return b.add(list)
}

func (b *builder) add(list []interval) uint16 {
	text := fmt.Sprint(list)
	if c, ok := b.classes[text]; ok {
		return c
	}
	var leaves []uint32
	for part := range slices.Chunk(list, Fanout) {
		var n Node
		for i := range Fanout {
			iv := part[min(i, len(part)-1)]
			n.High[i], n.Value[i] = iv.high, iv.value
		}
		b.content.Nodes = append(b.content.Nodes, n)
		leaves = append(leaves, uint32(len(b.content.Nodes)-1)) //nolint:gosec // small
	}
	root := leaves[0]
	if len(leaves) > 1 {
		var n Node
		for i := range Fanout {
			at := leaves[min(i, len(leaves)-1)]
			n.High[i], n.Value[i] = b.content.Nodes[at].High[Fanout-1], child|at
		}
		b.content.Nodes = append(b.content.Nodes, n)
		root = uint32(len(b.content.Nodes) - 1) //nolint:gosec // small
	}
	c := uint16(len(b.content.Classes)) //nolint:gosec // small
	b.content.Classes = append(b.content.Classes, root)
	b.classes[text] = c
	return c
}

func (s *service) build(p testPolicy) *builder {
	s.nextTable++
	b := &builder{id: s.nextTable, policy: p, classes: map[string]uint16{}, peers: map[ClassKey]uint16{}}
	b.content.Hash = sha256.Sum256([]byte(p.text()))
	b.content.Blocks = map[netip.Prefix][Scopes]uint16{}
	for _, r := range p.rules {
		b.content.Rules = append(b.content.Rules, Rule{Action: r.action, Tier: 1})
	}
	order := s.rng.Perm(Kinds)
	for _, kind := range order {
		b.content.DefaultClasses[kind] = b.class(func(r testRule) bool { return r.bit == 8 || kind == KindUnknown && r.action == ActionDeny })
	}
	if len(p.blocks) > 0 {
		b.content.HasAddresses = true
		for a := range uint8(3) {
			b.content.Rules = append(b.content.Rules, Rule{Action: a, Tier: 1})
		}
		nothing := b.add([]interval{{lastTop, uint32(noAdmin)<<16 | noRest}})
		b.content.AddressClasses = [Scopes]uint16{nothing, nothing, nothing}
		for prefix, action := range p.blocks {
			c := b.add([]interval{{lastTop, uint32(noAdmin)<<16 | uint32(len(p.rules)+1) + uint32(action)}}) //nolint:gosec // small
			b.content.Blocks[prefix] = [Scopes]uint16{c, c, c}
		}
	}
	for key, who := range s.members {
		b.row(key, who)
	}
	return b
}

// row is the class of a node class, and whether it needs a row.
func (b *builder) row(key ClassKey, who []string) (uint16, bool) {
	c := b.class(func(r testRule) bool { return r.bit == 8 || slices.Contains(who, r.selector()) })
	if c == b.content.DefaultClasses[0] {
		return c, false
	}
	b.peers[key] = c
	return c, true
}

func (s *service) define(b *builder) Step {
	st := TableDefine{Table: b.id, Content: b.content.copied()}
	for _, key := range slices.SortedFunc(maps.Keys(b.peers), func(x, y ClassKey) int { return cmp.Compare(s.numbers[x], s.numbers[y]) }) {
		st.Peers = append(st.Peers, Row{s.numbers[key], b.peers[key]})
	}
	b.sent = [2]int{len(b.content.Nodes), len(b.content.Classes)}
	return st
}

func (s *service) grown(b *builder) []Step {
	if b.sent == [2]int{len(b.content.Nodes), len(b.content.Classes)} {
		return nil
	}
	st := TableGrow{Table: b.id, Nodes: slices.Clone(b.content.Nodes[b.sent[0]:]), Classes: slices.Clone(b.content.Classes[b.sent[1]:])}
	b.sent = [2]int{len(b.content.Nodes), len(b.content.Classes)}
	return []Step{st}
}

func (s *service) number(key ClassKey, who props) []Step {
	if _, ok := s.numbers[key]; ok {
		return nil
	}
	s.nextClass++
	s.numbers[key], s.members[key] = s.nextClass, matched(who, s.selectors)
	return []Step{NodeClassDefine{s.nextClass, key}}
}

func (s *service) message(steps []Step) Message {
	s.seq++
	return Message{Incarnation: s.run, Seq: s.seq, Steps: steps}
}

// snapshot says everything there is in a state.
func (s *service) snapshot(st state) Message {
	s.state, s.selectors = st, st.selectors()
	var steps []Step
	ids := slices.Collect(maps.Keys(st.identities))
	s.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		key := classKey(st.identities[id], s.selectors)
		steps = append(steps, s.number(key, st.identities[id])...)
		steps = append(steps, IdentityUpdate{Identity: id, NodeClass: s.numbers[key]})
	}
	steps = append(steps, s.bindAll(st)...)
	return s.message(append(steps, SnapshotComplete{}, Barrier{PolicyRevision: s.seq}))
}

// bindAll defines the tables that a state needs and binds its subjects.
func (s *service) bindAll(st state) []Step {
	var steps, binds []Step
	for _, subject := range slices.Sorted(maps.Keys(st.policies)) {
		for d, p := range st.policies[subject] {
			bind := Bind{Subject: subject, Direction: Direction(d), Revision: s.seq + 1} //nolint:gosec // 0 or 1
			if p.enforce {
				text := p.text()
				if _, ok := s.tables[text]; !ok {
					b := s.build(p)
					s.tables[text], s.contents[b.id] = b.id, b
					steps = append(steps, s.define(b))
				}
				bind.Table = s.tables[text]
				for i := range p.rules {
					bind.Rules = append(bind.Rules, []Source{{Kind: "Test", Name: fmt.Sprint("policy of ", subject), Path: fmt.Sprint(i)}})
				}
			}
			binds = append(binds, bind)
		}
	}
	return append(steps, binds...)
}

// change leads from the last state to the next as the real service does:
// classes are split, identities come, tables come, endpoints are bound, tables
// go, identities go.
func (s *service) change(st state) Message {
	old := s.state
	s.state = st
	before := maps.Clone(s.selectors)
	maps.Copy(s.selectors, st.selectors())
	var steps []Step
	place := func(id uint32, who props) {
		key := classKey(who, s.selectors)
		if _, ok := s.numbers[key]; !ok {
			steps = append(steps, s.number(key, who)...)
			for _, b := range s.live() {
				if c, needed := b.row(key, s.members[key]); needed {
					steps = append(append(steps, s.grown(b)...), PeerUpdate{Table: b.id, Row: Row{s.numbers[key], c}})
				}
			}
		}
		steps = append(steps, IdentityUpdate{Identity: id, NodeClass: s.numbers[key]})
	}
	ids := slices.Sorted(maps.Keys(old.identities))
	for _, id := range ids { // split
		if who := old.identities[id]; classKey(who, before) != classKey(who, s.selectors) {
			place(id, who)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(st.identities)) { // come
		if _, ok := old.identities[id]; !ok {
			place(id, st.identities[id])
		}
	}
	retired := maps.Clone(s.tables)
	steps = append(steps, s.bindAll(st)...)
	for _, list := range st.policies {
		for _, p := range list {
			delete(retired, p.text())
		}
	}
	for _, text := range slices.Sorted(maps.Keys(retired)) {
		steps = append(steps, TableRetire{s.tables[text]})
		delete(s.contents, s.tables[text])
		delete(s.tables, text)
	}
	for _, id := range ids { // go
		if _, ok := st.identities[id]; !ok {
			steps = append(steps, IdentityUpdate{Identity: id})
		}
	}
	used := map[ClassKey]bool{}
	for _, who := range st.identities {
		used[classKey(who, s.selectors)] = true
	}
	for key, number := range s.numbers {
		if used[key] {
			continue
		}
		for _, b := range s.live() {
			if _, ok := b.peers[key]; ok {
				steps = append(steps, PeerUpdate{Table: b.id, Row: Row{NodeClass: number}, Delete: true})
				delete(b.peers, key)
			}
		}
		steps = append(steps, NodeClassRetire{number})
		delete(s.numbers, key)
		delete(s.members, key)
	}
	return s.message(append(steps, Barrier{PolicyRevision: s.seq + 1}))
}

func (s *service) live() []*builder {
	var out []*builder
	for _, id := range slices.Sorted(maps.Keys(s.contents)) {
		out = append(out, s.contents[id])
	}
	return out
}
