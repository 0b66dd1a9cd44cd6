// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package etcdtest runs a real etcd for tests: sluice-devetcd, as a child
// process on a unix socket, which can be killed and started again.
package etcdtest

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// startTimeout is how long a member may take to serve, also on a busy machine.
const startTimeout = time.Minute

var binary = sync.OnceValues(build)

// build compiles sluice-devetcd, unless `make build` did. The copy in bin is
// as good: tests use etcd's protocol, and go.mod pins etcd.
func build() (string, error) {
	_, self, _, _ := runtime.Caller(0)
	root := filepath.Join(filepath.Dir(self), "..", "..", "..", "..", "..")
	built := filepath.Join(root, "bin", "sluice-devetcd")
	if _, err := os.Stat(built); err == nil {
		return built, nil
	}
	dir, err := os.MkdirTemp("", "sluice-etcdtest-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "sluice-devetcd")
	cmd := exec.Command("go", "build", "-o", path, ".")
	cmd.Dir = filepath.Join(root, "tools", "devetcd")
	cmd.Env = append(os.Environ(), "GOWORK=off", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		return "", fmt.Errorf("build sluice-devetcd: %w\n%s", err, out)
	}
	temporary = dir
	return path, nil
}

var temporary string // set once by build

// Cleanup removes what the package built; for the end of TestMain.
func Cleanup() {
	if temporary != "" {
		os.RemoveAll(temporary)
	}
}

// Server is one etcd with its data.
type Server struct {
	t        testing.TB
	data     string
	Endpoint string // unix:///…
	cmd      *exec.Cmd
}

// Start starts an empty etcd that is gone after the test.
func Start(t testing.TB) *Server {
	t.Helper()
	// Not t.TempDir: with a long test name the socket's path would not fit
	// into an address.
	dir, err := os.MkdirTemp("", "etcd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &Server{t: t, data: filepath.Join(dir, "data"), Endpoint: "unix://" + filepath.Join(dir, "s")}
	s.Up()
	t.Cleanup(s.Down)
	return s
}

// Up starts the process and waits until it serves.
func (s *Server) Up() {
	s.t.Helper()
	path, err := binary()
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(path, "--data-dir", s.data, "--listen", s.Endpoint, "--die-with-parent")
	var said bytes.Buffer // what etcd logs matters only when it does not start
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	stuck := time.AfterFunc(startTimeout, func() { cmd.Process.Kill() }) //nolint:errcheck // it may have ended
	line, err := bufio.NewReader(out).ReadString('\n')
	stuck.Stop()
	if err != nil {
		cmd.Process.Kill() //nolint:errcheck // it may have ended
		cmd.Wait()         //nolint:errcheck // the read tells more
		s.t.Fatalf("etcd did not start: %q, %v\n%s", line, err, said.String())
	}
	s.cmd = cmd
}

// Down kills the process with SIGKILL and waits for its end. It may be down already.
func (s *Server) Down() {
	if s.cmd == nil {
		return
	}
	s.cmd.Process.Kill() //nolint:errcheck // it may have ended
	s.cmd.Wait()         //nolint:errcheck // killed
	s.cmd = nil
}

// Wipe takes the data away while the server is down.
func (s *Server) Wipe() {
	s.t.Helper()
	if err := os.RemoveAll(s.data); err != nil {
		s.t.Fatal(err)
	}
}

// Backup copies the data of a server that is down, as a snapshot of its machine does.
func (s *Server) Backup() {
	s.t.Helper()
	if err := os.CopyFS(s.data+".backup", os.DirFS(s.data)); err != nil {
		s.t.Fatal(err)
	}
}

// Restore puts the data of a server that is down back to the Backup.
func (s *Server) Restore() {
	s.t.Helper()
	s.Wipe()
	if err := os.Rename(s.data+".backup", s.data); err != nil {
		s.t.Fatal(err)
	}
	// What the copy does not keep.
	if err := filepath.WalkDir(s.data, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(path, 0o700)
		}
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
}

// Full raises or ends the alarm that etcd raises when its quota is used up.
func (s *Server) Full(full bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	c := s.Client()
	status, err := c.Status(ctx, s.Endpoint)
	if err != nil {
		s.t.Fatal(err)
	}
	action := etcdserverpb.AlarmRequest_DEACTIVATE
	if full {
		action = etcdserverpb.AlarmRequest_ACTIVATE
	}
	if _, err := etcdserverpb.NewMaintenanceClient(c.ActiveConnection()).Alarm(ctx, &etcdserverpb.AlarmRequest{
		Action: action, MemberID: status.Header.MemberId, Alarm: etcdserverpb.AlarmType_NOSPACE,
	}); err != nil {
		s.t.Fatal(err)
	}
}

// Client returns a client of its own, closed after the test.
func (s *Server) Client() *clientv3.Client {
	s.t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint}, Logger: zap.NewNop()})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}

// Compact forgets all revisions up to now.
func (s *Server) Compact() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	c := s.Client()
	resp, err := c.Get(ctx, "none")
	if err == nil {
		_, err = c.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
	}
	if err != nil {
		s.t.Fatal(err)
	}
}
