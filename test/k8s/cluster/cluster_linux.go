// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster starts and controls Kubernetes clusters for tests.
//
// A cluster is owned by another process, the keeper, which removes the cluster when the process that called Start
// ends, for whatever reason.
package cluster

import (
	"bytes"
	"cmp"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/template"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/controlplane"
	"github.com/sluice-net/sluice/test/k8s/internal/initproc"
	"github.com/sluice-net/sluice/test/k8s/internal/keeper"
	"github.com/sluice-net/sluice/test/k8s/internal/machine"
	"golang.org/x/sys/unix"
)

// KeepCommand is the argument that makes the test bed's program a keeper. The run directory follows, and
// UntilInputEnds if the keeper must end with its caller.
const (
	KeepCommand    = "keep"
	UntilInputEnds = "until-input-ends"
)

//go:embed manifests
var manifests embed.FS

// Options describe a cluster.
type Options struct {
	// Dir is the run directory, which must not exist. If it is empty, a new directory below Base is used.
	Dir string
	// Nodes is the number of nodes. Default: 1.
	Nodes int
	// Containerd is the path of containerd. Default: Debian's.
	Containerd string
	// NoCNI leaves the nodes without a network and without kube-proxy. Start does not wait for such nodes, which are
	// not Ready.
	NoCNI bool
	// Detached keeps the cluster running when this process ends.
	Detached bool
	// Mounts are directories of the host that are mounted read-only on the nodes.
	Mounts []string
	// Images are OCI archives that every node imports in addition to the images of Kubernetes.
	Images []string
}

// Cluster is a running cluster.
type Cluster struct {
	config machine.Config
	keeper *exec.Cmd
	// lifeline ends the keeper when it closes.
	lifeline io.Closer
	ended    chan struct{}
}

// Base returns the parent of all run directories: below SLUICE_K8S_BASE or the directory for temporary files.
func Base() string {
	return cmp.Or(os.Getenv("SLUICE_K8S_BASE"), filepath.Join(os.TempDir(), "sluice-k8s"))
}

// Dir returns the run directory of the cluster with the name.
func Dir(name string) string { return filepath.Join(Base(), name) }

// bin returns the directory of the built programs: SLUICE_BIN, or the parent of this program's directory.
func bin() (string, error) {
	if dir := os.Getenv("SLUICE_BIN"); dir != "" {
		return filepath.Abs(dir)
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(filepath.Dir(self))
	if _, err := os.Stat(filepath.Join(dir, "k8s")); err != nil {
		return "", fmt.Errorf("the programs of Kubernetes are missing: %w: "+
			"run `make k8s`, or set SLUICE_BIN to the directory bin of the tree", err)
	}
	return dir, nil
}

// Start starts a cluster, and returns when its nodes and its DNS server are ready. It first removes the leftovers of
// killed clusters.
func Start(ctx context.Context, o Options) (_ *Cluster, err error) {
	if err := RemoveDead(); err != nil {
		return nil, err
	}
	dir, err := bin()
	if err != nil {
		return nil, err
	}
	if o.Dir == "" {
		if err := os.MkdirAll(Base(), 0o755); err != nil {
			return nil, err
		}
		if o.Dir, err = os.MkdirTemp(Base(), "test-"); err != nil {
			return nil, err
		}
	} else if err := os.MkdirAll(filepath.Dir(o.Dir), 0o755); err != nil {
		return nil, err
	} else if err := os.Mkdir(o.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("the cluster exists already: %w", err)
	}
	c := &Cluster{ended: make(chan struct{}), config: machine.Config{
		Dir: o.Dir, Nodes: cmp.Or(o.Nodes, 1), Mounts: o.Mounts, KubeProxy: !o.NoCNI,
		Binaries: filepath.Join(dir, "k8s"), Etcd: filepath.Join(dir, "sluice-devetcd"),
		Containerd: cmp.Or(o.Containerd, "/usr/bin/containerd"),
	}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start a cluster: %w", err), c.Logs(30), c.Close())
		}
	}()
	if err := c.config.Write(); err != nil {
		return nil, err
	}
	if err := c.copyImages(filepath.Join(dir, "k8s", "images"), o.Images); err != nil {
		return nil, err
	}
	if err := c.startKeeper(filepath.Join(dir, "test", "sluice-k8s"), o.Detached); err != nil {
		return nil, err
	}
	if err := c.bringUp(ctx, !o.NoCNI); err != nil {
		return nil, err
	}
	return c, nil
}

