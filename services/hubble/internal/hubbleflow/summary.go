// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubbleflow

import (
	"fmt"
	"strings"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// summary returns the text in the last column of `hubble observe`.
func summary(f *datapathv1.Flow) string {
	if m := f.GetDns(); m != nil {
		return dnsSummary(m)
	}
	switch f.GetProtocol() {
	case netv1.Protocol_PROTOCOL_TCP:
		return "TCP Flags: " + strings.Join(flagNames(f.GetTcpFlags()), ", ")
	case netv1.Protocol_PROTOCOL_UDP:
		return "UDP"
	case netv1.Protocol_PROTOCOL_SCTP:
		return "SCTP"
	case netv1.Protocol_PROTOCOL_ICMP:
		return "ICMPv4 " + ICMPName(false, f.GetIcmp().GetType(), f.GetIcmp().GetCode())
	case netv1.Protocol_PROTOCOL_ICMPV6:
		return "ICMPv6 " + ICMPName(true, f.GetIcmp().GetType(), f.GetIcmp().GetCode())
	case netv1.Protocol_PROTOCOL_UNSPECIFIED:
		if f.GetEthertype() != etherIPv4 && f.GetEthertype() != etherIPv6 {
			return fmt.Sprintf("EtherType %#04x", f.GetEthertype())
		}
	}
	return fmt.Sprintf("IP protocol %d", f.GetProtocol())
}

// flagNames returns the TCP flags in the order in which Hubble prints them.
func flagNames(bits uint32) (names []string) {
	for _, x := range []struct {
		bit  uint32
		name string
	}{
		{0x02, "SYN"},
		{0x10, "ACK"},
		{0x04, "RST"},
		{0x01, "FIN"},
		{0x08, "PSH"},
		{0x20, "URG"},
		{0x40, "ECE"},
		{0x80, "CWR"},
	} {
		if bits&x.bit != 0 {
			names = append(names, x.name)
		}
	}
	return names
}

// Names of ICMP types, as Hubble's metrics and summaries spell them.
var (
	icmpv4Names = map[uint32]string{
		0: "EchoReply", 3: "DestinationUnreachable", 4: "SourceQuench", 5: "Redirect", 8: "EchoRequest",
		9: "RouterAdvertisement", 10: "RouterSolicitation", 11: "TimeExceeded", 12: "ParameterProblem",
		13: "TimestampRequest", 14: "TimestampReply", 15: "InfoRequest", 16: "InfoReply", 17: "AddressMaskRequest",
		18: "AddressMaskReply",
	}
	icmpv6Names = map[uint32]string{
		1: "DestinationUnreachable", 2: "PacketTooBig", 3: "TimeExceeded", 4: "ParameterProblem", 128: "EchoRequest",
		129: "EchoReply", 133: "RouterSolicitation", 134: "RouterAdvertisement", 135: "NeighborSolicitation",
		136: "NeighborAdvertisement", 137: "Redirect", 143: "MLDv2MulticastListenerReport",
	}
	icmpv4Unreachable = map[uint32]string{
		0: "Net", 1: "Host", 2: "Protocol", 3: "Port", 4: "FragmentationNeeded", 5: "SourceRoutingFailed",
		9: "NetAdminProhibited", 10: "HostAdminProhibited", 13: "CommAdminProhibited",
	}
	icmpv6Unreachable = map[uint32]string{
		0: "NoRouteToDst", 1: "AdminProhibited", 2: "BeyondScopeOfSourceAddress", 3: "AddressUnreachable",
		4: "PortUnreachable", 5: "SourceAddressFailedPolicy", 6: "RejectRouteToDst",
	}
)

// ICMPName returns the name of a type and code, such as "DestinationUnreachable(Port)".
func ICMPName(v6 bool, icmpType, code uint32) string {
	names, codes, unreachable := icmpv4Names, icmpv4Unreachable, uint32(3)
	if v6 {
		names, codes, unreachable = icmpv6Names, icmpv6Unreachable, 1
	}
	name, ok := names[icmpType]
	if !ok {
		return fmt.Sprintf("%d(%d)", icmpType, code)
	}
	if icmpType == unreachable {
		if c, ok := codes[code]; ok {
			return name + "(" + c + ")"
		}
	}
	if code != 0 {
		return fmt.Sprintf("%s(Code: %d)", name, code)
	}
	return name
}
