// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// generation returns the ruleset generation of a namespace.
func generation(t testing.TB, ns *netns.Namespace) (id uint32) {
	t.Helper()
	err := ns.Do(func() error {
		r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
		r.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
		answers, err := r.Execute(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN)
		if err != nil {
			return err
		}
		for _, a := range answers {
			attributes, err := nl.ParseRouteAttr(a[nl.SizeofNfgenmsg:])
			if err != nil {
				return err
			}
			for _, at := range attributes {
				if at.Attr.Type == unix.NFTA_GEN_ID {
					id = binary.BigEndian.Uint32(at.Value)
				}
			}
		}
		return nil
	})
	if err != nil || id == 0 {
		t.Fatalf("generation %d of the firewall: %v", id, err)
	}
	return id
}

// manyNodes returns ranges and addresses of n nodes, one of each family.
func manyNodes(n int) (ranges []netip.Prefix, nodes []netip.Addr) {
	for i := range n {
		hi, lo := byte(i>>8), byte(i)
		ranges = append(ranges,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64 + hi, lo, 0}), 24),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x40, 6: hi, 7: lo}), 64))
		nodes = append(nodes, netip.AddrFrom4([4]byte{172, 16 + hi, lo, 1}),
			netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x80, 6: hi, 7: lo, 15: 1}))
	}
	return ranges, nodes
}

// TestKernelOthersAreWrittenWhenTheyDiffer counts the transactions of SetOthers, and checks the table after each call.
func TestKernelOthersAreWrittenWhenTheyDiffer(t *testing.T) {
	w := &routingWorld{t: t}
	for _, mode := range []string{"overlay", "native"} {
		home := netnstest.New(t)
		guard := New(home, "test", []uint32{podGroup, dyingGroup}, testMarks)
		f := w.routing(mode == "native")
		guard.SetRouting(f)
		guard.SetMasquerade(Masquerade{Mark: 0x200, Own: f.Own, Except: prefixes("198.51.100.0/24")})
		if err := guard.Repair(); err != nil {
			t.Fatal(err)
		}
		first := func() (handle uint64) { // handle of a rule, which changes if the table is replaced
			err := guard.conn(func(c *nftables.Conn) error {
				rules, err := c.GetRules(guard.table(), &nftables.Chain{Name: foreignName, Table: guard.table()})
				if err == nil {
					handle = rules[0].Handle
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return handle
		}
		say := func(what string, ranges []netip.Prefix, nodes []netip.Addr, transactions uint32) {
			t.Helper()
			before, rule := generation(t, home), first()
			if err := guard.SetOthers(ranges, nodes); err != nil {
				t.Fatalf("%s, %s: %v", mode, what, err)
			}
			if n := generation(t, home) - before; n != transactions {
				t.Errorf("%s, %s: %d transactions, want %d", mode, what, n, transactions)
			}
			if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
				t.Errorf("%s, %s: %+v, %v", mode, what, diffs, err)
			}
			if guard.seen == nil {
				t.Errorf("%s, %s: the next call reads the table", mode, what)
			}
			if first() != rule {
				t.Errorf("%s, %s: the table was replaced", mode, what)
			}
		}
		ranges, nodes := manyNodes(300)
		say("what SetRouting said", f.Others, f.Nodes, 0)
		say("300 nodes", ranges, nodes, 1)
		say("the same", ranges, nodes, 0)
		shuffled := slices.Concat(ranges, ranges[:7])
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		say("the same in another order, some twice", shuffled, nodes, 0)
		say("a range inside another", append(slices.Clone(ranges), prefixes("10.64.7.128/25")...), nodes, 0)
		more, moreNodes := manyNodes(301)
		say("one node more", more, moreNodes, 1)
		say("another address", more, append(slices.Clone(moreNodes), netip.MustParseAddr("192.0.2.99")),
			map[string]uint32{"native": 1}[mode])
		say("one node less", ranges, nodes, 1)
		say("the last range of the family", append(slices.Clone(ranges), prefixes("255.255.255.0/24")...), nodes, 1)
		say("none", nil, nil, 1)
		say("none again", nil, nil, 0)
		say("300 nodes again", ranges, nodes, 1)
		other := New(home, "other", nil, testMarks)
		if err := other.Repair(); err != nil {
			t.Fatal(err)
		}
		say("the same after a transaction of others", ranges, nodes, 0)
		if err := other.Repair(); err != nil {
			t.Fatal(err)
		}
		say("an additional node", more, moreNodes, 1)
		repairedByOthers(t, guard, home)
	}
}

// repairedByOthers changes the table externally before SetOthers.
func repairedByOthers(t *testing.T, guard *Table, home *netns.Namespace) {
	t.Helper()
	ranges, nodes := manyNodes(300)
	for _, c := range []struct {
		name   string
		change func(*nftables.Conn, *nftables.Table)
	}{
		{"no table", func(c *nftables.Conn, table *nftables.Table) { c.DelTable(table) }},
		{"no rules", func(c *nftables.Conn, table *nftables.Table) {
			c.FlushChain(&nftables.Chain{Name: foreignName, Table: table})
		}},
		{"an empty set", func(c *nftables.Conn, table *nftables.Table) {
			c.FlushSet(&nftables.Set{Name: "others4", Table: table})
		}},
		{"an interval end without a start", func(c *nftables.Conn, table *nftables.Table) {
			set := &nftables.Set{Name: "own4", Table: table, Interval: true, KeyType: nftables.TypeIPAddr}
			end := []nftables.SetElement{{Key: []byte{0, 0, 0, 0}, IntervalEnd: true}}
			if err := c.SetAddElements(set, end); err != nil {
				t.Error(err)
			}
		}},
	} {
		err := guard.conn(func(cc *nftables.Conn) error {
			c.change(cc, guard.table())
			return cc.Flush()
		})
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if err := guard.SetOthers(ranges, nodes); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
			t.Errorf("%s: %+v, %v", c.name, diffs, err)
		}
	}
	before := generation(t, home)
	if err := guard.SetOthers(ranges, nodes); err != nil || generation(t, home) != before {
		t.Errorf("the same after a repair is written again, or %v", err)
	}
	f := (&routingWorld{}).routing(!guard.settings().routing.Native)
	guard.SetRouting(f) // without a transaction
	if err := guard.SetOthers(ranges, nodes); err != nil {
		t.Error(err)
	}
	if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("another mode: %+v, %v", diffs, err)
	}
}

