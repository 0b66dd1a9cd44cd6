// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
)

// recorder is a Publisher that checks the order of what it receives.
type recorder struct {
	t      *testing.T
	items  map[Key]Item
	loaded bool
}

func (r *recorder) Upsert(k Key, i Item) uint64 {
	if i.On != "" && k.Node == "" {
		if _, ok := r.items[Key{Node: i.On}]; !ok {
			r.t.Errorf("%v is on %s, which was not published", k.Prefix, i.On)
		}
	}
	r.items[k] = i
	return 0
}

func (r *recorder) Delete(k Key) bool {
	if _, ok := r.items[k]; !ok {
		r.t.Errorf("%v goes and was not there", k)
	}
	delete(r.items, k)
	for other, i := range r.items {
		if k.Node != "" && i.On == k.Node {
			r.t.Errorf("%s goes before %v, which is on it", k.Node, other)
		}
	}
	return true
}

func (r *recorder) Get(k Key) (Item, bool) {
	i, ok := r.items[k]
	return i, ok
}

func (r *recorder) Keys() []Key { return slices.Collect(maps.Keys(r.items)) }

func (r *recorder) Reach(uint64, int64) {}
func (r *recorder) Loaded()             { r.loaded = true }

func newRegistry(t *testing.T, holdLosses time.Duration) (*Registry, *recorder) {
	r := &recorder{t: t, items: map[Key]Item{}}
	return New(Config{
		Node: "own", Incarnation: "i", HoldLosses: holdLosses, RetryMin: time.Second,
		RetryMax: time.Second, Log: log.Discard(),
	}, nil, memory{}, r, Registration{Underlay: &Underlay{}}), r
}

// keys is the content of a store.
type keys struct {
	nodes     map[string]NodeKey
	claims    map[Removal]ClaimKey // claims by node and slot
	addresses map[Removal]AddressesKey
	disjoint  bool // each node has its own ranges
}

func (s keys) listing() Update {
	return Update{
		Complete: true, Nodes: slices.Collect(maps.Values(s.nodes)), Claims: slices.Collect(maps.Values(s.claims)),
		Addresses: slices.Collect(maps.Values(s.addresses)),
	}
}

// random draws from few names, ranges and addresses, so that they collide.
func random(rng *rand.Rand, revision int64, s keys) (u Update) {
	nodes := []string{"own", "a", "b", "c", "d", "e"}
	ranges := []string{
		"10.0.0.0/16", "10.0.0.0/24", "10.0.1.0/24", "10.0.1.128/25", "fd00::/64", "fd00::/48",
		"fd00:0:0:1::/64",
	}
	addresses := []string{
		"10.0.0.1", "10.0.0.5", "10.0.1.5", "10.0.1.200", "192.0.2.1", "192.0.2.2", "fd00::5",
		"fd00:0:0:1::5",
	}
	some := func(from []string) (out []string) {
		for range rng.IntN(3) {
			out = append(out, from[rng.IntN(len(from))])
		}
		slices.Sort(out)
		return slices.Compact(out)
	}
	addrs := func() (out []netip.Addr) {
		for _, a := range some(addresses) {
			out = append(out, netip.MustParseAddr(a))
		}
		return out
	}
	for range 1 + rng.IntN(4) {
		revision++
		name := nodes[rng.IntN(len(nodes))]
		endpoint := Removal{Node: name, Endpoint: fmt.Sprint(rng.IntN(4))}
		incarnation := fmt.Sprint(rng.IntN(2))
		switch rng.IntN(6) {
		case 0:
			k, ok := s.nodes[name]
			if !ok {
				k.Created = revision
			}
			k.Name = name
			k.Record = Record{Incarnation: incarnation, Underlay: Underlay{Addresses: addrs(), Overlay: addrs()}}
			if s.disjoint {
				i := slices.Index(nodes, name)
				ranges = []string{fmt.Sprintf("10.0.%d.0/24", i), fmt.Sprintf("fd00:0:0:%d::/64", i)}
			}
			k.Revision = revision
			s.nodes[name] = k
			u.Nodes = append(u.Nodes, k)
			for i, p := range some(ranges) {
				p := netip.MustParsePrefix(p)
				c := ClaimKey{Node: name, Slot: Slot{p.Addr().Is6(), i}, Claim: Claim{Range: p}, Revision: revision}
				at := Removal{Node: name, Slot: c.Slot.String()}
				if was, ok := s.claims[at]; ok && was.Claim.Range == p {
					continue // its node does not write it again
				}
				s.claims[at] = c
				u.Claims = append(u.Claims, c)
			}
		case 1:
			if slot := (Slot{rng.IntN(2) == 0, rng.IntN(3)}).String(); rng.IntN(2) == 0 {
				at := Removal{Node: name, Slot: slot}
				delete(s.claims, at)
				at.Revision = revision
				u.Removed = append(u.Removed, at)
				break
			}
			delete(s.nodes, name)
			u.Removed = append(u.Removed, Removal{Node: name, Revision: revision})
		case 2:
			delete(s.addresses, endpoint)
			u.Removed = append(u.Removed, Removal{Node: name, Endpoint: endpoint.Endpoint, Revision: revision})
		default:
			k := AddressesKey{
				Node: name, Endpoint: endpoint.Endpoint, Revision: revision,
				Value: Addresses{
					Addresses: addrs(), Identity: identity.MinCluster + identity.Numeric(rng.IntN(3)),
					Incarnation: incarnation,
				},
			}
			s.addresses[endpoint] = k
			u.Addresses = append(u.Addresses, k)
		}
	}
	u.Revision = revision
	return u
}

