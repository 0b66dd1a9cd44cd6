// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package peer holds what policy knows of a peer: the number of its identity,
// its labels, what kind of peer it is and which address rules reach it.
//
// The identity service allocates the numbers. This package reads the kind, the
// scope and the named ports from the labels.
package peer

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

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
	Ports []NamedPort
}

// NamedPort is one named container port.
type NamedPort struct {
	Name     string
	Protocol port.Protocol
	Port     uint16
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
	for l := range labels.Key(KeyNamedPorts) {
		if l.Source != label.SourceGenerated {
			continue
		}
		ports, err := ParseNamedPorts(l.Value)
		if err != nil {
			return Identity{}, fmt.Errorf("identity %d: label %s: %w", n, KeyNamedPorts, err)
		}
		id.Ports = append(id.Ports, ports...)
	}
	sortPorts(id.Ports)
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

func sortPorts(ports []NamedPort) {
	slices.SortFunc(ports, func(a, b NamedPort) int {
		if c := strings.Compare(a.Name, b.Name); c != 0 {
			return c
		}
		if a.Protocol != b.Protocol {
			return int(a.Protocol) - int(b.Protocol)
		}
		return int(a.Port) - int(b.Port)
	})
}

// KeyNamedPorts is the key of the generated label that carries the named ports
// of a workload.
const KeyNamedPorts = "io.cilium.k8s.named-ports"

// NamedPortsLabel is the generated label that makes ports part of the
// identity. It returns false for a pod without named ports, which gets none.
func NamedPortsLabel(ports []NamedPort) (label.Label, bool) {
	if len(ports) == 0 {
		return label.Label{}, false
	}
	ports = slices.Clone(ports)
	sortPorts(ports)
	ports = slices.Compact(ports)
	parts := make([]string, len(ports))
	for i, p := range ports {
		parts[i] = fmt.Sprintf("%s.%s.%d", p.Name, p.Protocol, p.Port)
	}
	return label.Label{Source: label.SourceGenerated, Key: KeyNamedPorts, Value: strings.Join(parts, "_")}, true
}

// ParseNamedPorts reads the value of the generated label: NAME.PROTO.PORT,
// joined by underscores. Port names contain neither dots nor underscores.
func ParseNamedPorts(value string) ([]NamedPort, error) {
	if value == "" {
		return nil, nil
	}
	var ports []NamedPort
	for _, part := range strings.Split(value, "_") {
		f := strings.Split(part, ".")
		if len(f) != 3 || f[0] == "" {
			return nil, fmt.Errorf("%q is not NAME.PROTOCOL.PORT", part)
		}
		proto, ok := port.ParseProtocol(f[1])
		if !ok {
			return nil, fmt.Errorf("%q: unknown protocol %q", part, f[1])
		}
		n, err := strconv.ParseUint(f[2], 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("%q: port %q is not a number from 1 to 65535", part, f[2])
		}
		ports = append(ports, NamedPort{Name: f[0], Protocol: proto, Port: uint16(n)})
	}
	sortPorts(ports)
	return ports, nil
}
