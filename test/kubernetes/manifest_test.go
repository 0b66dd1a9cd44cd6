// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes checks the manifests of deploy/kubernetes against the API's types and the programs, and runs the
// containers that they describe.
package kubernetes

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

// deploy is a symbolic link in this module to the manifests: the go command does not detect changes of files outside
// of the module, and would reuse cached test results.
var deploy = filepath.Join("deploy", "kubernetes")

// binDir returns the directory of the programs.
func binDir() string {
	if dir := os.Getenv("SLUICE_BIN"); dir != "" {
		return dir
	}
	return filepath.Join("..", "..", "bin")
}

func decode[T any](t *testing.T, file string) *T {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(deploy, file))
	if err != nil {
		t.Fatal(err)
	}
	v := new(T)
	if err := yaml.UnmarshalStrict(content, v); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return v
}

func daemonSet(t *testing.T) *appsv1.DaemonSet {
	t.Helper()
	return decode[appsv1.DaemonSet](t, "base/daemonset.yaml")
}

func etcd(t *testing.T) *appsv1.Deployment {
	t.Helper()
	return decode[appsv1.Deployment](t, "etcd-dev/etcd.yaml")
}

func controller(t *testing.T) *appsv1.Deployment {
	t.Helper()
	return decode[appsv1.Deployment](t, "base/status-deployment.yaml")
}

// environment returns the environment of a container of the base.
func environment(t *testing.T, c corev1.Container) []string {
	t.Helper()
	settings := decode[corev1.ConfigMap](t, "base/settings.yaml").Data
	// An overlay sets it; without a value there is no cluster.
	if _, ok := settings["kubernetesAPI"]; ok {
		t.Error("the settings of the base have kubernetesAPI, which is an overlay's")
	}
	settings["kubernetesAPI"] = ""
	return environmentOf(t, settings, c)
}

// environmentOf returns the environment of a container, as kubelet computes it.
func environmentOf(t *testing.T, settings map[string]string, c corev1.Container) (env []string) {
	t.Helper()
	for _, e := range c.Env {
		value := e.Value
		switch from := e.ValueFrom; {
		case from == nil:
		case from.ConfigMapKeyRef != nil && from.ConfigMapKeyRef.Name == "sluice":
			var ok bool
			if value, ok = settings[from.ConfigMapKeyRef.Key]; !ok {
				t.Errorf("%s: %s: the settings lack %q", c.Name, e.Name, from.ConfigMapKeyRef.Key)
			}
		case from.FieldRef != nil && from.FieldRef.FieldPath == "spec.nodeName":
			value = "node-1"
		case from.FieldRef != nil && from.FieldRef.FieldPath == "status.hostIP":
			value = "127.0.0.1"
		case from.FieldRef != nil && from.FieldRef.FieldPath == "metadata.namespace":
			value = "sluice-system"
		default:
			t.Fatalf("%s: %s: a source that the test does not know", c.Name, e.Name)
		}
		// A variable can refer only to earlier ones.
		for _, before := range env {
			name, of, _ := strings.Cut(before, "=")
			value = strings.ReplaceAll(value, "$("+name+")", of)
		}
		env = append(env, e.Name+"="+value)
	}
	return append(env, "PATH=/usr/bin") // of the image
}

