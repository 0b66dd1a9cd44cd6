// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
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

// BenchmarkFrames compares 16 requests at a time with answers of 1 KiB, between a client and a server that only count
// frames. Most of the time is the relay's and the kernel's.
func BenchmarkFrames(b *testing.B) {
	l := listen(b)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answerAll(c)
		}
	}()
	relayed := relayTo(b, l.Addr().String(), &Options{Decide: public, Normalise: normalise, Busy: func(bool) {}}).address
	for _, c := range []struct{ name, address string }{{"direct", l.Addr().String()}, {"relay", relayed}} {
		b.Run(c.name, func(b *testing.B) {
			conn, err := net.Dial("tcp", c.address)
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			askAll(b, conn)
		})
	}
}

// answerAll answers each request with 1 KiB.
func answerAll(c net.Conn) {
	defer c.Close()
	in := bufio.NewReaderSize(c, bufferSize)
	_, _ = in.Discard(len(Preface))
	s := newScript()
	_ = s.WriteSettings()
	fr := http2.NewFramer(nil, in)
	fr.SetReuseFrames()
	text := make([]byte, 1024)
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			return
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = s.WriteSettingsAck()
			}
		case *http2.HeadersFrame:
			_ = s.WriteHeaders(http2.HeadersFrameParam{StreamID: f.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true})
			_ = s.WriteData(f.StreamID, true, text)
		}
		if in.Buffered() == 0 {
			if _, err := c.Write(s.Bytes()); err != nil {
				return
			}
			s.Reset()
		}
	}
}

// askAll sends b.N requests, of which at most 16 have no answer.
func askAll(b *testing.B, c net.Conn) {
	const parallel = 16
	in := bufio.NewReaderSize(c, bufferSize)
	fr := http2.NewFramer(nil, in)
	fr.SetReuseFrames()
	s := newScript()
	s.WriteString(Preface)
	greet(s)
	_ = s.WriteWindowUpdate(0, 1<<30)
	s.encoder.SetMaxDynamicTableSize(0)
	block := s.block(with(get1, "user-agent", "Go-http-client/2.0", "accept-encoding", "gzip")...)
	next, open := uint32(1), 0
	b.ResetTimer()
	for done := 0; done < b.N; {
		for ; open < parallel; open++ {
			_ = s.WriteHeaders(http2.HeadersFrameParam{StreamID: next, BlockFragment: block, EndHeaders: true, EndStream: true})
			next += 2
		}
		if _, err := c.Write(s.Bytes()); err != nil {
			b.Fatal(err)
		}
		s.Reset()
		for first := true; first || in.Buffered() > 2048; first = false {
			f, err := fr.ReadFrame()
			if err != nil {
				b.Fatal(err)
			}
			switch f := f.(type) {
			case *http2.SettingsFrame:
				if !f.IsAck() {
					_ = s.WriteSettingsAck()
				}
			case *http2.DataFrame:
				done++
				open--
				if done%(1<<19) == 0 {
					_ = s.WriteWindowUpdate(0, 1<<29)
				}
			}
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
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

// BenchmarkIdle measures the memory of the process for a connection without an open stream.
func BenchmarkIdle(b *testing.B) {
	const connections = 500
	memory := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // the second one empties pools
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	for b.Loop() {
		var ends []net.Conn
		for range 2 * connections {
			near, far := pair(b)
			ends = append(ends, near, far)
		}
		var idle, done sync.WaitGroup
		before := memory()
		for e := range slices.Chunk(ends, 4) {
			var once sync.Once
			idle.Add(1)
			done.Go(func() {
				_ = Relay(e[0], e[2], nil, &Options{Decide: public, Busy: func(busy bool) {
					if !busy {
						once.Do(idle.Done)
					}
				}})
			})
			s := newScript()
			s.WriteString(Preface)
			greet(s)
			_, _ = e[1].Write(s.Bytes())
			_, _ = io.ReadFull(e[3], make([]byte, s.Len()))
			s.Reset()
			greet(s)
			_ = s.WriteSettingsAck()
			_, _ = e[3].Write(s.Bytes())
			_, _ = io.ReadFull(e[1], make([]byte, frameHeader)) // SETTINGS of the server
			s.Reset()
			_ = s.WriteSettingsAck()
			_, _ = e[1].Write(s.Bytes())
		}
		idle.Wait()
		b.ReportMetric(float64(memory()-before)/connections, "B/connection")
		for _, c := range ends {
			_ = c.Close()
		}
		done.Wait()
	}
}
