// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// kinds are the kinds of objects in the tree's kustomizations, except CustomResourceDefinitions and the kinds of
// other projects.
var kinds = map[string]func() any{
	"v1 Namespace":                func() any { return new(corev1.Namespace) },
	"v1 ServiceAccount":           func() any { return new(corev1.ServiceAccount) },
	"v1 ConfigMap":                func() any { return new(corev1.ConfigMap) },
	"v1 Service":                  func() any { return new(corev1.Service) },
	"apps/v1 DaemonSet":           func() any { return new(appsv1.DaemonSet) },
	"apps/v1 Deployment":          func() any { return new(appsv1.Deployment) },
	monitoring + "PodMonitor":     func() any { return new(monitoringv1.PodMonitor) },
	monitoring + "PrometheusRule": func() any { return new(monitoringv1.PrometheusRule) },
	rbac + "ClusterRole":          func() any { return new(rbacv1.ClusterRole) },
	rbac + "ClusterRoleBinding":   func() any { return new(rbacv1.ClusterRoleBinding) },
	rbac + "Role":                 func() any { return new(rbacv1.Role) },
	rbac + "RoleBinding":          func() any { return new(rbacv1.RoleBinding) },
	flowcontrol + "FlowSchema":    func() any { return new(flowcontrolv1.FlowSchema) },
	flowcontrol + "PriorityLevelConfiguration": func() any {
		return new(flowcontrolv1.PriorityLevelConfiguration)
	},
	admission + "ValidatingAdmissionPolicy": func() any {
		return new(admissionv1.ValidatingAdmissionPolicy)
	},
	admission + "ValidatingAdmissionPolicyBinding": func() any {
		return new(admissionv1.ValidatingAdmissionPolicyBinding)
	},
}

const (
	rbac        = "rbac.authorization.k8s.io/v1 "
	monitoring  = "monitoring.coreos.com/v1 "
	flowcontrol = "flowcontrol.apiserver.k8s.io/v1 "
	admission   = "admissionregistration.k8s.io/v1 "
)

// objects are the objects of a kustomization, by kind and name.
type objects map[string]any

// render runs kubectl's kustomize on a directory and decodes the result strictly.
func render(t *testing.T, dir string) objects {
	t.Helper()
	all, err := tryRender(t, dir)
	if err != nil {
		t.Fatalf("kustomize %s: %v", dir, err)
	}
	return all
}

// tryRender is render, but returns the error of kustomize.
func tryRender(t *testing.T, dir string) (objects, error) {
	t.Helper()
	tracked(t, deploy)
	out, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return nil, err
	}
	all := objects{}
	for _, r := range out.Resources() {
		content, err := r.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		kind := r.GetApiVersion() + " " + r.GetKind()
		of, ok := kinds[kind]
		if !ok {
			t.Fatalf("%s: %s is a kind that the test does not know", dir, kind)
		}
		object := of()
		if err := yaml.UnmarshalStrict(content, object); err != nil {
			t.Errorf("%s: %s: %v\n%s", dir, kind, err, content)
		}
		clusterWide := []string{
			"Namespace", "ClusterRole", "ClusterRoleBinding", "FlowSchema", "PriorityLevelConfiguration",
			"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
		}
		if slices.Contains(clusterWide, r.GetKind()) != (r.GetNamespace() == "") {
			t.Errorf("%s: %s %s is in the namespace %q", dir, kind, r.GetName(), r.GetNamespace())
		}
		all[r.GetKind()+"/"+r.GetName()] = object
	}
	return all, nil
}

// get returns one object.
func get[T any](t *testing.T, all objects, name string) *T {
	t.Helper()
	object, ok := all[name].(*T)
	if !ok {
		t.Fatalf("no %s of the type %T is rendered", name, object)
	}
	return object
}

func (all objects) settings(t *testing.T) map[string]string {
	t.Helper()
	return get[corev1.ConfigMap](t, all, "ConfigMap/sluice").Data
}

func (all objects) pod(t *testing.T) corev1.PodSpec {
	t.Helper()
	return get[appsv1.DaemonSet](t, all, "DaemonSet/sluice").Spec.Template.Spec
}

// overlay is an operator's kustomization: directories of deploy/kubernetes, components, and settings.
type overlay struct {
	resources, components []string
	settings              map[string]string
	relayImage            string // of a ConfigMap hubble-relay; none if empty
}

