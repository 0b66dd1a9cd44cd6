// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
)

// address returns the address with a number.
func address(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{20, byte(n >> 16), byte(n >> 8), byte(n)})
}

// TestNamesOfOneTenantKeepOutNoneOfAnother: one tenant fills the table. When a pod of another tenant uses its
// guarantee, pods of the first tenant lose the addresses that expire first, and get errors for new ones. The other
// tenant loses nothing.
func TestNamesOfOneTenantKeepOutNoneOfAnother(t *testing.T) {
	const names, addresses = 64, 256
	c := newTable(names, addresses)
	learn := func(by Asker, what string, n int) error {
		var addrs []netip.Addr
		for i := range addresses / names {
			addrs = append(addrs, address(int(by.Endpoint)<<16+n*64+i))
		}
		c.now = c.now.Add(time.Second)
		return c.learnFor(by, fmt.Sprint(what, n, ".example"), addrs, time.Hour)
	}
	for n := range 2 * names {
		by := Asker{Endpoint: uint32(1 + n%4), Tenant: "greedy"}
		if err := learn(by, "greedy", n); (err == nil) != (n < names) {
			t.Fatalf("name %d of one tenant: %v", n, err)
		}
	}
	quiet := Asker{Endpoint: 9, Tenant: "small"}
	const share = names / 2 / 2
	for n := range share {
		if err := learn(quiet, "small", n); err != nil {
			t.Fatalf("name %d within the guarantee: %v", n, err)
		}
	}
	if err := learn(quiet, "small", share); err == nil {
		t.Error("the other tenant learned more than its guarantee, although the table is full")
	}
	if c.Len() != names || c.Addresses() != addresses {
		t.Errorf("%d names with %d addresses, want %d and %d", c.Len(), c.Addresses(), names, addresses)
	}
	for n := range names {
		a := place{fmt.Sprint("greedy", n, ".example"), address((1+n%4)<<16 + n*64)}
		if has, want := c.told[a], n >= share; has != want {
			t.Errorf("name %d of the tenant above its share is there: %t, want %t", n, has, want)
		}
		if a = (place{fmt.Sprint("small", n, ".example"), address(9<<16 + n*64)}); c.told[a] != (n < share) {
			t.Errorf("name %d of the other tenant is there: %t", n, c.told[a])
		}
	}
	// Further pods of the first tenant take capacity only from their own tenant.
	for n := range names {
		_ = learn(Asker{Endpoint: uint32(20 + n), Tenant: "greedy"}, "more", n)
	}
	for n := range share {
		if a := (place{fmt.Sprint("small", n, ".example"), address(9<<16 + n*64)}); !c.told[a] {
			t.Errorf("name %d of the other tenant was lost to further pods of the tenant above its share", n)
		}
	}
}

// TestOnePodFillsNoName: one pod fills a name with the maximum number of addresses. When a pod of another tenant
// learns addresses of the name, the first pod loses some of its addresses.
func TestOnePodFillsNoName(t *testing.T) {
	c := newTable(16, 16*maxPerName)
	learn := func(by Asker, from int) error {
		var addrs []netip.Addr
		for i := range 256 {
			addrs = append(addrs, address(from+i))
		}
		c.now = c.now.Add(time.Second)
		return c.learnFor(by, "a.", addrs, time.Hour)
	}
	noisy, other := Asker{Endpoint: 1, Tenant: "greedy"}, Asker{Endpoint: 2, Tenant: "small"}
	for i := range 8 {
		if err := learn(noisy, 256*i); (err == nil) != (i < 4) {
			t.Fatalf("answer %d to the first pod: %v", i, err)
		}
	}
	for i := range 4 {
		if err := learn(other, 1<<16+256*i); (err == nil) != (i < 2) {
			t.Fatalf("answer %d to the pod of another tenant: %v", i, err)
		}
	}
	if err := learn(Asker{Endpoint: 3, Tenant: "greedy"}, 1<<17); err != nil {
		t.Errorf("a further pod of the first tenant: %v", err)
	}
	for i := range 512 {
		if !c.told[place{"a.", address(1<<16 + i)}] {
			t.Fatalf("address %d of the other tenant was lost to the further pod", i)
		}
	}
	if n := len(c.names["a."]); n != maxPerName || n != len(c.told) {
		t.Errorf("the name has %d addresses, and the engine %d, want %d", n, len(c.told), maxPerName)
	}
}

