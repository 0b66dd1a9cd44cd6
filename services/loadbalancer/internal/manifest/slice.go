// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"strings"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Limits of the API server.
const (
	maxEndpoints  = 1000
	maxSlicePorts = 20_000
	maxAddresses  = 100
	maxHints      = 8
)

func (d *decoder) slice(text []byte) *service.Slice {
	var in wire.Slice
	if !d.strict(text, &in) {
		return nil
	}
	return d.sliceOf(&in)
}

func (d *decoder) sliceOf(in *wire.Slice) *service.Slice {
	out := &service.Slice{Name: d.name(&in.Metadata, checkSubdomain), Service: in.Metadata.Labels[labelServiceName]}
	out.Created = d.created(&in.Metadata)
	if out.Service == "" {
		d.notef("metadata.labels[%s]: is missing: the slice belongs to no service", labelServiceName)
	} else if err := checkLabel(out.Service); err != nil {
		d.odd("metadata.labels["+labelServiceName+"]", "%q: %v", shorten(out.Service), err)
	}
	switch in.AddressType {
	case "IPv4":
	case "IPv6":
		out.IPv6 = true
	case "FQDN":
		d.notef("addressType: FQDN is not supported: the slice has no endpoints here")
		return out
	default:
		d.part("addressType", "%q is not IPv4, IPv6 or FQDN", shorten(in.AddressType))
		return out
	}
	d.slicePorts(in.Ports, out)
	if len(in.Endpoints) > maxEndpoints && !d.lenient {
		d.fail("endpoints", "has %d endpoints, more than %d", len(in.Endpoints), maxEndpoints)
		return out
	}
	more := 0
	out.Endpoints = make([]service.Endpoint, 0, len(in.Endpoints))
	for i := range in.Endpoints {
		e := &in.Endpoints[i]
		if len(e.Addresses) > 1 {
			more++
		}
		d.endpoint(i, e, out)
	}
	if more > 0 {
		d.notef("endpoints: %d endpoints have several addresses, of which only the first is used", more)
	}
	return out
}

func (d *decoder) slicePorts(in []wire.EndpointPort, out *service.Slice) {
	if len(in) > maxSlicePorts && !d.lenient {
		d.fail("ports", "has %d ports, more than %d", len(in), maxSlicePorts)
		return
	}
	if len(in) == 0 {
		d.notef("ports: is empty, so the endpoints are not backends")
	}
	names := make(map[string]bool, len(in))
	out.Ports = make([]service.SlicePort, 0, len(in))
	for i, p := range in {
		path := func(field string) string { return fmt.Sprintf("ports[%d].%s", i, field) }
		var name string
		if p.Name != nil {
			name = *p.Name
		}
		if name != "" || names[name] {
			d.portName(path, name, 1, names)
		}
		names[name] = true
		var protocol string
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		number, known := d.protocol(path, protocol)
		if p.Port == nil {
			d.notef("%s: is missing: ports that mean all ports are not supported, so the port is ignored", path("port"))
			continue
		}
		port, inRange := d.port(path, "port", *p.Port, 1)
		if d.lenient && !(known && inRange) {
			continue
		}
		out.Ports = append(out.Ports, service.SlicePort{Name: name, Protocol: number, Port: port})
	}
}

func (d *decoder) endpoint(i int, e *wire.Endpoint, out *service.Slice) {
	path := func(below string, of ...any) string { // formatted only if there is a mistake
		return fmt.Sprintf("endpoints[%d].", i) + fmt.Sprintf(below, of...)
	}
	if n := len(e.Addresses); n == 0 || n > maxAddresses && !d.lenient {
		d.part(path("addresses"), "has %d addresses, must have 1 to %d", n, maxAddresses)
		return
	}
	addresses := e.Addresses
	if d.lenient {
		addresses = addresses[:1] // all further addresses have no meaning
	}
	for j, text := range addresses {
		a, err := parseAddress(text)
		switch {
		case err != nil:
			d.part(path("addresses[%d]", j), "%q: %v", shorten(text), err)
		case a.Is6() != out.IPv6:
			d.part(path("addresses[%d]", j), "%s is not of the family of addressType", a)
		case j == 0:
			out.Endpoints = append(out.Endpoints, service.NewEndpoint(a, d.about(path, e)))
		}
	}
}

// state returns the conditions of an endpoint, with the defaults of the API: a missing condition ready or serving
// counts as true.
func state(c wire.EndpointConditions) service.State {
	var s service.State
	if c.Ready == nil || *c.Ready {
		s |= service.Ready
	}
	if c.Serving == nil || *c.Serving {
		s |= service.Serving
	}
	if c.Terminating != nil && *c.Terminating {
		s |= service.Terminating
	}
	return s
}

func (d *decoder) about(path func(string, ...any) string, e *wire.Endpoint) service.About {
	w := service.About{State: state(e.Conditions)}
	if e.NodeName != nil {
		w.Node = *e.NodeName
	}
	if e.Zone != nil {
		w.Zone = *e.Zone
	}
	if e.Hints != nil {
		var nodes, zones []string
		for _, x := range e.Hints.ForNodes {
			nodes = append(nodes, x.Name)
		}
		for _, x := range e.Hints.ForZones {
			zones = append(zones, x.Name)
		}
		w.ForNodes, w.ForZones = d.hints(path("hints.forNodes"), nodes), d.hints(path("hints.forZones"), zones)
	}
	return w
}

func (d *decoder) hints(path string, names []string) string {
	if len(names) > maxHints && !d.lenient {
		d.fail(path, "has %d names, more than %d", len(names), maxHints)
		return ""
	}
	usable := names[:0]
	for i, name := range names {
		if name == "" || strings.Contains(name, ",") || len(name) > 253 {
			d.part(fmt.Sprintf("%s[%d].name", path, i), "%q is not a name of 1 to 253 characters without commas", shorten(name))
			continue
		}
		usable = append(usable, name)
	}
	return service.JoinHints(usable)
}
