// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// withPort returns a request with one port mapping.
func withPort(m *datapathv1.PortMapping) *datapathv1.CreateEndpointRequest {
	return &datapathv1.CreateEndpointRequest{
		Owner: &workloadv1.Owner{ContainerId: "c", InterfaceName: "eth0"}, NetworkNamespace: "/run/netns/c",
		Addresses: []string{"10.0.0.2", "fd00::2"}, PortMappings: []*datapathv1.PortMapping{m}, LeaveSockets: true,
	}
}

func TestHostPortsAndSocketsAreAnsweredAsTheyWereAskedFor(t *testing.T) {
	r := withPort(&datapathv1.PortMapping{HostPort: 53, ContainerPort: 5353, Protocol: netv1.Protocol_PROTOCOL_UDP})
	r.PortMappings = append(r.PortMappings, &datapathv1.PortMapping{
		HostPort: 65535, ContainerPort: 1, Protocol: netv1.Protocol_PROTOCOL_TCP, HostIp: "2001:db8::1",
	})
	s, err := specOf(r)
	if err == nil {
		s = s.Normalise()
		err = s.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	e := protoEndpoint(endpoint.Endpoint{Spec: s})
	if !e.GetLeaveSockets() || len(e.GetPortMappings()) != 2 {
		t.Fatalf("the endpoint is %v", e)
	}
	for i, want := range r.GetPortMappings() {
		if !proto.Equal(e.GetPortMappings()[i], want) {
			t.Errorf("port mapping %v, want %v", e.GetPortMappings()[i], want)
		}
	}
}

// TestWrongPortMappingsAreRefused tests validation without the rules of the proto files.
func TestWrongPortMappingsAreRefused(t *testing.T) {
	tcp := netv1.Protocol_PROTOCOL_TCP
	for field, m := range map[string]*datapathv1.PortMapping{
		"port_mappings: 0/tcp": {HostPort: 65536 + 80, ContainerPort: 80, Protocol: tcp},
		"port_mappings: 80/":   {HostPort: 80, ContainerPort: 65536, Protocol: tcp},
		"port_mappings: 81/":   {HostPort: 81, ContainerPort: 81, Protocol: netv1.Protocol_PROTOCOL_ICMP},
		"port_mappings: 82/":   {HostPort: 82, ContainerPort: 82, Protocol: 256 + 6},

		"port_mappings[0].host_ip": {HostPort: 80, ContainerPort: 80, Protocol: tcp, HostIp: "node"},
	} {
		s, err := specOf(withPort(m))
		if err == nil {
			err = s.Normalise().Validate()
		}
		var fe *endpoint.FieldError
		if !errors.As(err, &fe) || !strings.HasPrefix(err.Error(), field) {
			t.Errorf("%v: %v, want an error about %s", m, err, field)
		}
	}
}
