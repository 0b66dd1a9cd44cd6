// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/privilege"
	"github.com/sluice-net/sluice/kit/privilege/privilegetest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// executable is the service as shipped: built without cgo, because the Go runtime refuses to change the capabilities of
// threads that C may have created.
var executable string

func TestMain(m *testing.M) {
	if os.Getenv(takenEnv) != "" {
		os.Exit(process.Run(service, defaults, taken, process.Privileged(instance.DatapathID, capabilities...)))
	}
	// All files of the tests are below this directory, apart from other tests that mount at the same time. The name is
	// short, because socket paths are limited.
	dir, err := os.MkdirTemp("", "dp")
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	executable = filepath.Join(dir, "sluice-datapath")
	build := exec.Command("go", "build", "-o", executable, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	code := 1
	if err := os.Chmod(dir, 0o755); err != nil { // the service runs as another user
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
	} else {
		// Keeps tests off the main thread. netnstest.New leaves its thread in the new namespace and relies on the thread's
		// end. The main thread cannot end: it would keep the namespace alive, and /proc/self/net would show that namespace.
		runtime.LockOSThread()
		// Only endpoint devices are checked: development nodes have devices with other names.
		code = leaktest.Run(m, leaktest.Links("sl"+strings.Repeat("[0-9a-f]", 11)), leaktest.Mounts(dir))
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// fakeServices are sluice-ipam and sluice-identity as the datapath sees them.
type fakeServices struct {
	ipamv1.UnimplementedIPAMServiceServer
	identityv1.UnimplementedIdentityServiceServer

	mu         sync.Mutex
	confirmed  map[string]*workloadv1.Owner
	identities map[string]bool
}

func key(o *workloadv1.Owner) string { return o.GetContainerId() + "/" + o.GetInterfaceName() }

func (s *fakeServices) ConfirmAllocation(_ context.Context, r *ipamv1.ConfirmAllocationRequest) (*ipamv1.ConfirmAllocationResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmed[key(r.GetOwner())] = r.GetOwner()
	return &ipamv1.ConfirmAllocationResponse{}, nil
}

func (s *fakeServices) Release(_ context.Context, r *ipamv1.ReleaseRequest) (*ipamv1.ReleaseResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.confirmed, key(r.GetOwner()))
	return &ipamv1.ReleaseResponse{}, nil
}

func (s *fakeServices) ListAllocations(_ *ipamv1.ListAllocationsRequest, stream grpc.ServerStreamingServer[ipamv1.ListAllocationsResponse]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.confirmed {
		if err := stream.Send(&ipamv1.ListAllocationsResponse{Allocation: &ipamv1.Allocation{
			Owner: o, State: ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED,
		}}); err != nil {
			return err
		}
	}
	return nil
}

func (s *fakeServices) ListPools(context.Context, *ipamv1.ListPoolsRequest) (*ipamv1.ListPoolsResponse, error) {
	return &ipamv1.ListPoolsResponse{Pools: []*ipamv1.Pool{
		{Prefix: "10.98.0.0/24", Gateway: "10.98.0.1"}, {Prefix: "fd00:98::/64", Gateway: "fd00:98::1"},
	}}, nil
}

func (s *fakeServices) ResolveEndpoint(_ context.Context, r *identityv1.ResolveEndpointRequest) (*identityv1.ResolveEndpointResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.identities[key(r.GetOwner())] = true
	return &identityv1.ResolveEndpointResponse{Identity: &identityv1.Identity{Number: 300, Labels: r.GetLabels()}}, nil
}

func (s *fakeServices) ReleaseIdentity(_ context.Context, r *identityv1.ReleaseIdentityRequest) (*identityv1.ReleaseIdentityResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.identities, key(r.GetOwner()))
	return &identityv1.ReleaseIdentityResponse{}, nil
}

// identityOnly separates methods of the same name in both services.
type identityOnly struct {
	identityv1.UnimplementedIdentityServiceServer
	s *fakeServices
}

func (i identityOnly) ResolveEndpoint(ctx context.Context, r *identityv1.ResolveEndpointRequest) (*identityv1.ResolveEndpointResponse, error) {
	return i.s.ResolveEndpoint(ctx, r)
}

func (i identityOnly) ReleaseIdentity(ctx context.Context, r *identityv1.ReleaseIdentityRequest) (*identityv1.ReleaseIdentityResponse, error) {
	return i.s.ReleaseIdentity(ctx, r)
}

func (identityOnly) GetStatus(context.Context, *identityv1.GetStatusRequest) (*identityv1.GetStatusResponse, error) {
	return &identityv1.GetStatusResponse{}, nil
}

type ipamOnly struct {
	ipamv1.UnimplementedIPAMServiceServer
	s *fakeServices
}

func (i ipamOnly) ConfirmAllocation(ctx context.Context, r *ipamv1.ConfirmAllocationRequest) (*ipamv1.ConfirmAllocationResponse, error) {
	return i.s.ConfirmAllocation(ctx, r)
}

func (i ipamOnly) Release(ctx context.Context, r *ipamv1.ReleaseRequest) (*ipamv1.ReleaseResponse, error) {
	return i.s.Release(ctx, r)
}

func (i ipamOnly) ListAllocations(r *ipamv1.ListAllocationsRequest, st grpc.ServerStreamingServer[ipamv1.ListAllocationsResponse]) error {
	return i.s.ListAllocations(r, st)
}

func (i ipamOnly) ListPools(ctx context.Context, r *ipamv1.ListPoolsRequest) (*ipamv1.ListPoolsResponse, error) {
	return i.s.ListPools(ctx, r)
}

func (i ipamOnly) GetStatus(context.Context, *ipamv1.GetStatusRequest) (*ipamv1.GetStatusResponse, error) {
	return &ipamv1.GetStatusResponse{}, nil
}

// testNode is a machine with one datapath.
type testNode struct {
	*servicetest.Process // nil: not running

	t        *testing.T
	whole    *testing.T // the parent test: the process outlives subtests
	dir      string
	home     int // fd of the node's network namespace
	services *fakeServices
	launch   func(cmd *exec.Cmd, start func() error) error // starts the process; nil: as root
	datapath datapathv1.DatapathServiceClient
}

func newNetns(t *testing.T) int {
	t.Helper()
	ch := make(chan int)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("unshare: %v (kernel tests need root)", err)
			ch <- -1
			return
		}
		fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Error(err)
			fd = -1
		}
		ch <- fd
	}()
	fd := <-ch
	if fd < 0 {
		t.FailNow()
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// in runs fn on a new thread in the namespace. The thread ends with fn.
func in(fd int, fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(fd, unix.CLONE_NEWNET)
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	return <-done
}

func newNode(t *testing.T) *testNode {
	// t.TempDir may be too long for a socket path.
	dir, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	n := &testNode{t: t, whole: t, dir: dir, home: newNetns(t), services: &fakeServices{confirmed: map[string]*workloadv1.Owner{}, identities: map[string]bool{}}}
	for name, register := range map[string]func(*grpc.Server){
		"ipam":     func(s *grpc.Server) { ipamv1.RegisterIPAMServiceServer(s, ipamOnly{s: n.services}) },
		"identity": func(s *grpc.Server) { identityv1.RegisterIdentityServiceServer(s, identityOnly{s: n.services}) },
	} {
		socket := filepath.Join(n.dir, name+".sock")
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(socket, 0o666); err != nil { // the service runs as another user
			t.Fatal(err)
		}
		s := grpc.NewServer()
		healthpb.RegisterHealthServer(s, health.NewServer())
		register(s)
		served := make(chan struct{})
		go func() { defer close(served); _ = s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-served })
	}
	bpf := filepath.Join(n.dir, "bpf")
	if err := os.Mkdir(bpf, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", bpf, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	enterable(t, n.dir)
	for _, dir := range []string{n.dir, bpf} {
		if err := os.Chown(dir, int(instance.DatapathID), int(instance.GroupID)); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(bpf, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return n
}

// enterable lets other users enter a directory of t.TempDir.
func enterable(t *testing.T, dir string) {
	t.Helper()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
}

func (n *testNode) command(flags ...string) *exec.Cmd {
	args := append([]string{
		"--instance", "datapath-test", "--state-dir", filepath.Join(n.dir, "state"), "--spool-dir", filepath.Join(n.dir, "spool"),
		"--bpf-dir", filepath.Join(n.dir, "bpf"), "--netns-dirs", os.TempDir(), "--pod-cidrs", "10.98.0.0/24,fd00:98::/64", "--mtu", "1400",
		"--services-ipam", filepath.Join(n.dir, "ipam.sock"), "--services-identity", filepath.Join(n.dir, "identity.sock"),
		"--policy-mode", "none", "--socket-path", filepath.Join(n.dir, "run", "datapath.sock"), "--metrics-address", filepath.Join(n.dir, "metrics.sock"), "--log-level", "error",
	}, flags...)
	return exec.Command(executable, args...) //nolint:gosec // built by TestMain
}

// start starts the process and waits until it serves.
func (n *testNode) start(flags ...string) {
	n.t.Helper()
	n.run(flags...)
	n.Serving()
}

// run starts the process.
func (n *testNode) run(flags ...string) {
	n.t.Helper()
	cmd := n.command(flags...)
	n.Process = servicetest.StartBy(n.whole, func(start func() error) error {
		return in(n.home, func() error {
			if n.launch != nil {
				return n.launch(cmd, start)
			}
			return start()
		})
	}, cmd, filepath.Join(n.dir, "run", "datapath.sock"), client.Options{})
	n.datapath = datapathv1.NewDatapathServiceClient(n.Conn)
	n.whole.Cleanup(n.stop)
}

// stop terminates the process, if one is running, and requires exit code 0.
func (n *testNode) stop() {
	if n.Process == nil {
		return
	}
	if code := n.Stop(); code != 0 {
		n.t.Errorf("the service ended with %d", code)
	}
	n.Process = nil
}

// pod binds a new network namespace to a file, as container runtimes do: the process must not read other processes'
// /proc.
func (n *testNode) pod() string {
	n.t.Helper()
	fd := newNetns(n.t)
	dir := n.t.TempDir()
	enterable(n.t, dir)
	path := filepath.Join(dir, "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", fd), path, "", unix.MS_BIND, ""); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			n.t.Error(err)
		}
	})
	return path
}

