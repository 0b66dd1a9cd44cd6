// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var start = time.Unix(1_700_000_000, 0)

// clocked is a table whose clock the test controls.
type clocked struct {
	*Table
	now time.Time
}

func newTable(names, addresses int) *clocked {
	return &clocked{New(Limits{names, addresses}, start), start}
}

// web is a pod that uses little of the table.
var web = Asker{Endpoint: 1, Tenant: "namespace shop"}

func addr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)})
}

func addrs(ttl time.Duration, all ...int) (out []Address) {
	for _, i := range all {
		out = append(out, Address{addr(i), ttl})
	}
	return out
}

func (c *clocked) learn(by Asker, name string, ttl time.Duration, all ...int) Result {
	return c.Learn(by, name, nil, addrs(ttl, all...), c.now)
}

func (c *clocked) enforced(name string, r Result) { c.Enforced(name, r.Enforce, c.now) }

func (c *clocked) after(d time.Duration) { c.now = c.now.Add(d) }

// text returns the content of the table.
func (c *clocked) text() string {
	var out []string
	for _, n := range c.List(all, netip.Addr{}, c.now) {
		for _, e := range n.Entries {
			out = append(out, fmt.Sprintf("%s=%s/%s", n.Name, e.Addr, e.Expires.Sub(c.now)))
		}
	}
	return strings.Join(out, " ")
}

func all(string) bool { return true }

func TestAddressesStayForTheirTTL(t *testing.T) {
	c := newTable(10, 10)
	c.learn(web, "a.", 5*time.Second, 1)
	c.learn(web, "a.", 2*time.Minute, 2)
	c.learn(web, "b.", 100*24*time.Hour, 1)
	if got := c.text(); got != "a.=20.0.0.1/1m0s a.=20.0.0.2/2m0s b.=20.0.0.1/168h0m0s" {
		t.Fatal(got)
	}
	c.after(30 * time.Second)
	c.learn(web, "a.", time.Second, 1) // longer
	c.learn(web, "a.", time.Second, 2) // a shorter TTL does not shorten the time
	if got := c.text(); got != "a.=20.0.0.1/1m0s a.=20.0.0.2/1m30s b.=20.0.0.1/167h59m30s" {
		t.Fatal(got)
	}
	for _, want := range []string{"20.0.0.1", "20.0.0.2", ""} {
		wake := c.Expire(c.now)
		c.now = wake.Add(-time.Nanosecond)
		if n, ok := c.Get("a.", c.now); !ok || n.Entries[0].Addr.String() != want {
			if want != "" || ok {
				t.Fatalf("before %s: %v, want %s first", wake, n, want)
			}
		}
		c.now = wake
		if want == "" {
			break
		}
		c.Expire(c.now)
	}
	c.after(MaxTTL)
	if !c.Expire(c.now).IsZero() || c.text() != "" || len(c.Shares()) != 1 {
		t.Errorf("left: %s, %v", c.text(), c.Shares())
	}
}

func TestOnlyNewAddressesAreHeld(t *testing.T) {
	c := newTable(10, 10)
	r := c.learn(web, "a.", time.Minute, 1, 2)
	if len(r.Enforce) != 2 {
		t.Fatalf("first answer: %+v", r)
	}
	if again := c.learn(web, "a.", time.Minute, 1, 2); len(again.Enforce) != 2 {
		t.Fatalf("not enforced yet: %+v", again)
	}
	c.enforced("a.", r)
	c.after(29 * time.Second)
	if r := c.learn(web, "a.", time.Minute, 2, 3); !slices.Equal(r.Enforce, addrs(time.Minute, 3)) {
		t.Errorf("with one new address: %+v", r)
	}
	c.after(2 * time.Second) // less than half of what the answer grants is left
	if r := c.learn(web, "a.", time.Minute, 1); len(r.Enforce) != 1 {
		t.Errorf("soon over: %+v", r)
	}
	if r := c.learn(web, "a.", 20*time.Minute, 2); len(r.Enforce) != 1 {
		t.Errorf("longer TTL: %+v", r)
	}
	c.enforced("a.", Result{Enforce: addrs(20*time.Minute, 1, 2)})
	c.Unenforced()
	if r := c.learn(web, "a.", time.Minute, 1); len(r.Enforce) != 1 {
		t.Errorf("after a restart of sluice-policy: %+v", r)
	}
	c.Enforced("unknown.", addrs(time.Minute, 1), c.now)
	if got := c.Missing("a.", addrs(time.Minute, 1, 2, 9), c.now); len(got) != 2 {
		t.Errorf("missing: %v", got)
	}
}

