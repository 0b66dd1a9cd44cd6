// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
)

// order is an ipcache and a router that check at every moment that the router knows each node ID in the ipcache.
type order struct {
	t       *testing.T
	joined  map[uint16]Member
	holders map[netip.Prefix]uint16
	remotes map[netip.Prefix]uint16
	rounds  int // calls of Complete
}

func (o *order) check() {
	for p, number := range o.remotes {
		if _, ok := o.joined[number]; !ok {
			o.t.Errorf("%v is published with number %d, which the router does not know", p, number)
		}
	}
}

func (o *order) SetRemote(p netip.Prefix, r ipcache.Remote) error {
	o.remotes[p] = r.Node
	if !p.IsSingleIP() && o.holders[p] != r.Node {
		o.t.Errorf("range %v of number %d, the router has %d", p, r.Node, o.holders[p])
	}
	o.check()
	return nil
}

func (o *order) RemoveRemote(p netip.Prefix) error {
	delete(o.remotes, p)
	return nil
}

func (o *order) Renumber(from, to uint16) error {
	for p, number := range o.remotes {
		if number == from {
			o.remotes[p] = to
		}
	}
	o.check()
	return nil
}

func (o *order) Doubt(map[uint16]struct{}) error { return nil }

func (o *order) Keep(keep func(netip.Prefix) bool) error {
	maps.DeleteFunc(o.remotes, func(p netip.Prefix, _ uint16) bool { return !keep(p) })
	return nil
}

func (o *order) InUse(number uint16) bool {
	return slices.Contains(slices.Collect(maps.Values(o.remotes)), number)
}

func (o *order) Join(members []Member) {
	for _, m := range members {
		o.joined[m.Number] = m
	}
}

func (o *order) Hold(holders map[netip.Prefix]uint16) {
	maps.Copy(o.holders, holders)
	maps.DeleteFunc(o.holders, func(_ netip.Prefix, number uint16) bool { return number == 0 })
}

func (o *order) Leave(numbers []uint16) {
	for _, number := range numbers {
		delete(o.joined, number)
	}
	o.check()
}

func (o *order) Complete() { o.rounds++ }

// TestRouterHasEachNodeBeforeAndAsLongAsItIsPublished proves INV-94 through all changes of a node.
func TestRouterHasEachNodeBeforeAndAsLongAsItIsPublished(t *testing.T) {
	o := &order{
		t: t, joined: map[uint16]Member{}, holders: map[netip.Prefix]uint16{}, remotes: map[netip.Prefix]uint16{},
	}
	f := NewFollower(FollowerOptions{Entries: o, Numbers: OpenNumbers(NumbersOptions{InUse: o.InUse}), Router: o, Log: log.Discard()})
	node := func(incarnation, address string, ranges ...string) Item {
		n := &Node{Incarnation: incarnation, Addresses: []netip.Addr{netip.MustParseAddr(address)}}
		for _, r := range ranges {
			n.Ranges = append(n.Ranges, netip.MustParsePrefix(r))
		}
		return Item{Node: n}
	}
	pod := Key{Prefix: netip.MustParsePrefix("10.2.0.9/32")}
	two, three := Key{Node: "two"}, Key{Node: "three"}
	type changes = watch.Changes[Key, Item]
	for i, step := range []struct {
		changes
		want string // node ID, address and range of the nodes
	}{
		{changes{Upserts: map[Key]Item{two: node("a", "192.0.2.2", "10.2.0.0/24")}}, "1@192.0.2.2[10.2.0.0/24]"},
		{changes{Upserts: map[Key]Item{pod: {On: "two", Identity: identity.MinCluster}}}, "1@192.0.2.2[10.2.0.0/24]"},
		{changes{Upserts: map[Key]Item{two: node("a", "192.0.2.22", "10.2.0.0/24")}}, "2@192.0.2.22[10.2.0.0/24]"},
		{changes{Upserts: map[Key]Item{two: node("b", "192.0.2.22", "10.2.0.0/24")}}, "3@192.0.2.22[10.2.0.0/24]"},
		{
			changes{Upserts: map[Key]Item{three: node("a", "192.0.2.3", "10.2.0.0/24"), two: node("b", "192.0.2.22")}},
			"3@192.0.2.22[] 4@192.0.2.3[10.2.0.0/24]",
		},
		{changes{Deletes: map[Key]struct{}{two: {}, pod: {}}}, "4@192.0.2.3[10.2.0.0/24]"},
		{changes{Deletes: map[Key]struct{}{three: {}}}, ""},
	} {
		if err := f.Apply(t.Context(), step.changes); err != nil {
			t.Fatal(err)
		}
		if got := o.String(); got != step.want {
			t.Errorf("step %d: nodes %q, want %q", i, got, step.want)
		}
	}
	again := map[Key]Item{two: node("c", "192.0.2.2", "10.2.0.0/24")}
	if err := f.Apply(t.Context(), changes{Upserts: again}); err != nil {
		t.Fatal(err)
	}
	if err := f.Complete(t.Context(), map[Key]struct{}{}); err != nil || o.String() != "" || o.rounds != 1 {
		t.Errorf("%v; nodes %q after a listing without any, complete %d times", err, o, o.rounds)
	}
}

// follow creates a follower of an ipcache and router that check their order.
func follow(t *testing.T, options ...func(*FollowerOptions)) (*Follower, *order) {
	o := &order{
		t: t, joined: map[uint16]Member{}, holders: map[netip.Prefix]uint16{}, remotes: map[netip.Prefix]uint16{},
	}
	opts := FollowerOptions{
		Entries: o, Numbers: OpenNumbers(NumbersOptions{InUse: o.InUse}), Router: o, Log: log.Discard(),
	}
	for _, set := range options {
		set(&opts)
	}
	return NewFollower(opts), o
}

