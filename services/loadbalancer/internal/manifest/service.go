// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Limits of the API server, which an object from a file has to keep too.
const (
	maxPorts        = 1000
	maxAffinity     = 86_400 // seconds
	defaultAffinity = 10_800
)

// name checks the metadata of an object.
func (d *decoder) name(m *wire.Metadata, check func(string) error) service.Name {
	out := service.Name{Namespace: m.Namespace, Name: m.Name}
	if out.Namespace == "" {
		out.Namespace = d.options.Namespace
	}
	if out.Name == "" {
		d.fail("metadata.name", "is missing")
	} else if err := check(out.Name); err != nil {
		d.fail("metadata.name", "%q: %v", shorten(out.Name), err)
	}
	if err := checkLabel(out.Namespace); err != nil {
		d.fail("metadata.namespace", "%q: %v", shorten(out.Namespace), err)
	}
	return out
}

func (d *decoder) service(text []byte) *service.Service {
	var in wire.Service
	if !d.strict(text, &in) {
		return nil
	}
	return d.serviceOf(&in)
}

func (d *decoder) serviceOf(in *wire.Service) *service.Service {
	out := &service.Service{Name: d.name(&in.Metadata, checkLabel), OtherProxy: in.Metadata.Labels[labelOtherProxy]}
	if text := in.Metadata.CreationTimestamp; text != nil {
		at, err := time.Parse(time.RFC3339, *text)
		if err != nil {
			d.fail("metadata.creationTimestamp", "%q is no time of RFC 3339", shorten(*text))
		} else if !at.IsZero() {
			out.Created = at.UnixNano()
		}
	}
	switch in.Spec.Type {
	case "", service.ClusterIP.String():
	case service.NodePort.String():
		out.Type = service.NodePort
	case service.LoadBalancer.String():
		out.Type = service.LoadBalancer
	case service.ExternalName.String():
		out.Type = service.ExternalName
	default:
		d.fail("spec.type", "%q is not ClusterIP, NodePort, LoadBalancer or ExternalName", shorten(in.Spec.Type))
	}
	d.addresses(in, out)
	d.ports(in, out)
	d.behaviour(in, out)
	d.notesOf(in, out)
	return out
}

// parseAddress reads an address that a frontend or a backend may have.
func parseAddress(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil {
		return a, errors.New("is no address")
	}
	return a, frontend.CheckAddr(a)
}

func (d *decoder) address(path, text string) (netip.Addr, bool) {
	a, err := parseAddress(text)
	if err != nil {
		d.fail(path, "%q: %v", shorten(text), err)
		return a, false
	}
	return a, true
}

func (d *decoder) addresses(in *wire.Service, out *service.Service) {
	ips := in.Spec.ClusterIPs
	if len(ips) == 0 && in.Spec.ClusterIP != "" {
		ips = []string{in.Spec.ClusterIP}
	} else if len(ips) > 0 && ips[0] != in.Spec.ClusterIP && in.Spec.ClusterIP != "" {
		d.fail("spec.clusterIPs[0]", "%q is not spec.clusterIP, %q", shorten(ips[0]), shorten(in.Spec.ClusterIP))
	}
	switch {
	case len(ips) == 1 && ips[0] == none:
		out.Headless = true
		if out.Type != service.ClusterIP {
			d.fail("spec.clusterIP", "None needs spec.type ClusterIP")
		}
	case out.Type == service.ExternalName && len(ips) > 0:
		d.fail("spec.clusterIPs", "a service of type ExternalName has none")
	default:
		for i, text := range ips {
			path := fmt.Sprintf("spec.clusterIPs[%d]", i)
			a, ok := d.address(path, text)
			if !ok {
				continue
			}
			if slices.ContainsFunc(out.ClusterIPs, func(o netip.Addr) bool { return o.Is6() == a.Is6() }) {
				d.fail(path, "is the second address of its family")
				continue
			}
			out.ClusterIPs = append(out.ClusterIPs, a)
		}
	}
	d.families(in, out)
	d.distinct("spec.externalIPs", in.Spec.ExternalIPs, func(a netip.Addr, _ int) {
		out.ExternalIPs = append(out.ExternalIPs, a)
	})
	ingress := in.Status.LoadBalancer.Ingress
	var texts []string
	var at []int
	for i, x := range ingress {
		switch {
		case x.IP == "":
			continue // a name, which is for DNS
		case x.IPMode == nil, *x.IPMode == "VIP", *x.IPMode == "Proxy":
		default:
			d.fail(fmt.Sprintf("status.loadBalancer.ingress[%d].ipMode", i), "%q is not VIP or Proxy", shorten(*x.IPMode))
		}
		texts, at = append(texts, x.IP), append(at, i)
	}
	d.distinct("status.loadBalancer.ingress", texts, func(a netip.Addr, i int) {
		mode := ingress[at[i]].IPMode
		out.Ingress = append(out.Ingress, service.Ingress{Addr: a, Proxy: mode != nil && *mode == "Proxy"})
	})
	for i, text := range in.Spec.LoadBalancerSourceRanges {
		path := fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i)
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		switch {
		case err != nil:
			d.fail(path, "%q is no prefix", shorten(text))
		case p.Addr().Is4In6():
			d.fail(path, "%q is an IPv4 prefix in IPv6 form", shorten(text))
		default:
			out.SourceRanges = append(out.SourceRanges, p.Masked())
		}
	}
	if len(in.Spec.LoadBalancerSourceRanges) > 0 && out.Type != service.LoadBalancer {
		d.fail("spec.loadBalancerSourceRanges", "needs spec.type LoadBalancer")
	}
	slices.SortFunc(out.SourceRanges, netip.Prefix.Compare)
	out.SourceRanges = slices.Compact(out.SourceRanges)
}