// TestViewDependsOnTheStoreAlone: which ranges and mappings are valid depends on the content of the store, and not on
// the order of its changes.
func TestViewDependsOnTheStoreAlone(t *testing.T) {
	steps := 0
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		r, got := newRegistry(t, time.Hour)
		r.Observe(Update{Complete: true})
		store := keys{
			nodes: map[string]NodeKey{}, claims: map[Removal]ClaimKey{}, addresses: map[Removal]AddressesKey{},
			disjoint: seed%2 == 0,
		}
		for step := range 60 {
			before := keys{
				maps.Clone(store.nodes), maps.Clone(store.claims), maps.Clone(store.addresses), store.disjoint,
			}
			u := random(rng, int64(10*step), store)
			if len(u.Nodes)+len(u.Claims)+len(u.Addresses)+len(u.Removed) == 0 || clash(u) {
				store = before
				continue
			}
			if rng.IntN(8) == 0 {
				api := netip.MustParseAddr([]string{"192.0.2.1", "192.0.2.9", "10.0.0.5"}[rng.IntN(3)])
				r.SetAPIServers(map[netip.Addr]identity.Numeric{api: identity.MinNodeLocal})
			}
			steps++
			r.Observe(u)
			fresh, want := newRegistry(t, time.Hour)
			fresh.SetAPIServers(r.view.apiServers)
			fresh.Observe(store.listing())
			if !maps.EqualFunc(got.items, want.items, Item.Equal) {
				t.Fatalf("seed %d, step %d, after %+v:\nhave %v\nwant %v", seed, step, u, got.items, want.items)
			}
			if a, b := r.Status(), fresh.Status(); a.Nodes != b.Nodes || a.Mappings != b.Mappings ||
				a.Refused != b.Refused {
				t.Fatalf("seed %d, step %d: status %+v, want %+v", seed, step, a, b)
			}
		}
	}
	if steps < 2000 {
		t.Errorf("only %d steps were compared", steps)
	}
}

// clash reports whether an update has a key twice, or as removed and written.
func clash(u Update) bool {
	seen := map[Removal]bool{}
	twice := false
	see := func(r Removal) {
		r.Revision = 0
		twice = twice || seen[r]
		seen[r] = true
	}
	for _, n := range u.Nodes {
		see(Removal{Node: n.Name})
	}
	for _, a := range u.Addresses {
		see(Removal{Node: a.Node, Endpoint: a.Endpoint})
	}
	for _, c := range u.Claims {
		see(Removal{Node: c.Node, Slot: c.Slot.String()})
	}
	for _, r := range u.Removed {
		see(r)
	}
	return twice
}