// nodeItem returns a node with an address and ranges.
func nodeItem(address string, ranges ...string) Item {
	n := &Node{Incarnation: "a", Addresses: []netip.Addr{netip.MustParseAddr(address)}}
	for _, r := range ranges {
		n.Ranges = append(n.Ranges, netip.MustParsePrefix(r))
	}
	return Item{Node: n}
}

// TestRangeOfANodeThatGoesIsHandedToTheOtherHolder: two nodes have a range while it moves between them. When the former
// node is removed, the other node keeps the range.
func TestRangeOfANodeThatGoesIsHandedToTheOtherHolder(t *testing.T) {
	f, o := follow(t)
	first, second := Key{Node: "a"}, Key{Node: "b"}
	if err := f.Apply(t.Context(), watch.Changes[Key, Item]{Upserts: map[Key]Item{
		first: nodeItem("192.0.2.1", "10.2.0.0/24"), second: nodeItem("192.0.2.2", "10.2.0.0/24"),
	}}); err != nil {
		t.Fatal(err)
	}
	numberOf := func(name string) uint16 { n, _ := f.o.Numbers.Of(name); return n }
	p, to := netip.MustParsePrefix("10.2.0.0/24"), numberOf("b")
	if o.holders[p] != numberOf("a") {
		t.Fatalf("the router has the range at number %d", o.holders[p])
	}
	if err := f.Apply(t.Context(), watch.Changes[Key, Item]{Deletes: map[Key]struct{}{first: {}}}); err != nil {
		t.Fatal(err)
	}
	if o.holders[p] != to || o.remotes[p] != to {
		t.Errorf("the router has the range at number %d and the ipcache at %d, want %d", o.holders[p], o.remotes[p], to)
	}
}

// TestNumberOfANodeThatWentMeanwhileRestsInUse: if a complete listing lacks a node, its node ID is only released once
// no ipcache entry refers to it.
func TestNumberOfANodeThatWentMeanwhileRestsInUse(t *testing.T) {
	f, o := follow(t)
	gone := Key{Node: "gone"}
	pod := Key{Prefix: netip.MustParsePrefix("10.2.0.9/32")}
	if err := f.Apply(t.Context(), watch.Changes[Key, Item]{Upserts: map[Key]Item{
		gone: nodeItem("192.0.2.1", "10.2.0.0/24"), pod: {On: "gone", Identity: identity.MinCluster},
	}}); err != nil {
		t.Fatal(err)
	}
	number, _ := f.o.Numbers.Of("gone")
	f.nodes = map[string]Node{} // of a new process, which only knows the node IDs
	f.holders = map[netip.Prefix][]string{}
	if err := f.Complete(t.Context(), map[Key]struct{}{pod: {}}); err != nil {
		t.Fatal(err)
	}
	if _, ok := f.o.Numbers.Names()["gone"]; !ok || o.remotes[pod.Prefix] != number {
		t.Errorf("the number %d of an entry is free: %v", number, f.o.Numbers.Names())
	}
	if err := f.Complete(t.Context(), map[Key]struct{}{}); err != nil {
		t.Fatal(err)
	}
	if _, ok := f.o.Numbers.Names()["gone"]; ok {
		t.Error("an unused node ID is not released")
	}
}

// TestSourceThatAnswersAgainIsTold tests Away and Back with and without a listing.
func TestSourceThatAnswersAgainIsTold(t *testing.T) {
	var said []string
	f, _ := follow(t, func(o *FollowerOptions) {
		o.Away, o.Back = func() { said = append(said, "away") }, func() { said = append(said, "back") }
	})
	for _, step := range []func() error{
		func() error { return f.Failed(t.Context(), errors.New("away")) },
		func() error { return f.Failed(t.Context(), nil) },
		func() error { return f.Failed(t.Context(), nil) },
		func() error { return f.Failed(t.Context(), errors.New("away")) },
		func() error { return f.Complete(t.Context(), map[Key]struct{}{}) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"away", "back", "away", "back"}; !slices.Equal(said, want) {
		t.Errorf("called %q, want %q", said, want)
	}
}

// TestIPv4MappedAddressIsRefused: an IPv4-mapped IPv6 address would be an entry that no packet matches.
func TestIPv4MappedAddressIsRefused(t *testing.T) {
	f, o := follow(t)
	pod := Key{Prefix: netip.MustParsePrefix("::ffff:10.2.0.9/128")}
	if err := f.Apply(t.Context(), watch.Changes[Key, Item]{Upserts: map[Key]Item{
		{Node: "a"}: nodeItem("192.0.2.1", "10.2.0.0/24"), pod: {On: "a", Identity: identity.MinCluster},
	}}); err != nil {
		t.Fatal(err)
	}
	if _, ok := o.remotes[pod.Prefix]; ok || len(f.State().Refused) != 1 {
		t.Errorf("the entries are %v, refused %v", o.remotes, f.State().Refused)
	}
}

func (o *order) String() (text string) {
	for _, number := range slices.Sorted(maps.Keys(o.joined)) {
		var ranges []netip.Prefix
		for p, holder := range o.holders {
			if holder == number {
				ranges = append(ranges, p)
			}
		}
		if text != "" {
			text += " "
		}
		text += fmt.Sprintf("%d@%v%v", number, o.joined[number].Addresses[0], ranges)
	}
	return text
}
