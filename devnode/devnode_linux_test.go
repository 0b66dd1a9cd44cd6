// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package devnode

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// TestMain lets the test binary also run as the services. Copies of it under the services' names behave as this
// package expects of a service, so these tests cover the node and not the services. The test module tests real
// services on a node.
func TestMain(m *testing.M) {
	switch base := filepath.Base(os.Args[0]); {
	case base == "sluice-devetcd", base == "sluice-identity", base == "sluice-ipam", base == "sluice-policy",
		base == "sluice-loadbalancer", base == "sluice-datapath", base == "sluice-dns", base == "sluice-store":
		os.Exit(standIn(os.Args[1:]))
	case os.Getenv("DEVNODE_TEST_CONNECT") != "":
		conn, err := net.Dial("unix", os.Getenv("DEVNODE_TEST_CONNECT"))
		if err != nil {
			fmt.Print(err)
			os.Exit(1)
		}
		conn.Close()
		os.Exit(0)
	case os.Getenv("DEVNODE_TEST_UP") != "":
		os.Exit(upForTest(os.Getenv("DEVNODE_TEST_UP")))
	case os.Getenv("DEVNODE_TEST_UP_CLUSTER") != "":
		os.Exit(upClusterForTest(os.Getenv("DEVNODE_TEST_UP_CLUSTER")))
	}
	grace = 3 * time.Second // stand-ins end at once, or never
	os.Exit(m.Run())
}

// standIn serves the health service on the socket until SIGTERM. With "--fail" it exits at once, with "--hang" it
// never serves, and with "--stubborn" it ignores SIGTERM.
func standIn(args []string) int {
	socket := ""
	for _, a := range args {
		switch key, value, _ := strings.Cut(a, "="); key {
		case "--instance":
			socket = (&Node{}).mustSocket(value, strings.TrimPrefix(filepath.Base(os.Args[0]), "sluice-"))
		case "--listen":
			socket = strings.TrimPrefix(value, "unix://")
			unix.Umask(0o007) // as in sluice-devetcd
		}
	}
	if slices.Contains(args, "--fail") {
		fmt.Fprintln(os.Stderr, "this is why it failed")
		return 1
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, unix.SIGTERM)
	if slices.Contains(args, "--stubborn") {
		signal.Ignore(unix.SIGTERM)
	}
	if !slices.Contains(args, "--hang") {
		_ = os.Remove(socket)
		l, err := net.Listen("unix", socket)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		s := grpc.NewServer()
		h := health.NewServer()
		h.SetServingStatus("", healthpb.HealthCheckResponse_SERVING)
		healthpb.RegisterHealthServer(s, h)
		go s.Serve(l) //nolint:errcheck // ends with the process
	}
	<-terminated
	return 0
}

func (*Node) mustSocket(instance, service string) string {
	n, err := newNode(instance)
	if err != nil {
		panic(err)
	}
	return n.Socket(service)
}