func node(name string, created int64, ranges ...string) NodeKey {
	k := NodeKey{Name: name, Created: created, Record: Record{Incarnation: "i"}}
	for _, p := range ranges {
		k.Record.Ranges = append(k.Record.Ranges, netip.MustParsePrefix(p))
	}
	return k
}

func at(node string, n int, a string) AddressesKey {
	return AddressesKey{
		Node: node, Endpoint: fmt.Sprint(n),
		Value: Addresses{Addresses: []netip.Addr{netip.MustParseAddr(a)}, Identity: 300, Incarnation: "i"},
	}
}

func (r *recorder) has(a string) bool {
	_, ok := r.items[mappingKey(netip.MustParseAddr(a))]
	return ok
}

// TestListingThatLosesHalfIsHeld: a listing that lacks more than half of the known entries takes effect only after a
// delay.
func TestListingThatLosesHalfIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, got := newRegistry(t, time.Minute)
		all := Update{Complete: true, Nodes: []NodeKey{node("a", 1, "10.0.1.0/24"), node("b", 2, "10.0.2.0/24")}}
		for i := range 4 {
			all.Addresses = append(all.Addresses, at("a", i, fmt.Sprint("10.0.1.", i+2)),
				at("b", i, fmt.Sprint("10.0.2.", i+2)))
		}
		r.Observe(all)
		ctx := t.Context()
		go r.Run(ctx, func() (bool, <-chan struct{}) { return false, nil }) //nolint:errcheck // nil
		check := func(when string, n int, there, gone string) {
			t.Helper()
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(got.items) != n || !got.has(there) || got.has(gone) {
				t.Errorf("%s: %v", when, got.items)
			}
		}
		// One of nine addresses less is no loss.
		r.Observe(Update{Complete: true, Nodes: all.Nodes, Addresses: all.Addresses[1:]})
		check("after a small loss", 2+7, "10.0.1.3", "10.0.1.2")
		r.Observe(Update{Complete: true, Nodes: all.Nodes[:1], Addresses: all.Addresses[6:7]})
		check("after a large loss", 2+7, "10.0.1.3", "10.0.1.2")
		// Changes in that time take effect.
		r.Observe(Update{Addresses: []AddressesKey{at("a", 9, "10.0.1.9")}})
		r.Observe(Update{Removed: []Removal{{Node: "a", Endpoint: "3"}}})
		check("with changes in the time of a loss", 2+7, "10.0.1.9", "10.0.1.5")
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		check("after the time", 1+1, "10.0.1.9", "10.0.1.3")
	})
}

