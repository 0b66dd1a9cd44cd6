// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
)

// Jobs for child processes: this test binary with one of these arguments.
const (
	listenArg = "listen-and-hang" // killed while it listens
	callArg   = "call-and-print"  // a client with another uid
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == listenArg {
		l, err := Listen(os.Args[2], ListenOptions{})
		fmt.Println("listening", err)
		if err == nil {
			// Blocks in the poller and keeps the lock: a select{} in the only goroutine would be
			// reported as a deadlock.
			_, err = l.Accept()
		}
		fmt.Println("accepted", err)
		os.Exit(1)
	}
	if len(os.Args) == 3 && os.Args[1] == callArg {
		cc, err := client.Dial(os.Args[2], client.Options{})
		if err == nil {
			_, err = pb.NewTestServiceClient(cc).EmptyCall(context.Background(), &pb.Empty{})
		}
		fmt.Println(status.Code(err))
		return
	}
	leaktest.Main(m)
}

// shortDir returns a temporary directory whose path is short enough for a unix socket address.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "kit")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func listen(t testing.TB, path string, o ListenOptions) *Listener {
	t.Helper()
	l, err := Listen(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestSocketHasItsModeWhenItAppears(t *testing.T) {
	dir := filepath.Join(shortDir(t), "svc")
	l := listen(t, dir+"/s.sock", ListenOptions{})
	fi, err := os.Lstat(dir + "/s.sock")
	if err != nil || fi.Mode() != fs.ModeSocket|0o660 {
		t.Errorf("socket is %v, %v; want mode 0660", fi.Mode(), err)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o750 {
		t.Errorf("directory is %v, %v; want mode 0750", fi.Mode(), err)
	}
	if got := l.Addr().String(); got != dir+"/s.sock" {
		t.Errorf("Addr is %s", got)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir + "/s.sock"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there after Close: %v", err)
	}
}

func TestKernelSocketBelongsToTheGivenOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	uid, gid := uint32(65701), uint32(65700)
	dir := filepath.Join(shortDir(t), "svc")
	listen(t, dir+"/s.sock", ListenOptions{UID: &uid, GID: &gid})
	for _, p := range []string{dir, dir + "/s.sock"} {
		var st syscall.Stat_t
		if err := syscall.Lstat(p, &st); err != nil || st.Uid != uid || st.Gid != gid {
			t.Errorf("%s belongs to %d:%d (%v), want %d:%d", p, st.Uid, st.Gid, err, uid, gid)
		}
	}
}

func TestLiveSocketIsRefusedAndStaysAlive(t *testing.T) {
	path := shortDir(t) + "/s.sock"
	l := listen(t, path, ListenOptions{})
	if _, err := Listen(path, ListenOptions{}); !errors.Is(err, ErrInUse) {
		t.Fatalf("second Listen: %v, want ErrInUse", err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the first listener does not accept: %v", err)
	}
	c.Close()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	listen(t, path, ListenOptions{})
}

func TestSocketOfAKilledProcessIsTakenOver(t *testing.T) {
	path := shortDir(t) + "/s.sock"
	cmd := exec.Command("/proc/self/exe", listenArg, path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "listening <nil>\n" {
		t.Errorf("child said %q, %v", line, err)
	}
	if _, err := Listen(path, ListenOptions{}); !errors.Is(err, ErrInUse) {
		t.Errorf("while another process listens: %v, want ErrInUse", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if fi, err := os.Lstat(path); err != nil || fi.Mode().Type() != fs.ModeSocket {
		t.Fatalf("the killed process left no socket: %v", err)
	}
	listen(t, path, ListenOptions{})
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestOnlyOneOfManyTakesAStaleSocket(t *testing.T) {
	path := shortDir(t) + "/s.sock"
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		won  []*Listener
		lost int
	)
	for range 16 {
		wg.Go(func() {
			l, err := Listen(path, ListenOptions{})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won = append(won, l)
			case errors.Is(err, ErrInUse):
				lost++
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 || lost != 15 {
		t.Errorf("%d won and %d lost, want 1 and 15", len(won), lost)
	}
	for _, l := range won {
		l.Close()
	}
}

func TestListenRefusesWhatItMustNotTouch(t *testing.T) {
	dir := shortDir(t)
	file := dir + "/file"
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	open := dir + "/open"
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	group := dir + "/group"
	if err := os.Mkdir(group, 0o700); err != nil {
		t.Fatal(err)
	}
	if os.Getegid() == 0 { // group-writable by the group of root is allowed
		if err := os.Chown(group, -1, 65700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(group, 0o770); err != nil {
		t.Fatal(err)
	}
	long := dir + "/" + strings.Repeat("x", MaxPath)
	for path, want := range map[string]string{
		file:                  "is not a socket",
		open + "/s.sock":      "others could replace the socket",
		group + "/s.sock":     "others could replace the socket",
		file + "/s.sock":      "not a directory",
		dir + "/a/b/c/s.sock": "no such file or directory: `sluice prepare` makes the directories",
		"relative.sock":       "not absolute",
		long:                  fmt.Sprintf("is %d bytes long; at most %d fit", len(long), MaxPath),
	} {
		l, err := Listen(path, ListenOptions{})
		if err == nil {
			l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Listen(%s): %v, want an error with %q", path, err, want)
		}
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Errorf("the file is now %q", b)
	}
	longest := dir + "/" + strings.Repeat("y", MaxPath-len(dir)-1)
	listen(t, longest, ListenOptions{})
	c, err := net.Dial("unix", longest)
	if err != nil {
		t.Fatalf("the longest path that is allowed: %v", err)
	}
	c.Close()
}

func TestCloseLeavesASocketThatIsNotOurs(t *testing.T) {
	path := shortDir(t) + "/s.sock"
	l := listen(t, path, ListenOptions{})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("Close removed another's socket: %v", err)
	}
}

func TestConnectionsBeyondTheBoundAreClosedAtOnce(t *testing.T) {
	path := shortDir(t) + "/s.sock"
	// Both limits, because half of MaxConns is the default for users other than root.
	l := listen(t, path, ListenOptions{MaxConns: 2, MaxConnsPerUID: 2})
	accepted := make(chan net.Conn)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial()
	first := <-accepted
	dial()
	second := <-accepted
	if n, err := dial().Read(make([]byte, 1)); err == nil {
		t.Errorf("the third connection read %d bytes; want it closed", n)
	}
	if open, refused := l.Conns(); open != 2 || refused != 1 {
		t.Errorf("%d open and %d refused, want 2 and 1", open, refused)
	}
	first.Close()
	first.Close() // a second Close must not be counted
	dial()
	third := <-accepted
	if cred := third.(*conn).Cred(); cred.UID != uint32(os.Geteuid()) || cred.PID != int32(os.Getpid()) {
		t.Errorf("credentials are %+v, want the credentials of this process", cred)
	}
	second.Close()
	third.Close()
	l.Close()
	<-stopped
	if open, _ := l.Conns(); open != 0 {
		t.Errorf("%d connections are open after all were closed", open)
	}
}

func TestOneUserCannotTakeAllConnections(t *testing.T) {
	l := &Listener{maxConns: 4, maxPerUID: 2, perUID: map[uint32]int{}, perRoot: map[int32]int{}}
	for i, c := range []struct {
		uid  uint32
		want bool
	}{{7, true}, {7, true}, {7, false}, {0, true}, {8, true}, {0, false}} {
		if got := l.admit(Cred{UID: c.uid, PID: 7}); got != c.want {
			t.Errorf("connection %d of uid %d: admitted %v, want %v", i, c.uid, got, c.want)
		}
	}
	l.release(Cred{UID: 7, PID: 7})
	if !l.admit(Cred{PID: 7}) {
		t.Error("a freed connection slot was not reused")
	}
	if _, refused := l.Conns(); refused != 2 {
		t.Errorf("%d refused, want 2", refused)
	}
}

func TestTrustedUsersShareTheConnectionsOfRoot(t *testing.T) {
	l := &Listener{maxConns: 16, maxPerUID: 8, trusted: []uint32{9}, perUID: map[uint32]int{}, perRoot: map[int32]int{}}
	for i := range uint32(32) {
		l.admit(Cred{UID: 100 + i})
	}
	for pid := range int32(2) {
		if !l.admit(Cred{UID: 9, PID: 1 + pid}) {
			t.Error("a trusted user was refused a connection that is reserved for root")
		}
	}
	l.release(Cred{UID: 9, PID: 1})
	if l.admit(Cred{UID: 1}) {
		t.Error("another user got the connection that is reserved for root")
	}
}

func TestAllOthersTogetherLeaveRootConnections(t *testing.T) {
	l := &Listener{maxConns: 16, maxPerUID: 8, perUID: map[uint32]int{}, perRoot: map[int32]int{}}
	admitted := 0
	for i := range uint32(32) {
		if l.admit(Cred{UID: 1 + i%4}) {
			admitted++
		}
	}
	if admitted != 12 {
		t.Errorf("users hold %d of 16 connections, want 12", admitted)
	}
	for pid := range int32(4) {
		if !l.admit(Cred{PID: 7 + pid}) {
			t.Error("root was refused a connection of the four that are reserved for it")
		}
	}
	if l.admit(Cred{PID: 7}) {
		t.Error("more connections than the bound")
	}
	l.release(Cred{PID: 7})
	if l.admit(Cred{UID: 1}) {
		t.Error("a user got a connection that is reserved for root")
	}
}

func TestOneProcessOfRootLeavesConnectionsToAnother(t *testing.T) {
	l := &Listener{maxConns: 16, maxPerUID: 8, perUID: map[uint32]int{}, perRoot: map[int32]int{}}
	leak := Cred{PID: 7}
	admitted := 0
	for range 32 {
		if l.admit(leak) {
			admitted++
		}
	}
	if admitted != 8 {
		t.Errorf("one process of root holds %d of 16 connections, want 8", admitted)
	}
	if !l.admit(Cred{PID: 8}) {
		t.Error("another process of root was refused")
	}
	for i := range uint32(32) {
		l.admit(Cred{UID: 1 + i%4})
	}
	for l.admit(leak) {
		t.Log("the leaking process got a connection that a user closed")
	}
	for pid := range int32(8) {
		if l.admit(Cred{PID: 100 + pid}) && pid > 0 {
			t.Errorf("more than %d connections", l.maxConns)
		}
	}
	for range admitted {
		l.release(leak)
	}
	if l.perRoot[leak.PID] != 0 || !l.admit(leak) {
		t.Errorf("after its connections were closed: processes %v", l.perRoot)
	}
}

// TestPacketsKeepTheirBoundaries: a socket with messages is prepared like a stream, and its connections have the peer's
// credentials.
func TestPacketsKeepTheirBoundaries(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	l, err := Listen(path, ListenOptions{Packets: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		t.Error("a stream was connected")
	}
	c, err := net.Dial("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	for _, message := range []string{"one", "two"} {
		if _, err := peer.Write([]byte(message)); err != nil {
			t.Fatal(err)
		}
	}
	b := make([]byte, 64)
	if n, err := c.Read(b); err != nil || string(b[:n]) != "one" {
		t.Errorf("the first message is %q, %v", b[:n], err)
	}
	if cred := peer.(interface{ Cred() Cred }).Cred(); cred.UID != uint32(os.Getuid()) || cred.PID != int32(os.Getpid()) {
		t.Errorf("credentials %+v", cred)
	}
}
