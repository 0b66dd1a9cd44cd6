// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"maps"

	"github.com/sluice-net/sluice/model/identity"
)

// NodeSet is the key of a label set of another node. A node has up to two: one for the addresses on which a Kubernetes
// API server listens, and one for its other addresses.
type NodeSet struct {
	Node      string
	APIServer bool
}

// relabel wakes the loop that numbers the label sets of nodes. Called with mu held.
func (r *Registry) relabel() {
	close(r.relabelled)
	r.relabelled = make(chan struct{})
}

// Labels returns the labels of this node, and the labels of each other node with labels by node set: for addresses
// without an API server, and for addresses with one. The caller must not change them. The channel is closed when they
// may have changed.
func (r *Registry) Labels() (own map[string]string, others map[NodeSet]map[string]string, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.registration.labels(), r.view.labels(), r.relabelled
}

func (v *view) labels() map[NodeSet]map[string]string {
	all := map[NodeSet]map[string]string{}
	for name, n := range v.nodes {
		if name != v.own && n.registered && len(n.record.Labels) > 0 {
			all[NodeSet{Node: name}] = n.record.Labels
		}
	}
	for a := range v.apiServers {
		for name := range v.claimed[a] {
			if labels, ok := all[NodeSet{Node: name}]; ok {
				all[NodeSet{Node: name, APIServer: true}] = labels
			}
		}
	}
	return all
}

// Numbered is the identity for the labels of a node.
type Numbered struct {
	Labels map[string]string
	// Number of the label set. It is 0 without labels: the address then has the identity of a remote node or an API
	// server.
	Number identity.Numeric
}

// SetNodeSets sets the numbers of all label sets that Labels returned. The registry keeps the map.
func (r *Registry) SetNodeSets(sets map[NodeSet]Numbered) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.view.setSets(sets)
	r.publish()
}

func (v *view) setSets(sets map[NodeSet]Numbered) {
	before := v.sets
	v.sets = sets
	for a := range v.claimed {
		for name := range v.claimed[a] {
			for _, api := range []bool{false, true} {
				s := NodeSet{Node: name, APIServer: api}
				if before[s].Number != sets[s].Number {
					v.touch(mappingKey(a))
				}
			}
		}
	}
}

// ofNode returns the identity of an address of another node; api is set if an API server has the address.
func (v *view) ofNode(name string, api bool) identity.Numeric {
	if n := v.sets[NodeSet{Node: name, APIServer: api}].Number; n != 0 {
		return n
	}
	if api {
		return identity.KubeAPIServer
	}
	return identity.RemoteNode
}

// undecided reports whether the identity of an address depends on node labels without a number yet.
func (v *view) undecided(k Key) bool {
	if !v.numbers || k.Node != "" {
		return false
	}
	a := k.Prefix.Addr()
	n := v.nodes[v.claimant(a)]
	if n == nil || n.name == v.own || len(n.record.Labels) == 0 {
		return false
	}
	_, api := v.apiServers[a]
	said, ok := v.sets[NodeSet{Node: n.name, APIServer: api}]
	return !ok || !maps.Equal(said.Labels, n.record.Labels)
}
