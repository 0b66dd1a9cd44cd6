// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

// model is the obvious version of the allocator: lists, and a look at
// everything for each answer.
type model struct {
	now         time.Time
	lease, rest time.Duration
	pools       []*modelPool
	held        map[workload.Owner]*ipam.Allocation
	quarantined map[netip.Addr]time.Time
	released    map[netip.Addr]time.Time        // end of the quarantine, also of those that are free again
	told        map[workload.Owner][]netip.Addr // what each was leased last, by whatever process
}

type modelPool struct {
	prefix   netip.Prefix
	usable   []netip.Addr // in order
	position netip.Addr   // the search begins here
	stored   netip.Addr   // of the last commit
}

func newModel(ranges, exclude []netip.Prefix, lease, rest time.Duration, now time.Time) *model {
	m := &model{
		now: now, lease: lease, rest: rest, held: map[workload.Owner]*ipam.Allocation{},
		quarantined: map[netip.Addr]time.Time{}, released: map[netip.Addr]time.Time{},
		told: map[workload.Owner][]netip.Addr{},
	}
	for _, r := range ranges {
		p := &modelPool{prefix: r, position: r.Addr(), stored: r.Addr()}
		for a := r.Addr().Next().Next(); r.Contains(a); a = a.Next() {
			last := !r.Contains(a.Next()) && a.Is4()
			if !last && !slices.ContainsFunc(exclude, func(x netip.Prefix) bool { return x.Contains(a) }) {
				p.usable = append(p.usable, a)
			}
		}
		m.pools = append(m.pools, p)
	}
	return m
}

// commit models that every change of the store also stores the positions of the pools.
func (m *model) commit() {
	for _, p := range m.pools {
		p.stored = p.position
	}
}

// restart ends what is in memory alone.
func (m *model) restart() {
	maps.DeleteFunc(m.held, func(_ workload.Owner, a *ipam.Allocation) bool { return a.State == ipam.Leased })
	for _, p := range m.pools {
		p.position = p.stored
	}
	// Addresses whose quarantine is over count as never used.
	maps.DeleteFunc(m.released, func(a netip.Addr, _ time.Time) bool { _, ok := m.quarantined[a]; return !ok })
}

func (m *model) expire() {
	maps.DeleteFunc(m.held, func(_ workload.Owner, a *ipam.Allocation) bool {
		return a.State == ipam.Leased && !m.now.Before(a.Expires)
	})
	maps.DeleteFunc(m.quarantined, func(_ netip.Addr, until time.Time) bool {
		if !m.now.Before(until) {
			m.commit()
			return true
		}
		return false
	})
}

func (m *model) taken(a netip.Addr) bool {
	if _, ok := m.quarantined[a]; ok {
		return true
	}
	for _, x := range m.held {
		if x.Has(a) {
			return true
		}
	}
	return false
}

func (m *model) allocate(r ipam.Request) (*ipam.Allocation, error) {
	next := &ipam.Allocation{Owner: r.Owner, State: ipam.Leased, Expires: m.now.Add(m.lease)}
	if a := m.held[r.Owner]; a != nil {
		for _, w := range r.Wanted {
			if !a.Has(w) {
				return nil, ipam.ErrOtherContent
			}
		}
		if a.State == ipam.Confirmed {
			return a, nil
		}
		next.Addresses = a.Addresses
		if !r.ValidateOnly {
			m.held[r.Owner] = next
		}
		return next, nil
	}
	advance := map[*modelPool]netip.Addr{}
	for _, is4 := range []bool{true, false} {
		var wanted netip.Addr
		for _, w := range r.Wanted {
			if w.Is4() == is4 {
				wanted = w
			}
		}
		var got netip.Addr
		var from *modelPool
		for _, p := range m.pools {
			if p.prefix.Addr().Is4() != is4 || got.IsValid() {
				continue
			}
			if wanted.IsValid() {
				if p.prefix.Contains(wanted) && slices.Contains(p.usable, wanted) && !m.taken(wanted) {
					got, from = wanted, p
				}
				continue
			}
			// First those from the position on, then those before it, then the one that was
			// released longest ago.
			for _, behind := range []bool{true, false} {
				for _, a := range p.usable {
					_, used := m.released[a]
					if !got.IsValid() && (a.Compare(p.position) >= 0) == behind && !m.taken(a) && !used {
						got, from = a, p
						advance[p] = a.Next()
						if !p.prefix.Contains(a.Next()) {
							advance[p] = p.prefix.Addr()
						}
					}
				}
			}
			order := func(a, b netip.Addr) int { return cmp.Or(m.released[a].Compare(m.released[b]), a.Compare(b)) }
			for _, a := range slices.SortedFunc(maps.Keys(m.released), order) {
				if !got.IsValid() && p.prefix.Contains(a) && slices.Contains(p.usable, a) && !m.taken(a) {
					got, from, advance[p] = a, p, a.Next()
					if !p.prefix.Contains(a.Next()) {
						advance[p] = p.prefix.Addr()
					}
				}
			}
		}
		if !got.IsValid() {
			if wanted.IsValid() {
				return nil, ipam.ErrUnavailable
			}
			return nil, ipam.ErrExhausted
		}
		next.Addresses = append(next.Addresses, ipam.Address{Addr: got, PoolBits: from.prefix.Bits()})
	}
	if !r.ValidateOnly {
		m.held[r.Owner] = next
		maps.DeleteFunc(m.released, func(a netip.Addr, _ time.Time) bool { return next.Has(a) })
		m.told[r.Owner] = []netip.Addr{next.Addresses[0].Addr, next.Addresses[1].Addr}
		for p, a := range advance {
			p.position = a
		}
	}
	return next, nil
}

