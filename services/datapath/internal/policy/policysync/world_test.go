// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// A world is a small policy service: identities with properties, rules that select them, and the
// steps that describe them. It is written for tests and shares no code with the real one.

// props are property bits.
type props uint8

// testRule allows or denies ports to peers that have a property, or lack it.
type testRule struct {
	bit      uint8 // property; 8: any peer
	not      bool
	action   policytable.Action
	from, to uint32 // points
}

func (r testRule) selector() string { return fmt.Sprintf("%d/%v", r.bit, r.not) }

func (r testRule) matches(p props) bool { return r.bit == 8 || p>>r.bit&1 == 1 != r.not }

// testPolicy is one direction; nil rules with enforce: default deny.
type testPolicy struct {
	enforce  bool
	rules    []testRule
	prefixes map[netip.Prefix]policytable.Action // action for all addresses in the prefix, after the rules
}

func (p testPolicy) text() string { return fmt.Sprintf("%v %v %v", p.enforce, p.rules, p.prefixes) }

// testPolicies are the policies of a subject.
type testPolicies struct{ egress, ingress testPolicy }

// of returns the policy of a direction.
func (p testPolicies) of(d policytable.Direction) testPolicy {
	if d == policytable.Egress {
		return p.egress
	}
	return p.ingress
}

// sides returns the policies by direction.
func (p testPolicies) sides() [policytable.Directions]testPolicy {
	return [...]testPolicy{policytable.Egress: p.egress, policytable.Ingress: p.ingress}
}

type state struct {
	identities map[uint32]props
	policies   map[uint32]testPolicies // by subject
}

// allows returns the expected verdict, computed without tables.
func (s state) allows(subject uint32, d policytable.Direction, peer uint32, addr netip.Addr, point uint32) bool {
	p := s.policies[subject].of(d)
	if !p.enforce {
		return true
	}
	who, known := s.identities[peer]
	for _, r := range p.rules {
		if point < r.from || point > r.to {
			continue
		}
		if r.bit == 8 || known && r.matches(who) || !known && r.action == policytable.Deny {
			return r.action == policytable.Allow
		}
	}
	best, action := -1, policytable.Deny
	for b, a := range p.prefixes {
		if b.Contains(addr) && b.Bits() > best {
			best, action = b.Bits(), a
		}
	}
	return best >= 0 && action == policytable.Allow
}

// selectors returns the selectors in use.
func (s state) selectors() map[string]testRule {
	out := map[string]testRule{}
	for _, list := range s.policies {
		for _, p := range list.sides() {
			for _, r := range p.rules {
				if r.bit != 8 {
					out[r.selector()] = testRule{bit: r.bit, not: r.not}
				}
			}
		}
	}
	return out
}

// matched returns the selectors that match.
func matched(p props, selectors map[string]testRule) (out []string) {
	for text, r := range selectors {
		if r.matches(p) {
			out = append(out, text)
		}
	}
	slices.Sort(out)
	return out
}

func classKey(p props, selectors map[string]testRule) policytable.ClassKey {
	sum := sha256.Sum256([]byte("class " + strings.Join(matched(p, selectors), " ")))
	return policytable.ClassKey(sum[:16])
}

// service simulates sluice-policy. The seed determines the numbers of its tables and identity classes and the order
// of its steps, so that services with different seeds are like the same service before and after a restart.
type service struct {
	rng       *rand.Rand
	run       string
	seq       uint64
	selectors map[string]testRule
	numbers   map[policytable.ClassKey]policytable.IdentityClass
	members   map[policytable.ClassKey][]string // selectors that the class matches
	nextClass policytable.IdentityClass
	tables    map[string]policytable.ID // by the text of the policy
	contents  map[policytable.ID]*builder
	nextTable policytable.ID
	state     state
	tenant    func(subject uint32) shares.Tenant // nil: unset
}

func newService(seed uint64) *service {
	s := &service{
		rng: rand.New(rand.NewPCG(seed, 1)), run: fmt.Sprintf("run%d", seed), numbers: map[policytable.ClassKey]policytable.IdentityClass{}, members: map[policytable.ClassKey][]string{}, //nolint:gosec // a test
		tables: map[string]policytable.ID{}, contents: map[policytable.ID]*builder{}, selectors: map[string]testRule{},
		seq: seed * 1000, nextTable: policytable.ID(seed * 100), nextClass: policytable.IdentityClass(seed * 10), //nolint:gosec // small
	}
	return s
}

// builder compiles one policy.
type builder struct {
	id      policytable.ID
	policy  testPolicy
	content nodetable.Content
	classes map[string]uint16
	peers   map[policytable.ClassKey]uint16
	sent    int // classes that the subscriber has
}

