// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package etcdtest runs a real etcd for tests: sluice-devetcd, of one member or
// of three, as child processes on unix sockets, which can be killed, stopped and
// started again.
package etcdtest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// startTimeout is how long a member may take until it serves, also on a busy machine.
const startTimeout = time.Minute

var binary = sync.OnceValues(build)

// build compiles sluice-devetcd, unless `make build` has already done so, into the directory SLUICE_BIN or into bin.
// That copy may be old, but tests only use etcd's protocol, and go.mod pins the version of etcd.
func build() (string, error) {
	if dir := os.Getenv("SLUICE_BIN"); dir != "" {
		return filepath.Join(dir, "sluice-devetcd"), nil
	}
	root, err := checkout()
	if err != nil {
		return "", err
	}
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

// checkout returns the root of the source tree. A test runs in the directory of its package; the path that the compiler
// records is not usable with -trimpath.
func checkout() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no go.work above %s", start)
		}
	}
}

var temporary string // set once by build

// Cleanup removes what the package built. TestMain calls it at its end.
func Cleanup() {
	if temporary != "" {
		os.RemoveAll(temporary)
	}
}

// Server is one etcd with its data, of one or several members.
type Server struct {
	t         testing.TB
	Endpoint  string // the endpoints of all members: unix:///…,unix:///…
	Members   []*Member
	endpoints []string
}

// Member is one process of a Server.
type Member struct {
	t        testing.TB
	data     string
	Endpoint string   // unix:///…
	args     []string // of the command
	cmd      *exec.Cmd
}

// Start starts an empty etcd of one member, which ends with the test.
func Start(t testing.TB) *Server {
	t.Helper()
	return start(t, 1, nil)
}

// StartThree starts an empty etcd of three members, which ends with the test.
func StartThree(t testing.TB) *Server {
	t.Helper()
	return start(t, 3, nil)
}

// StartThreeOn starts an etcd of three members, each on a slow disk of its own.
func StartThreeOn(t testing.TB) (*Server, []*Disk) {
	t.Helper()
	var disks []*Disk
	s := start(t, 3, func(dir string) string {
		disks = append(disks, newDisk(t, dir+".files", dir))
		return dir
	})
	return s, disks
}

