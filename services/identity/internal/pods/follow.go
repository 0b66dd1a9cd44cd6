// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/workload"
)

// staticUID is the annotation on the API object of a static pod with the UID that kubelet, and therefore CNI, uses.
const staticUID = "kubernetes.io/config.hash"

// Follow keeps the set equal to the pods of the node, and to all namespaces, until
// ctx is done; it then returns nil.
func (s *Set) Follow(ctx context.Context, c *kube.Client, l *slog.Logger) error {
	client, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return err
	}
	pods, namespaces := s.sinks()
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() error {
		return kube.Follow(ctx, c, kube.Kind[Pod]{
			Client: client, Resource: kindPods, Fields: "spec.nodeName=" + s.node, Type: &corev1.Pod{}, Trim: trim,
		}, pods, l)
	})
	both.Go(func() error {
		return kube.Follow(ctx, c, kube.Kind[map[string]string]{
			Client: client, Resource: kindNamespaces, Type: &corev1.Namespace{},
			Trim: func(o runtime.Object) map[string]string { return o.(*corev1.Namespace).Labels },
		}, namespaces, l)
	})
	return both.Wait()
}

func trim(o runtime.Object) Pod {
	p := o.(*corev1.Pod)
	controller := ""
	if owner := metav1.GetControllerOfNoCopy(p); owner != nil {
		controller = string(owner.UID)
	}
	return Pod{
		UID: string(p.UID), StaticUID: p.Annotations[staticUID], Controller: controller,
		ServiceAccount: p.Spec.ServiceAccountName, Labels: p.Labels, Ports: namedPorts(p),
	}
}

// namedPorts returns the ports of the containers that run for the lifetime of the pod.
func namedPorts(p *corev1.Pod) (ports []workload.NamedPort) {
	containers := slices.Clone(p.Spec.Containers)
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			containers = append(containers, c)
		}
	}
	protocols := map[corev1.Protocol]workload.Protocol{
		"": workload.TCP, corev1.ProtocolTCP: workload.TCP, corev1.ProtocolUDP: workload.UDP, corev1.ProtocolSCTP: workload.SCTP,
	}
	for _, c := range containers {
		for _, port := range c.Ports {
			if protocol, ok := protocols[port.Protocol]; ok && port.Name != "" && port.ContainerPort > 0 {
				ports = append(ports, workload.NamedPort{Name: port.Name, Port: uint16(port.ContainerPort), Protocol: protocol})
			}
		}
	}
	slices.SortFunc(ports, workload.NamedPort.Compare)
	return slices.Compact(ports)
}

// sink passes objects of one kind to a Set.
type sink[V any] struct {
	set   *Set
	kind  string
	all   map[Name]V // guarded by set.mu
	equal func(a, b V) bool
	note  func(name string, v V) // notes a change; guarded by set.mu
}

// sinks returns the handlers for pods and namespaces.
func (s *Set) sinks() (sink[Pod], sink[map[string]string]) {
	return sink[Pod]{s, kindPods, s.pods, Pod.equal, func(string, Pod) {}},
		sink[map[string]string]{
			s, kindNamespaces, s.namespaces, maps.Equal[map[string]string, map[string]string],
			func(name string, labels map[string]string) { s.tenants.Set(name, labels) },
		}
}

// Upsert implements kube.Handler.
func (s sink[V]) Upsert(n types.NamespacedName, v V) {
	s.set.change(func() bool {
		had, ok := s.all[Name(n)]
		s.all[Name(n)] = v
		s.note(n.Name, v)
		return !ok || !s.equal(had, v) // most changes are of a status
	})
}

// Delete implements kube.Handler.
func (s sink[V]) Delete(n types.NamespacedName) {
	s.set.change(func() bool {
		var none V
		delete(s.all, Name(n))
		s.note(n.Name, none)
		return true
	})
}

// Complete implements kube.Handler.
func (s sink[V]) Complete() {
	s.set.change(func() bool {
		delete(s.set.unlisted, s.kind)
		return true
	})
}

// Failed implements kube.Handler.
func (s sink[V]) Failed(err error) {
	s.set.change(func() bool {
		delete(s.set.failures, s.kind)
		if err != nil {
			s.set.failures[s.kind] = err
		}
		return true
	})
}
