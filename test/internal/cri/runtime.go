// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cri runs a private containerd and calls CRI as kubelet does. A Runtime has its own root, state, sockets,
// CNI directories and cgroup, so it does not interfere with another containerd on the machine. Close removes
// everything.
package cri

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"text/template"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Options say how to run containerd.
type Options struct {
	// Dir is an existing, empty directory with a path short enough for unix
	// sockets below it (at most 60 bytes).
	Dir string
	// CNIPlugins are executables that containerd may call, by their names in the CNI configuration. "loopback", which
	// containerd needs for every sandbox, is always added.
	CNIPlugins []string
	// CNIConfig is the content of the CNI network configuration list.
	CNIConfig []byte
	// PauseImage is an OCI archive of the sandbox image.
	PauseImage string
	// PauseImageName is the name of the image inside the archive.
	PauseImageName string
}

// Runtime is a running containerd.
type Runtime struct {
	options Options
	command *exec.Cmd
	exited  chan struct{}
	conn    *grpc.ClientConn
	client  runtimeapi.RuntimeServiceClient
	cgroup  string
	pods    map[string]*runtimeapi.PodSandboxConfig
}

// loopbackPlugin is installed by Debian's containernetworking-plugins.
const loopbackPlugin = "/usr/lib/cni/loopback"

var configTemplate = template.Must(template.New("config.toml").Parse(`version = 2
root = "{{.Dir}}/root"
state = "{{.Dir}}/state"
# What a sandbox does not need: fewer plugins start faster and ask less of the
# kernel.
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]

[grpc]
  address = "{{.Dir}}/c.sock"

[ttrpc]
  address = "{{.Dir}}/t.sock"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{{.PauseImageName}}"
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{{.Dir}}/cni/bin"
    conf_dir = "{{.Dir}}/cni/net.d"
    max_conf_num = 1
`))

// Start starts containerd, waits until it serves and imports the pause image.
func Start(ctx context.Context, o Options) (_ *Runtime, err error) {
	r := &Runtime{
		options: o,
		exited:  make(chan struct{}),
		cgroup:  "/sluice-test-" + filepath.Base(o.Dir),
		pods:    make(map[string]*runtimeapi.PodSandboxConfig),
	}
	if err := r.layOut(); err != nil {
		return nil, err
	}
	logFile, err := os.Create(filepath.Join(o.Dir, "containerd.log"))
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	r.command = exec.Command("containerd", "--config", filepath.Join(o.Dir, "config.toml"))
	r.command.Stdout, r.command.Stderr = logFile, logFile
	r.command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := r.command.Start(); err != nil {
		return nil, fmt.Errorf("start containerd: %w", err)
	}
	go func() {
		_ = r.command.Wait()
		close(r.exited)
	}()
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()

	r.conn, err = grpc.NewClient("unix://"+filepath.Join(o.Dir, "c.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	r.client = runtimeapi.NewRuntimeServiceClient(r.conn)
	if err := r.waitUntilReady(ctx); err != nil {
		return nil, err
	}
	if out, err := r.ctr(ctx, "images", "import", "--snapshotter", "native", o.PauseImage); err != nil {
		return nil, fmt.Errorf("import the pause image: %w: %s", err, out)
	}
	return r, nil
}

// ctr runs containerd's client in the namespace that CRI uses.
func (r *Runtime) ctr(ctx context.Context, args ...string) ([]byte, error) {
	all := append([]string{"--address", filepath.Join(r.options.Dir, "c.sock"), "--namespace", "k8s.io"}, args...)
	return exec.CommandContext(ctx, "ctr", all...).CombinedOutput()
}

func (r *Runtime) layOut() error {
	o := r.options
	binDir := filepath.Join(o.Dir, "cni", "bin")
	confDir := filepath.Join(o.Dir, "cni", "net.d")
	for _, dir := range []string{binDir, confDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for _, plugin := range append([]string{loopbackPlugin}, o.CNIPlugins...) {
		if err := os.Symlink(plugin, filepath.Join(binDir, filepath.Base(plugin))); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(confDir, "10-test.conflist"), o.CNIConfig, 0o600); err != nil {
		return err
	}
	var config bytes.Buffer
	if err := configTemplate.Execute(&config, o); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(o.Dir, "config.toml"), config.Bytes(), 0o600)
}

// waitUntilReady returns when the runtime and its network report ready.
func (r *Runtime) waitUntilReady(ctx context.Context) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		status, err := r.client.Status(ctx, &runtimeapi.StatusRequest{})
		if err == nil {
			err = notReady(status.GetStatus())
		}
		if err == nil {
			return nil
		}
		last = err
		select {
		case <-tick.C:
		case <-r.exited:
			log, _ := os.ReadFile(filepath.Join(r.options.Dir, "containerd.log"))
			return fmt.Errorf("containerd has ended:\n%s", tail(log, 2000))
		case <-ctx.Done():
			return fmt.Errorf("wait for containerd: %w (last: %w)", ctx.Err(), last)
		}
	}
}

