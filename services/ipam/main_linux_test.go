// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// asHolder makes it a client that holds idle connections to this socket until
// its standard input ends.
const asHolder = "SLUICE_TEST_HOLD"

func TestMain(m *testing.M) {
	if socket := os.Getenv(asHolder); socket != "" {
		os.Exit(holdConnections(socket))
	}
	servicetest.Main(main)
	leaktest.Main(m)
}

// node is one state directory and the process that uses it, if any.
type node struct {
	*servicetest.Process // nil: none
	t                    *testing.T
	dir                  string
	flags                []string
	limit                int // RLIMIT_NOFILE of the process; 0: that of the test
	ipam                 ipamv1.IPAMServiceClient
}

func newNode(t *testing.T, flags ...string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "ipam-") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return &node{t: t, dir: dir, flags: flags}
}

func (n *node) socket() string { return filepath.Join(n.dir, "run", "ipam.sock") }

// start starts the service and waits until it serves. The end of the test stops
// it as an operator would.
func (n *node) start() {
	n.t.Helper()
	n.startWaiting()
	n.Serving()
}

// startWaiting starts the service, which may have to wait for a range.
func (n *node) startWaiting() {
	n.t.Helper()
	cmd := servicetest.Command(append([]string{
		"--state-dir", filepath.Join(n.dir, "state"), "--socket-path", n.socket(), "--socket-group", "-1",
		"--socket-also-root", fmt.Sprint(os.Getuid()), "--metrics-address", "off", "--log-level", "warn",
	}, n.flags...)...)
	if n.limit > 0 {
		script := fmt.Sprintf(`ulimit -n %d && exec "$0" "$@"`, n.limit)
		cmd.Path, cmd.Args = "/bin/sh", append([]string{"/bin/sh", "-c", script, os.Args[0]}, cmd.Args[1:]...)
	}
	p := servicetest.Start(n.t, cmd, n.socket(), client.Options{})
	n.Process, n.ipam = p, ipamv1.NewIPAMServiceClient(p.Conn)
	n.t.Cleanup(func() {
		if n.Process != p {
			return // dead
		}
		if code := p.Stop(); code != 0 {
			n.t.Errorf("the service ended with %d", code)
		}
	})
}

// dead waits for the end of the process, which must be by SIGKILL.
func (n *node) dead() {
	n.t.Helper()
	n.Killed()
	n.Process = nil
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
	cmd.Env = append(os.Environ(), asHolder+"="+n.socket())
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

// TestKernelIdleConnectionsLeaveDescriptorsToWorkAndRoot: idle connections, of readers or of another process of root,
// must not use up the descriptors that the service needs for its work and for new connections of root.
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
			conn, err := client.Dial(n.socket(), client.Options{WaitForReady: true})
			if err != nil {
				t.Fatal(err)
			}
			// The service may still hold the connection before this one.
			_, err = ipamv1.NewIPAMServiceClient(conn).Allocate(servicetest.Context(t), &ipamv1.AllocateRequest{Owner: owner(fmt.Sprintf("c-%d-%d", uid, i))})
			if err != nil {
				t.Errorf("connection %d of root, with %d idle ones of uid %d: %v", i, held, uid, err)
			}
			conn.Close() //nolint:errcheck // the next one is new
		}
	}
}

func owner(id string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}
}

func list(a *ipamv1.Allocation) []string {
	var out []string
	for _, x := range a.GetAddresses() {
		out = append(out, x.GetAddress())
	}
	return out
}

