// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/conntrackview"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

func TestMain(m *testing.M) {
	if os.Getenv(confinedEnv) != "" {
		os.Exit(confinedMain())
	}
	kerneltest.Main(m)
}

// requireKernel skips a test on kernels that lack a feature. The kernel of CI is new enough for every test.
func requireKernel(t testing.TB, major, minor int, what string) {
	t.Helper()
	var gotMajor, gotMinor int
	if _, err := fmt.Sscanf(pin.Release(), "%d.%d", &gotMajor, &gotMinor); err != nil {
		t.Fatalf("kernel release %q: %v", pin.Release(), err)
	}
	if gotMajor < major || gotMajor == major && gotMinor < minor {
		t.Skipf("%s needs Linux %d.%d, this is %s", what, major, minor, pin.Release())
	}
}

var (
	podCIDR4 = netip.MustParsePrefix("10.244.0.0/24")
	podCIDR6 = netip.MustParsePrefix("fd00:244::/64")
)

// otherDevice is the index of a device that does not exist.
const otherDevice = 1 << 20

func testOptions(dir string) Options {
	return Options{
		Dir:             dir,
		PodCIDRs:        []netip.Prefix{podCIDR4, podCIDR6},
		TunnelPorts:     []uint16{4789, 8472},
		EventsPerSecond: 1 << 20,
	}
}

// openKernel opens a kernel whose programs are loaded when the test asks for them: the kernel needs most of the time of
// a test to verify them.
func openKernel(t testing.TB, o Options) *Kernel {
	t.Helper()
	if o.build.maps == nil {
		o.build.maps, o.build.programs = bpf.LoadMaps, program.Table()
		for i := range o.build.programs {
			o.build.programs[i].Lazy = o.build.programs[i].Devices != program.Sockets
		}
	}
	k, err := Open(t.Context(), o)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return k
}

// testEndpoint returns a valid endpoint with addresses that end in n.
func testEndpoint(ifindex uint32, n byte) endpointmap.Endpoint {
	a6 := netip.MustParseAddr("fd00:244::").As16()
	a6[15] = n
	return endpointmap.Endpoint{
		Ifindex:  ifindex,
		Identity: 256 + identity.Numeric(n),
		IPv4:     netip.AddrFrom4([4]byte{10, 244, 0, n}),
		IPv6:     netip.AddrFrom16(a6),
		MAC:      [6]byte{2, 0, 0, 0, 1, n},
		HostMAC:  [6]byte{2, 0, 0, 0, 2, n},
		MTU:      1500,
		Deliver:  endpointmap.DeliverPeer,
		Policy:   endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow},
	}
}

func publish(t testing.TB, k *Kernel, e endpointmap.Endpoint) endpointmap.Endpoint {
	t.Helper()
	s, err := k.Endpoints.Publish(t.Context(), e)
	if err != nil {
		t.Fatalf("Publish(%+v): %v", e, err)
	}
	got, err := k.Endpoints.Lookup(s)
	if err != nil {
		t.Fatalf("Lookup(%d): %v", s, err)
	}
	return got
}

// find returns the program with a name, and loads it if necessary.
func (k *Kernel) find(name string) *program.Program {
	p, err := k.Programs.Find(name)
	if err != nil {
		panic(err)
	}
	return p
}

// program is like find, for tests that run the program.
func (k *Kernel) program(name string) *ebpf.Program { return k.find(name).Prog }

// explainer returns an Explainer of the maps.
func (k *Kernel) explainer() *explain.Explainer {
	return explain.New(explain.Maps{
		Endpoints: k.Endpoints, Addresses: k.Addresses, Nodes: k.Nodes, Tables: k.Tables, Connections: k.Connections,
		Replicas: k.Replicas, Services: k.Services, Worlds: k.Worlds(), TunnelPorts: k.TunnelPorts(),
	})
}

// trackedView returns a description of the tracked connections.
func (k *Kernel) trackedView() *conntrackview.Table {
	return &conntrackview.Table{
		Connections: k.Connections, Endpoints: k.Endpoints, Addresses: k.Addresses, Services: k.Services,
	}
}

// addrOwners returns all local addresses with their endpoint IDs, from the maps.
func addrOwners(k *Kernel) (map[netip.Addr]endpointmap.ID, error) {
	owners := map[netip.Addr]endpointmap.ID{}
	var slot uint32
	var a4 [4]byte
	it := k.Pins.Map(bpf.MapsMapSlIp4).Iterate()
	for it.Next(&a4, &slot) {
		owners[netip.AddrFrom4(a4)] = endpointmap.ID(slot)
	}
	if err := it.Err(); err != nil {
		return nil, err
	}
	var a16 [16]byte
	it = k.Pins.Map(bpf.MapsMapSlIp6).Iterate()
	for it.Next(&a16, &slot) {
		owners[netip.AddrFrom16(a16)] = endpointmap.ID(slot)
	}
	return owners, it.Err()
}

func tuple(proto uint8, initiator, responder string) conntrack.Tuple {
	return conntrack.Tuple{Initiator: netip.MustParseAddrPort(initiator), Responder: netip.MustParseAddrPort(responder), Protocol: proto}
}

// addrPort returns the n-th address and port after ap.
func addrPort(ap netip.AddrPort, n int) netip.AddrPort {
	b := ap.Addr().As4()
	b[1] ^= byte(n >> 16)
	return netip.AddrPortFrom(netip.AddrFrom4(b), uint16(n))
}
