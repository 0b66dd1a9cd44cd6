// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wire converts addresses to and from text, and the types of module model to and from
// messages of sluice.workload.v1, for the servers and clients of all processes.
package wire

import (
	"fmt"
	"math"
	"net/netip"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// NewLabelSets is a service name in the gRPC health check of sluice-identity. Its status is SERVING
// while new label sets can get numbers. Without etcd it is NOT_SERVING, and the overall status stays
// SERVING, because known label sets still resolve.
const NewLabelSets = "new-label-sets"

// Owner converts an owner to a message.
func Owner(o workload.Owner) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: o.ContainerID, InterfaceName: o.Interface}
}

// OwnerOf converts a message to an owner.
func OwnerOf(o *workloadv1.Owner) workload.Owner {
	return workload.Owner{ContainerID: o.GetContainerId(), Interface: o.GetInterfaceName()}
}

// Pod writes a reference to a pod; nil without a name.
func Pod(p workload.PodReference) *workloadv1.PodReference {
	if p.Name == "" {
		return nil
	}
	return &workloadv1.PodReference{Namespace: p.Namespace, Name: p.Name, Uid: p.UID}
}

// PodOf converts a message; nil means no pod.
func PodOf(p *workloadv1.PodReference) workload.PodReference {
	return workload.PodReference{Namespace: p.GetNamespace(), Name: p.GetName(), UID: p.GetUid()}
}

// Address returns an address in the API's spelling; empty for the zero Addr.
func Address(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// Addresses returns addresses in the API's spelling, in order.
func Addresses(all []netip.Addr) []string {
	var out []string
	for _, a := range all {
		out = append(out, a.String())
	}
	return out
}

// AddressOf parses an address. It refuses zones, and IPv4 addresses in IPv6 form.
func AddressOf(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("%q is no address", text)
	case a.Zone() != "":
		return netip.Addr{}, fmt.Errorf("%q has a zone", text)
	case a.Is4In6():
		return netip.Addr{}, fmt.Errorf("%q is an IPv4 address in IPv6 form; write %s", text, a.Unmap())
	}
	return a, nil
}

// Labels converts labels to messages, in order.
func Labels(all []label.Label) []*workloadv1.Label {
	var out []*workloadv1.Label
	for _, l := range all {
		out = append(out, &workloadv1.Label{Source: l.Source, Key: l.Key, Value: l.Value})
	}
	return out
}

// LabelsOf converts messages to labels, in order.
func LabelsOf(all []*workloadv1.Label) []label.Label {
	var out []label.Label
	for _, l := range all {
		out = append(out, label.Label{Source: l.GetSource(), Key: l.GetKey(), Value: l.GetValue()})
	}
	return out
}

// NamedPorts converts named ports to messages, in order.
func NamedPorts(all []workload.NamedPort) []*workloadv1.NamedPort {
	var out []*workloadv1.NamedPort
	for _, p := range all {
		out = append(out, &workloadv1.NamedPort{Name: p.Name, Port: uint32(p.Port), Protocol: netv1.Protocol(p.Protocol)})
	}
	return out
}

// NamedPortsOf converts messages to named ports, in order. An invalid port, or a protocol without
// ports, becomes 0.
func NamedPortsOf(all []*workloadv1.NamedPort) []workload.NamedPort {
	var out []workload.NamedPort
	for _, m := range all {
		p := workload.NamedPort{Name: m.GetName()}
		if m.GetPort() <= math.MaxUint16 {
			p.Port = uint16(m.GetPort())
		}
		switch m.GetProtocol() {
		case netv1.Protocol_PROTOCOL_TCP, netv1.Protocol_PROTOCOL_UDP, netv1.Protocol_PROTOCOL_SCTP:
			p.Protocol = workload.Protocol(m.GetProtocol())
		}
		out = append(out, p)
	}
	return out
}