func (n *testNode) request(name string, last byte, ns string) *datapathv1.CreateEndpointRequest {
	a6 := netip.MustParseAddr("fd00:98::").As16()
	a6[15] = last
	return &datapathv1.CreateEndpointRequest{
		Owner:            &workloadv1.Owner{ContainerId: name, InterfaceName: "eth0"},
		NetworkNamespace: ns,
		Addresses:        []string{netip.AddrFrom4([4]byte{10, 98, 0, last}).String(), netip.AddrFrom16(a6).String()},
	}
}

// leftovers describes what exists because of endpoints, except for the process's memory.
func (n *testNode) leftovers() string {
	n.services.mu.Lock()
	left := []string{fmt.Sprintf("%d leases, %d identities", len(n.services.confirmed), len(n.services.identities))}
	n.services.mu.Unlock()
	records, err := os.ReadDir(filepath.Join(n.dir, "state", "endpoints"))
	left = append(left, fmt.Sprintf("%d records %v", len(records), err))
	var devices int
	err = in(n.home, func() error {
		ifs, err := net.Interfaces()
		for _, i := range ifs {
			if strings.HasPrefix(i.Name, "sl") {
				devices++
			}
		}
		return err
	})
	left = append(left, fmt.Sprintf("%d devices %v", devices, err))
	st, err := n.datapath.GetStatus(n.t.Context(), &datapathv1.GetStatusRequest{})
	for _, e := range st.GetEndpoints() {
		if e.GetCount() > 0 {
			left = append(left, fmt.Sprintf("%d %v", e.GetCount(), e.GetState()))
		}
	}
	return strings.Join(append(left, fmt.Sprintf("%d pending, %v", st.GetPendingReleases(), err)), "; ")
}

