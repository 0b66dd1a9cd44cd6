// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

// serving starts a server on the loopback device, and returns its address.
func serving(t *testing.T, h http.Handler) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, l, h) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the server ends with %v", err)
		}
	})
	return l.Addr().String()
}

func TestConnectSaysWhoAnswered(t *testing.T) {
	at := serving(t, handler("web"))
	a := connect(t.Context(), time.Minute, at, false)
	if host, _, err := net.SplitHostPort(a.Client); a.Outcome != Connected || a.Server != "web" || err != nil ||
		host != "127.0.0.1" {
		t.Errorf("got %+v", a)
	}
	if a := connect(t.Context(), time.Minute, at, true); a.Outcome != Connected || a.Server != "" {
		t.Errorf("without asking: %+v", a)
	}
}

func TestConnectTellsRefusalFromSilence(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if a := connect(t.Context(), time.Minute, at, false); a.Outcome != Refused || a.Error == "" {
		t.Errorf("a port without a server: %+v", a)
	}
	// An expired deadline simulates a server that never answers.
	over, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	if a := connect(over, time.Minute, at, false); a.Outcome != TimedOut {
		t.Errorf("without an answer: %+v", a)
	}
}

func TestAServerThatDoesNotAnswerIsNoConnection(t *testing.T) {
	at := serving(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "?") }))
	if a := connect(t.Context(), time.Minute, at, false); a.Outcome != Failed || a.Error == "" {
		t.Errorf("got %+v", a)
	}
}

func TestHoldEndsWhenNoOtherProcessIsThere(t *testing.T) {
	dir := t.TempDir()
	process := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"self", "net", strconv.Itoa(os.Getpid()), "9999999"} {
		if err := os.Mkdir(process(name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() { done <- hold(t.Context(), dir, 50*time.Millisecond, time.Millisecond) }()
	select {
	case err := <-done:
		t.Fatalf("hold returned while another process was running: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if err := os.Remove(process("9999999")); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	// Without a proc directory, hold returns.
	if err := hold(t.Context(), process("none"), time.Hour, time.Millisecond); err == nil {
		t.Error("no error")
	}
}
