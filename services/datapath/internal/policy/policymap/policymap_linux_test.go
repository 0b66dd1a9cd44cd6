// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// model is the expected content of the maps in its simplest form.
type model struct {
	tables  map[nodetable.ID]*nodetable.Content
	words   map[uint32]nodetable.Identity
	classes map[policytable.ClassKey]nodetable.IdentityClass
	// policies of the published endpoints
	policies map[endpointmap.ID]endpointmap.Policy
}

func newModel() *model {
	return &model{
		tables: map[nodetable.ID]*nodetable.Content{}, words: map[uint32]nodetable.Identity{},
		classes: map[policytable.ClassKey]nodetable.IdentityClass{}, policies: map[endpointmap.ID]endpointmap.Policy{},
	}
}

func cloneContent(c *nodetable.Content) *nodetable.Content {
	d := *c
	d.Rules, d.Classes = slices.Clone(c.Rules), slices.Clone(c.Classes)
	d.Peers, d.Prefixes = maps.Clone(c.Peers), maps.Clone(c.Prefixes)
	if d.Peers == nil {
		d.Peers = map[nodetable.IdentityClass]uint16{}
	}
	if d.Prefixes == nil {
		d.Prefixes = map[netip.Prefix]policytable.PrefixClasses{}
	}
	return &d
}

// verdict is the answer of a table.
type verdict struct {
	action uint8
	rule   uint16
	by     event.By
}

// verdictOf asks a program.
func verdictOf(
	t testing.TB, j kerneltest.Evaluator, table nodetable.ID, id identity.Numeric, addr netip.Addr, point uint32,
) verdict {
	t.Helper()
	q := kerneltest.Question(table, id, addr, 0, 0)
	q.Point = point
	_, side := j.Ask(t, q)
	return verdict{side.Action, side.Rule, event.By(side.By)}
}

// lookup computes the verdict in the slow, obvious way, and the expected Place.
func (m *model) lookup(
	c *nodetable.Content, id identity.Numeric, addr netip.Addr, point uint32,
) (v verdict, at Place) {
	w, ok := m.words[uint32(id)]
	if !ok {
		w = nodetable.Identity{Kind: identity.KindUnknown}
	}
	class, row := c.Peers[w.Class]
	if !w.Known || !row {
		class, row = c.DefaultClasses[w.Kind], false
	}
	at = Place{IdentityClass: class, IdentityRow: row}
	who := valueAt(c, class, point)
	both := [2]uint16{who[0], who[1]}
	if c.HasAddresses {
		at.AddressClass = c.AddressClasses[w.Scope]
		for p, classes := range c.Prefixes {
			if p.Contains(addr) && (!at.AddressPrefix.IsValid() || p.Bits() > at.AddressPrefix.Bits()) {
				at.AddressClass, at.AddressPrefix = classes[w.Scope], p
			}
		}
		where := valueAt(c, at.AddressClass, point)
		both = [2]uint16{min(who[0], where[0]), min(who[1], where[1])}
	}
	unknown := w.Kind == identity.KindUnknown
	for i, none := range []uint16{noAdminRule, noOtherRule} {
		if both[i] == none || c.Rules[both[i]-1].Action == 3 {
			continue
		}
		r := c.Rules[both[i]-1]
		v = verdict{uint8(r.Action), both[i], event.ByRule}
		if r.Action == 0 && unknown && who[i] == both[i] {
			v.by = event.ByUnknownIdentity
		}
		return v, at
	}
	switch {
	case c.DefaultAllow:
		v.action, v.by = event.ActionAllow, event.ByDefault
	case c.HostAllow && w.Kind == identity.KindHost:
		v.action, v.by = event.ActionAllow, event.ByHostAllow
	case unknown:
		v.by = event.ByUnknownIdentity
	default:
		v.by = event.ByDefault
	}
	return v, at
}

// valueAt returns the value of a class at a point.
func valueAt(c *nodetable.Content, class uint16, point uint32) [2]uint16 {
	for _, r := range c.Classes[class] {
		if r.First <= point && point <= r.Last {
			v := packRules(r)
			return [2]uint16{uint16(v >> 16), uint16(v)}
		}
	}
	return [2]uint16{noAdminRule, noOtherRule}
}

// randomTable generates contents from small numbers, so that values coincide.
type randomTable struct {
	*rand.Rand
	serial uint64
}