const nothing = "0 leases, 0 identities; 0 records <nil>; 0 devices <nil>; 0 pending, <nil>"

func (n *testNode) nothingIsLeft() {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, "nothing is left", func() error {
		if left := n.leftovers(); left != nothing {
			return errors.New(left)
		}
		return nil
	})
	audit, err := n.datapath.AuditMaps(n.t.Context(), &datapathv1.AuditMapsRequest{})
	for err == nil {
		var m *datapathv1.AuditMapsResponse
		if m, err = audit.Recv(); err == nil {
			n.t.Errorf("the audit finds %v", m.GetDifference())
		}
	}
}

// TestKernelProcessHasExactlyItsCapabilities proves INV-1 for each way to start the process.
func TestKernelProcessHasExactlyItsCapabilities(t *testing.T) {
	four := []privilege.Cap{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}
	six := append([]privilege.Cap{unix.CAP_SETUID, unix.CAP_SETGID}, four...)
	for _, c := range []struct {
		name     string
		launch   func(cmd *exec.Cmd, start func() error) error
		bounding []privilege.Cap
	}{
		{"as root", nil, four},
		{"as root in a container with these and the right to change the user", func(_ *exec.Cmd, start func() error) error {
			return errors.Join(bound(six), start())
		}, six},
		{"as its user with ambient capabilities, as systemd does", func(cmd *exec.Cmd, start func() error) error {
			cmd.SysProcAttr = &syscall.SysProcAttr{
				Credential:  &syscall.Credential{Uid: instance.DatapathID, Gid: instance.GroupID, Groups: []uint32{instance.GroupID}},
				AmbientCaps: []uintptr{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN},
			}
			return errors.Join(bound(four), start())
		}, four},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			n.launch = c.launch
			n.start()
			n.wantRights(privilege.SetOf(four...), privilege.SetOf(c.bounding...))
			// The capabilities suffice.
			r := n.request("a", 2, n.pod())
			if _, err := n.datapath.CreateEndpoint(t.Context(), r); err != nil {
				t.Error(err)
			}
			if _, err := n.datapath.DeleteEndpoint(t.Context(), &datapathv1.DeleteEndpointRequest{Owner: r.GetOwner()}); err != nil {
				t.Error(err)
			}
			n.nothingIsLeft()
		})
	}
}

