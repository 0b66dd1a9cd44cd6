// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package shares divides limits among tenants by max-min fairness, so that one tenant cannot use up a limit that
// others need.
//
// A tenant is a namespace, or all namespaces whose Namespace object carries the same value of one label. Cluster-wide
// objects and the cluster's own namespaces belong to the tenant system, which is served first. docs/shares.md
// explains the rule to users.
package shares

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// DefaultTenantLabel is the label of a Namespace that names its tenant.
const DefaultTenantLabel = "sluice.io/tenant"

// MaxGuarantees limits the sum of all guarantees, in percent.
const MaxGuarantees = 80

// Kind is the kind of a tenant.
type Kind uint8

// The kinds.
const (
	KindNamespace  Kind = iota // a namespace without the label
	KindLabelled               // all namespaces with one value of the label
	KindUnlabelled             // all namespaces without the label
	KindSystem
)

// Tenant is a party that a limit is divided among. Tenants are comparable; the zero value is no tenant.
type Tenant struct {
	kind Kind
	name string
}

// System is the tenant of cluster-wide objects and of the cluster's own namespaces.
var System = Tenant{kind: KindSystem, name: "system"}

// Labelled returns the tenant of the namespaces whose tenant label has this value.
func Labelled(value string) Tenant { return Tenant{kind: KindLabelled, name: value} }

// Namespace returns the tenant of a namespace without the tenant label.
func Namespace(name string) Tenant { return Tenant{kind: KindNamespace, name: name} }

// unlabelled is the common tenant of all namespaces without the tenant label.
var unlabelled = Tenant{kind: KindUnlabelled, name: "unlabelled"}

// TenantOf returns the tenant with the given Kind and Name.
func TenantOf(kind Kind, name string) Tenant {
	switch kind {
	case KindSystem:
		return System
	case KindUnlabelled:
		return unlabelled
	}
	return Tenant{kind: kind, name: name}
}

// String returns "system", "tenant NAME", "namespace NAME" or "namespaces without a
// tenant".
func (t Tenant) String() string {
	switch t.kind {
	case KindSystem:
		return "system"
	case KindLabelled:
		return "tenant " + t.name
	case KindUnlabelled:
		return "namespaces without a tenant"
	}
	return "namespace " + t.name
}

// Kind returns the kind of the tenant.
func (t Tenant) Kind() Kind { return t.kind }

// Name returns the value of the label or the name of the namespace; it is empty for the other kinds.
func (t Tenant) Name() string {
	if t.kind == KindSystem || t.kind == KindUnlabelled {
		return ""
	}
	return t.name
}

// HasLabel reports whether the tenant's namespaces carry the tenant label.
func (t Tenant) HasLabel() bool { return t.kind == KindLabelled }

// labelled reports whether the tenant belongs to the group of labelled tenants. System belongs to it for demand above
// its own half.
func (t Tenant) labelled() bool { return t.kind == KindLabelled || t.kind == KindSystem }

// Compare orders tenants: system, labelled tenants, then the others, each group by name.
func (t Tenant) Compare(u Tenant) int {
	if t.kind != u.kind {
		return int(u.kind) - int(t.kind)
	}
	return strings.Compare(t.name, u.name)
}

// Settings define the tenants of a cluster. All processes of a cluster must have the same settings.
type Settings struct {
	// TenantLabel is the label of a Namespace that names its tenant. Empty means
	// DefaultTenantLabel.
	TenantLabel string
	// Together makes all namespaces without the label one tenant. Otherwise each of them is a tenant of its own, and
	// a user gains shares by creating namespaces.
	Together bool
	// Guarantees is the part of a limit, in percent, that is reserved for a labelled tenant. A namespace without the
	// label has no guarantee, whatever its name is.
	Guarantees map[string]int
	// SystemNamespaces belong to the tenant system, in addition to kube-system.
	SystemNamespaces []string
}

// Validate returns an error that names the first invalid setting.
func (s Settings) Validate() error {
	sum := 0
	for _, name := range slices.Sorted(maps.Keys(s.Guarantees)) {
		percent := s.Guarantees[name]
		if name == "" {
			return fmt.Errorf("shares.guarantees: a tenant name is empty")
		}
		if percent < 1 || percent > MaxGuarantees {
			return fmt.Errorf("shares.guarantees: %s: %d is not a percentage from 1 to %d", name, percent, MaxGuarantees)
		}
		sum += percent
	}
	if sum > MaxGuarantees {
		return fmt.Errorf("shares.guarantees: the guarantees add up to %d %%, at most %d %% can be guaranteed",
			sum, MaxGuarantees)
	}
	return nil
}

// Label returns the key of the tenant label.
func (s Settings) Label() string {
	if s.TenantLabel == "" {
		return DefaultTenantLabel
	}
	return s.TenantLabel
}

// Tenants maps namespaces to tenants. It is not safe for concurrent use.
type Tenants struct {
	settings Settings
	values   map[string]string // values of the tenant label, by namespace
}

// NewTenants returns the tenants of a cluster; no Namespace is known yet.
func NewTenants(s Settings) *Tenants {
	return &Tenants{settings: s, values: make(map[string]string)}
}

// Settings returns the settings that NewTenants got.
func (t *Tenants) Settings() Settings { return t.settings }

// Set records the labels of a Namespace and reports whether its tenant changed.
func (t *Tenants) Set(namespace string, labels map[string]string) bool {
	before := t.Of(namespace)
	if value := labels[t.settings.Label()]; value != "" {
		t.values[namespace] = value
	} else {
		delete(t.values, namespace)
	}
	return t.Of(namespace) != before
}

// Delete removes a Namespace and reports whether its tenant changed.
func (t *Tenants) Delete(namespace string) bool { return t.Set(namespace, nil) }

// Of returns the tenant of the objects in a namespace. The namespace of cluster-wide objects is empty.
func (t *Tenants) Of(namespace string) Tenant {
	return t.settings.TenantOf(namespace, t.values[namespace])
}

// TenantOf returns the tenant of the objects in a namespace whose tenant label has this value; empty: it has no such
// label.
func (s Settings) TenantOf(namespace, value string) Tenant {
	switch {
	case namespace == "" || namespace == "kube-system" || slices.Contains(s.SystemNamespaces, namespace):
		return System
	case value != "":
		return Labelled(value)
	case s.Together:
		return unlabelled
	}
	return Namespace(namespace)
}
