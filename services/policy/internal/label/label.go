// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package label holds the labels that give a workload its identity.
//
// A label has a source (who said it), a key and a value. A Set is what an
// identity number stands for: sorted, without duplicates, and with a canonical
// text, so that equal sets are equal strings. The package knows nothing about
// selectors and nothing about where labels come from.
package label

import (
	"slices"
	"strings"
)

// The sources that policy gives a meaning to. Others ("cni", "container", ...)
// are legal and are matched by their name or by a selector without a source.
const (
	SourceKubernetes = "k8s"
	SourceReserved   = "reserved"
	SourceNode       = "node"
	SourceCIDRGroup  = "cidrgroup"

	// SourceGenerated labels are part of an identity, and invisible to every
	// selector: they carry facts such as the named ports of a pod.
	SourceGenerated = "generated"
)

// Keys with a fixed meaning, the same as Cilium's, so that policies written
// for it select the same workloads.
const (
	KeyNamespace       = "io.kubernetes.pod.namespace"
	KeyNamespaceLabels = "io.cilium.k8s.namespace.labels."
	KeyServiceAccount  = "io.cilium.k8s.policy.serviceaccount"
	KeyCluster         = "io.cilium.k8s.policy.cluster"
	KeyNamedPorts      = "io.cilium.k8s.named-ports"
	KeyCIDRGroupName   = "io.cilium.policy.cidrgroupname/"
)

// Label is one fact about a workload.
type Label struct {
	Source string
	Key    string
	Value  string
}

// String is the canonical form: source:key=value.
func (l Label) String() string { return l.Source + ":" + l.Key + "=" + l.Value }

// Reserved returns the label reserved:name.
func Reserved(name string) Label { return Label{Source: SourceReserved, Key: name} }

// Kubernetes returns the label k8s:key=value.
func Kubernetes(key, value string) Label {
	return Label{Source: SourceKubernetes, Key: key, Value: value}
}

func compare(a, b Label) int {
	if c := strings.Compare(a.Key, b.Key); c != 0 {
		return c
	}
	if c := strings.Compare(a.Source, b.Source); c != 0 {
		return c
	}
	return strings.Compare(a.Value, b.Value)
}

// Set is an immutable set of labels. The zero Set is empty.
type Set struct {
	labels []Label // sorted by key, source, value; no duplicates
}

// NewSet returns the set of the given labels. The argument is not kept.
func NewSet(labels ...Label) Set {
	s := slices.Clone(labels)
	slices.SortFunc(s, compare)
	return Set{labels: slices.Compact(s)}
}

// All returns the labels in canonical order. The caller must not change them.
func (s Set) All() []Label { return s.labels }

// Len is the number of labels.
func (s Set) Len() int { return len(s.labels) }

// Key returns the labels with the given key, of every source.
func (s Set) Key(key string) []Label {
	lo, ok := slices.BinarySearchFunc(s.labels, key, func(l Label, k string) int { return strings.Compare(l.Key, k) })
	if !ok {
		return nil
	}
	hi := lo + 1
	for hi < len(s.labels) && s.labels[hi].Key == key {
		hi++
	}
	return s.labels[lo:hi]
}

// Has reports whether the set contains exactly this label.
func (s Set) Has(l Label) bool {
	_, ok := slices.BinarySearchFunc(s.labels, l, compare)
	return ok
}

// Value returns the value of source:key.
func (s Set) Value(source, key string) (string, bool) {
	for _, l := range s.Key(key) {
		if l.Source == source {
			return l.Value, true
		}
	}
	return "", false
}

// String is the canonical text of the set: equal sets have equal texts.
func (s Set) String() string {
	var b strings.Builder
	for i, l := range s.labels {
		if i > 0 {
			b.WriteByte(';')
		}
		b.WriteString(l.Source)
		b.WriteByte(':')
		b.WriteString(l.Key)
		b.WriteByte('=')
		b.WriteString(l.Value)
	}
	return b.String()
}

// Interner makes equal texts of labels one: the labels of a cluster's identities
// are few texts, many times over. It belongs to one goroutine. The zero value
// is ready.
type Interner struct{ texts map[string]string }

// maxInterned bounds the texts that are remembered; then it begins anew.
const maxInterned = 1 << 15

// Label returns an equal label.
func (in *Interner) Label(l Label) Label {
	return Label{Source: in.text(l.Source), Key: in.text(l.Key), Value: in.text(l.Value)}
}

func (in *Interner) text(s string) string {
	if known, ok := in.texts[s]; ok {
		return known
	}
	if in.texts == nil || len(in.texts) >= maxInterned {
		in.texts = make(map[string]string)
	}
	s = strings.Clone(s)
	in.texts[s] = s
	return s
}
