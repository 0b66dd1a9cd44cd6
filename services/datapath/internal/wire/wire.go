// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wire writes the core's words for a workload as messages, and reads
// them, for the server and for the clients of other services. It decides
// nothing.
package wire

import (
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Owner is an owner as a message.
func Owner(o workload.Owner) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: o.ContainerID, InterfaceName: o.Interface}
}

// OwnerOf reads a message.
func OwnerOf(o *workloadv1.Owner) workload.Owner {
	return workload.Owner{ContainerID: o.GetContainerId(), Interface: o.GetInterfaceName()}
}

// Pod writes a reference to a pod; nil without one.
func Pod(p workload.PodReference) *workloadv1.PodReference {
	if p == (workload.PodReference{}) {
		return nil
	}
	return &workloadv1.PodReference{Namespace: p.Namespace, Name: p.Name, Uid: p.UID}
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
		out = append(out, &workloadv1.NamedPort{Name: p.Name, Port: uint32(p.Port), Protocol: protocol(p.Protocol)})
	}
	return out
}

// NamedPortsOf reads messages, in their order.
func NamedPortsOf(all []*workloadv1.NamedPort) []workload.NamedPort {
	var out []workload.NamedPort
	for _, p := range all {
		out = append(out, workload.NamedPort{Name: p.GetName(), Port: uint16(p.GetPort()), Protocol: number(p.GetProtocol())})
	}
	return out
}

func protocol(p workload.Protocol) workloadv1.Protocol {
	switch p {
	case workload.TCP:
		return workloadv1.Protocol_PROTOCOL_TCP
	case workload.UDP:
		return workloadv1.Protocol_PROTOCOL_UDP
	case workload.SCTP:
		return workloadv1.Protocol_PROTOCOL_SCTP
	}
	return workloadv1.Protocol_PROTOCOL_UNSPECIFIED
}

// number is 0 for what is no protocol with ports.
func number(p workloadv1.Protocol) workload.Protocol {
	switch p {
	case workloadv1.Protocol_PROTOCOL_TCP:
		return workload.TCP
	case workloadv1.Protocol_PROTOCOL_UDP:
		return workload.UDP
	case workloadv1.Protocol_PROTOCOL_SCTP:
		return workload.SCTP
	}
	return 0
}