// start starts the members. If place is not nil, it creates the directory in which a member's data is stored.
func start(t testing.TB, members int, place func(dir string) string) *Server {
	t.Helper()
	// Not t.TempDir: with a long test name the socket's path would not fit
	// into an address.
	dir, err := os.MkdirTemp("", "etcd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &Server{t: t}
	// Use a loopback address that no other test uses, and ports outside of the range that the kernel assigns to
	// connections.
	peers := fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
	var cluster []string
	for i := range members {
		cluster = append(cluster, fmt.Sprintf("m%d=http://%s:%d", i, peers, 2380+i))
	}
	for i := range members {
		around := dir
		if place != nil {
			around = place(filepath.Join(dir, fmt.Sprint("disk", i)))
		}
		m := &Member{
			t: t, data: filepath.Join(around, fmt.Sprint("data", i)),
			Endpoint: "unix://" + filepath.Join(dir, fmt.Sprint("s", i)),
		}
		m.args = []string{"--data-dir", m.data, "--listen", m.Endpoint, "--die-with-parent"}
		if members > 1 {
			name, peer, _ := strings.Cut(cluster[i], "=")
			m.args = append(m.args, "--name", name, "--peer", peer, "--members", strings.Join(cluster, ","))
		}
		s.Members, s.endpoints = append(s.Members, m), append(s.endpoints, m.Endpoint)
	}
	s.Endpoint = strings.Join(s.endpoints, ",")
	t.Cleanup(s.Down)
	s.Up()
	return s
}

// Up starts the processes that are down and waits until they serve.
func (s *Server) Up() {
	s.t.Helper()
	serve := make(chan error, len(s.Members))
	for _, m := range s.Members {
		go func() { serve <- m.up() }()
	}
	for range s.Members {
		if err := <-serve; err != nil {
			s.t.Error(err)
		}
	}
	if s.t.Failed() {
		s.t.FailNow()
	}
}

// Up starts the process and waits until it serves. It only serves once more than half of the members run.
func (m *Member) Up() {
	m.t.Helper()
	if err := m.up(); err != nil {
		m.t.Fatal(err)
	}
}

func (m *Member) up() error {
	if m.cmd != nil {
		return nil
	}
	path, err := binary()
	if err != nil {
		return err
	}
	cmd := exec.Command(path, m.args...)
	var said bytes.Buffer // etcd's log only matters if etcd does not start
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	stuck := time.AfterFunc(startTimeout, func() { cmd.Process.Kill() }) //nolint:errcheck // it may have ended
	line, err := bufio.NewReader(out).ReadString('\n')
	stuck.Stop()
	if err != nil {
		cmd.Process.Kill() //nolint:errcheck // the process may have ended already
		cmd.Wait()         //nolint:errcheck // the error of the read says more
		return fmt.Errorf("etcd did not start: %q, %w\n%s", line, err, said.String())
	}
	m.cmd = cmd
	var ready struct{ Endpoint string }
	if err := json.Unmarshal([]byte(line), &ready); err != nil {
		return fmt.Errorf("etcd says %q: %w", line, err)
	}
	if m.Endpoint != ready.Endpoint { // otherwise a client may be reading the endpoint now
		m.Endpoint = ready.Endpoint // the port is known only now
	}
	return nil
}

// Down kills the processes with SIGKILL and waits for their end. It may be called when they have ended already.
func (s *Server) Down() {
	for _, m := range s.Members {
		m.Down()
	}
}

// Down kills the process with SIGKILL and waits for its end. It may be called when it has ended already.
func (m *Member) Down() {
	if m.cmd == nil {
		return
	}
	m.cmd.Process.Kill() //nolint:errcheck // the process may have ended already
	m.cmd.Wait()         //nolint:errcheck // killed
	m.cmd = nil
}

// Freeze stops the process: it keeps its connections and does not answer.
func (m *Member) Freeze() { m.signal(syscall.SIGSTOP) }

// Thaw ends Freeze.
func (m *Member) Thaw() { m.signal(syscall.SIGCONT) }

func (m *Member) signal(sig os.Signal) {
	m.t.Helper()
	if err := m.cmd.Process.Signal(sig); err != nil {
		m.t.Fatal(err)
	}
}

// Leader returns the member that leads.
func (s *Server) Leader() *Member {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		for _, m := range s.Members {
			if m.cmd == nil {
				continue
			}
			c := client(s.t, m.Endpoint)
			short, cancel := context.WithTimeout(ctx, startTimeout/20) // a frozen member does not answer
			status, err := c.Status(short, m.Endpoint)
			cancel()
			if err == nil && status.Leader == status.Header.MemberId {
				return m
			}
			if ctx.Err() != nil {
				s.t.Fatalf("no member leads: %v", err)
			}
		}
	}
}

// Wipe deletes the data while the server is down.
func (s *Server) Wipe() {
	s.t.Helper()
	for _, m := range s.Members {
		if err := os.RemoveAll(m.data); err != nil {
			s.t.Fatal(err)
		}
	}
}

// Backup copies the data of a server that is down, as snapshots of its machines do.
func (s *Server) Backup() {
	s.t.Helper()
	for _, m := range s.Members {
		if err := os.CopyFS(m.data+".backup", os.DirFS(m.data)); err != nil {
			s.t.Fatal(err)
		}
	}
}

// Restore puts the data of a server that is down back to the Backup.
func (s *Server) Restore() {
	s.t.Helper()
	s.Wipe()
	for _, m := range s.Members {
		if err := os.Rename(m.data+".backup", m.data); err != nil {
			s.t.Fatal(err)
		}
		// os.CopyFS does not copy the modes of directories.
		if err := filepath.WalkDir(m.data, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				err = os.Chmod(path, 0o700)
			}
			return err
		}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// Full raises or clears the alarm that a member raises when its space quota is used up.
func (s *Server) Full(full bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	c := s.Client()
	status, err := c.Status(ctx, s.endpoints[0])
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

// Client returns a separate client, which is closed after the test.
func (s *Server) Client() *clientv3.Client {
	s.t.Helper()
	return client(s.t, s.endpoints...)
}

func client(t testing.TB, endpoints ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Compact compacts all revisions up to now.
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
