// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package identity holds the words of this service: numbers, label sets and
// what belongs together of the two.
//
// It is pure: no store, no clock, no wire format. Everything in it is a value
// that is valid once its constructor returned it.
package identity

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Numeric is the number of an identity. 0 is not one.
type Numeric uint32

// Ranges of numbers. 24 bits, so that a VXLAN network identifier carries one.
const (
	MinReserved  Numeric = 1
	MaxReserved  Numeric = 255
	MinCluster   Numeric = 256
	MaxCluster   Numeric = 65_535
	MinNodeLocal Numeric = 0xFF0000
	MaxNodeLocal Numeric = 0xFF0FFF
)

// ClusterSize is how many numbers one cluster has.
const ClusterSize = int(MaxCluster-MinCluster) + 1

// Reserved numbers. Those up to 10 mean what they mean in Cilium.
const (
	Host             Numeric = 1
	World            Numeric = 2
	Unmanaged        Numeric = 3
	Health           Numeric = 4
	Init             Numeric = 5
	RemoteNode       Numeric = 6
	KubeAPIServer    Numeric = 7
	Ingress          Numeric = 8
	WorldIPv4        Numeric = 9
	WorldIPv6        Numeric = 10
	UnknownInCluster Numeric = 255
)

// Scope says where a number is valid.
type Scope uint8

// Scopes.
const (
	ScopeInvalid   Scope = iota // no such number is ever given out
	ScopeReserved               // fixed meaning everywhere
	ScopeCluster                // the same on all nodes of the cluster
	ScopeNodeLocal              // on this node only; never leaves it
)

// String is one of invalid, reserved, cluster, node-local.
func (s Scope) String() string {
	switch s {
	case ScopeReserved:
		return "reserved"
	case ScopeCluster:
		return "cluster"
	case ScopeNodeLocal:
		return "node-local"
	}
	return "invalid"
}

// Scope of the number, by its range.
func (n Numeric) Scope() Scope {
	switch {
	case n >= MinReserved && n <= MaxReserved:
		return ScopeReserved
	case n >= MinCluster && n <= MaxCluster:
		return ScopeCluster
	case n >= MinNodeLocal && n <= MaxNodeLocal:
		return ScopeNodeLocal
	}
	return ScopeInvalid
}

// Identity is a number and the label set that it stands for.
type Identity struct {
	Number Numeric
	Labels Labels
}

// Equal says whether number and label set are the same.
func (i Identity) Equal(o Identity) bool {
	return i.Number == o.Number && i.Labels.text == o.Labels.text
}

// Compare orders by number.
func Compare(a, b Identity) int { return cmp.Compare(a.Number, b.Number) }

// reserved is the table of reserved numbers; the numbers between are free.
var reserved = func() []Identity {
	name := func(n Numeric, keys ...string) Identity {
		ls := make([]Label, len(keys))
		for i, k := range keys {
			ls[i] = Label{Source: SourceReserved, Key: k}
		}
		labels, err := NewLabels(ls...)
		if err != nil {
			panic(err)
		}
		return Identity{Number: n, Labels: labels}
	}
	return []Identity{
		name(Host, "host"),
		name(World, "world"),
		name(Unmanaged, "unmanaged"),
		name(Health, "health"),
		name(Init, "init"),
		name(RemoteNode, "remote-node"),
		name(KubeAPIServer, "kube-apiserver", "remote-node"),
		name(Ingress, "ingress"),
		name(WorldIPv4, "world-ipv4"),
		name(WorldIPv6, "world-ipv6"),
		name(UnknownInCluster, "unknown-in-cluster"),
	}
}()

// Reserved returns the reserved identities, sorted by number.
func Reserved() []Identity { return slices.Clone(reserved) }

// KeyCount says how many different values a label key has.
type KeyCount struct {
	Key    string // "source:key"
	Values int
}

// TopKeys counts the different values of each label key over some label sets
// and returns the n keys with most, most first. Hidden labels and reserved
// ones do not count: nobody can do anything about them.
func TopKeys(sets func(yield func(Labels) bool), n int) []KeyCount {
	values := map[string]map[string]struct{}{}
	for set := range sets {
		for _, l := range set.list {
			if l.Source == SourceGenerated || l.Source == SourceReserved {
				continue
			}
			key := l.Name()
			if values[key] == nil {
				values[key] = map[string]struct{}{}
			}
			values[key][l.Value] = struct{}{}
		}
	}
	out := make([]KeyCount, 0, len(values))
	for k, v := range values {
		out = append(out, KeyCount{Key: k, Values: len(v)})
	}
	slices.SortFunc(out, func(a, b KeyCount) int {
		return cmp.Or(cmp.Compare(b.Values, a.Values), strings.Compare(a.Key, b.Key))
	})
	return out[:min(n, len(out))]
}

// String is "number{labels}".
func (i Identity) String() string { return fmt.Sprintf("%d{%s}", i.Number, i.Labels) }
