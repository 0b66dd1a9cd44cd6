// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package machine makes the namespaces that a cluster lives in.
//
// All of a cluster is in one PID namespace with a mount and a network namespace
// of its own, the machine: the control plane is in it, and each node in further
// namespaces inside. So the end of the machine's first process takes all
// processes, mounts, namespaces and devices with it, and two clusters with the
// same addresses do not meet.
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

// The words by which the test bed's program becomes a first process.
const (
	// MachineCommand is followed by the run directory.
	MachineCommand = "machine"
	// NodeCommand is followed by the run directory and the node's index.
	NodeCommand = "node"
	// NodeInitCommand is NodeCommand in its own cgroup namespace.
	NodeInitCommand = "node-init"
)

const apiTimeout = 5 * time.Minute

// Start starts the machine of the run directory. It ends with the calling
// thread, which must be locked, or when its standard input is closed.
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

// Run is the machine's first process. It returns when standard input ends.
func Run(dir string, log *slog.Logger) error {
	c, err := Read(dir)
	if err != nil {
		return err
	}
	ended := inputEnds()
	// What is mounted here must not show outside, and /proc is that of the
	// new PID namespace.
	if err := mounts(
		mount{to: "/", flags: unix.MS_REC | unix.MS_PRIVATE},
		mount{from: "proc", to: "/proc", kind: "proc"},
		// etcd syncs each write; a test's API is worth nothing after its end.
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
	// The nodes need a minute of their own before they ask for the API.
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

// startNode starts the first process of a node, and connects it to the bridge.
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
		// A cluster without one of its nodes is no cluster.
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

// ipBatch runs commands of ip(8).
func ipBatch(first *initproc.Init, dir string, lines ...string) error {
	file := filepath.Join(dir, "ip.batch")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	return first.Run("network", "ip", "-batch", file)
}

// inputEnds is closed when nobody has the other end of standard input.
func inputEnds() <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	return ended
}

// ownCgroup makes this process's cgroup the root of what it sees, and executes
// the program again: only then all its threads see it.
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

// mounts mounts in order, and makes the directories to mount on.
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