// bound drops capabilities from the bounding set of the calling thread and the processes that it starts, as a container
// or a unit does. The thread is not used afterwards.
func bound(keep []privilege.Cap) error {
	for c := privilege.Cap(0); c <= unix.CAP_LAST_CAP; c++ {
		if slices.Contains(keep, c) {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// wantRights checks every thread of the process.
func (n *testNode) wantRights(capabilities, bounding privilege.Set) {
	n.t.Helper()
	set := func(s privilege.Set) string { return fmt.Sprintf("%016x", uint64(s)) }
	want := map[string]string{
		"Uid": "65706\t65706\t65706\t65706", "Gid": "65700\t65700\t65700\t65700", "Groups": "65700",
		"CapPrm": set(capabilities), "CapEff": set(capabilities), "CapBnd": set(bounding),
		"CapInh": set(0), "CapAmb": set(0), "NoNewPrivs": "1", "Seccomp": "2",
	}
	for _, have := range privilegetest.Threads(n.t, n.Cmd.Process.Pid) {
		for k, v := range want {
			if have[k] != v {
				n.t.Errorf("thread %s: %s is %q, want %q", have["Pid"], k, have[k], v)
			}
		}
	}
}

// TestKernelKilledAtEveryFaultPointLeavesNothing kills the process between any two steps of ADD and DEL and starts it
// again. No state of the interrupted call may remain.
func TestKernelKilledAtEveryFaultPointLeavesNothing(t *testing.T) {
	n := newNode(t)
	n.start()
	points, err := n.Faults.Names(servicetest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	tested := 0
	for _, point := range points {
		if !strings.HasPrefix(point, "datapath/create/") && !strings.HasPrefix(point, "datapath/delete/") || point == "datapath/create/policy" {
			continue // no policies here; the node tests kill the process while it applies policies
		}
		tested++
		t.Run(strings.TrimPrefix(point, "datapath/"), func(t *testing.T) {
			n.t = t
			pod := n.pod()
			r := n.request("killed", 2, pod)
			n.Faults.KillAt(point, 0)
			_, err := n.datapath.CreateEndpoint(t.Context(), r)
			if strings.HasPrefix(point, "datapath/delete/") {
				if err != nil {
					t.Fatal(err)
				}
				// DEL may return before the fault point
				_, err = n.datapath.DeleteEndpoint(t.Context(), &datapathv1.DeleteEndpointRequest{Owner: r.GetOwner()})
				if err != nil && status.Code(err) != codes.Unavailable {
					t.Fatal(err)
				}
			} else if status.Code(err) != codes.Unavailable {
				t.Fatalf("create: %v, want the connection to break", err)
			}
			if n.Exit(); n.Cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the process ended with %s, want SIGKILL", n.Cmd.ProcessState)
			}
			n.start()
			// the runtime cleans up after an error, by name
			if _, err := n.datapath.DeleteEndpoint(t.Context(), &datapathv1.DeleteEndpointRequest{Owner: r.GetOwner()}); err != nil {
				t.Fatal(err)
			}
			n.nothingIsLeft()
		})
		n.t = t
	}
	if tested != 16 {
		t.Errorf("%d fault points tested, want 16", tested)
	}
}

func TestKernelValidateOnlyChangesNothingAndTellsByItsExitCode(t *testing.T) {
	n := newNode(t)
	n.start()
	pod := n.pod()
	if _, err := n.datapath.CreateEndpoint(t.Context(), n.request("a", 2, pod)); err != nil {
		t.Fatal(err)
	}
	validate := func() error {
		cmd := n.command("--validate-only")
		cmd.Stderr = nil
		return in(n.home, cmd.Run)
	}
	if err := validate(); err != nil {
		t.Errorf("while the service runs: %v", err)
	}
	n.stop()
	if err := validate(); err != nil {
		t.Errorf("a node without differences: %v", err)
	}
	ifs := func() (names []string) {
		if err := in(n.home, func() error {
			all, err := net.Interfaces()
			for _, i := range all {
				names = append(names, i.Name+" "+i.Flags.String())
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return names
	}
	before := ifs()
	if err := os.Remove(filepath.Join(n.dir, "state", "endpoints", recordOf(t, n))); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := validate(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("a node with a stray device: %v, want exit code 1", err)
	}
	if after := ifs(); strings.Join(after, ",") != strings.Join(before, ",") {
		t.Errorf("devices before %v, after %v", before, after)
	}
	n.start() // a real start repairs what --validate-only reported, and compares with ipam
	n.nothingIsLeft()
}

// TestKernelUninstallLeavesTheNetworkAsItWas compares the network before the start and after uninstalling, and requires
// that uninstalling fails while the service runs.
func TestKernelUninstallLeavesTheNetworkAsItWas(t *testing.T) {
	n := newNode(t)
	network := func() (all string) {
		t.Helper()
		if err := in(n.home, func() error {
			for _, command := range []string{
				"ip -o link show", "ip -o addr show", "ip rule", "ip -6 rule",
				"ip route show table all", "ip -6 route show table all", "nft list ruleset",
			} {
				words := strings.Fields(command)
				out, err := exec.Command(words[0], words[1:]...).CombinedOutput() //nolint:gosec // the commands above
				if err != nil {
					return fmt.Errorf("%s: %w: %s", command, err, out)
				}
				all += "# " + command + "\n" + string(out)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		// Link states settle on their own, and counters change.
		return regexp.MustCompile(`<\S*>|state \w+|counter packets \d+ bytes \d+| linkdown`).ReplaceAllString(all, "")
	}
	uninstall := func() error {
		cmd := n.command("--uninstall")
		return in(n.home, func() error {
			out, err := cmd.CombinedOutput()
			return errors.Join(err, errors.New(string(out)))
		})
	}
	if err := in(n.home, exec.Command("ip", "link", "set", "lo", "up").Run); err != nil {
		t.Fatal(err)
	}
	before := network()
	n.start()
	if _, err := n.datapath.CreateEndpoint(t.Context(), n.request("a", 2, n.pod())); err != nil {
		t.Fatal(err)
	}
	during := network()
	for _, made := range []string{
		"10.98.0.1/32", "prohibit", "unreachable 10.98.0.0/24", "table inet sluice-datapath-test", ": sl",
	} {
		if !strings.Contains(during, made) {
			t.Errorf("the running service created no %q:\n%s", made, during)
		}
	}
	if err := uninstall(); !strings.Contains(err.Error(), "another process") {
		t.Errorf("while the service runs: %v, want an error", err)
	}
	if now := network(); now != during {
		t.Errorf("the refusal changed\n%s\nto\n%s", during, now)
	}
	n.stop()
	for range 2 { // the second run finds nothing
		if err := uninstall(); strings.TrimSpace(err.Error()) != "" {
			t.Fatal(err)
		}
		if now := network(); now != before {
			t.Errorf("the network before:\n%s\nafter:\n%s", before, now)
		}
	}
}

func recordOf(t *testing.T, n *testNode) string {
	t.Helper()
	files, err := os.ReadDir(filepath.Join(n.dir, "state", "endpoints"))
	if err != nil || len(files) != 1 {
		t.Fatalf("records %v, %v", files, err)
	}
	return files[0].Name()
}

// TestKernelProbesSayWhatItWaitsFor starts a datapath without its policy service or without a pod range. It runs, but
// is not ready. Once it has received its ranges, it needs them only once.
func TestKernelProbesSayWhatItWaitsFor(t *testing.T) {
	n := newNode(t)
	learning := append([]string{"--pod-cidrs="}, servicetest.ProbeFlags...)
	n.run(learning...)
	n.WantProbes(503, "waiting for the pod ranges of sluice-ipam")
	st, err := n.datapath.GetStatus(servicetest.Context(t), &datapathv1.GetStatusRequest{})
	if err != nil || st.GetAddReady() || !strings.Contains(fmt.Sprint(st.GetService().GetProblems()), "no pod range is known") {
		t.Errorf("without a range the status is %v, %v", st, err)
	}
	n.stop()
	away := append([]string{"--policy-mode", "required", "--services-policy", filepath.Join(n.dir, "policy.sock")},
		servicetest.ProbeFlags...)
	n.run(away...)
	n.WantProbes(503, "waiting for the policy tables")
	n.stop()
	n.run(servicetest.ProbeFlags...)
	n.WantProbes(200, "ok")
	n.stop()
	n.run(learning...)
	n.WantProbes(200, "ok")
}

// TestKernelMissingMountEndsTheStartByName starts the datapath without a required mount. It must exit and name the
// mount; otherwise it would run and connect no container.
func TestKernelMissingMountEndsTheStartByName(t *testing.T) {
	n := newNode(t)
	mount := func(source, kind string, flags ...uintptr) string {
		t.Helper()
		dir := filepath.Join(n.dir, fmt.Sprint("mount-", kind, len(flags)))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range flags {
			if err := unix.Mount(source, dir, kind, f, ""); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	readOnly := mount("/proc/sys/net", "", unix.MS_BIND, unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY)
	private := mount("tmpfs", "tmpfs", 0, unix.MS_PRIVATE)
	shared := mount("tmpfs", "tmpfs", 0, unix.MS_PRIVATE, unix.MS_SHARED)
	for _, c := range []struct {
		name  string
		flags []string
		want  []string
	}{
		{"read-only sysctls", []string{"--proc-sys-net", readOnly}, []string{"read-only file system", "/host/proc/sys/net"}},
		{"no sysctls", []string{"--proc-sys-net", private}, []string{"no such file", "/host/proc/sys/net"}},
		{"no bpffs", []string{"--bpf-dir", private}, []string{"no bpffs", "mount -t bpf", private}},
		{
			"private namespaces",
			[]string{"--mount-propagation", "require", "--netns-dirs", private},
			[]string{private, "HostToContainer", "make-rshared"},
		},
		{
			"no namespaces",
			[]string{"--mount-propagation", "require", "--netns-dirs", filepath.Join(n.dir, "none")},
			[]string{"none", "HostToContainer"},
		},
	} {
		cmd := n.command(c.flags...)
		var out []byte
		err := in(n.home, func() (err error) {
			out, err = cmd.CombinedOutput()
			return err
		})
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != process.ExitUsage {
			t.Errorf("%s: %v, want exit code 2; the log:\n%s", c.name, err, out)
		}
		for _, want := range c.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s: no %q in:\n%s", c.name, want, out)
			}
		}
	}
	n.start("--mount-propagation", "require", "--netns-dirs", shared)
}

func TestKernelBadFieldIsNamedAndStatusSaysReady(t *testing.T) {
	n := newNode(t)
	n.start()
	pod := n.pod()
	r := n.request("a", 2, pod)
	r.Mtu = 70000
	_, err := n.datapath.CreateEndpoint(t.Context(), r)
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "mtu") {
		t.Errorf("an MTU of 70000: %v", err)
	}
	st, err := n.datapath.GetStatus(t.Context(), &datapathv1.GetStatusRequest{})
	if err != nil || !st.GetAddReady() || len(st.GetService().GetProblems()) != 0 ||
		st.GetPolicyMode() != datapathv1.PolicyMode_POLICY_MODE_NONE {
		t.Errorf("status %v, %v", st, err)
	}
}

func TestKernelEveryCallTellsTheSameAboutAnEndpoint(t *testing.T) {
	n := newNode(t)
	n.start()
	ctx := t.Context()
	r := n.request("a", 2, n.pod())
	r.Labels = []*workloadv1.Label{{Source: "cni", Key: "app", Value: "web"}}
	r.NamedPorts = []*workloadv1.NamedPort{{Name: "http", Port: 80, Protocol: netv1.Protocol_PROTOCOL_TCP}}
	r.Mac = "02:00:00:00:00:09"
	r.Manager, r.Network, r.Pod = "test", "net", &workloadv1.PodReference{Namespace: "shop", Name: "web-0", Uid: "1"}

	validated, err := n.datapath.CreateEndpoint(ctx, &datapathv1.CreateEndpointRequest{
		Owner: r.GetOwner(), NetworkNamespace: r.GetNetworkNamespace(), Addresses: r.GetAddresses(), ValidateOnly: true,
	})
	if err != nil || validated.GetEndpoint().GetEndpointIndex() != 0 || validated.GetEndpoint().GetHostInterface() != nil {
		t.Errorf("validate only: %v, %v", validated, err)
	}
	created, err := n.datapath.CreateEndpoint(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	e := created.GetEndpoint()
	if e.GetState() != datapathv1.EndpointState_ENDPOINT_STATE_READY || e.GetMtu() != 1400 || len(e.GetGateways()) != 2 ||
		e.GetContainerInterface().GetMac() != r.GetMac() || e.GetManager() != "test" || e.GetNetwork() != "net" ||
		!proto.Equal(e.GetPod(), r.GetPod()) || e.GetHostInterface().GetIndex() == 0 || e.GetIdentity() != 300 {
		t.Errorf("created %v", e)
	}
	got, err := n.datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: r.GetOwner()})
	if err != nil || !proto.Equal(got.GetEndpoint(), e) {
		t.Errorf("got %v, %v\nwant %v", got.GetEndpoint(), err, e)
	}
	list, err := n.datapath.ListEndpoints(ctx, &datapathv1.ListEndpointsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := list.Recv(); err != nil || !proto.Equal(m.GetEndpoint(), e) {
		t.Errorf("listed %v, %v", m, err)
	}
	if _, err := list.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the only endpoint: %v", err)
	}
	for _, other := range []*datapathv1.ListEndpointsRequest{{Manager: "cni"}, {Manager: "test", Network: "other"}, {Network: "other"}} {
		if list, err = n.datapath.ListEndpoints(ctx, other); err != nil {
			t.Fatal(err)
		}
		if m, err := list.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("listed for %v: %v, %v", other, m, err)
		}
	}
	watched, cancel := context.WithTimeout(ctx, servicetest.Patience)
	defer cancel()
	watch, err := n.datapath.WatchEndpoints(watched, &datapathv1.WatchEndpointsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := watch.Recv(); err != nil || !proto.Equal(m.GetUpsert(), e) {
		t.Errorf("watched %v, %v", m, err)
	}
	if m, err := watch.Recv(); err != nil || !m.GetBookmark().GetSnapshotComplete() {
		t.Errorf("then %v, %v, want the end of the listing", m, err)
	}
	check, err := n.datapath.CheckEndpoint(ctx, &datapathv1.CheckEndpointRequest{
		Owner: r.GetOwner(), NetworkNamespace: r.GetNetworkNamespace(), Addresses: r.GetAddresses(),
	})
	if err != nil || len(check.GetDifferences()) != 0 {
		t.Errorf("checked %v, %v", check, err)
	}
	check, err = n.datapath.CheckEndpoint(ctx, &datapathv1.CheckEndpointRequest{Owner: r.GetOwner(), Addresses: []string{"10.98.0.77"}})
	if err != nil || len(check.GetDifferences()) != 1 || check.GetDifferences()[0].GetSubject() != "addresses" {
		t.Errorf("check with another address: %v, %v", check, err)
	}

	for field, r := range map[string]*datapathv1.ReclaimEndpointsRequest{
		"manager":      {NoneValid: true},
		"valid_owners": {Manager: "test", Network: "net"},
		"none_valid":   {Manager: "test", Network: "net", ValidOwners: []*workloadv1.Owner{r.GetOwner()}, NoneValid: true},
	} {
		if _, err := n.datapath.ReclaimEndpoints(ctx, r); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), field) {
			t.Errorf("reclaim with a wrong %s: %v", field, err)
		}
	}
	if got, err := n.datapath.ReclaimEndpoints(ctx, &datapathv1.ReclaimEndpointsRequest{Manager: "test", Network: "other", NoneValid: true}); err != nil || len(got.GetReclaimed()) != 0 {
		t.Errorf("reclaimed of another network: %v, %v", got, err)
	}
	reclaimed, err := n.datapath.ReclaimEndpoints(ctx, &datapathv1.ReclaimEndpointsRequest{Manager: "test", Network: "net", NoneValid: true})
	if err != nil || len(reclaimed.GetReclaimed()) != 1 {
		t.Errorf("reclaimed %v, %v", reclaimed, err)
	}
	if m, err := watch.Recv(); err != nil || m.GetUpsert().GetState() != datapathv1.EndpointState_ENDPOINT_STATE_DISCONNECTING && m.GetDelete() == nil {
		t.Errorf("watched %v, %v, want the end of the endpoint", m, err)
	}
	for _, err := range []error{
		func() error {
			_, err := n.datapath.GetEndpoint(ctx, &datapathv1.GetEndpointRequest{Owner: r.GetOwner()})
			return err
		}(),
		func() error {
			_, err := n.datapath.CheckEndpoint(ctx, &datapathv1.CheckEndpointRequest{Owner: r.GetOwner()})
			return err
		}(),
	} {
		if status.Code(err) != codes.NotFound {
			t.Errorf("for a deleted endpoint: %v", err)
		}
	}
	n.nothingIsLeft()
}

func TestKernelSpooledDeletionsAreDoneBeforeServing(t *testing.T) {
	n := newNode(t)
	n.start()
	r := n.request("a", 2, n.pod())
	if _, err := n.datapath.CreateEndpoint(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	n.stop()
	spool := filepath.Join(n.dir, "spool")
	sum := sha256.Sum256([]byte("a/eth0"))
	if err := os.MkdirAll(spool, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		hex.EncodeToString(sum[:]): fmt.Sprintf(`{"version":1,"containerId":"a","interfaceName":"eth0","time":%q}`, time.Now().Add(time.Second).UTC().Format(time.RFC3339)),
		"damaged":                  `{"version":1,`,
	} {
		if err := os.WriteFile(filepath.Join(spool, name), []byte(content), 0o644); err != nil { //nolint:gosec // as the plugin does
			t.Fatal(err)
		}
	}
	if err := os.Chown(spool, int(instance.DatapathID), int(instance.GroupID)); err != nil {
		t.Fatal(err)
	}
	n.start()
	if _, err := n.datapath.GetEndpoint(t.Context(), &datapathv1.GetEndpointRequest{Owner: r.GetOwner()}); status.Code(err) != codes.NotFound {
		t.Errorf("the endpoint of a spooled deletion: %v", err)
	}
	left, err := os.ReadDir(spool)
	if err != nil || len(left) != 1 || left[0].Name() != "damaged.bad" {
		t.Errorf("spool %v, %v, want the corrupt entry set aside", left, err)
	}
	n.nothingIsLeft()
}
