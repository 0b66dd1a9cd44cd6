// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestEveryProtocolOfTheAPIReadsAndWritesTheSame(t *testing.T) {
	var ports []workload.NamedPort
	for number, name := range workloadv1.Protocol_name {
		in := []*workloadv1.NamedPort{{Name: "p", Port: 65_535, Protocol: workloadv1.Protocol(number)}}
		got := NamedPortsOf(in)
		if known := number != int32(workloadv1.Protocol_PROTOCOL_UNSPECIFIED); (got[0].Protocol != 0) != known {
			t.Errorf("%s is read as protocol %d", name, got[0].Protocol)
		}
		if out := NamedPorts(got); out[0].GetProtocol() != in[0].GetProtocol() {
			t.Errorf("%s is read and written as %v", name, out[0].GetProtocol())
		}
		ports = append(ports, got...)
	}
	if again := NamedPortsOf(NamedPorts(ports)); !slices.Equal(again, ports) {
		t.Errorf("%v is written and read as %v", ports, again)
	}
}

func TestPortBeyondTheRangeIsNone(t *testing.T) {
	if got := NamedPortsOf([]*workloadv1.NamedPort{{Port: 65_536 + 80}}); got[0].Port != 0 {
		t.Errorf("port %d, want 0", got[0].Port)
	}
}
