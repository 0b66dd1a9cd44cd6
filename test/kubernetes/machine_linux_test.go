// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-net/sluice/kit/privilege"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// machine is a directory that represents a machine, with a network namespace. It is a shared mount, like the root of
// a machine under systemd.
type machine struct {
	t     *testing.T
	dir   string
	image string // root of every container
	netns string
	state string // of runc
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test runs containers and needs root")
	}
	dir, err := os.MkdirTemp("", "slk") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, dir: dir, image: t.TempDir(), netns: filepath.Join(dir, "netns"), state: t.TempDir()}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	m.must(unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"))
	m.must(unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	m.must(unix.Mount("", dir, "", unix.MS_SHARED, ""))
	for _, path := range []string{
		"run/netns", "run/sluice", "var/lib/sluice", "var/lib/sluice-etcd", "etc/cni/net.d", "opt/cni/bin", "dev/net",
		"token",
	} {
		m.must(os.MkdirAll(filepath.Join(dir, path), 0o755))
	}
	// As on a machine without udev.
	m.must(unix.Mknod(filepath.Join(dir, "dev", "net", "tun"), unix.S_IFCHR|0o600, int(unix.Mkdev(10, 200))))
	m.must(os.Symlink("../run", filepath.Join(dir, "var", "run")))
	m.must(pod.NewNetns(m.netns))
	t.Cleanup(func() { m.must(pod.DeleteNetns(m.netns)) })

	// The files that `make images` puts into the images.
	m.must(os.MkdirAll(filepath.Join(m.image, "usr", "bin"), 0o755))
	m.must(os.MkdirAll(filepath.Join(m.image, "var"), 0o755))
	m.must(os.MkdirAll(filepath.Join(m.image, "run"), 0o755))
	m.must(os.Symlink("../run", filepath.Join(m.image, "var", "run")))
	for _, program := range []string{
		"sluice", "sluice-cni", "sluice-identity", "sluice-ipam", "sluice-policy", "sluice-loadbalancer",
		"sluice-datapath", "sluice-dns", "sluice-http", "sluice-hubble", "sluice-devetcd",
	} {
		m.copy(filepath.Join(binDir(), program), filepath.Join(m.image, "usr", "bin", program))
	}
	return m
}

func (m *machine) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) copy(from, to string) {
	m.t.Helper()
	content, err := os.ReadFile(from)
	m.must(err)
	m.must(os.WriteFile(to, content, 0o755)) //nolint:gosec // a program
}

// path returns the location of a path of the machine.
func (m *machine) path(path string) string {
	if strings.HasPrefix(path, "/proc/") || strings.HasPrefix(path, "/sys/") { // shared with the host
		return path
	}
	return filepath.Join(m.dir, path)
}

// allCapabilities returns the capabilities of a privileged container: all capabilities of the runtime.
func (m *machine) allCapabilities() []string {
	state, err := privilege.Current()
	m.must(err)
	return strings.Split(state.Effective.String(), ",")
}

// spec returns the OCI specification that a Kubernetes runtime derives from a container.
func (m *machine) spec(of corev1.PodSpec, c corev1.Container) *specs.Spec {
	m.t.Helper()
	s := c.SecurityContext
	privileged := s.Privileged != nil && *s.Privileged
	var capabilities []string
	if privileged {
		capabilities = m.allCapabilities()
	} else {
		for _, name := range s.Capabilities.Add {
			capabilities = append(capabilities, "CAP_"+string(name))
		}
	}
	args := slices.Concat(c.Command, c.Args)
	if c.Name == "ipam" {
		args = append(args, "--mode=static") // there is no API server
	}
	env := environment(m.t, c)
	if i := slices.Index(env, "SLUICE_IDENTITY_ETCD_ENDPOINTS="); i >= 0 {
		env[i] += "http://127.0.0.1:64715" // of etcd-dev: the store needs an API server
	}
	spec := &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			User: specs.User{UID: uint32(*s.RunAsUser), GID: uint32(*s.RunAsGroup)}, //nolint:gosec // of the manifest
			Args: args, Env: env, Cwd: "/",
			NoNewPrivileges: s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
		},
		Root: &specs.Root{Path: m.image, Readonly: *s.ReadOnlyRootFilesystem},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + m.id(c.Name), RootfsPropagation: "rslave",
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.MountNamespace},
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.NetworkNamespace, Path: m.netns},
			},
		},
	}
	if !privileged {
		spec.Linux.MaskedPaths = []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"}
		spec.Linux.ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
		var err error
		spec.Linux.Seccomp, err = seccomp.GetDefaultProfile(spec)
		m.must(err)
	}
	hostPaths := map[string]string{}
	for _, v := range of.Volumes {
		if hostPaths[v.Name] = "/token"; v.HostPath != nil { // a token of a cluster that does not exist
			hostPaths[v.Name] = v.HostPath.Path
		}
	}
	for _, v := range c.VolumeMounts {
		options := []string{"rbind", "rprivate", "rw"}
		if v.MountPropagation != nil {
			switch *v.MountPropagation {
			case corev1.MountPropagationHostToContainer:
				options[1] = "rslave"
			case corev1.MountPropagationBidirectional:
				options[1], spec.Linux.RootfsPropagation = "rshared", "rshared"
			}
		}
		if v.ReadOnly {
			options[2] = "ro"
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{
			Destination: v.MountPath, Type: "bind", Source: m.path(hostPaths[v.Name]), Options: options,
		})
	}
	return spec
}