func TestNamesAndAddressesBelongTogetherInEveryWay(t *testing.T) {
	c := newTable(10, 20)
	c.learn(web, "a.", time.Minute, 1, 2, 3)
	c.learn(web, "b.", time.Minute, 3)
	var found []string
	for _, n := range c.List(all, addr(3), c.now) {
		found = append(found, n.Name)
	}
	if !slices.Equal(found, []string{"a.", "b."}) {
		t.Errorf("names of an address: %v", found)
	}
	if gone := c.Delete(func(n string) bool { return n == "a." }, addr(3), c.now); len(gone) != 1 {
		t.Errorf("deleted %v", gone)
	}
	if got := c.text(); got != "a.=20.0.0.1/1m0s a.=20.0.0.2/1m0s b.=20.0.0.3/1m0s" {
		t.Error(got)
	}
	if gone := c.Delete(all, netip.Addr{}, c.now); len(gone) != 3 || c.text() != "" {
		t.Errorf("deleted %v, left %s", gone, c.text())
	}
	if names, addresses := c.Len(); names != 0 || addresses != 0 {
		t.Errorf("%d names, %d addresses", names, addresses)
	}
}

func TestAddressesOfTheClusterAreNeverLearned(t *testing.T) {
	c := newTable(10, 100)
	x := NewExclusions(map[Reason][]netip.Prefix{
		Cluster: {
			netip.MustParsePrefix("10.0.0.5/32"), netip.MustParsePrefix("10.244.0.0/16"),
			netip.MustParsePrefix("fd00:244::/48"), netip.MustParsePrefix("::ffff:10.9.0.0/112"),
		},
		Configured: {netip.MustParsePrefix("198.51.100.0/24")},
	})
	c.Exclude(x, c.now)
	for text, want := range map[string]Reason{
		"127.0.0.1": Special, "127.9.9.9": Special, "::1": Special, "::": Special, "0.0.0.0": Special, "0.1.2.3": Special,
		"169.254.169.254": Special, "fe80::1": Special, "224.0.0.1": Special, "ff02::1": Special, "fec0::1": Special,
		"255.255.255.255": Special, "::ffff:127.0.0.1": Special, "::ffff:169.254.1.1": Special, "::127.0.0.1": Special,
		"10.0.0.5": Cluster, "::ffff:10.0.0.5": Cluster, "10.244.7.7": Cluster, "fd00:244::7": Cluster, "10.9.1.1": Cluster,
		"198.51.100.7": Configured,
		"10.0.0.6":     Learned, "203.0.113.7": Learned, "2001:db8::7": Learned, "fd00:245::7": Learned,
		"::ffff:203.0.113.8": Learned,
	} {
		a := netip.MustParseAddr(text)
		r := c.Learn(web, "a.", nil, []Address{{a, time.Minute}}, c.now)
		refusals := c.Refusals("a.")
		got := Learned
		if len(refusals) > 0 && refusals[0].Addr == a.Unmap() {
			got = refusals[0].Reason
		}
		if got != want || r.Refused != map[bool]int{true: 0, false: 1}[want == Learned] || len(r.Enforce) != 1-r.Refused {
			t.Errorf("%s: reason %d, %+v; want reason %d", text, got, r, want)
		}
		c.after(time.Second)
	}
	// An address that later belongs to the cluster is removed.
	c.enforced("a.", Result{Enforce: []Address{{netip.MustParseAddr("203.0.113.7"), time.Minute}}})
	x = NewExclusions(map[Reason][]netip.Prefix{Cluster: {netip.MustParsePrefix("203.0.113.0/24")}})
	if gone := c.Exclude(x, c.now); len(gone) != 1 || gone[0].Addr.String() != "203.0.113.7" {
		t.Errorf("sluice-policy must forget %v", gone)
	}
	if got := c.text(); strings.Contains(got, "203.0.113.") {
		t.Errorf("left: %s", got)
	}
}

func TestAddressesOfOneNameAreBounded(t *testing.T) {
	c := newTable(10, 10*MaxPerName)
	for i := range MaxPerName + 5 {
		c.learn(web, "a.", time.Minute, i)
	}
	if _, n := c.Len(); n != MaxPerName || c.Refusals("a.")[0].Reason != NameFull {
		t.Errorf("%d addresses, %v", n, c.Refusals("a.")[0])
	}
}

