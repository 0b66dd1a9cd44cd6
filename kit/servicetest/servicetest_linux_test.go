// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicetest

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
)

func TestMain(m *testing.M) {
	Main(serve)
	leaktest.Main(m)
}

// serve is a service that reports SERVING on the socket in its argument until SIGTERM, and then
// exits with 3.
func serve() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	fmt.Fprintln(os.Stderr, "user", os.Getuid(), "group", os.Getgid(), "environment", os.Getenv(asService))
	l, err := net.Listen("unix", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(7)
	}
	srv := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(srv, health.NewServer())
	go srv.Serve(l) //nolint:errcheck // ends with the process
	<-stop
	os.Exit(3)
}

func TestServiceRunsAsItsUserAndEndsAsItIsTold(t *testing.T) {
	p := NewPlace(t, instance.FirstServiceID)
	socket := filepath.Join(p.Dir, "run", "s.sock")
	start := func() *Process {
		s := Start(t, p.Command(socket), socket, client.Options{})
		s.Serving()
		if got := s.Health(""); got != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Errorf("health %v", got)
		}
		return s
	}
	s := start()
	if code := s.Stop(); code != 3 {
		t.Errorf("exit code %d, want 3", code)
	}
	if want := fmt.Sprintf("user %d group %d environment \n", instance.FirstServiceID, instance.GroupID); s.Log() != want {
		t.Errorf("log %q, want %q", s.Log(), want)
	}
	os.Remove(socket) //nolint:errcheck // a killed process leaves its socket
	s = start()
	s.Kill()
	s.Killed()
	s.Kill() // a second Kill must be harmless
	if code := s.Exit(); code != -1 {
		t.Errorf("exit code %d after SIGKILL, want -1", code)
	}
}

func TestServiceThatEndsIsNotWaitedFor(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "no such directory", "s")
	s := Start(t, Command(socket), socket, client.Options{})
	if err := s.serving(); err == nil || !strings.Contains(err.Error(), "ended with exit status 7") {
		t.Errorf("got %v, want the exit status", err)
	}
	if !strings.Contains(s.Log(), "no such file or directory") {
		t.Errorf("log %q", s.Log())
	}
}

func TestWaitingEndsWithTheCondition(t *testing.T) {
	looks := 0
	Eventually(t, "the third look", func() bool { looks++; return looks == 3 })
	EventuallyNil(t, "the fifth look", func() error {
		if looks++; looks < 5 {
			return fmt.Errorf("%d looks", looks)
		}
		return nil
	})
	if looks != 5 {
		t.Errorf("%d looks, want 5", looks)
	}
	if deadline, ok := Context(t).Deadline(); !ok || deadline.IsZero() {
		t.Error("the context has no deadline")
	}
}
