// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipcache_test

import (
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// opened is a cache with its maps.
type opened struct {
	*ipcache.Cache
	pins *pin.Maps
	maps *ipmap.Maps
}

func open(t testing.TB, dir string) opened {
	t.Helper()
	spec, err := bpf.LoadMaps()
	must(t, err)
	log := slog.New(slog.DiscardHandler)
	pins, err := pin.Open(pin.Options{Dir: dir, Log: log}, spec)
	must(t, err)
	t.Cleanup(func() { pins.Close() })
	m := ipmap.Open(pins)
	return opened{ipcache.New(m, log), pins, m}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// state is the input so far; it computes the expected ipcache in the obvious way.
type state struct {
	local  map[netip.Addr]identity.Numeric
	ranges map[netip.Prefix]bool
	remote map[netip.Prefix]ipcache.Remote
	known  map[identity.Numeric]bool
	// doubted are the IDs of doubted nodes.
	doubted map[uint16]struct{}
}

func (s *state) entries() (all []ipmap.Entry) {
	out := map[netip.Prefix]ipmap.Info{}
	for p, r := range s.remote {
		hidden := r.Identity > identity.MaxReserved && !s.known[r.Identity]
		_, doubted := s.doubted[r.Node]
		switch {
		case r.Node == 0 && hidden:
			continue
		case r.Node == 0:
			out[p] = ipmap.Info{Identity: r.Identity, Flags: ipmap.Outside}
		case hidden, doubted && p.IsSingleIP() && r.Identity >= 256 && r.Identity < 65536:
			out[p] = ipmap.Info{Identity: 255, Node: r.Node}
		default:
			out[p] = ipmap.Info{Identity: r.Identity, Node: r.Node}
		}
	}
	for p := range s.ranges {
		maps.DeleteFunc(out, func(q netip.Prefix, _ ipmap.Info) bool {
			return p.Contains(q.Addr()) && q.Bits() >= p.Bits()
		})
	}
	for p := range s.ranges {
		out[p] = ipmap.Info{Identity: 255, Flags: ipmap.PodRange}
	}
	for a, id := range s.local {
		out[netip.PrefixFrom(a, a.BitLen())] = ipmap.Info{Identity: id}
	}
	for p, i := range out {
		all = append(all, ipmap.Entry{Prefix: p, Info: i})
	}
	slices.SortFunc(all, func(a, b ipmap.Entry) int { return a.Prefix.Compare(b.Prefix) })
	return all
}

// TestKernelIPCacheDependsOnTheFinalStateAlone makes random changes and restarts, and compares the maps with
// the entries for the final state.
func TestKernelIPCacheDependsOnTheFinalStateAlone(t *testing.T) {
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 1))
		dir := kerneltest.NewBPFFS(t)
		c := open(t, dir)
		must(t, c.Initialise(nil, func(netip.Addr) bool { return false }))
		must(t, c.Gate(nil))
		s := state{
			map[netip.Addr]identity.Numeric{},
			map[netip.Prefix]bool{},
			map[netip.Prefix]ipcache.Remote{},
			map[identity.Numeric]bool{},
			nil,
		}
		ids := []identity.Numeric{6, 7, 300, 301, 302, identity.MinNodeLocal}
		anyID := func() identity.Numeric { return ids[r.IntN(len(ids))] }
		addr := func() netip.Addr {
			if r.IntN(2) == 0 {
				return netip.AddrFrom4([4]byte{10, 1, byte(r.IntN(3)), byte(r.IntN(4))})
			}
			return netip.AddrFrom16([16]byte{0xfd, 7: byte(r.IntN(3)), 15: byte(r.IntN(4))})
		}
		prefix := func(lengths ...int) netip.Prefix {
			a := addr()
			bits := lengths[r.IntN(len(lengths))]
			if a.Is6() && bits < 32 {
				bits += 40
			} else if a.Is6() {
				bits = 128
			}
			p, err := a.Prefix(bits)
			must(t, err)
			return p
		}
		for step := range 600 {
			switch r.IntN(14) {
			case 0, 1:
				a, id := addr(), anyID()
				must(t, c.SetLocal(a, id))
				s.local[a] = id
			case 2:
				a := addr()
				must(t, c.RemoveLocal(a))
				delete(s.local, a)
			case 3:
				p := prefix(24)
				must(t, c.AddRange(p))
				s.ranges[p] = true
			case 4:
				p := prefix(24)
				must(t, c.DropRange(p))
				delete(s.ranges, p)
			case 5, 6, 7:
				p, rem := prefix(32, 32, 32, 24, 23, 8), ipcache.Remote{Identity: anyID(), Node: uint16(r.IntN(4))}
				must(t, c.SetRemote(p, rem))
				s.remote[p] = rem
			case 8:
				p := prefix(32, 32, 24, 8)
				must(t, c.RemoveRemote(p))
				delete(s.remote, p)
			case 9:
				id := anyID()
				must(t, c.Known(id))
				s.known[id] = true
			case 10:
				id := anyID()
				must(t, c.Unknown(id))
				delete(s.known, id)
			case 11:
				from, to := uint16(1+r.IntN(3)), uint16(1+r.IntN(3))
				must(t, c.Renumber(from, to))
				for p, rem := range s.remote {
					if rem.Node == from {
						s.remote[p] = ipcache.Remote{Identity: rem.Identity, Node: to}
					}
				}
			case 13:
				s.doubted = map[uint16]struct{}{}
				for range r.IntN(3) {
					s.doubted[uint16(1+r.IntN(3))] = struct{}{}
				}
				must(t, c.Doubt(s.doubted))
			case 12:
				drop := prefix(8, 24)
				must(t, c.Keep(func(p netip.Prefix) bool { return !drop.Overlaps(p) }))
				maps.DeleteFunc(s.remote, func(p netip.Prefix, _ ipcache.Remote) bool { return drop.Overlaps(p) })
			}
			if step%50 == 49 {
				c = restart(t, c, dir, &s)
			}
			if got, err := c.maps.List(); err != nil || !slices.Equal(got, s.entries()) {
				t.Fatalf("seed %d, step %d:\n got %v, %v\nwant %v", seed, step, got, err, s.entries())
			}
			n := c.Counts()
			if want := len(s.remote); n.Prefixes != want {
				t.Fatalf("seed %d, step %d: %d prefixes of the cluster, want %d", seed, step, n.Prefixes, want)
			}
		}
	}
}