// TestOnePodDoesNotTakeANameFromOthers: a pod pays for the maximum number of addresses of a name. When another pod
// learns addresses of the name, the first pod loses addresses until both have equally many.
func TestOnePodDoesNotTakeANameFromOthers(t *testing.T) {
	c := newTable(10, 10*MaxPerName)
	noisy, quiet := Asker{Endpoint: 9, Tenant: "namespace noisy"}, Asker{Endpoint: 10, Tenant: "namespace quiet"}
	c.enforced("a.", c.learn(noisy, "a.", time.Minute, 0)) // expires first
	for i := 1; i < MaxPerName; i++ {
		c.learn(noisy, "a.", time.Hour, i)
	}
	r := c.learn(quiet, "a.", time.Hour, MaxPerName)
	if len(r.Enforce) != 1 || len(r.Evicted) != 1 || r.Evicted[0].Addr != addr(0) {
		t.Errorf("%+v, want the address of the quiet pod in place of the one that expires first", r)
	}
	learned := 1
	for i := range MaxPerName {
		if c.learn(quiet, "a.", time.Hour, 2*MaxPerName+i).Refused == 0 {
			learned++
		}
	}
	if _, n := c.Len(); n != MaxPerName || learned != MaxPerName/2 {
		t.Errorf("%d addresses, of which the second pod learned %d, want half", n, learned)
	}
}

// TestLongAnswersAreTaughtAgainInTime: clients use an address for its whole TTL. So sluice-policy must enforce it as
// long.
func TestLongAnswersAreTaughtAgainInTime(t *testing.T) {
	c := newTable(10, 10)
	c.enforced("a.", c.learn(web, "a.", 2*time.Hour, 1))
	c.after(4 * time.Minute)
	if r := c.learn(web, "a.", 2*time.Hour, 1); len(r.Enforce) != 0 {
		t.Errorf("after 4 minutes: %+v", r)
	}
	c.after(2 * time.Minute)
	if r := c.learn(web, "a.", 2*time.Hour, 1); len(r.Enforce) != 1 {
		t.Errorf("6 minutes of the TTL would not be enforced: %+v", r)
	}
}

// TestPodAboveItsGuaranteeIsRefusedFirst: one pod fills the table. When other pods learn addresses, the pod above its
// guarantee loses its addresses.
func TestPodAboveItsGuaranteeIsRefusedFirst(t *testing.T) {
	for what, limit := range map[string][2]int{"names": {64, 1000}, "addresses": {1000, 64}} {
		t.Run(what, func(t *testing.T) {
			c := newTable(limit[0], limit[1])
			greedy, other := Asker{Endpoint: 9, Tenant: "namespace greedy"}, Asker{Endpoint: 10, Tenant: "namespace greedy"}
			mine := func(by Asker, i int) Result {
				r := c.learn(by, fmt.Sprintf("%d.%d.", by.Endpoint, i), time.Hour, int(by.Endpoint)*1000+i)
				c.enforced(fmt.Sprintf("%d.%d.", by.Endpoint, i), r)
				return r
			}
			// A single pod may use the whole table.
			for i := range 64 {
				if r := mine(greedy, i); r.Refused != 0 {
					t.Fatalf("place %d: %+v", i, r)
				}
				c.after(time.Second)
			}
			if r := mine(greedy, 64); r.Refused != 1 || len(r.Evicted) != 0 {
				t.Fatalf("beyond the bound: %+v", r)
			}
			// A pod of another tenant is guaranteed 1/(2*2) of the limit. It takes this from the greedy pod, which
			// loses what ends first.
			evicted := 0
			for i := range 16 {
				r := mine(web, i)
				if r.Refused != 0 {
					t.Fatalf("within the guarantee: place %d: %+v", i, r)
				}
				for _, p := range r.Evicted {
					if p.Name != fmt.Sprintf("9.%d.", evicted) {
						t.Errorf("evicted %v, want the address that ends first", p)
					}
					evicted++
				}
			}
			if evicted != 16 {
				t.Errorf("%d addresses were evicted", evicted)
			}
			if r := mine(web, 16); r.Refused != 1 {
				t.Errorf("above the guarantee of a full table: %+v", r)
			}
			// A second pod of the greedy tenant takes nothing from web, because the two pods divide the guarantee of
			// their tenant.
			for i := range 20 {
				if r := mine(other, i); (r.Refused == 0) != (i < 8) {
					t.Errorf("second pod, place %d: %+v", i, r)
				}
			}
			for i := range 16 {
				if _, ok := c.Get(fmt.Sprintf("1.%d.", i), c.now); !ok {
					t.Errorf("web lost its place %d", i)
				}
			}
			reason := map[string]Reason{"names": NamesShare, "addresses": AddressesShare}[what]
			if r := c.Refusals("1.16."); len(r) != 1 || r[0].Reason != reason || r[0].Asker != web {
				t.Errorf("refused: %+v", r)
			}
		})
	}
}

