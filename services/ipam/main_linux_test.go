// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/fault/faulttest"
	"github.com/sluice-net/sluice/kit/leaktest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// asService makes this test binary be the service, so that what is killed is
// the code under test, with the race detector if the tests have it.
const asService = "SLUICE_TEST_BE_IPAM"

// asHolder makes it a client that holds idle connections to this socket until
// its standard input ends.
const asHolder = "SLUICE_TEST_HOLD"

func TestMain(m *testing.M) {
	if socket := os.Getenv(asHolder); socket != "" {
		os.Exit(holdConnections(socket))
	}
	if os.Getenv(asService) != "" {
		os.Unsetenv(asService) //nolint:errcheck // cannot fail with this name
		main()
		return
	}
	leaktest.Main(m)
}

// node is one state directory and the process that uses it, if any.
type node struct {
	t      *testing.T
	dir    string
	flags  []string
	limit  int // RLIMIT_NOFILE of the process; 0: that of the test
	cmd    *exec.Cmd
	faults *faulttest.Controller
	conn   *grpc.ClientConn
	ipam   ipamv1.IPAMServiceClient
}

func newNode(t *testing.T, flags ...string) *node {
	n := &node{t: t, dir: t.TempDir(), flags: flags}
	t.Cleanup(n.stop)
	return n
}

// start starts the service and waits until it serves.
func (n *node) start() {
	n.t.Helper()
	socket := filepath.Join(n.dir, "run", "ipam.sock")
	args := append([]string{
		"--state-dir", filepath.Join(n.dir, "state"), "--socket-path", socket, "--socket-group", "-1",
		"--socket-also-root", fmt.Sprint(os.Getuid()), "--metrics-address", "off", "--log-level", "warn",
	}, n.flags...)
	n.cmd = exec.Command(os.Args[0], args...) //nolint:gosec // this very binary
	if n.limit > 0 {
		script := fmt.Sprintf(`ulimit -n %d && exec "$0" "$@"`, n.limit)
		n.cmd = exec.Command("/bin/sh", append([]string{"-c", script, os.Args[0]}, args...)...)
	}
	// Without the second that the race detector sleeps at the end.
	n.cmd.Env = append(os.Environ(), asService+"=1", "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	n.cmd.Stderr = os.Stderr
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	n.faults = faulttest.Start(n.t, n.cmd)
	n.conn = n.dial()
	n.ipam = ipamv1.NewIPAMServiceClient(n.conn)
	ctx, cancel := context.WithTimeout(n.t.Context(), 30*time.Second)
	defer cancel()
	watch, err := grpc_health_v1.NewHealthClient(n.conn).Watch(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.WaitForReady(true))
	for err == nil {
		var got *grpc_health_v1.HealthCheckResponse
		if got, err = watch.Recv(); err == nil && got.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING {
			return
		}
	}
	n.t.Fatalf("the service does not serve: %v", err)
}

// dial gives a connection that is tried again soon when it fails: the socket may
// not be there yet.
func (n *node) dial() *grpc.ClientConn {
	n.t.Helper()
	conn, err := grpc.NewClient("unix:"+filepath.Join(n.dir, "run", "ipam.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond},
			MinConnectTimeout: 20 * time.Second,
		}))
	if err != nil {
		n.t.Fatal(err)
	}
	return conn
}

// dead waits for the end of the process, which must be by SIGKILL.
func (n *node) dead() {
	n.t.Helper()
	err := n.cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		n.t.Fatalf("the process ended with %v, want SIGKILL", err)
	}
	n.cmd = nil
	n.conn.Close() //nolint:errcheck // nobody is at the other end
	n.faults.Close()
}

// stop ends the process, if there is one, as an operator would.
func (n *node) stop() {
	if n.cmd == nil {
		return
	}
	n.conn.Close() //nolint:errcheck // the test is over
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		n.t.Errorf("end the service: %v", err)
	}
	if err := n.cmd.Wait(); err != nil {
		n.t.Errorf("the service ended with %v", err)
	}
	n.faults.Close()
	n.cmd = nil
}

// held is how many connections a holder opens.
const held = 100

func holdConnections(socket string) int {
	for range held {
		c, err := net.Dial("unix", socket)
		if err != nil {
			fmt.Println("dial:", err)
			return 1
		}
		defer c.Close()
		// Whole HTTP/2 connections: the server gives up on others after a while.
		// The ones that it refused are closed already.
		_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
	}
	fmt.Println("held")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return 1
	}
	return 0
}

