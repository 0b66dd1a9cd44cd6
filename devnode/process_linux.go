// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package devnode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/nodefiles"
	"github.com/sluice-net/sluice/kit/rpc/client"
	"github.com/sluice-net/sluice/kit/tasks"
)

func isEtcd(service string) bool { return service == Etcd || strings.HasPrefix(service, Etcd+"-") }

func executable(binDir, service string) string {
	if isEtcd(service) {
		return filepath.Join(binDir, "sluice-devetcd")
	}
	return filepath.Join(binDir, "sluice-"+service)
}

// mark returns the argument that identifies a service's process as one of the instance.
func (n *Node) mark(service string) string {
	if isEtcd(service) {
		return "--data-dir=" + n.paths.ServiceStateDir(service)
	}
	return "--instance=" + n.paths.Name
}

func (n *Node) etcdURL(service string) string { return "unix://" + n.Socket(service) }

// etcdURLs returns the etcd endpoints of the node's identity service.
func (n *Node) etcdURLs() []string {
	if n.state.Member != nil {
		return n.state.Member.Etcd
	}
	if slices.Contains(n.Services(), Store) {
		return []string{"unix://" + filepath.Join(n.paths.ServiceRunDir(Store), "etcd.sock")}
	}
	return []string{n.etcdURL(Etcd)}
}

// arguments returns the command line of a service, its mark first.
func (n *Node) arguments(service string) []string {
	args := []string{n.mark(service)}
	var cidrs []string
	for _, p := range n.state.PodCIDRs {
		cidrs = append(cidrs, p.String())
	}
	switch service {
	default: // etcd, or one of its members
		args = append(args, "--listen="+n.etcdURL(service))
		args = append(args, memberArguments(n.Services(), service)...)
	case Store:
		args = append(args, "--node="+n.name())
	case Identity:
		args = append(args, "--etcd-endpoints="+strings.Join(n.etcdURLs(), ","), "--node="+n.name())
	case IPAM:
		args = append(args, "--pools="+strings.Join(cidrs, ","), "--identity="+n.Socket(Identity))
	case DNS, HTTP: // the paths follow from the instance
	case Policy:
		args = append(args, "--sources-directory="+n.PolicyDir())
		if slices.Contains(n.Services(), HTTP) {
			args = append(args, "--http-proxy")
		}
	case LoadBalancer:
		args = append(args, "--sources-directory="+n.ServiceDir(), "--node-name="+n.name())
	case Hubble:
		args = append(args, "--node-name="+n.name())
	case Datapath:
		args = append(args, "--bpf-dir="+n.paths.BPFDir, "--policy-mode="+n.state.Policy)
		if slices.Contains(n.Services(), LoadBalancer) {
			// The other network namespaces belong to other nodes or to the caller.
			args = append(args, "--load-balancing-mode=on", "--load-balancing-other-namespaces=leave")
		}
		if m := n.state.Member; m != nil && m.Routing != "" {
			args = append(args, "--routing-mode="+m.Routing)
		}
	}
	return append(args, n.state.Args[service]...)
}

// Numbers of threads: of a service when it begins to serve, including threads that its starter needs meanwhile, and
// of each further service started at the same time. The services run in the caller's cgroup.
const (
	threads     = 20
	threadsEach = 12
)