func TestNameThatAQuietPodUsesIsNotLostWithTheGreedyOne(t *testing.T) {
	c := newTable(100, 16)
	greedy := Asker{Endpoint: 9, Tenant: "namespace greedy"}
	c.learn(greedy, "shared.", time.Minute, 1)
	c.after(time.Second)
	for i := range 15 {
		c.learn(greedy, fmt.Sprintf("x%d.", i), time.Hour, 100+i)
	}
	c.learn(web, "shared.", time.Minute, 1) // now the address counts for web
	for i := range 3 {
		if r := c.learn(web, fmt.Sprintf("w%d.", i), time.Minute, 200+i); r.Refused != 0 {
			t.Fatalf("%d: %+v", i, r)
		}
	}
	if n, ok := c.Get("shared.", c.now); !ok || n.Payer != web || n.Entries[0].Payer != web {
		t.Errorf("%v %+v", ok, n)
	}
}

func TestAddressesOfPodsThatAreGoneMakeRoomFirst(t *testing.T) {
	c := newTable(100, 16)
	for i := range 16 {
		c.learn(web, fmt.Sprintf("x%d.", i), time.Hour, i)
	}
	c.Leave(web.Endpoint)
	c.Leave(77)
	next := Asker{Endpoint: 2, Tenant: "namespace next"}
	for i := range 8 {
		if r := c.learn(next, fmt.Sprintf("y%d.", i), time.Minute, 100+i); r.Refused != 0 {
			t.Errorf("%d: %+v", i, r)
		}
	}
	if s := c.Shares(); len(s) != 2 || s[0].Endpoint != 0 || s[0].Addresses != 8 || s[1].Addresses != 8 {
		t.Errorf("%+v", s)
	}
}

// TestAskerKeepsItsAccountWhenItsOnlyAddressIsEvicted: a name is evicted for which another pod pays. The asker pays
// for the only address of the name.
func TestAskerKeepsItsAccountWhenItsOnlyAddressIsEvicted(t *testing.T) {
	c := newTable(8, 100)
	noisy := Asker{Endpoint: 2, Tenant: "namespace noisy"}
	shop := func(endpoint uint32) Asker { return Asker{Endpoint: endpoint, Tenant: "namespace shop"} }
	asker, gone1, gone2 := shop(3), shop(4), shop(5)
	c.learn(noisy, "n0.", 2*time.Minute, 0)
	for i := 1; i < 8; i++ {
		c.learn(noisy, fmt.Sprintf("n%d.", i), time.Hour, i)
	}
	c.learn(gone1, "n1.", time.Hour, 1)
	c.learn(gone2, "n2.", time.Hour, 2)
	c.learn(asker, "n0.", 2*time.Minute, 0) // pays for the address, but not for the name: its tenant has too many pods
	if n, _ := c.Get("n0.", c.now); n.Payer != noisy || n.Entries[0].Payer != asker {
		t.Fatalf("%+v", n)
	}
	c.Leave(gone1.Endpoint)
	c.Leave(gone2.Endpoint)
	if r := c.learn(asker, "m.", time.Minute, 99); r.Refused != 0 {
		t.Errorf("%+v, %+v", r, c.Refusals("m."))
	}
	if n, ok := c.Get("m.", c.now); !ok || n.Payer != asker {
		t.Errorf("%v, %+v", ok, n)
	}
}