func (m *model) confirm(o workload.Owner, list []netip.Addr) (*ipam.Allocation, error) {
	a := m.held[o]
	if a == nil {
		return nil, ipam.ErrNotHeld
	}
	if len(list) != len(a.Addresses) || !a.Has(list[0]) || !a.Has(list[1]) {
		return nil, ipam.ErrMismatch
	}
	if a.State == ipam.Leased {
		m.commit()
	}
	m.held[o] = &ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: a.Addresses}
	return m.held[o], nil
}

func (m *model) release(o workload.Owner) *ipam.Allocation {
	a := m.held[o]
	if a == nil {
		return nil
	}
	delete(m.held, o)
	if a.State == ipam.Confirmed {
		m.commit()
	}
	if m.rest > 0 && a.State == ipam.Confirmed {
		for _, x := range a.Addresses {
			m.quarantined[x.Addr] = m.now.Add(m.rest)
			m.released[x.Addr] = m.now.Add(m.rest)
		}
	}
	return a
}

func describe(a *ipam.Allocation) string {
	if a == nil {
		return "nothing"
	}
	return fmt.Sprintf("%s %v %s %d", a.Owner, a.Addresses, a.State, a.Expires.UnixNano())
}

// TestAllocatorBehavesAsTheNaiveModel compares answers, errors, figures and
// the whole list over random histories with restarts and failing commits.
func TestAllocatorBehavesAsTheNaiveModel(t *testing.T) {
	sentinels := []error{ipam.ErrOtherContent, ipam.ErrUnavailable, ipam.ErrExhausted, ipam.ErrNotHeld, ipam.ErrMismatch}
	classOf := func(err error) string {
		for _, s := range sentinels {
			if errors.Is(err, s) {
				return s.Error()
			}
		}
		return fmt.Sprint(err)
	}
	for seed := range uint64(12) {
		onDisk := seed%3 == 0
		t.Run(fmt.Sprintf("seed %d on disk %v", seed, onDisk), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 11))
			ranges, exclude := prefixes("10.0.0.0/28", "10.0.1.0/29", "fd00::/123"), prefixes("10.0.0.8/31", "fd00::10/128")
			lease, rest := 60*time.Second, time.Duration(seed%3)*20*time.Second
			m := newModel(ranges, exclude, lease, rest, time.Unix(1_800_000_000, 0))
			var clock atomic.Pointer[time.Time] // the loop looks at it when it likes
			setNow := func(now time.Time) { m.now = now; clock.Store(&now) }
			setNow(m.now)
			o := ipam.Options{Ranges: ranges, Exclude: exclude, Lease: lease, Quarantine: rest, Now: func() time.Time { return *clock.Load() }}
			dir := t.TempDir() + "/ipam"
			memory := ipamtest.NewMemory()
			open := func() ipam.Store {
				if !onDisk {
					return memory
				}
				s, err := store.Open(dir)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { s.Close() }) //nolint:errcheck // closed twice is fine
				return s
			}
			s := open()
			a, stop := start(t, s, o)
			steps := 1500
			if onDisk {
				steps = 500
			}
			all := append(slices.Clone(m.pools[0].usable), m.pools[2].usable...)
			for step := range steps {
				who := owner(fmt.Sprintf("c%d", r.IntN(24)))
				fail := func(format string, args ...any) {
					t.Helper()
					t.Fatalf("step %d: %s", step, fmt.Sprintf(format, args...))
				}
				compare := func(what string, got *ipam.Allocation, err error, want *ipam.Allocation, wantErr error) {
					t.Helper()
					if classOf(err) != classOf(wantErr) || err == nil && describe(got) != describe(want) {
						fail("%s %s: got %s, %v; want %s, %v", what, who, describe(got), err, describe(want), wantErr)
					}
				}
				m.expire()
				if !onDisk && r.IntN(40) == 0 {
					// One commit fails, and may or may not have been written: after a repeated request, memory and
					// file must agree.
					memory.Fail(func(*ipam.Changes) (bool, error) { return false, ipamtest.ErrDisk })
					got, err := a.Release(t.Context(), who)
					switch {
					case err == nil && got != nil && got.State == ipam.Confirmed:
						fail("Release %s succeeded with %s although nothing can be written", who, describe(got))
					case err == nil: // a lease is in memory alone
						compare("Release", got, err, m.release(who), nil)
					}
					memory.Fail(nil)
				}
				switch op := r.IntN(20); {
				case op < 9:
					req := ipam.Request{Owner: who, ValidateOnly: r.IntN(8) == 0}
					if r.IntN(4) == 0 {
						req.Wanted = []netip.Addr{all[r.IntN(len(all))]}
					}
					got, err := a.Allocate(t.Context(), req)
					want, wantErr := m.allocate(req)
					compare("Allocate", got, err, want, wantErr)
				case op < 13:
					list := []netip.Addr{all[0], all[len(all)-1]}
					if x := m.held[who]; x != nil && r.IntN(5) > 0 {
						list = []netip.Addr{x.Addresses[1].Addr, x.Addresses[0].Addr}
					} else if told := m.told[who]; told != nil && r.IntN(2) == 0 {
						list = told // perhaps of a process that ended, and another's by now
					}
					got, err := a.Confirm(t.Context(), who, list)
					want, wantErr := m.confirm(who, list)
					compare("Confirm", got, err, want, wantErr)
				case op < 17:
					got, err := a.Release(t.Context(), who)
					compare("Release", got, err, m.release(who), nil)
				case op < 19:
					setNow(m.now.Add(time.Duration(r.IntN(30_000)) * time.Millisecond))
				case r.IntN(3) == 0:
					if err := stop(); err != nil {
						fail("Run: %v", err)
					}
					if c, ok := s.(*store.Store); ok {
						if err := c.Close(); err != nil {
							fail("Close: %v", err)
						}
					}
					setNow(m.now.Add(time.Duration(r.IntN(30_000)) * time.Millisecond))
					m.restart()
					s = open()
					a, stop = start(t, s, o)
				}
				m.expire()
				list, err := a.List(t.Context())
				if err != nil {
					fail("List: %v", err)
				}
				wanted := slices.SortedFunc(maps.Values(m.held), func(x, y *ipam.Allocation) int { return x.Owner.Compare(y.Owner) })
				if !slices.EqualFunc(list, wanted, func(x, y *ipam.Allocation) bool { return describe(x) == describe(y) }) {
					fail("the lists differ: %d and %d", len(list), len(wanted))
				}
				for i, f := range a.Summary().Pools {
					var want ipam.Figures
					for _, addr := range m.pools[i].usable {
						if _, ok := m.quarantined[addr]; ok {
							want.Quarantined++
							continue
						}
						state := ipam.State(0)
						for _, x := range m.held {
							if x.Has(addr) {
								state = x.State
							}
						}
						switch state {
						case ipam.Leased:
							want.Leased++
						case ipam.Confirmed:
							want.Confirmed++
						default:
							want.Free++
						}
					}
					if f.Leased != want.Leased || f.Confirmed != want.Confirmed || f.Quarantined != want.Quarantined || f.Free != want.Free {
						fail("figures of %s: %+v, want %+v", f.Prefix, f, want)
					}
				}
			}
		})
	}
}