// class returns the class of a peer, given the rules that match it.
func (b *builder) class(matches func(testRule) bool) uint16 {
	cuts := map[uint32]struct{}{lastTop: {}}
	for _, r := range b.policy.rules {
		cuts[r.to] = struct{}{}
		if r.from > 0 {
			cuts[r.from-1] = struct{}{}
		}
	}
	var list policytable.Ranges
	first := uint32(0)
	for _, high := range slices.Sorted(maps.Keys(cuts)) {
		rule := uint16(0)
		for i, r := range b.policy.rules {
			if high >= r.from && high <= r.to && matches(r) {
				rule = uint16(i + 1) //nolint:gosec // small
				break
			}
		}
		if n := len(list); n > 0 && list[n-1].Rest == rule {
			list[n-1].Last = high
		} else {
			list = append(list, policytable.PortRange{First: first, Last: high, Rest: rule})
		}
		first = high + 1
	}
	return b.add(slices.DeleteFunc(list, func(r policytable.PortRange) bool { return r.Rest == 0 }))
}

const lastTop = policytable.LastPoint

func (b *builder) add(list policytable.Ranges) uint16 {
	text := fmt.Sprint(list)
	if c, ok := b.classes[text]; ok {
		return c
	}
	c := uint16(len(b.content.Classes)) //nolint:gosec // small
	b.content.Classes = append(b.content.Classes, list)
	b.classes[text] = c
	return c
}

// everywhere returns one rule for all ports.
func everywhere(rule uint16) policytable.Ranges {
	return policytable.Ranges{{Last: policytable.LastPoint, Rest: rule}}
}

func (s *service) build(p testPolicy) *builder {
	s.nextTable++
	b := &builder{id: s.nextTable, policy: p, classes: map[string]uint16{}, peers: map[policytable.ClassKey]uint16{}}
	b.content.Hash = sha256.Sum256([]byte(p.text()))
	b.content.Prefixes = map[netip.Prefix]policytable.PrefixClasses{}
	for _, r := range p.rules {
		b.content.Rules = append(b.content.Rules, policytable.Rule{Action: r.action, Tier: 1})
	}
	order := s.rng.Perm(int(identity.Kinds))
	for _, kind := range order {
		b.content.DefaultClasses[kind] = b.class(func(r testRule) bool {
			return r.bit == 8 || identity.Kind(kind) == identity.KindUnknown && r.action == policytable.Deny
		})
	}
	if len(p.prefixes) > 0 {
		b.content.HasAddresses = true
		for a := range policytable.Action(3) {
			b.content.Rules = append(b.content.Rules, policytable.Rule{Action: a, Tier: 1})
		}
		nothing := b.add(nil)
		b.content.AddressClasses = policytable.PrefixClasses{nothing, nothing, nothing}
		for prefix, action := range p.prefixes {
			c := b.add(everywhere(uint16(len(p.rules)+1) + uint16(action))) //nolint:gosec // small
			b.content.Prefixes[prefix] = policytable.PrefixClasses{c, c, c}
		}
	}
	for key, who := range s.members {
		b.row(key, who)
	}
	return b
}

// row returns the class of an identity class, and whether it needs a row.
func (b *builder) row(key policytable.ClassKey, who []string) (uint16, bool) {
	c := b.class(func(r testRule) bool { return r.bit == 8 || slices.Contains(who, r.selector()) })
	if c == b.content.DefaultClasses[0] {
		return c, false
	}
	b.peers[key] = c
	return c, true
}

func (s *service) define(b *builder) policytable.Step {
	st := policytable.DefineTable{Table: b.id, Content: nodetable.NewContent(b.content.Table, 0).Table}
	for _, key := range slices.SortedFunc(maps.Keys(b.peers), func(x, y policytable.ClassKey) int { return cmp.Compare(s.numbers[x], s.numbers[y]) }) {
		st.Peers = append(st.Peers, policytable.Row{IdentityClass: s.numbers[key], Class: b.peers[key]})
	}
	b.sent = len(b.content.Classes)
	return st
}

func (s *service) grown(b *builder) []policytable.Step {
	if b.sent == len(b.content.Classes) {
		return nil
	}
	st := policytable.GrowTable{Table: b.id, Classes: slices.Clone(b.content.Classes[b.sent:])}
	b.sent = len(b.content.Classes)
	return []policytable.Step{st}
}

func (s *service) number(key policytable.ClassKey, who props) []policytable.Step {
	if _, ok := s.numbers[key]; ok {
		return nil
	}
	s.nextClass++
	s.numbers[key], s.members[key] = s.nextClass, matched(who, s.selectors)
	return []policytable.Step{policytable.DefineIdentityClass{IdentityClass: s.nextClass, Key: key}}
}

