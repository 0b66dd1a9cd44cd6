// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// passOnly returns an empty program, which measures the overhead of the harness.
func passOnly(b *testing.B) *ebpf.Program {
	b.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	must(b, "load a program that passes", err)
	b.Cleanup(func() { p.Close() })
	return p
}

// faster returns the smaller of two times; 0 means none. Other load on the machine only adds time.
func faster(best, d time.Duration) time.Duration {
	if best == 0 {
		return d
	}
	return min(best, d)
}

// BenchmarkProgram measures one run for a packet of an established connection, including the overhead of
// BPF_PROG_TEST_RUN; the first figure is the overhead alone.
func BenchmarkProgram(b *testing.B) {
	k := openKernel(b, testOptions(kerneltest.NewBPFFS(b)))
	publish(b, k, a)
	must(b, "SyncHostAddrs", k.Endpoints.SyncHostAddrs([]netip.Addr{host4, host6}))
	mirror := testEndpoint(1002, 20)
	mirror.MAC, mirror.HostMAC = a.HostMAC, a.MAC
	publish(b, k, mirror)
	for _, c := range []struct {
		name string
		prog *ebpf.Program
		in   []byte
	}{
		{"nothing", passOnly(b), from4(mirror.IPv4, 6, tcp(1, 2, flagACK))},
		{"pod to pod, IPv4 TCP", k.program(program.FromPod), from4(mirror.IPv4, 6, tcp(1, 2, flagACK))},
		{"pod to pod, IPv4 UDP", k.program(program.FromPod), from4(mirror.IPv4, 17, udp(1, 2))},
		{"pod to pod, IPv6 TCP", k.program(program.FromPod), from6(mirror.IPv6, 6, tcp(1, 2, flagACK))},
		{"pod to the world, IPv4 TCP", k.program(program.FromPod), from4(world4, 6, tcp(1, 2, flagACK))},
		{"host to pod, IPv4 TCP", k.program(program.ToPod), to4(host4, 6, tcp(1, 2, flagACK))},
		{"host to pod, IPv6 TCP", k.program(program.ToPod), to6(host6, 6, tcp(1, 2, flagACK))},
	} {
		b.Run(c.name, func(b *testing.B) {
			var best time.Duration
			const repeat = 200 // less than the hop limit of a packet
			in := c.in
			if in[12] == 0x86 {
				in[14+7] = 255
			} else {
				in[14+8] = 255
			}
			if l4 := 14 + map[bool]int{false: 20, true: 40}[in[12] == 0x86]; strings.HasSuffix(c.name, "TCP") {
				begin := slices.Clone(in)
				begin[l4+13] = flagSYN
				_, err := c.prog.Run(&ebpf.RunOptions{Data: begin, DataOut: make([]byte, len(in)+256)})
				must(b, "begin the connection", err)
			}
			for range b.N {
				_, d, err := c.prog.Benchmark(in, repeat, nil)
				if err != nil {
					b.Fatal(err)
				}
				best = faster(best, d)
			}
			b.ReportMetric(float64(best.Nanoseconds()), "ns/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkConnection measures one run for the first packet of a connection: it inserts one entry, which is
// deleted before the next run.
func BenchmarkConnection(b *testing.B) {
	for _, events := range []bool{false, true} {
		o := testOptions(kerneltest.NewBPFFS(b))
		o.EventsPerSecond, o.NoConnectionEvents = 64, !events
		k := openKernel(b, o)
		one := publish(b, k, a)
		mirror := testEndpoint(1002, 20)
		mirror.MAC, mirror.HostMAC = a.HostMAC, a.MAC
		other := publish(b, k, mirror)
		for _, addresses := range []uint16{0, 4} {
			table := nodetable.ID(40 + addresses)
			r := everyRule(table, addresses)
			r.header.DefClass[0], r.header.DefClass[6] = 1, 1
			r.put(b, k)
			for _, c := range []struct {
				name            string
				egress, ingress nodetable.ID
				in              []byte
			}{
				{"fixed tables", nodetable.Allow, nodetable.Allow, from4(mirror.IPv4, 6, tcp(1, 16, flagSYN))},
				{"tables", table, table, from4(mirror.IPv4, 6, tcp(1, 16, flagSYN))},
				{"tables, IPv6", table, table, from6(mirror.IPv6, 6, tcp(1, 16, flagSYN))},
			} {
				b.Run(fmt.Sprintf("%s/addresses=%v/events=%v", c.name, addresses != 0, events), func(b *testing.B) {
					for _, s := range []endpointmap.ID{one.Slot, other.Slot} {
						setPolicy(b, k, s, endpointmap.Policy{Egress: c.egress, Ingress: c.ingress})
					}
					in := c.in
					if in[12] == 0x86 {
						in[14+7] = 255
					} else {
						in[14+8] = 255
					}
					of := conntrack.Tuple{Initiator: netip.AddrPortFrom(a.IPv4, 1), Responder: netip.AddrPortFrom(mirror.IPv4, 16), Protocol: 6}
					if in[12] == 0x86 {
						of.Initiator, of.Responder = netip.AddrPortFrom(a.IPv6, 1), netip.AddrPortFrom(mirror.IPv6, 16)
					}
					connections, key := k.Connections.Map(of)
					var best time.Duration
					for range b.N {
						verdict, d, err := k.program(program.FromPod).Benchmark(in, 1, nil)
						if err != nil || verdict != verdictRedirect {
							b.Fatal(verdict, err)
						}
						best = faster(best, d)
						must(b, "delete the connection", connections.Delete(key))
					}
					b.ReportMetric(float64(best.Nanoseconds()), "ns/packet")
					b.ReportMetric(0, "ns/op")
				})
			}
		}
	}
}

// BenchmarkCollect measures the CPU time of a collector pass per connection: with connections that all stay, and with
// connections that are all removed.
func BenchmarkCollect(b *testing.B) {
	const n = 60_000
	for _, c := range []struct {
		name string
		idle uint32
	}{{"stays", 1}, {"removed", 3600}} {
		b.Run(c.name, func(b *testing.B) {
			o := testOptions(kerneltest.NewBPFFS(b))
			k := openKernel(b, o)
			e := publish(b, k, a)
			col, cl := newCollector(b, k, conntrack.CollectorOptions{})
			const closed = conntrack.SeenReply | conntrack.Established | conntrack.Reset | conntrack.CloseReported
			cs := remotes(e, 6, 0, n, closed, cl.now.Load()-c.idle)
			var best, total time.Duration
			for range b.N {
				k.putAll(b, cs)
				begin := processTime(b)
				p := collect(b, col)
				took := processTime(b) - begin
				if removed := c.idle > 1; removed != (p.Expired == n) || removed != (p.Live[0] == 0) {
					b.Fatalf("%+v", p)
				}
				best, total = faster(best, took), total+took
			}
			b.ReportMetric(float64(best.Nanoseconds())/n, "ns/connection")
			b.ReportMetric(float64(total.Nanoseconds())/float64(b.N)/n, "mean-ns/connection")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// processTime returns the processor time that the process has used.
func processTime(b *testing.B) time.Duration {
	var used unix.Timespec
	must(b, "read the processor time", unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &used))
	return time.Duration(used.Nano())
}

// BenchmarkPublish measures publishing and unpublishing one endpoint.
func BenchmarkPublish(b *testing.B) {
	k := openKernel(b, testOptions(kerneltest.NewBPFFS(b)))
	for b.Loop() {
		s, err := k.Endpoints.Publish(b.Context(), a)
		if err == nil {
			err = k.Endpoints.Unpublish(s)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSetPolicy measures changing one endpoint's tables.
func BenchmarkSetPolicy(b *testing.B) {
	k := openKernel(b, testOptions(kerneltest.NewBPFFS(b)))
	e := publish(b, k, a)
	for b.Loop() {
		if _, err := k.Endpoints.SetPolicy(e.Slot, nodetable.Allow, nodetable.Allow); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOpen measures a restart that adopts everything.
func BenchmarkOpen(b *testing.B) {
	o := testOptions(kerneltest.NewBPFFS(b))
	k := openKernel(b, o)
	for n := range byte(50) {
		publish(b, k, testEndpoint(100+uint32(n), 100+n))
	}
	for b.Loop() {
		k, err := Open(b.Context(), o)
		if err != nil {
			b.Fatal(err)
		}
		if err := k.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFreshFrontend measures adding a frontend with a new address, such as a host port of an ADD, with
// 100,000 connections: all of them are read.
func BenchmarkFreshFrontend(b *testing.B) {
	const n = 100_000
	o := testOptions(kerneltest.NewBPFFS(b))
	o.Services = true
	k := openKernel(b, o)
	e := publish(b, k, a)
	k.putAll(b, remotes(e, 6, 0, n, conntrack.SeenReply|conntrack.Established, conntrack.MonotonicSeconds()))
	var best, total time.Duration
	for i := range b.N {
		key := frontend.Key{Addr: netip.IPv4Unspecified(), Port: uint16(1024 + i), Protocol: frontend.TCP, Node: true}
		tx := &frontendtx.Transaction{Partial: true}
		tx.Upsert(&frontend.Frontend{Key: key, Kind: frontend.HostPort, Service: "host port", Inside: &frontend.List{
			Backends: []frontend.Backend{{AddrPort: netip.AddrPortFrom(e.IPv4, 80)}},
		}})
		begin := processTime(b)
		if res, err := k.Frontends().Apply(b.Context(), tx); err != nil || len(res.Refused) > 0 {
			b.Fatalf("%+v, %v", res, err)
		}
		took := processTime(b) - begin
		best, total = faster(best, took), total+took
	}
	b.ReportMetric(float64(best.Milliseconds()), "ms")
	b.ReportMetric(float64(total.Milliseconds())/float64(b.N), "mean-ms")
	b.ReportMetric(0, "ns/op")
}