func (r *randomTable) hash() (h [32]byte) {
	r.serial++
	binary.BigEndian.PutUint64(h[:], r.serial)
	h[31] = 1
	return h
}

// rules of a range, 0: none.
func (r *randomTable) rules(rules int) (admin, rest uint16) {
	if rules > 0 && r.IntN(2) == 0 {
		admin = uint16(1 + r.IntN(rules))
	}
	if rules > 0 && r.IntN(3) > 0 {
		rest = uint16(1 + r.IntN(rules))
	}
	return admin, rest
}

// points are the borders of ranges and the points that are evaluated.
var points = []uint32{0, 1, 6<<16 | 79, 6<<16 | 80, 6<<16 | 81, 6<<16 | 443, 17<<16 | 53, 58 << 16, 0xfffffffe, 0xffffffff}

// class returns a list in the form in which the maps return it: without ranges that have no rule,
// and with adjacent equal ranges merged. Some have more ranges than a node holds.
func (r *randomTable) class(rules int) policytable.Ranges {
	borders := slices.Clone(points)
	if r.IntN(3) == 0 {
		for range r.IntN(400) {
			borders = append(borders, r.Uint32())
		}
	}
	slices.Sort(borders)
	var out policytable.Ranges
	first := uint32(0)
	for _, border := range slices.Compact(borders) {
		if border != policytable.LastPoint && r.IntN(2) == 0 {
			continue
		}
		x := policytable.PortRange{First: first, Last: border}
		x.Admin, x.Rest = r.rules(rules)
		first = border + 1
		if n := len(out); n > 0 && out[n-1].Last+1 == x.First && packRules(out[n-1]) == packRules(x) {
			out[n-1].Last = x.Last
		} else if x.Admin != 0 || x.Rest != 0 {
			out = append(out, x)
		}
	}
	return out
}

func (r *randomTable) content() *nodetable.Content {
	whole := nodetable.NewContent(policytable.Table{
		Hash: r.hash(), DefaultAllow: r.IntN(2) == 0, HostAllow: r.IntN(2) == 0, HasAddresses: r.IntN(2) == 0,
	}, 0)
	c := &whole
	for range r.IntN(6) {
		c.Rules = append(c.Rules, policytable.Rule{
			Action: policytable.Action(r.IntN(4)), Tier: policytable.Tier(r.IntN(4)), Proxy: policytable.Proxy(r.IntN(4)),
			RuleSet: policytable.RuleSet(r.IntN(1 << 16)), PassesWithoutProxy: r.IntN(2) == 1,
		})
	}
	for range 1 + r.IntN(5) {
		c.Classes = append(c.Classes, r.class(len(c.Rules)))
	}
	for i := range c.DefaultClasses {
		c.DefaultClasses[i] = r.classOf(c)
	}
	for i := range c.AddressClasses {
		c.AddressClasses[i] = r.classOf(c)
	}
	for range r.IntN(8) {
		c.Peers[nodetable.IdentityClass(1+r.IntN(20))] = r.classOf(c)
	}
	if c.HasAddresses {
		for range r.IntN(6) {
			p, classes := r.classedPrefix(c)
			c.Prefixes[p] = classes
		}
	}
	return c
}

func (r *randomTable) classOf(c *nodetable.Content) uint16 { return uint16(r.IntN(len(c.Classes))) }

func (r *randomTable) classedPrefix(c *nodetable.Content) (p netip.Prefix, classes policytable.PrefixClasses) {
	for i := range classes {
		classes[i] = r.classOf(c)
	}
	return r.prefix(), classes
}

func (r *randomTable) prefix() netip.Prefix {
	a := r.addr()
	bits := []int{0, 8, 30, a.BitLen() - 1, a.BitLen()}[r.IntN(5)]
	p, err := a.Prefix(bits)
	if err != nil {
		panic(err)
	}
	return p
}

func (r *randomTable) addr() netip.Addr {
	if r.IntN(2) == 0 {
		return netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(8))})
	}
	return netip.AddrFrom16([16]byte{0xfd, 15: byte(r.IntN(8))})
}

func (r *randomTable) identity() identity.Numeric {
	return []identity.Numeric{1, 9, 256, 257, 258, 65535, 0xff0000, 0xff0fff, 70000}[r.IntN(9)]
}

