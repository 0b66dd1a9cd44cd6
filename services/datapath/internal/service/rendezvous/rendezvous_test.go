// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rendezvous

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// backends returns n backends of a family, sorted.
func backends(n int, is6 bool) (bs []netip.AddrPort) {
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		if is6 {
			a = netip.AddrFrom16([16]byte{0xfd, 0x24, 14: byte(i >> 8), 15: byte(i)})
		}
		bs = append(bs, netip.AddrPortFrom(a, uint16(8080+i%3)))
	}
	return bs
}

// without returns the backends without b.
func without(bs []netip.AddrPort, b netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(slices.Clone(bs), func(o netip.AddrPort) bool { return o == b })
}

// owners returns the owners of the slots in the backends' table.
func owners(bs []netip.AddrPort) (os []netip.AddrPort) {
	for _, o := range New(Bits(len(bs)), bs).Owners() {
		os = append(os, bs[o])
	}
	return os
}

// shares returns the number of slots of each backend.
func shares(os []netip.AddrPort) map[netip.AddrPort]int {
	n := map[netip.AddrPort]int{}
	for _, o := range os {
		n[o]++
	}
	return n
}

// moved returns how many slots have another owner than before, and how many of these moved between two backends other
// than of.
func moved(t *testing.T, before, after []netip.AddrPort, of netip.AddrPort) (all, others int) {
	t.Helper()
	if len(before) != len(after) || len(before) == 0 {
		t.Fatalf("%d slots before, %d after", len(before), len(after))
	}
	for i := range before {
		if before[i] == after[i] {
			continue
		}
		all++
		if before[i] != of && after[i] != of {
			others++
		}
	}
	return all, others
}

// TestTableIsTheStatedOne: nodes of different versions must compute the same tables.
func TestTableIsTheStatedOne(t *testing.T) {
	for is6, want := range map[bool]uint64{false: 0xc2de8cdb20e69e3b, true: 0x931692e61ed7477d} {
		h := fnv.New64a()
		for _, o := range owners(backends(100, is6)) {
			fmt.Fprintln(h, o)
		}
		if got := h.Sum64(); got != want {
			t.Errorf("IPv6 %t: the owners of the slots hash to %#x, want %#x", is6, got, want)
		}
	}
}

func TestTableHas64SlotsForEachBackendAtLeast(t *testing.T) {
	for n, want := range map[int]int{
		0: 0, 1: 0, 16: 0, 17: 2048, 32: 2048, 33: 4096, 64: 4096, 100: 8192, 128: 8192, 129: 16384, 256: 16384,
		257: 32768, 512: 32768, 513: 32768, MaxBackends: 32768,
	} {
		if got := Slots(Bits(n)); got != want {
			t.Errorf("%d backends: %d slots, want %d", n, got, want)
		}
	}
}

// TestBackendThatGoesMovesOnlyItsOwnSlots removes each of 100 backends once.
func TestBackendThatGoesMovesOnlyItsOwnSlots(t *testing.T) {
	bs := backends(100, false)
	full := owners(bs)
	for _, b := range bs {
		all, others := moved(t, full, owners(without(bs, b)), b)
		if had := shares(full)[b]; others != 0 || all != had || had == 0 {
			t.Errorf("%v removed: %d slots move, %d of other backends, it had %d", b, all, others, had)
		}
	}
}

// TestBackendThatComesMovesSlotsOnlyToIt adds each of 100 backends once.
func TestBackendThatComesMovesSlotsOnlyToIt(t *testing.T) {
	bs := backends(100, false)
	full := owners(bs)
	for _, b := range bs {
		all, others := moved(t, owners(without(bs, b)), full, b)
		if got := shares(full)[b]; others != 0 || all != got || got == 0 {
			t.Errorf("%v added: %d slots move, %d between other backends, it has %d", b, all, others, got)
		}
	}
}

