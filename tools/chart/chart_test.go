// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/loader/archive"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

// root is the directory of the repository.
var root = filepath.Join("..", "..")

// charts returns the generated chart, and as Helm loads it.
func charts(t *testing.T) (*chart, *chartv2.Chart) {
	t.Helper()
	c, err := build(root, "1.2.3", "")
	if err != nil {
		t.Fatal(err)
	}
	files, err := c.files()
	if err != nil {
		t.Fatal(err)
	}
	var buffered []*archive.BufferedFile
	for name, content := range files {
		buffered = append(buffered, &archive.BufferedFile{Name: name, Data: content})
	}
	loaded, err := loader.LoadFiles(buffered)
	if err != nil {
		t.Fatal(err)
	}
	return c, loaded
}

// rendering is how a chart is rendered.
type rendering struct {
	values    map[string]any
	namespace string
	clients   engine.ClientProvider
}

// render returns the texts of the templates by name.
func (r rendering) render(of *chartv2.Chart) (map[string]string, error) {
	options := common.ReleaseOptions{Name: "sluice", Namespace: r.namespace, IsInstall: true}
	if r.namespace == "" {
		options.Namespace = "default"
	}
	values := r.values
	if values == nil {
		values = map[string]any{}
	}
	all, err := util.ToRenderValues(of, values, options, nil)
	if err != nil {
		return nil, err
	}
	if r.clients != nil {
		return engine.RenderWithClientProvider(of, all, r.clients)
	}
	return engine.Render(of, all)
}

// objects returns the rendered objects except the pod of helm test, by kind and name.
func (r rendering) objects(t *testing.T, of *chartv2.Chart) map[string]object {
	t.Helper()
	texts, err := r.render(of)
	if err != nil {
		t.Fatalf("%v: %v", r.values, err)
	}
	all := map[string]object{}
	for name, content := range texts {
		if !strings.HasSuffix(name, ".yaml") || strings.TrimSpace(content) == "" {
			continue
		}
		var o object
		if err := yaml.UnmarshalStrict([]byte(content), &o); err != nil {
			t.Fatalf("%v: %s: %v\n%s", r.values, name, err, content)
		}
		annotations, _ := o["metadata"].(object)["annotations"].(object)
		if annotations["helm.sh/hook"] != nil {
			continue
		}
		if all[id(o)] != nil {
			t.Fatalf("%s is there twice", id(o))
		}
		all[id(o)] = o
	}
	return all
}

// with returns the values that enable components, and disable the features of which there are components without them.
func with(components ...string) map[string]any {
	enabled, features := map[string]any{}, map[string]any{}
	for _, c := range components {
		if feature, ok := featureOf(c); ok {
			features[feature] = false
			continue
		}
		enabled[c] = map[string]any{"enabled": true}
	}
	return map[string]any{"components": enabled, "features": features}
}

// set returns values with one more, at a path with dots.
func set(values map[string]any, path string, v any) map[string]any {
	text, err := json.Marshal(values)
	if err != nil {
		panic(err)
	}
	out := map[string]any{}
	if err := json.Unmarshal(text, &out); err != nil {
		panic(err)
	}
	at := out
	keys := strings.Split(path, ".")
	for _, key := range keys[:len(keys)-1] {
		if at[key] == nil {
			at[key] = map[string]any{}
		}
		at = at[key].(map[string]any)
	}
	at[keys[len(keys)-1]] = v
	return out
}

// equal compares objects with the output of kustomize.
func equal(t *testing.T, name string, got map[string]object, want []object) {
	t.Helper()
	wanted := map[string]object{}
	for _, o := range want {
		wanted[id(o)] = o
	}
	for key, o := range got {
		if wanted[key] == nil {
			t.Errorf("%s: only the chart has %s", name, key)
			continue
		}
		if strings.HasPrefix(key, "CustomResourceDefinition/") {
			annotations := o["metadata"].(object)["annotations"].(object)
			if annotations[keep] != "keep" {
				t.Errorf("%s: helm uninstall would delete %s, and with it all its objects", name, key)
			}
			delete(annotations, keep)
			if len(annotations) == 0 {
				delete(o["metadata"].(object), "annotations")
			}
		}
		if !reflect.DeepEqual(o, wanted[key]) {
			a, _ := yaml.Marshal(o)
			b, _ := yaml.Marshal(wanted[key])
			t.Errorf("%s: %s differs:\n%s", name, key, difference(string(a), string(b)))
		}
	}
	for key := range wanted {
		if got[key] == nil {
			t.Errorf("%s: the chart lacks %s", name, key)
		}
	}
}

