// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// BenchmarkUplink measures one run of the uplink's programs, the median and the shortest, including the
// overhead of BPF_PROG_TEST_RUN; the first figure is the overhead alone. A redirected packet no longer goes to
// the service, so each run gets its own packet.
func BenchmarkUplink(b *testing.B) {
	o := testOptions(kerneltest.NewBPFFS(b))
	o.Services = true
	k := openKernel(b, o)
	pod := publish(b, k, a)
	must(b, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
	var local nodemap.Local
	for i, addr := range []netip.Addr{host4, host6} {
		place, err := k.Endpoints.OwnPlace(addr)
		must(b, "find the place of "+addr.String(), err)
		local.Sources[2+i] = place
	}
	must(b, "SetLocal", k.Nodes.SetLocal(local))
	const nodePort = 30080
	putBackend(b, k, 1, netip.AddrPortFrom(pod.IPv4, 8080), beActive, 1)
	putFront(b, k, 1, bpf.MapsSlFront{List: putMembers(b, k, 1, 1), Port: nodePort})
	putFront(b, k, 2, bpf.MapsSlFront{List: putMembers(b, k, 1, 1), Port: nodePort})
	at := netip.AddrPortFrom(netip.IPv4Unspecified(), nodePort)
	for _, proto := range []uint8{protoTCP, protoUDP} {
		putFronts(b, k, at, proto, feNode, bpf.MapsSlFe{Inside: 1, Outside: 2})
	}
	packet := func(src, dst netip.Addr, proto byte, payload []byte) []byte {
		// for the device of a test run, which has no Ethernet address
		return frame([6]byte{}, a.MAC, etherIPv4, ip4Header{src: src, dst: dst, proto: proto}.with(payload))
	}
	toNode := func(proto byte, payload []byte) []byte { return packet(world4, host4, proto, payload) }
	for _, c := range []struct {
		name  string
		prog  *ebpf.Program
		in    []byte
		first bool // each run is another connection
		led   bool // redirected to the backend
	}{
		{name: "nothing", prog: passOnly(b), in: toNode(6, tcp(1, 22, flagACK))},
		{
			name: "from_uplink/node port, TCP", prog: k.program(program.FromUplink),
			in: toNode(6, tcp(1, nodePort, flagACK)), led: true,
		},
		{
			name: "from_uplink/node port, UDP", prog: k.program(program.FromUplink),
			in: toNode(17, udp(1, nodePort, make([]byte, 64)...)), led: true,
		},
		{
			name: "from_uplink/node port, first of a connection", prog: k.program(program.FromUplink),
			in: toNode(6, tcp(1, nodePort, flagSYN)), first: true, led: true,
		},
		{
			name: "from_uplink/node port, first datagram", prog: k.program(program.FromUplink),
			in: toNode(17, udp(1, nodePort, make([]byte, 64)...)), first: true, led: true,
		},
		{name: "from_uplink/no service", prog: k.program(program.FromUplink), in: toNode(6, tcp(1, 22, flagACK))},
		{
			name: "to_uplink/of the host", prog: k.program(program.ToUplink),
			in: packet(host4, world4, 6, tcp(22, 1, flagACK)),
		},
	} {
		b.Run(c.name, func(b *testing.B) {
			in := slices.Clone(c.in)
			if c.led && !c.first && in[23] == 6 {
				begin := slices.Clone(in)
				begin[34+13] = flagSYN
				_, err := c.prog.Run(&ebpf.RunOptions{Data: begin, DataOut: make([]byte, len(in)+256)})
				must(b, "begin the connection", err)
			}
			opts := &ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256)}
			_, err := c.prog.Run(opts)
			must(b, "run", err)
			if led := [4]byte(opts.DataOut[30:34]) != [4]byte(in[30:34]); led != c.led {
				b.Fatalf("led to a backend: %v, want %v", led, c.led)
			}
			times := make([]time.Duration, 0, b.N)
			for i := range b.N {
				if c.first { // the checksums are not verified
					in[29], in[34], in[35] = byte(i>>15), byte(i>>8)|128, byte(i)
				}
				_, took, err := c.prog.Benchmark(in, 1, nil)
				must(b, "run", err)
				times = append(times, took)
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "ns-p50/packet")
			b.ReportMetric(float64(times[0].Nanoseconds()), "ns-min/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}
