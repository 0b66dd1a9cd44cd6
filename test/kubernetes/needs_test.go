// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

func uninstaller(t *testing.T) *appsv1.DaemonSet {
	t.Helper()
	return get[appsv1.DaemonSet](t, render(t, filepath.Join(deploy, "uninstall")), "DaemonSet/sluice-uninstall")
}

// pods returns the pod of each manifest.
func pods(t *testing.T) map[string]corev1.PodSpec {
	t.Helper()
	return map[string]corev1.PodSpec{
		"sluice": daemonSet(t).Spec.Template.Spec, "status": controller(t).Spec.Template.Spec,
		"etcd-dev": etcd(t).Spec.Template.Spec, "uninstall": uninstaller(t).Spec.Template.Spec,
		"store": decode[appsv1.Deployment](t, "base/store-deployment.yaml").Spec.Template.Spec,
	}
}

// mountsOf returns the mounts of a container as lines: path, source if it differs, "ro" if read-only, and
// propagation.
func mountsOf(t *testing.T, pod corev1.PodSpec, c corev1.Container) (all []string) {
	t.Helper()
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name })
		if i < 0 {
			t.Errorf("%s: no volume %s", c.Name, m.Name)
			continue
		}
		text := m.MountPath
		switch v := pod.Volumes[i]; {
		case v.HostPath != nil && v.HostPath.Path != m.MountPath:
			text += " of " + v.HostPath.Path
		case v.HostPath != nil:
		case v.EmptyDir != nil:
			text += " of the pod"
		case v.Projected != nil:
			text += " with"
			for _, s := range v.Projected.Sources {
				if s.ServiceAccountToken != nil {
					text += " token"
				} else if s.ConfigMap != nil {
					text += " " + s.ConfigMap.Name
				}
			}
		}
		if m.ReadOnly {
			text += " ro"
		}
		if m.MountPropagation != nil {
			text += " " + string(*m.MountPropagation)
		}
		if m.SubPath != "" || m.SubPathExpr != "" {
			text += " in part"
		}
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}

// TestContainersHaveTheMountsThatTheyNeed checks the mounts and their propagation. Without HostToContainer on
// /run/netns, a container does not see the namespaces of later pods. Without Bidirectional on /run/sluice, the bpffs is
// unmounted with the container that mounted it.
func TestContainersHaveTheMountsThatTheyNeed(t *testing.T) {
	const (
		api      = "/var/run/secrets/kubernetes.io/serviceaccount with token kube-root-ca.crt ro"
		identity = "/run/sluice/identity ro"
	)
	machine := []string{"/etc/cni/net.d", "/opt/cni/bin", "/run Bidirectional", "/var/lib", "/var/log"}
	want := map[string][]string{
		"sluice/install": {"/dev/net", "/opt/cni/bin", "/run/sluice Bidirectional", "/var/lib/sluice"},
		"sluice/identity": {
			"/run/sluice/identity", "/var/lib/sluice/identity", api, "/var/run/secrets/sluice-store with token ro",
		},
		"sluice/ipam":   {identity, "/run/sluice/ipam", "/var/lib/sluice/ipam", api},
		"sluice/policy": {identity, "/run/sluice/policy", "/var/lib/sluice ro", "/var/lib/sluice/policy", api},
		"sluice/loadbalancer": {
			"/run/sluice/datapath ro", identity, "/run/sluice/loadbalancer", "/var/lib/sluice/loadbalancer", api,
		},
		"sluice/datapath": {
			"/dev/net ro", "/host/proc/sys/net of /proc/sys/net", "/host/sys/fs/cgroup of /sys/fs/cgroup ro",
			"/run/netns ro HostToContainer", "/run/sluice HostToContainer", "/var/lib/sluice/cni", "/var/lib/sluice/datapath",
		},
		"sluice/dns": {
			"/run/sluice/datapath ro", "/run/sluice/dns", identity, "/run/sluice/policy ro", "/var/lib/sluice/dns",
		},
		"sluice/cni":          {"/etc/cni/net.d", "/opt/cni/bin ro", "/run/sluice ro"},
		"status/status":       {identity, "/var/lib/sluice/status of the pod", api},
		"store/store":         {"/run/sluice of the pod", "/var/lib/sluice of the pod", api},
		"etcd-dev/etcd":       {"/var/lib/sluice-etcd"},
		"uninstall/uninstall": machine, "uninstall/done": machine,
	}
	for name, pod := range pods(t) {
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			of := name + "/" + c.Name
			if got := mountsOf(t, pod, c); !slices.Equal(got, want[of]) {
				t.Errorf("%s mounts\n%s\nand needs\n%s", of, strings.Join(got, "\n"), strings.Join(want[of], "\n"))
			}
			delete(want, of)
		}
	}
	for of := range want {
		t.Errorf("there is no container %s", of)
	}
}

