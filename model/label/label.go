// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package label defines the labels that determine a workload's identity: the sources and keys with a fixed meaning,
// the order of labels, and their canonical text.
//
// A label has a source (the system that set it), a key and a value. A Set is sorted and has no duplicates. A
// Canonical is a Set within the limits of an identity, together with its text. The text is stored in etcd and on
// disk, so neither the order nor the escaping may change without a migration. The package knows nothing about
// selectors or about how labels are obtained.
package label

import (
	"cmp"
	"iter"
	"slices"
	"strings"
)

// Sources with a fixed meaning. Other sources ("container", "nomad", ...) are valid; selectors match them by name or
// without naming a source.
const (
	SourceKubernetes = "k8s"
	SourceCNI        = "cni"
	SourceReserved   = "reserved"  // the reserved identities
	SourceNode       = "node"      // labels of a node
	SourceCIDRGroup  = "cidrgroup" // labels of a group of prefixes

	// SourceGenerated labels are part of an identity but invisible to selectors. They carry facts such as the named
	// ports of a pod.
	SourceGenerated = "generated"
)

// Keys with a fixed meaning, the same as Cilium's, so that policies written
// for it select the same workloads.
const (
	KeyNamespace       = "io.kubernetes.pod.namespace"
	KeyNamespaceLabels = PrefixDerived + "namespace.labels."
	// KeyNamespaceName is the label that the API server sets on each namespace.
	KeyNamespaceName  = KeyNamespaceLabels + "kubernetes.io/metadata.name"
	KeyServiceAccount = PrefixDerived + "policy.serviceaccount"
	KeyCluster        = PrefixDerived + "policy.cluster"
	KeyCIDRGroupName  = "io.cilium.policy.cidrgroupname/"
)

// Prefixes of the keys that describe a pod in Kubernetes: its namespace, the namespace's labels, its service account,
// its cluster. Policies trust them, so neither pods nor runtimes may set them.
const (
	PrefixKubernetes = "io.kubernetes."
	PrefixPod        = PrefixKubernetes + "pod."
	PrefixDerived    = "io.cilium.k8s."
)

// Keys of the labels that Sluice adds with SourceGenerated.
const (
	// KeyNoLabels is the only label of a workload without labels, because an identity's set is not empty. Reserved
	// numbers do not fit: "init" is always enforced, "unmanaged" means that Sluice does not manage the endpoint, and
	// a tunnel carries neither.
	KeyNoLabels = "no-labels"
)

// Label is one property of a workload. Its JSON form is part of the datapath's
// records of endpoints.
type Label struct {
	Source string `json:"source"`
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"` // may be empty
}

// Name returns "source:key".
func (l Label) Name() string { return l.Source + ":" + l.Key }

// String returns "source:key=value" without escaping, for messages.
func (l Label) String() string { return l.Source + ":" + l.Key + "=" + l.Value }

// Compare orders by source, key and value. This is the canonical order.
func (l Label) Compare(o Label) int {
	return cmp.Or(strings.Compare(l.Source, o.Source), strings.Compare(l.Key, o.Key), strings.Compare(l.Value, o.Value))
}

// Reserved returns the label reserved:name.
func Reserved(name string) Label { return Label{Source: SourceReserved, Key: name} }

// Kubernetes returns the label k8s:key=value.
func Kubernetes(key, value string) Label {
	return Label{Source: SourceKubernetes, Key: key, Value: value}
}

// Set is an immutable label set in canonical order. The zero Set is empty.
type Set struct {
	list []Label // sorted by Compare; no duplicates
}

// NewSet returns the set of the given labels. The argument is not kept.
func NewSet(labels ...Label) Set {
	s := slices.Clone(labels)
	slices.SortFunc(s, Label.Compare)
	return Set{list: slices.Clip(slices.Compact(s))}
}

// All returns the labels in canonical order. The caller must not change them.
func (s Set) All() []Label { return s.list[:len(s.list):len(s.list)] }

// Len returns the number of labels.
func (s Set) Len() int { return len(s.list) }

// Key yields the labels with the given key, of every source.
func (s Set) Key(key string) iter.Seq[Label] {
	return func(yield func(Label) bool) {
		for i := range s.list {
			if s.list[i].Key == key && !yield(s.list[i]) {
				return
			}
		}
	}
}

// Has reports whether the set contains exactly this label.
func (s Set) Has(l Label) bool {
	_, ok := slices.BinarySearchFunc(s.list, l, Label.Compare)
	return ok
}

// HasSource reports whether any label has the source.
func (s Set) HasSource(source string) bool {
	return slices.ContainsFunc(s.list, func(l Label) bool { return l.Source == source })
}

// Value returns the value of source:key.
func (s Set) Value(source, key string) (string, bool) {
	for l := range s.Key(key) {
		if l.Source == source {
			return l.Value, true
		}
	}
	return "", false
}

// Equal reports whether both sets have the same labels.
func (s Set) Equal(o Set) bool { return slices.Equal(s.list, o.list) }

var (
	keyEscaper   = strings.NewReplacer(`\`, `\\`, `;`, `\;`, `=`, `\=`)
	valueEscaper = strings.NewReplacer(`\`, `\\`, `;`, `\;`)
)

// Text returns the canonical text of the set, "source:key=value;" for each label. '\' escapes '\', ';' and '=' in
// keys, and '\' and ';' in values. Equal sets have equal texts, and different sets different texts.
func (s Set) Text() string {
	var b strings.Builder
	n := 0
	for _, l := range s.list {
		n += len(l.Source) + len(l.Key) + len(l.Value) + 3
	}
	b.Grow(n)
	for _, l := range s.list {
		b.WriteString(l.Source)
		b.WriteByte(':')
		keyEscaper.WriteString(&b, l.Key) //nolint:errcheck // a Builder does not fail
		b.WriteByte('=')
		valueEscaper.WriteString(&b, l.Value) //nolint:errcheck // a Builder does not fail
		b.WriteByte(';')
	}
	return b.String()
}

// String returns Text.
func (s Set) String() string { return s.Text() }