// distinct reads a list of addresses and passes each once.
func (d *decoder) distinct(path string, texts []string, take func(netip.Addr, int)) {
	seen := make(map[netip.Addr]bool, len(texts))
	for i, text := range texts {
		if a, ok := d.address(fmt.Sprintf("%s[%d]", path, i), text); ok && !seen[a] {
			seen[a] = true
			take(a, i)
		}
	}
}

// families are those that the service names, or those of its addresses.
func (d *decoder) families(in *wire.Service, out *service.Service) {
	for i, f := range in.Spec.IPFamilies {
		switch f {
		case "IPv4":
			out.IPv4 = true
		case "IPv6":
			out.IPv6 = true
		default:
			d.fail(fmt.Sprintf("spec.ipFamilies[%d]", i), "%q is not IPv4 or IPv6", shorten(f))
		}
	}
	for _, a := range out.ClusterIPs {
		if len(in.Spec.IPFamilies) == 0 {
			out.IPv4, out.IPv6 = out.IPv4 || a.Is4(), out.IPv6 || a.Is6()
		} else if a.Is4() && !out.IPv4 || a.Is6() && !out.IPv6 {
			d.fail("spec.clusterIPs", "%s is of a family that spec.ipFamilies does not name", a)
		}
	}
	if !out.IPv4 && !out.IPv6 {
		out.IPv4 = true
	}
	if p := in.Spec.IPFamilyPolicy; p != nil {
		switch *p {
		case "SingleStack", "PreferDualStack", "RequireDualStack":
		default:
			d.fail("spec.ipFamilyPolicy", "%q is not SingleStack, PreferDualStack or RequireDualStack", shorten(*p))
		}
	}
}

func (d *decoder) ports(in *wire.Service, out *service.Service) {
	if len(in.Spec.Ports) == 0 && out.HasFrontends() {
		d.fail("spec.ports", "is missing")
	}
	if len(in.Spec.Ports) > maxPorts {
		d.fail("spec.ports", "has %d ports, more than %d", len(in.Spec.Ports), maxPorts)
		return
	}
	type socket struct {
		protocol service.Protocol
		port     uint16
	}
	names, ports, nodePorts := make(map[string]bool), make(map[socket]bool), make(map[socket]bool)
	for i, p := range in.Spec.Ports {
		path := fmt.Sprintf("spec.ports[%d]", i)
		protocol := d.protocol(path+".protocol", p.Protocol)
		port := d.port(path+".port", p.Port, 1)
		node := d.port(path+".nodePort", p.NodePort, 0)
		switch {
		case p.Name == "" && len(in.Spec.Ports) > 1:
			d.fail(path+".name", "is missing, and the service has several ports")
		case p.Name != "" && checkLabel(p.Name) != nil:
			d.fail(path+".name", "%q: %v", shorten(p.Name), checkLabel(p.Name))
		case names[p.Name]:
			d.fail(path+".name", "%q is given twice", p.Name)
		case ports[socket{protocol, port}]:
			d.fail(path+".port", "%d/%s is given twice", port, protocol)
		case node != 0 && nodePorts[socket{protocol, node}]:
			d.fail(path+".nodePort", "%d/%s is given twice", node, protocol)
		case node != 0 && (out.Type == service.ClusterIP || out.Type == service.ExternalName):
			d.fail(path+".nodePort", "needs spec.type NodePort or LoadBalancer")
		}
		names[p.Name], ports[socket{protocol, port}], nodePorts[socket{protocol, node}] = true, true, true
		out.Ports = append(out.Ports, service.Port{Name: p.Name, Protocol: protocol, Port: port, NodePort: node})
	}
}

