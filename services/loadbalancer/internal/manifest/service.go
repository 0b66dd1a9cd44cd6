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

	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Limits of the API server, which also apply to objects from files. The number of ports of a Service is limited only by
// the size of the object.
const (
	maxAffinity     = 86_400 // seconds
	defaultAffinity = 10_800
)

// name checks the metadata of an object.
func (d *decoder) name(m *wire.Metadata, check func(string) error) service.Name {
	out := service.Name{Namespace: m.Namespace, Name: m.Name}
	if out.Namespace == "" {
		out.Namespace = d.options.Namespace
	}
	if d.lenient { // the API server has checked the names
		if out.Name == "" {
			d.fail("metadata.name", "is missing")
		}
		if out.Namespace == "" {
			d.fail("metadata.namespace", "is missing")
		}
		return out
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

// created returns the time at which an object was created, in nanoseconds since 1970; 0 if unknown.
func (d *decoder) created(m *wire.Metadata) int64 {
	if m.CreationTimestamp == nil {
		return 0
	}
	at, err := time.Parse(time.RFC3339, *m.CreationTimestamp)
	switch {
	case err != nil:
		d.part("metadata.creationTimestamp", "%q is not an RFC 3339 time", shorten(*m.CreationTimestamp))
	case !at.IsZero():
		return at.UnixNano()
	}
	return 0
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
	out.Created = d.created(&in.Metadata)
	switch in.Spec.Type {
	case "", service.ClusterIP.String():
	case service.NodePort.String():
		out.Type = service.NodePort
	case service.LoadBalancer.String():
		out.Type = service.LoadBalancer
	case service.ExternalName.String():
		out.Type = service.ExternalName
	default:
		d.part("spec.type", "%q is not ClusterIP, NodePort, LoadBalancer or ExternalName", shorten(in.Spec.Type))
	}
	d.addresses(in, out)
	d.ports(in, out)
	d.behaviour(in, out)
	d.notesOf(in, out)
	return out
}

// parseAddress parses an address that a frontend or a backend may have.
func parseAddress(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil {
		return a, errors.New("is not an address")
	}
	return a, compile.CheckAddr(a)
}

func (d *decoder) address(path, text string) (netip.Addr, bool) {
	a, err := parseAddress(text)
	if err != nil {
		d.part(path, "%q: %v", shorten(text), err)
		return a, false
	}
	return a, true
}

func (d *decoder) addresses(in *wire.Service, out *service.Service) {
	ips := in.Spec.ClusterIPs
	if len(ips) == 0 && in.Spec.ClusterIP != "" {
		ips = []string{in.Spec.ClusterIP}
	} else if len(ips) > 0 && ips[0] != in.Spec.ClusterIP && in.Spec.ClusterIP != "" {
		d.odd("spec.clusterIPs[0]", "%q is not spec.clusterIP, %q", shorten(ips[0]), shorten(in.Spec.ClusterIP))
	}
	switch {
	case len(ips) == 1 && ips[0] == none:
		out.Headless = true
		if out.Type != service.ClusterIP {
			d.odd("spec.clusterIP", "None needs spec.type ClusterIP")
		}
	case out.Type == service.ExternalName && len(ips) > 0:
		d.part("spec.clusterIPs", "a service of type ExternalName has none")
	default:
		for i, text := range ips {
			path := fmt.Sprintf("spec.clusterIPs[%d]", i)
			a, ok := d.address(path, text)
			if !ok {
				continue
			}
			if slices.ContainsFunc(out.ClusterIPs, func(o netip.Addr) bool { return o.Is6() == a.Is6() }) {
				d.part(path, "is the second address of its family")
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
			continue // a host name is only for DNS
		case x.IPMode == nil, *x.IPMode == "VIP", *x.IPMode == "Proxy":
		default:
			d.part(fmt.Sprintf("status.loadBalancer.ingress[%d].ipMode", i), "%q is not VIP or Proxy", shorten(*x.IPMode))
			continue
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
			d.part(path, "%q is not a prefix", shorten(text))
		case p.Addr().Is4In6():
			d.part(path, "%q is an IPv4 prefix in IPv6 form", shorten(text))
		default:
			out.SourceRanges = append(out.SourceRanges, p.Masked())
		}
	}
	if len(in.Spec.LoadBalancerSourceRanges) > 0 && len(out.SourceRanges) == 0 && d.lenient {
		// No range could be parsed. An empty list would allow all clients, so use a range that matches no client.
		out.SourceRanges = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 32)}
		d.notef("spec.loadBalancerSourceRanges: no range can be read, so no client may use the load balancer addresses")
	}
	if len(in.Spec.LoadBalancerSourceRanges) > 0 && out.Type != service.LoadBalancer {
		d.part("spec.loadBalancerSourceRanges", "needs spec.type LoadBalancer")
	}
	slices.SortFunc(out.SourceRanges, netip.Prefix.Compare)
	out.SourceRanges = slices.Compact(out.SourceRanges)
}

// distinct parses a list of addresses and passes each distinct address to take.
func (d *decoder) distinct(path string, texts []string, take func(netip.Addr, int)) {
	seen := make(map[netip.Addr]bool, len(texts))
	for i, text := range texts {
		if a, ok := d.address(fmt.Sprintf("%s[%d]", path, i), text); ok && !seen[a] {
			seen[a] = true
			take(a, i)
		}
	}
}

// families sets the families that the service lists or, if it lists none, the families of its addresses.
func (d *decoder) families(in *wire.Service, out *service.Service) {
	for i, f := range in.Spec.IPFamilies {
		switch f {
		case "IPv4":
			out.IPv4 = true
		case "IPv6":
			out.IPv6 = true
		default:
			d.part(fmt.Sprintf("spec.ipFamilies[%d]", i), "%q is not IPv4 or IPv6", shorten(f))
		}
	}
	for _, a := range out.ClusterIPs {
		if len(in.Spec.IPFamilies) == 0 || d.lenient && !out.IPv4 && !out.IPv6 {
			out.IPv4, out.IPv6 = out.IPv4 || a.Is4(), out.IPv6 || a.Is6()
		} else if a.Is4() && !out.IPv4 || a.Is6() && !out.IPv6 {
			d.odd("spec.clusterIPs", "spec.ipFamilies does not contain the family of %s", a)
		}
	}
	if !out.IPv4 && !out.IPv6 {
		out.IPv4 = true
	}
	if p := in.Spec.IPFamilyPolicy; p != nil {
		switch *p {
		case "SingleStack", "PreferDualStack", "RequireDualStack":
		default:
			d.part("spec.ipFamilyPolicy", "%q is not SingleStack, PreferDualStack or RequireDualStack", shorten(*p))
		}
	}
}

func (d *decoder) ports(in *wire.Service, out *service.Service) {
	if len(in.Spec.Ports) == 0 && out.HasFrontends() {
		d.part("spec.ports", "is missing")
	}
	type socket struct {
		protocol service.Protocol
		port     uint16
	}
	names, ports, nodePorts := make(map[string]bool), make(map[socket]bool), make(map[socket]bool)
	out.Ports = make([]service.Port, 0, len(in.Spec.Ports))
	for i := range in.Spec.Ports {
		p := &in.Spec.Ports[i]
		path := func(field string) string { return fmt.Sprintf("spec.ports[%d].%s", i, field) }
		protocol, known := d.protocol(path, p.Protocol)
		port, inRange := d.port(path, "port", p.Port, 1)
		node, _ := d.port(path, "nodePort", p.NodePort, 0)
		if d.lenient && !(known && inRange) {
			continue // a service without a frontend is not reachable
		}
		if ports[socket{protocol, port}] {
			d.part(path("port"), "%d/%s is given twice", port, protocol)
			continue
		}
		d.portName(path, p.Name, len(in.Spec.Ports), names)
		switch {
		case node == 0:
		case nodePorts[socket{protocol, node}]:
			d.part(path("nodePort"), "%d/%s is given twice", node, protocol)
			node = 0
		case out.Type == service.ClusterIP || out.Type == service.ExternalName:
			d.part(path("nodePort"), "needs spec.type NodePort or LoadBalancer")
			node = 0
		}
		ports[socket{protocol, port}], nodePorts[socket{protocol, node}] = true, true
		out.Ports = append(out.Ports, service.Port{Name: p.Name, Protocol: protocol, Port: port, NodePort: node})
	}
}

// portName checks the name of a port. names are the names of the preceding ports.
func (d *decoder) portName(path func(string) string, name string, ports int, names map[string]bool) {
	switch {
	case name == "" && ports > 1:
		d.odd(path("name"), "is missing, and the service has several ports")
	case name != "" && checkLabel(name) != nil:
		d.odd(path("name"), "%q: %v", shorten(name), checkLabel(name))
	case names[name]:
		d.odd(path("name"), "%q is given twice", name)
	}
	names[name] = true
}

// protocol parses the protocol of a port; false if it is not supported.
func (d *decoder) protocol(path func(string) string, p string) (service.Protocol, bool) {
	if p == "" {
		return service.TCP, true
	}
	out := service.ProtocolOf(p)
	if out == 0 {
		d.part(path("protocol"), "%q is not TCP, UDP or SCTP", shorten(p))
	}
	return out, out != 0
}

// port checks the number of a port; false if it is invalid.
func (d *decoder) port(path func(string) string, field string, p, least int32) (uint16, bool) {
	if p < least || p > 65_535 {
		d.part(path(field), "%d is not between %d and 65535", p, least)
		return 0, false
	}
	return uint16(p), true
}

func (d *decoder) behaviour(in *wire.Service, out *service.Service) {
	switch in.Spec.SessionAffinity {
	case "", "None":
	case "ClientIP":
		out.AffinitySeconds = defaultAffinity
		if c := in.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			if t := *c.ClientIP.TimeoutSeconds; t < 1 || t > maxAffinity {
				d.part("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not between 1 and %d", t, maxAffinity)
			} else {
				out.AffinitySeconds = uint32(t)
			}
		}
	default:
		d.part("spec.sessionAffinity", "%q is not None or ClientIP", shorten(in.Spec.SessionAffinity))
	}
	if text, ok := in.Metadata.Annotations[annotationAlgorithm]; ok {
		out.Table = text == algorithmTable
		if !out.Table {
			d.part("metadata.annotations["+annotationAlgorithm+"]", "%q is not %s", shorten(text), algorithmTable)
		}
	}
	if p := in.Spec.InternalTrafficPolicy; p != nil {
		switch *p {
		case "Cluster":
		case "Local":
			out.InternalLocal = true
		default:
			d.part("spec.internalTrafficPolicy", "%q is not Cluster or Local", shorten(*p))
		}
	}
	switch in.Spec.ExternalTrafficPolicy {
	case "", "Cluster":
	case "Local":
		out.ExternalLocal = true
	default:
		d.part("spec.externalTrafficPolicy", "%q is not Cluster or Local", shorten(in.Spec.ExternalTrafficPolicy))
	}
	spec := func(field string) string { return "spec." + field }
	out.HealthCheckNodePort, _ = d.port(spec, "healthCheckNodePort", in.Spec.HealthCheckNodePort, 0)
	if out.HealthCheckNodePort != 0 && (out.Type != service.LoadBalancer || !out.ExternalLocal) {
		d.part("spec.healthCheckNodePort", "needs spec.type LoadBalancer and spec.externalTrafficPolicy Local")
		out.HealthCheckNodePort = 0
	}
}

// notesOf adds notes about settings that have no effect.
func (d *decoder) notesOf(in *wire.Service, out *service.Service) {
	switch {
	case out.OtherProxy != "":
		d.notef("metadata.labels[%s]: %q serves this service; it has no frontend here", labelOtherProxy, out.OtherProxy)
		return
	case out.Type == service.ExternalName:
		d.notef("spec.type: a service of type ExternalName is a name in DNS and has no frontend")
		return
	case out.Headless:
		return
	}
	if len(out.ClusterIPs) == 0 {
		d.notef("spec.clusterIPs: is empty; Sluice assigns no cluster IPs, so the service has none")
	}
	for i, p := range out.Ports {
		if p.NodePort == 0 && (out.Type == service.NodePort || out.Type == service.LoadBalancer && allocates(in)) {
			d.notef("spec.ports[%d].nodePort: is 0; Sluice assigns no node ports, so the port has none", i)
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