// restart continues with the contents of the maps. Then the source repeats all its information, as it does for
// a process without a token.
func restart(t *testing.T, c opened, dir string, s *state) opened {
	t.Helper()
	c.maps.Close()
	must(t, c.pins.Close())
	c = open(t, dir)
	must(t, c.Initialise(slices.Collect(maps.Keys(s.ranges)), func(a netip.Addr) bool { _, ok := s.local[a]; return ok }))
	must(t, c.Gate(slices.Collect(maps.Keys(s.known))))
	for a, id := range s.local { // the audit of endpoints
		must(t, c.SetLocal(a, id))
	}
	must(t, c.Doubt(s.doubted))
	if got, err := c.maps.List(); err != nil || !slices.Equal(got, s.entries()) {
		t.Fatalf("after a restart, before the source's first message:\n got %v, %v\nwant %v", got, err, s.entries())
	}
	for p, r := range s.remote {
		must(t, c.SetRemote(p, r))
	}
	must(t, c.Keep(func(p netip.Prefix) bool { _, ok := s.remote[p]; return ok }))
	return c
}

// TestKernelNodeNumberIsInUseWhileAPrefixHasIt counts through every way in which a prefix gets and loses a node
// ID.
func TestKernelNodeNumberIsInUseWhileAPrefixHasIt(t *testing.T) {
	c := open(t, kerneltest.NewBPFFS(t))
	one, two := netip.MustParsePrefix("10.1.0.1/32"), netip.MustParsePrefix("10.1.0.0/24")
	want := func(numbers ...uint16) {
		t.Helper()
		for n := range uint16(5) {
			if n > 0 && c.InUse(n) != slices.Contains(numbers, n) {
				t.Errorf("node ID %d in use: %v, want the numbers %v", n, c.InUse(n), numbers)
			}
		}
	}
	want()
	must(t, c.SetRemote(one, ipcache.Remote{Identity: 300, Node: 1}))
	must(t, c.SetRemote(two, ipcache.Remote{Identity: 255, Node: 1}))
	want(1)
	must(t, c.SetRemote(one, ipcache.Remote{Identity: 300, Node: 2}))
	want(1, 2)
	must(t, c.Renumber(1, 3))
	want(2, 3)
	must(t, c.RemoveRemote(one))
	want(3)
	must(t, c.Keep(func(netip.Prefix) bool { return false }))
	want()
}

// TestKernelAuditFindsAndRepairsTheIPCache changes the maps without the owner.
func TestKernelAuditFindsAndRepairsTheIPCache(t *testing.T) {
	c := open(t, kerneltest.NewBPFFS(t))
	p := netip.MustParsePrefix
	must(t, c.AddRange(p("10.1.0.0/24")))
	must(t, c.SetLocal(netip.MustParseAddr("10.1.0.5"), 300))
	must(t, c.SetRemote(p("10.2.0.0/24"), ipcache.Remote{Identity: 255, Node: 1}))
	must(t, c.SetRemote(p("10.2.0.7/32"), ipcache.Remote{Identity: 301, Node: 1}))
	want, err := c.maps.List()
	must(t, err)
	if diffs, err := c.Audit(true); err != nil || len(diffs) > 0 {
		t.Fatalf("the audit of intact maps finds %v, %v", diffs, err)
	}
	must(t, c.maps.Remove(p("10.1.0.0/24")))
	must(t, c.maps.Remove(p("10.2.0.0/24")))
	must(t, c.maps.Set(p("10.2.0.7/32"), ipmap.Info{Identity: 1}))
	must(t, c.maps.Set(p("192.0.2.0/24"), ipmap.Info{Identity: 300}))
	for _, repair := range []bool{false, true} {
		diffs, err := c.Audit(repair)
		must(t, err)
		var names []string
		for _, d := range diffs {
			names = append(names, d.Prefix.String())
		}
		slices.Sort(names)
		if found := []string{"10.1.0.0/24", "10.2.0.0/24", "10.2.0.7/32", "192.0.2.0/24"}; !slices.Equal(names, found) {
			t.Errorf("repair %v: the audit finds %q, want %q", repair, names, found)
		}
	}
	if got, err := c.maps.List(); err != nil || !slices.Equal(got, want) {
		t.Errorf("after the repair: %v, %v, want %v", got, err, want)
	}
	if diffs, err := c.Audit(true); err != nil || len(diffs) > 0 {
		t.Errorf("after the repair the audit finds %v, %v", diffs, err)
	}
}