// tolerates reports whether a pod may be scheduled to a node with a taint and stay there. A toleration with a time
// limit does not count.
func tolerates(pod corev1.PodSpec, key string, effect corev1.TaintEffect) bool {
	return slices.ContainsFunc(pod.Tolerations, func(x corev1.Toleration) bool {
		return (x.Key == "" || x.Key == key) && (x.Effect == "" || x.Effect == effect) &&
			x.Operator == corev1.TolerationOpExists && x.TolerationSeconds == nil
	})
}

// TestPodsTolerateTheTaintsThatTheyHaveTo: DaemonSets tolerate every taint. Other pods only tolerate a node without a
// network, so that draining a node removes them.
func TestPodsTolerateTheTaintsThatTheyHaveTo(t *testing.T) {
	const noSchedule, noExecute = corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute
	for _, c := range []struct {
		key    string
		effect corev1.TaintEffect
		by     string
	}{
		{"node-role.kubernetes.io/control-plane", noSchedule, "etcd-dev sluice status store uninstall"},
		{"node.kubernetes.io/not-ready", noSchedule, "etcd-dev sluice status store uninstall"},
		{"node.kubernetes.io/not-ready", noExecute, "etcd-dev sluice store uninstall"},
		{"node.kubernetes.io/network-unavailable", noSchedule, "etcd-dev sluice status store uninstall"},
		{"node.sluice.io/not-ready", noSchedule, "etcd-dev sluice status store uninstall"},
		{"node.sluice.io/not-ready", noExecute, "etcd-dev sluice status store uninstall"},
		{"CriticalAddonsOnly", noSchedule, "etcd-dev sluice status store uninstall"},
		{"node.kubernetes.io/unschedulable", noSchedule, "sluice uninstall"},
		{"node.kubernetes.io/unreachable", noExecute, "sluice uninstall"},
		{"node.kubernetes.io/out-of-service", noExecute, "sluice uninstall"},
		{"node.kubernetes.io/disk-pressure", noSchedule, "sluice uninstall"},
		{"ToBeDeletedByClusterAutoscaler", noSchedule, "sluice uninstall"},
		{"example.com/reserved", noSchedule, "sluice uninstall"},
		{"example.com/reserved", noExecute, "sluice uninstall"},
	} {
		var by []string
		for name, pod := range pods(t) {
			if tolerates(pod, c.key, c.effect) {
				by = append(by, name)
			}
		}
		slices.Sort(by)
		if got := strings.Join(by, " "); got != c.by {
			t.Errorf("the taint %s:%s is tolerated by %q, want %q", c.key, c.effect, got, c.by)
		}
	}
}

// TestPodsAreReplacedAsTheyHaveTo: pods are replaced on one node at a time, and two etcd members never use one
// directory.
func TestPodsAreReplacedAsTheyHaveTo(t *testing.T) {
	update := daemonSet(t).Spec.UpdateStrategy
	if update.Type != appsv1.RollingUpdateDaemonSetStrategyType ||
		update.RollingUpdate.MaxUnavailable.String() != "1" || update.RollingUpdate.MaxSurge != nil {
		t.Errorf("the DaemonSet is updated by %+v", update)
	}
	if got := etcd(t).Spec.Strategy.Type; got != appsv1.RecreateDeploymentStrategyType {
		t.Errorf("etcd-dev is updated by %s", got)
	}
	for name, class := range map[string]string{
		"sluice": "system-node-critical", "etcd-dev": "system-node-critical",
		"uninstall": "system-node-critical", "status": "system-cluster-critical", "store": "system-cluster-critical",
	} {
		pod := pods(t)[name]
		if pod.PriorityClassName != class || !pod.HostNetwork || pod.DNSPolicy != corev1.DNSDefault {
			t.Errorf("%s: priority %q, network of the machine %t, DNS %q",
				name, pod.PriorityClassName, pod.HostNetwork, pod.DNSPolicy)
		}
	}
	done := uninstaller(t).Spec.Template.Spec.Containers[0]
	if p := done.ReadinessProbe; p == nil || p.HTTPGet == nil || p.HTTPGet.Host != "127.0.0.1" ||
		p.HTTPGet.Path != "/readyz" ||
		!slices.Contains(done.Command, fmt.Sprintf("--health-address=127.0.0.1:%d", p.HTTPGet.Port.IntVal)) ||
		!slices.Contains(done.Command, "--stay") {
		t.Errorf("the pod that uninstalls is Ready before it has looked again: %+v", done)
	}
}

