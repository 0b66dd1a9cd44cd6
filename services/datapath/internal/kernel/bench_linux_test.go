// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"testing"
)

// BenchmarkProgram is the time of one run, with what BPF_PROG_TEST_RUN adds.
func BenchmarkProgram(b *testing.B) {
	k := openKernel(b, testOptions(newBPFFS(b)))
	publish(b, k, a)
	mirror := testEndpoint(1002, 20)
	mirror.MAC, mirror.HostMAC = a.HostMAC, a.MAC
	publish(b, k, mirror)
	for _, c := range []struct {
		name, prog string
		in         []byte
	}{
		{"pod to pod, IPv4 TCP", fromPodName, from4(mirror.IPv4, 6, tcp(1, 2, flagACK))},
		{"pod to pod, IPv6 TCP", fromPodName, from6(mirror.IPv6, 6, tcp(1, 2, flagACK))},
		{"pod to the world, IPv4 TCP", fromPodName, from4(world4, 6, tcp(1, 2, flagACK))},
		{"host to pod, IPv4 TCP", toPodName, to4(host4, 6, tcp(1, 2, flagACK))},
	} {
		b.Run(c.name, func(b *testing.B) {
			var total float64
			const repeat = 200 // fewer than the hops of one packet
			in := c.in
			if in[12] == 0x86 {
				in[14+7] = 255
			} else {
				in[14+8] = 255
			}
			for range b.N {
				_, d, err := k.program(c.prog).Benchmark(in, repeat, nil)
				if err != nil {
					b.Fatal(err)
				}
				total += float64(d.Nanoseconds())
			}
			b.ReportMetric(total/float64(b.N), "ns/packet")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkPublish is one endpoint published and unpublished.
func BenchmarkPublish(b *testing.B) {
	k := openKernel(b, testOptions(newBPFFS(b)))
	for b.Loop() {
		s, err := k.Publish(b.Context(), a)
		if err == nil {
			err = k.Unpublish(s)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSetPolicy is a change of one endpoint's tables.
func BenchmarkSetPolicy(b *testing.B) {
	k := openKernel(b, testOptions(newBPFFS(b)))
	e := publish(b, k, a)
	for b.Loop() {
		if _, err := k.SetPolicy(e.Slot, TableAllow, TableAllow); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOpen is a restart: everything is adopted.
func BenchmarkOpen(b *testing.B) {
	o := testOptions(newBPFFS(b))
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