// TestNamesOfAnEarlierRunMakeSpace: no pod pays for restored names, until an answer contains them again. They can be
// evicted first.
func TestNamesOfAnEarlierRunMakeSpace(t *testing.T) {
	c := newTable(4, 4)
	for i := range 4 {
		ttl := time.Hour + time.Duration(i)*time.Minute
		if err := c.learn(fmt.Sprint("n", i, "."), []netip.Addr{address(i)}, ttl); err != nil {
			t.Fatal(err)
		}
	}
	again := newTable(4, 4)
	again.now = c.now
	for name := range c.names {
		for _, r := range c.Record(name).Names {
			learned, _, err := again.Restore(r, c.now)
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range learned.Addrs {
				again.told[place{name, a}] = true
			}
		}
	}
	pod := Asker{Endpoint: 7, Tenant: "a"}
	if err := again.learnFor(pod, "n0.", []netip.Addr{address(0)}, time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := again.learnFor(pod, "new.", []netip.Addr{address(9)}, time.Hour); err != nil {
		t.Fatal(err)
	}
	if again.told[place{"n1.", address(1)}] || len(again.told) != 4 {
		t.Errorf("left: %v, want the name of the earlier run that ends first removed", again.told)
	}
}

// TestTheTableChargesWhatItHas makes random calls for many pods, and checks that the charges agree with the content
// of the table. Endpoint numbers may reappear in another tenant.
func TestTheTableChargesWhatItHas(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	c := newTable(20, 60)
	refused := 0
	for step := range 20_000 {
		switch r.IntN(12) {
		case 0:
			c.after(time.Duration(r.IntN(200)) * time.Second)
		case 1:
			c.drop(c.Forget(dnsname.Learned(fmt.Sprint("n", r.IntN(40), ".")), netip.Addr{}))
		case 2:
			var used []netip.Addr
			for a := range c.asked {
				if r.IntN(2) == 0 {
					used = append(used, a)
				}
			}
			c.hold(used...)
		default:
			by := Asker{Endpoint: uint32(r.IntN(8)), Tenant: fmt.Sprint("t", r.IntN(20)/10, r.IntN(3))}
			var addrs []netip.Addr
			for range 1 + r.IntN(6) {
				addrs = append(addrs, address(r.IntN(200)))
			}
			if c.learnFor(by, fmt.Sprint("n", r.IntN(40), "."), addrs, time.Duration(1+r.IntN(10))*time.Minute) != nil {
				refused++
			}
		}
		used, count := map[uint32][2]int{}, 0
		for name, addrs := range c.names {
			p := c.payers[name]
			u := used[p.name]
			u[ofNames]++
			used[p.name] = u
			for a := range addrs {
				if count++; !c.told[place{name, a}] {
					t.Fatalf("step %d: the engine does not have %s of %s", step, a, name)
				}
				u := used[p.of(a)]
				u[ofAddresses]++
				used[p.of(a)] = u
			}
			for a := range p.others {
				if _, ok := addrs[a]; !ok {
					t.Fatalf("step %d: %s of %s has a payer, but is not in the table", step, a, name)
				}
			}
		}
		if c.Len() > 20 || count > 60 || c.Addresses() != count || len(c.told) != count {
			t.Fatalf("step %d: %d names, %d addresses, counted as %d; the engine has %d",
				step, c.Len(), count, c.Addresses(), len(c.told))
		}
		tenants := map[string]int{}
		for e := range c.shares.All() {
			charged := [2]int{c.shares.Used(e, ofNames), c.shares.Used(e, ofAddresses)}
			if charged != used[e] || charged == [2]int{} && e != unpaid {
				t.Fatalf("step %d: endpoint %d is charged %v, and pays for %v", step, e, charged, used[e])
			}
			delete(used, e)
			if e != unpaid {
				tenants[c.shares.Tenant(e)]++
			}
		}
		if len(used) > 0 {
			t.Fatalf("step %d: without an account: %v", step, used)
		}
		for e := range c.shares.All() {
			want := 0
			if e != unpaid {
				want = 60 / 2 / len(tenants) / tenants[c.shares.Tenant(e)]
			}
			if got := c.shares.Guarantee(e, ofAddresses); got != want {
				t.Fatalf("step %d: endpoint %d has a guarantee of %d addresses, want %d", step, e, got, want)
			}
		}
	}
	if refused < 1000 {
		t.Errorf("only %d calls were refused", refused)
	}
}