// TestSharesAreBinomial: each slot is an independent trial. Of 1,000 backends, 2.7 are expected beyond three standard
// deviations.
func TestSharesAreBinomial(t *testing.T) {
	for _, is6 := range []bool{false, true} {
		for _, n := range []int{17, 100, 256, 1000, MaxBackends} {
			bs := backends(n, is6)
			os := owners(bs)
			p := 1 / float64(n)
			mean := float64(len(os)) * p
			sigma := math.Sqrt(mean * (1 - p))
			beyond, worst, got := 0, 0.0, shares(os)
			for _, b := range bs {
				off := math.Abs(float64(got[b])-mean) / sigma
				worst = max(worst, off)
				if off > 3 {
					beyond++
				}
			}
			t.Logf("IPv6 %t, %d backends, %d slots: mean %.1f, sigma %.1f, farthest %.2f sigma, %d beyond 3", is6, n,
				len(os), mean, sigma, worst, beyond)
			expected := 0.0027 * float64(n)
			if float64(beyond) > expected+3*math.Sqrt(expected)+1 || worst > 5 {
				t.Errorf("IPv6 %t, %d backends: %d shares beyond 3 sigma, the farthest %.2f", is6, n, beyond, worst)
			}
		}
	}
}

func TestTableOfTwiceTheSizeKeepsItsEvenSlots(t *testing.T) {
	bs := backends(64, false)
	for bits := 11; bits < MaxBits; bits++ {
		small, large := New(bits, bs).Owners(), New(bits+1, bs).Owners()
		for slot, owner := range small {
			if large[2*slot] != owner {
				t.Fatalf("slot %d of %d belongs to %d, slot %d of the larger table to %d", slot, len(small), owner, 2*slot,
					large[2*slot])
			}
		}
	}
}

// TestChangedTableIsTheOneFromScratch changes between random lists of every size, including empty ones.
func TestChangedTableIsTheOneFromScratch(t *testing.T) {
	r := rand.New(rand.NewPCG(29, 29))
	all := backends(120, false)
	has := make([]bool, len(all))
	var table *Table
	for step := range 300 {
		odds := 60
		if step%20 == 0 {
			odds = 2 + r.IntN(5)
		}
		var bs []netip.AddrPort
		for i, b := range all {
			if r.IntN(odds) == 0 {
				has[i] = !has[i]
			}
			if has[i] {
				bs = append(bs, b)
			}
		}
		bits := Bits(len(bs))
		table = table.Change(bits, bs)
		if want := New(bits, bs); table.Bits() != bits || !slices.Equal(table.Owners(), want.Owners()) {
			t.Fatalf("step %d, %d backends: the tables differ", step, len(bs))
		}
	}
}

// TestTableIsThatOfTheDefinition: the owner of a slot is the backend with the highest rank.
func TestTableIsThatOfTheDefinition(t *testing.T) {
	bs := backends(40, true)
	table := New(Bits(len(bs)), bs)
	for slot, owner := range table.Owners() {
		best := slices.MaxFunc(bs, func(a, b netip.AddrPort) int {
			if table.rank(slot, seedOf(a)) > table.rank(slot, seedOf(b)) {
				return 1
			}
			return -1
		})
		if bs[owner] != best {
			t.Fatalf("slot %d belongs to %v, should to %v", slot, bs[owner], best)
		}
	}
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{100, 200, 500, MaxBackends - 1} {
		bits := Bits(n)
		bs := backends(n+1, false)
		less, more := New(bits, bs[:n]), New(bits, bs)
		run := func(what string, table func() *Table) {
			b.Run(fmt.Sprintf("%d backends in %d slots, %s", n, Slots(bits), what), func(b *testing.B) {
				for b.Loop() {
					table()
				}
			})
		}
		run("from scratch", func() *Table { return New(bits, bs[:n]) })
		run("one more", func() *Table { return less.Change(bits, bs) })
		run("one less", func() *Table { return more.Change(bits, bs[:n]) })
	}
}