// upForTest calls Up in a process that the test kills.
func upForTest(options string) int {
	var o Options
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if _, err := Up(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// upClusterForTest calls UpCluster in a process that the test kills.
func upClusterForTest(options string) int {
	var o ClusterOptions
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if _, err := UpCluster(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// programs makes a directory of stand-ins that the services' users may execute.
func programs(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes network namespaces and needs root")
	}
	dir, err := os.MkdirTemp("", "devnode")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(self)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	first := filepath.Join(dir, "sluice-cni")
	out, err := os.OpenFile(first, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
	for _, service := range append(Services(), Store) {
		if err := os.Link(first, executable(dir, service)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// options returns the options of a node that no other test uses.
func options(t *testing.T, binDir string) Options {
	t.Helper()
	b := make([]byte, 4)
	rand.Read(b) //nolint:errcheck // never fails
	o := Options{Instance: "t" + hex.EncodeToString(b), BinDir: binDir, StartTimeout: time.Minute}
	t.Cleanup(func() {
		if err := Down(context.Background(), o.Instance); err != nil {
			t.Error(err)
		}
	})
	return o
}

// trace returns everything of the instance that exists on the machine.
func trace(t *testing.T, name string) []string {
	t.Helper()
	n, err := newNode(name)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, path := range []string{
		n.paths.RunDir, n.paths.StateDir, n.paths.ConfigDir, n.Netns(),
		"/sys/fs/bpf/sluice-" + name,
	} {
		if exists(path) {
			found = append(found, path)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.name()) {
			found = append(found, "mount "+strings.TrimSpace(line))
		}
	}
	if _, err := netlink.LinkByName(n.link()); !errors.As(err, new(netlink.LinkNotFoundError)) {
		found = append(found, fmt.Sprintf("device %s (%v)", n.link(), err))
	}
	running, err := n.runningServices()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range running {
		found = append(found, "process "+s)
	}
	return found
}

func wantNothing(t *testing.T, name string) {
	t.Helper()
	if found := trace(t, name); len(found) > 0 {
		t.Fatalf("left on the machine:\n%s", strings.Join(found, "\n"))
	}
}

// surroundings returns the state of the caller's namespace that must not change.
func surroundings(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rules {
		fmt.Fprintln(&b, "rule", r)
	}
	for _, path := range []string{
		"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv4/conf/all/rp_filter",
		"net/ipv4/conf/all/arp_ignore",
	} {
		v, err := os.ReadFile("/proc/sys/" + path)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "sysctl %s = %s", path, v)
	}
	return b.String()
}

func up(t *testing.T, o Options) *Node {
	t.Helper()
	n, err := Up(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func down(t *testing.T, o Options) {
	t.Helper()
	// The context of the test ends before cleanups run.
	if err := Down(context.WithoutCancel(t.Context()), o.Instance); err != nil {
		t.Fatal(err)
	}
}

func TestKernelDownLeavesNothing(t *testing.T) {
	o := options(t, programs(t))
	before := surroundings(t)
	n := up(t, o)
	if during := surroundings(t); during != before {
		t.Errorf("rules or sysctls of the caller's namespace have changed:\n%s\nbefore:\n%s", during, before)
	}
	ctx := t.Context()
	for _, service := range Services() {
		if err := n.Serving(ctx, service); err != nil {
			t.Errorf("%s: %v", service, err)
		}
		pid, err := n.PID(service)
		if err != nil {
			t.Fatal(err)
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("\nUid:\t%d\t", users[service].UID); !strings.Contains(string(status), want) {
			t.Errorf("%s does not run as uid %d:\n%s", service, users[service].UID, status)
		}
		groups := map[string]string{Etcd: "65705 ", Identity: "65700 65705 "}[service]
		if groups == "" {
			groups = "65700 "
		}
		if !strings.Contains(string(status), "\nGroups:\t"+groups+"\n") {
			t.Errorf("%s is in other groups than %s:\n%s", service, groups, status)
		}
		capabilities := "0000000000000000"
		if service == Datapath {
			capabilities = "000000c000201000" // BPF, PERFMON, NET_ADMIN, SYS_ADMIN
		}
		for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
			if !strings.Contains(string(status), fmt.Sprintf("\n%s:\t%s\n", set, capabilities)) {
				t.Errorf("%s: %s is not %s:\n%s", service, set, capabilities, status)
			}
		}
		// The datapath runs in the node's namespace, as do services that listen on ports of the node.
		ns, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			t.Fatal(err)
		}
		node, err := os.Stat(n.Netns())
		if err != nil {
			t.Fatal(err)
		}
		if os.SameFile(ns, node) != (service == Datapath || service == LoadBalancer) {
			t.Errorf("%s: inside the node's namespace is %v", service, os.SameFile(ns, node))
		}
	}
	// The caller reaches the node at its IPv4 and its IPv6 address.
	ipv4, ipv6 := n.linkAddresses()
	for _, a := range []netip.Addr{ipv4[1], ipv6[1]} {
		routes, err := netlink.RouteGet(a.AsSlice())
		if err != nil {
			t.Fatal(err)
		}
		link, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err != nil {
			t.Fatal(err)
		}
		if link.Attrs().Name != n.link() {
			t.Errorf("%s is reached via %s, want %s", a, link.Attrs().Name, n.link())
		}
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(n.Paths().BPFDir, &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
		t.Errorf("%s is not a bpffs: %v", n.Paths().BPFDir, err)
	}
	// A mount that the plugin leaves for a container whose DEL was never called.
	left := filepath.Join(n.Paths().RunDir, "netns", "x")
	if err := makeNetns(left); err != nil {
		t.Fatal(err)
	}

	down(t, o)
	wantNothing(t, o.Instance)
	if after := surroundings(t); after != before {
		t.Errorf("rules or sysctls after:\n%s\nbefore:\n%s", after, before)
	}
	down(t, o) // once more
	if _, err := Open(o.Instance); !errors.Is(err, ErrNotRunning) {
		t.Errorf("open after down: %v, want ErrNotRunning", err)
	}
}

// TestKernelProgramsMayLieInAClosedDirectory: the programs are in a directory that the services' users cannot enter,
// for example in root's checkout.
func TestKernelProgramsMayLieInAClosedDirectory(t *testing.T) {
	bin, closed := programs(t), t.TempDir()
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(closed, "bin")
	if err := os.Symlink(bin, link); err != nil {
		t.Fatal(err)
	}
	n, err := Up(t.Context(), options(t, link))
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, service := range Services() {
		if _, err := os.Stat(executable(bin, service)); err != nil {
			t.Errorf("the original after Down: %v", err)
		}
	}
}

func TestKernelSecondUpSaysThatItRuns(t *testing.T) {
	o := options(t, programs(t))
	n := up(t, o)
	pid, err := n.PID(IPAM)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), o); !errors.Is(err, ErrRunning) {
		t.Fatalf("second up: %v, want ErrRunning", err)
	}
	if again, err := n.PID(IPAM); err != nil || again != pid {
		t.Errorf("the second up changed the first: pid %d, then %d (%v)", pid, again, err)
	}
}

// TestKernelPoliciesOfAClosedDirectoryAreReadable: the policies are in a directory that the policy service's user may
// not enter.
func TestKernelPoliciesOfAClosedDirectoryAreReadable(t *testing.T) {
	o := options(t, programs(t))
	o.PolicyDir = t.TempDir()
	if err := os.Chmod(filepath.Dir(o.PolicyDir), 0o700); err != nil {
		t.Fatal(err)
	}
	manifest := filepath.Join(o.PolicyDir, "web.yaml")
	if err := os.WriteFile(manifest, []byte("kind: NetworkPolicy\n"), 0o644); err != nil { //nolint:gosec // for everybody
		t.Fatal(err)
	}
	n := up(t, o)
	seen := filepath.Join(n.PolicyDir(), "web.yaml")
	read := exec.Command("/bin/cat", seen)
	read.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: users[Policy].UID, Gid: 65700}}
	if content, err := read.Output(); err != nil || string(content) != "kind: NetworkPolicy\n" {
		t.Errorf("the policy service's user reads %q, %v", content, err)
	}
	if err := os.Remove(seen); !errors.Is(err, unix.EROFS) {
		t.Errorf("remove the file where it is seen: %v, want EROFS", err)
	}
	down(t, o)
	wantNothing(t, o.Instance)
	if _, err := os.Stat(manifest); err != nil {
		t.Errorf("the original after Down: %v", err)
	}
	if err := os.Chmod(o.PolicyDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), o); err == nil || !strings.Contains(err.Error(), "cannot be read by uid 65703") {
		t.Errorf("a directory that is closed itself: %v", err)
	}
	o.PolicyDir = manifest
	if _, err := Up(t.Context(), o); err == nil || !strings.Contains(err.Error(), "is not a directory") {
		t.Errorf("a file as directory: %v", err)
	}
}

// TestKernelLoadBalancerIsLeftOutOnRequest: a node without a load balancer starts, restarts and ends like any other.
// A node with one watches a directory of the caller.
func TestKernelLoadBalancerIsLeftOutOnRequest(t *testing.T) {
	o := options(t, programs(t))
	o.ServiceDir = t.TempDir()
	manifest := filepath.Join(o.ServiceDir, "web.yaml")
	if err := os.WriteFile(manifest, []byte("kind: Service\n"), 0o644); err != nil { //nolint:gosec // for everybody
		t.Fatal(err)
	}
	n := up(t, o)
	if _, err := n.PID(LoadBalancer); err != nil {
		t.Error(err)
	}
	content, err := os.ReadFile(filepath.Join(n.ServiceDir(), "web.yaml"))
	if err != nil || string(content) != "kind: Service\n" {
		t.Errorf("the directory of services has %q, %v", content, err)
	}
	down(t, o)
	wantNothing(t, o.Instance)
	if _, err := os.Stat(manifest); err != nil {
		t.Errorf("the original after Down: %v", err)
	}

	o.NoLoadBalancer = true
	n = up(t, o)
	if _, err := n.PID(LoadBalancer); !errors.Is(err, ErrNotRunning) || slices.Contains(n.Services(), LoadBalancer) {
		t.Errorf("left out, it runs: %v, services %v", err, n.Services())
	}
	again, err := Open(o.Instance)
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(again.Services(), LoadBalancer) {
		t.Errorf("opened again, the node has the services %v", again.Services())
	}
}

func TestKernelStoreReplacesTheEtcdOnRequest(t *testing.T) {
	o := options(t, programs(t))
	o.Store = true
	n := up(t, o)
	if _, err := n.PID(Store); err != nil {
		t.Error(err)
	}
	if _, err := n.PID(Etcd); !errors.Is(err, ErrNotRunning) {
		t.Errorf("etcd runs, too: %v", err)
	}
	want := "--etcd-endpoints=unix:///run/sluice-" + o.Instance + "/store/etcd.sock"
	if got := n.arguments(Identity); !slices.Contains(got, want) {
		t.Errorf("sluice-identity has %q, want %s", got, want)
	}
	down(t, o)
	wantNothing(t, o.Instance)
}

func TestKernelNodesRunSideBySide(t *testing.T) {
	bin := programs(t)
	a, b := options(t, bin), options(t, bin)
	na, nb := up(t, a), up(t, b)
	for i, p := range na.PodCIDRs() {
		if p.Overlaps(nb.PodCIDRs()[i]) {
			t.Errorf("both nodes have pods in %s", p)
		}
	}
	down(t, a)
	wantNothing(t, a.Instance)
	for _, service := range Services() {
		if err := nb.Serving(t.Context(), service); err != nil {
			t.Errorf("%s of the other node: %v", service, err)
		}
	}
	down(t, b)
	wantNothing(t, b.Instance)
}

func TestKernelRangeInUseIsNamed(t *testing.T) {
	bin := programs(t)
	a, b := options(t, bin), options(t, bin)
	n := up(t, a)
	b.PodCIDRs = n.PodCIDRs()
	if _, err := Up(t.Context(), b); err == nil || !strings.Contains(err.Error(), n.PodCIDRs()[0].String()) ||
		!strings.Contains(err.Error(), "is used by another development node") {
		t.Errorf("a range of another node: %v", err)
	}
	wantNothing(t, b.Instance)
}

// TestKernelNodesStartedAtOnceHaveRangesOfTheirOwn: nodes that start at the same moment all see the same ranges as
// free.
func TestKernelNodesStartedAtOnceHaveRangesOfTheirOwn(t *testing.T) {
	bin := programs(t)
	nodes := make([]*Node, 4)
	var starts errgroup.Group
	for i := range nodes {
		o := options(t, bin)
		t.Cleanup(func() { down(t, o); wantNothing(t, o.Instance) })
		starts.Go(func() (err error) {
			nodes[i], err = Up(t.Context(), o)
			return err
		})
	}
	if err := starts.Wait(); err != nil {
		t.Fatal(err)
	}
	for i, a := range nodes {
		for _, b := range nodes[:i] {
			for _, p := range a.PodCIDRs() {
				if slices.ContainsFunc(b.PodCIDRs(), p.Overlaps) {
					t.Errorf("two nodes have pods in %s", p)
				}
			}
		}
	}
}

func TestKernelDownAfterServicesWereKilled(t *testing.T) {
	bin := programs(t)
	for _, victims := range [][]string{{Etcd}, {Datapath}, {IPAM, Identity}, Services()} {
		o := options(t, bin)
		n := up(t, o)
		for _, service := range victims {
			if err := n.Kill(t.Context(), service); err != nil {
				t.Fatal(err)
			}
		}
		down(t, o)
		wantNothing(t, o.Instance)
	}
}

// TestLockIsFreeWhileProcessesStart: between its fork and its exec, a child has a copy of the lock.
func TestLockIsFreeWhileProcessesStart(t *testing.T) {
	n, err := newNode("lock" + strconv.Itoa(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var starts sync.WaitGroup
	defer starts.Wait()
	defer cancel()
	for range 4 {
		starts.Go(func() {
			for ctx.Err() == nil {
				if err := exec.CommandContext(ctx, "true").Run(); err != nil && ctx.Err() == nil {
					t.Errorf("start a process: %v", err)
					return
				}
			}
		})
	}
	for i := range 2000 {
		unlock, err := n.lock()
		if err != nil {
			t.Fatalf("lock %d: %v", i, err)
		}
		unlock()
	}
}

func TestKernelDownEndsAServiceThatIgnoresSIGTERM(t *testing.T) {
	t.Parallel()
	o := options(t, programs(t))
	o.Args = map[string][]string{Identity: {"--stubborn"}}
	up(t, o)
	down(t, o)
	wantNothing(t, o.Instance)
}

func TestKernelFailedUpLeavesNothingAndShowsTheLog(t *testing.T) {
	t.Parallel()
	bin := programs(t)
	attempt := func(o Options, service, how, want string) {
		o.Args = map[string][]string{service: {how}}
		_, err := Up(t.Context(), o)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), service) {
			t.Errorf("%s %s: %v, want one that says %q", service, how, err, want)
		}
	}
	var nodes []string
	var hanging sync.WaitGroup // the nodes that hang wait at the same time
	for _, service := range Services() {
		o := options(t, bin)
		o.StartTimeout = 30 * time.Second // enough for the services that do not hang, even when all nodes start at once
		nodes = append(nodes, o.Instance)
		hanging.Go(func() { attempt(o, service, "--hang", service+" does not serve") })
	}
	for _, service := range Services() {
		o := options(t, bin)
		nodes = append(nodes, o.Instance)
		attempt(o, service, "--fail", "this is why it failed")
	}
	hanging.Wait()
	for _, node := range nodes {
		wantNothing(t, node)
	}
	o := options(t, bin)
	if err := os.Remove(executable(bin, Datapath)); err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), o); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("without a program: %v, want one that says `make build`", err)
	}
	wantNothing(t, o.Instance)
}

