// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipamtest contains a Store in memory that can fail like a disk, and the tests that every Store must pass.
package ipamtest

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// ErrDisk is an error with which a test makes a Memory fail.
var ErrDisk = errors.New("no space left on the pretended device")

// Memory is a Store in memory.
type Memory struct {
	mu          sync.Mutex
	allocations map[workload.Owner]*ipam.Allocation // guarded by mu
	quarantined map[netip.Addr]time.Time            // guarded by mu
	cursors     map[netip.Prefix]netip.Addr         // guarded by mu
	serving     []netip.Prefix                      // guarded by mu
	refused     []ipam.Refusal                      // guarded by mu
	primary     []netip.Prefix                      // guarded by mu
	fail        func(*ipam.Changes) (write bool, err error)
	commits     int
}

// NewMemory returns an empty store.
func NewMemory() *Memory {
	return &Memory{
		allocations: map[workload.Owner]*ipam.Allocation{},
		quarantined: map[netip.Addr]time.Time{},
		cursors:     map[netip.Prefix]netip.Addr{},
	}
}

// Fail sets a function that decides for each commit whether it is written, and what it returns. With nil, commits
// succeed again.
func (m *Memory) Fail(f func(*ipam.Changes) (write bool, err error)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = f
}

// Commits returns the number of commits so far.
func (m *Memory) Commits() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.commits
}

// Load implements ipam.Store. Like a file, it loses the monotonic readings of times.
func (m *Memory) Load() (*ipam.Contents, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := &ipam.Contents{Cursors: maps.Clone(m.cursors), Serving: slices.Clone(m.serving), Refused: slices.Clone(m.refused)}
	c.Primary = slices.Clone(m.primary)
	for _, a := range m.allocations {
		copied := *a
		if !a.Expires.IsZero() {
			copied.Expires = time.Unix(0, a.Expires.UnixNano())
		}
		c.Allocations = append(c.Allocations, &copied)
	}
	for a, until := range m.quarantined {
		c.Quarantined = append(c.Quarantined, ipam.Quarantined{Addr: a, Until: time.Unix(0, until.UnixNano())})
	}
	return c, nil
}

// Commit implements ipam.Store.
func (m *Memory) Commit(c *ipam.Changes) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.commits++
	var err error
	if m.fail != nil {
		var write bool
		if write, err = m.fail(c); !write {
			return err
		}
	}
	for o, a := range c.Allocations {
		if a == nil {
			delete(m.allocations, o)
		} else {
			m.allocations[o] = a
		}
	}
	for a, until := range c.Quarantined {
		if until.IsZero() {
			delete(m.quarantined, a)
		} else {
			m.quarantined[a] = until
		}
	}
	maps.Copy(m.cursors, c.Cursors)
	if c.Serving != nil {
		m.serving = slices.Clone(c.Serving)
	}
	if c.Refused != nil {
		m.refused = slices.Clone(c.Refused)
	}
	if c.Primary != nil {
		m.primary = slices.Clone(c.Primary)
	}
	return err
}

// Size implements ipam.Store.
func (m *Memory) Size() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return int64(len(m.allocations) + len(m.quarantined))
}