// Start starts a stopped service with the arguments of Up, and waits until it serves. The service inherits the files,
// from descriptor 3 on.
func (n *Node) Start(ctx context.Context, service string, files ...*os.File) error {
	if err := tasks.Need(threads, "the start of a service"); err != nil {
		return fmt.Errorf("start %s: %w", service, err)
	}
	ctx, cancel := context.WithTimeout(ctx, n.state.Timeout)
	defer cancel()
	// If an earlier version started the node, its state may belong to a former user of the service.
	user := users[service]
	if _, err := nodefiles.Prepare(n.paths, user); err != nil {
		return err
	}
	log, err := os.OpenFile(n.Log(service), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(executable(n.binDir(), service), n.arguments(service)...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = files
	groups := []uint32{user.GID}
	if service == Identity {
		groups = append(groups, users[Etcd].GID)
	}
	var capabilities []uintptr
	if service == Datapath {
		capabilities = datapathCapabilities
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:      true,
		Credential:  &syscall.Credential{Uid: user.UID, Gid: user.GID, Groups: groups},
		AmbientCaps: capabilities,
	}
	// The service inherits only the standard streams and files. The caller may have other descriptors without
	// close-on-exec; Go itself opens none without it.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("start %s: mark open descriptors close-on-exec: %w", service, err)
	}
	begin := func() error {
		if err := boundCapabilities(capabilities); err != nil {
			return err
		}
		return cmd.Start()
	}
	// sluice-loadbalancer listens on health check ports of the node, and sluice-hubble for clients of other machines.
	if service == Datapath || service == LoadBalancer || service == Hubble || isEtcd(service) && service != Etcd {
		err = inNetns(n.Netns(), begin)
	} else {
		err = onOwnThread(begin)
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", service, err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return n.waitUntilServing(ctx, service, exited)
}

// datapathCapabilities are the capabilities that the datapath needs; docs/privileges.md explains them.
var datapathCapabilities = []uintptr{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}

// boundCapabilities drops every other capability from the bounding set of the calling thread, so that programs
// started by the thread cannot gain them. The thread must not be used for anything else afterwards.
func boundCapabilities(keep []uintptr) error {
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		if slices.Contains(keep, c) {
			continue
		}
		// EINVAL: the kernel does not know this capability.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("drop capability %d from the bounding set: %w", c, err)
		}
	}
	return nil
}

// waitsAfter is the time after which waitUntilServing asks the policy service whether it waits for policies.
const waitsAfter = 2 * time.Second

// waitUntilServing returns when the service's health is SERVING, or when the service waits for policies and the
// caller accepts that.
func (n *Node) waitUntilServing(ctx context.Context, service string, exited <-chan error) error {
	check := n.healthCheck(service)
	defer check.close()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	ask := time.Now().Add(waitsAfter)
	for {
		err := check.serving(ctx)
		if err == nil {
			return nil
		}
		if now := time.Now(); n.waits != nil && (service == Policy || service == Datapath) && now.After(ask) {
			if n.waits(ctx, n.Socket(Policy)) {
				return nil
			}
			ask = now.Add(waitsAfter)
		}
		select {
		case exit := <-exited:
			//nolint:errorlint // nil after status 0
			return fmt.Errorf("%s ended before it served (%v); %s", service, exit, n.logText(service))
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve: %w (%w); %s", service, ctx.Err(), err, n.logText(service))
		case <-tick.C:
		}
	}
}

// logText returns the end of a log for a message, because a failed Up removes the log.
func (n *Node) logText(service string) string {
	tail := n.logTail(service)
	if len(tail) == 0 {
		return "it has logged nothing"
	}
	return fmt.Sprintf("its log %s ends with:\n%s", n.Log(service), tail)
}

// Serving returns nil if a service serves now.
func (n *Node) Serving(ctx context.Context, service string) error {
	check := n.healthCheck(service)
	defer check.close()
	return check.serving(ctx)
}

type healthCheck struct {
	serving func(context.Context) error
	close   func()
}

func (n *Node) healthCheck(service string) healthCheck {
	if isEtcd(service) {
		// etcd has no health service here: it serves when it accepts connections.
		return healthCheck{close: func() {}, serving: func(ctx context.Context) error {
			conn, err := new(net.Dialer).DialContext(ctx, "unix", n.Socket(service))
			if err != nil {
				return err
			}
			return conn.Close()
		}}
	}
	conn, err := client.Dial(n.Socket(service), client.Options{Timeout: time.Second})
	if err != nil {
		return healthCheck{close: func() {}, serving: func(context.Context) error { return err }}
	}
	return healthCheck{
		close: func() { _ = conn.Close() },
		serving: func(ctx context.Context) error {
			// The connection backs off after an attempt that found no socket. Retry now.
			conn.ResetConnectBackoff()
			answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
			if err != nil {
				return err
			}
			if status := answer.GetStatus(); status != healthpb.HealthCheckResponse_SERVING {
				return fmt.Errorf("health is %s", status)
			}
			return nil
		},
	}
}

func (n *Node) logTail(service string) []byte {
	const most = 2000
	content, err := os.ReadFile(n.Log(service))
	if err != nil {
		return []byte(err.Error())
	}
	if len(content) > most {
		content = content[len(content)-most:]
	}
	return content
}

