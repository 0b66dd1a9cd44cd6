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

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/sluice-net/sluice/kit/instance"
)

func withStore(t *testing.T) objects {
	t.Helper()
	return overlay{resources: []string{"base"}, settings: map[string]string{"kubernetesAPI": api}}.render(t)
}

// TestStoreHasNoRightsOnTheNode: the store runs as its own user, without capabilities and without directories of the
// machine. Its account may write one Lease and one ConfigMap, and ask about tokens. Its settings are accepted.
func TestStoreHasNoRightsOnTheNode(t *testing.T) {
	all := withStore(t)
	pod := get[appsv1.Deployment](t, all, "Deployment/sluice-store").Spec.Template.Spec
	c := pod.Containers[0]
	if s := c.SecurityContext; *s.RunAsUser != int64(instance.StoreID) || *s.RunAsGroup != int64(instance.GroupID) ||
		s.Capabilities.Add != nil || fmt.Sprint(s.Capabilities.Drop) != "[ALL]" || s.Privileged != nil ||
		*s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem {
		t.Errorf("it has rights: %+v", s)
	}
	if !pod.HostNetwork || *pod.AutomountServiceAccountToken || pod.ServiceAccountName != "sluice-store" {
		t.Errorf("the pod: %+v", pod)
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			t.Errorf("it mounts %s of the machine", v.HostPath.Path)
		}
	}
	port := c.ReadinessProbe.HTTPGet.Port.IntVal
	if port != int32(instance.StoreID)-1000 || c.LivenessProbe.HTTPGet.Port.IntVal != port ||
		!slices.Contains(c.Args, fmt.Sprintf("--health-address=127.0.0.1:%d", port)) {
		t.Errorf("the probes ask at port %d, the arguments are %v", port, c.Args)
	}
	args := append(slices.Clone(c.Args), "--print-config")
	cmd := exec.Command(filepath.Join(binDir(), c.Command[0]), args...) //nolint:gosec // of the manifest
	cmd.Env = environmentOf(t, all.settings(t), c)
	out, err := cmd.CombinedOutput()
	if have := strings.Count(string(out), "# environment\n"); err != nil || have != len(c.Env) {
		t.Errorf("%v: %d settings come from the environment, want %d:\n%s", err, have, len(c.Env), out)
	}

	rules := fmt.Sprint(get[rbacv1.Role](t, all, "Role/sluice-store").Rules,
		get[rbacv1.ClusterRole](t, all, "ClusterRole/sluice-store").Rules)
	// It lists pods, to learn on which nodes sluice-status runs.
	for _, word := range []string{"*", "secrets", "pods", "watch", "delete", "patch"} {
		if strings.Contains(strings.Replace(rules, "{[list] [] [pods] [] []}", "", 1), word) {
			t.Errorf("the rights of the store contain %s: %s", word, rules)
		}
	}
}

// TestStoreChangesOnlyIdentityOfTheNodes: the token by which a node enrols is for no other audience, and in no other
// container.
func TestStoreChangesOnlyIdentityOfTheNodes(t *testing.T) {
	all := withStore(t)
	config := all.configuration(t, "identity")
	for _, want := range []string{"/var/lib/sluice/identity", "/var/run/secrets/sluice-store/token"} {
		if !strings.Contains(config, want) {
			t.Errorf("the settings of identity lack %s:\n%s", want, config)
		}
	}
	pod := all.pod(t)
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "store-token" })
	if i < 0 || len(pod.Volumes[i].Projected.Sources) != 1 ||
		pod.Volumes[i].Projected.Sources[0].ServiceAccountToken.Audience != "sluice-store" {
		t.Fatalf("the volumes: %+v", pod.Volumes)
	}
	for _, c := range pod.Containers {
		mounts := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "store-token" })
		if mounts != (c.Name == "identity") {
			t.Errorf("%s mounts the token: %t", c.Name, mounts)
		}
	}
}

// TestClustersKeepAnotherEtcd: with etcdEndpoints the nodes do not use the store, also without the component
// etcd-external, which clusters of earlier versions lack. With it, the manifests have no object of the store.
func TestClustersKeepAnotherEtcd(t *testing.T) {
	for _, components := range [][]string{nil, {"etcd-external"}, {"etcd-tls"}, {"etcd-external", "etcd-tls"}} {
		endpoint := "http://192.0.2.1:2379"
		if slices.Contains(components, "etcd-tls") {
			endpoint = "https://192.0.2.1:2379"
		}
		all := overlay{
			resources: []string{"base"}, components: components,
			settings: map[string]string{"kubernetesAPI": api, "etcdEndpoints": endpoint},
		}.render(t)
		if config := all.configuration(t, "identity"); !strings.Contains(config, endpoint) {
			t.Errorf("%v: identity has the settings\n%s", components, config)
		}
		for name := range all {
			if strings.Contains(name, "store") && slices.Contains(components, "etcd-external") {
				t.Errorf("%v: there is %s", components, name)
			}
		}
		token := slices.ContainsFunc(all.pod(t).Volumes, func(v corev1.Volume) bool { return v.Name == "store-token" })
		if token == slices.Contains(components, "etcd-external") {
			t.Errorf("%v: the pod has a token for the store: %t", components, token)
		}
	}
}
