// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// noEntries is an ipcache that keeps nothing.
type noEntries struct{}

func (noEntries) SetRemote(netip.Prefix, ipcache.Remote) error { return nil }
func (noEntries) RemoveRemote(netip.Prefix) error              { return nil }
func (noEntries) Doubt(map[uint16]struct{}) error              { return nil }

func (noEntries) Renumber(uint16, uint16) error      { return nil }
func (noEntries) Keep(func(netip.Prefix) bool) error { return nil }
func (noEntries) InUse(uint16) bool                  { return false }

// TestMovedIsToldOfJoinsAddressesAndLeaves adds, changes and removes nodes, and checks the calls of Moved.
func TestMovedIsToldOfJoinsAddressesAndLeaves(t *testing.T) {
	var told []string
	f := cluster.NewFollower(cluster.FollowerOptions{
		Entries: noEntries{}, Log: log.Discard(),
		Numbers: cluster.OpenNumbers(cluster.NumbersOptions{
			Path: filepath.Join(t.TempDir(), "nodes.json"), BootID: "boot-1", InUse: noEntries{}.InUse, Log: log.Discard(),
		}),
		Moved: func(ranges []netip.Prefix, nodes []netip.Addr) error {
			told = append(told, fmt.Sprint(ranges, nodes))
			return nil
		},
	})
	type changes = watch.Changes[cluster.Key, cluster.Item]
	upsert := func(k cluster.Key, i cluster.Item) changes {
		return changes{Upserts: map[cluster.Key]cluster.Item{k: i}}
	}
	a, b := cluster.Key{Node: "a"}, cluster.Key{Node: "b"}
	for _, c := range []struct {
		what    string
		changes changes
		want    string // "": not called
	}{
		{"a joins", upsert(a, node("inc-a", "192.0.2.7", "10.1.0.0/24")), "[10.1.0.0/24] [192.0.2.7]"},
		{
			"b joins", upsert(b, node("inc-b", "192.0.2.2", "10.0.0.0/24")),
			"[10.0.0.0/24 10.1.0.0/24] [192.0.2.2 192.0.2.7]",
		},
		{"a pod on a", upsert(key("10.1.0.9/32"), cluster.Item{On: "a", Identity: 512}), ""},
		{
			"another address", upsert(a, node("inc-a", "192.0.2.1", "10.1.0.0/24")),
			"[10.0.0.0/24 10.1.0.0/24] [192.0.2.1 192.0.2.2]",
		},
		{"no range", upsert(a, node("inc-a", "192.0.2.1")), "[10.0.0.0/24] [192.0.2.1 192.0.2.2]"},
		{"no range, another address", upsert(a, node("inc-a", "192.0.2.3")), "[10.0.0.0/24] [192.0.2.2 192.0.2.3]"},
		{"b leaves", changes{Deletes: map[cluster.Key]struct{}{b: {}}}, "[] [192.0.2.3]"},
	} {
		told = nil
		if err := f.Apply(t.Context(), c.changes); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		if len(told) > 1 || len(told) == 0 && c.want != "" || len(told) == 1 && told[0] != c.want {
			t.Errorf("%s: Moved got %q, want %q", c.what, told, c.want)
		}
	}
}