func (s *service) message(steps []policytable.Step) policytable.Message {
	s.seq++
	return policytable.Message{Incarnation: s.run, Seq: s.seq, Steps: steps}
}

// snapshot returns a message with a complete state.
func (s *service) snapshot(st state) policytable.Message {
	s.state, s.selectors = st, st.selectors()
	var steps []policytable.Step
	ids := slices.Collect(maps.Keys(st.identities))
	s.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		key := classKey(st.identities[id], s.selectors)
		steps = append(steps, s.number(key, st.identities[id])...)
		steps = append(steps, policytable.SetIdentity{Identity: identity.Numeric(id), IdentityClass: s.numbers[key]})
	}
	steps = append(steps, s.bindAll(st)...)
	return s.message(append(steps, policytable.SnapshotComplete{}, policytable.Barrier{PolicyRevision: s.seq}))
}

// bindAll defines the tables that a state needs and binds its subjects.
func (s *service) bindAll(st state) []policytable.Step {
	var steps, binds []policytable.Step
	for _, subject := range slices.Sorted(maps.Keys(st.policies)) {
		for d, p := range st.policies[subject].sides() {
			bind := policytable.BindSubject{Subject: identity.Numeric(subject), Direction: policytable.Direction(d), Revision: s.seq + 1} //nolint:gosec // 0 or 1
			if s.tenant != nil {
				bind.Tenant = s.tenant(subject)
			}
			if p.enforce {
				text := p.text()
				if _, ok := s.tables[text]; !ok {
					b := s.build(p)
					s.tables[text], s.contents[b.id] = b.id, b
					steps = append(steps, s.define(b))
				}
				bind.Table = s.tables[text]
				for i := range p.rules {
					bind.Rules = append(bind.Rules, []policytable.Source{{Kind: "Test", Name: fmt.Sprint("policy of ", subject), Path: fmt.Sprint(i)}})
				}
			}
			binds = append(binds, bind)
		}
	}
	return append(steps, binds...)
}

// change leads from the last state to the next, in the order of the real service: classes are
// split, identities are added, tables are defined, subjects are bound, tables are retired,
// identities are removed.
func (s *service) change(st state) policytable.Message {
	old := s.state
	s.state = st
	before := maps.Clone(s.selectors)
	maps.Copy(s.selectors, st.selectors())
	var steps []policytable.Step
	place := func(id uint32, who props) {
		key := classKey(who, s.selectors)
		if _, ok := s.numbers[key]; !ok {
			steps = append(steps, s.number(key, who)...)
			for _, b := range s.live() {
				if c, needed := b.row(key, s.members[key]); needed {
					steps = append(append(steps, s.grown(b)...), policytable.SetPeer{Table: b.id, Row: policytable.Row{IdentityClass: s.numbers[key], Class: c}})
				}
			}
		}
		steps = append(steps, policytable.SetIdentity{Identity: identity.Numeric(id), IdentityClass: s.numbers[key]})
	}
	ids := slices.Sorted(maps.Keys(old.identities))
	for _, id := range ids { // split
		if who := old.identities[id]; classKey(who, before) != classKey(who, s.selectors) {
			place(id, who)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(st.identities)) { // add
		if _, ok := old.identities[id]; !ok {
			place(id, st.identities[id])
		}
	}
	retired := maps.Clone(s.tables)
	steps = append(steps, s.bindAll(st)...)
	for _, list := range st.policies {
		for _, p := range list.sides() {
			delete(retired, p.text())
		}
	}
	for _, text := range slices.Sorted(maps.Keys(retired)) {
		steps = append(steps, policytable.RetireTable{Table: s.tables[text]})
		delete(s.contents, s.tables[text])
		delete(s.tables, text)
	}
	for _, id := range ids { // remove
		if _, ok := st.identities[id]; !ok {
			steps = append(steps, policytable.SetIdentity{Identity: identity.Numeric(id)})
		}
	}
	used := map[policytable.ClassKey]bool{}
	for _, who := range st.identities {
		used[classKey(who, s.selectors)] = true
	}
	for key, number := range s.numbers {
		if used[key] {
			continue
		}
		for _, b := range s.live() {
			if _, ok := b.peers[key]; ok {
				steps = append(steps, policytable.DeletePeer{Table: b.id, IdentityClass: number})
				delete(b.peers, key)
			}
		}
		steps = append(steps, policytable.RetireIdentityClass{IdentityClass: number})
		delete(s.numbers, key)
		delete(s.members, key)
	}
	return s.message(append(steps, policytable.Barrier{PolicyRevision: s.seq + 1}))
}

func (s *service) live() []*builder {
	var out []*builder
	for _, id := range slices.Sorted(maps.Keys(s.contents)) {
		out = append(out, s.contents[id])
	}
	return out
}