// TestNamesThatCouldNotBeWrittenAreBounded: names are learned and expire while nothing can be written. The list of
// changed names stays small.
func TestNamesThatCouldNotBeWrittenAreBounded(t *testing.T) {
	const size = 100
	c := newTable(size, size)
	c.learn(web, "filed.", time.Minute, 0)
	c.TakeChanges() // is written
	for i := range 10_000 {
		c.learn(web, fmt.Sprintf("n%d.", i), time.Minute, i)
		if i%7 == 0 {
			records, gone := c.TakeChanges()
			c.after(2 * time.Second)
			c.Expire(c.now)
			c.Changed(records, gone)
		}
		c.after(time.Second)
	}
	if n := len(c.changed); n > size {
		t.Errorf("%d names wait to be written, more than %d", n, size)
	}
	c.after(time.Hour)
	c.Expire(c.now)
	c.learn(web, "filed.", time.Minute, 0) // is added again, and removed
	c.after(time.Hour)
	c.Expire(c.now)
	if records, gone := c.TakeChanges(); len(records) != 0 || !slices.Equal(gone, []string{"filed."}) {
		t.Errorf("%d records, and that %d names are gone, must be written; want only filed.", len(records), len(gone))
	}
}

// TestCountsAreThoseOfTheContent learns and removes addresses at random, and compares the counts with the content.
func TestCountsAreThoseOfTheContent(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	c := newTable(30, 100)
	stored := map[string]Name{}
	for step := range 20_000 {
		by := Asker{Endpoint: uint32(1 + r.IntN(6))}
		by.Tenant = fmt.Sprintf("namespace %d", by.Endpoint%3)
		switch r.IntN(20) {
		case 0:
			c.after(time.Duration(r.IntN(90)) * time.Second)
			c.Expire(c.now)
		case 1:
			c.Leave(by.Endpoint)
		case 2:
			name := fmt.Sprintf("n%d.", r.IntN(60))
			c.Delete(func(n string) bool { return n == name }, netip.Addr{}, c.now)
		default:
			name := fmt.Sprintf("n%d.", r.IntN(60))
			var list []int
			for range 1 + r.IntN(8) {
				list = append(list, r.IntN(300))
			}
			res := c.learn(by, name, time.Duration(r.IntN(300))*time.Second, list...)
			if r.IntN(2) == 0 {
				c.enforced(name, res)
			}
		}
		records, gone := c.TakeChanges()
		for _, n := range records {
			stored[n.Name] = n
		}
		for _, n := range gone {
			delete(stored, n)
		}
		if step%50 != 0 {
			continue
		}
		names, addresses := map[uint32]int{}, map[uint32]int{}
		list := c.List(all, netip.Addr{}, c.now)
		totalAddresses := 0
		for _, n := range list {
			names[n.Payer.Endpoint]++
			for i, e := range n.Entries {
				addresses[e.Payer.Endpoint]++
				totalAddresses++
				if i > 0 && !n.Entries[i-1].Addr.Less(e.Addr) {
					t.Fatalf("step %d: %v is not sorted", step, n)
				}
			}
		}
		for _, s := range c.Shares() {
			if s.Names != names[s.Endpoint] || s.Addresses != addresses[s.Endpoint] {
				t.Fatalf("step %d: %+v, but there are %d and %d", step, s, names[s.Endpoint], addresses[s.Endpoint])
			}
		}
		gotNames, gotAddresses := c.Len()
		if gotNames != len(list) || gotAddresses != totalAddresses || gotNames > 30 || gotAddresses > 100 {
			t.Fatalf("step %d: counted %d and %d, there are %d and %d", step, gotNames, gotAddresses, len(list), totalAddresses)
		}
		if len(stored) != len(list) {
			t.Fatalf("step %d: the changes lead to %d names, there are %d", step, len(stored), len(list))
		}
		again := New(Limits{30, 100}, c.now)
		if omitted := again.Restore(slices.Collect(maps.Values(stored)), c.now); omitted != 0 {
			t.Fatalf("step %d: %d addresses were not restored", step, omitted)
		}
		for i, n := range again.List(all, netip.Addr{}, c.now) {
			want := list[i]
			for j := range want.Entries {
				want.Entries[j].Enforced = time.Time{}
			}
			if !reflect.DeepEqual(n, want) {
				t.Fatalf("step %d: restored\n%+v, want\n%+v", step, n, want)
			}
		}
	}
}

