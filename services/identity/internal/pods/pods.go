// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pods provides the labels and named ports that the pods of this node have in the Kubernetes API, at ADD and at
// every change.
//
// It never requests a single pod from the API: it watches the pods of the node, and waits. Known pods stay known while
// the API is unavailable.
package pods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
)

var (
	// ErrNotFound: the API answers, but does not have the pod, or has not sent it yet.
	ErrNotFound = errors.New("the Kubernetes API does not show the pod")
	// ErrUnavailable: the pod is unknown to this node, and the API does not answer or refuses the request.
	ErrUnavailable = errors.New("the Kubernetes API does not say which labels the pod has")
)

// Wait is the time that Find waits for a pod. Find ends at least Margin before the caller's deadline, so that the
// caller gets the reason.
const (
	Wait   = 10 * time.Second
	Margin = 500 * time.Millisecond
)

// Name is the namespace and the name of a pod; a namespace only has a name.
type Name struct{ Namespace, Name string }

// Pod is the stored part of a pod.
type Pod struct {
	UID string
	// StaticUID is kubelet's UID of a static pod (from a file); the API has another UID.
	StaticUID      string
	ServiceAccount string
	// Controller is the UID of the object that controls the pod, such as a ReplicaSet.
	Controller string
	Labels     map[string]string
	Ports      []workload.NamedPort // sorted
}

func (p Pod) equal(q Pod) bool {
	return p.UID == q.UID && p.StaticUID == q.StaticUID && p.ServiceAccount == q.ServiceAccount &&
		p.Controller == q.Controller &&
		maps.Equal(p.Labels, q.Labels) && slices.Equal(p.Ports, q.Ports)
}

// Kinds of objects that a pod's labels come from.
const (
	kindPods       = "pods"
	kindNamespaces = "namespaces"
)

// Set contains the pods and namespaces from the API. Its methods may be called concurrently.
type Set struct {
	node    string
	cluster string
	filter  labels.Filter

	mu         sync.Mutex
	pods       map[Name]Pod               // guarded by mu
	namespaces map[Name]map[string]string // guarded by mu; labels
	tenants    *shares.Tenants            // guarded by mu
	unlisted   map[string]struct{}        // guarded by mu; kinds that were not listed since the start
	failures   map[string]error           // guarded by mu; by kind, why it is not up to date
	changed    chan struct{}              // guarded by mu; closed with the next change
}

// New returns an empty set for the pods of a Node. cluster is the value of the label with the cluster's name.
func New(node, cluster string, filter labels.Filter) *Set {
	return &Set{
		node: node, cluster: cluster, filter: filter, pods: map[Name]Pod{}, namespaces: map[Name]map[string]string{},
		tenants:  shares.NewTenants(shares.Settings{}),
		unlisted: map[string]struct{}{kindPods: {}, kindNamespaces: {}},
		failures: map[string]error{}, changed: make(chan struct{}),
	}
}