func TestEveryFileIsInOneKustomizationAndOfTheAPI(t *testing.T) {
	decode[corev1.Namespace](t, "base/namespace.yaml")
	if a := decode[corev1.ServiceAccount](t, "base/serviceaccount.yaml"); *a.AutomountServiceAccountToken {
		t.Error("the service account gives its token to every container")
	}
	role, binding := decode[rbacv1.ClusterRole](t, "base/clusterrole.yaml"),
		decode[rbacv1.ClusterRoleBinding](t, "base/clusterrolebinding.yaml")
	if binding.RoleRef.Name != role.Name || len(binding.Subjects) != 1 || binding.Subjects[0].Name != "sluice" {
		t.Errorf("the binding does not give the role %s to the account: %+v", role.Name, binding)
	}
	controllerRights(t)
	settings := decode[corev1.ConfigMap](t, "base/settings.yaml")
	policy := decode[admissionv1.ValidatingAdmissionPolicy](t, "base/node-restriction.yaml")
	limits := decode[admissionv1.ValidatingAdmissionPolicyBinding](t, "base/node-restriction-binding.yaml")
	if limits.Spec.PolicyName != policy.Name || !slices.Equal(limits.Spec.ValidationActions,
		[]admissionv1.ValidationAction{admissionv1.Deny}) {
		t.Errorf("the binding does not enable %s: %+v", policy.Name, limits)
	}
	for _, dir := range rendered {
		type kustomization struct {
			APIVersion string   `json:"apiVersion"`
			Kind       string   `json:"kind"`
			Namespace  string   `json:"namespace"`
			Resources  []string `json:"resources"`
			Components []string `json:"components"`
			Images     []struct {
				Name    string `json:"name"`
				NewName string `json:"newName"`
				NewTag  string `json:"newTag"`
			} `json:"images"`
			Patches []struct {
				Patch string `json:"patch"`
			} `json:"patches"`
		}
		k := decode[kustomization](t, filepath.Join(dir, "kustomization.yaml"))
		for _, p := range k.Patches {
			var of corev1.ConfigMap
			if err := yaml.UnmarshalStrict([]byte(p.Patch), &of); err != nil || of.Name != settings.Name {
				t.Errorf("%s: a patch of something else than the settings: %v\n%s", dir, err, p.Patch)
			}
			for key := range of.Data {
				if _, ok := settings.Data[key]; !ok {
					t.Errorf("%s: a patch sets %q, which is no setting", dir, key)
				}
			}
		}
		named := slices.DeleteFunc(k.Resources, func(r string) bool { return strings.HasPrefix(r, "../") })
		named = append(named, "kustomization.yaml")
		var there []string
		files, err := os.ReadDir(filepath.Join(deploy, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			there = append(there, f.Name())
			var object struct {
				Metadata struct {
					Name, Namespace string
				} `json:"metadata"`
				Kind string `json:"kind"`
			}
			content, err := os.ReadFile(filepath.Join(deploy, dir, f.Name()))
			if err != nil || yaml.Unmarshal(content, &object) != nil {
				t.Fatal(f.Name(), err)
			}
			want := "sluice-system"
			switch object.Kind {
			case "Namespace", "Kustomization", "ClusterRole", "ClusterRoleBinding", "FlowSchema",
				"PriorityLevelConfiguration", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding":
				want = ""
			}
			if object.Metadata.Namespace != want {
				t.Errorf("%s is in the namespace %q, want %q", f.Name(), object.Metadata.Namespace, want)
			}
		}
		slices.Sort(named)
		if !slices.Equal(named, there) {
			t.Errorf("%s: the kustomization names %v, the directory has %v", dir, named, there)
		}
	}
}

// controllerRights requires that both roles are bound to the account of sluice-controller only.
// TestRolesHaveTheRightsThatAreUsed checks their rules.
func controllerRights(t *testing.T) {
	t.Helper()
	if a := decode[corev1.ServiceAccount](t, "base/status-serviceaccount.yaml"); *a.AutomountServiceAccountToken {
		t.Error("the account of sluice-controller gives its token to every container")
	}
	cluster := decode[rbacv1.ClusterRole](t, "base/status-clusterrole.yaml")
	own := decode[rbacv1.Role](t, "base/status-role.yaml")
	clusterwide := decode[rbacv1.ClusterRoleBinding](t, "base/status-clusterrolebinding.yaml")
	local := decode[rbacv1.RoleBinding](t, "base/status-rolebinding.yaml")
	if clusterwide.RoleRef.Name != cluster.Name || local.RoleRef.Name != own.Name || local.RoleRef.Kind != "Role" {
		t.Errorf("the bindings are of %s and %s, want %s and %s",
			clusterwide.RoleRef.Name, local.RoleRef.Name, cluster.Name, own.Name)
	}
	for _, subjects := range [][]rbacv1.Subject{clusterwide.Subjects, local.Subjects} {
		if len(subjects) != 1 || subjects[0].Name != "sluice-status" || subjects[0].Namespace != "sluice-system" {
			t.Errorf("the rights are given to %+v", subjects)
		}
	}
}

// TestControllerHasNothingOfItsNode: the controller has no state, capability or port on the node, so two controllers
// can run on one node.
func TestControllerHasNothingOfItsNode(t *testing.T) {
	d := controller(t)
	pod := d.Spec.Template.Spec
	if *d.Spec.Replicas != 2 || len(pod.InitContainers) != 0 || len(pod.Containers) != 1 || !pod.HostNetwork ||
		pod.HostPID || pod.HostIPC || *pod.AutomountServiceAccountToken ||
		pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault ||
		pod.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		t.Errorf("the pod is %+v", pod)
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil && v.HostPath.Path != "/run/sluice/identity" {
			t.Errorf("the volume %s is of the machine", v.Name)
		}
	}
	c := pod.Containers[0]
	if s := c.SecurityContext; *s.RunAsUser != int64(instance.ControllerID) || *s.RunAsGroup != int64(instance.GroupID) ||
		s.Capabilities.Add != nil || fmt.Sprint(s.Capabilities.Drop) != "[ALL]" || s.Privileged != nil ||
		*s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem {
		t.Errorf("it has rights: %+v", s)
	}
	if len(c.Ports) > 0 || !slices.Contains(c.Args, "--health-address=off") ||
		!slices.Contains(c.Env, corev1.EnvVar{Name: "SLUICE_CONTROLLER_METRICS_ADDRESS", Value: "off"}) {
		t.Errorf("it listens: %v, %v, %v", c.Ports, c.Args, c.Env)
	}
	for want, p := range map[string]*corev1.Probe{"status": c.LivenessProbe, "--ready": c.ReadinessProbe} {
		probe := p.Exec.Command
		run, ok := strings.CutPrefix(probe[1], "--run-dir=")
		asks := slices.Contains(c.Args, "--socket-path="+run+"/controller/controller.sock")
		if !ok || !asks || probe[len(probe)-1] != want {
			t.Errorf("the probe %v does not ask at the socket of %v for %s", probe, c.Args, want)
		}
	}
}

