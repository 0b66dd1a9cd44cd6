// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
)

func addrsOf(field string, texts []string) ([]netip.Addr, error) {
	var as []netip.Addr
	for i, text := range texts {
		a, err := wire.AddressOf(text)
		if err != nil {
			return nil, &endpoint.FieldError{Field: fmt.Sprintf("%s[%d]", field, i), Reason: err.Error()}
		}
		as = append(as, a)
	}
	return as, nil
}

func specOf(r *datapathv1.CreateEndpointRequest) (endpoint.Spec, error) {
	s := endpoint.Spec{
		Owner: wire.OwnerOf(r.GetOwner()), Manager: r.GetManager(), Network: r.GetNetwork(), Netns: r.GetNetworkNamespace(),
		Pod: wire.PodOf(r.GetPod()),
	}
	if s.Network != "" && s.Manager == "" {
		return s, &endpoint.FieldError{Field: "manager", Reason: "is not set, and network " + s.Network + " needs one"}
	}
	if r.GetMtu() > 65535 {
		return s, &endpoint.FieldError{Field: "mtu", Reason: fmt.Sprintf("%d is above 65535", r.GetMtu())}
	}
	s.MTU = uint16(r.GetMtu())
	var err error
	if s.Addrs, err = addrsOf("addresses", r.GetAddresses()); err != nil {
		return s, err
	}
	if s.PortMappings, err = mappingsOf(r.GetPortMappings()); err != nil {
		return s, err
	}
	s.LeaveSockets = r.GetLeaveSockets()
	s.Labels, s.Ports = wire.LabelsOf(r.GetLabels()), wire.NamedPortsOf(r.GetNamedPorts())
	if len(r.GetMac()) > 0 {
		mac, err := net.ParseMAC(r.GetMac())
		if err != nil || len(mac) != len(s.MAC) {
			return s, &endpoint.FieldError{Field: "mac", Reason: fmt.Sprintf("%q is not six bytes", r.GetMac())}
		}
		copy(s.MAC[:], mac)
		if s.MAC == (endpoint.MAC{}) {
			return s, &endpoint.FieldError{Field: "mac", Reason: "is all zero"}
		}
	}
	if t := r.GetLeaseExpireTime(); t != nil {
		if err := t.CheckValid(); err != nil {
			return s, &endpoint.FieldError{Field: "lease_expire_time", Reason: err.Error()}
		}
		s.LeaseExpiry = t.AsTime()
	}
	return s, nil
}

// mappingsOf converts port mappings. Invalid ports and protocols become 0, which validation rejects.
func mappingsOf(all []*datapathv1.PortMapping) (ms []endpoint.PortMapping, err error) {
	port := func(n uint32) uint16 {
		if n > 65535 {
			return 0
		}
		return uint16(n)
	}
	for i, p := range all {
		m := endpoint.PortMapping{HostPort: port(p.GetHostPort()), ContainerPort: port(p.GetContainerPort())}
		switch p.GetProtocol() {
		case netv1.Protocol_PROTOCOL_TCP, netv1.Protocol_PROTOCOL_UDP, netv1.Protocol_PROTOCOL_SCTP:
			m.Protocol = workload.Protocol(p.GetProtocol())
		}
		if p.GetHostIp() != "" {
			if m.HostIP, err = wire.AddressOf(p.GetHostIp()); err != nil {
				return nil, &endpoint.FieldError{Field: fmt.Sprintf("port_mappings[%d].host_ip", i), Reason: err.Error()}
			}
		}
		ms = append(ms, m)
	}
	return ms, nil
}

func protoMappings(all []endpoint.PortMapping) (ms []*datapathv1.PortMapping) {
	for _, m := range all {
		p := &datapathv1.PortMapping{
			HostPort: uint32(m.HostPort), ContainerPort: uint32(m.ContainerPort), Protocol: netv1.Protocol(m.Protocol),
		}
		if m.HostIP.IsValid() {
			p.HostIp = wire.Address(m.HostIP)
		}
		ms = append(ms, p)
	}
	return ms
}

func protoState(s endpoint.State) datapathv1.EndpointState {
	switch s {
	case endpoint.Restoring:
		return datapathv1.EndpointState_ENDPOINT_STATE_RESTORING
	case endpoint.WaitingForIdentity:
		return datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_IDENTITY
	case endpoint.WaitingForPolicy:
		return datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_POLICY
	case endpoint.Ready:
		return datapathv1.EndpointState_ENDPOINT_STATE_READY
	case endpoint.Disconnecting:
		return datapathv1.EndpointState_ENDPOINT_STATE_DISCONNECTING
	case endpoint.Damaged:
		return datapathv1.EndpointState_ENDPOINT_STATE_DAMAGED
	}
	return datapathv1.EndpointState_ENDPOINT_STATE_UNSPECIFIED
}