// difference returns the first lines that differ.
func difference(got, want string) string {
	a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("line %d\nchart:     %s\nkustomize: %s", i+1,
				strings.Join(a[i:min(i+5, len(a))], "\n           "), strings.Join(b[i:min(i+5, len(b))], "\n           "))
		}
	}
	return "one is shorter"
}

// kustomized returns the objects of the base with components of the chart.
func kustomized(t *testing.T, c *chart, names ...string) []object {
	t.Helper()
	m, err := readManifests(root)
	if err != nil {
		t.Fatal(err)
	}
	resources, components := []string{"base"}, []string{}
	for _, of := range c.components {
		if !slices.Contains(names, of.name) {
			continue
		}
		components = append(components, of.components...)
		for _, dir := range of.resources {
			switch {
			case dir == "etcd-dev": // contains the base
				resources[0] = dir
			case dir != "base":
				resources = append(resources, dir)
			}
		}
	}
	all, err := m.build(resources, components)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestDefaultsAreTheBase(t *testing.T) {
	c, loaded := charts(t)
	equal(t, "defaults", rendering{}.objects(t, loaded), kustomized(t, c))
	for _, file := range []string{"deploy/helm/sluice/Chart.yaml", "VERSION"} {
		content, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		version := strings.TrimSpace(string(content))
		if file != "VERSION" {
			var of chartv2.Metadata
			if err := yaml.UnmarshalStrict(content, &of); err != nil || of.Version != of.AppVersion {
				t.Errorf("%s: %v: version %s, appVersion %s", file, err, of.Version, of.AppVersion)
			}
			continue
		}
		if c, err := build(root, version, "v"+version); err != nil || c.version != version {
			t.Errorf("%s: %v", version, err)
		}
	}
}

// TestComponentsAreThoseOfKustomize compares each component, each pair of components, and all together.
func TestComponentsAreThoseOfKustomize(t *testing.T) {
	c, loaded := charts(t)
	var names []string
	for _, of := range c.components {
		if !of.alone {
			names = append(names, of.name)
		}
	}
	sets := [][]string{names}
	for i, a := range names {
		sets = append(sets, []string{a})
		for _, b := range names[i+1:] {
			sets = append(sets, []string{a, b})
		}
	}
	for _, set := range sets {
		got, want := rendering{values: with(set...)}.objects(t, loaded), kustomized(t, c, set...)
		for _, o := range got {
			withoutHash(o)
			references(t, o)
		}
		if len(set) > 1 {
			for key, o := range got {
				got[key] = ordered(o).(object)
			}
			for i, o := range want {
				want[i] = ordered(o).(object)
			}
		}
		equal(t, strings.Join(set, "+"), got, want)
	}
}

// ordered returns a value whose lists with names are sorted: kustomize puts what a component adds before what others
// have added, the chart after it.
func ordered(v any) any {
	switch v := v.(type) {
	case object:
		for key, of := range v {
			v[key] = ordered(of)
		}
	case []any:
		keys := map[any]string{}
		for i := range v {
			v[i] = ordered(v[i])
			if _, ok := v[i].(object); !ok {
				return v
			}
			keys[fmt.Sprint(v[i])] = keyOf(v, i)
		}
		slices.SortFunc(v, func(a, b any) int { return strings.Compare(keys[fmt.Sprint(a)], keys[fmt.Sprint(b)]) })
	}
	return v
}

// references requires that variables refer only to earlier ones, as Kubernetes does.
func references(t *testing.T, o object) {
	t.Helper()
	for _, container := range containers(newNode(o)) {
		env := container.at("env")
		if env == nil {
			continue
		}
		var before []string
		for _, e := range env.entries {
			value := e.node.at("value").text()
			if _, name, ok := strings.Cut(value, "$("); ok {
				name, _, _ = strings.Cut(name, ")")
				if !slices.Contains(before, name) {
					t.Errorf("%s: %s of %s refers to %s, which comes later", id(o), e.key, container.at("name").text(), name)
				}
			}
			before = append(before, e.key)
		}
	}
}

// withoutHash removes the annotation of changed settings, which only the chart has.
func withoutHash(o object) {
	spec, _ := o["spec"].(object)
	template, _ := spec["template"].(object)
	metadata, _ := template["metadata"].(object)
	annotations, _ := metadata["annotations"].(object)
	delete(annotations, "sluice.io/settings")
	if len(annotations) == 0 {
		delete(metadata, "annotations")
	}
}

// TestUninstallReplacesTheWorkloads: no service may run on a node from which Sluice is removed.
func TestUninstallReplacesTheWorkloads(t *testing.T) {
	c, loaded := charts(t)
	got := rendering{values: with("uninstall", "etcdDev", "hubble")}.objects(t, loaded)
	var workloads []string
	for key, o := range got {
		if spec, ok := o["spec"].(object); ok && spec["template"] != nil {
			workloads = append(workloads, key)
		}
	}
	if !slices.Equal(workloads, []string{"DaemonSet/sluice-uninstall"}) {
		t.Errorf("with uninstall there are %v", workloads)
	}
	for _, o := range kustomized(t, c, "uninstall") {
		if id(o) == "DaemonSet/sluice-uninstall" && !reflect.DeepEqual(got[id(o)], o) {
			t.Errorf("%s differs from kustomize's", id(o))
		}
	}
}

// TestFeatureThatIsOffHasNoContainer: sluice-dns runs by default, and without it the pod has neither its container nor
// its directories.
func TestFeatureThatIsOffHasNoContainer(t *testing.T) {
	_, loaded := charts(t)
	for _, on := range []bool{true, false} {
		values := set(with("monitoring", "hubble"), "features.dns", on)
		o := rendering{values: values}.objects(t, loaded)["DaemonSet/sluice"]
		pod := o["spec"].(object)["template"].(object)["spec"].(object)
		var found []string
		for _, list := range []string{"containers", "volumes"} {
			for _, of := range pod[list].([]any) {
				if name := of.(object)["name"].(string); slices.Contains([]string{"dns", "run-dns", "state-dns"}, name) {
					found = append(found, name)
				}
			}
		}
		want := map[bool]string{true: "[dns run-dns state-dns]", false: "[]"}[on]
		if got := fmt.Sprint(found); got != want {
			t.Errorf("features.dns=%t: the pod has %s, want %s", on, got, want)
		}
	}
}

// TestWithoutDNSRulesAreReportedAsNotEnforced: sluice-policy and the controller must not count on a sluice-dns that
// does not run, whatever the shared setting is. With it, the shared setting applies.
func TestWithoutDNSRulesAreReportedAsNotEnforced(t *testing.T) {
	_, loaded := charts(t)
	for _, c := range []struct {
		feature bool
		shared  any
		want    string
	}{
		{true, nil, "[]"},
		{true, false, "[false]"},
		{true, true, "[true]"},
		{false, nil, "[false]"},
		{false, false, "[false]"},
		{false, true, "[false]"},
	} {
		values := set(map[string]any{}, "features.dns", c.feature)
		if c.shared != nil {
			values = set(values, "shared.dns.proxy", c.shared)
		}
		objects := rendering{values: values}.objects(t, loaded)
		for workload, variable := range map[string]string{
			"DaemonSet/sluice": "SLUICE_POLICY_DNS_PROXY", "Deployment/sluice-status": "SLUICE_CONTROLLER_DNS_PROXY",
		} {
			pod := objects[workload]["spec"].(object)["template"].(object)["spec"].(object)
			found := []any{}
			for _, container := range pod["containers"].([]any) {
				variables, _ := container.(object)["env"].([]any)
				for _, v := range variables {
					if v.(object)["name"] == variable {
						found = append(found, v.(object)["value"])
					}
				}
			}
			if got := fmt.Sprint(found); got != c.want {
				t.Errorf("features.dns=%t, shared.dns.proxy=%v: %s of %s is %s, want %s", c.feature, c.shared, variable,
					workload, got, c.want)
			}
		}
	}
}

// leaf is a value of the chart with its path.
type leaf struct {
	path string
	*value
}

func leaves(v *value, at string) (all []leaf) {
	for _, c := range v.children {
		if c.schema == nil {
			all = append(all, leaves(c, at+c.name+".")...)
			continue
		}
		all = append(all, leaf{at + c.name, c})
	}
	return all
}

// other returns a value of the schema that is not the default.
func (l leaf) other(t *testing.T) any {
	t.Helper()
	schema := l.schema
	if of, ok := schema["anyOf"].([]any); ok {
		schema = of[0].(map[string]any)
	}
	if enum, ok := schema["enum"].([]string); ok {
		for _, e := range enum {
			if e != l.def {
				return e
			}
		}
	}
	switch kind := schema["type"].(type) {
	case []string: // a list of settings
		if schema["items"].(map[string]any)["type"] == "integer" {
			return []any{7.0, 8.0}
		}
		return []any{"a", "b"}
	case string:
		switch kind {
		case "boolean":
			return l.def != true
		case "integer":
			return 7.0
		case "number":
			return 0.5
		case "array":
			if schema["items"].(map[string]any)["type"] == "string" {
				return []any{"a"}
			}
			return []any{map[string]any{"key": "a", "operator": "Exists"}}
		case "object":
			if schema["properties"] != nil {
				return map[string]any{"limits": map[string]any{"memory": "7Mi"}}
			}
			return map[string]any{"example.com/a": "b"}
		case "string":
			pattern, _ := schema["pattern"].(string)
			switch {
			case strings.Contains(pattern, "sha256"):
				return "sha256:" + strings.Repeat("0f", 32)
			case pattern != "":
				return "7m"
			}
			return "changed"
		}
	}
	t.Fatalf("%s: the test knows no value of %v", l.path, l.schema)
	return nil
}

// TestEveryValueChangesAManifest sets each value alone, with and without the components.
func TestEveryValueChangesAManifest(t *testing.T) {
	c, loaded := charts(t)
	var all []string
	for _, of := range c.components {
		if !of.alone {
			all = append(all, of.name)
		}
	}
	type context struct {
		values map[string]any
		before map[string]object
	}
	var contexts []context
	for _, values := range []map[string]any{{}, with(all...), with("uninstall")} {
		contexts = append(contexts, context{values, rendering{values: values}.objects(t, loaded)})
	}
	for _, l := range leaves(c.values, "") {
		value := l.other(t)
		changed := false
		for _, in := range contexts {
			after := rendering{values: set(in.values, l.path, value)}.objects(t, loaded)
			if !reflect.DeepEqual(in.before, after) {
				changed = true
				break
			}
		}
		if !changed {
			t.Errorf("%s=%v changes no manifest", l.path, value)
		}
	}
}

// environment returns the variables of a container with texts and with values of the ConfigMap.
func environment(t *testing.T, all map[string]object, workload, container string) map[string]string {
	t.Helper()
	pod := all[workload]["spec"].(object)["template"].(object)["spec"].(object)
	variables := map[string]string{}
	for _, of := range pod["containers"].([]any) {
		if of.(object)["name"] != container {
			continue
		}
		for _, e := range of.(object)["env"].([]any) {
			name := e.(object)["name"].(string)
			if value, ok := e.(object)["value"].(string); ok {
				variables[name] = value
			}
			from, _ := e.(object)["valueFrom"].(object)
			if ref, ok := from["configMapKeyRef"].(object); ok {
				variables[name], _ = all["ConfigMap/sluice"]["data"].(object)[ref["key"].(string)].(string)
			}
		}
	}
	return variables
}

// TestSettingsReachTheProgramsAsTheyAre checks the texts of lists, large numbers, durations and booleans.
func TestSettingsReachTheProgramsAsTheyAre(t *testing.T) {
	_, loaded := charts(t)
	values := map[string]any{}
	for path, v := range map[string]any{
		"containers.identity.settings.labels.exclude":          []any{"team", "*.example.com"},
		"containers.identity.settings.gc.grace":                "20m",
		"containers.identity.settings.log.level":               "debug",
		"containers.loadbalancer.settings.limits.backends":     float64(12345678),
		"containers.policy.settings.enforcement.allowHost":     false,
		"containers.datapath.settings.routing.tunnelPort":      float64(4790),
		"containers.datapath.settings.tunnelPorts":             []any{float64(4789), float64(4790)},
		"shared.cluster.name":                                  "east",
		"settings.kubernetesAPI":                               []any{"https://192.0.2.1:6443", "https://192.0.2.2:6443"},
		"settings.externalIPs":                                 "192.0.2.0/24",
		"settings.masquerade":                                  false,
		"containers.datapath.settings.connections.udpAnswered": "90s",
	} {
		values = set(values, path, v)
	}
	all := rendering{values: values}.objects(t, loaded)
	for name, want := range map[string]map[string]string{
		"identity": {
			"SLUICE_IDENTITY_LABELS_EXCLUDE": "team,*.example.com", "SLUICE_IDENTITY_GC_GRACE": "20m",
			"SLUICE_IDENTITY_LOG_LEVEL": "debug", "SLUICE_IDENTITY_CLUSTER_NAME": "east",
		},
		"loadbalancer": {"SLUICE_LOADBALANCER_LIMITS_BACKENDS": "12345678"},
		"policy":       {"SLUICE_POLICY_ENFORCEMENT_ALLOW_HOST": "false", "SLUICE_POLICY_CLUSTER_NAME": "east"},
		"datapath": {
			"SLUICE_DATAPATH_ROUTING_TUNNEL_PORT": "4790", "SLUICE_DATAPATH_TUNNEL_PORTS": "4789,4790",
			"SLUICE_DATAPATH_CONNECTIONS_UDP_ANSWERED": "90s",
		},
	} {
		got := environment(t, all, "DaemonSet/sluice", name)
		for variable, value := range want {
			if got[variable] != value {
				t.Errorf("%s: %s is %q, want %q", name, variable, got[variable], value)
			}
		}
	}
	if got := environment(t, all, "Deployment/sluice-status", "status")["SLUICE_CONTROLLER_CLUSTER_NAME"]; got != "east" {
		t.Errorf("the controller's cluster is %q, want east", got)
	}
	data := all["ConfigMap/sluice"]["data"].(object)
	for key, want := range map[string]string{
		"kubernetesAPI": "https://192.0.2.1:6443,https://192.0.2.2:6443", "externalIPs": "192.0.2.0/24",
		"masquerade": "false",
	} {
		if data[key] != want {
			t.Errorf("the setting %s is %v, want %s", key, data[key], want)
		}
	}
}

// TestProgramsTakeEverySetting gives each program all settings of the chart with their defaults, and requires that it
// uses every one.
func TestProgramsTakeEverySetting(t *testing.T) {
	bin := os.Getenv("SLUICE_BIN")
	if bin == "" {
		bin = filepath.Join(root, "bin")
	}
	c, loaded := charts(t)
	for _, workload := range []struct {
		name       string
		containers []string
	}{
		{"DaemonSet/sluice", []string{"identity", "ipam", "policy", "loadbalancer", "datapath", "dns", "hubble"}},
		{"Deployment/sluice-status", []string{"status"}},
	} {
		for _, name := range workload.containers {
			values := set(with("hubble"), "settings.kubernetesAPI", "https://192.0.2.1:6443")
			o := rendering{values: values}.objects(t, loaded)
			before := len(environment(t, o, workload.name, name))
			program := "sluice-" + strings.Replace(name, "status", "controller", 1)
			settings := c.values.group("containers").group(name).group("settings")
			count := 0
			for _, s := range c.services[strings.TrimPrefix(program, "sluice-")] {
				group := leaves(settings, "")
				at := "containers." + name + ".settings." + s.key
				if c.shared[s.key] != nil {
					group, at = leaves(c.values.group("shared"), ""), "shared."+s.key
				}
				i := slices.IndexFunc(group, func(l leaf) bool { return l.path == s.key })
				if i < 0 || s.def == "" {
					continue
				}
				var v any = s.def
				switch group[i].schema["type"] {
				case "integer", "number", "boolean":
					if err := json.Unmarshal([]byte(s.def), &v); err != nil {
						t.Errorf("%s: the default %s: %v", at, s.def, err)
					}
				}
				values = set(values, at, v)
				count++
			}
			o = rendering{values: values}.objects(t, loaded)
			variables := environment(t, o, workload.name, name)
			if len(variables) != before+count || count == 0 {
				t.Errorf("%s has %d variables, want %d more than %d", name, len(variables), count, before)
			}
			cmd := exec.Command(filepath.Join(bin, program), "--print-config") //nolint:gosec // of this repository
			for key, value := range variables {
				cmd.Env = append(cmd.Env, key+"="+value)
			}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v: %s", program, err, out)
			}
			if used := strings.Count(string(out), "# environment\n"); used != len(variables) {
				t.Errorf("%s uses %d of %d variables:\n%s", program, used, len(variables), out)
			}
		}
	}
}