func (r *randomTable) word() nodetable.Identity {
	if r.IntN(4) == 0 {
		return nodetable.Identity{}
	}
	return nodetable.Identity{Class: nodetable.IdentityClass(1 + r.IntN(20)), Kind: identity.Kind(r.IntN(8)), Scope: identity.PeerScope(r.IntN(3)), Known: true}
}

// randomKey returns a random key of m.
func randomKey[K comparable, V any](r *rand.Rand, m map[K]V, less func(a, b K) int) (k K, ok bool) {
	if len(m) == 0 {
		return k, false
	}
	return slices.SortedFunc(maps.Keys(m), less)[r.IntN(len(m))], true
}

func (r *randomTable) table(m *model) (nodetable.ID, bool) {
	return randomKey(r.Rand, m.tables, func(a, b nodetable.ID) int { return int(a) - int(b) })
}

// operation is one change of both kernel and model. It returns the changed model; m itself stays.
type operation struct {
	name string
	do   func(*instance) error
	then func(*model)
}

// operation draws the next change.
func (r *randomTable) operation(t testing.TB, m *model) operation {
	id, some := r.table(m)
	var c *nodetable.Content
	if some {
		c = m.tables[id]
	}
	const mostClasses = 60
	switch op := r.IntN(14); {
	case !some || op == 0 && len(m.tables) < 12:
		n := r.content()
		if some && r.IntN(3) == 0 && c.HasAddresses {
			// the same prefixes, if their classes exist
			n.HasAddresses = true
			clear(n.Prefixes)
			for p, classes := range c.Prefixes {
				if int(slices.Max(classes[:])) < len(n.Classes) {
					n.Prefixes[p] = classes
				}
			}
		}
		var defined nodetable.ID
		return operation{
			fmt.Sprintf("define %d classes, %d rows, %d prefixes", len(n.Classes), len(n.Peers), len(n.Prefixes)),
			func(k *instance) (err error) {
				defined, err = k.DefineTable(*n)
				if err == nil && m.tables[defined] != nil {
					t.Fatalf("table ID %d is assigned twice", defined)
				}
				return err
			}, func(m *model) { m.tables[defined] = cloneContent(n) },
		}
	case op <= 2 && len(c.Classes) < mostClasses:
		grown := cloneContent(c)
		for range min(1+r.IntN(4), mostClasses-len(c.Classes)) {
			grown.Classes = append(grown.Classes, r.class(len(grown.Rules)))
		}
		return operation{
			fmt.Sprintf("grow %d to %d classes", id, len(grown.Classes)),
			func(k *instance) error {
				return k.GrowTable(id, grown.Classes[len(c.Classes):])
			}, func(m *model) { m.tables[id] = grown },
		}
	case op <= 4:
		nc, class := nodetable.IdentityClass(1+r.IntN(20)), r.classOf(c)
		have, there := c.Peers[nc]
		return operation{
			fmt.Sprintf("row of %d: %d to %d", id, nc, class),
			func(k *instance) error {
				err := k.SetPeer(id, nc, class)
				if there && have != class && errors.Is(err, pin.ErrExists) {
					return nil
				}
				return err
			}, func(m *model) {
				if !there {
					m.tables[id].Peers[nc] = class
				}
			},
		}
	case op == 5:
		nc := nodetable.IdentityClass(1 + r.IntN(20))
		return operation{
			fmt.Sprintf("no row of %d: %d", id, nc),
			func(k *instance) error { return k.DeletePeer(id, nc) },
			func(m *model) { delete(m.tables[id].Peers, nc) },
		}
	case op == 6 && r.IntN(2) == 0:
		classes := c.DefaultClasses
		half := len(classes) / 2 * r.IntN(2) // of one 64-bit word, which is one write
		for i := half; i < half+len(classes)/2; i++ {
			classes[i] = r.classOf(c)
		}
		return operation{
			fmt.Sprintf("peers without a row of %d: %v", id, classes),
			func(k *instance) error { return k.SetDefaults(id, classes) },
			func(m *model) { m.tables[id].DefaultClasses = classes },
		}
	case op <= 7:
		p, classes := r.classedPrefix(c)
		return operation{
			fmt.Sprintf("prefix of %d: %v %v", id, p, classes),
			func(k *instance) error { return k.SetPrefix(id, p, classes) },
			func(m *model) { m.tables[id].Prefixes[p] = classes },
		}
	case op == 8:
		p := r.prefix()
		return operation{
			fmt.Sprintf("no prefix of %d: %v", id, p),
			func(k *instance) error { return k.DeletePrefix(id, p) },
			func(m *model) { delete(m.tables[id].Prefixes, p) },
		}
	case op == 9:
		named := slices.ContainsFunc(slices.Collect(maps.Values(m.policies)),
			func(p endpointmap.Policy) bool { return p.Egress == id || p.Ingress == id })
		return operation{
			fmt.Sprintf("retire %d", id),
			func(k *instance) error {
				err := k.RetireTables(id)
				if named {
					if !errors.Is(err, endpointmap.ErrInUse) {
						return fmt.Errorf("retired a table in use: %w", err)
					}
					return nil
				}
				return err
			}, func(m *model) {
				if !named {
					delete(m.tables, id)
				}
			},
		}
	case op == 10:
		return operation{"barrier", func(k *instance) error { return k.Barrier(t.Context()) }, func(*model) {}}
	case op == 11:
		s, ok := randomKey(r.Rand, m.policies, func(a, b endpointmap.ID) int { return int(a) - int(b) })
		if !ok {
			break
		}
		other, _ := r.table(m)
		return operation{
			fmt.Sprintf("slot %d by %d and %d", s, id, other),
			func(k *instance) error { _, err := k.endpoints.SetPolicy(s, id, other); return err },
			func(m *model) { m.policies[s] = endpointmap.Policy{Egress: id, Ingress: other} },
		}
	case op == 12:
		key := policytable.ClassKey{byte(1 + r.IntN(30))}
		if nc, ok := m.classes[key]; ok && r.IntN(2) == 0 {
			return operation{
				fmt.Sprintf("retire identity class %d", nc),
				func(k *instance) error { return k.RetireIdentityClasses(nc) }, func(m *model) { delete(m.classes, key) },
			}
		}
		var nc nodetable.IdentityClass
		return operation{
			fmt.Sprintf("identity class of %x", key[:1]),
			func(k *instance) (err error) { nc, err = k.DefineIdentityClass(key); return err },
			func(m *model) { m.classes[key] = nc },
		}
	}
	iden, w := r.identity(), r.word()
	return operation{
		fmt.Sprintf("identity %d is %+v", iden, w),
		func(k *instance) error {
			err := k.SetIdentities(map[uint32]nodetable.Identity{uint32(iden): w})
			if iden == 70000 && errors.Is(err, pin.ErrInvalid) {
				return nil
			}
			return err
		}, func(m *model) {
			if iden == 70000 || !w.Known {
				delete(m.words, uint32(iden))
				return
			}
			m.words[uint32(iden)] = w
		},
	}
}

