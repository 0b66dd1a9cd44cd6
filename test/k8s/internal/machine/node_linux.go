// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package machine

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"text/template"
	"time"

	"github.com/sluice-net/sluice/test/k8s/internal/controlplane"
	"github.com/sluice-net/sluice/test/k8s/internal/initproc"
	"github.com/sluice-net/sluice/test/k8s/internal/leftovers"
	"github.com/sluice-net/sluice/test/k8s/internal/wait"
	"golang.org/x/sys/unix"
)

//go:embed node
var nodeFiles embed.FS

// tunables are the sysctls that kubelet sets, with its values. Set in advance in the node, they keep kubelet from
// changing the host's.
var tunables = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// containerdSocket is the path of the runtime's socket in the node.
const containerdSocket = "/run/containerd/containerd.sock"

// nodeLogs is the node's log directory.
const nodeLogs = "/var/log/node"

// RunNode runs the first process of a node: args are the run directory and the node's index. It returns only with an
// error.
func RunNode(args []string, log *slog.Logger) error {
	c, index, err := nodeArgs(args)
	if err != nil {
		return err
	}
	if err := leftovers.JoinCgroup(filepath.Join(c.Cgroup(), NodeName(index))); err != nil {
		return err
	}
	return ownCgroup(NodeInitCommand, args[0], args[1])
}

func nodeArgs(args []string) (c Config, index int, err error) {
	if len(args) != 2 {
		return c, 0, errors.New("wants the run directory and the index of a node")
	}
	if c, err = Read(args[0]); err != nil {
		return c, 0, err
	}
	index, err = strconv.Atoi(args[1])
	return c, index, err
}

// RunNodeInit is RunNode inside the cgroup namespace.
func RunNodeInit(args []string, log *slog.Logger) error {
	c, index, err := nodeArgs(args)
	if err != nil {
		return err
	}
	name := NodeName(index)
	if err := unix.Sethostname([]byte(name)); err != nil {
		return err
	}
	root := filepath.Join(c.Dir, name, "root")
	if err := makeRoot(c, index, root); err != nil {
		return fmt.Errorf("create the root file system of %s: %w", name, err)
	}
	if err := enterRoot(root); err != nil {
		return fmt.Errorf("enter the root file system of %s: %w", name, err)
	}
	for _, forwarding := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net", forwarding), []byte("1"), 0); err != nil {
			return err
		}
	}

	first := initproc.New(nodeLogs, log)
	if err := connect(first, index); err != nil {
		return err
	}
	containerd := []string{"/opt/k8s/bin/containerd", "--config=/etc/containerd/config.toml"}
	if err := first.Keep(initproc.Program{Name: "containerd", Command: containerd}); err != nil {
		return err
	}
	if err := waitForSocket(containerdSocket, time.Minute); err != nil {
		return err
	}
	images, err := filepath.Glob("/opt/k8s/images/*.tar")
	if err != nil {
		return err
	}
	for _, image := range images {
		if err := first.Run("images", "ctr", "--namespace=k8s.io", "images", "import", image); err != nil {
			return err
		}
	}
	if err := c.Plane().WaitReady("/etc/kubernetes/ca.crt", apiTimeout); err != nil {
		return err
	}
	kubelet := []string{
		"/opt/k8s/bin/kubelet", "--config=/etc/kubernetes/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
		"--hostname-override=" + name, "--node-ip=" + NodeAddress(index) + "," + NodeAddress6(index),
		"--root-dir=/var/lib/kubelet",
	}
	if err := first.Keep(initproc.Program{Name: "kubelet", Command: kubelet}); err != nil {
		return err
	}
	if c.KubeProxy {
		proxy := []string{"/opt/k8s/bin/kube-proxy", "--config=/etc/kubernetes/kube-proxy.yaml"}
		if err := first.Keep(initproc.Program{Name: "kube-proxy", Command: proxy}); err != nil {
			return err
		}
	}
	select {}
}

