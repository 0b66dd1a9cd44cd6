// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// clocked is a table whose clock the test controls.
type clocked struct {
	*Table
	now  time.Time
	wake time.Time // the time at which the owner of the table would call Expire; zero: never
	told map[place]bool
}

// place is an address of a name, in the form for the engine.
type place struct {
	name string
	addr netip.Addr
}

func newTable(names, addresses int) *clocked {
	table := New(Limits{Names: names, Addresses: addresses, Grace: 10 * time.Minute})
	return &clocked{Table: table, now: time.Unix(1_700_000_000, 0), told: make(map[place]bool)}
}

func (c *clocked) wakeAt(at time.Time) {
	if !at.IsZero() && (c.wake.IsZero() || at.Before(c.wake)) {
		c.wake = at
	}
}

func (c *clocked) learn(name string, addrs []netip.Addr, ttl time.Duration) error {
	return c.learnFor(Asker{}, name, addrs, ttl)
}

func (c *clocked) learnFor(by Asker, name string, addrs []netip.Addr, ttl time.Duration) error {
	fresh, gone, err := c.FreeCapacity(by, name, addrs, c.now)
	c.drop(gone)
	if err != nil {
		return err
	}
	for _, a := range fresh {
		c.told[place{name, a}] = true
	}
	wake, _ := c.Add(by, name, addrs, ttl, c.now)
	c.wakeAt(wake)
	return nil
}

func (c *clocked) drop(gone []engine.Name) {
	for _, n := range gone {
		for _, a := range n.Addrs {
			delete(c.told, place{string(n.Name), a})
		}
	}
}

// sweep calls Expire if it is due.
func (c *clocked) sweep() {
	if c.wake.IsZero() || c.wake.After(c.now) {
		return
	}
	var gone []engine.Name
	gone, c.wake = c.Expire(c.now)
	c.drop(gone)
}