// hold runs a holder as a user until the end of the test.
func (n *node) hold(uid uint32) {
	n.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), asHolder+"="+filepath.Join(n.dir, "run", "ipam.sock"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: uid}}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		stdin.Close() //nolint:errcheck // the holder ends
		if err := cmd.Wait(); err != nil {
			n.t.Errorf("holder: %v", err)
		}
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "held\n" {
		n.t.Fatalf("holder of uid %d says %q, %v", uid, line, err)
	}
}

// Connections that do nothing must not cost the service the descriptors that it
// works with, nor root its way in: neither those of readers nor those of
// another process of root.
func TestKernelIdleConnectionsLeaveDescriptorsToWorkAndRoot(t *testing.T) {
	n := newNode(t, "--pools", "10.1.0.0/24")
	n.limit = 64
	n.start()
	for _, dir := range []string{filepath.Dir(n.dir), n.dir, filepath.Join(n.dir, "run")} {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // the holder is another user
			t.Fatal(err)
		}
	}
	for _, uid := range []uint32{65799, 64798, 0} {
		n.hold(uid)
		for i := range 4 {
			conn := n.dial()
			// The service may still hold the connection before this one.
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			_, err := ipamv1.NewIPAMServiceClient(conn).Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner(fmt.Sprintf("c-%d-%d", uid, i))}, grpc.WaitForReady(true))
			if err != nil {
				t.Errorf("connection %d of root beside %d idle ones of uid %d: %v", i, held, uid, err)
			}
			cancel()
			conn.Close() //nolint:errcheck // the next one is new
		}
	}
}

func owner(id string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
}

func list(a *ipamv1.Allocation) [][]byte {
	var out [][]byte
	for _, x := range a.GetAddresses() {
		out = append(out, x.GetAddress())
	}
	return out
}

func show(a *ipamv1.Allocation) string {
	var out []string
	for _, b := range list(a) {
		addr, _ := netip.AddrFromSlice(b)
		out = append(out, addr.String())
	}
	return strings.Join(out, " ") + " " + strings.TrimPrefix(a.GetState().String(), "ALLOCATION_STATE_")
}

func (n *node) all() map[string]string {
	n.t.Helper()
	out := map[string]string{}
	stream, err := n.ipam.ListAllocations(n.t.Context(), &ipamv1.ListAllocationsRequest{})
	if err != nil {
		n.t.Fatal(err)
	}
	for {
		got, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			n.t.Fatal(err)
		}
		out[got.GetAllocation().GetOwner().GetContainerId()] = show(got.GetAllocation())
	}
}

// history is a short life on a node: what it was told is what must be true
// after a restart.
type history struct {
	told    map[string]string // what each owner was told it holds; "" after a release
	pending string            // the owner of the call that got no answer
}

func (h *history) run(n *node) error {
	ctx := n.t.Context()
	step := func(id string, call func() (*ipamv1.Allocation, error)) error {
		h.pending = id
		a, err := call()
		if err != nil {
			return err
		}
		h.pending = ""
		h.told[id] = ""
		if a != nil {
			h.told[id] = show(a)
		}
		return nil
	}
	allocate := func(id string) (*ipamv1.Allocation, error) {
		r, err := n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner(id)})
		return r.GetAllocation(), err
	}
	for i := range 4 {
		id := fmt.Sprintf("c%d", i)
		var got *ipamv1.Allocation
		if err := step(id, func() (_ *ipamv1.Allocation, err error) { got, err = allocate(id); return got, err }); err != nil {
			return err
		}
		if err := step(id, func() (*ipamv1.Allocation, error) {
			r, err := n.ipam.ConfirmAllocation(ctx, &ipamv1.ConfirmAllocationRequest{Owner: owner(id), Addresses: list(got)})
			return r.GetAllocation(), err
		}); err != nil {
			return err
		}
		if i%2 == 1 {
			if err := step(id, func() (*ipamv1.Allocation, error) {
				_, err := n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner(id)})
				return nil, err
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestKillAtAnyPointLosesNothingAndGivesNoAddressTwice(t *testing.T) {
	for _, verb := range []string{"allocate", "confirm", "release"} {
		for _, place := range []string{"before-commit", "after-commit"} {
			for skip := range 2 {
				point := "ipam/" + verb + "/" + place
				t.Run(fmt.Sprintf("%s/%s/%d", verb, place, skip), func(t *testing.T) {
					n := newNode(t, "--pools", "10.0.0.0/28,fd00::/124", "--rest", "1h", "--lease", "1h")
					n.start()
					n.faults.KillAt(point, skip)
					h := &history{told: map[string]string{}}
					if err := h.run(n); status.Code(err) != codes.Unavailable {
						t.Fatalf("the history ended with %v, want the death of the service", err)
					}
					n.dead()
					n.start()
					now := n.all()
					for id, told := range h.told {
						switch {
						case id == h.pending: // either is right: there was no answer
						case told == "" && now[id] != "":
							t.Errorf("%s was released and holds %s", id, now[id])
						case told != now[id]:
							t.Errorf("%s was told %q and holds %q", id, told, now[id])
						}
					}
					// Everybody asks again; then the pool is emptied.
					if err := h.run(n); err != nil {
						t.Fatalf("the history after the restart: %v", err)
					}
					held := map[string]string{}
					for id, what := range n.all() {
						for _, a := range strings.Fields(what)[:2] {
							held[a] = id
						}
					}
					for i := 0; ; i++ {
						id := fmt.Sprintf("rest%d", i)
						r, err := n.ipam.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner(id)})
						if status.Code(err) == codes.ResourceExhausted {
							break
						}
						if err != nil {
							t.Fatal(err)
						}
						for _, a := range strings.Fields(show(r.GetAllocation()))[:2] {
							if other, ok := held[a]; ok {
								t.Errorf("%s is held by %s and was given to %s", a, other, id)
							}
							held[a] = id
						}
					}
				})
			}
		}
	}
}