func (m *machine) id(container string) string { return filepath.Base(m.dir) + "-" + container }

// container is a runc container with one process.
type container struct {
	m    *machine
	id   string
	log  string
	pid  int
	port int32 // port of its probes
}

// run runs a container to its end and returns its exit code with its log.
func (m *machine) run(of corev1.PodSpec, c corev1.Container) (code int, log string) {
	m.t.Helper()
	k := m.prepare(of, c)
	cmd := k.runc("run", "--bundle", filepath.Dir(k.log), k.id)
	err := cmd.Run()
	content, rerr := os.ReadFile(k.log)
	m.must(rerr)
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		m.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(content)
}

// start starts a container, which is removed at the end of the test.
func (m *machine) start(of corev1.PodSpec, c corev1.Container) *container {
	m.t.Helper()
	k := m.prepare(of, c)
	pidFile := filepath.Join(filepath.Dir(k.log), "pid")
	err := k.runc("run", "--detach", "--pid-file", pidFile, "--bundle", filepath.Dir(k.log), k.id).Run()
	if err != nil {
		content, _ := os.ReadFile(k.log)
		m.t.Fatalf("start %s: %v\n%s", c.Name, err, content)
	}
	pid, err := os.ReadFile(pidFile)
	m.must(err)
	k.pid, err = strconv.Atoi(string(pid))
	m.must(err)
	m.t.Cleanup(k.remove)
	if c.ReadinessProbe != nil {
		k.port = c.ReadinessProbe.HTTPGet.Port.IntVal
	}
	return k
}

func (m *machine) prepare(of corev1.PodSpec, c corev1.Container) *container {
	m.t.Helper()
	bundle := m.t.TempDir()
	config, err := json.Marshal(m.spec(of, c))
	m.must(err)
	m.must(os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600))
	return &container{m: m, id: m.id(c.Name), log: filepath.Join(bundle, "log")}
}

// runc returns a runc command that writes its output to the container's log.
func (k *container) runc(args ...string) *exec.Cmd {
	k.m.t.Helper()
	log, err := os.OpenFile(k.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	k.m.must(err)
	k.m.t.Cleanup(func() { log.Close() })
	args = append([]string{"--root", k.m.state}, args...)
	cmd := exec.Command("runc", args...) //nolint:gosec // arguments of the test's own
	cmd.Stdout, cmd.Stderr = log, log
	return cmd
}

// remove kills the container, if it runs.
func (k *container) remove() {
	if err := k.runc("delete", "--force", k.id).Run(); err != nil {
		k.m.t.Errorf("remove %s: %v", k.id, err)
	}
	if content, err := os.ReadFile(k.log); err == nil && k.m.t.Failed() {
		k.m.t.Logf("the log of %s ends with\n%s", k.id, content[max(0, len(content)-4000):])
	}
}

// ready waits until the container's readiness probe succeeds.
func (k *container) ready() {
	k.m.t.Helper()
	servicetest.EventuallyNil(k.m.t, k.id+" is ready", func() error {
		if content, err := os.ReadFile(k.log); err == nil && bytes.Contains(content, []byte(`"msg":"stopped"`)) {
			k.m.t.Fatalf("%s ended:\n%s", k.id, content)
		}
		_, err := k.m.get(k.port, "/readyz")
		return err
	})
}

// get sends an HTTP request to a port of the machine's loopback address.
func (m *machine) get(port int32, path string) (body []byte, err error) {
	err = pod.In(m.netns, func() error {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return err
		}
		defer conn.Close()
		connected := func(context.Context, string, string) (net.Conn, error) { return conn, nil }
		transport := &http.Transport{DisableKeepAlives: true, DialContext: connected}
		r, err := (&http.Client{Transport: transport, Timeout: 5 * time.Second}).Get("http://127.0.0.1" + path)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		body, err = io.ReadAll(r.Body)
		if err == nil && r.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", r.Status, body)
		}
		return err
	})
	return body, err
}

// plugin executes the installed plugin as a runtime of the machine does: in its directories, with the namespace path
// that the runtime chooses.
func (m *machine) plugin(command string, p pod.Pod, netns string) ([]byte, error) {
	m.t.Helper()
	wrapper := filepath.Join(m.t.TempDir(), "plugin")
	script := fmt.Sprintf("#!/bin/sh\nexec unshare -m sh -c 'mount --rbind %s/run /run && mount --bind %[1]s/var /var "+
		"&& exec %[1]s/opt/cni/bin/sluice-cni'\n", m.dir)
	m.must(os.WriteFile(wrapper, []byte(script), 0o700)) //nolint:gosec // a program
	list, err := os.ReadFile(m.path("/etc/cni/net.d/05-sluice.conflist"))
	m.must(err)
	config, err := cni.PluginConfig(list, "1.0.0", nil)
	m.must(err)
	return cni.Run(servicetest.Context(m.t), cni.Call{
		Plugin: wrapper, Command: command, ContainerID: p.Name, Netns: netns, IfName: "eth0",
		Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=test;K8S_POD_NAME=" + p.Name, Path: m.path("/opt/cni/bin"), Config: config,
	})
}

// pod makes a network namespace as a runtime does, even after the containers have started.
func (m *machine) pod(name string) pod.Pod {
	m.t.Helper()
	p := pod.Pod{Name: name, Netns: m.path("/run/netns/" + name)}
	m.must(pod.NewNetns(p.Netns))
	m.t.Cleanup(func() { m.must(pod.DeleteNetns(p.Netns)) })
	return p
}
