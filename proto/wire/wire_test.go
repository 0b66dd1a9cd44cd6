// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestProtocolsWithPortsReadAndWriteTheSame(t *testing.T) {
	want := map[netv1.Protocol]workload.Protocol{
		netv1.Protocol_PROTOCOL_TCP: workload.TCP, netv1.Protocol_PROTOCOL_UDP: workload.UDP,
		netv1.Protocol_PROTOCOL_SCTP: workload.SCTP,
	}
	for number := range int32(300) {
		in := []*workloadv1.NamedPort{{Name: "p", Port: 65_535, Protocol: netv1.Protocol(number)}}
		got := NamedPortsOf(in)
		if p := want[netv1.Protocol(number)]; got[0].Protocol != p {
			t.Errorf("%s is read as protocol %d, want %d", netv1.Protocol(number), got[0].Protocol, p)
		}
		if out := NamedPorts(got); got[0].Protocol != 0 && out[0].GetProtocol() != in[0].GetProtocol() {
			t.Errorf("%s is read and written as %v", netv1.Protocol(number), out[0].GetProtocol())
		}
	}
}

func TestPortBeyondTheRangeIsNone(t *testing.T) {
	if got := NamedPortsOf([]*workloadv1.NamedPort{{Port: 65_536 + 80}}); got[0].Port != 0 {
		t.Errorf("port %d, want 0", got[0].Port)
	}
}

func TestAddressesHaveOneSpelling(t *testing.T) {
	for text, want := range map[string]string{
		"10.244.0.7": "10.244.0.7", "FD00:244:0::7": "fd00:244::7", "::": "::",
		"": "", "10.244.0": "", "10.244.0.7/32": "", "fe80::1%eth0": "", "::ffff:10.244.0.7": "", "010.0.0.1": "",
	} {
		a, err := AddressOf(text)
		if got := Address(a); got != want || (err == nil) != (want != "") {
			t.Errorf("%q is read as %q, %v, want %q", text, got, err, want)
		}
	}
}