// TestUnitOfTheDatapathAllowsItsProbes: the datapath sends UDP probes to other nodes, so systemd must allow internet
// sockets.
func TestUnitOfTheDatapathAllowsItsProbes(t *testing.T) {
	unit, err := os.ReadFile(filepath.Join("deploy", "systemd", "sluice-datapath.service"))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(unit), "\nRestrictAddressFamilies=")
	line, _, _ = strings.Cut(line, "\n")
	families := strings.Fields(line)
	for _, family := range []string{"AF_UNIX", "AF_NETLINK", "AF_INET", "AF_INET6"} {
		if !slices.Contains(families, family) {
			t.Errorf("the unit allows %v, not %s", families, family)
		}
	}
}

// TestRightsAreThoseOfTheServices: each container has the user, capabilities and file system that the documentation
// of its service specifies.
func TestRightsAreThoseOfTheServices(t *testing.T) {
	ds := daemonSet(t)
	pod := ds.Spec.Template.Spec
	if pod.HostPID || pod.HostIPC || !pod.HostNetwork || *pod.AutomountServiceAccountToken ||
		pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("the pod has other namespaces, a token or no seccomp profile: %+v", pod)
	}
	unit, err := os.ReadFile(filepath.Join("deploy", "systemd", "sluice-datapath.service"))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	line, _, _ = strings.Cut(line, "\n")
	datapath := strings.Fields(strings.ReplaceAll(line, "CAP_", ""))
	type rights struct {
		uid          int64
		capabilities []string
	}
	want := map[string]rights{"cni": {uid: 0}}
	for _, s := range nodefiles.Services() {
		if s.Optional { // a component
			continue
		}
		want[s.Name] = rights{uid: int64(s.UID)}
		if s.BPF {
			want[s.Name] = rights{0, append(datapath, "SETUID", "SETGID")}
		}
	}
	for _, c := range pod.Containers {
		w, ok := want[c.Name]
		if !ok {
			t.Errorf("%s is no container of the pod", c.Name)
			continue
		}
		delete(want, c.Name)
		s := c.SecurityContext
		var added []string
		for _, a := range s.Capabilities.Add {
			added = append(added, string(a))
		}
		if *s.RunAsUser != w.uid || *s.RunAsGroup != 65700 || !slices.Equal(added, w.capabilities) ||
			fmt.Sprint(s.Capabilities.Drop) != "[ALL]" || s.Privileged != nil || *s.AllowPrivilegeEscalation ||
			!*s.ReadOnlyRootFilesystem {
			t.Errorf("%s runs as %d:%d with %v, want %+v: %+v", c.Name, *s.RunAsUser, *s.RunAsGroup, added, w, s)
		}
	}
	if len(want) > 0 {
		t.Errorf("the pod lacks %v", want)
	}
	if len(pod.InitContainers) != 1 || !*pod.InitContainers[0].SecurityContext.Privileged {
		t.Error("want one init container, which is privileged")
	}
	for _, c := range etcd(t).Spec.Template.Spec.Containers {
		if s := c.SecurityContext; s.Capabilities.Add != nil || s.Privileged != nil || !*s.ReadOnlyRootFilesystem {
			t.Errorf("%s has rights: %+v", c.Name, s)
		}
	}
}

