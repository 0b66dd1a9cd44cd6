// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// TestRangesAndAddressesOfOtherNodesAreReadFromTheIPCache: node addresses inside a pod range are left out, because
// only the addresses of devices are used to reach another node.
func TestRangesAndAddressesOfOtherNodesAreReadFromTheIPCache(t *testing.T) {
	entry := func(prefix string, id identity.Numeric, node uint16) ipmap.Entry {
		return ipmap.Entry{Prefix: netip.MustParsePrefix(prefix), Info: ipmap.Info{Identity: id, Node: node}}
	}
	got := othersIn([]ipmap.Entry{
		entry("10.1.0.0/24", identity.World, 0), // of this node
		entry("10.2.0.0/24", identity.World, 2),
		entry("10.2.0.9/32", identity.MinCluster, 2),
		entry("10.2.0.1/32", identity.RemoteNode, 2), // inside a range
		entry("192.0.2.2/32", identity.RemoteNode, 2),
		entry("192.0.2.1/32", identity.Host, 0),
	})
	want := cluster.Others{
		Ranges: []netip.Prefix{netip.MustParsePrefix("10.2.0.0/24")}, Nodes: []netip.Addr{netip.MustParseAddr("192.0.2.2")},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("ranges and addresses of other nodes: %+v, want %+v", got, want)
	}
}