// TestAddressesThatALossConcernsAreKnownWhileTheyAreInEffect: while a loss is held back, packets still have the former
// identities. Find must return these identities, and not that the addresses are outside of the cluster.
func TestAddressesThatALossConcernsAreKnownWhileTheyAreInEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Minute)
		r.Observe(Update{
			Complete: true, Nodes: []NodeKey{node("a", 1, "10.0.1.0/24"), node("b", 2, "10.0.2.0/24")},
			Addresses: []AddressesKey{at("a", 1, "10.0.1.2"), at("b", 1, "10.0.2.2"), at("b", 2, "10.0.2.3")},
		})
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return false, nil }) //nolint:errcheck // nil
		check := func(when, address, want string) {
			t.Helper()
			f, err := r.Find(netip.MustParseAddr(address))
			got := fmt.Sprint(f.Mapping.Node, " ", f.Mapping.Identity, " ", f.RangeNode)
			if err != nil {
				got = "unknown"
			}
			if got != want {
				t.Errorf("%s: %s: %q (%v), want %q", when, address, got, err, want)
			}
		}
		listed := func(when, node string, status int, want ...string) {
			t.Helper()
			var got []string
			if err := r.EachMapping(node, func(all []Mapping) error {
				for _, m := range all {
					got = append(got, fmt.Sprint(m.Node, " ", m.Address, " ", m.Identity))
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			for _, n := range r.Nodes() {
				if node == "" || n.Node.Name == node {
					got = append(got, fmt.Sprint(n.Node.Name, " ", n.Node.Record.Ranges, " ", n.Mappings))
				}
			}
			if s := r.Status(); !slices.Equal(got, want) || s.Nodes != status {
				t.Errorf("%s, of %q: %q and %d nodes, want %q and %d", when, node, got, s.Nodes, want, status)
			}
		}
		r.Observe(Update{Complete: true})
		listed("held", "", 2, "a 10.0.1.2 300", "b 10.0.2.2 300", "b 10.0.2.3 300",
			"a [10.0.1.0/24] 1", "b [10.0.2.0/24] 2")
		listed("held", "a", 2, "a 10.0.1.2 300", "a [10.0.1.0/24] 1")
		check("held", "10.0.2.3", "b 300 b")
		check("held", "10.0.1.2", "a 300 a")
		check("held, no endpoint", "10.0.2.200", " 0 b")
		check("held, no node", "10.0.3.1", "unknown")
		r.Observe(Update{Nodes: []NodeKey{node("a", 3, "10.0.1.0/24")}, Addresses: []AddressesKey{at("a", 1, "10.0.1.7")}})
		check("written anew", "10.0.1.7", "a 300 a")
		check("not written anew", "10.0.1.2", "a 300 a")
		listed("one node anew", "", 2, "a 10.0.1.2 300", "a 10.0.1.7 300", "b 10.0.2.2 300", "b 10.0.2.3 300",
			"a [10.0.1.0/24] 2", "b [10.0.2.0/24] 2")
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		check("after the time", "10.0.2.3", "unknown")
		check("after the time", "10.0.1.2", " 0 a")
		listed("after the time", "", 1, "a 10.0.1.7 300", "a [10.0.1.0/24] 1")
	})
}

