// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/privilege/privilegetest"
)

// hubble returns the pod of a node with the component hubble, and its container.
func hubble(t *testing.T) (corev1.PodSpec, corev1.Container) {
	t.Helper()
	pod := overlay{
		resources: []string{"base"}, components: []string{"hubble"}, settings: map[string]string{"kubernetesAPI": api},
	}.render(t).pod(t)
	i := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == "hubble" })
	if i < 0 {
		t.Fatal("the pod has no container hubble")
	}
	return pod, pod.Containers[i]
}

// TestHubbleIsAComponentWithoutRights: the component adds one container, which has no token, no capability and no
// directory of another service that it can write.
func TestHubbleIsAComponentWithoutRights(t *testing.T) {
	pod, c := hubble(t)
	base := daemonSet(t).Spec.Template.Spec
	if len(pod.Containers) != len(base.Containers)+1 || len(pod.Volumes) != len(base.Volumes)+2 {
		t.Errorf("the component adds to %d containers and %d volumes: now %d and %d",
			len(base.Containers), len(base.Volumes), len(pod.Containers), len(pod.Volumes))
	}
	if s := c.SecurityContext; *s.RunAsUser != int64(instance.HubbleID) || *s.RunAsGroup != int64(instance.GroupID) ||
		s.Capabilities.Add != nil || fmt.Sprint(s.Capabilities.Drop) != "[ALL]" || s.Privileged != nil ||
		*s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem {
		t.Errorf("it has rights: %+v", s)
	}
	for _, m := range c.VolumeMounts {
		of := filepath.Base(m.MountPath)
		if of != "hubble" && (of != "datapath" && of != "identity" && of != "policy" || !m.ReadOnly) {
			t.Errorf("it mounts %+v", m)
		}
	}
	port := c.ReadinessProbe.HTTPGet.Port.IntVal
	if port != int32(instance.HubbleID)-1000 || c.LivenessProbe.HTTPGet.Port.IntVal != port ||
		!slices.Contains(c.Args, fmt.Sprintf("--health-address=127.0.0.1:%d", port)) {
		t.Errorf("the probes ask at port %d, the arguments are %v", port, c.Args)
	}
	args := append(slices.Clone(c.Args), "--print-config")
	cmd := exec.Command(filepath.Join(binDir(), c.Command[0]), args...) //nolint:gosec // of the manifest
	cmd.Env = environment(t, c)
	out, err := cmd.CombinedOutput()
	if have := strings.Count(string(out), "# environment\n"); err != nil || have != len(c.Env) {
		t.Errorf("%v: %d settings come from the environment, want %d:\n%s", err, have, len(c.Env), out)
	}
}

// TestMetricsOfHubbleAreScraped: with the component hubble-monitoring, sluice-hubble serves metrics at the port that
// its container declares and its monitor names. Without the component, it serves none.
func TestMetricsOfHubbleAreScraped(t *testing.T) {
	const port = 64729
	for _, components := range [][]string{{"hubble"}, {"hubble", "hubble-monitoring"}, {
		"hubble", "monitoring", "hubble-monitoring",
	}} {
		all := overlay{
			resources: []string{"base"}, components: components, settings: map[string]string{"kubernetesAPI": api},
		}.render(t)
		pod := all.pod(t)
		i := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == "hubble" })
		c := pod.Containers[i]
		want := "off"
		if len(components) > 1 {
			want = fmt.Sprintf("[127.0.0.1]:%d", port)
			monitor := get[monitoringv1.PodMonitor](t, all, "PodMonitor/sluice-hubble")
			ends := monitor.Spec.PodMetricsEndpoints
			if len(c.Ports) != 1 || c.Ports[0].ContainerPort != port || len(ends) != 1 || *ends[0].Port != c.Ports[0].Name ||
				monitor.Spec.Selector.MatchLabels["app.kubernetes.io/name"] != "sluice" {
				t.Errorf("%v: the container has the ports %+v, the monitor is %+v", components, c.Ports, monitor.Spec)
			}
		}
		configuration := all.configuration(t, "hubble")
		found := listening.FindStringSubmatch(configuration)
		if found == nil || strings.Trim(found[1], `'"`) != want {
			t.Errorf("%v: metrics on %q, want %s:\n%s", components, found, want, configuration)
		}
	}
}

