// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wire writes addresses as text and the words of module model as messages
// of sluice.workload.v1, and reads them, for the servers and clients of all
// processes. It decides nothing.
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

// NewLabelSets is the name under which grpc.health.v1.Health of sluice-identity says
// whether a label set that no node has gets a number now. The service itself serves
// also while etcd is away: it answers known label sets.
const NewLabelSets = "new-label-sets"

// Owner is an owner as a message.
func Owner(o workload.Owner) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: o.ContainerID, InterfaceName: o.Interface}
}

// OwnerOf reads a message.
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

// PodOf reads a message; nil is no pod.
func PodOf(p *workloadv1.PodReference) workload.PodReference {
	return workload.PodReference{Namespace: p.GetNamespace(), Name: p.GetName(), UID: p.GetUid()}
}

// Address is an address as the API spells it; empty for the zero Addr.
func Address(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

// Addresses are addresses as the API spells them, in their order.
func Addresses(all []netip.Addr) []string {
	var out []string
	for _, a := range all {
		out = append(out, a.String())
	}
	return out
}

// AddressOf reads an address. It refuses what is none in the API: a zone, and
// an IPv4 address in IPv6 form.
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

// Labels are labels as messages, in their order.
func Labels(all []label.Label) []*workloadv1.Label {
	var out []*workloadv1.Label
	for _, l := range all {
		out = append(out, &workloadv1.Label{Source: l.Source, Key: l.Key, Value: l.Value})
	}
	return out
}

// LabelsOf reads messages, in their order.
func LabelsOf(all []*workloadv1.Label) []label.Label {
	var out []label.Label
	for _, l := range all {
		out = append(out, label.Label{Source: l.GetSource(), Key: l.GetKey(), Value: l.GetValue()})
	}
	return out
}

// NamedPorts are named ports as messages, in their order.
func NamedPorts(all []workload.NamedPort) []*workloadv1.NamedPort {
	var out []*workloadv1.NamedPort
	for _, p := range all {
		out = append(out, &workloadv1.NamedPort{Name: p.Name, Port: uint32(p.Port), Protocol: netv1.Protocol(p.Protocol)})
	}
	return out
}

// NamedPortsOf reads messages, in their order. What is no port, or no protocol
// with ports, is 0.
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
