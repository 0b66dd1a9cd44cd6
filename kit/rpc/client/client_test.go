// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

func TestBadOptionsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		path string
		o    Options
	}{
		"relative path": {"x.sock", Options{}},
		"long path":     {"/" + strings.Repeat("x", 107), Options{}},
	} {
		if cc, err := Dial(c.path, c.o); err == nil {
			cc.Close()
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestDialSucceedsWhileNothingListens(t *testing.T) {
	cc, err := Dial("/nonexistent/x.sock", Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := cc.Close(); err != nil {
		t.Error(err)
	}
}

// TestCallWaitsForAServerThatIsAbsentAtFirst: a call with WaitForReady also waits for a server that was never started.
func TestCallWaitsForAServerThatIsAbsentAtFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.sock")
	cc, err := Dial(path, Options{WaitForReady: true})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	answered := make(chan error, 1)
	go func() {
		_, err := grpc_health_v1.NewHealthClient(cc).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		answered <- err
	}()
	for cc.GetState() != connectivity.TransientFailure { // until the client has tried to connect
		if !cc.WaitForStateChange(t.Context(), cc.GetState()) {
			t.Fatal("the client did not try to connect")
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(srv, health.NewServer())
	go srv.Serve(l) //nolint:errcheck // ends with the test
	defer srv.Stop()
	if err := <-answered; err != nil {
		t.Errorf("the call ended with %v, want the server's answer", err)
	}
}

// TestAbsentServerIsNamedInTheKernelsWords: the first call and later ones return the kernel's error for the socket,
// without gRPC's text.
func TestAbsentServerIsNamedInTheKernelsWords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.sock")
	cc, err := Dial(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	check := func(what string, err error) {
		t.Helper()
		var absent *AbsentError
		if !errors.As(err, &absent) || absent.Socket != path || !errors.Is(err, syscall.ENOENT) || status.Code(err) != codes.Unavailable {
			t.Fatalf("%s: %v, want an AbsentError with ENOENT and the code UNAVAILABLE", what, err)
		}
		if want := "dial unix " + path + ": connect: no such file or directory"; err.Error() != want || status.Convert(err).Message() != want {
			t.Errorf("%s: %q, want %q", what, err, want)
		}
	}
	health := grpc_health_v1.NewHealthClient(cc)
	for i := range 3 {
		_, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		check(fmt.Sprintf("call %d", i), err)
		_, err = health.Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		check(fmt.Sprintf("stream %d", i), err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	_, err = health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("a server that is back: %v, want its answer", err)
	}
	srv.Stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestServerThatAnswersNothingIsNamed: connections to a stopped process stay in the kernel's accept queue. If the
// process ends, the kernel resets them. gRPC describes both with texts of its own.
func TestServerThatAnswersNothingIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	cc, err := Dial(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	_, err = grpc_health_v1.NewHealthClient(cc).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	want := "unix " + path + ": accepts connections, but sends no answer"
	if status.Code(err) != codes.Unavailable || status.Convert(err).Message() != want {
		t.Errorf("%v, want %q", err, want)
	}
}

// TestTextsOfSilentServersAreKnown: gRPC's text depends on the time at which the server closes the connection.
func TestTextsOfSilentServersAreKnown(t *testing.T) {
	for message, want := range map[string]bool{
		"connection error: desc = \"error reading server preface: EOF\"":                                     true,
		"connection error: desc = \"transport: failed to write client preface: write: broken pipe\"":         true,
		"connection error: desc = \"transport: failed to write initial settings frame: write: broken pipe\"": true,
		"write unix @->/run/x.sock: write: broken pipe":                                                      true,
		"policy: unavailable: dial unix /run/x.sock: connect: connection refused":                            false,
	} {
		if got := silentServer(message); got != want {
			t.Errorf("%q: %t, want %t", message, got, want)
		}
	}
}

// TestHeavyPackagesAreNotImported: a command pays the initialisation of every imported package at
// each start.
func TestHeavyPackagesAreNotImported(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		for _, heavy := range []string{"prometheus", "protovalidate", "cel.dev", "go-grpc-middleware", "sluice/kit/rpc$", "yaml", "reflection"} {
			if strings.Contains(dep+"$", heavy) {
				t.Errorf("imports %s", dep)
			}
		}
	}
}