func (m *model) clone() *model {
	c := newModel()
	for id, content := range m.tables {
		c.tables[id] = cloneContent(content)
	}
	maps.Copy(c.words, m.words)
	maps.Copy(c.classes, m.classes)
	maps.Copy(c.policies, m.policies)
	return c
}

// difference describes how the maps differ from the model, "" if they do not.
func (m *model) difference(k *instance) string {
	infos, err := k.Tables()
	if err != nil {
		return err.Error()
	}
	if len(infos) != len(m.tables) {
		return fmt.Sprintf("%d tables, want %d", len(infos), len(m.tables))
	}
	for _, info := range infos {
		want := m.tables[info.ID]
		if want == nil {
			return fmt.Sprintf("table %d should not exist", info.ID)
		}
		got, err := k.TableContent(info.ID)
		if err != nil {
			return err.Error()
		}
		if !reflect.DeepEqual(&got, want) {
			return fmt.Sprintf("table %d is\n%+v, want\n%+v", info.ID, got, *want)
		}
		if info.Rules != len(want.Rules) || info.Classes != len(want.Classes) || info.Nodes < 1 ||
			info.Peers != len(want.Peers) || info.Prefixes != len(want.Prefixes) || info.Hash != want.Hash {
			return fmt.Sprintf("table %d is listed as %+v", info.ID, info)
		}
	}
	words, err := k.Identities()
	if err != nil {
		return err.Error()
	}
	if !maps.Equal(words, m.words) {
		return fmt.Sprintf("words %v, want %v", words, m.words)
	}
	if got := k.IdentityClasses(); !maps.Equal(got, m.classes) {
		return fmt.Sprintf("identity classes %v, want %v", got, m.classes)
	}
	return ""
}