// RemoveDead removes the leftovers of killed clusters.
func RemoveDead() error { return keeper.RemoveDead(Base()) }

// Open returns the cluster that another process started.
func Open(dir string) (*Cluster, error) {
	config, err := machine.Read(dir)
	if err != nil {
		return nil, fmt.Errorf("no cluster: %w", err)
	}
	return &Cluster{config: config}, nil
}

// Dir is the run directory.
func (c *Cluster) Dir() string { return c.config.Dir }

// Nodes returns the number of nodes.
func (c *Cluster) Nodes() int { return c.config.Nodes }

// KeeperPID returns the process ID of the keeper.
func (c *Cluster) KeeperPID() int { return c.keeper.Process.Pid }

// copyImages copies all archives of the directory, and the additional ones.
func (c *Cluster) copyImages(dir string, further []string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.tar"))
	if err != nil {
		return err
	}
	for _, file := range append(files, further...) {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(c.config.Images(), filepath.Base(file)), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) startKeeper(program string, detached bool) error {
	args := []string{KeepCommand, c.config.Dir}
	if !detached {
		args = append(args, UntilInputEnds)
	}
	k := exec.Command(program, args...)
	k.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	logFile, err := os.Create(filepath.Join(c.config.Logs(), "keeper.log"))
	if err != nil {
		return err
	}
	defer logFile.Close()
	k.Stdout, k.Stderr = logFile, logFile
	if !detached {
		if c.lifeline, err = k.StdinPipe(); err != nil {
			return err
		}
	}
	if err := k.Start(); err != nil {
		return err
	}
	c.keeper = k
	go func() {
		_ = k.Wait()
		close(c.ended)
	}()
	return nil
}

// Close removes the cluster, and returns when it is removed completely.
func (c *Cluster) Close() error {
	if c.lifeline != nil {
		_ = c.lifeline.Close()
	}
	err := keeper.Remove(c.config.Dir)
	if c.keeper != nil {
		<-c.ended
	}
	return err
}

func (c *Cluster) bringUp(ctx context.Context, cni bool) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	// The API can be used only after the machine has started.
	if err := c.Eventually(ctx, "the nodes register and receive ranges of addresses", func() error {
		for i := range c.config.Nodes {
			if _, err := c.podCIDRs(ctx, i); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if err := c.Apply(ctx, manifest("coredns.yaml", nil)); err != nil {
		return err
	}
	if err := c.connect(ctx, cni); err != nil || !cni {
		return err
	}
	for i := range c.config.Nodes {
		node := "node/" + machine.NodeName(i)
		if _, err := c.Kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=5m", node); err != nil {
			return err
		}
	}
	_, err := c.Kubectl(ctx, "--namespace=kube-system", "rollout", "status", "--timeout=5m", "deployment/coredns")
	return err
}

// podCIDRs returns the pod CIDRs of a node, IPv4 first.
func (c *Cluster) podCIDRs(ctx context.Context, node int) ([]string, error) {
	out, err := c.Kubectl(ctx, "get", "node", machine.NodeName(node), "--output=jsonpath={.spec.podCIDRs[*]}")
	if err != nil {
		return nil, err
	}
	cidrs := strings.Fields(string(out))
	if len(cidrs) != 2 {
		return nil, fmt.Errorf("%s has the ranges of addresses %q, want one of each family", machine.NodeName(node), cidrs)
	}
	return cidrs, nil
}

// connect adds routes to all pods to the machine. With cni, it also adds routes between the nodes and configures the
// reference plugins.
func (c *Cluster) connect(ctx context.Context, cni bool) error {
	for i := range c.config.Nodes {
		cidrs, err := c.podCIDRs(ctx, i)
		if err != nil {
			return err
		}
		for family, via := range []string{machine.NodeAddress(i), machine.NodeAddress6(i)} {
			if err := c.route(ctx, i, cidrs[family], via, cni); err != nil {
				return err
			}
		}
		if !cni {
			continue
		}
		file := filepath.Join(c.config.Node(i), "cni", "10-reference.conflist")
		if err := os.WriteFile(file+".tmp", manifest("reference.conflist", cidrs), 0o600); err != nil {
			return err
		}
		if err := os.Rename(file+".tmp", file); err != nil {
			return err
		}
	}
	return nil
}

// route adds a route to the pods of a node: on the control plane and, with nodes, on the other nodes.
func (c *Cluster) route(ctx context.Context, to int, cidr, via string, nodes bool) error {
	route := []string{"ip", "route", "replace", cidr, "via", via}
	if _, err := c.InMachine(ctx, route...); err != nil {
		return err
	}
	for i := range c.config.Nodes {
		if nodes && i != to {
			if _, err := c.InNode(ctx, i, route...); err != nil {
				return err
			}
		}
	}
	return nil
}

func manifest(name string, podCIDRs []string) []byte {
	content := template.Must(template.ParseFS(manifests, "manifests/"+name))
	var b bytes.Buffer
	values := map[string]any{"DNS": controlplane.DNSAddress, "PodCIDRs": podCIDRs}
	if err := content.Execute(&b, values); err != nil {
		panic(err) // all file contents are constants above
	}
	return b.Bytes()
}

// MachinePID returns the first process of the machine.
func (c *Cluster) MachinePID() (int, error) {
	content, err := os.ReadFile(filepath.Join(c.config.Dir, "machine.pid"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(content))
}

// NetworkCommand returns a command of the host in the control plane's network namespace. Signals reach its process
// directly.
func (c *Cluster) NetworkCommand(ctx context.Context, args ...string) (*exec.Cmd, error) {
	pid, err := c.MachinePID()
	if err != nil {
		return nil, err
	}
	all := append([]string{fmt.Sprintf("--net=/proc/%d/ns/net", pid), "--"}, args...)
	return exec.CommandContext(ctx, "nsenter", all...), nil
}

// InMachine runs a command of the host in the control plane's network namespace,
// and returns its standard output.
func (c *Cluster) InMachine(ctx context.Context, args ...string) ([]byte, error) {
	command, err := c.NetworkCommand(ctx, args...)
	if err != nil {
		return nil, err
	}
	return output(command)
}

// MachineCommand returns a command of the host in the control plane's namespaces, which ends with the cluster.
func (c *Cluster) MachineCommand(ctx context.Context, args ...string) (*exec.Cmd, error) {
	pid, err := c.MachinePID()
	if err != nil {
		return nil, err
	}
	enter := []string{"--target=" + strconv.Itoa(pid), "--mount", "--net", "--pid", "--"}
	return exec.CommandContext(ctx, "nsenter", append(enter, args...)...), nil
}

// Kubeconfig returns the file with administrator rights.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.config.PKI(), "admin.kubeconfig") }

// KubectlCommand returns a kubectl command with administrator rights.
func (c *Cluster) KubectlCommand(ctx context.Context, args ...string) (*exec.Cmd, error) {
	all := []string{
		filepath.Join(c.config.Binaries, "kubectl"),
		"--kubeconfig=" + c.Kubeconfig(),
		"--cache-dir=" + filepath.Join(c.config.Dir, "kubectl-cache"),
	}
	return c.NetworkCommand(ctx, append(all, args...)...)
}

// Kubectl runs kubectl and returns its standard output.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	command, err := c.KubectlCommand(ctx, args...)
	if err != nil {
		return nil, err
	}
	return output(command)
}

// Apply applies manifests.
func (c *Cluster) Apply(ctx context.Context, manifest []byte) error {
	command, err := c.KubectlCommand(ctx, "apply", "--filename=-")
	if err != nil {
		return err
	}
	command.Stdin = bytes.NewReader(manifest)
	_, err = output(command)
	return err
}

// Get reads an object or a list into v.
func (c *Cluster) Get(ctx context.Context, v any, args ...string) error {
	out, err := c.Kubectl(ctx, append([]string{"get", "--output=json"}, args...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal(out, v)
}

// NodePID returns the first process of a node.
func (c *Cluster) NodePID(index int) (int, error) {
	pid, err := c.machineChild(strings.Join([]string{machine.NodeInitCommand, c.config.Dir, strconv.Itoa(index)}, "\x00"))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", machine.NodeName(index), err)
	}
	return pid, nil
}

// Stop kills a program of the control plane, such as kube-apiserver or etcd, which stays down until the returned
// function starts it again.
func (c *Cluster) Stop(program string) (start func() error, err error) {
	path := filepath.Join(c.config.Binaries, program)
	if program == "etcd" {
		path = c.config.Etcd
	}
	held := filepath.Join(c.config.Logs(), program+initproc.Held)
	if err := os.WriteFile(held, nil, 0o600); err != nil {
		return nil, err
	}
	pid, err := c.machineChild(path + "\x00")
	if err == nil {
		err = unix.Kill(pid, unix.SIGKILL)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("stop %s: %w", program, err), os.Remove(held))
	}
	return func() error { return os.Remove(held) }, nil
}

// machineChild returns the child of the machine's first process whose command line contains want. Each argument of
// the command line ends with a zero byte.
func (c *Cluster) machineChild(want string) (int, error) {
	parent, err := c.MachinePID()
	if err != nil {
		return 0, err
	}
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	for _, file := range files {
		// The format is "pid (name) state parent". The name of the program contains no blank.
		content, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		fields := strings.Fields(string(content))
		if len(fields) < 4 || fields[3] != strconv.Itoa(parent) {
			continue
		}
		command, err := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		if err == nil && strings.Contains(string(command), want) {
			return strconv.Atoi(fields[0])
		}
	}
	return 0, fs.ErrNotExist
}

// joinNode executes a command in a cgroup of the node, in which all processes of a real node run. The eBPF programs at
// the root of the node's cgroups handle its sockets only there.
const joinNode = `cgroup=/sys/fs/cgroup/unified; [ -d $cgroup ] || cgroup=/sys/fs/cgroup
mkdir -p $cgroup/commands && echo $$ >$cgroup/commands/cgroup.procs && exec "$@"`

// NodeCommand returns a command in all namespaces of a node.
func (c *Cluster) NodeCommand(ctx context.Context, index int, args ...string) (*exec.Cmd, error) {
	pid, err := c.NodePID(index)
	if err != nil {
		return nil, err
	}
	enter := []string{"--target=" + strconv.Itoa(pid), "--mount", "--net", "--pid", "--uts", "--ipc", "--cgroup", "--"}
	enter = append(enter, "sh", "-c", joinNode, "sh")
	command := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	command.Env = []string{"PATH=/opt/k8s/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return command, nil
}

// InNode runs a command on a node and returns its standard output.
func (c *Cluster) InNode(ctx context.Context, index int, args ...string) ([]byte, error) {
	command, err := c.NodeCommand(ctx, index, args...)
	if err != nil {
		return nil, err
	}
	return output(command)
}

// ProcessStatus returns /proc/PID/status of a container's first process. The container's ID is the one in the API.
func (c *Cluster) ProcessStatus(ctx context.Context, node int, containerID string) (string, error) {
	_, id, _ := strings.Cut(containerID, "://")
	tasks, err := c.InNode(ctx, node, "ctr", "--namespace=k8s.io", "tasks", "list")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(tasks)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == id {
			status, err := c.InNode(ctx, node, "cat", "/proc/"+fields[1]+"/status")
			return string(status), err
		}
	}
	return "", fmt.Errorf("container %s does not run on %s", id, machine.NodeName(node))
}

// Eventually retries until try succeeds, ctx ends or the cluster ends.
func (c *Cluster) Eventually(ctx context.Context, what string, try func() error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.ended:
			return fmt.Errorf("wait until %s: the cluster's keeper process has exited: %w", what, err)
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w: %w", what, ctx.Err(), err)
		}
	}
}

// Logs returns an error with the last lines of every log, for a failed test.
func (c *Cluster) Logs(lines int) error {
	var b strings.Builder
	err := filepath.WalkDir(c.config.Logs(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		all := strings.Split(strings.TrimSpace(string(content)), "\n")
		fmt.Fprintf(&b, "== %s\n%s\n", path, strings.Join(all[max(0, len(all)-lines):], "\n"))
		return nil
	})
	return errors.Join(errors.New(b.String()), err)
}

func output(c *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return out, fmt.Errorf("%s: %w: %s", strings.Join(c.Args[2:], " "), err, stderr.Bytes())
	}
	return out, nil
}