func TestKillWhileALeaseExpiresFreesItOnce(t *testing.T) {
	for _, place := range []string{"before-commit", "after-commit"} {
		t.Run(place, func(t *testing.T) {
			n := newNode(t, "--pools", "10.0.0.0/29", "--rest", "0s", "--lease", "1s")
			n.start()
			n.faults.KillAt("ipam/expire/"+place, 0)
			for _, id := range []string{"kept", "left"} {
				if _, err := n.ipam.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner(id)}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := n.ipam.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{Owner: owner("kept"), Addresses: [][]byte{{10, 0, 0, 2}}}); err != nil {
				t.Fatal(err)
			}
			n.dead()
			n.start()
			if _, err := n.ipam.ConfirmAllocation(t.Context(), &ipamv1.ConfirmAllocationRequest{Owner: owner("left"), Addresses: [][]byte{{10, 0, 0, 3}}}); status.Code(err) != codes.NotFound {
				t.Errorf("Confirm of an expired lease: %v, want NOT_FOUND", err)
			}
			if got := n.all(); len(got) != 1 || got["kept"] != "10.0.0.2 CONFIRMED" {
				t.Errorf("held are %v", got)
			}
		})
	}
}

func TestInjectedErrorIsUnavailableAndAskingAgainSucceeds(t *testing.T) {
	n := newNode(t, "--pools", "10.0.0.0/29")
	n.start()
	for _, place := range []string{"before-commit", "after-commit"} {
		point := "ipam/allocate/" + place
		n.faults.FailAt(point, 0, "as the test wants")
		if _, err := n.ipam.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner(place)}); status.Code(err) != codes.Unavailable {
			t.Fatalf("%s: %v", place, err)
		}
		n.faults.Pass(point)
		if _, err := n.ipam.Allocate(t.Context(), &ipamv1.AllocateRequest{Owner: owner(place)}); err != nil {
			t.Fatalf("%s, asked again: %v", place, err)
		}
	}
	if got := n.all(); len(got) != 2 || got["before-commit"] == got["after-commit"] {
		t.Errorf("held are %v", got)
	}
}

func TestEveryFaultPointIsTested(t *testing.T) {
	n := newNode(t)
	n.start()
	names, err := n.faults.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, verb := range []string{"allocate", "confirm", "expire", "release"} {
		want = append(want, "ipam/"+verb+"/after-commit", "ipam/"+verb+"/before-commit")
	}
	names = slices.DeleteFunc(names, func(s string) bool { return !strings.HasPrefix(s, "ipam/") })
	if !slices.Equal(names, want) {
		t.Errorf("the binary has the points %q, the tests know %q", names, want)
	}
}

func TestConfigurationIsRefusedWithEveryProblem(t *testing.T) {
	cmd := exec.Command(os.Args[0], "--pools", "10.0.0.1/24,10.1.0.0/16,10.1.2.0/24,nonsense", "--exclude", "x", "--lease", "0s", "--rest", "-1s", "--state-dir", "here") //nolint:gosec // this very binary
	cmd.Env = append(os.Environ(), asService+"=1")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Fatalf("ended with %v, want exit code 2:\n%s", err, out)
	}
	for _, want := range []string{"pools[0]", "pools[2]: 10.1.2.0/24 overlaps pools[1]", "pools[3]", "exclude[0]", "lease", "rest", "stateDir"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the output does not name %s:\n%s", want, out)
		}
	}
}