// TestEverySettingExists executes the program of each container with the arguments and the environment of the
// manifests: the program must know every flag and every variable.
func TestEverySettingExists(t *testing.T) {
	pod, status := daemonSet(t).Spec.Template.Spec, controller(t).Spec.Template.Spec
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers, status.Containers) {
		if c.ImagePullPolicy != corev1.PullIfNotPresent {
			t.Errorf("%s: an image that was imported would be pulled", c.Name)
		}
		args := slices.Concat(c.Command[1:], c.Args)
		if c.Command[0] == "sluice" {
			args = append(args, "--help")
		} else {
			args = append(args, "--print-config")
		}
		cmd := exec.Command(filepath.Join(binDir(), c.Command[0]), args...) //nolint:gosec // of the manifest
		cmd.Env = environment(t, c)
		for i, e := range cmd.Env {
			if strings.HasSuffix(e, "_KUBERNETES_API=") {
				cmd.Env[i] = e + "https://192.0.2.1:6443" // an overlay's
			}
		}
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		if err := cmd.Run(); err != nil {
			t.Errorf("%s %v: %v: %s", c.Command[0], args, err, errOut.String())
		}
		// A variable that matches no setting is not an error of the program.
		if have := strings.Count(out.String(), "# environment\n"); have != len(c.Env) {
			t.Errorf("%s: %d settings come from the environment, want %d:\n%s", c.Name, have, len(c.Env), out.String())
		}
	}
}

func TestProbesAskTheAddressThatAnswers(t *testing.T) {
	ports := map[int32]string{}
	for _, c := range daemonSet(t).Spec.Template.Spec.Containers {
		live, ready := c.LivenessProbe.HTTPGet, c.ReadinessProbe.HTTPGet
		port := ready.Port.IntVal
		want := fmt.Sprintf("--health-address=127.0.0.1:%d", port)
		if live.Port != ready.Port || live.Host != "127.0.0.1" || ready.Host != "127.0.0.1" ||
			live.Path != "/livez" || ready.Path != "/readyz" || !slices.Contains(c.Args, want) {
			t.Errorf("%s: %+v and %+v, args %v", c.Name, live, ready, c.Args)
		}
		if other, twice := ports[port]; twice {
			t.Errorf("%s and %s have the port %d", c.Name, other, port)
		}
		ports[port] = c.Name
		if uid := int32(*c.SecurityContext.RunAsUser); uid != 0 && port != uid-1000 {
			t.Errorf("%s: port %d, want %d", c.Name, port, uid-1000)
		}
	}
}

// TestVolumesAndMountsFit: every mount has a volume, and every volume is mounted.
func TestVolumesAndMountsFit(t *testing.T) {
	for name, pod := range map[string]corev1.PodSpec{
		"sluice": daemonSet(t).Spec.Template.Spec, "etcd": etcd(t).Spec.Template.Spec,
		"status": controller(t).Spec.Template.Spec,
		"store":  decode[appsv1.Deployment](t, "base/store-deployment.yaml").Spec.Template.Spec,
	} {
		used := map[string]bool{}
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			for _, m := range c.VolumeMounts {
				used[m.Name] = true
			}
		}
		for _, v := range pod.Volumes {
			known := v.HostPath != nil || v.EmptyDir != nil || v.Name == token || v.Name == "store-token"
			if !known || !used[v.Name] {
				t.Errorf("%s: the volume %s is not of the machine, or not mounted", name, v.Name)
			}
			delete(used, v.Name)
		}
		if len(used) > 0 {
			t.Errorf("%s: no volumes %v", name, used)
		}
	}
}

// TestNodesWithoutTUNStartThePod: the device may be missing, so the pod mounts its directory. The type CharDevice would
// keep the pod from starting, and without a type the runtime would make a directory in place of the device.
func TestNodesWithoutTUNStartThePod(t *testing.T) {
	volumes := daemonSet(t).Spec.Template.Spec.Volumes
	i := slices.IndexFunc(volumes, func(v corev1.Volume) bool { return v.Name == "dev-net" })
	if i < 0 {
		t.Fatal("the pod has no volume dev-net")
	}
	if of := volumes[i].HostPath; of.Path != "/dev/net" || of.Type == nil || *of.Type != corev1.HostPathDirectoryOrCreate {
		t.Errorf("the volume is %+v", of)
	}
}

// token is the volume with the credentials for the API server.
const token = "kubernetes-api"

// TestOnlyCallersOfTheAPIHaveItsToken: in particular, the datapath has no token.
func TestOnlyCallersOfTheAPIHaveItsToken(t *testing.T) {
	pod := daemonSet(t).Spec.Template.Spec
	var have []string
	for _, c := range append(pod.InitContainers, pod.Containers...) {
		for _, m := range c.VolumeMounts {
			if m.Name != token {
				continue
			}
			have = append(have, c.Name)
			if !m.ReadOnly || m.MountPath != "/var/run/secrets/kubernetes.io/serviceaccount" {
				t.Errorf("%s mounts the token so that clients do not find it, or writable: %+v", c.Name, m)
			}
		}
	}
	if want := []string{"identity", "ipam", "policy", "loadbalancer"}; !slices.Equal(have, want) {
		t.Errorf("%v have a token, want %v", have, want)
	}
}
