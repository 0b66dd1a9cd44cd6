// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelTheLastAddressThatAPodAskedCounts: ports of a pod send requests to several addresses of the host in
// any order, many times a second, and every answer comes from the address that its port has used last.
func TestKernelTheLastAddressThatAPodAskedCounts(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	publish(t, k, a)
	hosts := []netip.Addr{host4, netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")}
	source := netip.MustParseAddr("192.0.2.4") // of the route to the pod
	must(t, "SyncHostAddrs", k.Endpoints.SyncHostAddrs(append(hosts, source)))
	r := runner{k}
	random := rand.New(rand.NewPCG(1, 2))
	last := map[uint16]netip.Addr{}
	for range 600 {
		port, host := uint16(4000+random.IntN(3)), hosts[random.IntN(len(hosts))]
		if o := r.run(t, program.FromPod, from4(host, 17, udp(port, 53)), skbContext{}, 0); o.reason != event.ForwardedToHost {
			t.Fatalf("a request to %v: %v", host, o.reason)
		}
		last[port] = host
		for port, want := range last {
			o := r.run(t, program.ToPod, to4(source, 17, udp(53, port)), skbContext{}, 0)
			if got := netip.AddrFrom4([4]byte(o.out[26:30])); o.verdict != verdictOK || got != want {
				t.Fatalf("the answer to port %d comes from %v (%v), want %v", port, got, o.reason, want)
			}
		}
	}
}

// TestKernelFindsRecordsThatAreOlderThanTheirPorts: if sl_count is lost, the bits of ports are lost, but the
// records are not: the next start sets the bits again.
func TestKernelFindsRecordsThatAreOlderThanTheirPorts(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	k := openKernel(t, o)
	const zoneAnswers, zoneClaimed, zoneAsked = 2, 3, 2
	number := func(a netip.Addr) uint32 { b := a.As4(); return binary.NativeEndian.Uint32(b[:]) }
	for zone, port := range map[uint8][2]uint16{zoneAnswers: {8080, 1}, zoneClaimed: {1, 20001}} {
		key := &bpf.MapsSlXlKey4{
			Src: number(world4), Dst: number(host4), Sport: port[0], Dport: port[1], Proto: protoTCP, Zone: zone,
		}
		must(t, "store a translation", k.Pins.Map(bpf.MapsMapSlXl4).Put(key, &bpf.MapsSlXl{}))
	}
	asked := &bpf.MapsSlCtKey4{Hi: number(a.IPv4), Plo: 53, Phi: 4000, Proto: protoUDP, Zone: zoneAsked}
	must(t, "store what was asked", k.Pins.Map(bpf.MapsMapSlCt4).Put(asked, &bpf.MapsSlCt{}))
	must(t, "lose the counters", os.Remove(k.Pins.Pin(bpf.MapsMapSlCount)))
	counts := openKernel(t, o).Pins.Map(bpf.MapsMapSlCount)
	for kind, port := range map[count.Ports]uint32{count.Answered: 8080, count.Claimed: 20001, count.Asked: 53} {
		at := uint32(kind) + port/32
		var cells bpf.MapsSlCounters
		must(t, "read a cell", counts.Lookup(at/8, &cells))
		if got, want := cells.N[at%8], uint32(1)<<(port%32); got != want {
			t.Errorf("bits of the ports from %d on: %#x, want %#x", port/32*32, got, want)
		}
	}
}
