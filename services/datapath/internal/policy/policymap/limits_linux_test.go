// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// smallTable returns the smallest table: one class, in which rule 1 denies TCP port 80 and rule 2 allows the rest.
func smallTable(hash uint64) nodetable.Content {
	c := nodetable.NewContent(policytable.Table{
		Rules:   []policytable.Rule{{Action: 0, Tier: 1}, {Action: 2, Tier: 1}},
		Classes: []policytable.Ranges{allBut80(2)},
	}, 0)
	binary.BigEndian.PutUint64(c.Hash[:], hash+1)
	return c
}

// allBut80 returns a list in which rule 1 decides TCP port 80 and rule rest everything else.
func allBut80(rest uint16) policytable.Ranges {
	return policytable.Ranges{
		{First: 0, Last: 6<<16 | 79, Rest: rest},
		{First: 6<<16 | 80, Last: 6<<16 | 80, Rest: 1},
		{First: 6<<16 | 81, Last: policytable.LastPoint, Rest: rest},
	}
}

// distinct returns n different lists of one node each.
func distinct(n int) []policytable.Ranges {
	out := make([]policytable.Ranges, n)
	for i := range out {
		out[i] = policytable.Ranges{{First: uint32(i), Last: uint32(i), Rest: 1}}
	}
	return out
}

// intact fails if the verdict of the first table has changed.
func intact(t testing.TB, j kerneltest.Evaluator, id nodetable.ID, when string) {
	t.Helper()
	for point, want := range map[uint32]verdict{
		6<<16 | 80: {event.ActionDeny, 1, event.ByUnknownIdentity}, // an unknown identity
		6<<16 | 81: {event.ActionAllow, 2, event.ByRule},
	} {
		if got := verdictOf(t, j, id, 256, netip.MustParseAddr("192.0.2.1"), point); got != want {
			t.Fatalf("%s: verdict at %#x is %+v, want %+v", when, point, got, want)
		}
	}
}

