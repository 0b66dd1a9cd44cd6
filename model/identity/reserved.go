// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/model/label"
)

// Identity is a number and its label set.
type Identity struct {
	Number Numeric
	Labels label.Canonical
}

// Equal reports whether number and label set are the same.
func (i Identity) Equal(o Identity) bool {
	return i.Number == o.Number && i.Labels.Text() == o.Labels.Text()
}

// String returns "number{labels}".
func (i Identity) String() string { return fmt.Sprintf("%d{%s}", i.Number, i.Labels) }

// Compare orders by number.
func Compare(a, b Identity) int { return cmp.Compare(a.Number, b.Number) }

// reserved lists the assigned reserved numbers in ascending order; the others are free.
var reserved = func() []Identity {
	name := func(n Numeric, names ...string) Identity {
		labels := make([]label.Label, len(names))
		for i, name := range names {
			labels[i] = label.Reserved(name)
		}
		set, err := label.Canonicalize(labels...)
		if err != nil {
			panic(err)
		}
		return Identity{Number: n, Labels: set}
	}
	return []Identity{
		name(Host, NameHost),
		name(World, NameWorld),
		name(Unmanaged, NameUnmanaged),
		name(Health, NameHealth),
		name(Init, NameInit),
		name(RemoteNode, NameRemoteNode),
		name(KubeAPIServer, NameKubeAPIServer, NameRemoteNode),
		name(Ingress, NameIngress),
		name(WorldIPv4, NameWorldIPv4),
		name(WorldIPv6, NameWorldIPv6),
		name(UnknownInCluster, NameUnknownInCluster),
	}
}()

// Reserved returns the reserved identities, sorted by number.
func Reserved() []Identity { return slices.Clone(reserved) }
