// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/sluice-net/sluice/model/workload"
)

// PortMapping is a port of the node that leads to the container.
type PortMapping struct {
	HostPort, ContainerPort uint16
	Protocol                workload.Protocol
	// HostIP is the address of the node to which clients connect; zero for all addresses.
	HostIP netip.Addr
}

// portMapping is a mapping in the runtime's format.
type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// wantPorts checks the mappings. It ignores mappings with host port 0, because runtimes pass every port that a
// container declares.
func (c *Config) wantPorts(mappings []portMapping) error {
	for i, p := range mappings {
		bad := func(field, format string, args ...any) error {
			return Field(fmt.Sprintf("runtimeConfig.%s[%d].%s", capPortMappings, i, field), format, args...)
		}
		if p.HostPort == 0 {
			continue
		}
		if p.HostPort < 0 || p.HostPort > 65535 {
			return bad("hostPort", "%d is not in 1 to 65535", p.HostPort)
		}
		if p.ContainerPort < 1 || p.ContainerPort > 65535 {
			return bad("containerPort", "%d is not in 1 to 65535", p.ContainerPort)
		}
		m := PortMapping{HostPort: uint16(p.HostPort), ContainerPort: uint16(p.ContainerPort)}
		switch strings.ToLower(p.Protocol) {
		case "", "tcp":
			m.Protocol = workload.TCP
		case "udp":
			m.Protocol = workload.UDP
		case "sctp":
			m.Protocol = workload.SCTP
		default:
			return bad("protocol", "%q is not tcp, udp or sctp", clip(p.Protocol))
		}
		if m.Protocol == workload.SCTP && m.HostPort != m.ContainerPort {
			return bad("containerPort", "%d differs from hostPort %d, but SCTP ports cannot be translated",
				m.ContainerPort, m.HostPort)
		}
		if p.HostIP != "" {
			a, err := netip.ParseAddr(p.HostIP)
			if err != nil || a.Zone() != "" || a.IsMulticast() {
				return bad("hostIP", "%q is not the address of a node", clip(p.HostIP))
			}
			m.HostIP = a.Unmap()
		}
		c.PortMappings = append(c.PortMappings, m)
	}
	if len(c.PortMappings) > maxPortMappings {
		return Field("runtimeConfig."+capPortMappings, "%d ports; at most %d are allowed", len(c.PortMappings), maxPortMappings)
	}
	return nil
}
