// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
)

// serviceOf converts a Service to the type that manifests are decoded to. Fields that corev1.Service does not have are
// already lost.
func serviceOf(s *corev1.Service) *wire.Service {
	in := &wire.Service{
		Metadata: metadataOf(&s.ObjectMeta),
		Spec: wire.ServiceSpec{
			ClusterIP: s.Spec.ClusterIP, ClusterIPs: s.Spec.ClusterIPs, Type: string(s.Spec.Type),
			ExternalIPs: s.Spec.ExternalIPs, SessionAffinity: string(s.Spec.SessionAffinity),
			LoadBalancerSourceRanges: s.Spec.LoadBalancerSourceRanges,
			ExternalTrafficPolicy:    string(s.Spec.ExternalTrafficPolicy),
			HealthCheckNodePort:      s.Spec.HealthCheckNodePort,
			IPFamilies:               textsOf(s.Spec.IPFamilies), IPFamilyPolicy: textOf(s.Spec.IPFamilyPolicy),
			AllocateLoadBalancerNodePorts: s.Spec.AllocateLoadBalancerNodePorts,
			InternalTrafficPolicy:         textOf(s.Spec.InternalTrafficPolicy),
		},
	}
	for _, p := range s.Spec.Ports {
		in.Spec.Ports = append(in.Spec.Ports, wire.ServicePort{
			Name: p.Name, Protocol: string(p.Protocol), Port: p.Port, NodePort: p.NodePort,
		})
	}
	if c := s.Spec.SessionAffinityConfig; c != nil {
		in.Spec.SessionAffinityConfig = &wire.AffinityConfig{}
		if c.ClientIP != nil {
			in.Spec.SessionAffinityConfig.ClientIP = &wire.ClientIPConfig{TimeoutSeconds: c.ClientIP.TimeoutSeconds}
		}
	}
	for _, x := range s.Status.LoadBalancer.Ingress {
		at := wire.Ingress{IP: x.IP, IPMode: textOf(x.IPMode)}
		in.Status.LoadBalancer.Ingress = append(in.Status.LoadBalancer.Ingress, at)
	}
	return in
}

// sliceOf is serviceOf for an EndpointSlice.
func sliceOf(s *discoveryv1.EndpointSlice) *wire.Slice {
	in := &wire.Slice{
		Metadata: metadataOf(&s.ObjectMeta), AddressType: string(s.AddressType),
		Endpoints: make([]wire.Endpoint, len(s.Endpoints)), Ports: make([]wire.EndpointPort, len(s.Ports)),
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		in.Endpoints[i] = wire.Endpoint{
			Addresses: e.Addresses, Conditions: wire.EndpointConditions(e.Conditions), NodeName: e.NodeName, Zone: e.Zone,
			Hints: hintsOf(e.Hints),
		}
	}
	for i, p := range s.Ports {
		in.Ports[i] = wire.EndpointPort{Name: p.Name, Protocol: textOf(p.Protocol), Port: p.Port}
	}
	return in
}

func metadataOf(m *metav1.ObjectMeta) wire.Metadata {
	out := wire.Metadata{Name: m.Name, Namespace: m.Namespace, Labels: m.Labels, Annotations: m.Annotations}
	if !m.CreationTimestamp.IsZero() {
		at := m.CreationTimestamp.UTC().Format(time.RFC3339)
		out.CreationTimestamp = &at
	}
	return out
}

func hintsOf(h *discoveryv1.EndpointHints) *wire.EndpointHints {
	if h == nil {
		return nil
	}
	out := &wire.EndpointHints{}
	for _, x := range h.ForZones {
		out.ForZones = append(out.ForZones, wire.Hint(x))
	}
	for _, x := range h.ForNodes {
		out.ForNodes = append(out.ForNodes, wire.Hint(x))
	}
	return out
}

func textOf[T ~string](of *T) *string {
	if of == nil {
		return nil
	}
	out := string(*of)
	return &out
}

func textsOf[T ~string](of []T) (out []string) {
	for _, x := range of {
		out = append(out, string(x))
	}
	return out
}