// Stop ends a service with SIGTERM, or with SIGKILL after 10 s, and waits until it has ended. It returns nil if the
// service does not run.
func (n *Node) Stop(ctx context.Context, service string) error {
	return n.end(ctx, service, unix.SIGTERM)
}

// Kill ends a service with SIGKILL and waits until it has ended.
func (n *Node) Kill(ctx context.Context, service string) error {
	return n.end(ctx, service, unix.SIGKILL)
}

// PID is the process id of a running service.
//
// The error wraps ErrNotRunning if the service does not run.
func (n *Node) PID(service string) (int, error) {
	pids, err := n.processes(service)
	if err != nil {
		return 0, err
	}
	if len(pids) == 0 {
		return 0, fmt.Errorf("%s of instance %s %w", service, n.paths.Name, ErrNotRunning)
	}
	return pids[0], nil
}

// runningServices returns the running services of the instance and, for a cluster, of its nodes.
func (n *Node) runningServices() ([]string, error) {
	pids, err := n.allProcesses()
	if err != nil {
		return nil, err
	}
	running := slices.Sorted(maps.Keys(pids))
	members, err := n.members()
	for _, m := range members {
		of, err := m.allProcesses()
		if err != nil {
			return nil, err
		}
		for _, service := range slices.Sorted(maps.Keys(of)) {
			running = append(running, service+" of "+m.paths.Name)
		}
	}
	return running, err
}

// processes returns the service's processes, found by their command lines.
func (n *Node) processes(service string) ([]int, error) {
	pids, err := n.allProcesses()
	return pids[service], err
}

// allProcesses returns the processes of every service.
func (n *Node) allProcesses() (map[string][]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	pids := map[string][]int{}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if service := n.serviceOf(pid); service != "" {
				pids[service] = append(pids[service], pid)
			}
		}
	}
	return pids, nil
}

// serviceOf returns the service that a process runs, if it belongs to this instance. A zombie has an empty command
// line and does not count.
func (n *Node) serviceOf(pid int) string {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	args := strings.Split(string(bytes.TrimRight(content, "\x00")), "\x00")
	if len(args) < 2 {
		return ""
	}
	for _, service := range processNames {
		if filepath.Base(args[0]) == filepath.Base(executable("", service)) && args[1] == n.mark(service) {
			return service
		}
	}
	return ""
}

func (n *Node) end(ctx context.Context, service string, signal unix.Signal) error {
	pids, err := n.processes(service)
	if err != nil {
		return err
	}
	var errs []error
	for _, pid := range pids {
		errs = append(errs, n.endProcess(ctx, pid, service, signal))
	}
	return errors.Join(errs...)
}

// grace is the time that a service has to end before it is killed. Tests change it before they begin.
var grace = 10 * time.Second

// endProcess signals through a pidfd, which it opens before it checks the process again, so that it never signals a
// reused pid.
func (n *Node) endProcess(ctx context.Context, pid int, service string, signal unix.Signal) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("pidfd of %s (%d): %w", service, pid, err)
	}
	defer unix.Close(fd)
	if n.serviceOf(pid) != service {
		return nil
	}
	patient, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	for _, s := range slices.Compact([]unix.Signal{signal, unix.SIGKILL}) {
		if err := unix.PidfdSendSignal(fd, s, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal %s (%d): %w", service, pid, err)
		}
		if waitForExit(patient, fd) {
			return nil
		}
	}
	if waitForExit(ctx, fd) {
		return nil
	}
	return fmt.Errorf("%s (%d) does not end: %w", service, pid, ctx.Err())
}

// waitForExit reports whether the process of a pidfd ended in time. A pidfd becomes readable when its process ends,
// reaped or not.
func waitForExit(ctx context.Context, fd int) bool {
	for {
		ready, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20)
		if ready > 0 {
			return true
		}
		if err != nil && !errors.Is(err, unix.EINTR) || ctx.Err() != nil {
			return false
		}
	}
}

// inNetns runs fn on a thread in a network namespace. Goroutines that fn starts run elsewhere.
func inNetns(path string, fn func() error) error {
	target, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	defer target.Close()
	return onOwnThread(func() error {
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// onOwnThread runs fn on a thread that ends with its goroutine and is not used again.
func onOwnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- fn()
	}()
	return <-done
}

// exists reports whether there is a file of any kind at path.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
