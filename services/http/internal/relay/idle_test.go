// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package relay

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"syscall"
	"testing"
)

// request is sent by idle connections before they are idle.
const request = "GET /a HTTP/1.1\r\nHost: a\r\nUser-Agent: test\r\nAccept: */*\r\n\r\n"

// memory returns the bytes of the heap and of stacks in use.
func memory() (heap, stacks int64) {
	runtime.GC()
	runtime.GC() // the first one only empties the pools in part
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), int64(m.StackInuse) //nolint:gosec // less than 2^63
}

// TestIdleConnectionsAreSmall: an idle connection has no buffer, and does not keep its last request. Stacks are not
// compared, because the race detector needs larger ones.
func TestIdleConnectionsAreSmall(t *testing.T) {
	const count = 300
	const response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := start(t, l.Addr().String(), paths("/a"))
	var open []net.Conn
	answer := make([]byte, len(response))
	one := func(dial func() net.Conn) {
		t.Helper()
		c := dial()
		if _, err := io.WriteString(c, request); err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c, s)
		t.Cleanup(func() { s.Close() })
		if _, err := http.ReadRequest(bufio.NewReader(s)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(s, response); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, answer); err != nil {
			t.Fatal(err)
		}
	}
	// each returns the memory of one connection of dial, with both ends of the test.
	each := func(dial func() net.Conn) (heap, stacks int64) {
		t.Helper()
		one(dial)
		heapBefore, stacksBefore := memory()
		for range count {
			one(dial)
		}
		heap, stacks = memory()
		return (heap - heapBefore) / count, (stacks - stacksBefore) / count
	}
	direct, _ := each(func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	})
	relayed, stacks := each(p.dial)
	runtime.KeepAlive(open)
	t.Logf("the relay takes %d bytes of the heap for an idle connection, and %d of stacks", relayed-direct, stacks)
	if relayed-direct > 3<<10 {
		t.Errorf("the relay takes %d bytes of the heap for an idle connection", relayed-direct)
	}
}

// TestSlowHeadersHoldOnlyTheirPod: clients that send a header slowly, or none, delay no other client, and are answered
// after HeaderTime.
func TestSlowHeadersHoldOnlyTheirPod(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok")
	}))
	defer s.Close()
	p := start(t, s.Listener.Addr().String(), paths(".*"))
	for range 200 {
		c := p.dial()
		if _, err := io.WriteString(c, "GET /slow HTTP/1.1\r\nHo"); err != nil {
			t.Fatal(err)
		}
	}
	for range 20 {
		c := p.dial()
		if status, body := exchangeOf(t, c, bufio.NewReader(c), "GET", request); status != 200 || body != "ok" {
			t.Errorf("another client: %d %q", status, body)
		}
	}
}

// BenchmarkKeepAlive sends requests on one connection.
func BenchmarkKeepAlive(b *testing.B) {
	const response = "HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n"
	body := make([]byte, len(response)+1024)
	copy(body, response)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		in := make([]byte, 4096)
		for {
			if _, err := c.Read(in); err != nil {
				return
			}
			if _, err := c.Write(body); err != nil {
				return
			}
		}
	}()
	p := start(b, l.Addr().String(), paths("/a"))
	c := p.dial()
	answer := make([]byte, len(body))
	var start, end syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &start)
	defer func() {
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &end)
		used := end.Utime.Nano() + end.Stime.Nano() - start.Utime.Nano() - start.Stime.Nano()
		b.ReportMetric(float64(used)/1e3/float64(b.N), "cpu-µs/op") // of the relay and both ends
	}()
	for b.Loop() {
		if _, err := io.WriteString(c, request); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, answer); err != nil {
			b.Fatal(err)
		}
	}
}
