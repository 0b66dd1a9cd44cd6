// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/privilege/privilegetest"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func isDatapath(c corev1.Container) bool { return c.Name == "datapath" }

// install runs the pod's init container.
func (m *machine) install(of corev1.PodSpec) {
	m.t.Helper()
	if code, log := m.run(of, of.InitContainers[0]); code != 0 {
		m.t.Fatalf("the init container ended with %d:\n%s", code, log)
	}
}

// TestKernelManifestsConnectPods runs the containers of the manifests with runc, with the rights, file systems,
// mounts and default seccomp profile of a Kubernetes runtime, and connects pods.
func TestKernelManifestsConnectPods(t *testing.T) {
	m := newMachine(t)
	etcd, of := etcd(t).Spec.Template.Spec, daemonSet(t).Spec.Template.Spec
	m.start(etcd, etcd.Containers[0])
	m.install(of)
	if _, err := os.Stat(m.path("/etc/cni/net.d/05-sluice.conflist")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the configuration is there before any service: %v", err)
	}
	containers := map[string]*container{}
	for _, c := range of.Containers {
		containers[c.Name] = m.start(of, c)
	}
	for _, c := range containers {
		c.ready()
	}
	var tun, mounted unix.Stat_t
	inside := fmt.Sprintf("/proc/%d/root/dev/net/tun", containers["datapath"].pid)
	if err := errors.Join(unix.Stat(m.path("/dev/net/tun"), &tun), unix.Stat(inside, &mounted)); err != nil ||
		mounted.Ino != tun.Ino || mounted.Dev != tun.Dev || mounted.Rdev != tun.Rdev {
		t.Errorf("the datapath has %+v at /dev/net/tun, the machine %+v (%v)", mounted, tun, err)
	}
	const none = "0000000000000000"
	for name, want := range map[string]struct{ uid, capabilities, bounding string }{
		"identity": {"65701", none, none}, "ipam": {"65702", none, none}, "policy": {"65703", none, none},
		"loadbalancer": {"65704", none, none}, "dns": {"65710", none, none},
		"datapath": {"65706", "000000c000201000", "000000c0002010c0"}, "cni": {"0", none, none},
	} {
		for _, have := range privilegetest.Threads(t, containers[name].pid) {
			for key, value := range map[string]string{
				"Uid":    strings.Join([]string{want.uid, want.uid, want.uid, want.uid}, "\t"),
				"Gid":    "65700\t65700\t65700\t65700",
				"CapPrm": want.capabilities, "CapEff": want.capabilities, "CapBnd": want.bounding,
				"CapInh": none, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2",
			} {
				if have[key] != value {
					t.Errorf("%s, thread %s: %s is %q, want %q", name, have["Pid"], key, have[key], value)
				}
			}
		}
	}

	// Runtimes use either path of a namespace.
	pods := []pod.Pod{m.pod("web"), m.pod("client")}
	add := func(i int, netns string) {
		t.Helper()
		result, err := m.plugin("ADD", pods[i], netns)
		if err != nil {
			t.Fatalf("ADD %s: %v", netns, err)
		}
		addresses, err := cni.Addresses(result)
		if err != nil || len(addresses) != 2 {
			t.Fatalf("ADD %s: %v, %v", netns, addresses, err)
		}
		pods[i] = pods[i].WithAddresses(addresses)
	}
	exchange := func(when string) {
		t.Helper()
		for _, address := range pods[0].Addresses() {
			if err := pod.ExchangeTCP(servicetest.Context(t), pods[1], pods[0], address, []byte("hello")); err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
	}
	add(0, "/run/netns/web")
	add(1, "/var/run/netns/client")
	exchange("when they are connected")

	// A replaced container finds its pins on the machine.
	containers["datapath"].remove()
	exchange("while the datapath is unavailable")
	m.start(of, of.Containers[slices.IndexFunc(of.Containers, isDatapath)]).ready()
	exchange("with the next datapath")
	for i, p := range pods {
		if _, err := m.plugin("DEL", p, fmt.Sprintf("/run/netns/%s", p.Name)); err != nil {
			t.Errorf("DEL %d: %v", i, err)
		}
	}
	servicetest.EventuallyNil(t, "no record is left", func() error {
		entries, err := os.ReadDir(m.path("/var/lib/sluice/datapath/endpoints"))
		if i := slices.IndexFunc(entries, func(e os.DirEntry) bool { return strings.HasSuffix(e.Name(), ".json") }); i >= 0 {
			err = errors.New(entries[i].Name())
		}
		return err
	})
}

// TestKernelMonitoringIsAnswered requests the metrics of each service, with the component monitoring and the rights
// of the containers.
func TestKernelMonitoringIsAnswered(t *testing.T) {
	m := newMachine(t)
	etcd, of := etcd(t).Spec.Template.Spec, monitored(t).pod(t)
	m.start(etcd, etcd.Containers[0])
	m.install(of)
	for _, c := range of.Containers {
		port, ok := metricsPorts[c.Name]
		if !ok {
			continue
		}
		m.start(of, c).ready()
		body, err := m.get(port, "/metrics")
		if want := "\nsluice_" + c.Name + "_build_info{"; err != nil || !strings.Contains(string(body), want) {
			t.Errorf("%s: %v, no %q in %d bytes of metrics", c.Name, err, want, len(body))
		}
		// Profiles would expose the memory of the process.
		if _, err := m.get(port, "/debug/pprof/"); err == nil {
			t.Errorf("%s shows profiles to everyone", c.Name)
		}
	}
}

// TestKernelContainerWithoutAMountEndsByItsName: a container without a required mount exits with an error that contains
// the mount. Without this check, the datapath would start, and fail only with the first pod.
func TestKernelContainerWithoutAMountEndsByItsName(t *testing.T) {
	m := newMachine(t)
	of := daemonSet(t).Spec.Template.Spec
	m.install(of)
	for volume, c := range map[string]struct {
		change func(*corev1.VolumeMount) (keep bool)
		want   string
	}{
		"proc-sys-net": {func(*corev1.VolumeMount) bool { return false }, "mount the machine's /proc/sys/net"},
		"netns":        {func(v *corev1.VolumeMount) bool { v.MountPropagation = nil; return true }, "HostToContainer"},
		"run": {func(v *corev1.VolumeMount) bool {
			v.MountPath = "/elsewhere"
			return true
		}, "mount -t bpf"},
	} {
		datapath := of.Containers[slices.IndexFunc(of.Containers, isDatapath)]
		var mounts []corev1.VolumeMount
		for _, v := range datapath.VolumeMounts {
			if v.Name != volume || c.change(&v) {
				mounts = append(mounts, v)
			}
		}
		datapath.VolumeMounts = mounts
		if code, log := m.run(of, datapath); code != process.ExitUsage || !strings.Contains(log, c.want) {
			t.Errorf("with another mount of %s it ends with %d, want %d, and %q in\n%s", volume, code,
				process.ExitUsage, c.want, log)
		}
	}
	// Without propagation, the bpffs would be unmounted with the init container.
	install := of.InitContainers[0]
	install.VolumeMounts = slices.Clone(install.VolumeMounts)
	install.VolumeMounts[0].MountPropagation = nil
	if code, log := m.run(of, install); code == 0 || !strings.Contains(log, "Bidirectional") {
		t.Errorf("the init container without propagation ended with %d:\n%s", code, log)
	}
}