// TestKernelAFullMapRefusesATableWhole fills each map with tables, or parts of them, until one does
// not fit. The error names the map and the numbers, no part of the table remains, the existing
// tables evaluate as before, and after some of them are removed there is capacity again.
func TestKernelAFullMapRefusesATableWhole(t *testing.T) {
	t.Parallel()
	manyNodes := func(n int) func(i uint64) nodetable.Content {
		return func(i uint64) nodetable.Content {
			c := smallTable(i)
			c.Classes = append(c.Classes, distinct(n-1)...)
			return c
		}
	}
	blocks := func(family int) func(i uint64) nodetable.Content {
		return func(i uint64) nodetable.Content {
			c := smallTable(i)
			c.HasAddresses = true
			for b := range 16384 {
				var a netip.Addr
				if family == 0 {
					a = netip.AddrFrom4([4]byte{10, byte(i), byte(b >> 8), byte(b)})
				} else {
					a = netip.AddrFrom16([16]byte{0xfd, byte(i), byte(b >> 8), byte(b)})
				}
				c.Prefixes[ipmap.HostPrefix(a)] = policytable.PrefixClasses{}
			}
			return c
		}
	}
	for _, tc := range []struct {
		full string // name of the map
		size int    // its entries
		need int    // of one table
		make func(i uint64) nodetable.Content
		over func() nodetable.Content // a table above the limit of a quarter; nil: no table can reach it
	}{
		{bpf.MapsMapSlTable, 4096 - firstTable, 1, smallTable, nil},
		{bpf.MapsMapSlPorts, 16384, 4096, manyNodes(4096), func() nodetable.Content { return manyNodes(4097)(0) }},
		{bpf.MapsMapSlClass, 65536, classHead + nodetable.MaxClasses, func(i uint64) nodetable.Content {
			c := smallTable(i)
			c.Classes = slices.Repeat(c.Classes, nodetable.MaxClasses)
			return c
		}, nil},
		{bpf.MapsMapSlRule, 262144, 65534, func(i uint64) nodetable.Content {
			c := smallTable(i)
			c.Rules = append(c.Rules, make([]policytable.Rule, 65534-2)...)
			return c
		}, nil},
		{bpf.MapsMapSlPeer, 262144, 32767, func(i uint64) nodetable.Content {
			c := smallTable(i)
			for nc := nodetable.IdentityClass(1); nc <= nodetable.MaxIdentityClass; nc++ {
				c.Peers[nc] = 0
			}
			return c
		}, nil},
		{bpf.MapsMapSlCidr4, 65536, 16384, blocks(0), func() nodetable.Content {
			c := blocks(0)(0)
			c.Prefixes[netip.MustParsePrefix("192.0.2.0/24")] = policytable.PrefixClasses{}
			return c
		}},
		{bpf.MapsMapSlCidr6, 65536, 16384, blocks(1), func() nodetable.Content {
			c := blocks(1)(0)
			c.Prefixes[netip.MustParsePrefix("2001:db8::/32")] = policytable.PrefixClasses{}
			return c
		}},
	} {
		t.Run(tc.full, func(t *testing.T) {
			t.Parallel()
			k := open(t, kerneltest.NewBPFFS(t))
			j := kerneltest.NewEvaluator(t, k.pins)
			first, err := k.DefineTable(smallTable(1 << 40))
			if err != nil {
				t.Fatal(err)
			}
			if tc.over != nil {
				_, err := k.DefineTable(tc.over())
				var full *nodetable.NoCapacityError
				if !errors.As(err, &full) || full.Map != tc.full || full.Need != tc.need+1 || full.Limit != tc.need {
					t.Fatalf("more than a quarter: %v", err)
				}
			}
			// as many as fit while a tenth stays free for changes in place
			var ids []nodetable.ID
			var refused error
			for refused == nil {
				id, err := k.DefineTable(tc.make(uint64(len(ids))))
				if refused = err; err == nil {
					ids = append(ids, id)
				}
			}
			var full *nodetable.NoCapacityError
			if !errors.As(refused, &full) || !errors.Is(refused, pin.ErrFull) {
				t.Fatalf("table %d: %v", len(ids), refused)
			}
			if full.Map != tc.full || full.Need != tc.need || full.Free >= tc.need {
				t.Fatalf("error %+v, want %d entries of %s", full, tc.need, tc.full)
			}
			kept := reserve(tc.size)
			if tc.need == 1 {
				kept = 0
			}
			takes := tc.need
			if tc.full == bpf.MapsMapSlClass {
				takes += headroom(nodetable.MaxClasses, 2) // spare capacity for growth
			}
			if want := (tc.size - kept - 1) / takes; len(ids) != want {
				t.Errorf("%d tables fit, want %d", len(ids), want)
			}
			audited(t, k, "full")
			intact(t, j, first, "full")
			used := usage(t, k, tc.full)
			if used < len(ids)*tc.need {
				t.Errorf("%d entries of %s in use, want >= %d", used, tc.full, len(ids)*tc.need)
			}

			if err := k.RetireTables(ids[0]); err != nil {
				t.Fatal(err)
			}
			// without Barrier: DefineTable waits for a grace period
			if _, err := k.DefineTable(tc.make(uint64(len(ids)))); err != nil {
				t.Fatalf("after a table was removed: %v", err)
			}
			intact(t, j, first, "after recovery")
			audited(t, k, "after recovery")
			t.Logf("%d tables, %d entries in use; refused: %v", len(ids), used, refused)
		})
	}
}

func usage(t testing.TB, k *instance, mapName string) int {
	t.Helper()
	us, err := k.Usage()
	if err != nil {
		t.Fatal(err)
	}
	n, ok := us[mapName]
	if !ok {
		t.Fatalf("no map %s", mapName)
	}
	return n
}