// render renders the kustomization. kustomize accepts only relative paths, so it is written next to a copy of
// deploy/kubernetes.
func (o overlay) render(t *testing.T) objects {
	t.Helper()
	return render(t, o.write(t))
}

// write writes the kustomization next to a copy of deploy/kubernetes, and returns its directory.
func (o overlay) write(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(filepath.Join(dir, "deploy"), os.DirFS(deploy)); err != nil {
		t.Fatal(err)
	}
	type patch struct {
		Patch string `json:"patch"`
	}
	kustomization := struct {
		APIVersion string   `json:"apiVersion"`
		Kind       string   `json:"kind"`
		Resources  []string `json:"resources"`
		Components []string `json:"components,omitempty"`
		Patches    []patch  `json:"patches,omitempty"`
	}{APIVersion: "kustomize.config.k8s.io/v1beta1", Kind: "Kustomization"}
	for _, r := range o.resources {
		kustomization.Resources = append(kustomization.Resources, filepath.Join("..", "deploy", r))
	}
	for _, c := range o.components {
		kustomization.Components = append(kustomization.Components, filepath.Join("..", "deploy", "components", c))
	}
	if o.settings != nil {
		settings := corev1.ConfigMap{Data: o.settings}
		settings.APIVersion, settings.Kind, settings.Name, settings.Namespace = "v1", "ConfigMap", "sluice", "sluice-system"
		content, err := yaml.Marshal(settings)
		if err != nil {
			t.Fatal(err)
		}
		kustomization.Patches = []patch{{string(content)}}
	}
	cluster := filepath.Join(dir, "cluster")
	if err := os.Mkdir(cluster, 0o755); err != nil {
		t.Fatal(err)
	}
	if o.relayImage != "" {
		image := corev1.ConfigMap{Data: map[string]string{"image": o.relayImage}}
		image.APIVersion, image.Kind, image.Name, image.Namespace = "v1", "ConfigMap", "hubble-relay", "sluice-system"
		content, err := yaml.Marshal(image)
		if err == nil {
			err = os.WriteFile(filepath.Join(cluster, "hubble-relay.yaml"), content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		kustomization.Resources = append(kustomization.Resources, "hubble-relay.yaml")
	}
	content, err := yaml.Marshal(kustomization)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(cluster, "kustomization.yaml"), content, 0o600); err != nil {
		t.Fatal(err)
	}
	return cluster
}

// configuration returns the settings that a program derives from the arguments and the environment of its container,
// as printed by --print-config. It fails if a setting does not exist or is rejected.
func (all objects) configuration(t *testing.T, container string) string {
	t.Helper()
	pod, settings := all.pod(t), all.settings(t)
	i := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == container })
	if i < 0 {
		t.Fatalf("no container %s", container)
	}
	c := pod.Containers[i]
	args := append(slices.Clone(c.Args), "--print-config")
	cmd := exec.Command(filepath.Join(binDir(), c.Command[0]), args...) //nolint:gosec // of the manifest
	cmd.Env = environmentOf(t, settings, c)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", container, cmd.Env, err, out)
	}
	want := 0
	for _, e := range c.Env {
		if strings.HasPrefix(e.Name, "SLUICE_") {
			want++
		}
	}
	if have := strings.Count(string(out), "# environment\n"); have != want {
		t.Errorf("%s: %d settings come from the environment, want %d:\n%s", container, have, want, out)
	}
	return string(out)
}

// rendered are the directories of deploy/kubernetes that users apply directly.
var rendered = []string{
	"base", "etcd-dev", "overlays/native", "overlays/overlay", "overlays/single-node", "uninstall",
}

