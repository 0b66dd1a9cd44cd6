// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package tenants follows the Namespaces of a Kubernetes API server and maps each namespace to its tenant.
package tenants

import (
	"context"
	"log/slog"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/shares"
)

// Set maps namespaces to tenants. It is safe for concurrent use.
type Set struct {
	changed func()

	mu       sync.Mutex
	tenants  *shares.Tenants // guarded by mu
	complete bool            // guarded by mu
	failure  error           // guarded by mu
}

// New returns a set that is incomplete until Follow has listed the Namespaces. Follow calls changed, without holding
// a lock, when the list is complete for the first time, and after each later change of a tenant. changed must not
// block for long.
func New(s shares.Settings, changed func()) *Set {
	return &Set{tenants: shares.NewTenants(s), changed: changed}
}

// WithoutKubernetes returns a complete set in which no namespace has labels: each namespace is a tenant of its own,
// or all are one tenant, depending on the settings.
func WithoutKubernetes(s shares.Settings) *Set {
	return &Set{tenants: shares.NewTenants(s), complete: true, changed: func() {}}
}

// Settings returns the settings of the set.
func (s *Set) Settings() shares.Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tenants.Settings()
}

// Of returns the tenant of a namespace; the empty name means cluster-wide objects. Until Complete, the
// tenant labels of some namespaces may be missing.
func (s *Set) Of(namespace string) shares.Tenant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tenants.Of(namespace)
}

// Complete reports whether all Namespaces were listed once. It stays true while the API is unreachable.
func (s *Set) Complete() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.complete
}

// Failure returns why the Namespaces cannot be listed or watched at present; nil if they can.
func (s *Set) Failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// Follow keeps the set equal to the Namespaces until ctx is done; it then returns nil.
func (s *Set) Follow(ctx context.Context, c *kube.Client, l *slog.Logger) error {
	client, err := kube.MetadataClient(c.Config)
	if err != nil {
		return err
	}
	label := s.Settings().Label()
	return kube.Follow(ctx, c, kube.Kind[string]{
		Client: client, Resource: "namespaces", Type: &metav1.PartialObjectMetadata{}, Last: true,
		Trim: func(o runtime.Object) string { return o.(*metav1.PartialObjectMetadata).Labels[label] },
	}, handler{s, label}, l)
}

// handler implements kube.Handler. The value of a Namespace is the value of its tenant label.
type handler struct {
	*Set
	label string
}

// Upsert implements kube.Handler.
func (h handler) Upsert(name types.NamespacedName, value string) {
	h.change(func() bool { return h.tenants.Set(name.Name, map[string]string{h.label: value}) })
}

// Delete implements kube.Handler.
func (h handler) Delete(name types.NamespacedName) {
	h.change(func() bool { return h.tenants.Delete(name.Name) })
}

// change applies f, and reports a change if the set is complete.
func (h handler) change(f func() bool) {
	h.mu.Lock()
	report := f() && h.complete
	h.mu.Unlock()
	if report {
		h.changed()
	}
}

// Complete implements kube.Handler.
func (h handler) Complete() {
	h.change(func() bool {
		first := !h.complete
		h.complete = true
		return first
	})
}

// Failed implements kube.Handler.
func (h handler) Failed(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failure = err
}
