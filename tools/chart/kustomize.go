// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// manifests are the kustomizations of deploy/kubernetes in memory.
type manifests struct{ files filesys.FileSystem }

func readManifests(root string) (manifests, error) {
	m := manifests{filesys.MakeFsInMemory()}
	dir := os.DirFS(filepath.Join(root, "deploy", "kubernetes"))
	err := fs.WalkDir(dir, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(dir, name)
		if err != nil {
			return err
		}
		return m.files.WriteFile("/"+name, content)
	})
	return m, err
}

// object is one object of the API.
type object = map[string]any

// id is the kind and the name of an object, which are unique in these manifests.
func id(o object) string {
	return fmt.Sprintf("%s/%s", o["kind"], o["metadata"].(object)["name"])
}

// build returns the objects of some directories together with components.
func (m manifests) build(resources, components []string) ([]object, error) {
	k := object{
		"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
		"resources": relative(resources), "components": relative(components),
	}
	content, err := json.Marshal(k)
	if err != nil {
		return nil, err
	}
	if err := m.files.WriteFile("/chart/kustomization.yaml", content); err != nil {
		return nil, err
	}
	out, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(m.files, "/chart")
	if err != nil {
		return nil, fmt.Errorf("kustomize %v: %w", append(resources, components...), err)
	}
	var all []object
	for _, r := range out.Resources() {
		o, err := r.Map()
		if err != nil {
			return nil, err
		}
		// Numbers and lists as JSON has them, so that trees can be compared.
		text, err := json.Marshal(o)
		if err != nil {
			return nil, err
		}
		var decoded object
		if err := json.Unmarshal(text, &decoded); err != nil {
			return nil, err
		}
		all = append(all, decoded)
	}
	return all, nil
}

func relative(dirs []string) []string {
	out := []string{}
	for _, d := range dirs {
		out = append(out, path.Join("..", d))
	}
	return out
}

// component is a part of the chart that a value adds.
type component struct {
	name        string // as in values
	description string
	resources   []string // of the kustomization that has it
	components  []string
	// alone means that the workloads of the base are absent with it.
	alone bool
}

// onOthers are the components that change what another component adds. A template of the chart cannot express this.
var onOthers = []string{"hubble-monitoring", "hubble-relay"}

// featureOf returns the value below features that turns a component on when it is false: of the component withoutDns,
// dns.
func featureOf(component string) (name string, ok bool) {
	name, ok = strings.CutPrefix(component, "without")
	if !ok || name == "" {
		return "", false
	}
	return strings.ToLower(name[:1]) + name[1:], true
}

// components lists the components of the manifests, and other directories that the chart offers as components.
func (m manifests) components() ([]component, error) {
	all := []component{
		{name: "etcdDev", resources: []string{"etcd-dev"}},
		{name: "crds", resources: []string{"base", "crds"}},
		{name: "uninstall", resources: []string{"uninstall"}, alone: true},
	}
	entries, err := m.files.ReadDir("/components")
	if err != nil {
		return nil, err
	}
	entries = slices.DeleteFunc(entries, func(dir string) bool { return slices.Contains(onOthers, dir) })
	slices.Sort(entries)
	for i, dir := range entries {
		c := component{name: camel(dir), resources: []string{"base"}, components: []string{path.Join("components", dir)}}
		all = slices.Insert(all, i, c)
	}
	for i, c := range all {
		dir := c.resources[len(c.resources)-1]
		if c.components != nil {
			dir = c.components[0]
		}
		if all[i].description, err = m.description(dir); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// description returns the first sentence of the comment of a kustomization, which describes what the component is; the
// others describe its use by kustomize.
func (m manifests) description(dir string) (string, error) {
	content, err := m.files.ReadFile("/" + dir + "/kustomization.yaml")
	if err != nil {
		return "", err
	}
	var words []string
	for line := range strings.Lines(string(content)) {
		comment, ok := strings.CutPrefix(strings.TrimSpace(line), "#")
		switch {
		case !ok && len(words) > 0:
			sentence, _, _ := strings.Cut(strings.Join(words, " "), ". ")
			return strings.TrimSuffix(sentence, "."), nil
		case ok && !strings.Contains(comment, "SPDX-License-Identifier") && !strings.Contains(comment, "Copyright"):
			words = append(words, strings.Fields(comment)...)
		}
	}
	return "", fmt.Errorf("%s/kustomization.yaml has no comment that describes it", dir)
}

// camel turns etcd-dev into etcdDev.
func camel(name string) string {
	var b strings.Builder
	upper := false
	for _, c := range name {
		switch {
		case c == '-':
			upper = true
			continue
		case upper:
			c = unicode.ToUpper(c)
		}
		upper = false
		b.WriteRune(c)
	}
	return b.String()
}
