// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package peer holds what policy knows of a peer: the number of its identity,
// its labels, what kind of peer it is and which address rules reach it.
//
// The identity service allocates the numbers. This package reads the kind, the
// scope and the named ports from the labels.
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

// ErrUnresolved says that an address is given without an identity, and that
// sluice-identity does not say which one it has.
var ErrUnresolved = errors.New("sluice-identity does not say who has the address")

// Identity is a peer as policy sees it. It is immutable: other labels are
// another identity, except for sets that live on one node, which are replaced.
type Identity struct {
	Number identity.Numeric
	Labels label.Set // that selectors see
	// given are the labels that were announced, if Complete added to them.
	given label.Set
	Kind  identity.Kind
	Scope identity.PeerScope
	// Ports are the named container ports of the peer, sorted; a name may
	// occur several times.
	Ports []workload.NamedPort
}

// New derives the kind, the scope and the named ports from the labels.
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

// DefaultNamespace is the namespace of workloads that have none.
const DefaultNamespace = "default"

// Given are the labels that were announced.
func (id Identity) Given() label.Set {
	if id.given.Len() > 0 {
		return id.given
	}
	return id.Labels
}

// NameUnlabelledNode is the reserved label of a node of which the labels are not
// known: see Node.
const NameUnlabelledNode = "unlabelled-node"

// Node prepares the identity of a node for rules that select nodes by their labels;
// labels says whether there are such rules. If so, a node that was announced without
// labels is marked: its labels are not known, because its service for identities is
// of an earlier version or has no number for them. If not, the labels are left out:
// a selector of pods must not find them.
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

// Complete adds the labels that policies take for granted. A workload that names
// no cluster is one of this cluster. One that Kubernetes knows nothing of, and so
// has no namespace, counts as a pod of DefaultNamespace, and its labels as those
// of that pod; its own stay beside them.
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