// TestEveryKustomizationRenders: every directory that users apply, and each component on top of the base.
func TestEveryKustomizationRenders(t *testing.T) {
	for _, dir := range rendered {
		if all := render(t, filepath.Join(deploy, dir)); len(all) == 0 {
			t.Errorf("%s renders nothing", dir)
		}
	}
	components, err := os.ReadDir(filepath.Join(deploy, "components"))
	if err != nil {
		t.Fatal(err)
	}
	base := render(t, filepath.Join(deploy, "base"))
	for _, c := range components {
		named := []string{"kustomization.yaml"}
		component := decode[struct {
			APIVersion string   `json:"apiVersion"`
			Kind       string   `json:"kind"`
			Resources  []string `json:"resources"`
			Patches    []struct {
				Path   string         `json:"path"`
				Target map[string]any `json:"target"`
			} `json:"patches"`
			ConfigMapGenerator []struct {
				Name      string         `json:"name"`
				Namespace string         `json:"namespace"`
				Files     []string       `json:"files"`
				Options   map[string]any `json:"options"`
			} `json:"configMapGenerator"`
			Replacements []map[string]any `json:"replacements"`
		}](t, filepath.Join("components", c.Name(), "kustomization.yaml"))
		named = append(named, component.Resources...)
		for _, p := range component.Patches {
			named = append(named, p.Path)
		}
		for _, g := range component.ConfigMapGenerator {
			named = append(named, g.Files...)
		}
		slices.Sort(named)
		named = slices.Compact(named) // of several patches
		files, err := filepath.Glob(filepath.Join(deploy, "components", c.Name(), "*"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range files {
			files[i] = filepath.Base(files[i])
		}
		if !slices.Equal(named, files) {
			t.Errorf("the component %s names %v, its directory has %v", c.Name(), named, files)
		}
		o := overlay{resources: []string{"base"}, relayImage: relayImage}
		before := o.render(t)
		o.components = append(below[c.Name()], c.Name())
		all := o.render(t)
		for name := range base {
			store := strings.Contains(name, "/sluice-store")
			if (all[name] == nil) != (store && c.Name() == "etcd-external") {
				t.Errorf("with the component %s, %s is there: %t", c.Name(), name, all[name] != nil)
			}
		}
		if fmt.Sprint(all) == fmt.Sprint(before) {
			t.Errorf("the component %s changes nothing", c.Name())
		}
	}
}

// below are the components that have to come before another one.
var below = map[string][]string{"hubble-monitoring": {"hubble"}, "hubble-relay": {"hubble"}}

// relayImage is an image for components/hubble-relay, which has no default.
const relayImage = "example.org/hubble-relay:v1.20.2"

// TestFlowSchemaIsOfTheAccount: all API requests of Sluice's account use Sluice's priority level.
func TestFlowSchemaIsOfTheAccount(t *testing.T) {
	all := render(t, filepath.Join(deploy, "base"))
	schema := get[flowcontrolv1.FlowSchema](t, all, "FlowSchema/sluice")
	level := get[flowcontrolv1.PriorityLevelConfiguration](t, all, "PriorityLevelConfiguration/sluice")
	account := get[corev1.ServiceAccount](t, all, "ServiceAccount/sluice")
	if schema.Spec.PriorityLevelConfiguration.Name != level.Name || all.pod(t).ServiceAccountName != account.Name ||
		len(schema.Spec.Rules) != 1 || len(schema.Spec.Rules[0].Subjects) != 1 {
		t.Fatalf("the schema is not of the level %s and of one account: %+v", level.Name, schema.Spec)
	}
	of := schema.Spec.Rules[0].Subjects[0].ServiceAccount
	if of == nil || of.Name != account.Name || of.Namespace != account.Namespace {
		t.Errorf("the schema is of %+v, want the account %s of %s", of, account.Name, account.Namespace)
	}
}

// TestOverlaysConfigureTheServices: each service accepts the settings of the overlay, together with the values that the
// operator must set.
func TestOverlaysConfigureTheServices(t *testing.T) {
	for name, want := range map[string]struct{ mode, etcd string }{
		"overlay":     {"overlay", "https://192.0.2.1:2379"},
		"native":      {"native", "https://192.0.2.1:2379"},
		"single-node": {"none", ""},
	} {
		settings := map[string]string{"kubernetesAPI": api}
		components := []string{}
		if want.etcd != "" {
			settings["etcdEndpoints"] = want.etcd
			components = append(components, "etcd-tls")
		}
		all := overlay{
			resources: []string{"overlays/" + name}, components: components, settings: settings,
		}.render(t)
		if store := all["Deployment/sluice-store"] != nil; store == (name == "single-node") {
			t.Errorf("%s: a store: %t", name, store)
		}
		for _, c := range all.pod(t).Containers {
			if strings.HasPrefix(c.Command[0], "sluice-") {
				all.configuration(t, c.Name)
			}
		}
		var configuration struct {
			Routing    struct{ Mode string }
			Masquerade struct {
				Enabled string
				Except  []string
			}
			Underlay struct{ Devices []string }
		}
		if err := yaml.Unmarshal([]byte(all.configuration(t, "datapath")), &configuration); err != nil {
			t.Fatal(err)
		}
		if configuration.Routing.Mode != want.mode || configuration.Masquerade.Enabled != "true" ||
			len(configuration.Masquerade.Except)+len(configuration.Underlay.Devices) != 0 {
			t.Errorf("%s: the datapath has %+v, want the mode %s, with masquerade", name, configuration, want.mode)
		}
		if etcd := all["Deployment/etcd-dev"] != nil; etcd != (name == "single-node") {
			t.Errorf("%s: an etcd for development: %t", name, etcd)
		}
	}
}

// TestEverySettingIsDocumented: the installation page lists each key of the ConfigMap, including keys of components.
func TestEverySettingIsDocumented(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	components, err := os.ReadDir(filepath.Join(deploy, "components"))
	if err != nil {
		t.Fatal(err)
	}
	o := overlay{resources: []string{"base"}, settings: map[string]string{"kubernetesAPI": ""}, relayImage: relayImage}
	for _, c := range components { // in the order of names, "hubble" comes before the components that need it
		o.components = append(o.components, c.Name())
	}
	var rows []string
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "| `") {
			keys, _, _ := strings.Cut(line[2:], " |")
			rows = append(rows, strings.Split(keys, ", ")...)
		}
	}
	for key := range o.render(t).settings(t) {
		if !slices.Contains(rows, "`"+key+"`") {
			t.Errorf("docs/install.md has no row for the setting %s", key)
		}
	}
}

