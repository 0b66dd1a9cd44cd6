// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// published is an ipcache that keeps the entry of each prefix.
type published struct {
	noEntries
	remote map[netip.Prefix]ipcache.Remote
}

func (p published) SetRemote(prefix netip.Prefix, r ipcache.Remote) error {
	p.remote[prefix] = r
	return nil
}

func (p published) RemoveRemote(prefix netip.Prefix) error {
	delete(p.remote, prefix)
	return nil
}

func newFollower(t *testing.T, o cluster.FollowerOptions) (*cluster.Follower, published) {
	t.Helper()
	p := published{remote: map[netip.Prefix]ipcache.Remote{}}
	o.Entries, o.Log = p, log.Discard()
	o.Numbers = cluster.OpenNumbers(cluster.NumbersOptions{
		Path: filepath.Join(t.TempDir(), "nodes.json"), BootID: "boot-1", InUse: p.InUse, Log: log.Discard(),
	})
	return cluster.NewFollower(o), p
}

func apply(t *testing.T, f *cluster.Follower, said map[cluster.Key]cluster.Item) {
	t.Helper()
	must(t, f.Apply(t.Context(), watch.Changes[cluster.Key, cluster.Item]{Upserts: said}))
}

// TestWhatAnEarlierProcessKnewCountsUntilTheListing keeps ranges and addresses in the firewall while only a part of the
// cluster has been received.
func TestWhatAnEarlierProcessKnewCountsUntilTheListing(t *testing.T) {
	told := ""
	f, _ := newFollower(t, cluster.FollowerOptions{
		Moved: func(ranges []netip.Prefix, nodes []netip.Addr) error {
			told = fmt.Sprint(ranges, nodes)
			return nil
		},
		Earlier: cluster.Others{
			Ranges: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("10.2.0.0/24")},
			Nodes:  []netip.Addr{netip.MustParseAddr("192.0.2.2")},
		},
	})
	a := map[cluster.Key]cluster.Item{{Node: "a"}: node("inc-a", "192.0.2.1", "10.1.0.0/24")}
	apply(t, f, a)
	if want := "[10.1.0.0/24 10.2.0.0/24] [192.0.2.1 192.0.2.2]"; told != want {
		t.Errorf("before the complete listing: Moved got %s, want %s", told, want)
	}
	must(t, f.Complete(t.Context(), map[cluster.Key]struct{}{{Node: "a"}: {}}))
	if want := "[10.1.0.0/24] [192.0.2.1]"; told != want {
		t.Errorf("afterwards: Moved got %s, want %s", told, want)
	}
}

// TestRangesAroundAddressesOfNodesAreRefused tests that a range around a node's address is rejected, in both orders.
func TestRangesAroundAddressesOfNodesAreRefused(t *testing.T) {
	good, bad := netip.MustParsePrefix("10.2.0.0/24"), netip.MustParsePrefix("192.0.2.0/24")
	liar := map[cluster.Key]cluster.Item{{Node: "liar"}: node("inc-l", "198.51.100.1", good.String(), bad.String())}
	other := map[cluster.Key]cluster.Item{{Node: "other"}: node("inc-o", "192.0.2.7", "10.3.0.0/24")}
	for what, said := range map[string][]map[cluster.Key]cluster.Item{
		"the node first": {other, liar}, "the range first": {liar, other},
	} {
		f, p := newFollower(t, cluster.FollowerOptions{})
		for _, s := range said {
			apply(t, f, s)
		}
		if _, ok := p.remote[bad]; ok {
			t.Errorf("%s: %v is published", what, bad)
		}
		if _, ok := p.remote[good]; !ok {
			t.Errorf("%s: %v is not published", what, good)
		}
		if refused := f.State().Refused; len(refused) != 1 || !strings.Contains(refused[0], "192.0.2.7") {
			t.Errorf("%s: refused %q", what, refused)
		}
	}

	f, p := newFollower(t, cluster.FollowerOptions{
		Local: func() []netip.Addr { return []netip.Addr{netip.MustParseAddr("192.0.2.9")} },
	})
	apply(t, f, liar)
	if _, ok := p.remote[bad]; ok {
		t.Errorf("%v is published, which contains the address of this node", bad)
	}
}

// TestAddressesOfNodesAreReachedByTheStackIfTheyAreToBe tests NodesByStack. Addresses inside ranges and addresses of
// pods never get its flag.
func TestAddressesOfNodesAreReachedByTheStackIfTheyAreToBe(t *testing.T) {
	for _, byStack := range []bool{false, true} {
		f, p := newFollower(t, cluster.FollowerOptions{NodesByStack: byStack})
		apply(t, f, map[cluster.Key]cluster.Item{
			{Node: "a"}:          node("inc-a", "192.0.2.1", "10.1.0.0/24"),
			key("192.0.2.1/32"):  {On: "a", Identity: identity.RemoteNode},
			key("192.0.2.11/32"): {On: "a", Identity: identity.KubeAPIServer},
			key("10.1.0.1/32"):   {On: "a", Identity: identity.RemoteNode},
			key("10.1.0.9/32"):   {On: "a", Identity: 512},
		})
		for prefix, want := range map[string]bool{
			"192.0.2.1/32": byStack, "192.0.2.11/32": byStack, "10.1.0.1/32": false, "10.1.0.9/32": false,
		} {
			got := p.remote[netip.MustParsePrefix(prefix)]
			if got.ByStack != want || got.OfDevice != strings.HasPrefix(prefix, "192.") || got.Node == 0 {
				t.Errorf("NodesByStack %v: %s is %+v", byStack, prefix, got)
			}
		}
	}
}