func protoEndpoint(e endpoint.Endpoint) *datapathv1.Endpoint {
	p := &datapathv1.Endpoint{
		Owner:            wire.Owner(e.Spec.Owner),
		Manager:          e.Spec.Manager,
		Network:          e.Spec.Network,
		EndpointIndex:    uint32(e.Slot),
		Slot:             uint32(e.Slot), //nolint:staticcheck // callers of the earlier name read it
		State:            protoState(e.State),
		Identity:         e.Identity.Number,
		Addresses:        wire.Addresses(e.Spec.Addrs),
		NetworkNamespace: e.Spec.Netns,
		Mtu:              uint32(e.Device.MTU),
	}
	p.SourceRouted = wire.Addresses(e.Device.SourceRouted)
	p.Pod = wire.Pod(e.Spec.Pod)
	p.Labels, p.NamedPorts = wire.Labels(e.Identity.Labels), wire.NamedPorts(e.Ports)
	p.PortMappings, p.LeaveSockets = protoMappings(e.Spec.PortMappings), e.Spec.LeaveSockets
	p.GivenLabels, p.LabelsFromPod = wire.Labels(e.Given.Labels), e.Identity.FromPod
	for _, a := range e.Spec.Addrs {
		gw := netdev.Gateway4
		if a.Is6() {
			gw = netdev.Gateway6
		}
		p.Gateways = append(p.Gateways, wire.Address(gw))
	}
	if e.Device.HostIndex != 0 {
		p.HostInterface = &datapathv1.Interface{Name: e.Device.HostName, Index: e.Device.HostIndex, Mac: e.Device.HostMAC.String()}
		p.ContainerInterface = &datapathv1.Interface{Name: e.Device.Name, Index: e.Device.Index, Mac: e.Device.MAC.String()}
	}
	if e.Policy.Epoch != 0 {
		p.Policy = &datapathv1.EndpointPolicy{
			Revision: e.Policy.Revision, EgressTable: uint32(e.Policy.EgressTable), IngressTable: uint32(e.Policy.IngressTable),
			Epoch: e.Policy.Epoch, Refusal: e.Policy.Refusal, Audit: e.Policy.Audit,
		}
	}
	if !e.Created.IsZero() {
		p.CreateTime = timestamppb.New(e.Created)
	}
	return p
}

func protoDifference(d endpoint.Difference) *datapathv1.Difference {
	return &datapathv1.Difference{
		Subject: d.Subject, Key: d.Key, Want: d.Want, Have: d.Have, Target: targetOf(d.Subject),
	}
}

// targetOf converts a subject of the core, which is text for people, to the kind of the difference's target.
func targetOf(subject string) *datapathv1.DifferenceTarget {
	what, inside := strings.CutPrefix(subject, "container ")
	return &datapathv1.DifferenceTarget{Kind: targetKinds[what], InContainer: inside}
}

var targetKinds = map[string]datapathv1.TargetKind{
	"sl_ep":                datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"sl_node":              datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"sl_ip":                datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"sl_proxy":             datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"policy-word":          datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"identity-word":        datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"ipcache":              datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"policy-table":         datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"service":              datapathv1.TargetKind_TARGET_KIND_MAP_ENTRY,
	"pin":                  datapathv1.TargetKind_TARGET_KIND_PIN,
	endpoint.SubjectFilter: datapathv1.TargetKind_TARGET_KIND_PROGRAM,
	endpoint.SubjectQdisc:  datapathv1.TargetKind_TARGET_KIND_PROGRAM,
	endpoint.SubjectTCX:    datapathv1.TargetKind_TARGET_KIND_PROGRAM,
	endpoint.SubjectDevice: datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"root qdisc":           datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device state":         datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device flags":         datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device learning":      datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device addrgenmode":   datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"tunnel device":        datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"proxy device":         datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device queue":         datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device qdisc":         datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device address":       datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device mtu":           datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"device group":         datapathv1.TargetKind_TARGET_KIND_DEVICE,
	"address":              datapathv1.TargetKind_TARGET_KIND_ADDRESS,
	"addresses":            datapathv1.TargetKind_TARGET_KIND_ADDRESS,
	"node address":         datapathv1.TargetKind_TARGET_KIND_ADDRESS,
	"route":                datapathv1.TargetKind_TARGET_KIND_ROUTE,
	"rule":                 datapathv1.TargetKind_TARGET_KIND_RULE,
	"neighbour":            datapathv1.TargetKind_TARGET_KIND_NEIGHBOUR,
	"firewall":             datapathv1.TargetKind_TARGET_KIND_FIREWALL,
	"sysctl":               datapathv1.TargetKind_TARGET_KIND_SYSCTL,
	"record":               datapathv1.TargetKind_TARGET_KIND_RECORD,
	"network namespace":    datapathv1.TargetKind_TARGET_KIND_NETWORK_NAMESPACE,
}

func direction(egress bool) netv1.Direction {
	if egress {
		return netv1.Direction_DIRECTION_EGRESS
	}
	return netv1.Direction_DIRECTION_INGRESS
}
