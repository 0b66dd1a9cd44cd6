// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// webService is a Service of an API server.
func webService() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports:      []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{
			Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}},
		}},
	}
}

// TestUnusablePartOfAServiceLeavesTheRest: each of these Services has an unsupported part. The API server accepts the
// Service, or did so in an earlier version, and kube-proxy serves its cluster IP. Sluice omits only the unsupported
// part, with a note.
func TestUnusablePartOfAServiceLeavesTheRest(t *testing.T) {
	ingress := func(text string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: text})
		}
	}
	external := func(text string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.ExternalIPs = []string{text} }
	}
	second := func(p corev1.ServicePort) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.Ports = append(s.Spec.Ports, p) }
	}
	wrong := "Wrong"
	for what, change := range map[string]func(*corev1.Service){
		"load balancer address of loopback (minikube tunnel)": ingress("127.0.0.1"),
		"load balancer address of a link":                     ingress("169.254.10.1"),
		"load balancer address in IPv6 form":                  ingress("::ffff:192.0.2.1"),
		"load balancer address with zeros":                    ingress("192.000.002.001"),
		"load balancer address with a zone":                   ingress("2001:db8::1%eth0"),
		"load balancer address that is a name":                ingress("example.com"),
		"a mode of a load balancer address": func(s *corev1.Service) {
			mode := corev1.LoadBalancerIPMode(wrong)
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.9", IPMode: &mode}}
		},
		"external address with zeros":   external("192.0.2.010"),
		"external address in IPv6 form": external("::ffff:192.0.2.1"),
		"external address of loopback":  external("::1"),
		"source range with zeros": func(s *corev1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"010.0.0.0/8"}
		},
		"source range in IPv6 form": func(s *corev1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"::ffff:10.0.0.0/104"}
		},
		"source ranges of another type": func(s *corev1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerSourceRanges = corev1.ServiceTypeNodePort, []string{"10.0.0.0/8"}
		},
		"annotation of Sluice with a slip": func(s *corev1.Service) {
			s.Annotations = map[string]string{"sluice.io/load-balancing-algorithm": "Table"}
		},
		"type": func(s *corev1.Service) { s.Spec.Type = corev1.ServiceType(wrong) },
		"second cluster IP with zeros": func(s *corev1.Service) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "10.96.000.008")
		},
		"second cluster IP of its family": func(s *corev1.Service) {
			s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "10.96.0.8")
		},
		"family": func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPFamily(wrong)} },
		"family policy": func(s *corev1.Service) {
			p := corev1.IPFamilyPolicy(wrong)
			s.Spec.IPFamilyPolicy = &p
		},
		"affinity": func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinity(wrong) },
		"time of affinity": func(s *corev1.Service) {
			seconds := int32(100_000)
			s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
				ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds},
			}
		},
		"internal traffic policy": func(s *corev1.Service) {
			p := corev1.ServiceInternalTrafficPolicy(wrong)
			s.Spec.InternalTrafficPolicy = &p
		},
		"external traffic policy": func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicy(wrong)
		},
		"health check port of policy Cluster": func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 32_000 },
		"health check port":                   func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 70_000 },
		"protocol of a second port":           second(corev1.ServicePort{Name: "b", Protocol: "QUIC", Port: 80}),
		"number of a second port":             second(corev1.ServicePort{Name: "b", Port: 70_000}),
		"second port that is given twice":     second(corev1.ServicePort{Name: "b", Port: 80}),
		"node port of a second port":          second(corev1.ServicePort{Name: "b", Port: 81, NodePort: 70_000}),
		"node port that is given twice":       second(corev1.ServicePort{Name: "b", Port: 81, NodePort: 30_080}),
	} {
		s := webService()
		change(s)
		o, err := manifest.OfService(serviceOf(s))
		if err != nil {
			t.Errorf("%s: the whole service is refused: %v", what, err)
			continue
		}
		if len(o.Notes) == 0 {
			t.Errorf("%s: no note", what)
		}
		node := compile.Node{Name: "n1"}
		cluster := frontend.Key{Addr: netip.MustParseAddr("10.96.0.7"), Port: 80, Protocol: frontend.TCP}
		if !slices.Contains(node.Keys(o.Service), cluster) {
			t.Errorf("%s: no frontend for the cluster IP: %v", what, node.Keys(o.Service))
		}
		for _, k := range node.Keys(o.Service) {
			if !k.Node && compile.CheckAddr(k.Addr) != nil || k.Port == 0 || k.Protocol == 0 {
				t.Errorf("%s: the frontend %s must not exist", what, k)
			}
		}
	}
}

// TestUnreadableSourceRangeOpensNothing: an unreadable source range allows no client. If it were dropped, a service
// without other ranges would allow every client.
func TestUnreadableSourceRangeOpensNothing(t *testing.T) {
	for text, want := range map[string]string{
		"010.0.0.0/8":                         "[0.0.0.0/32]",
		"::ffff:10.0.0.0/104":                 "[0.0.0.0/32]",
		"fe80::1%eth0/64":                     "[0.0.0.0/32]",
		"":                                    "[0.0.0.0/32]",
		"10.0.0.0/8 192.0.2.0/33":             "[10.0.0.0/8]",
		"2001:db8::/32 010.0.0.0/8":           "[0.0.0.0/32]", // no range has the family of the address
		"10.0.0.0/8 010.0.0.0/8 192.0.2.1/32": "[10.0.0.0/8 192.0.2.1/32]",
	} {
		s := webService()
		s.Spec.LoadBalancerSourceRanges = strings.Split(text, " ")
		o, err := manifest.OfService(serviceOf(s))
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		node := compile.Node{Name: "n1"}
		found := false
		for _, f := range node.Of(compile.View{Service: o.Service}, nil) {
			if f.Kind == frontend.LoadBalancer {
				found = true
				if got := fmt.Sprint(f.SourceRanges); got != want {
					t.Errorf("%q: %s, want %s", text, got, want)
				}
			}
		}
		if !found {
			t.Errorf("%q: the load balancer address has no frontend", text)
		}
	}
}