// TestUnknownValuesAreRefused adds a value to each group, and values of wrong types.
func TestUnknownValuesAreRefused(t *testing.T) {
	c, loaded := charts(t)
	paths := []string{"unknown"}
	var groups func(v *value, at string)
	groups = func(v *value, at string) {
		for _, child := range v.children {
			if child.schema == nil {
				paths = append(paths, at+child.name+".unknown")
				groups(child, at+child.name+".")
			}
		}
	}
	groups(c.values, "")
	if len(paths) < 40 {
		t.Fatalf("only %d groups", len(paths))
	}
	for _, path := range paths {
		_, err := rendering{values: set(map[string]any{}, path, "x")}.render(loaded)
		if err == nil || !strings.Contains(err.Error(), "unknown") {
			t.Errorf("%s: %v", path, err)
		}
	}
	for path, wrong := range map[string]any{
		"settings.routing":                          "overlai",
		"settings.services":                         true, // on, without quotation marks
		"containers.identity.settings.gc.grace":     "soon",
		"containers.identity.settings.quota":        "many",
		"components.hubble.enabled":                 "yes",
		"features.dns":                              "off",
		"image.digests.sluice":                      "latest",
		"labels":                                    map[string]any{"app.kubernetes.io/name": "other"},
		"workloads.sluice.tolerations":              []any{map[string]any{"operators": "Exists"}},
		"containers.identity.resources":             map[string]any{"limit": map[string]any{"cpu": "1"}},
		"workloads.sluiceStatus.replicas":           -1.0,
		"containers.datapath.settings.routing.mode": "none", // of the ConfigMap
	} {
		if _, err := (rendering{values: set(map[string]any{}, path, wrong)}).render(loaded); err == nil {
			t.Errorf("%s=%v is accepted", path, wrong)
		}
	}
}