// connect configures the device on the bridge, which the machine adds.
func connect(first *initproc.Init, index int) error {
	if err := wait.Until(time.Minute, func() error {
		_, err := net.InterfaceByName("eth0")
		return err
	}); err != nil {
		return err
	}
	return ipBatch(
		first, "/run", "link set lo up", "addr add "+NodeAddress(index)+"/24 dev eth0",
		"addr add "+NodeAddress6(index)+"/64 dev eth0 nodad", "link set eth0 up",
		"route add default via "+apiAddress, "route add default via "+apiAddress6,
	)
}

func waitForSocket(path string, timeout time.Duration) error {
	return wait.Until(timeout, func() error {
		c, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// makeRoot mounts the node's file system below root: the host's /usr, and separate directories for everything else.
func makeRoot(c Config, index int, root string) error {
	in := func(path string) string { return filepath.Join(root, path) }
	bind := func(from, to string, flags uintptr) mount {
		return mount{from: from, to: in(to), flags: unix.MS_BIND | flags}
	}
	own := c.Node(index)
	all := []mount{
		{to: "/", flags: unix.MS_REC | unix.MS_PRIVATE},
		{from: "tmpfs", to: root, kind: "tmpfs", data: "mode=0755"},
		bind("/usr", "/usr", unix.MS_REC),
		bind("/dev", "/dev", unix.MS_REC),
		{from: "tmpfs", to: in("/dev/shm"), kind: "tmpfs"},
		{from: "proc", to: in("/proc"), kind: "proc"},
		{from: "sysfs", to: in("/sys"), kind: "sysfs"},
		{from: "bpf", to: in("/sys/fs/bpf"), kind: "bpf"},
		{from: "tmpfs", to: in("/sys/fs/cgroup"), kind: "tmpfs", data: "mode=0755"},
		{from: "tmpfs", to: in("/run"), kind: "tmpfs", data: "mode=0755"},
		{from: "tmpfs", to: in("/tmp"), kind: "tmpfs", data: "mode=1777"},
		bind(filepath.Join(own, "cni"), "/etc/cni/net.d", 0),
		bind(filepath.Join(own, "kubernetes"), "/etc/kubernetes", 0),
		bind(filepath.Join(own, "manifests"), "/etc/kubernetes/manifests", 0),
		bind(filepath.Join(own, "containerd"), "/var/lib/containerd", 0),
		bind(filepath.Join(own, "kubelet"), "/var/lib/kubelet", 0),
		bind(filepath.Join(c.Logs(), NodeName(index)), nodeLogs, 0),
		bind(c.Images(), "/opt/k8s/images", 0),
	}
	for _, dir := range c.Mounts {
		all = append(all, bind(dir, dir, 0))
	}
	cgroups, err := cgroupMounts(root)
	if err != nil {
		return err
	}
	if err := mounts(append(all, cgroups...)...); err != nil {
		return err
	}
	for _, dir := range append([]string{"/usr", "/opt/k8s/images"}, c.Mounts...) {
		if err := unix.Mount("", in(dir), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", dir, err)
		}
	}
	return errors.Join(
		makeLinks(root), copyHost(root), bindPrograms(c, root), bindTunables(root), writeNodeFiles(index, root))
}

// cgroupMounts mounts the same hierarchies as on the host. Their roots are the roots of the cgroup namespace.
func cgroupMounts(root string) ([]mount, error) {
	dirs, err := leftovers.Hierarchies()
	if err != nil {
		return nil, err
	}
	var all []mount
	for _, dir := range dirs {
		m := mount{from: "cgroup", to: filepath.Join(root, dir), kind: "cgroup", data: filepath.Base(dir)}
		switch m.data {
		case "unified":
			m.kind, m.data = "cgroup2", ""
		case "systemd":
			m.data = "none,name=systemd"
		}
		all = append(all, m)
	}
	return all, nil
}

func makeLinks(root string) error {
	links := map[string]string{
		"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64", "/var/run": "../run",
	}
	for from, to := range links {
		if err := os.Symlink(to, filepath.Join(root, from)); err != nil {
			return err
		}
	}
	return nil
}

// copyHost copies the files in /etc that programs of the host read, and the reference CNI plugins. A test may add its
// own plugins.
func copyHost(root string) error {
	for from, to := range map[string]string{
		"/etc/alternatives": "/etc/alternatives", "/etc/iproute2": "/etc/iproute2", "/usr/lib/cni": "/opt/cni/bin",
	} {
		if err := os.MkdirAll(filepath.Join(root, to), 0o755); err != nil {
			return err
		}
		entries, err := os.ReadDir(from)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := copyEntry(filepath.Join(from, e.Name()), filepath.Join(root, to, e.Name()), e); err != nil {
				return err
			}
		}
	}
	for _, file := range []string{"passwd", "group", "nsswitch.conf", "protocols", "services", "ld.so.cache"} {
		content, err := os.ReadFile(filepath.Join("/etc", file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(root, "etc", file), content, 0o644) //nolint:gosec // as on any machine
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func copyEntry(from, to string, e fs.DirEntry) error {
	if e.Type()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	}
	if !e.Type().IsRegular() {
		return nil
	}
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := e.Info()
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, info.Mode().Perm())
}

// bindPrograms mounts the programs at /opt/k8s/bin, including the configured containerd with its shim and client.
func bindPrograms(c Config, root string) error {
	programs := map[string]string{"containerd": c.Containerd}
	for _, name := range []string{"kubelet", "kubectl", "kube-proxy"} {
		programs[name] = filepath.Join(c.Binaries, name)
	}
	for _, name := range []string{"containerd-shim-runc-v2", "ctr"} {
		programs[name] = filepath.Join(filepath.Dir(c.Containerd), name)
	}
	for name, from := range programs {
		from, err := filepath.EvalSymlinks(from)
		if err != nil {
			return err
		}
		if err := bindFile(from, filepath.Join(root, "opt/k8s/bin", name)); err != nil {
			return err
		}
	}
	return nil
}

func bindTunables(root string) error {
	for name, value := range tunables {
		file := filepath.Join(root, "opt/k8s/sysctl", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join(root, "proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("sysctl %s: %w", name, err)
		}
	}
	return nil
}

func bindFile(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	return nil
}

// writeNodeFiles writes the configuration files of the node's programs.
func writeNodeFiles(index int, root string) error {
	values := map[string]string{
		"Name": NodeName(index), "Address": NodeAddress(index), "Socket": containerdSocket,
		"PodCIDRs": controlplane.PodCIDRs, "DNS": controlplane.DNSAddress,
	}
	all, err := template.ParseFS(nodeFiles, "node/*")
	if err != nil {
		return err
	}
	for name, path := range map[string]string{
		"containerd.toml": "etc/containerd/config.toml",
		"kubelet.yaml":    "etc/kubernetes/kubelet.yaml",
		"kube-proxy.yaml": "etc/kubernetes/kube-proxy.yaml",
		"hosts":           "etc/hosts",
		"resolv.conf":     "etc/resolv.conf",
	} {
		var content bytes.Buffer
		if err := all.ExecuteTemplate(&content, name, values); err != nil {
			return err
		}
		file := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, content.Bytes(), 0o644); err != nil { //nolint:gosec // as on any machine
			return err
		}
	}
	return nil
}

// enterRoot makes root the root file system with shared mounts, as systemd does: kubelet propagates mounts to
// containers that request it.
func enterRoot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// The host's TMPDIR does not exist here.
	os.Clearenv()
	if err := os.Setenv("PATH", "/opt/k8s/bin:/usr/sbin:/usr/bin:/sbin:/bin"); err != nil {
		return err
	}
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}