// TestServiceHasAsManyPortsAsItsObjectCanHold: the API server only limits the size of an object, so a slice may have
// 20,000 ports.
func TestServiceHasAsManyPortsAsItsObjectCanHold(t *testing.T) {
	const ports = 20_000
	s := webService()
	x := webSlice(nil, "10.244.0.5")
	for i := range int32(ports) {
		name, protocol, port := fmt.Sprint("p", i), corev1.ProtocolUDP, 10_000+i
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Protocol: protocol, Port: port})
		x.Ports = append(x.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &port})
	}
	web, err := manifest.OfService(serviceOf(s))
	if err != nil || len(web.Service.Ports) != 1+ports {
		t.Errorf("%d ports: %v", len(web.Service.Ports), err)
	}
	ends, err := manifest.OfSlice(sliceOf(x))
	if err != nil || len(ends.Slice.Ports) != ports || len(ends.Slice.Endpoints) != 1 {
		t.Errorf("%+v: %v", ends.Key, err)
	}
}

func webSlice(ports []discoveryv1.EndpointPort, addresses ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: "web-x", Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: "web"},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: ports,
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

// TestUnusablePartOfASliceLeavesTheRest: an unusable endpoint or port is left out, and the rest of the slice is used.
// Keeping the previous version of the slice instead would keep endpoints that may no longer exist.
func TestUnusablePartOfASliceLeavesTheRest(t *testing.T) {
	name, protocol, port := "http", corev1.ProtocolTCP, int32(8080)
	http := discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &port}
	other, upper, tooMuch, quic := "other", "Other_Name", int32(70_000), corev1.Protocol("QUIC")
	slice := func(addresses ...string) *discoveryv1.EndpointSlice {
		return webSlice([]discoveryv1.EndpointPort{http}, addresses...)
	}
	with := func(p discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
		return webSlice([]discoveryv1.EndpointPort{p, http}, "10.244.0.5")
	}
	hinted := slice("10.244.0.5")
	for i := range 9 {
		hinted.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: ""}}}
		hinted.Endpoints = append(hinted.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprint("10.244.1.", i)}})
	}
	many := slice("10.244.0.5")
	for i := range 1001 {
		many.Endpoints = append(many.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.245.%d.%03d", i/256, i%256)},
		})
	}
	for what, s := range map[string]*discoveryv1.EndpointSlice{
		"an address with zeros":              slice("10.244.0.5", "10.244.000.006"),
		"an address in IPv6 form":            slice("10.244.0.5", "::ffff:10.244.0.6"),
		"the broadcast address":              slice("255.255.255.255", "10.244.0.5"),
		"an address of loopback":             slice("127.0.0.1", "10.244.0.5"),
		"an address of a link":               slice("169.254.0.1", "10.244.0.5"),
		"an address of the other family":     slice("fd00::5", "10.244.0.5"),
		"an address that is a name":          slice("example.com", "10.244.0.5"),
		"no address":                         {},
		"a port that is none":                with(discoveryv1.EndpointPort{Name: &other, Port: &tooMuch}),
		"a protocol that is not supported":   with(discoveryv1.EndpointPort{Name: &other, Protocol: &quic, Port: &port}),
		"a port without a number":            with(discoveryv1.EndpointPort{Name: &other}),
		"a port with an unusual name":        with(discoveryv1.EndpointPort{Name: &upper, Port: &port}),
		"hints without names":                hinted,
		"more endpoints than a file's slice": many,
	} {
		if len(s.Endpoints) == 0 {
			s = slice("10.244.0.5")
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{})
		}
		o, err := manifest.OfSlice(sliceOf(s))
		if err != nil {
			t.Errorf("%s: the slice is refused: %v", what, err)
			continue
		}
		good := func(e service.Endpoint) bool { return e.Addr() == netip.MustParseAddr("10.244.0.5") }
		if !slices.ContainsFunc(o.Slice.Endpoints, good) {
			t.Errorf("%s: the endpoint is missing: %d endpoints", what, len(o.Slice.Endpoints))
		}
		if !slices.Contains(o.Slice.Ports, service.SlicePort{Name: "http", Protocol: service.TCP, Port: 8080}) {
			t.Errorf("%s: the port is missing: %+v", what, o.Slice.Ports)
		}
		if len(o.Notes) > 25 {
			t.Errorf("%s: %d notes", what, len(o.Notes))
		}
	}
	for _, of := range []discoveryv1.AddressType{"Wrong", ""} {
		s := slice("10.244.0.5")
		s.AddressType = of
		if o, err := manifest.OfSlice(sliceOf(s)); err != nil || len(o.Slice.Endpoints) != 0 {
			t.Errorf("address type %q: %+v, %v", of, o.Slice, err)
		}
	}
}

// TestObjectWithoutANameIsRefused: a missing name is the only reason to refuse an object of an API server.
func TestObjectWithoutANameIsRefused(t *testing.T) {
	s, x := webService(), webSlice(nil)
	s.Name, x.Namespace = "", ""
	if _, err := manifest.OfService(serviceOf(s)); err == nil {
		t.Error("a Service without a name is accepted")
	}
	if _, err := manifest.OfSlice(sliceOf(x)); err == nil {
		t.Error("a slice without a namespace is accepted")
	}
}
