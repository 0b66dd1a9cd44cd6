// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelConnectionsAreCountedByResponder: by address, port and protocol, in both families, without
// connections to unwanted addresses, connections that are not open, and connections of a removed endpoint.
func TestKernelConnectionsAreCountedByResponder(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	e := publish(t, k, testEndpoint(7, 9))
	const established = conntrack.SeenReply | conntrack.Established
	now := conntrack.MonotonicSeconds()
	put := func(proto uint8, initiator, responder string, flags conntrack.Flags, to endpointmap.ID) {
		t.Helper()
		k.put(t, conntrack.Connection{
			Tuple: tuple(proto, initiator, responder), LastSeen: now, Flags: flags,
			From: conntrack.End{Slot: endpointmap.NoID}, To: conntrack.End{Slot: to},
		})
	}
	put(6, "192.0.2.1:1000", "10.244.0.9:80", established, e.Slot)
	put(6, "192.0.2.1:1001", "10.244.0.9:80", established, e.Slot)
	put(6, "192.0.2.1:1002", "10.244.0.9:80", 0, e.Slot)                           // opening
	put(6, "192.0.2.1:1003", "10.244.0.9:80", established|conntrack.Reset, e.Slot) // closed
	put(17, "192.0.2.1:1000", "10.244.0.9:80", conntrack.SeenReply, e.Slot)
	put(6, "192.0.2.1:1000", "10.244.0.9:81", established, e.Slot)           // not wanted
	put(6, "10.244.0.9:80", "192.0.2.1:2000", established, endpointmap.NoID) // begun by the pod
	put(6, "192.0.2.1:1000", "10.244.0.10:80", established, e.Slot+1)        // endpoint removed
	put(6, "192.0.2.1:1000", "10.244.1.1:80", established, endpointmap.NoID) // on another node
	put(6, "[2001:db8::1]:1000", "[fd00:244::9]:80", established, e.Slot)    // the other family
	put(6, "[2001:db8::1]:1000", "[fd00:244:1::1]:80", 0, endpointmap.NoID)  // opening
	put(132, "[2001:db8::1]:1000", "[fd00:244::9]:80", established, e.Slot)  // another protocol
	put(17, "[2001:db8::1]:1000", "[fd00:244:1::2]:80", 0, endpointmap.NoID) // unanswered
	put(17, "[2001:db8::1]:1000", "[fd00:244:1::2]:81", 0, endpointmap.NoID) // not wanted
	wanted := func(r conntrack.Responder) bool { return r.Port() == 80 }
	got, err := k.Connections.CountByResponder(t.Context(), conntrack.DefaultTimeouts(), wanted)
	if err != nil {
		t.Fatal(err)
	}
	count := func(proto uint8, responder string, n int) conntrack.Count {
		r := conntrack.Responder{AddrPort: netip.MustParseAddrPort(responder), Protocol: proto}
		return conntrack.Count{Responder: r, Connections: n}
	}
	want := []conntrack.Count{
		count(6, "10.244.0.9:80", 2), count(17, "10.244.0.9:80", 1), count(6, "10.244.1.1:80", 1),
		count(6, "[fd00:244::9]:80", 1), count(132, "[fd00:244::9]:80", 1), count(17, "[fd00:244:1::2]:80", 1),
	}
	if !slices.Equal(got, want) {
		t.Errorf("counted\n%v, want\n%v", got, want)
	}
}
