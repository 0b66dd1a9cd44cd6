// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pool

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func prefixes(t testing.TB, cidrs ...string) []netip.Prefix {
	t.Helper()
	out, err := ParseRanges("pools", cidrs)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func one(t testing.TB, cidr string, exclude ...string) *Pool {
	t.Helper()
	x, err := ParseExclusions("exclude", exclude)
	if err != nil {
		t.Fatal(err)
	}
	pools, err := New("pools", prefixes(t, cidr), x)
	if err != nil {
		t.Fatal(err)
	}
	return pools[0]
}

func TestRangesAreRefusedWithTheFieldNamed(t *testing.T) {
	for _, c := range []struct {
		name  string
		cidrs []string
		want  []string
	}{
		{"host bits", []string{"10.0.0.1/24"}, []string{"pools[0]", "host bits", "10.0.0.0/24"}},
		{"host bits of v6", []string{"fd00::1/64"}, []string{"pools[0]", "fd00::/64"}},
		{"too small", []string{"10.0.0.0/31", "10.0.1.0/32", "fd00::/127", "fd00:1::/128"}, []string{"pools[0]", "pools[1]", "pools[2]", "pools[3]", "too small"}},
		{"overlap", []string{"10.0.0.0/16", "fd00::/64", "10.0.3.0/24"}, []string{"pools[2]: 10.0.3.0/24 overlaps pools[0]"}},
		{"twice", []string{"10.0.0.0/16", "10.0.0.0/16"}, []string{"pools[1]", "overlaps pools[0]"}},
		{"mapped", []string{"::ffff:10.0.0.0/120"}, []string{"pools[0]", "IPv4-mapped"}},
		{"everything v4", []string{"0.0.0.0/0"}, []string{"pools[0]", "overlaps"}},
		{"everything v6", []string{"::/0"}, []string{"pools[0]", "overlaps"}},
		{"multicast", []string{"224.1.0.0/16", "ff02::/64"}, []string{"pools[0]", "pools[1]", "multicast"}},
		{"loopback", []string{"127.0.0.0/24", "::/120"}, []string{"pools[0]", "pools[1]", "loopback"}},
		{"link-local", []string{"169.254.0.0/24", "fe80::/64"}, []string{"pools[0]", "pools[1]", "link-local"}},
		{"this network", []string{"0.1.0.0/16"}, []string{"pools[0]", "this network"}},
		{"nothing", nil, []string{"pools: empty"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseRanges("pools", c.cidrs)
			if err == nil {
				t.Fatalf("ParseRanges(%q) succeeded", c.cidrs)
			}
			raw := make([]netip.Prefix, len(c.cidrs))
			for i, s := range c.cidrs {
				raw[i] = netip.MustParsePrefix(s)
			}
			if _, newErr := New("pools", raw, nil); newErr == nil || newErr.Error() != err.Error() {
				t.Errorf("New(%q): %v, want what ParseRanges says: %v", c.cidrs, newErr, err)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("New(%q): %q, want it to say %q", c.cidrs, err, want)
				}
			}
		})
	}
}

func TestUnreadableRangesAreAllNamed(t *testing.T) {
	_, err := ParseRanges("pools", []string{"10.0.0.0", "x", "10.0.0.0/24", "10.0.0.0/33", "fd00::%eth0/64", "10.0.0.0/25", "10.1.0.1/24"})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"pools[0]", "pools[1]", "pools[3]", "pools[4]", "pools[5]: 10.0.0.0/25 overlaps pools[2]", "pools[6]"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "pools[2]:") {
		t.Errorf("%q blames a good range", err)
	}
	_, err = ParseExclusions("exclude", []string{"10.0.0.1", "10.0.0.1/24", "::ffff:1.2.3.4", "y", "fe80::1%eth0"})
	if err == nil {
		t.Fatal("exclusions accepted")
	}
	for _, want := range []string{"exclude[1]", "exclude[2]", "exclude[3]", "exclude[4]"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
}