// TestChangedSettingsRestartPods: containers read the ConfigMap only when they start.
func TestChangedSettingsRestartPods(t *testing.T) {
	_, loaded := charts(t)
	annotation := func(values map[string]any, workload string) string {
		o := rendering{values: values}.objects(t, loaded)[workload]
		metadata := o["spec"].(object)["template"].(object)["metadata"].(object)
		annotations, _ := metadata["annotations"].(object)
		text, _ := annotations["sluice.io/settings"].(string)
		return text
	}
	native := set(map[string]any{}, "settings.routing", "native")
	for _, workload := range []string{"DaemonSet/sluice", "Deployment/sluice-status"} {
		if got := annotation(nil, workload); got != "" {
			t.Errorf("%s has %s without a change", workload, got)
		}
		a, b := annotation(native, workload), annotation(set(native, "settings.masquerade", false), workload)
		if a == "" || b == "" || a == b {
			t.Errorf("%s: settings that differ have the hashes %q and %q", workload, a, b)
		}
	}
	both := set(native, "workloads.sluice.podAnnotations", map[string]any{"example.com/a": "b"})
	if annotation(both, "DaemonSet/sluice") != annotation(native, "DaemonSet/sluice") {
		t.Error("further annotations change the hash of the settings")
	}
}

// TestImagesComeFromTheirRegistry: a tag for all images, a digest for one.
func TestImagesComeFromTheirRegistry(t *testing.T) {
	_, loaded := charts(t)
	digest := "sha256:" + strings.Repeat("0f", 32)
	values := with("etcdDev")
	for path, v := range map[string]any{
		"image.registry": "registry.example/net", "image.tag": "v1", "image.digests.sluiceDevetcd": digest,
		"image.pullSecrets": []any{"registry"},
	} {
		values = set(values, path, v)
	}
	all := rendering{values: values}.objects(t, loaded)
	for workload, want := range map[string]string{
		"DaemonSet/sluice":    "registry.example/net/sluice:v1",
		"Deployment/etcd-dev": "registry.example/net/sluice-devetcd@" + digest,
	} {
		pod := all[workload]["spec"].(object)["template"].(object)["spec"].(object)
		for _, container := range pod["containers"].([]any) {
			if got := container.(object)["image"]; got != want {
				t.Errorf("%s has the image %v, want %s", workload, got, want)
			}
		}
		if got := fmt.Sprint(pod["imagePullSecrets"]); got != "[map[name:registry]]" {
			t.Errorf("%s has the pull secrets %s", workload, got)
		}
	}
}