// TestKernelChangesInPlaceUseTheReserve fills the last tenth, which new tables cannot use, with
// rows and prefixes of tables in use.
func TestKernelChangesInPlaceUseTheReserve(t *testing.T) {
	t.Parallel()
	k := open(t, kerneltest.NewBPFFS(t))
	j := kerneltest.NewEvaluator(t, k.pins)
	var ids []nodetable.ID
	for i := range uint64(9) {
		c := smallTable(i)
		if i < 7 {
			for nc := nodetable.IdentityClass(1); nc <= nodetable.MaxIdentityClass; nc++ {
				c.Peers[nc] = 0
			}
		}
		id, err := k.DefineTable(c)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	free := 262144 - 7*32767
	for i := range free {
		id, nc := ids[7+i/32767], nodetable.IdentityClass(1+i%32767)
		if err := k.SetPeer(id, nc, 0); err != nil {
			t.Fatalf("row %d of %d: %v", i+1, free, err)
		}
	}
	err := k.SetPeer(ids[8], nodetable.MaxIdentityClass, 0)
	var full *nodetable.NoCapacityError
	if !errors.As(err, &full) || *full != (nodetable.NoCapacityError{Map: bpf.MapsMapSlPeer, Need: 1, Limit: 65536}) {
		t.Fatalf("one row more: %v", err)
	}
	if n := usage(t, k, bpf.MapsMapSlPeer); n != 262144 {
		t.Errorf("%d rows", n)
	}
	intact(t, j, ids[8], "full")
	if err := k.DeletePeer(ids[0], 1); err != nil {
		t.Fatal(err)
	}
	if err := k.SetPeer(ids[8], nodetable.MaxIdentityClass, 0); err != nil {
		t.Errorf("after a row was removed: %v", err)
	}
	audited(t, k, "full")
}

// TestKernelIdentityClassesRunOut uses all numbers of identity classes.
func TestKernelIdentityClassesRunOut(t *testing.T) {
	k := open(t, kerneltest.NewBPFFS(t))
	key := func(i int) (c policytable.ClassKey) {
		binary.BigEndian.PutUint32(c[:], uint32(i+1))
		return c
	}
	for i := range int(nodetable.MaxIdentityClass) {
		if nc, err := k.DefineIdentityClass(key(i)); err != nil || nc == 0 || nc > nodetable.MaxIdentityClass {
			t.Fatalf("identity class %d: %d, %v", i, nc, err)
		}
	}
	_, err := k.DefineIdentityClass(key(1 << 20))
	var full *nodetable.NoCapacityError
	if !errors.As(err, &full) || full.Map != bpf.MapsMapSlClassKey || full.Limit != int(nodetable.MaxIdentityClass) {
		t.Fatalf("one more: %v", err)
	}
	again, err := k.DefineIdentityClass(key(5))
	if err != nil {
		t.Fatal(err)
	}
	if err := k.RetireIdentityClasses(again); err != nil {
		t.Fatal(err)
	}
	if nc, err := k.DefineIdentityClass(key(1 << 20)); err != nil || nc != again {
		t.Errorf("after one was removed: %d, %v, want %d", nc, err, again)
	}
}

// TestKernelAnIdentityIsOneWrite counts the writes for a new identity of a known class, which must
// not depend on the number of tables.
func TestKernelAnIdentityIsOneWrite(t *testing.T) {
	k := open(t, kerneltest.NewBPFFS(t))
	nc, err := k.DefineIdentityClass(policytable.ClassKey{1})
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(100) {
		c := smallTable(i)
		c.Peers[nc] = 0
		if _, err := k.DefineTable(c); err != nil {
			t.Fatal(err)
		}
	}
	var writes []string
	k.store.before = func(mapName string) error {
		writes = append(writes, mapName)
		return nil
	}
	for range 2 { // the second time nothing changes
		if err := k.SetIdentities(map[uint32]nodetable.Identity{300: {Class: nc, Known: true}}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(writes, []string{bpf.MapsMapSlId}) {
		t.Errorf("writes %q, want one", writes)
	}
}

// TestKernelEqualPrefixesAreStoredOnce shares sets, and checks that a shared one is copied before
// it changes.
func TestKernelEqualPrefixesAreStoredOnce(t *testing.T) {
	k := open(t, kerneltest.NewBPFFS(t))
	var ids []nodetable.ID
	for i := range uint64(3) {
		c := smallTable(i)
		c.HasAddresses = true
		for b := range 100 {
			c.Prefixes[ipmap.HostPrefix(netip.AddrFrom4([4]byte{10, 0, 0, byte(b)}))] = policytable.PrefixClasses{}
		}
		id, err := k.DefineTable(c)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	count := func(want int, when string) {
		t.Helper()
		if n := usage(t, k, bpf.MapsMapSlCidr4); n != want {
			t.Errorf("%s: %d prefixes, want %d", when, n, want)
		}
	}
	count(100, "three tables")
	more := netip.MustParsePrefix("192.0.2.0/24")
	if err := k.SetPrefix(ids[0], more, policytable.PrefixClasses{}); err != nil {
		t.Fatal(err)
	}
	count(201, "one has changed")
	if err := k.SetPrefix(ids[1], more, policytable.PrefixClasses{}); err != nil {
		t.Fatal(err)
	}
	count(201, "another table has changed likewise")
	if err := k.RetireTables(ids[2]); err != nil {
		t.Fatal(err)
	}
	if err := k.Barrier(t.Context()); err != nil {
		t.Fatal(err)
	}
	count(101, "the third has gone")
	audited(t, k, "at the end")
}

// TestKernelAuditRepairsTables corrupts each part of a table directly in the maps.
func TestKernelAuditRepairsTables(t *testing.T) {
	t.Parallel()
	k := open(t, kerneltest.NewBPFFS(t))
	c := smallTable(0)
	c.HasAddresses = true
	c.Peers[7] = 0
	c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{netip.MustParsePrefix("10.0.0.0/8"): {}, netip.MustParsePrefix("fd00::/8"): {}}
	id, err := k.DefineTable(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := k.SetIdentities(map[uint32]nodetable.Identity{300: {Class: 7, Known: true}}); err != nil {
		t.Fatal(err)
	}
	was := snapshot(t, k, false)
	s := k.store
	lt := s.tables[id]
	for name, damage := range map[string]func() error{
		"a row is missing":     func() error { return s.deletePeer(uint32(id), 7) },
		"a foreign row":        func() error { return s.insertPeer(uint32(id), 8, 0) },
		"a row of no table":    func() error { return s.insertPeer(4000, 8, 0) },
		"a row has changed":    func() error { return errors.Join(s.deletePeer(uint32(id), 7), s.insertPeer(uint32(id), 7, 3)) },
		"a prefix is missing":  func() error { return s.deletePrefix(lt.header.CidrSet, netip.MustParsePrefix("10.0.0.0/8")) },
		"a prefix has changed": func() error { return s.putPrefix(lt.header.CidrSet, netip.MustParsePrefix("fd00::/8"), [3]uint16{9}) },
		"a foreign prefix":     func() error { return s.putPrefix(77, netip.MustParsePrefix("10.0.0.0/8"), [3]uint16{}) },
		"a rule has changed": func() error {
			return writeArray(&s.tableMaps, s.tableMaps.rules, "", lt.ruleSpan.base, []bpf.MapsSlRule{{Action: 2}})
		},
		"a node has changed":       func() error { return s.writeNodes(lt.nodeSpan.base, make([]bpf.MapsSlPortNode, 1)) },
		"a foreign node":           func() error { return s.writeNodes(16000, []bpf.MapsSlPortNode{{Hi: [16]uint32{5}}}) },
		"a class has changed":      func() error { return s.storeWord("", s.classMem, lt.classSpan.base+classHead, 9) },
		"the header is zero":       func() error { return s.storeHeader(id, bpf.MapsSlTable{}) },
		"a foreign header":         func() error { return s.storeHeader(99, bpf.MapsSlTable{N_class: 1}) },
		"the key is gone":          func() error { return s.storeTableKey(id, [32]byte{}) },
		"a foreign identity class": func() error { return s.storeClassKey(12, policytable.ClassKey{1}) },
		"a missing identity":       func() error { return s.storeWord("", s.idMem, 300, 0) },
		"a changed identity":       func() error { return s.storeWord("", s.idMem, 301, knownBit|7) },
	} {
		if err := damage(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		found, err := k.Audit(false)
		if err != nil || len(found) == 0 {
			t.Errorf("%s: not found (%v)", name, err)
		}
		if repaired, err := k.Audit(true); err != nil || !slices.Equal(repaired, found) {
			t.Errorf("%s: found %q, repaired %q (%v)", name, found, repaired, err)
		}
		audited(t, k, name)
		if snapshot(t, k, false) != was {
			t.Errorf("%s: the repair differs from the original", name)
		}
	}
}

// TestKernelReadersSeeNoThirdVerdict evaluates packets by one table with the programs' own
// function, while the table grows, moves, gets and loses rows and prefixes and shares its set, and
// other tables are defined and retired. Every answer must be the verdict before or after a change.
func TestKernelReadersSeeNoThirdVerdict(t *testing.T) {
	const changes = 20_000
	k := open(t, kerneltest.NewBPFFS(t))
	j := kerneltest.NewEvaluator(t, k.pins)
	// class 0 denies everything by rule 4, class 1 denies port 80 by rule 1
	c := smallTable(0)
	c.HasAddresses = true
	c.Rules = append(c.Rules, policytable.Rule{Action: 0, Tier: 2}, policytable.Rule{Action: 0, Tier: 2})
	all := policytable.Ranges{{Last: policytable.LastPoint, Rest: 4}}
	c.Classes = []policytable.Ranges{all, allBut80(4)}
	c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{netip.MustParsePrefix("10.0.0.0/8"): {}}
	id, err := k.DefineTable(c)
	if err != nil {
		t.Fatal(err)
	}
	nc, err := k.DefineIdentityClass(policytable.ClassKey{1})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.SetIdentities(map[uint32]nodetable.Identity{300: {Class: nc, Known: true}}); err != nil {
		t.Fatal(err)
	}
	var done atomic.Bool
	result := make(chan error, 1)
	go func() {
		defer done.Store(true)
		result <- func() error {
			seed := rand.Uint64()
			r := rand.New(rand.NewPCG(seed, 5))
			classes := 2
			var others []nodetable.ID
			for i := range changes {
				var err error
				switch r.IntN(10) {
				case 0, 1:
					err = k.SetPeer(id, nc, 1)
				case 2, 3:
					err = k.DeletePeer(id, nc)
				case 4:
					err = k.SetPrefix(id, ipmap.HostPrefix(netip.AddrFrom4([4]byte{10, 1, 1, byte(r.IntN(5))})), policytable.PrefixClasses{1, 1, 1})
				case 5:
					err = k.DeletePrefix(id, ipmap.HostPrefix(netip.AddrFrom4([4]byte{10, 1, 1, byte(r.IntN(5))})))
				case 6:
					if i%50 == 0 && classes < 1000 { // it moves every few times
						more := 1 + classes/2
						added := slices.Repeat([]policytable.Ranges{all}, more)
						added[0] = distinct(classes)[classes-1] // and with it a node
						err = k.GrowTable(id, added)
						classes += more
					}
				case 7: // another table with the same prefixes, so the set is shared
					var content nodetable.Content
					if content, err = k.TableContent(id); err == nil && len(others) < 50 {
						other := smallTable(uint64(i))
						other.HasAddresses, other.Classes = true, slices.Repeat(other.Classes, len(content.Classes))
						other.Prefixes = content.Prefixes
						var t nodetable.ID
						if t, err = k.DefineTable(other); err == nil {
							others = append(others, t)
						}
					}
				case 8:
					if len(others) > 20 {
						err = k.RetireTables(others...)
						others = nil
					}
				case 9:
					if i%100 == 0 {
						err = k.Barrier(t.Context())
					}
				}
				if err != nil {
					return fmt.Errorf("change %d: %w", i, err)
				}
			}
			return nil
		}()
	}()
	// port 80 is always denied: by rule 1 of class 1, or by rule 4 of class 0
	q := kerneltest.Question(id, 300, netip.AddrFrom4([4]byte{10, 1, 1, 1}), 6, 80)
	asked, denied := 0, 0
	for !done.Load() {
		reason, side := j.Ask(t, q)
		asked++
		switch {
		case side.Rule == 1 && reason == event.PolicyDenied:
			denied++
		case side.Rule == 4 && reason == event.PolicyDenied:
		default:
			t.Fatalf("question %d: %v by %+v", asked, reason, side)
		}
	}
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d changes, %d questions, %d of them by rule 1", changes, asked, denied)
	if denied == 0 || denied == asked {
		t.Errorf("%d questions with equal answers: nothing has changed", asked)
	}
	audited(t, k, "at the end")
}

// BenchmarkKernelTableChanges measures changes of a policy.
func BenchmarkKernelTableChanges(b *testing.B) {
	k := open(b, kerneltest.NewBPFFS(b))
	words := map[uint32]nodetable.Identity{}
	b.Run("1000 identities", func(b *testing.B) {
		for i := range b.N {
			for id := range uint32(1000) {
				words[256+id] = nodetable.Identity{Class: nodetable.IdentityClass(1 + (i+int(id))%100), Known: true}
			}
			if err := k.SetIdentities(words); err != nil {
				b.Fatal(err)
			}
		}
	})
	table := func(b *testing.B, c nodetable.Content) {
		for i := range b.N {
			c.Hash[8] = byte(i + 1)
			id, err := k.DefineTable(c)
			if err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if err := k.RetireTables(id); err != nil {
				b.Fatal(err)
			}
			if err := k.Barrier(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	}
	b.Run("table of 1000 rows", func(b *testing.B) {
		c := smallTable(1)
		for nc := range nodetable.IdentityClass(1000) {
			c.Peers[nc+1] = 0
		}
		table(b, c)
	})
	large := smallTable(2)
	large.HasAddresses = true
	for i := range 5000 {
		large.Prefixes[ipmap.HostPrefix(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))] = policytable.PrefixClasses{}
	}
	b.Run("table of 5000 prefixes", func(b *testing.B) { table(b, large) })
	b.Run("table of 5000 shared prefixes", func(b *testing.B) {
		if _, err := k.DefineTable(large); err != nil {
			b.Fatal(err)
		}
		table(b, large)
	})
	b.Run("a prefix among 5000", func(b *testing.B) {
		c := large
		c.Prefixes = maps.Clone(large.Prefixes)
		c.Prefixes[netip.MustParsePrefix("172.16.0.0/12")] = policytable.PrefixClasses{}
		id, err := k.DefineTable(c)
		if err != nil {
			b.Fatal(err)
		}
		b.ResetTimer()
		for i := range b.N {
			p := ipmap.HostPrefix(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
			if err := errors.Join(k.SetPrefix(id, p, policytable.PrefixClasses{}), k.DeletePrefix(id, p)); err != nil {
				b.Fatal(err)
			}
		}
	})
}
