// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// TestKernelEndpointsOfDoubtedNodesAreUnknown: the mappings of a node that is not trusted change to unknown-in-cluster,
// including mappings that are added later and after the node got another node ID. The node's own addresses and other
// nodes are not affected.
func TestKernelEndpointsOfDoubtedNodesAreUnknown(t *testing.T) {
	dir, s := newDir(t), newSource()
	var doubts atomic.Bool
	p := start(t, dir, s, time.Now, func(f *cluster.FollowerOptions) {
		f.Trusts = func(node string) bool { return node != "b" || !doubts.Load() }
	})
	set := map[cluster.Key]cluster.Item{
		key("b"): node("1", "192.0.2.2", "10.244.1.0/24"), key("c"): node("1", "192.0.2.3", "10.244.2.0/24"),
		key("192.0.2.2/32"):  {On: "b", Identity: 6},
		key("10.244.1.5/32"): {On: "b", Identity: 300}, key("10.244.2.5/32"): {On: "c", Identity: 300},
	}
	say(s.now(), set)
	s.now().Loaded()
	p.wait("what is said", p.expected(set))
	unknown := func(keys ...string) map[cluster.Key]cluster.Item {
		out := map[cluster.Key]cluster.Item{}
		for k, item := range set {
			out[k] = item
		}
		for _, k := range keys {
			out[key(k)] = cluster.Item{On: "b", Identity: 255}
		}
		return out
	}
	doubts.Store(true)
	must(t, p.follower.Reconsider())
	p.wait("the endpoint of the doubted node", p.expected(unknown("10.244.1.5/32")))

	set[key("10.244.1.6/32")] = cluster.Item{On: "b", Identity: 301}
	set[key("b")] = node("2", "192.0.2.22", "10.244.1.0/24") // another node ID
	say(s.now(), set)
	p.wait("an endpoint that comes later, and another installation", p.expected(unknown("10.244.1.5/32", "10.244.1.6/32")))

	doubts.Store(false)
	must(t, p.follower.Reconsider())
	p.wait("the mappings of the source, once the node is trusted again", p.expected(set))
}