// TestMappingsThatCountAreListed: the valid mappings of endpoints are listed node by node, including this node's.
// Mappings of hosts and refused mappings are omitted.
func TestMappingsThatCountAreListed(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	a := node("a", 1, "10.0.1.0/24")
	a.Record.Underlay.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	old := at("a", 7, "10.0.1.7")
	old.Value.Incarnation = "before"
	r.Observe(Update{
		Complete: true, Nodes: []NodeKey{node("own", 2, "10.0.2.0/24"), a, node("empty", 3, "10.0.3.0/24")},
		Addresses: []AddressesKey{
			at("own", 1, "10.0.2.9"), at("own", 2, "10.0.2.10"), at("a", 1, "10.0.1.5"), at("a", 2, "10.0.2.5"), old,
			at("unregistered", 1, "10.0.4.5"),
		},
	})
	list := func(node string) (got []string) {
		if err := r.EachMapping(node, func(all []Mapping) error {
			for _, m := range all {
				got = append(got, fmt.Sprint(m.Node, " ", m.Address, " ", m.Identity))
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		return got
	}
	for node, want := range map[string][]string{
		"":       {"a 10.0.1.5 300", "own 10.0.2.9 300", "own 10.0.2.10 300"},
		"own":    {"own 10.0.2.9 300", "own 10.0.2.10 300"},
		"a":      {"a 10.0.1.5 300"},
		"empty":  nil,
		"absent": nil,
	} {
		if got := list(node); !slices.Equal(got, want) {
			t.Errorf("of %q: %q, want %q", node, got, want)
		}
	}
	full := errors.New("full")
	if err := r.EachMapping("", func([]Mapping) error { return full }); !errors.Is(err, full) {
		t.Errorf("a reader that ends: %v", err)
	}
}

func TestAddressOfANodeIsNoPodOfAnother(t *testing.T) {
	r, got := newRegistry(t, time.Hour)
	good, liar := node("good", 1, "10.0.1.0/24"), node("liar", 2, "10.0.2.0/24")
	good.Record.Underlay = Underlay{
		Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Overlay:   []netip.Addr{netip.MustParseAddr("10.0.1.1")},
	}
	// Its record has a pod, the other node and an address outside of its ranges.
	liar.Record.Underlay = Underlay{
		Addresses: []netip.Addr{
			netip.MustParseAddr("10.0.1.5"), netip.MustParseAddr("192.0.2.1"),
			netip.MustParseAddr("10.0.2.7"),
		},
		Overlay: []netip.Addr{netip.MustParseAddr("10.0.1.6"), netip.MustParseAddr("203.0.113.1")},
	}
	r.Observe(Update{
		Complete: true, Nodes: []NodeKey{good, liar},
		Addresses: []AddressesKey{at("good", 1, "10.0.1.5"), at("good", 2, "10.0.1.6")},
	})
	for a, want := range map[string]Item{
		"10.0.1.5": {On: "good", Identity: 300}, "10.0.1.6": {On: "good", Identity: 300},
		"10.0.1.1":  {On: "good", Identity: identity.RemoteNode},
		"192.0.2.1": {On: "good", Identity: identity.RemoteNode},
		"10.0.2.7":  {}, "203.0.113.1": {},
	} {
		if got := got.items[mappingKey(netip.MustParseAddr(a))]; !got.Equal(want) {
			t.Errorf("%s is %+v, want %+v", a, got, want)
		}
	}
}

// TestAddressOfTwoNodesIsOfTheFirst: two nodes register one address, with any names and in any order. The address stays
// with the first node, and moves to the other once the first is forgotten. No other node gets an address of this node.
func TestAddressOfTwoNodesIsOfTheFirst(t *testing.T) {
	shared, alone := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	own := netip.MustParseAddr("192.0.2.9")
	good, liar := node("good", 1, "10.0.1.0/24"), node("a-liar", 2, "10.0.2.0/24")
	good.Record.Underlay = Underlay{Addresses: []netip.Addr{shared}}
	liar.Record.Underlay = Underlay{Addresses: []netip.Addr{own, shared, alone}}
	for _, order := range [][]NodeKey{{good, liar}, {liar, good}} {
		r, got := newRegistry(t, time.Hour)
		r.view.setOwn(&Underlay{Addresses: []netip.Addr{own}})
		has := func(what, name string, want ...netip.Addr) {
			t.Helper()
			var addresses []netip.Addr
			if n := got.items[Key{Node: name}].Node; n != nil {
				addresses = n.Record.Underlay.Addresses
			}
			if !slices.Equal(addresses, want) {
				t.Errorf("%s: node %s is at %v, want %v", what, name, addresses, want)
			}
		}
		r.Observe(Update{Complete: true, Nodes: order[:1]})
		r.Observe(Update{Nodes: order[1:]})
		has("both", "good", shared)
		has("both", "a-liar", alone)
		s := r.Status()
		var named []string
		for _, o := range s.Overlaps {
			named = append(named, o.Node+" "+o.Range.String()+": "+o.Reason)
		}
		want := []string{
			"a-liar 192.0.2.9/32: it is an address of this node",
			"a-liar 192.0.2.1/32: node good registered the address before; if that node is gone, run `sluice node forget good`",
		}
		if !slices.Equal(named, want) {
			t.Errorf("the status names %q, want %q", named, want)
		}
		r.Observe(Update{Removed: []Removal{{Node: "good"}}})
		has("without the first", "a-liar", shared, alone)
	}
}

// TestMappingOfAnotherIncarnationDoesNotCount (INV-80): a mapping of another incarnation of a node is refused, even if
// it was written last.
func TestMappingOfAnotherIncarnationDoesNotCount(t *testing.T) {
	said := func(n int, incarnation string, id identity.Numeric, revision int64) AddressesKey {
		k := at("a", n, "10.0.1.5")
		k.Value.Incarnation, k.Value.Identity, k.Revision = incarnation, id, revision
		return k
	}
	now, again := node("a", 1, "10.0.1.0/24"), node("a", 1, "10.0.1.0/24")
	again.Record.Incarnation = "next"
	r, got := newRegistry(t, time.Hour)
	for _, step := range []struct {
		what string
		u    Update
		want identity.Numeric // 0: no node has the address
	}{
		{"of another incarnation alone", Update{
			Complete: true, Nodes: []NodeKey{now}, Addresses: []AddressesKey{said(1, "before", 300, 10)},
		}, 0},
		{"of this one next to it", Update{Addresses: []AddressesKey{said(2, "i", 301, 9)}}, 301},
		{"of another one that was written later", Update{Addresses: []AddressesKey{said(1, "next", 302, 11)}}, 301},
		{"of the one that the node has become", Update{Nodes: []NodeKey{again}}, 302},
		{"of none", Update{Removed: []Removal{{Node: "a", Endpoint: "1"}}}, 0},
	} {
		r.Observe(step.u)
		if item := got.items[mappingKey(netip.MustParseAddr("10.0.1.5"))]; item.Identity != step.want {
			t.Errorf("%s: %+v, want identity %d", step.what, item, step.want)
		}
	}
}

// TestNodeThatComesBackHasNoLabelsOfBefore (INV-106): a node that was forgotten and registers with other labels has no
// identity until the labels have a number. In particular, it does not get its former identity.
func TestNodeThatComesBackHasNoLabelsOfBefore(t *testing.T) {
	labelled := func(zone string) NodeKey {
		k := node("a", 1, "10.0.1.0/24")
		k.Record.Labels = map[string]string{"zone": zone}
		k.Record.Underlay.Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
		return k
	}
	r, got := newRegistry(t, time.Hour)
	r.view.numbers = true
	number := func(zone string, id identity.Numeric) {
		r.SetNodeSets(map[NodeSet]Numbered{{Node: "a"}: {Labels: map[string]string{"zone": zone}, Number: id}})
	}
	const first, second = identity.MinNodeLocal, identity.MinNodeLocal + 1
	is := func(when string, want identity.Numeric) {
		t.Helper()
		if item := got.items[mappingKey(netip.MustParseAddr("192.0.2.1"))]; item.Identity != want {
			t.Errorf("%s: %+v, want identity %#x", when, item, uint32(want))
		}
	}
	r.Observe(Update{Complete: true, Nodes: []NodeKey{labelled("east")}})
	is("before the labels have a number", 0)
	number("east", first)
	is("with one", first)
	r.Observe(Update{Removed: []Removal{{Node: "a"}}})
	is("when the node was forgotten", 0)
	r.Observe(Update{Nodes: []NodeKey{labelled("west")}})
	is("when it is back with other labels", 0)
	number("west", second)
	is("when those have a number", second)
}

func TestAPIServersAreNamedWhereTheyRun(t *testing.T) {
	const local = identity.MinNodeLocal
	here, there, outside := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"),
		netip.MustParseAddr("192.0.2.3")
	told := &recorder{t: t, items: map[Key]Item{}}
	r := New(Config{Node: "own", Incarnation: "i", Log: log.Discard()}, nil, memory{}, told, Registration{})
	servers := map[netip.Addr]identity.Numeric{here: local, there: local, outside: local}
	r.SetAPIServers(servers)
	check := func(when string, want map[netip.Addr]Item) {
		t.Helper()
		for a := range servers {
			got, ok := told.items[mappingKey(a)]
			if w, wanted := want[a]; ok != wanted || !got.Equal(w) {
				t.Errorf("%s: %s is %+v (%t), want %+v (%t)", when, a, got, ok, w, wanted)
			}
		}
	}
	isHere := func(when string, want bool) {
		t.Helper()
		if got, _ := r.APIServerHere(); got != want {
			t.Errorf("%s: an API server has an address of this node: %t, want %t", when, got, want)
		}
	}
	check("before the nodes are known", nil)
	isHere("before this node is known", false)

	other := node("other", 1, "10.0.2.0/24")
	other.Record.Underlay = Underlay{Addresses: []netip.Addr{there}}
	r.Observe(Update{Complete: true, Nodes: []NodeKey{other}})
	onNode := Item{On: "other", Identity: identity.KubeAPIServer}
	check("before this node is known", map[netip.Addr]Item{there: onNode})

	_, changed := r.APIServerHere()
	said := Registration{Underlay: &Underlay{Addresses: []netip.Addr{here}}}
	if _, _, err := r.Register(t.Context(), said, false); err != nil {
		t.Fatal(err)
	}
	all := map[netip.Addr]Item{there: onNode, outside: {Identity: local}}
	check("with all nodes known", all)
	isHere("with all nodes known", true)
	select {
	case <-changed:
	default:
		t.Error("the readers of APIServerHere were not told")
	}
	// The registration of before is known without the store.
	told2 := &recorder{t: t, items: map[Key]Item{}}
	again := New(Config{Node: "own", Log: log.Discard()}, nil, memory{}, told2, r.registration)
	again.SetAPIServers(servers)
	if len(told2.items) > 0 {
		t.Errorf("before the other nodes are known: %v", told2.items)
	}
	if ok, _ := again.APIServerHere(); !ok {
		t.Error("after a restart no API server has an address of this node")
	}

	r.Observe(Update{Removed: []Removal{{Node: "other"}}})
	check("with the other node forgotten", map[netip.Addr]Item{there: {Identity: local}, outside: {Identity: local}})
	other.Record.Underlay.Addresses = nil
	other.Record.Ranges = []netip.Prefix{netip.MustParsePrefix("192.0.2.3/32")}
	r.Observe(Update{Nodes: []NodeKey{other}})
	check("inside the range of another node", map[netip.Addr]Item{there: {Identity: local}})
	r.SetAPIServers(nil)
	check("without API servers", nil)
	isHere("without API servers", false)
}

// memory implements Records and stores nothing.
type memory struct{}

func (memory) SaveRegistration(Registration) error { return nil }

func (memory) SavePins([]Pin) error { return nil }

// TestRecordThatIsForgottenBeforeItsWriteReturnsIsWrittenAgain: the watch may report the deletion of the record before
// the answer to the write arrives.
func TestRecordThatIsForgottenBeforeItsWriteReturnsIsWrittenAgain(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	r.Observe(Update{Complete: true, Revision: 4})
	answer := func(revision int64) (again bool) {
		r.mu.Lock()
		r.revision = revision
		r.mu.Unlock()
		r.batch()
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.revision == 0
	}
	if answer(5) {
		t.Error("a record that nothing has removed is written again")
	}
	for _, loss := range []Update{
		{Revision: 7, Removed: []Removal{{Node: "own", Revision: 7}}},
		{Revision: 9, Complete: true},
	} {
		r.mu.Lock()
		r.revision = 0
		r.mu.Unlock()
		r.Observe(loss)
		if !answer(loss.Revision - 1) {
			t.Errorf("a record that was gone at revision %d, when its write was answered, is not written again",
				loss.Revision)
		}
		if answer(loss.Revision + 1) {
			t.Errorf("a record that was written after the loss at revision %d is written again", loss.Revision)
		}
	}
	// After a restore, revisions begin again.
	r.Observe(Update{Revision: 2, Complete: true})
	if answer(3) {
		t.Error("the loss in an earlier history is taken for one of today")
	}
}

// TestEndpointsThatComeTogetherShareATransaction: the first endpoint waits briefly for others, and the registration of
// the node does not wait.
func TestEndpointsThatComeTogetherShareATransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		store := &writes{}
		r.store, r.cfg.Timeout, r.cfg.Pause, r.cfg.Gather = store, time.Second, 20*time.Millisecond, 10*time.Millisecond
		r.registration = Registration{Underlay: &Underlay{}, Ranges: &[]netip.Prefix{}}
		r.Observe(Update{Complete: true, Revision: 4})
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return true, nil }) //nolint:errcheck // nil
		synctest.Wait()
		if !r.Status().Registered {
			t.Error("the registration waits")
		}
		set := func(endpoint string, last byte) {
			r.Set(endpoint, []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 1, last})}, 300)
		}
		after := func(d time.Duration, want ...string) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			slices.Sort(store.published)
			if !slices.Equal(store.published, want) {
				t.Errorf("the store was given %q, want %q", store.published, want)
			}
		}
		set("0", 5)
		after(9 * time.Millisecond)
		set("1", 6)
		after(time.Millisecond, "0", "1")
		if store.transactions != 1 {
			t.Errorf("%d transactions, want 1", store.transactions)
		}
		after(time.Second, "0", "1")
		r.Remove("0")
		after(10*time.Millisecond, "0", "0", "1")
	})
}

