// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package peer defines the properties of a peer that policies use: the number of its identity, its labels, its kind,
// and its scope, which determines the address rules that apply.
//
// The identity service allocates the numbers. This package derives the kind, the scope and the named ports from the
// labels.
package peer

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

// ErrUnresolved means that a query contains an address without an identity, and that sluice-identity cannot provide
// the identity now.
var ErrUnresolved = errors.New("sluice-identity cannot resolve the address to an identity")

// Identity is a peer with the properties that policies use. It is immutable. A cluster identity never gets other
// labels. A node-local identity can get other labels; it is then replaced.
type Identity struct {
	Number identity.Numeric
	Labels label.Set // labels that selectors match
	// given are the labels that the identity service sent, if Complete has added labels.
	given label.Set
	Kind  identity.Kind
	Scope identity.PeerScope
	// Ports are the named container ports of the peer, sorted. A name may occur several times.
	Ports []workload.NamedPort
}

// New returns an identity, and derives the kind, the scope and the named ports from the labels.
func New(n identity.Numeric, labels label.Set) (Identity, error) {
	if n == 0 {
		return Identity{}, fmt.Errorf("identity number 0 is not valid")
	}
	id := Identity{Number: n, Labels: labels}
	has := func(name string) bool { return labels.Has(label.Reserved(name)) }
	world := has(identity.NameWorld) || has(identity.NameWorldIPv4) || has(identity.NameWorldIPv6)
	switch {
	case n == identity.UnknownInCluster:
		id.Kind, id.Scope = identity.KindUnknown, identity.PeerScopeCluster
	case has(identity.NameHost):
		id.Kind, id.Scope = identity.KindHost, identity.PeerScopeNode
	case has(identity.NameRemoteNode):
		id.Kind, id.Scope = identity.KindRemoteNode, identity.PeerScopeNode
	case world && has(identity.NameKubeAPIServer):
		id.Kind, id.Scope = identity.KindKubeAPIServer, identity.PeerScopeOutside
	case has(identity.NameWorldIPv6):
		id.Kind, id.Scope = identity.KindWorld6, identity.PeerScopeOutside
	case world:
		id.Kind, id.Scope = identity.KindWorld4, identity.PeerScopeOutside
	case has(identity.NameHealth), has(identity.NameInit), has(identity.NameIngress), has(identity.NameUnmanaged):
		id.Kind, id.Scope = identity.KindOther, identity.PeerScopeCluster
	default:
		id.Kind, id.Scope = identity.KindInCluster, identity.PeerScopeCluster
	}
	var err error
	if id.Ports, err = workload.NamedPortsOf(labels); err != nil {
		return Identity{}, fmt.Errorf("identity %d: %w", n, err)
	}
	return id, nil
}

// DefaultNamespace is the namespace of workloads without a namespace.
const DefaultNamespace = "default"

// Given returns the labels that the identity service sent.
func (id Identity) Given() label.Set {
	if id.given.Len() > 0 {
		return id.given
	}
	return id.Labels
}

// NameUnlabelledNode is the reserved label of a node whose labels are unknown: see Node.
const NameUnlabelledNode = "unlabelled-node"

// Node prepares the identity of a node for rules that select nodes by label; labels reports whether such rules are
// enabled. If they are, Node marks a node without labels as a node with unknown labels: the identity service of that
// node has an earlier version, or no identity for the labels. If they are not, Node removes the labels, so that pod
// selectors do not match nodes.
func (id Identity) Node(labels bool) Identity {
	if id.Kind != identity.KindHost && id.Kind != identity.KindRemoteNode {
		return id
	}
	known := id.Labels.HasSource(label.SourceNode)
	switch {
	case labels && !known:
		id.given = id.Labels
		id.Labels = label.NewSet(append(slices.Clone(id.Labels.All()), label.Reserved(NameUnlabelledNode))...)
	case !labels && known:
		id.given = id.Labels
		id.Labels = label.NewSet(slices.DeleteFunc(slices.Clone(id.Labels.All()), func(l label.Label) bool {
			return l.Source == label.SourceNode
		})...)
	}
	return id
}

// Complete adds labels that policies expect. A workload without a cluster gets the name of this cluster. A workload
// that Kubernetes does not know, and which therefore has no namespace, is treated as a pod in DefaultNamespace: its
// labels are added as Kubernetes labels, too.
func (id Identity) Complete(cluster string) Identity {
	if id.Kind != identity.KindInCluster {
		return id
	}
	var add []label.Label
	if _, ok := id.Labels.Value(label.SourceKubernetes, label.KeyCluster); !ok && cluster != "" {
		add = append(add, label.Kubernetes(label.KeyCluster, cluster))
	}
	if _, ok := id.Labels.Value(label.SourceKubernetes, label.KeyNamespace); !ok {
		add = append(add, label.Kubernetes(label.KeyNamespace, DefaultNamespace),
			label.Kubernetes(label.KeyNamespaceName, DefaultNamespace))
		for _, l := range id.Labels.All() {
			derived := strings.HasPrefix(l.Key, label.PrefixDerived) || strings.HasPrefix(l.Key, label.PrefixKubernetes)
			if l.Source != label.SourceGenerated && l.Source != label.SourceKubernetes && !derived {
				add = append(add, label.Kubernetes(l.Key, l.Value))
			}
		}
	}
	if len(add) > 0 {
		id.given = id.Labels
		id.Labels = label.NewSet(append(add, id.Labels.All()...)...)
	}
	return id
}
