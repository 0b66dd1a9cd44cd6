// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dnsname

import "strings"

// Learned is the key of a name with learned addresses. Addresses from an answer to a pod apply only to pods of its
// namespace, so that no namespace can add addresses for another. Names that were added by hand apply to all pods.
//
// The text is the name, or the name, a zero byte and the namespace. Neither has a zero byte.
type Learned string

// ForAll returns the key of a name whose addresses apply to all pods.
func ForAll(name string) Learned { return Learned(name) }

// ForNamespace returns the key of a name whose addresses are for the pods of a namespace. The namespace is empty for
// workloads without one.
func ForNamespace(name, namespace string) Learned {
	return Learned(AppendForNamespace(nil, name, namespace))
}

// AppendForNamespace appends the text of ForNamespace to dst.
func AppendForNamespace(dst []byte, name, namespace string) []byte {
	dst = append(dst, name...)
	dst = append(dst, 0)
	return append(dst, namespace...)
}

// Name returns the name.
func (l Learned) Name() string {
	name, _, _ := strings.Cut(string(l), "\x00")
	return name
}

// Namespace returns the namespace; ok is false if the addresses are for all pods.
func (l Learned) Namespace() (namespace string, ok bool) {
	_, namespace, ok = strings.Cut(string(l), "\x00")
	return namespace, ok
}

// For reports whether the addresses apply to the pods of a namespace.
func (l Learned) For(namespace string) bool {
	own, limited := l.Namespace()
	return !limited || own == namespace
}

// Canonical returns the key with the canonical form of its name.
func (l Learned) Canonical() Learned {
	name, namespace, limited := strings.Cut(string(l), "\x00")
	if !limited {
		return ForAll(Canonical(name))
	}
	return ForNamespace(Canonical(name), namespace)
}