func notReady(s *runtimeapi.RuntimeStatus) error {
	for _, c := range s.GetConditions() {
		if !c.GetStatus() {
			return fmt.Errorf("%s: %s: %s", c.GetType(), c.GetReason(), c.GetMessage())
		}
	}
	return nil
}

func tail(b []byte, n int) []byte {
	if len(b) > n {
		return b[len(b)-n:]
	}
	return b
}

// Pod is a running sandbox.
type Pod struct {
	// ID is the sandbox id, which is CNI_CONTAINERID.
	ID string
	// Name is metadata.name.
	Name string
	// Netns is the path of the sandbox's network namespace.
	Netns string
	// IPs are the addresses that the runtime learned from the CNI result.
	IPs []string
}

// RunPod starts a sandbox with the annotations and returns when its network is
// ready.
func (r *Runtime) RunPod(ctx context.Context, namespace, name string, annotations map[string]string) (Pod, error) {
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Namespace: namespace, Name: name, Uid: namespace + "-" + name},
		Annotations:  annotations,
		LogDirectory: filepath.Join(r.options.Dir, "logs"),
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: r.cgroup,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_POD},
			},
		},
	}
	started, err := r.client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		return Pod{}, fmt.Errorf("run sandbox %s/%s: %w", namespace, name, err)
	}
	id := started.GetPodSandboxId()
	r.pods[id] = config
	status, err := r.client.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		return Pod{}, fmt.Errorf("status of sandbox %s/%s: %w", namespace, name, err)
	}
	pod := Pod{ID: id, Name: name}
	if pod.Netns, err = networkNamespace(status.GetInfo()["info"]); err != nil {
		return Pod{}, fmt.Errorf("status of sandbox %s/%s: %w", namespace, name, err)
	}
	network := status.GetStatus().GetNetwork()
	pod.IPs = append(pod.IPs, network.GetIp())
	for _, ip := range network.GetAdditionalIps() {
		pod.IPs = append(pod.IPs, ip.GetIp())
	}
	return pod, nil
}

// networkNamespace returns the path from containerd's verbose status.
func networkNamespace(info string) (string, error) {
	var verbose struct {
		RuntimeSpec struct {
			Linux struct {
				Namespaces []struct{ Type, Path string }
			}
		}
	}
	if err := json.Unmarshal([]byte(info), &verbose); err != nil {
		return "", err
	}
	for _, ns := range verbose.RuntimeSpec.Linux.Namespaces {
		if ns.Type == "network" {
			return ns.Path, nil
		}
	}
	return "", errors.New("no network namespace in the runtime's verbose status")
}

// RemovePod stops and removes a sandbox. It returns nil if the sandbox does not exist.
func (r *Runtime) RemovePod(ctx context.Context, id string) error {
	if _, err := r.client.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("stop sandbox %s: %w", id, err)
	}
	if _, err := r.client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", id, err)
	}
	delete(r.pods, id)
	return nil
}

// Close removes all sandboxes, ends containerd and removes its leftovers: mounts below Dir and cgroups.
func (r *Runtime) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var errs []error
	for id := range r.pods {
		errs = append(errs, r.RemovePod(ctx, id))
	}
	if r.conn != nil {
		errs = append(errs, r.conn.Close())
	}
	if r.command != nil && r.command.Process != nil {
		_ = r.command.Process.Signal(syscall.SIGTERM)
		select {
		case <-r.exited:
		case <-ctx.Done():
			_ = r.command.Process.Kill()
			<-r.exited
			errs = append(errs, errors.New("containerd did not end on SIGTERM"))
		}
	}
	errs = append(errs, unmountBelow(r.options.Dir), removeCgroups(r.cgroup))
	return errors.Join(errs...)
}

// unmountBelow detaches every mount below dir, the innermost first.
func unmountBelow(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	var errs []error
	for i := len(mounts) - 1; i >= 0; i-- {
		if err := unix.Unmount(mounts[i], unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", mounts[i], err))
		}
	}
	return errors.Join(errs...)
}
