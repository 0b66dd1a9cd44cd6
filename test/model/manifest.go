// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"bytes"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

// ServiceNamespace is the namespace of all Services.
const ServiceNamespace = "test"

// protocols of every Service.
var protocols = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}

// documents marshals objects to a YAML stream.
func documents(objects []any) ([]byte, error) {
	var b bytes.Buffer
	for _, o := range objects {
		text, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write %T: %w", o, err)
		}
		b.WriteString("---\n")
		b.Write(text)
	}
	return b.Bytes(), nil
}

// YAML returns the policies as manifests.
func (p *Policies) YAML() ([]byte, error) {
	var all []any
	for i := range p.Network {
		all = append(all, &p.Network[i])
	}
	for i := range p.Cilium {
		all = append(all, &p.Cilium[i])
	}
	return documents(all)
}

// ServicesYAML returns the Services and their EndpointSlices as manifests.
func (w *World) ServicesYAML() ([]byte, error) {
	var all []any
	for _, s := range w.Services {
		all = append(all, s.object())
		for _, f := range s.Families {
			all = append(all, s.slice(f))
		}
	}
	return documents(all)
}

func (s *Service) object() *corev1.Service {
	families := map[Family]corev1.IPFamily{IPv4: corev1.IPv4Protocol, IPv6: corev1.IPv6Protocol}
	policy := corev1.IPFamilyPolicySingleStack
	if len(s.Families) == 2 {
		policy = corev1.IPFamilyPolicyRequireDualStack
	}
	o := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: ServiceNamespace},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &policy, LoadBalancerSourceRanges: s.SourceRanges,
			Selector: map[string]string{"service": s.Name},
		},
	}
	if s.Local {
		o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	} else {
		o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	for _, f := range s.Families {
		o.Spec.IPFamilies = append(o.Spec.IPFamilies, families[f])
		o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, s.ClusterIPs()[f].String())
		o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, s.Externals()[f].String())
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: s.Balancers()[f].String()})
	}
	o.Spec.ClusterIP = o.Spec.ClusterIPs[0]
	for _, p := range protocols {
		o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{
			Name: portName(p), Protocol: p, Port: int32(s.Port), TargetPort: intstr.FromInt32(int32(s.Target)),
			NodePort: int32(s.NodePort()),
		})
	}
	return o
}

func portName(p corev1.Protocol) string { return strings.ToLower(string(p)) }

// SliceName is the name of the EndpointSlice of a family.
func (s *Service) SliceName(f Family) string {
	return s.Name + [...]string{"-ipv4", "-ipv6"}[f]
}

func (s *Service) slice(f Family) *discoveryv1.EndpointSlice {
	o := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Name: s.SliceName(f), Namespace: ServiceNamespace, Labels: map[string]string{discoveryv1.LabelServiceName: s.Name},
		},
		AddressType: discoveryv1.AddressType(f.String()),
		Endpoints:   []discoveryv1.Endpoint{},
	}
	for _, p := range protocols {
		name, port, proto := portName(p), int32(s.Target), p
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port, Protocol: &proto})
	}
	add := func(pods []*Pod, ready bool) {
		for _, p := range pods {
			o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{p.Addresses[f].String()}, NodeName: &p.Node.Name,
				Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			})
		}
	}
	add(s.Backends, true)
	add(s.NotServing, false)
	return o
}
