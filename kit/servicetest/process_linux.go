// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicetest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc/client"
)

// asService is the variable that makes a test binary run as the service that it tests. So a test can kill a process
// with the code under test, including the race detector if the tests use it.
const asService = "SLUICE_TEST_AS_SERVICE"

// Main runs the service instead of the tests if Command or Place.Command started the process. It
// must be the first statement of TestMain; main is the service's main function.
func Main(main func()) {
	if os.Getenv(asService) == "" {
		return
	}
	os.Unsetenv(asService) //nolint:errcheck // cannot fail with this name
	main()
	os.Exit(0)
}

// Command returns a command that runs the service as the current user. The process is killed when
// the test process ends.
func Command(args ...string) *exec.Cmd {
	return command("/proc/self/exe", args...)
}

func command(exe string, args ...string) *exec.Cmd {
	cmd := exec.Command(exe, args...)
	// By default, the race detector sleeps a second at exit.
	cmd.Env = []string{asService + "=1", "GORACE=atexit_sleep_ms=0 " + os.Getenv("GORACE")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// Place is an environment in which processes of a service run as the service's user: a directory
// with a copy of the test binary, and the directories run and state, which belong to the user.
type Place struct {
	Dir string

	t   testing.TB
	uid uint32
	exe string
}

// NewPlace creates a place that is removed after the test. It needs root. Paths in it are short
// enough for unix sockets.
func NewPlace(t testing.TB, uid uint32) *Place {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: the service runs as a user of its own")
	}
	dir, err := os.MkdirTemp("", "service-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := &Place{Dir: dir, t: t, uid: uid, exe: filepath.Join(dir, "service")}
	// Other users may have no access to the directory in which go test builds the binary.
	if err := copyExecutable(p.exe); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p.Mkdir("run")
	p.Mkdir("state")
	return p
}

func copyExecutable(path string) error {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer self.Close()
	exe, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(exe, self); err != nil {
		exe.Close()
		return err
	}
	return exe.Close()
}

// Mkdir creates a directory that belongs to the service's user and returns its path.
func (p *Place) Mkdir(name string) string {
	p.t.Helper()
	path := filepath.Join(p.Dir, name)
	if err := os.Mkdir(path, 0o750); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Chown(path, int(p.uid), int(instance.GroupID)); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// Command returns a command that runs the service as its own user. The process is killed when the
// test process ends.
func (p *Place) Command(args ...string) *exec.Cmd {
	cmd := command(p.exe, args...)
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: p.uid, Gid: instance.GroupID}
	return cmd
}

// Process is a running service that a test uses.
type Process struct {
	Cmd    *exec.Cmd
	Conn   *grpc.ClientConn // connection to the process's socket
	Faults *faulttest.Controller

	t     testing.TB
	ended chan struct{}

	mu     sync.Mutex
	stderr bytes.Buffer // guarded by mu
}

// Start starts a service that will serve on a socket, with its fault points armed. The end of the
// test stops the process. If the test fails, the log of the process is added to the test's output.
func Start(t testing.TB, cmd *exec.Cmd, socket string, o client.Options) *Process {
	t.Helper()
	// The kernel sends the death signal of Pdeathsig when the thread that started the process ends, and DialerAs ends
	// threads.
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	return StartBy(t, func(start func() error) error {
		started := make(chan error)
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			started <- start()
			<-over
		}()
		return <-started
	}, cmd, socket, o)
}

// StartBy is Start with a launch function that calls start, for example on a thread with other privileges.
func StartBy(t testing.TB, launch func(start func() error) error, cmd *exec.Cmd, socket string, o client.Options) *Process {
	t.Helper()
	p := &Process{Cmd: cmd, t: t, ended: make(chan struct{})}
	cmd.Stderr = p
	p.Faults = faulttest.New(t, cmd)
	err := launch(cmd.Start)
	p.Faults.Started()
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		cmd.Wait() //nolint:errcheck // the result is in ProcessState
	}()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("the log of process %d, %s:\n%s", cmd.Process.Pid, cmd.ProcessState, p.Log())
		}
	})
	if p.Conn, err = client.Dial(socket, o); err != nil {
		t.Fatal(err)
	}
	return p
}

// Write receives the standard error of the process.
func (p *Process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.Write(b)
}

// Log returns what the process has written to standard error.
func (p *Process) Log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stderr.String()
}

// gone cleans up after the process has ended. It may be called repeatedly.
func (p *Process) gone() {
	<-p.ended
	if p.Conn != nil {
		p.Conn.Close() //nolint:errcheck // the process has ended
	}
	p.Faults.Close()
}

// Kill kills the process, as a crash would, if it runs.
func (p *Process) Kill() {
	p.Cmd.Process.Kill() //nolint:errcheck // the process may have ended
	p.gone()
}

// Stop sends SIGTERM and returns the exit code.
func (p *Process) Stop() int {
	p.t.Helper()
	p.Cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // the process may have ended
	return p.Exit()
}

// Exit waits for the end of the process and returns its exit code, -1 if a signal ended it.
func (p *Process) Exit() int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(Patience):
		p.t.Fatalf("the process does not end within %s", Patience)
	}
	p.gone()
	return p.Cmd.ProcessState.ExitCode()
}

// Killed waits for the end of the process and fails the test unless SIGKILL ended it.
func (p *Process) Killed() {
	p.t.Helper()
	p.Exit()
	if status, ok := p.Cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		p.t.Fatalf("the process ended with %s, want SIGKILL", p.Cmd.ProcessState)
	}
}

// Health returns the health status of one service of the process, or of the process itself if the
// name is empty.
func (p *Process) Health(service string) grpc_health_v1.HealthCheckResponse_ServingStatus {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	resp, err := grpc_health_v1.NewHealthClient(p.Conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service}, grpc.WaitForReady(true))
	if err != nil {
		p.t.Fatalf("health: %v", err)
	}
	return resp.GetStatus()
}

// Serving waits until the process reports that it serves.
func (p *Process) Serving() {
	p.t.Helper()
	if err := p.serving(); err != nil {
		p.t.Fatalf("the service does not serve: %v", err)
	}
}

func (p *Process) serving() error {
	ctx, cancel := context.WithTimeout(p.t.Context(), Patience)
	defer cancel()
	go func() {
		select {
		case <-p.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	watch, err := grpc_health_v1.NewHealthClient(p.Conn).Watch(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.WaitForReady(true))
	for err == nil {
		var got *grpc_health_v1.HealthCheckResponse
		if got, err = watch.Recv(); err == nil && got.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING {
			return nil
		}
	}
	select {
	case <-p.ended:
		return fmt.Errorf("it ended with %s", p.Cmd.ProcessState)
	default:
		return err
	}
}
