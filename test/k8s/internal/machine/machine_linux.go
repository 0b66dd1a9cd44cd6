// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package machine makes the namespaces of a cluster.
//
// A cluster runs in one PID namespace with its own mount and network namespace, the machine. The control plane runs
// directly in the machine, and each node in nested namespaces. When the machine's first process ends, the kernel
// removes all processes, mounts, namespaces and devices of the cluster. Two clusters with the same addresses do not
// interfere.
package machine

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/initproc"
	"golang.org/x/sys/unix"
)

// Arguments that make the test bed's program a first process.
const (
	// MachineCommand is followed by the run directory.
	MachineCommand = "machine"
	// NodeCommand is followed by the run directory and the node's index.
	NodeCommand = "node"
	// NodeInitCommand is NodeCommand in the node's cgroup namespace.
	NodeInitCommand = "node-init"
)

const apiTimeout = 5 * time.Minute

// Start starts the machine of the run directory. The machine ends with the calling thread, which must be locked, or
// when its standard input is closed.
func Start(c Config, stdin io.Reader, stderr *os.File) (*exec.Cmd, error) {
	m := exec.Command("/proc/self/exe", MachineCommand, c.Dir)
	m.Stdin, m.Stdout, m.Stderr = stdin, stderr, stderr
	m.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Pdeathsig:  unix.SIGKILL,
		Setsid:     true,
	}
	return m, m.Start()
}

// Run runs the machine's first process. It returns when standard input ends.
func Run(dir string, log *slog.Logger) error {
	c, err := Read(dir)
	if err != nil {
		return err
	}
	ended := inputEnds()
	// Mounts made here must not propagate to the host, and /proc must show the new PID namespace.
	if err := mounts(
		mount{to: "/", flags: unix.MS_REC | unix.MS_PRIVATE},
		mount{from: "proc", to: "/proc", kind: "proc"},
		// etcd syncs each write, so use memory: the data of a test's API need not survive the test.
		mount{from: "tmpfs", to: filepath.Join(dir, "etcd"), kind: "tmpfs", data: "mode=0700"},
	); err != nil {
		return err
	}
	first := initproc.New(c.Logs(), log)
	if err := ipBatch(first, dir,
		"link set lo up", "link add nodes type bridge", "addr add "+apiAddress+"/24 dev nodes",
		"addr add "+apiAddress6+"/64 dev nodes nodad", "link set nodes up",
	); err != nil {
		return err
	}

	plane := c.Plane()
	etcd := []string{c.Etcd, "--data-dir=" + filepath.Join(dir, "etcd"), "--listen=" + plane.Etcd}
	for _, p := range []initproc.Program{
		{Name: "etcd", Command: etcd}, {Name: "kube-apiserver", Command: plane.APIServer()},
	} {
		if err := first.Keep(p); err != nil {
			return err
		}
	}
	// Nodes need about a minute before they use the API, so start them first.
	for i := range c.Nodes {
		if err := startNode(c, first, i); err != nil {
			return err
		}
	}
	if err := plane.WaitReady(filepath.Join(c.PKI(), "ca.crt"), apiTimeout); err != nil {
		return err
	}
	log.Info("the API is ready")
	for _, p := range []initproc.Program{
		{Name: "kube-controller-manager", Command: plane.ControllerManager()},
		{Name: "kube-scheduler", Command: plane.Scheduler()},
	} {
		if err := first.Keep(p); err != nil {
			return err
		}
	}
	<-ended
	return nil
}

// startNode starts the first process of a node, and attaches the node to the bridge.
func startNode(c Config, first *initproc.Init, index int) error {
	name := NodeName(index)
	logFile, err := os.Create(filepath.Join(c.Logs(), name+".log"))
	if err != nil {
		return err
	}
	defer logFile.Close()
	node := exec.Command("/proc/self/exe", NodeCommand, c.Dir, fmt.Sprint(index))
	node.Stdout, node.Stderr = logFile, logFile
	node.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Setsid:     true,
	}
	process, ended, err := first.Start(node)
	if err != nil {
		return err
	}
	go func() {
		// If a node ends, the cluster ends.
		status := <-ended
		fmt.Fprintf(os.Stderr, "node %s ended with status %#x, see %s.log\n", name, int(status), name)
		os.Exit(1)
	}()
	device := fmt.Sprintf("to-%s", name)
	return ipBatch(first, c.Dir,
		fmt.Sprintf("link add %s master nodes type veth peer name eth0 netns %d", device, process.Pid),
		fmt.Sprintf("link set %s up", device),
	)
}

// ipBatch runs a batch of ip(8) commands.
func ipBatch(first *initproc.Init, dir string, lines ...string) error {
	file := filepath.Join(dir, "ip.batch")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	return first.Run("network", "ip", "-batch", file)
}

// inputEnds returns a channel that is closed when the other end of standard input is closed.
func inputEnds() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	return ended
}

// ownCgroup makes this process's cgroup the root of a new cgroup namespace, and executes the program again, because
// only then all its threads are in that namespace.
func ownCgroup(args ...string) error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare the cgroup namespace: %w", err)
	}
	return unix.Exec("/proc/self/exe", append([]string{"sluice-k8s"}, args...), os.Environ())
}

// mount is one call of mount(2).
type mount struct {
	from, to, kind string
	flags          uintptr
	data           string
}

// mounts makes mounts in order, with their mount points.
func mounts(all ...mount) error {
	for _, m := range all {
		if err := os.MkdirAll(m.to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.from, m.to, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s %s on %s: %w", m.kind, m.from, m.to, err)
		}
	}
	return nil
}