// audited fails the test if the maps differ from what was written.
func audited(t testing.TB, k *instance, when string) {
	t.Helper()
	ds, err := k.Audit(false)
	if err != nil {
		t.Fatal(err)
	}
	if len(ds) > 0 {
		t.Fatalf("%s: the maps differ from what was written: %q", when, ds)
	}
}

// lookups compares the verdicts of all tables at some points.
func (m *model) lookups(t testing.TB, k *instance, j kerneltest.Evaluator, r *randomTable, when string) {
	t.Helper()
	for id, c := range m.tables {
		for range 4 {
			who, addr, point := r.identity(), r.addr(), points[r.IntN(len(points))]+uint32(r.IntN(2))
			want, at := m.lookup(c, who, addr, point)
			if got := verdictOf(t, j, id, who, addr, point); got != want {
				t.Fatalf("%s: table %d, identity %d, %v, point %#x: %+v, want %+v",
					when, id, who, addr, point, got, want)
			}
			if place, err := k.Place(id, m.words[uint32(who)], addr); err != nil || place != at {
				t.Fatalf("%s: identity %d, %v is at %+v (%v) in table %d, want %+v",
					when, who, addr, place, err, id, at)
			}
		}
	}
}

// TestKernelTablesAreWhatWasWritten applies random changes to the maps and to a simple model, and
// restarts occasionally.
func TestKernelTablesAreWhatWasWritten(t *testing.T) {
	t.Parallel()
	dir := kerneltest.NewBPFFS(t)
	k := open(t, dir)
	j := kerneltest.NewEvaluator(t, k.pins) // the next process adopts its maps
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := &randomTable{Rand: rand.New(rand.NewPCG(seed, 1))}
	m := newModel()
	for n := range byte(3) {
		e := k.publish(t, 10+n, allowed)
		m.policies[e.Slot] = e.Policy
	}
	for i := range 800 {
		op := r.operation(t, m)
		if err := op.do(k); err != nil {
			t.Fatalf("step %d: %s: %v", i, op.name, err)
		}
		op.then(m)
		if d := m.difference(k); d != "" {
			t.Fatalf("step %d: after %s: %s", i, op.name, d)
		}
		m.lookups(t, k, j, r, op.name)
		if i%100 == 0 {
			audited(t, k, op.name)
		}
		if i%200 == 199 {
			k.close(t)
			k = open(t, dir)
			if d := m.difference(k); d != "" {
				t.Fatalf("step %d: after a restart: %s", i, d)
			}
			audited(t, k, "restart")
		}
	}
	// remove everything; nothing may remain
	for s := range m.policies {
		if err := k.endpoints.Unpublish(s); err != nil {
			t.Fatal(err)
		}
	}
	for id := range m.tables {
		if err := k.RetireTables(id); err != nil {
			t.Fatal(err)
		}
	}
	for _, nc := range m.classes {
		if err := k.RetireIdentityClasses(nc); err != nil {
			t.Fatal(err)
		}
	}
	for id := range m.words {
		if err := k.SetIdentities(map[uint32]nodetable.Identity{id: {}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	// a class number without a key that was referenced at the last start stays reserved until the
	// next
	k.close(t)
	k = open(t, dir)
	us, err := k.Usage()
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range us {
		if n != 0 {
			t.Errorf("%d entries left in %s", n, name)
		}
	}
	if i := strings.IndexFunc(snapshot(t, k, false), func(r rune) bool { return r != 0 }); i >= 0 {
		t.Errorf("byte %d of the maps is not zero", i)
	}
}

// snapshot returns the raw contents of the maps of tables; optionally without sl_rule, in which a
// start leaves the rules of tables that were not freed.
func snapshot(t testing.TB, k *instance, withRules bool) string {
	t.Helper()
	c, err := k.store.read()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	for _, part := range [][]byte{
		memory(c.tableKeys), memory(c.classKeys), memory(c.ports), k.store.tableMem, k.store.classMem, k.store.idMem,
	} {
		b.Write(part)
	}
	if withRules {
		rules, err := pin.AllElements[bpf.MapsSlRule](k.store.tableMaps.rules)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(memory(rules))
	}
	if len(c.peers)+len(c.prefixes) > 0 {
		fmt.Fprint(&b, c.peers, c.prefixes) // maps are printed sorted
	}
	return b.String()
}

// memory views a slice of values without pointers or padding as bytes.
func memory[V any](s []V) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(s[0])))
}

var errKilled = errors.New("killed")