func TestRestoreAcceptsNoMoreThanTheTable(t *testing.T) {
	c := newTable(1, 3)
	c.Exclude(NewExclusions(map[Reason][]netip.Prefix{Cluster: {netip.MustParsePrefix("20.0.0.9/32")}}), c.now)
	late := c.now.Add(1000 * 24 * time.Hour)
	omitted := c.Restore([]Name{
		{Name: "a.", Payer: web, Chain: []string{"x.", "y."}, Entries: []Entry{
			{Addr: addr(1), Expires: late, Payer: web},
			{Addr: addr(2), Expires: c.now, Payer: web},
			{Addr: addr(9), Expires: late, Payer: web},
			{Addr: addr(3), Expires: late, Payer: Asker{}},
			{Addr: addr(3), Expires: late, Payer: Asker{}},
		}},
		{Name: "b.", Entries: []Entry{{Addr: addr(4), Expires: late}}},
		{Name: "c.", Entries: []Entry{{Addr: addr(4), Expires: c.now.Add(-time.Hour)}}},
	}, c.now)
	if got := c.text(); omitted != 2 || got != "a.=20.0.0.1/168h0m0s a.=20.0.0.3/168h0m0s" {
		t.Errorf("omitted %d: %s", omitted, got)
	}
	records, gone := c.TakeChanges()
	if slices.Sort(gone); len(records) != 1 || !slices.Equal(gone, []string{"b.", "c."}) {
		t.Errorf("to be stored again: %v, %v", records, gone)
	}
	c.Changed([]Name{{Name: "a."}}, []string{"c."})
	if records, gone := c.TakeChanges(); len(records) != 1 || !slices.Equal(gone, []string{"c."}) {
		t.Errorf("after a failure: %v, %v", records, gone)
	}
}

func TestChainsAreKeptWithinABound(t *testing.T) {
	c := newTable(10, 10)
	long := strings.Repeat("a", 250) + "."
	for want, chain := range map[string][]string{
		"": nil, "b.": {"b."}, "b. c.": {"b.", "c."}, "example.com. " + long: {"example.com.", long, long, "d."},
	} {
		for range 2 {
			c.Learn(web, "a.", chain, addrs(time.Minute, 1), c.now)
		}
		if n, _ := c.Get("a.", c.now); strings.Join(n.Chain, " ") != want {
			t.Errorf("%q is kept as %q", chain, n.Chain)
		}
	}
}

func TestRefusalsAreBounded(t *testing.T) {
	c := newTable(10, 10)
	for i := range 3 * maxRefusals {
		c.Refuse(web, "a.", []Address{{Addr: addr(i)}}, Server, c.now.Add(time.Duration(i)))
	}
	got := c.Refusals("a.")
	if len(got) != maxRefusals || len(c.refusals.index) != maxRefusals || got[0].Addr != addr(3*maxRefusals-1) {
		t.Errorf("%d, %d, %v first", len(got), len(c.refusals.index), got[0])
	}
}

// BenchmarkKnownAnswer learns 8 addresses that a full table has already.
func BenchmarkKnownAnswer(b *testing.B) {
	c := newTable(16_384, 262_144)
	for i := range 16_384 {
		list := []int{16 * i, 16*i + 1, 16*i + 2, 16*i + 3, 16*i + 4, 16*i + 5, 16*i + 6, 16*i + 7}
		c.learn(web, fmt.Sprintf("n%d.example.com.", i), time.Hour, list...)
	}
	list := addrs(time.Minute, 0, 1, 2, 3, 4, 5, 6, 7)
	c.Enforced("n0.example.com.", addrs(time.Hour, 0, 1, 2, 3, 4, 5, 6, 7), c.now)
	b.ReportAllocs()
	for b.Loop() {
		if r := c.Learn(web, "n0.example.com.", nil, list, c.now); len(r.Enforce) != 0 {
			b.Fatal(r)
		}
	}
}

// BenchmarkGreedyPods starts with a full table, half of which one pod must give up.
func BenchmarkGreedyPods(b *testing.B) {
	fill := func() *clocked {
		c := newTable(16_384, 262_144)
		for i := range 262_144 {
			ttl := time.Hour + time.Duration(i%977)*time.Second
			c.learn(Asker{Endpoint: 9, Tenant: "namespace greedy"}, fmt.Sprintf("n%d.example.com.", i%16_000), ttl, i)
		}
		return c
	}
	c := fill()
	i := 0
	for b.Loop() {
		if i == 60_000 {
			b.StopTimer()
			c, i = fill(), 0
			b.StartTimer()
		}
		if r := c.learn(web, fmt.Sprintf("w%d.example.com.", i%256), time.Hour, 1<<20+i); r.Refused != 0 && i < 50_000 {
			b.Fatalf("%d: %+v", i, r)
		}
		i++
	}
}
