// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package enrol

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// TestSilentConnectionsOfOneMachineKeepNoOtherFromEnrolling: it opens more connections than the server has, and sends
// nothing.
func TestSilentConnectionsOfOneMachineKeepNoOtherFromEnrolling(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{grpc: grpc.NewServer()}
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		<-ended
	})
	// from connects, and reports whether the server answers with its settings of HTTP/2.
	from := func(address string, speaks bool) bool {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
		c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if !speaks {
			return false
		}
		const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
		if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+settings); err != nil {
			return false
		}
		c.SetReadDeadline(time.Now().Add(5 * time.Second)) //nolint:errcheck // fails for a closed connection only
		_, err = io.ReadFull(c, make([]byte, 9))
		return err == nil
	}
	for range maxConnections + 1 {
		from("127.0.0.2", false)
	}
	if !from("127.0.0.3", true) {
		t.Error("another machine gets no answer")
	}
	if from("127.0.0.2", true) {
		t.Errorf("one machine has more than %d connections", maxPerSource)
	}
}

func TestConnectionsAreCountedUntilTheyAreClosed(t *testing.T) {
	l := limitPerSource(nil, 2)
	a, b := netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("192.0.2.2/32")
	for i, want := range []bool{true, true, false} {
		if l.take(a) != want {
			t.Errorf("connection %d: %t, want %t", i, !want, want)
		}
	}
	l.give(a)
	if !l.take(a) || !l.take(b) {
		t.Error("a closed connection, or one of another machine, counts")
	}
	for range 2 {
		l.give(a)
	}
	l.give(b)
	if len(l.open) != 0 {
		t.Errorf("open connections %v after all were closed", l.open)
	}
}