// TestRelayConnectsToEveryNode: the component names the files of the Secrets, the names in the certificates and the
// ports in the same way at both ends. Without an image, kustomize fails and names the missing object.
func TestRelayConnectsToEveryNode(t *testing.T) {
	o := overlay{
		resources: []string{"base"}, components: []string{"hubble", "hubble-relay"},
		settings: map[string]string{"kubernetesAPI": api}, relayImage: relayImage,
	}
	all := o.render(t)
	relay := get[appsv1.Deployment](t, all, "Deployment/hubble-relay").Spec.Template
	c := relay.Spec.Containers[0]
	if c.Image != o.relayImage {
		t.Errorf("the image is %q", c.Image)
	}
	if s := c.SecurityContext; s.Capabilities.Add != nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem ||
		!*relay.Spec.SecurityContext.RunAsNonRoot || *relay.Spec.AutomountServiceAccountToken || relay.Spec.HostNetwork {
		t.Errorf("it has rights: %+v, %+v", s, relay.Spec)
	}
	peers := get[corev1.Service](t, all, "Service/hubble-peer").Spec
	const peer, port = "hubble-peer.sluice-system.svc", 4244
	if peers.Ports[0].Port != port || peers.Ports[0].TargetPort.IntVal != port ||
		peers.Selector["app.kubernetes.io/name"] != "sluice" ||
		!slices.Contains(c.Args, fmt.Sprintf("--peer-service=%s:%d", peer, port)) {
		t.Errorf("the peers are %+v, the arguments %v", peers, c.Args)
	}
	clients := get[corev1.Service](t, all, "Service/hubble-relay").Spec
	const name = "app.kubernetes.io/name"
	if clients.Ports[0].TargetPort.StrVal != c.Ports[0].Name || relay.Labels[name] != clients.Selector[name] ||
		!slices.Contains(c.Args, fmt.Sprintf("--listen-address=:%d", c.Ports[0].ContainerPort)) {
		t.Errorf("clients get %+v, the arguments are %v", clients, c.Args)
	}
	for _, a := range c.Args {
		if _, file, ok := strings.Cut(a, "=/"); ok && filepath.Dir("/"+file) != c.VolumeMounts[0].MountPath {
			t.Errorf("%s is not in %s", a, c.VolumeMounts[0].MountPath)
		}
	}
	configuration := all.configuration(t, "hubble")
	for _, want := range []string{
		"address: '[127.0.0.1]:4244'", "serverName: " + peer, "cert: /etc/sluice/hubble/tls.crt",
		"clientCA: /etc/sluice/hubble/ca.crt",
	} {
		if !strings.Contains(strings.ReplaceAll(configuration, `"`, ""), want) {
			t.Errorf("sluice-hubble has no setting %q:\n%s", want, configuration)
		}
	}
	o.relayImage = ""
	if _, err := tryRender(t, o.write(t)); err == nil || !strings.Contains(err.Error(), "hubble-relay") ||
		!strings.Contains(err.Error(), "ConfigMap") {
		t.Errorf("without an image: %v", err)
	}
}

// TestKernelHubbleRunsInItsContainer: sluice-hubble runs with the mounts, the user and the seccomp profile of the
// manifest. It is ready without the datapath, because stored flows can be read then, too.
func TestKernelHubbleRunsInItsContainer(t *testing.T) {
	m := newMachine(t)
	pod, c := hubble(t)
	m.install(pod)
	run := m.start(pod, c)
	run.ready()
	for _, have := range privilegetest.Threads(t, run.pid) {
		for key, value := range map[string]string{
			"Uid": "65709\t65709\t65709\t65709", "Gid": "65700\t65700\t65700\t65700",
			"CapPrm": "0000000000000000", "CapBnd": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2",
		} {
			if have[key] != value {
				t.Errorf("thread %s: %s is %q, want %q", have["Pid"], key, have[key], value)
			}
		}
	}
}