// change runs f, which returns whether it changed the set, and wakes waiting calls.
func (s *Set) change(f func() bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f() {
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// Changed returns a channel that is closed at the next change of the set.
func (s *Set) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// errListing: the API has not failed, but the listing is not complete yet.
var errListing = errors.New("the pods of this node are still being listed")

// Problem returns why the set is not up to date; nil if it is.
func (s *Set) Problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.failures) == 0 && len(s.unlisted) > 0 {
		return errListing
	}
	var all []error
	said := map[string]bool{} // report each reason once, although every kind may have it
	for _, kind := range slices.Sorted(maps.Keys(s.failures)) {
		if err := s.failures[kind]; !said[err.Error()] {
			said[err.Error()] = true
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

// Named reports whether a reference identifies one pod for ever, so that the pod's labels can be looked up.
func Named(ref workload.PodReference) bool {
	return ref.Namespace != "" && ref.Name != "" && ref.UID != ""
}

// Find returns the label set of a pod, and waits until it is known, because ADD may be called before the API sends the
// pod. If the API fails, Find returns the pod's former label set from last. A pod whose labels cannot form an identity
// gets reserved:init.
func (s *Set) Find(ctx context.Context, ref workload.PodReference,
	last func() (label.Canonical, bool),
) (label.Canonical, error) {
	wait := Wait
	if end, ok := ctx.Deadline(); ok {
		wait = min(wait, max(0, time.Until(end)-Margin))
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		changed := s.Changed()
		if l, ok := s.Labels(ref); ok {
			return l.Set, nil
		}
		problem := s.Problem()
		if problem != nil && !errors.Is(problem, errListing) {
			if set, ok := last(); ok {
				return set, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return label.Canonical{}, ctx.Err()
		case <-timer.C:
			if problem != nil {
				return label.Canonical{}, fmt.Errorf("%w: pod %s/%s %s: %w", ErrUnavailable, ref.Namespace, ref.Name, ref.UID, problem)
			}
			return label.Canonical{}, fmt.Errorf("%w: %s/%s %s on node %q, after %s",
				ErrNotFound, ref.Namespace, ref.Name, ref.UID, s.node, wait)
		}
	}
}

// Labels is the label set of a pod that determines its identity.
type Labels struct {
	Set label.Canonical
	// Isolated is the reason why Set is reserved:init: the labels of the pod cannot form an identity. Nil: Set has the
	// pod's labels.
	Isolated error
	// Ports is the reason why Set lacks named ports of the pod; rules with these names match nothing. Nil: it has all
	// of them.
	Ports error
	// Tenant and Controller are charged for a change of labels.
	Tenant     shares.Tenant
	Controller string // UID; empty: the pod has none
}

// Labels returns the labels of a pod. ok is false while the pod or its namespace is unknown, and for the name of
// another pod.
func (s *Set) Labels(ref workload.PodReference) (l Labels, ok bool) {
	s.mu.Lock()
	pod, known := s.pods[Name{ref.Namespace, ref.Name}]
	namespace, also := s.namespaces[Name{Name: ref.Namespace}]
	l.Tenant, l.Controller = s.tenants.Of(ref.Namespace), pod.Controller
	s.mu.Unlock()
	if !known || !also || ref.UID != pod.UID && ref.UID != pod.StaticUID {
		return Labels{}, false
	}
	all := make([]label.Label, 0, 4+len(namespace)+len(pod.Labels))
	all = append(all, label.Kubernetes(label.KeyNamespace, ref.Namespace), label.Kubernetes(label.KeyCluster, s.cluster))
	if pod.ServiceAccount != "" {
		all = append(all, label.Kubernetes(label.KeyServiceAccount, pod.ServiceAccount))
	}
	for key, value := range namespace {
		all = append(all, label.Kubernetes(label.KeyNamespaceLabels+key, value))
	}
	for key, value := range pod.Labels {
		// A user who may write a pod must not be able to give it another namespace or service account.
		if !strings.HasPrefix(key, label.PrefixPod) && !strings.HasPrefix(key, label.PrefixDerived) {
			all = append(all, label.Kubernetes(key, value))
		}
	}
	ports, left := workload.FitNamedPorts(pod.Ports)
	if left > 0 {
		l.Ports = fmt.Errorf("pod %s/%s: %d of %d named ports are left out, because an identity has at most %d bytes "+
			"of them; rules that name those ports match nothing",
			ref.Namespace, ref.Name, left, len(pod.Ports), label.MaxValue)
	}
	set, err := labels.Workload(s.filter, all, ports)
	if err != nil {
		l.Set = allocator.Isolated()
		l.Isolated = fmt.Errorf("pod %s/%s: %w", ref.Namespace, ref.Name, err)
		return l, true
	}
	l.Set = set
	return l, true
}

// SetShares sets how namespaces map to tenants. It is called before Follow.
func (s *Set) SetShares(settings shares.Settings) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tenants = shares.NewTenants(settings)
}

// Tenant returns the tenant of a namespace.
func (s *Set) Tenant(namespace string) shares.Tenant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tenants.Of(namespace)
}