// writes is a Store that counts the endpoints that are written to it.
type writes struct {
	Store
	published    []string
	transactions int
}

func (w *writes) Register(context.Context, Statement) (Written, error) {
	return Written{Revision: 5}, nil
}

func (w *writes) Publish(_ context.Context, _ int64, changes []Change) (int64, error) {
	w.transactions++
	for _, c := range changes {
		w.published = append(w.published, c.Endpoint)
	}
	return 6, nil
}

// TestOnlyWhatAListingLacksIsWritten: before the first listing, a node does not know which keys the store has. After
// it, the node writes only the difference.
func TestOnlyWhatAListingLacksIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		store := &writes{}
		r.store, r.cfg.Timeout = store, time.Second
		r.registration = Registration{Underlay: &Underlay{}, Ranges: &[]netip.Prefix{}}
		r.Set("0", []netip.Addr{netip.MustParseAddr("10.0.1.5")}, 300)
		r.Set("1", []netip.Addr{netip.MustParseAddr("10.0.1.6")}, 300)
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return true, nil }) //nolint:errcheck // nil
		synctest.Wait()
		if len(store.published) != 0 {
			t.Errorf("before a listing the node writes %q", store.published)
		}
		r.Observe(Update{
			Complete: true, Revision: 6, Nodes: []NodeKey{node("own", 1)},
			Addresses: []AddressesKey{at("own", 0, "10.0.1.5")},
		})
		synctest.Wait()
		if want := []string{"1"}; !slices.Equal(store.published, want) {
			t.Errorf("the listing lacks %q, and the node writes %q", want, store.published)
		}
	})
}