// TestNotesSayWhatToCheck: they warn of a cluster without API servers, or without the etcd that its values promise.
func TestNotesSayWhatToCheck(t *testing.T) {
	_, loaded := charts(t)
	notes := func(r rendering) string {
		texts, err := r.render(loaded)
		if err != nil {
			t.Fatal(err)
		}
		return texts[path.Join(loaded.Name(), "templates", "NOTES.txt")]
	}
	complete := set(with("etcdDev"), "settings.kubernetesAPI", "https://192.0.2.1:6443")
	for name, of := range map[string]struct {
		rendering
		want, absent []string
	}{
		"defaults": {
			rendering{},
			[]string{"WARNING: settings.kubernetesAPI", "The store has one pod", "rollout status"},
			[]string{"etcdEndpoints"},
		},
		"two stores": {
			rendering{values: set(with(), "workloads.sluiceStore.replicas", 2)}, nil, []string{"The store has one pod"},
		},
		"an etcd without endpoints": {
			rendering{values: with("etcdExternal")}, []string{"WARNING: settings.etcdEndpoints"}, []string{"The store"},
		},
		"an etcd beside the store": {
			rendering{values: set(with(), "settings.etcdEndpoints", "https://192.0.2.1:2379")},
			[]string{"set\ncomponents.etcdExternal.enabled"},
			[]string{"WARNING: settings.etcdEndpoints", "The store"},
		},
		"complete": {
			rendering{values: complete}, []string{"helm test sluice --namespace default"}, []string{"WARNING", "kubectl label"},
		},
		"own namespace": {
			rendering{values: complete, namespace: "sluice-system"},
			[]string{"kubectl label namespace sluice-system pod-security.kubernetes.io/enforce=privileged"},
			nil,
		},
		"uninstall": {rendering{values: with("uninstall")}, []string{"helm uninstall sluice"}, []string{"WARNING"}},
	} {
		got := notes(of.rendering)
		for _, w := range of.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: the notes lack %q:\n%s", name, w, got)
			}
		}
		for _, w := range of.absent {
			if strings.Contains(got, w) {
				t.Errorf("%s: the notes have %q:\n%s", name, w, got)
			}
		}
	}
	all := rendering{namespace: "sluice-system"}.objects(t, loaded)
	if all["Namespace/sluice-system"] != nil {
		t.Error("a release in the namespace sluice-system contains that namespace, which exists before it")
	}
}

// TestEveryValueIsDescribed: in the schema, and if it is in values.yaml, on the page.
func TestEveryValueIsDescribed(t *testing.T) {
	c, _ := charts(t)
	all := leaves(c.values, "")
	if len(all) < 150 {
		t.Fatalf("only %d values", len(all))
	}
	names := map[string]bool{}
	for _, l := range all {
		if l.description == "" {
			t.Errorf("%s has no description", l.path)
		}
		if names[l.path] {
			t.Errorf("%s is there twice", l.path)
		}
		names[l.path] = true
		if page := string(c.page()); !l.hidden && !strings.Contains(page, "| `"+l.path+"` |") {
			t.Errorf("the page of values has no row for %s", l.path)
		}
	}
	if len(slices.Collect(maps.Keys(c.shared))) == 0 {
		t.Error("the services share no setting")
	}
}
