// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// BenchmarkRequests compares requests with answers of 1 KiB over one connection with a relay, and without. The client
// and the server run in the same process, so the ratio contains their work too.
func BenchmarkRequests(b *testing.B) {
	text := strings.Repeat("x", 1024)
	server := serve(b, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }))
	relayed := relayTo(b, server, &Options{Decide: public, Normalise: normalise, Busy: func(bool) {}}).address
	for _, c := range []struct{ name, address string }{{"direct", server}, {"relay", relayed}} {
		b.Run(c.name, func(b *testing.B) {
			hc := client(b, c.address)
			b.SetParallelism(16)
			b.ResetTimer()
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					get(b, hc, "http://a.example/public/benchmark?x=y")
				}
			})
		})
	}
}

// BenchmarkClientSide measures the relay alone: requests from a buffer to a buffer.
func BenchmarkClientSide(b *testing.B) {
	s := newScript()
	s.WriteString(Preface)
	greet(s)
	_ = s.WriteSettingsAck()
	s.encoder.SetMaxDynamicTableSize(0)
	const requests = 1000
	for i := range uint32(requests) {
		s.request(2*i+1, true, with(get1, "user-agent", "Go-http-client/2.0", "accept-encoding", "gzip",
			"x-request-id", "4bf92f3577b34da6a3ce929d0e0e4736")...)
	}
	b.ReportAllocs()
	for b.Loop() {
		out, _, err := relayBytes(s.Bytes(), bufferSize, public)
		if err != nil || len(out) == 0 {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/requests, "ns/request")
}
