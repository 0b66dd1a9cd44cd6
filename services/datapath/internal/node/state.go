// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// ClusterState is the state of this node's view of the other nodes.
type ClusterState struct {
	// Unpublished counts creations that returned before other nodes had the addresses, in modes that wait for that.
	Unpublished uint64
	cluster.State
	Prefixes, Waiting int   // prefixes of the cluster in the ipcache, and how many of them wait for their identity
	Resting           int   // node IDs in quarantine
	Numbers           error // error of reading or writing their file
	Registration      error // why the current state of the node is not registered
}

// ClusterState returns the state of this node's view of the other nodes.
func (n *Node) ClusterState() ClusterState {
	counts := n.o.Maps.IPCache.Counts()
	return ClusterState{
		State: n.Follower.State(), Prefixes: counts.Prefixes, Waiting: counts.Waiting, Unpublished: n.Unpublished(),
		Resting: n.Numbers.Resting(), Numbers: n.Numbers.Err(), Registration: n.Registrar.Err(),
	}
}

// PodRouting returns how packets travel between pods of two nodes, and the firewall rules about the tunnel's port that
// they bypass; ok is false if they do not travel.
func (n *Node) PodRouting() (state routing.State, bypassed []string, ok bool) {
	if n.Mode() == cluster.None {
		return state, nil, false
	}
	return n.Router.State(), n.Host.Bypassed(), true
}

// Probes returns the state of the paths to other nodes; ok is false if they are not probed.
func (n *Node) Probes() (state probe.State, ok bool) {
	if n.Prober == nil {
		return state, false
	}
	return n.Prober.State(), true
}