// rules returns the rules of a role as lines: group/resource, verbs, and names if there are any.
func rules(all []rbacv1.PolicyRule) (lines []string) {
	for _, r := range all {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				line := group + "/" + resource + ": " + strings.Join(r.Verbs, " ")
				if len(r.ResourceNames) > 0 {
					line += " of " + strings.Join(r.ResourceNames, " ")
				}
				lines = append(lines, line)
			}
		}
		for _, url := range r.NonResourceURLs {
			lines = append(lines, url+": "+strings.Join(r.Verbs, " "))
		}
	}
	slices.Sort(lines)
	return lines
}

// TestRolesHaveTheRightsThatAreUsed: roles have exactly the rights that the programs use.
func TestRolesHaveTheRightsThatAreUsed(t *testing.T) {
	policies := []string{
		"cilium.io/ciliumcidrgroups: list watch", "cilium.io/ciliumclusterwidenetworkpolicies: list watch",
		"cilium.io/ciliumnetworkpolicies: list watch", "networking.k8s.io/networkpolicies: list watch",
		"policy.networking.k8s.io/adminnetworkpolicies: list watch",
		"policy.networking.k8s.io/baselineadminnetworkpolicies: list watch",
		"policy.networking.k8s.io/clusternetworkpolicies: list watch",
	}
	statuses := []string{
		"cilium.io/ciliumcidrgroups/status: patch", "cilium.io/ciliumclusterwidenetworkpolicies/status: patch",
		"cilium.io/ciliumnetworkpolicies/status: patch", "policy.networking.k8s.io/adminnetworkpolicies/status: patch",
		"policy.networking.k8s.io/baselineadminnetworkpolicies/status: patch",
		"policy.networking.k8s.io/clusternetworkpolicies/status: patch",
	}
	for file, want := range map[string][]string{
		"clusterrole": append(slices.Clone(policies),
			"/pods: list watch", "/namespaces: list watch", "/services: list watch",
			"discovery.k8s.io/endpointslices: list watch", "/nodes: get list watch patch", "/nodes/status: patch"),
		"status-clusterrole": append(slices.Concat(policies, statuses),
			"/nodes: list watch", "/namespaces: list watch", "/services: get list watch", "/services/status: patch",
			"cilium.io/ciliumloadbalancerippools: list watch", "cilium.io/ciliumloadbalancerippools/status: patch",
			"discovery.k8s.io/endpointslices: list watch of kubernetes", "events.k8s.io/events: create"),
		"status-role": {
			"coordination.k8s.io/leases: create", "coordination.k8s.io/leases: get update of sluice-status",
		},
	} {
		got := rules(decode[rbacv1.ClusterRole](t, "base/"+file+".yaml").Rules)
		slices.Sort(want)
		for _, line := range got {
			if !slices.Contains(want, line) {
				t.Errorf("%s has a right that is not used: %s", file, line)
			}
		}
		for _, line := range want {
			if !slices.Contains(got, line) {
				t.Errorf("%s lacks a right that is used: %s", file, line)
			}
		}
	}
}

// tracked opens every file of a directory in this module, so that the go command runs a test again when a file has
// changed. Kustomize opens the files by the link's target instead.
func tracked(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.IsDir() {
			tracked(t, path)
		} else if _, err := os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
}