func show(a *ipamv1.Allocation) string {
	return strings.Join(list(a), " ") + " " + strings.TrimPrefix(a.GetState().String(), "ALLOCATION_STATE_")
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

// history makes calls on a node, and records the answers; after a restart, the node's state must agree with them.
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
	for i := range 4 {
		id := fmt.Sprintf("c%d", i)
		var got *ipamv1.Allocation
		if err := step(id, func() (_ *ipamv1.Allocation, err error) { got, err = n.allocate(id); return got, err }); err != nil {
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

func TestProbesSayThatItServes(t *testing.T) {
	n := newNode(t, servicetest.ProbeFlags...)
	n.start()
	n.WantProbes(200, "ok")
}

func (n *node) allocate(id string, wanted ...string) (*ipamv1.Allocation, error) {
	r, err := n.ipam.Allocate(n.t.Context(), &ipamv1.AllocateRequest{Owner: owner(id), RequestedAddresses: wanted})
	return r.GetAllocation(), err
}

func (n *node) confirm(id string, addresses []string) error {
	request := &ipamv1.ConfirmAllocationRequest{Owner: owner(id), Addresses: addresses}
	_, err := n.ipam.ConfirmAllocation(n.t.Context(), request)
	return err
}

// TestKillAtAnyPointLosesNothingAndGivesNoAddressTwice proves INV-10.
func TestKillAtAnyPointLosesNothingAndGivesNoAddressTwice(t *testing.T) {
	for _, point := range []string{
		"allocate/leased", "confirm/before-commit", "confirm/after-commit",
		"release/before-commit", "release/after-commit",
	} {
		for skip := range 2 {
			t.Run(fmt.Sprintf("%s/%d", point, skip), func(t *testing.T) { killAt(t, "ipam/"+point, skip) })
		}
	}
}

func killAt(t *testing.T, point string, skip int) {
	n := newNode(t, "--pools", "10.0.0.0/28,fd00::/124", "--quarantine", "1h", "--lease", "1h")
	n.start()
	n.Faults.KillAt(point, skip)
	h := &history{told: map[string]string{}}
	lease, err := n.allocate("lease")
	if err == nil {
		err = h.run(n)
	}
	if status.Code(err) != codes.Unavailable {
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
			t.Errorf("%s holds %[3]q, but the answer was %[2]q", id, told, now[id])
		}
	}
	// A lease that ended with the process is another's as soon as that asks.
	if lease != nil {
		if _, err := n.allocate("thief", list(lease)...); err != nil {
			t.Errorf("the addresses of a lease that ended: %v", err)
		}
		if err := n.confirm("lease", list(lease)); status.Code(err) != codes.NotFound {
			t.Errorf("Confirm of a lease that ended: %v, want NOT_FOUND", err)
		}
		if err := n.confirm("thief", list(lease)); err != nil {
			t.Errorf("Confirm of the new lease: %v", err)
		}
		if err := n.confirm("lease", list(lease)); status.Code(err) != codes.NotFound {
			t.Errorf("Confirm of what another holds: %v, want NOT_FOUND", err)
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
		r, err := n.allocate(id)
		if status.Code(err) == codes.ResourceExhausted {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range list(r) {
			if other, ok := held[a]; ok {
				t.Errorf("%s is held by %s and was given to %s", a, other, id)
			}
			held[a] = id
		}
	}
}

func TestKillWhileAQuarantineEndsFreesTheAddressOnce(t *testing.T) {
	for _, place := range []string{"before-commit", "after-commit"} {
		t.Run(place, func(t *testing.T) {
			n := newNode(t, "--pools", "10.0.0.0/30", "--quarantine", "1s", "--lease", "1h")
			n.start()
			n.Faults.KillAt("ipam/expire/"+place, 0)
			got, err := n.allocate("left")
			if err != nil {
				t.Fatal(err)
			}
			if err := n.confirm("left", list(got)); err != nil {
				t.Fatal(err)
			}
			if _, err := n.ipam.Release(t.Context(), &ipamv1.ReleaseRequest{Owner: owner("left")}); err != nil {
				t.Fatal(err)
			}
			n.dead()
			n.start()
			if err := n.confirm("left", list(got)); status.Code(err) != codes.NotFound {
				t.Errorf("Confirm of a released address: %v, want NOT_FOUND", err)
			}
			// The quarantine may have to end again.
			servicetest.Eventually(t, "the one address is free", func() bool {
				again, err := n.allocate("next")
				return err == nil && slices.Equal(list(again), list(got))
			})
			if got := n.all(); len(got) != 1 || got["next"] != "10.0.0.2 LEASED" {
				t.Errorf("held are %v", got)
			}
		})
	}
}

func TestInjectedErrorIsUnavailableAndAskingAgainSucceeds(t *testing.T) {
	n := newNode(t, "--pools", "10.0.0.0/29")
	n.start()
	for _, point := range []string{"allocate/leased", "confirm/before-commit", "confirm/after-commit"} {
		add := func() error {
			id := strings.ReplaceAll(point, "/", ".")
			got, err := n.allocate(id)
			if err != nil {
				return err
			}
			return n.confirm(id, list(got))
		}
		n.Faults.FailAt("ipam/"+point, 0, "as the test wants")
		if err := add(); status.Code(err) != codes.Unavailable {
			t.Fatalf("%s: %v", point, err)
		}
		n.Faults.Pass("ipam/" + point)
		if err := add(); err != nil {
			t.Fatalf("%s, asked again: %v", point, err)
		}
	}
	addresses := map[string]bool{}
	for _, what := range n.all() {
		addresses[what] = true
	}
	if len(addresses) != 3 {
		t.Errorf("held are %v", n.all())
	}
}

func TestEveryFaultPointIsTested(t *testing.T) {
	n := newNode(t)
	n.start()
	names, err := n.Faults.Names(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"ipam/allocate/leased"}
	for _, point := range []string{"claim/before-ask", "claim/answered", "claim/stored", "return/answered", "return/stored"} {
		want = append(want, "ipam/"+point)
	}
	for _, verb := range []string{"confirm", "expire", "ranges", "release"} {
		want = append(want, "ipam/"+verb+"/after-commit", "ipam/"+verb+"/before-commit")
	}
	slices.Sort(want)
	names = slices.DeleteFunc(names, func(s string) bool { return !strings.HasPrefix(s, "ipam/") })
	if !slices.Equal(names, want) {
		t.Errorf("the binary has the points %q, the tests know %q", names, want)
	}
}

func TestConfigurationIsRefusedWithEveryProblem(t *testing.T) {
	out, err := servicetest.Command("--pools", "10.0.0.1/24,10.1.0.0/16,10.1.2.0/24,nonsense", "--exclude", "x", "--lease", "0s", "--quarantine", "-1s", "--state-dir", "here").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Fatalf("ended with %v, want exit code 2:\n%s", err, out)
	}
	for _, want := range []string{
		"pools[0]", "pools[2]: 10.1.2.0/24 overlaps pools[1]", "pools[3]", "exclude[0]", "lease", "quarantine", "stateDir",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the output does not name %s:\n%s", want, out)
		}
	}
}
