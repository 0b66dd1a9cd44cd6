// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/workload"
)

// maxMappings is the largest number of port mappings of an endpoint.
const maxMappings = 256

// PortMapping forwards a port of the node to a port of the container.
type PortMapping struct {
	HostPort      uint16            `json:"hostPort"`
	ContainerPort uint16            `json:"containerPort"`
	Protocol      workload.Protocol `json:"protocol"`
	// HostIP is the node address that clients connect to. An unspecified address (0.0.0.0, ::)
	// means every node address of its family; zero means every node address of the families that
	// the container has.
	HostIP netip.Addr `json:"hostIp,omitzero"`
}

// String formats the mapping: "8080/tcp to port 80", "192.0.2.1:8080/tcp to port 80".
func (m PortMapping) String() string {
	asked := strconv.Itoa(int(m.HostPort))
	if m.HostIP.IsValid() {
		asked = netip.AddrPortFrom(m.HostIP, m.HostPort).String()
	}
	return fmt.Sprintf("%s/%s to port %d", asked, strings.ToLower(m.Protocol.String()), m.ContainerPort)
}

// Compare orders by the node's address, port and protocol, then by the container's port.
func (m PortMapping) Compare(n PortMapping) int {
	return cmp.Or(m.HostIP.Compare(n.HostIP), cmp.Compare(m.HostPort, n.HostPort),
		cmp.Compare(m.Protocol, n.Protocol), cmp.Compare(m.ContainerPort, n.ContainerPort))
}

// Asked returns which node address the mapping forwards to an address of the container; unspecified means every node
// address. It returns false if the mapping is of the other address family.
func (m PortMapping) Asked(container netip.Addr) (netip.Addr, bool) {
	switch {
	case m.HostIP.IsValid():
		return m.HostIP, m.HostIP.Is4() == container.Is4()
	case container.Is4():
		return netip.IPv4Unspecified(), true
	}
	return netip.IPv6Unspecified(), true
}

// validateMappings rejects mappings without a target and two mappings of one port of the node.
func validateMappings(field string, ms []PortMapping, addrs []netip.Addr) error {
	type asked struct {
		netip.AddrPort
		workload.Protocol
	}
	if len(ms) > maxMappings {
		return invalid(field, "%d mappings, at most %d", len(ms), maxMappings)
	}
	taken := map[asked]PortMapping{}
	for _, m := range ms {
		switch {
		case m.HostPort == 0 || m.ContainerPort == 0:
			return invalid(field, "%v: port 0 is not valid", m)
		case m.Protocol != workload.TCP && m.Protocol != workload.UDP && m.Protocol != workload.SCTP:
			return invalid(field, "%v: the protocol must be TCP, UDP or SCTP", m)
		case m.Protocol == workload.SCTP && m.HostPort != m.ContainerPort:
			return invalid(field,
				"%v: the ports must be equal for SCTP, because its checksum cannot be adjusted to another port", m)
		case m.HostIP.Is4In6() || m.HostIP.Zone() != "" || m.HostIP.IsMulticast():
			return invalid(field, "%v: clients cannot connect to this address", m)
		}
		leads := false
		for _, a := range addrs {
			from, ok := m.Asked(a)
			if !ok {
				continue
			}
			leads = true
			k := asked{netip.AddrPortFrom(from, m.HostPort), m.Protocol}
			if other, ok := taken[k]; ok {
				return invalid(field, "%v and %v are the same port of the node", other, m)
			}
			taken[k] = m
		}
		if !leads {
			return invalid(field, "%v: the container has no address of that family", m)
		}
	}
	return nil
}