// TestAwaitedEndpointIsWrittenAtOnce: an endpoint whose caller waits is not batched. The caller returns once the
// endpoint is written, or if it cannot be written.
func TestAwaitedEndpointIsWrittenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		r.cfg.Gather, r.cfg.Timeout, r.cfg.Pause = time.Hour, time.Second, time.Millisecond
		store := &writes{}
		r.store = store
		r.registration = Registration{Underlay: &Underlay{}, Ranges: &[]netip.Prefix{}}
		up, changed := true, make(chan struct{}, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go r.Run(ctx, func() (bool, <-chan struct{}) { return up, changed }) //nolint:errcheck // nil
		r.Observe(Update{Complete: true, Revision: 6, Nodes: []NodeKey{node("own", 1)}})
		synctest.Wait()
		await := func(endpoint string, want bool, took time.Duration) {
			t.Helper()
			limited, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			began := time.Now()
			if got := r.Await(limited, endpoint); got != want || time.Since(began) > took {
				t.Errorf("Await(%s) is %v after %v, want %v within %v", endpoint, got, time.Since(began), want, took)
			}
		}
		await("unknown", true, 0)
		r.Set("0", []netip.Addr{netip.MustParseAddr("10.0.1.5")}, 300)
		synctest.Wait()
		if len(store.published) != 0 {
			t.Errorf("before anybody waits, %q is written", store.published)
		}
		await("0", true, 10*time.Millisecond)
		await("0", true, 0)
		time.Sleep(time.Second) // beyond the pause
		up = false
		changed <- struct{}{}
		synctest.Wait()
		r.Set("1", []netip.Addr{netip.MustParseAddr("10.0.1.6")}, 300)
		await("1", false, 0)
	})
}
