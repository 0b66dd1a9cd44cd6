// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
)

func mapping(hostIP string, host uint16, p workload.Protocol, container uint16) PortMapping {
	m := PortMapping{HostPort: host, ContainerPort: container, Protocol: p}
	if hostIP != "" {
		m.HostIP = netip.MustParseAddr(hostIP)
	}
	return m
}

func TestMappingsThatLeadNowhereOrToTwoPlacesAreRefused(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")
	both, web := []netip.Addr{v4, v6}, mapping("", 80, workload.TCP, 1)
	for name, c := range map[string]struct {
		addrs []netip.Addr
		ms    []PortMapping
		want  string // expected part of the error; empty: no error
	}{
		"none":                      {both, nil, ""},
		"of all addresses":          {both, []PortMapping{mapping("", 80, workload.TCP, 8080)}, ""},
		"an address and all":        {both, []PortMapping{web, mapping("192.0.2.1", 80, 6, 2)}, ""},
		"of two addresses":          {both, []PortMapping{mapping("192.0.2.1", 80, 6, 1), mapping("::", 80, 6, 1)}, ""},
		"of two protocols":          {both, []PortMapping{web, mapping("", 80, 17, 1)}, ""},
		"of each family by itself":  {both, []PortMapping{mapping("0.0.0.0", 80, 6, 1), mapping("::", 80, 6, 2)}, ""},
		"SCTP at one port":          {both, []PortMapping{mapping("", 80, workload.SCTP, 80)}, ""},
		"no host port":              {both, []PortMapping{mapping("", 0, 6, 1)}, "port 0 is not valid"},
		"no container port":         {both, []PortMapping{mapping("", 1, 6, 0)}, "port 0 is not valid"},
		"no protocol":               {both, []PortMapping{mapping("", 1, 0, 1)}, "must be TCP, UDP or SCTP"},
		"ICMP":                      {both, []PortMapping{mapping("", 1, 1, 1)}, "must be TCP, UDP or SCTP"},
		"SCTP at two ports":         {both, []PortMapping{mapping("", 80, workload.SCTP, 81)}, "must be equal for SCTP"},
		"a port twice":              {both, []PortMapping{web, mapping("", 80, 6, 2)}, "are the same port"},
		"all and all of IPv4":       {both, []PortMapping{web, mapping("0.0.0.0", 80, 6, 2)}, "are the same port"},
		"another family":            {both[:1], []PortMapping{mapping("2001:db8::1", 80, 6, 1)}, "no address of that family"},
		"all of another family":     {both[:1], []PortMapping{mapping("::", 80, 6, 1)}, "no address of that family"},
		"of loopback addresses":     {both, []PortMapping{mapping("127.0.0.1", 80, 6, 1), mapping("::1", 80, 6, 1)}, ""},
		"a multicast address":       {both, []PortMapping{mapping("224.0.0.1", 80, 6, 1)}, "cannot connect"},
		"more than there may be":    {both, make([]PortMapping, maxMappings+1), "at most 256"},
		"an address with its scope": {both, []PortMapping{mapping("fe80::1%eth0", 80, 6, 1)}, "cannot connect"},
	} {
		s := Spec{
			Owner: workload.Owner{ContainerID: "c", Interface: "eth0"}, Netns: "/run/netns/c", Addrs: c.addrs,
			PortMappings: c.ms,
		}
		err := s.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "port_mappings: ") {
			t.Errorf("%s: %v names another field", name, err)
		}
	}
}

func TestEqualMappingsAreEqualContent(t *testing.T) {
	a := Spec{PortMappings: []PortMapping{
		mapping("::ffff:192.0.2.1", 80, 6, 8080), mapping("", 53, 17, 53), mapping("192.0.2.1", 80, 6, 8080),
	}}.Normalise()
	b := Spec{PortMappings: []PortMapping{mapping("", 53, 17, 53), mapping("192.0.2.1", 80, 6, 8080)}}.Normalise()
	if !a.SameContent(b) {
		t.Errorf("%v and %v are not the same", a.PortMappings, b.PortMappings)
	}
	b.PortMappings[0].ContainerPort++
	if a.SameContent(b) {
		t.Errorf("%v and %v are the same", a.PortMappings, b.PortMappings)
	}
	if a.SameContent(Spec{PortMappings: a.PortMappings, LeaveSockets: true}) {
		t.Error("requests with different LeaveSockets have the same content")
	}
}