func TestKernelInterruptedUpLeavesNothing(t *testing.T) {
	o := options(t, programs(t))
	o.Args = map[string][]string{IPAM: {"--hang"}}
	o.StartTimeout = 10 * time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := Up(ctx, o)
		done <- err
	}()
	n, err := newNode(o.Instance)
	if err != nil {
		t.Fatal(err)
	}
	// Cancel in the middle: another service already serves.
	for n.Serving(ctx, Etcd) != nil {
		select {
		case err := <-done:
			t.Fatalf("up ended by itself: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted up: %v, want context.Canceled", err)
	}
	wantNothing(t, o.Instance)
}

func TestKernelDownAfterUpWasKilled(t *testing.T) {
	bin := programs(t)
	o := options(t, bin)
	o.Args = map[string][]string{Datapath: {"--hang"}}
	o.StartTimeout = 10 * time.Minute
	encoded, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "DEVNODE_TEST_UP="+string(encoded))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	n, err := newNode(o.Instance)
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.After(30 * time.Second)
	for {
		running, err := n.runningServices()
		if err != nil {
			t.Fatal(err)
		}
		if len(running) == len(Services()) {
			break
		}
		select {
		case <-deadline:
			t.Fatalf("only %v started; %s", running, out.String())
		case <-time.After(5 * time.Millisecond):
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait() //nolint:errcheck // it was killed
	down(t, o)
	wantNothing(t, o.Instance)
}

func TestKernelRestartGivesANewProcess(t *testing.T) {
	o := options(t, programs(t))
	up(t, o)
	n, err := Open(o.Instance) // as another command opens it
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range Services() {
		before, err := n.PID(service)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Restart(t.Context(), service); err != nil {
			t.Fatal(err)
		}
		after, err := n.PID(service)
		if err != nil || after == before {
			t.Errorf("%s: pid %d, then %d (%v)", service, before, after, err)
		}
	}
}

// TestKernelServicesInheritNothingOfTheCaller: neither Up nor Restart passes an open descriptor of its caller, such
// as one left by a shell's `exec 8<file`, to a service.
func TestKernelServicesInheritNothingOfTheCaller(t *testing.T) {
	secret, err := os.Create(filepath.Join(t.TempDir(), "secret"))
	if err != nil {
		t.Fatal(err)
	}
	defer secret.Close()
	inheritable := func() {
		t.Helper()
		// Without close-on-exec, unlike what Go opens.
		fd, err := unix.FcntlInt(secret.Fd(), unix.F_DUPFD, 8)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
	inheritable()
	o := options(t, programs(t))
	n := up(t, o)
	check := func(when string) {
		t.Helper()
		for _, service := range Services() {
			pid, err := n.PID(service)
			if err != nil {
				t.Fatal(err)
			}
			open, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
			if err != nil || len(open) == 0 {
				t.Fatalf("descriptors of %s: %v, %v", service, open, err)
			}
			for _, fd := range open {
				if target, err := os.Readlink(fd); err == nil && target == secret.Name() {
					t.Errorf("%s: %s has descriptor %s of the caller's file", when, service, filepath.Base(fd))
				}
			}
		}
	}
	check("up")
	for _, service := range Services() {
		inheritable()
		if err := n.Restart(t.Context(), service); err != nil {
			t.Fatal(err)
		}
	}
	check("restart")
	passed, err := os.Open(secret.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	if err := errors.Join(n.Stop(t.Context(), IPAM), n.Start(t.Context(), IPAM, passed)); err != nil {
		t.Fatal(err)
	}
	pid, err := n.PID(IPAM)
	if err != nil {
		t.Fatal(err)
	}
	if target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/3", pid)); err != nil || target != secret.Name() {
		t.Errorf("a file that is passed on purpose: descriptor 3 is %q, %v", target, err)
	}
}

// TestKernelOnlyIdentityMayConnectToEtcd: a user that may only read from the services could otherwise write the
// cluster's identities.
func TestKernelOnlyIdentityMayConnectToEtcd(t *testing.T) {
	bin := programs(t)
	n := up(t, options(t, bin))
	connect := func(c *syscall.Credential) (string, error) {
		cmd := exec.Command(filepath.Join(bin, "sluice-cni")) //nolint:gosec // a copy of the test binary
		cmd.Env = append(os.Environ(), "DEVNODE_TEST_CONNECT="+n.Socket(Etcd))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c}
		out, err := cmd.Output()
		return string(out), err
	}
	for name, c := range map[string]*syscall.Credential{
		"a reader":     {Uid: 65534, Gid: 65700},
		"ipam":         {Uid: users[IPAM].UID, Gid: 65700, Groups: []uint32{65700}},
		"policy":       {Uid: users[Policy].UID, Gid: 65700, Groups: []uint32{65700}},
		"the datapath": {Uid: users[Datapath].UID, Gid: 65700, Groups: []uint32{65700}},
	} {
		if out, err := connect(c); err == nil || !strings.HasSuffix(out, "permission denied") {
			t.Errorf("%s connects to etcd: %v %s, want permission denied", name, err, out)
		}
	}
	for name, c := range map[string]*syscall.Credential{
		"root":     {},
		"identity": {Uid: users[Identity].UID, Gid: 65700, Groups: []uint32{65700, 65705}},
	} {
		if out, err := connect(c); err != nil {
			t.Errorf("%s connects to etcd: %v %s", name, err, out)
		}
	}
}

// TestKernelRestartGivesStateToTheUserOfToday: the node was started by a version in which the services had other
// numeric users.
func TestKernelRestartGivesStateToTheUserOfToday(t *testing.T) {
	o := options(t, programs(t))
	n := up(t, o)
	if err := n.Stop(t.Context(), IPAM); err != nil {
		t.Fatal(err)
	}
	dir := n.Paths().ServiceStateDir(IPAM)
	file := filepath.Join(dir, "db")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Chown(file, 64702, 64700),
		os.Chown(dir, 64702, 64700)); err != nil {
		t.Fatal(err)
	}
	if err := n.Restart(t.Context(), IPAM); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, file} {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil || st.Uid != users[IPAM].UID || st.Gid != users[IPAM].GID {
			t.Errorf("%s belongs to %d:%d, %v; want %d:%d", path, st.Uid, st.Gid, err, users[IPAM].UID, users[IPAM].GID)
		}
	}
}

func TestNamesOutsideTheRulesAreRefused(t *testing.T) {
	for _, name := range []string{"../x", "A", "a/b", strings.Repeat("a", 40)} {
		if _, err := Up(t.Context(), Options{Instance: name, BinDir: "/"}); err == nil {
			t.Errorf("%q was taken", name)
		}
		if err := Down(t.Context(), name); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
}