// Suite runs the tests that every Store must pass. open opens a store. The first time, old is nil. Later, open closes
// old as if its process had been killed, and returns a new store with the content of old.
func Suite(t *testing.T, open func(t *testing.T, old ipam.Store) ipam.Store) {
	at := time.Unix(1_800_000_000, 123456789)
	v4, v6 := netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")
	range4 := netip.MustParsePrefix("10.0.0.0/24")
	one := &ipam.Allocation{
		Owner: workload.Owner{ContainerID: "one", Interface: "eth0"}, State: ipam.Leased, Expires: at,
		Addresses: []ipam.Address{{Addr: v4, PoolBits: 24}, {Addr: v6, PoolBits: 64}},
	}
	two := &ipam.Allocation{
		Owner: workload.Owner{ContainerID: "one", Interface: "eth1"}, State: ipam.Confirmed,
		Addresses: []ipam.Address{{Addr: v6.Next(), PoolBits: 64}}, Manager: "nomad",
	}
	commit := func(t *testing.T, s ipam.Store, c ipam.Changes) {
		t.Helper()
		if err := s.Commit(&c); err != nil {
			t.Fatalf("Commit: %v", err)
		}
	}
	expect := func(t *testing.T, s ipam.Store, want string) {
		t.Helper()
		c, err := s.Load()
		if err != nil {
			t.Fatalf("Load: %v", err)
		}
		if got := Describe(c); got != want {
			t.Fatalf("the store holds\n%s\nwant\n%s", got, want)
		}
	}
	const full = "one/eth0 [{10.0.0.5 24} {fd00::5 64}] leased 1800000000123456789\n" +
		"one/eth1 [{fd00::6 64}] confirmed of nomad\n" +
		"10.0.0.9 quarantined 1800000000123456789\n" +
		"10.0.0.0/24 at 10.0.0.6\n"
	fill := ipam.Changes{
		Allocations: map[workload.Owner]*ipam.Allocation{one.Owner: one, two.Owner: two},
		Quarantined: map[netip.Addr]time.Time{netip.MustParseAddr("10.0.0.9"): at},
		Cursors:     map[netip.Prefix]netip.Addr{range4: v4.Next()},
	}
	t.Run("a new store is empty", func(t *testing.T) { expect(t, open(t, nil), "") })
	t.Run("what was committed is there after a restart", func(t *testing.T) {
		s := open(t, nil)
		commit(t, s, fill)
		expect(t, s, full)
		expect(t, open(t, s), full)
	})
	t.Run("removed is removed, and removing it again changes nothing", func(t *testing.T) {
		s := open(t, nil)
		commit(t, s, fill)
		for range 2 {
			commit(t, s, ipam.Changes{
				Allocations: map[workload.Owner]*ipam.Allocation{one.Owner: nil},
				Quarantined: map[netip.Addr]time.Time{netip.MustParseAddr("10.0.0.9"): {}},
			})
			s = open(t, s)
			expect(t, s, "one/eth1 [{fd00::6 64}] confirmed of nomad\n10.0.0.0/24 at 10.0.0.6\n")
		}
	})
	t.Run("a later value replaces an earlier one", func(t *testing.T) {
		s := open(t, nil)
		commit(t, s, fill)
		confirmed := &ipam.Allocation{Owner: one.Owner, Addresses: one.Addresses, State: ipam.Confirmed}
		commit(t, s, ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{one.Owner: confirmed}})
		commit(t, s, ipam.Changes{Cursors: map[netip.Prefix]netip.Addr{range4: v4}})
		expect(t, open(t, s), "one/eth0 [{10.0.0.5 24} {fd00::5 64}] confirmed\none/eth1 [{fd00::6 64}] confirmed of nomad\n"+
			"10.0.0.9 quarantined 1800000000123456789\n10.0.0.0/24 at 10.0.0.5\n")
	})
	t.Run("the ranges that serve are replaced as a whole", func(t *testing.T) {
		s := open(t, nil)
		range6 := netip.MustParsePrefix("fd00::/64")
		for _, c := range []struct {
			serving []netip.Prefix
			want    string
		}{
			{[]netip.Prefix{range6, range4}, "fd00::/64 serves\n10.0.0.0/24 serves\n"},
			{nil, "fd00::/64 serves\n10.0.0.0/24 serves\n"},
			{[]netip.Prefix{range4}, "10.0.0.0/24 serves\n"},
			{[]netip.Prefix{}, ""},
		} {
			commit(t, s, ipam.Changes{Serving: c.serving})
			s = open(t, s)
			expect(t, s, c.want)
		}
	})
	t.Run("the ranges that are refused are replaced as a whole", func(t *testing.T) {
		s := open(t, nil)
		range6 := netip.MustParsePrefix("fd00::/64")
		for _, c := range []struct {
			refused []ipam.Refusal
			want    string
		}{
			{
				[]ipam.Refusal{{Prefix: range4, Reason: "node b has it"}, {Prefix: range6}},
				"10.0.0.0/24 is refused: node b has it\nfd00::/64 is refused: \n",
			},
			{nil, "10.0.0.0/24 is refused: node b has it\nfd00::/64 is refused: \n"},
			{[]ipam.Refusal{}, ""},
		} {
			commit(t, s, ipam.Changes{Refused: c.refused})
			s = open(t, s)
			expect(t, s, c.want)
		}
	})
	t.Run("the primary ranges are replaced as a whole", func(t *testing.T) {
		s := open(t, nil)
		range6 := netip.MustParsePrefix("fd00::/64")
		for _, c := range []struct {
			primary []netip.Prefix
			want    string
		}{
			{[]netip.Prefix{range4, range6}, "10.0.0.0/24 is primary\nfd00::/64 is primary\n"},
			{nil, "10.0.0.0/24 is primary\nfd00::/64 is primary\n"},
			{[]netip.Prefix{range6}, "fd00::/64 is primary\n"},
		} {
			commit(t, s, ipam.Changes{Primary: c.primary})
			s = open(t, s)
			expect(t, s, c.want)
		}
	})
	t.Run("thousands of records are added and removed", func(t *testing.T) {
		s := open(t, nil)
		const n = 3000
		owner := func(i int) workload.Owner {
			return workload.Owner{ContainerID: fmt.Sprintf("c%d", i), Interface: "eth0"}
		}
		c := ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{}}
		a := netip.MustParseAddr("10.1.0.0")
		for i := range n {
			a = a.Next()
			c.Allocations[owner(i)] = &ipam.Allocation{Owner: owner(i), State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: a, PoolBits: 16}}}
		}
		commit(t, s, c)
		s = open(t, s)
		contents, err := s.Load()
		if err != nil || len(contents.Allocations) != n {
			t.Fatalf("Load: %d allocations, %v; want %d", len(contents.Allocations), err, n)
		}
		for i := range n {
			c.Allocations[owner(i)] = nil
		}
		commit(t, s, c)
		expect(t, open(t, s), "")
	})
}

// Describe formats contents in a fixed order.
func Describe(c *ipam.Contents) string {
	var lines, out []string
	for _, a := range c.Allocations {
		line := fmt.Sprintf("%s %v %s", a.Owner, a.Addresses, a.State)
		if a.State == ipam.Leased {
			line += fmt.Sprintf(" %d", a.Expires.UnixNano())
		}
		if a.Manager != "" {
			line += " of " + a.Manager
		}
		lines = append(lines, line)
	}
	flush := func() {
		slices.Sort(lines)
		out = append(out, lines...)
		lines = nil
	}
	flush()
	for _, r := range c.Quarantined {
		lines = append(lines, fmt.Sprintf("%s quarantined %d", r.Addr, r.Until.UnixNano()))
	}
	flush()
	for p, a := range c.Cursors {
		lines = append(lines, fmt.Sprintf("%s at %s", p, a))
	}
	flush()
	for _, p := range c.Serving {
		out = append(out, fmt.Sprintf("%s serves", p))
	}
	for _, r := range c.Refused {
		out = append(out, fmt.Sprintf("%s is refused: %s", r.Prefix, r.Reason))
	}
	for _, p := range c.Primary {
		out = append(out, fmt.Sprintf("%s is primary", p))
	}
	return strings.Join(append(out, ""), "\n")
}