// learnMany adds names with 16 addresses each, which end one after the other.
func (c *clocked) learnMany(t testing.TB, names int) {
	t.Helper()
	next := netip.MustParseAddr("20.0.0.0")
	for i := range names {
		var addrs []netip.Addr
		for range 16 {
			addrs = append(addrs, next)
			next = next.Next()
		}
		c.now = c.now.Add(time.Millisecond)
		if err := c.learn(fmt.Sprintf("h%d.example.com", i), addrs, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSweepLooksOnlyAtNamesThatEnd(t *testing.T) {
	const names = 1024
	o := newTable(names, 16*names)
	o.learnMany(t, names)
	o.ending.Visits = 0
	for left := names; left > 0; left-- {
		if len(o.names) != left {
			t.Fatalf("%d names are left, want %d", len(o.names), left)
		}
		o.now = o.wake
		o.sweep()
	}
	if len(o.names) != 0 || o.Addresses() != 0 {
		t.Errorf("%d names with %d addresses are left", len(o.names), o.Addresses())
	}
	// For each name, the queue visits at most three names: the expired name, the next name, and the removed name once
	// more.
	if most := 3 * names; o.ending.Visits > most {
		t.Errorf("%d sweeps visited %d names, limit %d", names, o.ending.Visits, most)
	}
}

func TestFullMemoryOfNamesLooksOnlyAtNamesThatEnd(t *testing.T) {
	const names = 512
	for what, limit := range map[string][2]int{"names": {names, 32 * names}, "addresses": {2 * names, 16 * names}} {
		o := newTable(limit[0], limit[1])
		o.learnMany(t, names)
		o.ending.Visits, o.ended.Visits = 0, 0
		for i := range names {
			at := []netip.Addr{netip.AddrFrom4([4]byte{30, 0, byte(i >> 8), byte(i)})}
			if err := o.learn(fmt.Sprintf("x%d.example.com", i), at, time.Minute); err == nil {
				t.Fatalf("full of valid %s: a new name was accepted", what)
			}
		}
		o.now = o.now.Add(2 * time.Minute) // all addresses are in their grace period
		for i := range names / 2 {
			at := []netip.Addr{netip.AddrFrom4([4]byte{30, 0, byte(i >> 8), byte(i)})}
			if err := o.learn(fmt.Sprintf("x%d.example.com", i), at, time.Minute); err != nil {
				t.Fatalf("full of %s in their grace: %v", what, err)
			}
		}
		if visits, most := o.ending.Visits+o.ended.Visits, 8*names; visits > most {
			t.Errorf("%s: %d calls visited %d names, limit %d", what, names+names/2, visits, most)
		}
	}
}

// hold reports connections to some of the addresses that the previous call returned.
func (c *clocked) hold(inUse ...netip.Addr) []netip.Addr { return c.Hold(inUse, c.now) }

func (c *clocked) after(d time.Duration) {
	c.now = c.now.Add(d)
	c.sweep()
}

func TestAddressStaysWhileAConnectionUsesIt(t *testing.T) {
	busy, idle := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	fresh := netip.MustParseAddr("192.0.2.3")
	for _, grace := range []time.Duration{time.Second, 10 * time.Minute} {
		t.Run(grace.String(), func(t *testing.T) {
			c := newTable(10, 10)
			c.limits.Grace = grace
			if got := c.hold(busy); len(got) != 0 {
				t.Fatalf("asks about %v, but nothing was learned", got)
			}
			for _, a := range []netip.Addr{busy, idle} {
				if err := c.learn("a.example.com", []netip.Addr{a}, time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.learn("b.example.com", []netip.Addr{busy}, 24*time.Hour); err != nil {
				t.Fatal(err)
			}
			c.after(61 * time.Second)
			if err := c.learn("c.example.com", []netip.Addr{fresh}, 24*time.Hour); err != nil {
				t.Fatal(err)
			}
			for range 100 { // reports arrive at least once a minute
				if got := c.hold(busy, fresh); !slices.Contains(got, busy) || slices.Contains(got, fresh) {
					t.Fatalf("asks about %v, want %s among them and not %s", got, busy, fresh)
				}
				c.after(time.Minute)
			}
			if !c.told[place{"a.example.com", busy}] || c.told[place{"a.example.com", idle}] {
				t.Errorf("left: %v, want %s and not %s", c.told, busy, idle)
			}
			// The connection has ended.
			for range int(max(grace, HoldFor)/time.Minute) + 1 {
				c.hold()
				c.after(time.Minute)
			}
			if c.told[place{"a.example.com", busy}] || !c.told[place{"b.example.com", busy}] {
				t.Errorf("left after the end of the connection: %v", c.told)
			}
			if len(c.used) != 0 {
				t.Errorf("%d addresses are noted as used", len(c.used))
			}
		})
	}
}

func TestOnlyAddressesThatWereAskedAboutAreHeld(t *testing.T) {
	c := newTable(10, 10)
	a := netip.MustParseAddr("192.0.2.1")
	c.hold()
	if err := c.learn("a.example.com", []netip.Addr{a}, time.Minute); err != nil {
		t.Fatal(err)
	}
	c.hold(a, netip.MustParseAddr("192.0.2.77"))
	if len(c.used) != 0 {
		t.Errorf("%v are held, but the table asked about none", c.used)
	}
}

// TestAddressesOfARestartWaitForAReport restores addresses whose TTL expired before the process started. They stay
// until the first report of connections.
func TestAddressesOfARestartWaitForAReport(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	c := newTable(10, 10)
	_, wake, err := c.Restore(record.Name{Name: "a.example.com", Addresses: []record.Address{
		{Address: a.String(), Expires: c.now.Add(-time.Hour).Unix()},
	}}, c.now)
	if err != nil {
		t.Fatal(err)
	}
	c.told[place{"a.example.com", a}] = true
	c.wakeAt(wake)
	c.after(time.Minute)
	if len(c.told) != 1 {
		t.Fatal("removed before a datapath could report")
	}
	c.hold()
	c.hold(a)
	c.after(9*time.Minute + time.Second)
	if len(c.told) != 1 {
		t.Error("removed although a connection uses it")
	}
	c.after(time.Minute)
	if len(c.told) != 0 || len(c.used) != 0 {
		t.Errorf("still present without a connection: %v", c.told)
	}
}

func TestRoomIsMadeByAddressesWithoutAConnectionFirst(t *testing.T) {
	c := newTable(10, 4)
	var addrs []netip.Addr
	for i := range 4 {
		addrs = append(addrs, netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
		c.now = c.now.Add(time.Second)
		if err := c.learn("a.example.com", addrs[i:], time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	c.after(2 * time.Minute)
	c.hold()
	c.hold(addrs[0], addrs[2])
	for i := range 4 {
		c.now = c.now.Add(time.Second)
		next := netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
		if err := c.learn("b.example.com", []netip.Addr{next}, time.Hour); err != nil {
			t.Fatal(err)
		}
		var left []netip.Addr
		for _, a := range addrs {
			if c.told[place{"a.example.com", a}] {
				left = append(left, a)
			}
		}
		want := [][]netip.Addr{{addrs[0], addrs[2], addrs[3]}, {addrs[0], addrs[2]}, {addrs[2]}, nil}[i]
		if !slices.Equal(left, want) {
			t.Errorf("after %d new addresses %v are left, want %v", i+1, left, want)
		}
	}
}

// TestAddressesEndAsTheSlowWaySays compares the table with a reference implementation that visits every address.
func TestAddressesEndAsTheSlowWaySays(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	o := newTable(20, 64)
	for step := range 3000 {
		if r.IntN(3) == 0 {
			o.now = o.now.Add(time.Duration(r.IntN(300)) * time.Second)
			want := make(map[string]map[netip.Addr]time.Time)
			for name, addrs := range o.names {
				for a, until := range addrs {
					if until.Add(o.limits.Grace).After(o.now) {
						if want[name] == nil {
							want[name] = make(map[netip.Addr]time.Time)
						}
						want[name][a] = until
					}
				}
			}
			o.sweep()
			if !maps.EqualFunc(o.names, want, maps.Equal[map[netip.Addr]time.Time]) {
				t.Fatalf("step %d: after a sweep\n%v, want\n%v", step, o.names, want)
			}
			continue
		}
		over := false // an address is in its grace period
		for _, addrs := range o.names {
			for _, until := range addrs {
				over = over || until.Before(o.now)
			}
		}
		name := fmt.Sprintf("n%d.example.com", r.IntN(20))
		at := netip.AddrFrom4([4]byte{20, 0, 0, byte(r.IntN(100))})
		known := o.names[name][at] != time.Time{}
		err := o.learn(name, []netip.Addr{at}, time.Duration(1+r.IntN(20))*time.Minute)
		if err != nil && (over || known) {
			t.Fatalf("step %d: refused although addresses are removable (%t) or the name is known (%t): %v", step, over, known,
				err)
		}
		count := 0
		for name, addrs := range o.names {
			count += len(addrs)
			for a := range addrs {
				if !o.told[place{name, a}] {
					t.Fatalf("step %d: %s has %s, which was never fresh", step, name, a)
				}
			}
		}
		if count != len(o.told) {
			t.Fatalf("step %d: %d addresses are left, but no removal was reported for %d others",
				step, count, len(o.told)-count)
		}
		if count != o.Addresses() || count > 64 {
			t.Fatalf("step %d: %d addresses, counted as %d, the limit is 64", step, count, o.Addresses())
		}
	}
}

// BenchmarkNamesThatEndOneByOne uses 4,096 names with 65,536 addresses.
func BenchmarkNamesThatEndOneByOne(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		o := newTable(4096, 65536)
		o.learnMany(b, 4096)
		b.StartTimer()
		for len(o.names) > 0 {
			o.now = o.wake
			o.sweep()
		}
	}
}

// TestRestoredAddressesEndByTheRunningClock: restored times use the monotonic clock. If the wall clock is set while
// the process runs, an address is not kept for years.
func TestRestoredAddressesEndByTheRunningClock(t *testing.T) {
	now := time.Now()
	const tenYears = 10 * 365 * 24 * time.Hour
	for ends, want := range map[time.Duration]time.Duration{
		time.Hour: time.Hour, tenYears: MaxTTL, -tenYears: -tenYears,
	} {
		table := newTable(1, 1)
		at := record.Address{Address: "192.0.2.1", Expires: now.Add(ends).Unix()}
		if _, _, err := table.Restore(record.Name{Name: "a.example", Addresses: []record.Address{at}}, now); err != nil {
			t.Fatal(err)
		}
		until := table.names["a.example"][netip.MustParseAddr("192.0.2.1")]
		if left := until.Sub(now); left > want || left <= want-time.Second || !strings.Contains(until.String(), " m=") {
			t.Errorf("stored to end in %v: it ends in %v, at %v", ends, left, until)
		}
	}
}

// TestAddressThatAnAnswerRepeatsIsNotEvictedForIt: an answer contains a new address, and a known address whose TTL
// has expired. The table is full, but the known address is not evicted to make capacity for the new one.
func TestAddressThatAnAnswerRepeatsIsNotEvictedForIt(t *testing.T) {
	c := newTable(4, 2*maxPerName)
	old := netip.MustParseAddr("20.0.0.1")
	if err := c.learn("a.", []netip.Addr{old}, time.Minute); err != nil {
		t.Fatal(err)
	}
	next, many := netip.MustParseAddr("21.0.0.0"), []netip.Addr(nil)
	for range maxPerName - 1 {
		next = next.Next()
		many = append(many, next)
	}
	if err := c.learn("a.", many, time.Hour); err != nil {
		t.Fatal(err)
	}
	c.now = c.now.Add(2 * time.Minute)
	_, gone, err := c.FreeCapacity(Asker{}, "a.", []netip.Addr{old, next.Next()}, c.now)
	if err == nil || len(gone) > 0 {
		t.Errorf("removed %v, %v; the name is full, and no other address has expired", gone, err)
	}
}

// TestNameThatIsPassedOverStillExpires: when the table is full, the search for addresses to remove skips a name whose
// addresses are in the new answer. The name still expires later.
func TestNameThatIsPassedOverStillExpires(t *testing.T) {
	c := newTable(4, 2)
	a, b := netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("20.0.0.2")
	if err := c.learn("old.", []netip.Addr{a}, time.Minute); err != nil {
		t.Fatal(err)
	}
	c.now = c.now.Add(2 * time.Minute)
	if err := c.learn("new.", []netip.Addr{a, b}, time.Minute); err == nil {
		t.Fatal("two more addresses fit, although the limit is two")
	}
	c.now = c.now.Add(time.Hour)
	c.sweep()
	if len(c.told) > 0 || c.Len() > 0 {
		t.Errorf("an hour later %v is allowed, and %d names are remembered", c.told, c.Len())
	}
}