// TestCertificatesOfEtcdAreForIdentityAlone: only the container of identity mounts the Secret, at the path in the
// settings, and its group can read the files.
func TestCertificatesOfEtcdAreForIdentityAlone(t *testing.T) {
	const endpoint = "https://192.0.2.1:2379"
	all := overlay{
		resources: []string{"base"}, components: []string{"etcd-tls"},
		settings: map[string]string{"kubernetesAPI": api, "etcdEndpoints": endpoint},
	}.render(t)
	pod := all.pod(t)
	group := pod.SecurityContext.FSGroup
	if group == nil || pod.SecurityContext.SeccompProfile == nil {
		t.Fatalf("the pod has no group for its files, or lost its seccomp profile: %+v", pod.SecurityContext)
	}
	var volume *corev1.SecretVolumeSource
	for _, v := range pod.Volumes {
		if v.Name == "etcd-tls" {
			volume = v.Secret
		}
	}
	if volume == nil || volume.SecretName != "sluice-etcd" || volume.Optional == nil || !*volume.Optional ||
		volume.DefaultMode == nil || *volume.DefaultMode != 0o440 {
		t.Fatalf("the volume is no optional Secret that its group alone reads: %+v", volume)
	}
	for _, c := range append(pod.InitContainers, pod.Containers...) {
		i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "etcd-tls" })
		switch {
		case i >= 0 != (c.Name == "identity"):
			t.Errorf("%s has the certificates: %t", c.Name, i >= 0)
		case i >= 0:
			m := c.VolumeMounts[i]
			if !m.ReadOnly || m.SubPath != "" || *c.SecurityContext.RunAsGroup != *group {
				t.Errorf("%s: want a read-only mount without subPath, and the group of the files: %+v", c.Name, m)
			}
			configuration := all.configuration(t, c.Name)
			for _, want := range []string{
				endpoint, filepath.Join(m.MountPath, "ca.crt"), filepath.Join(m.MountPath, corev1.TLSCertKey),
				filepath.Join(m.MountPath, corev1.TLSPrivateKeyKey),
			} {
				if !strings.Contains(configuration, want) {
					t.Errorf("the configuration of %s has no %s:\n%s", c.Name, want, configuration)
				}
			}
		}
	}
	// An etcd without client certificates.
	overlay{
		resources: []string{"base"}, components: []string{"etcd-tls"},
		settings: map[string]string{"kubernetesAPI": "", "etcdEndpoints": endpoint, "etcdCert": "", "etcdKey": ""},
	}.render(t).configuration(t, "identity")
	base := render(t, filepath.Join(deploy, "base")).pod(t)
	secret := func(v corev1.Volume) bool { return v.Secret != nil }
	if base.SecurityContext.FSGroup != nil || slices.ContainsFunc(base.Volumes, secret) {
		t.Error("the base needs a Secret")
	}
}