func (d *decoder) protocol(path, p string) service.Protocol {
	if p == "" {
		return service.TCP
	}
	out := service.ProtocolOf(p)
	if out == 0 {
		d.fail(path, "%q is not TCP, UDP or SCTP", shorten(p))
	}
	return out
}

func (d *decoder) port(path string, p, least int32) uint16 {
	if p < least || p > 65_535 {
		d.fail(path, "%d is not between %d and 65535", p, least)
		return 0
	}
	return uint16(p)
}

func (d *decoder) behaviour(in *wire.Service, out *service.Service) {
	switch in.Spec.SessionAffinity {
	case "", "None":
	case "ClientIP":
		out.AffinitySeconds = defaultAffinity
		if c := in.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			if t := *c.ClientIP.TimeoutSeconds; t < 1 || t > maxAffinity {
				d.fail("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not between 1 and %d", t, maxAffinity)
			} else {
				out.AffinitySeconds = uint32(t)
			}
		}
	default:
		d.fail("spec.sessionAffinity", "%q is not None or ClientIP", shorten(in.Spec.SessionAffinity))
	}
	if text, ok := in.Metadata.Annotations[annotationAlgorithm]; ok {
		out.Table = text == algorithmTable
		if !out.Table {
			d.fail("metadata.annotations["+annotationAlgorithm+"]", "%q is not %s", shorten(text), algorithmTable)
		}
	}
	if p := in.Spec.InternalTrafficPolicy; p != nil {
		switch *p {
		case "Cluster":
		case "Local":
			out.InternalLocal = true
		default:
			d.fail("spec.internalTrafficPolicy", "%q is not Cluster or Local", shorten(*p))
		}
	}
	switch in.Spec.ExternalTrafficPolicy {
	case "", "Cluster":
	case "Local":
		out.ExternalLocal = true
	default:
		d.fail("spec.externalTrafficPolicy", "%q is not Cluster or Local", shorten(in.Spec.ExternalTrafficPolicy))
	}
	out.HealthCheckNodePort = d.port("spec.healthCheckNodePort", in.Spec.HealthCheckNodePort, 0)
	if out.HealthCheckNodePort != 0 && (out.Type != service.LoadBalancer || !out.ExternalLocal) {
		d.fail("spec.healthCheckNodePort", "needs spec.type LoadBalancer and spec.externalTrafficPolicy Local")
	}
}

// notesOf notes what the author may take for having an effect.
func (d *decoder) notesOf(in *wire.Service, out *service.Service) {
	switch {
	case out.OtherProxy != "":
		d.notef("metadata.labels[%s]: %q serves this service, which has no frontend here", labelOtherProxy, out.OtherProxy)
		return
	case out.Type == service.ExternalName:
		d.notef("spec.type: a service of type ExternalName is a name in DNS and has no frontend")
		return
	case out.Headless:
		return
	}
	if len(out.ClusterIPs) == 0 {
		d.notef("spec.clusterIPs: is empty, and Sluice gives out no cluster IPs: the service has none")
	}
	for i, p := range out.Ports {
		if p.NodePort == 0 && (out.Type == service.NodePort || out.Type == service.LoadBalancer && allocates(in)) {
			d.notef("spec.ports[%d].nodePort: is 0, and Sluice gives out no node ports: the port has none", i)
		}
	}
	if in.Metadata.Annotations[annotationRanges] != "" {
		d.notef("metadata.annotations[%s]: has no effect; write spec.loadBalancerSourceRanges", annotationRanges)
	}
	if out.ExternalLocal && out.Type == service.ClusterIP && len(out.ExternalIPs) == 0 {
		d.notef("spec.externalTrafficPolicy: has no effect on a service without external addresses")
	}
}

func allocates(in *wire.Service) bool {
	return in.Spec.AllocateLoadBalancerNodePorts == nil || *in.Spec.AllocateLoadBalancerNodePorts
}