// TestKernelTablesSurviveAKillAtEveryWrite interrupts random changes at each of their writes, as a
// kill would, and restarts. Then the maps hold the content before or after the change and nothing
// else. Before the restart, no existing table has a third verdict.
func TestKernelTablesSurviveAKillAtEveryWrite(t *testing.T) {
	t.Parallel()
	dir := kerneltest.NewBPFFS(t)
	k := open(t, dir)
	j := kerneltest.NewEvaluator(t, k.pins) // the next process adopts its maps
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := &randomTable{Rand: rand.New(rand.NewPCG(seed, 2))}
	m := newModel()
	kills, changes := 0, 0
	for kills < 50 {
		op := r.operation(t, m)
		for n := 0; ; n++ {
			writes := 0
			k.store.before = func(string) error {
				if writes++; writes > n {
					return errKilled
				}
				return nil
			}
			err := op.do(k)
			k.store.before = nil
			after := m.clone()
			if err == nil {
				op.then(m)
				if writes > 0 {
					changes++
				}
				break
			}
			if !errors.Is(err, errKilled) {
				t.Fatalf("%s, killed after %d writes: %v", op.name, n, err)
			}
			kills++
			op.then(after)
			oldOrNew(t, j, r, m, after, op.name)
			k.close(t)
			k = open(t, dir)
			audited(t, k, op.name+", killed")
			if d := m.difference(k); d != "" {
				// a move and the steps before it may be complete
				if e := after.difference(k); e != "" {
					t.Fatalf("%s, killed after %d writes: neither as before:\n%.2000s\nnor as after:\n%.2000s", op.name, n, d, e)
				}
				m = after
				break
			}
		}
	}
	t.Logf("%d kills in %d changes", kills, changes)
}

// oldOrNew evaluates packets by all tables that existed before a change. Each verdict must be the one before or after
// the change.
func oldOrNew(t testing.TB, j kerneltest.Evaluator, r *randomTable, before, after *model, what string) {
	t.Helper()
	for id, c := range before.tables {
		then := after.tables[id]
		if then == nil {
			then = c
		}
		for range 20 {
			who, addr, point := r.identity(), r.addr(), points[r.IntN(len(points))]
			got := verdictOf(t, j, id, who, addr, point)
			old, _ := before.lookup(c, who, addr, point)
			updated, _ := after.lookup(then, who, addr, point)
			if got != old && got != updated {
				t.Fatalf("during %s: table %d, identity %d, %v, %#x: %+v, want %+v or %+v",
					what, id, who, addr, point, got, old, updated)
			}
		}
	}
}

// TestKernelAFailedWriteLeavesTheMapsBitForBit fails each write of random changes once; the
// preceding writes are undone.
func TestKernelAFailedWriteLeavesTheMapsBitForBit(t *testing.T) {
	t.Parallel()
	k := open(t, kerneltest.NewBPFFS(t))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := &randomTable{Rand: rand.New(rand.NewPCG(seed, 3))}
	m := newModel()
	failures := 0
	for failures < 20 {
		op := r.operation(t, m)
		if op.name == "barrier" {
			// it frees what it can, and retries the rest
			if err := op.do(k); err != nil {
				t.Fatal(err)
			}
			continue
		}
		was := snapshot(t, k, true)
		for n := 0; ; n++ {
			writes := 0
			k.store.before = func(string) error {
				if writes++; writes == n+1 {
					return fmt.Errorf("%w: no memory", pin.ErrFull)
				}
				return nil
			}
			err := op.do(k)
			k.store.before = nil
			if err == nil {
				op.then(m)
				break
			}
			if !errors.Is(err, pin.ErrFull) {
				t.Fatalf("%s, write %d: %v", op.name, n+1, err)
			}
			failures++
			if d := m.difference(k); d != "" {
				if after := m.clone(); true {
					// after the second store of a move, the move is complete
					op.then(after)
					if e := after.difference(k); e != "" {
						t.Fatalf("%s, write %d failed: %s", op.name, n+1, d)
					}
					if ds, err := k.Audit(true); err != nil || len(ds) == 0 {
						t.Fatalf("%s, write %d failed: audit finds %q, %v", op.name, n+1, ds, err)
					}
					m = after
				}
				break
			}
			if snapshot(t, k, true) != was {
				t.Fatalf("%s, write %d failed: the maps are not what they were", op.name, n+1)
			}
		}
	}
	audited(t, k, "at the end")
}
