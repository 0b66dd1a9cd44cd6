// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
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

// order is an ipcache and a fabric that check that each number which the ipcache has
// is one of the fabric's at every moment.
type order struct {
	t       *testing.T
	joined  map[uint16]Member
	holders map[netip.Prefix]uint16
	remotes map[netip.Prefix]uint16
	rounds  int // of Complete
}

func (o *order) check() {
	for p, number := range o.remotes {
		if _, ok := o.joined[number]; !ok {
			o.t.Errorf("%v is published with number %d, which no node of the fabric has", p, number)
		}
	}
}

func (o *order) SetRemote(p netip.Prefix, r ipcache.Remote) error {
	o.remotes[p] = r.Node
	if !p.IsSingleIP() && o.holders[p] != r.Node {
		o.t.Errorf("range %v of number %d, the fabric has %d", p, r.Node, o.holders[p])
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

// TestFabricHasEachNodeBeforeAndAsLongAsItIsPublished, through everything that
// happens to a node (INV-94).
func TestFabricHasEachNodeBeforeAndAsLongAsItIsPublished(t *testing.T) {
	o := &order{
		t: t, joined: map[uint16]Member{}, holders: map[netip.Prefix]uint16{}, remotes: map[netip.Prefix]uint16{},
	}
	f := NewFollower(nil, o, OpenNumbers(NumbersOptions{InUse: o.InUse}), log.Discard())
	f.Fabric = o
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
		want string // number, address and range of the nodes
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