func TestExclusionsThatLeaveNothingAreRefused(t *testing.T) {
	x, err := ParseExclusions("exclude", []string{"10.0.0.0/23"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New("pools", prefixes(t, "10.0.0.0/24"), x); err == nil || !strings.Contains(err.Error(), "pools[0]") {
		t.Fatalf("got %v, want an error about pools[0]", err)
	}
}

func TestReservedAddressesAreNeverGivenOut(t *testing.T) {
	for _, c := range []struct {
		cidr     string
		exclude  []string
		reserved []string
		n        uint64
		size     uint64
	}{
		{"10.0.0.0/24", nil, []string{"10.0.0.0", "10.0.0.1", "10.0.0.255"}, 3, 256},
		{"10.0.0.0/24", []string{"10.0.0.64/26", "10.0.0.70", "10.0.0.9", "192.0.2.1", "fd00::/64"}, []string{"10.0.0.64", "10.0.0.127", "10.0.0.9", "10.0.0.1"}, 68, 256},
		{"10.0.0.0/24", []string{"10.0.0.0/30", "10.0.0.1"}, []string{"10.0.0.0", "10.0.0.3"}, 5, 256},
		{"10.0.0.0/30", nil, []string{"10.0.0.0", "10.0.0.1", "10.0.0.3"}, 3, 4},
		{"fd00::/126", nil, []string{"fd00::", "fd00::1"}, 2, 4},
		{"fd00::/64", []string{"fd00::8000:0:0:0/65"}, []string{"fd00::", "fd00::1", "fd00::ffff:ffff:ffff:ffff"}, 1<<63 + 2, ^uint64(0)},
		{"10.0.0.0/16", []string{"10.0.0.0/17", "10.0.128.0/18"}, []string{"10.0.77.3", "10.0.191.255"}, 1<<15 + 1<<14 + 1, 1 << 16},
	} {
		p := one(t, c.cidr, c.exclude...)
		if p.NumReserved() != c.n || p.Size() != c.size {
			t.Errorf("%s without %v: reserved %d size %d, want %d and %d", c.cidr, c.exclude, p.NumReserved(), p.Size(), c.n, c.size)
		}
		for _, s := range c.reserved {
			a := netip.MustParseAddr(s)
			if !p.Reserved(a) || p.Take(a) || p.Put(a) {
				t.Errorf("%s without %v: %s is not reserved", c.cidr, c.exclude, a)
			}
		}
		if c.size > 1<<16 {
			continue
		}
		var got uint64
		for {
			a, ok := p.Next()
			if !ok {
				break
			}
			if p.Reserved(a) || !p.Contains(a) || !p.Take(a) {
				t.Fatalf("%s without %v: Next gave %s", c.cidr, c.exclude, a)
			}
			p.Advance(a)
			got++
		}
		if want := c.size - c.n; got != want || p.NumFree() != 0 || p.NumTaken() != want {
			t.Errorf("%s without %v: %d addresses allocated, %d free left, want %d and 0", c.cidr, c.exclude, got, p.NumFree(),
				want)
		}
	}
}

// naive is a simple implementation of a pool. With a small range, Pool must behave in the same way.
type naive struct {
	all      []netip.Addr
	taken    map[netip.Addr]bool
	reserved map[netip.Addr]bool
	cursor   int
}

func (n *naive) next() (netip.Addr, bool) {
	for i := range n.all {
		a := n.all[(n.cursor+i)%len(n.all)]
		if !n.taken[a] && !n.reserved[a] {
			return a, true
		}
	}
	return netip.Addr{}, false
}

func TestPoolBehavesAsTheNaiveModel(t *testing.T) {
	for _, cidr := range []string{"10.0.0.0/30", "10.0.0.0/26", "10.0.0.0/25", "10.0.0.0/24", "10.20.0.0/22", "fd00::/126", "fd00::/117"} {
		for seed := range uint64(4) {
			r := rand.New(rand.NewPCG(seed, 7))
			prefix := netip.MustParsePrefix(cidr)
			m := &naive{taken: map[netip.Addr]bool{}, reserved: map[netip.Addr]bool{}}
			for a := prefix.Addr(); prefix.Contains(a); a = a.Next() {
				m.all = append(m.all, a)
			}
			var exclude []string
			if prefix.Bits() < prefix.Addr().BitLen()-2 {
				for range seed {
					a := m.all[r.IntN(len(m.all))]
					x := netip.PrefixFrom(a, a.BitLen()-r.IntN(4)).Masked()
					exclude = append(exclude, x.String())
					for _, b := range m.all {
						if x.Contains(b) {
							m.reserved[b] = true
						}
					}
				}
			}
			m.reserved[m.all[0]], m.reserved[m.all[1]] = true, true
			if prefix.Addr().Is4() {
				m.reserved[m.all[len(m.all)-1]] = true
			}
			p := one(t, cidr, exclude...)
			fill := r.IntN(3) // drifts empty, even, full
			for step := range 4 * len(m.all) {
				switch op := r.IntN(6); {
				case op < 2+fill:
					got, ok := p.Next()
					want, wantOK := m.next()
					if got != want || ok != wantOK {
						t.Fatalf("%s seed %d step %d: Next %v %v, want %v %v", cidr, seed, step, got, ok, want, wantOK)
					}
					if ok {
						if !p.Take(got) {
							t.Fatalf("%s seed %d step %d: Take(%s) refused what Next gave", cidr, seed, step, got)
						}
						p.Advance(got)
						m.taken[got] = true
						for i, a := range m.all {
							if a == got {
								m.cursor = (i + 1) % len(m.all)
							}
						}
					}
				case op == 5:
					a := m.all[r.IntN(len(m.all))]
					want := !m.taken[a] && !m.reserved[a]
					if got := p.Take(a); got != want {
						t.Fatalf("%s seed %d step %d: Take(%s) %v, want %v", cidr, seed, step, a, got, want)
					}
					if want {
						m.taken[a] = true
					}
				default:
					a := m.all[r.IntN(len(m.all))]
					if got, want := p.Put(a), m.taken[a]; got != want {
						t.Fatalf("%s seed %d step %d: Put(%s) %v, want %v", cidr, seed, step, a, got, want)
					}
					delete(m.taken, a)
				}
				if got, want := p.NumTaken(), uint64(len(m.taken)); got != want {
					t.Fatalf("%s seed %d step %d: %d taken, want %d", cidr, seed, step, got, want)
				}
				if got, want := p.NumFree(), uint64(len(m.all)-len(m.taken)-len(m.reserved)); got != want {
					t.Fatalf("%s seed %d step %d: %d free, want %d", cidr, seed, step, got, want)
				}
			}
		}
	}
}

func TestWideRangesAreSearchedAroundTheirEnd(t *testing.T) {
	for _, cidr := range []string{"fd00::/64", "fd00::/48", "fd00::/65", "2001:db8::/32", "4000::/2", "10.0.0.0/8"} {
		p := one(t, cidr)
		last := p.at(u128{0, 1}.shl(p.hostBits).sub(u128{0, 1}))
		usable := last
		if p.Is4() {
			usable = last.Prev()
		}
		p.SetCursor(usable)
		a, ok := p.Next()
		if !ok || a != usable || !p.Take(a) {
			t.Fatalf("%s: Next at the end gave %v %v, want %v", cidr, a, ok, usable)
		}
		p.Advance(a)
		a, ok = p.Next()
		if want := p.Gateway().Next(); !ok || a != want {
			t.Fatalf("%s: Next behind the end gave %v %v, want %v", cidr, a, ok, want)
		}
		if !p.Put(usable) || p.NumTaken() != 0 {
			t.Fatalf("%s: the last address did not come back", cidr)
		}
	}
}

func TestMemoryFollowsWhatIsTakenAndIsGivenBack(t *testing.T) {
	p := one(t, "fd00::/64")
	r := rand.New(rand.NewPCG(1, 1))
	var held []netip.Addr
	for range 1000 {
		a := p.at(u128{0, r.Uint64()})
		if p.Take(a) {
			held = append(held, a)
		}
	}
	for _, a := range held {
		if !p.Put(a) {
			t.Fatalf("Put(%s) refused", a)
		}
	}
	if n := countNodes(&p.taken.root); n != countNodes(&p.reserved.root) {
		t.Errorf("%d nodes are left of an empty set, want %d", n, countNodes(&p.reserved.root))
	}
	q := one(t, "10.0.0.0/16")
	for {
		a, ok := q.Next()
		if !ok {
			break
		}
		q.Take(a)
		q.Advance(a)
	}
	if n := countNodes(&q.taken.root); n != 1 {
		t.Errorf("%d nodes describe a full range, want 1", n)
	}
}

func countNodes(n *node) int {
	sum := 1
	for _, kid := range n.kids {
		sum += countNodes(kid)
	}
	return sum
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"10.244.0.0/24|", "fd00:244::/64|fd00:244::5", "0.0.0.0/0|", "10.0.0.0/30|10.0.0.2", "::ffff:1.2.3.0/120|", "10.0.0.0/8|10.0.0.0/9,10.128.0.0/9", "ffff::/3|::/1"} {
		a, b, _ := strings.Cut(s, "|")
		f.Add(a, b)
	}
	f.Fuzz(func(t *testing.T, cidrs, exclude string) {
		ranges, err := ParseRanges("pools", strings.Split(cidrs, ","))
		if err != nil {
			return
		}
		x, err := ParseExclusions("exclude", strings.Split(exclude, ","))
		if err != nil {
			x = nil
		}
		pools, err := New("pools", ranges, x)
		if err != nil {
			return
		}
		for _, p := range pools {
			a, ok := p.Next()
			if !ok {
				t.Fatalf("%s without %v: accepted, but has no address", p.Prefix(), x)
			}
			if !p.Contains(a) || p.Reserved(a) || a == p.Gateway() || !p.Take(a) || p.Take(a) {
				t.Fatalf("%s without %v: gave out %s", p.Prefix(), x, a)
			}
			for _, e := range x {
				if e.Contains(a) {
					t.Fatalf("%s: gave out %s, which %s excludes", p.Prefix(), a, e)
				}
			}
			if !p.Put(a) || p.NumTaken() != 0 {
				t.Fatalf("%s: %s did not come back", p.Prefix(), a)
			}
		}
	})
}

func benchmarkNext(b *testing.B, cidr string, fill int) {
	p := one(b, cidr)
	var ring []netip.Addr
	for range fill {
		a, _ := p.Next()
		p.Take(a)
		p.Advance(a)
		ring = append(ring, a)
	}
	i := 0
	b.ResetTimer()
	for b.Loop() {
		a, _ := p.Next()
		p.Take(a)
		p.Advance(a)
		if fill == 0 {
			p.Put(a)
			continue
		}
		p.Put(ring[i])
		ring[i] = a
		i = (i + 7919) % fill
	}
}

func BenchmarkTakeNext(b *testing.B) {
	b.Run("v4/16 empty", func(b *testing.B) { benchmarkNext(b, "10.0.0.0/16", 0) })
	b.Run("v4/16 60000 taken", func(b *testing.B) { benchmarkNext(b, "10.0.0.0/16", 60000) })
	b.Run("v6/64 empty", func(b *testing.B) { benchmarkNext(b, "fd00::/64", 0) })
	b.Run("v6/64 60000 taken", func(b *testing.B) { benchmarkNext(b, "fd00::/64", 60000) })
}

// TestFormerRangesThatOverlapAreOne: of former ranges that overlap the largest is kept, so that every address that
// was taken from one of them has a pool.
func TestFormerRangesThatOverlapAreOne(t *testing.T) {
	list := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	var got []netip.Prefix
	for _, p := range Former(list("10.1.1.0/26", "10.1.0.0/16", "10.1.1.0/24", "10.2.0.0/24", "10.3.0.0/25"),
		list("10.3.0.0/24"), nil) {
		got = append(got, p.Prefix())
	}
	if want := list("10.1.0.0/16", "10.2.0.0/24"); !slices.Equal(got, want) {
		t.Errorf("the former ranges are %v, want %v", got, want)
	}
}

// TestExclusionAroundARangeReservesTheRange: an exclusion that contains a range reserves exactly the range.
func TestExclusionAroundARangeReservesTheRange(t *testing.T) {
	p := Former([]netip.Prefix{netip.MustParsePrefix("10.1.1.0/24")}, nil,
		[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")})[0]
	if p.NumReserved() != 256 || p.NumFree() != 0 {
		t.Errorf("%d addresses of %s are reserved and %d free", p.NumReserved(), p.Prefix(), p.NumFree())
	}
}