// TestKernelJoiningNodesOpenNoWall sends continuously from a range that stays while adjacent ranges are added and
// removed.
func TestKernelJoiningNodesOpenNoWall(t *testing.T) {
	w := newRoutingWorld(t)
	w.guard.SetRouting(w.routing(false))
	if err := w.guard.Repair(); err != nil {
		t.Fatal(err)
	}
	stay := prefixes("10.2.0.0/24", "fd00:2::/64")
	many, _ := manyNodes(200)
	say := func() {
		t.Helper()
		// including both adjacent ranges, with changing combinations
		beside := prefixes("10.1.255.0/24", "10.2.1.0/24", "fd00:2:0:1::/64")
		ranges := slices.Concat(stay, beside[:rand.IntN(4)])
		for _, p := range many {
			if rand.IntN(2) == 0 {
				ranges = append(ranges, p)
			}
		}
		if err := w.guard.SetOthers(ranges, nil); err != nil {
			t.Fatal(err)
		}
	}
	say()
	var stop atomic.Bool
	var senders sync.WaitGroup
	var sent atomic.Int64
	for family := range 2 {
		c := w.from("up0", addrOf("other", family))
		to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(nodeAddrs[family]), plainPort))
		senders.Go(func() {
			for !stop.Load() {
				if _, err := c.WriteTo([]byte("forged"), to); err != nil {
					t.Error(err)
					return
				}
				sent.Add(1)
			}
		})
	}
	for range 100 {
		say()
	}
	stop.Store(true)
	senders.Wait()
	// A packet that was not dropped would arrive before these.
	for family := range 2 {
		text := w.send("up0", addrOf("world", family), family, plainPort)
		if got := w.received(plainPort); got != text {
			t.Errorf("the node received %q, want %q", got, text)
		}
	}
	// Replaced rules would have counted from 0.
	dropped := func() int64 { d := w.drops(); return int64(d["others4"] + d["others6"]) }
	servicetest.EventuallyNil(t, "all of it is counted", func() error {
		if d, s := dropped(), sent.Load(); d < s/2 {
			return fmt.Errorf("%d dropped of %d", d, s)
		}
		return nil
	})
	t.Logf("%d packets sent, %d dropped", sent.Load(), dropped())
}

// TestKernelRepairsAndJoinsDoNotUndoEachOther runs repairs and SetOthers concurrently with checks, which must report no
// difference.
func TestKernelRepairsAndJoinsDoNotUndoEachOther(t *testing.T) {
	w := &routingWorld{t: t}
	guard := New(netnstest.New(t), "test", []uint32{podGroup, dyingGroup}, testMarks)
	guard.SetRouting(w.routing(true))
	if err := guard.Repair(); err != nil {
		t.Fatal(err)
	}
	ranges, nodes := manyNodes(50)
	for i := range 50 {
		var all sync.WaitGroup
		all.Go(func() {
			if err := guard.Repair(); err != nil {
				t.Error(err)
			}
		})
		for n := range 2 {
			all.Go(func() {
				if err := guard.SetOthers(ranges[:2*i+n], nodes[:2*i+n]); err != nil {
					t.Error(err)
				}
			})
		}
		all.Go(func() {
			diffs, err := guard.Check()
			if err != nil || len(diffs) > 0 {
				t.Errorf("%+v, %v", diffs, err)
			}
		})
		all.Wait()
		if diffs, err := guard.Check(); err != nil || len(diffs) > 0 {
			t.Fatalf("after %d nodes: %+v, %v", i, diffs, err)
		}
	}
}

// BenchmarkSetOthers uses 500 nodes with two ranges and two addresses each.
func BenchmarkSetOthers(b *testing.B) {
	ranges, nodes := manyNodes(501)
	for _, mode := range []string{"overlay", "native"} {
		home := netnstest.New(b)
		guard := New(home, "test", []uint32{podGroup, dyingGroup}, testMarks)
		f := (&routingWorld{}).routing(mode == "native")
		guard.SetRouting(f)
		guard.SetMasquerade(Masquerade{Mark: 0x200, Own: f.Own})
		say := func(n int) {
			if err := guard.SetOthers(ranges[:2*n], nodes[:2*n]); err != nil {
				b.Fatal(err)
			}
		}
		say(500)
		b.Run(mode+"/nothing changed", func(b *testing.B) {
			for b.Loop() {
				say(500)
			}
		})
		b.Run(mode+"/one joins or leaves", func(b *testing.B) {
			for n := 500; b.Loop(); n ^= 1 {
				say(n)
			}
		})
		b.Run(mode+"/one joins or leaves after a transaction of others", func(b *testing.B) {
			other := New(home, "other", nil, testMarks)
			for n := 500; b.Loop(); n ^= 1 {
				b.StopTimer()
				if err := other.Repair(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				say(n)
			}
		})
		b.Run(mode+"/repair", func(b *testing.B) {
			for b.Loop() {
				if err := guard.Repair(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
