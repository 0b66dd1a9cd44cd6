// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/kit/instance"
)

// Markdown returns the reference table of a service's configuration, generated from the struct, for
// its documentation.
func Markdown[T any](service string, defaults func(instance.Paths) T) (string, error) {
	paths, err := instance.New("")
	if err != nil {
		return "", err
	}
	cfg := defaults(paths)
	fields, err := fieldsOf(&cfg)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("| key | flag | environment | default | meaning |\n|---|---|---|---|---|\n")
	for _, f := range fields {
		def := "`" + f.def + "`"
		if f.def == "" {
			def = ""
		}
		fmt.Fprintf(&b, "| `%s` | `--%s` | `%s` | %s | %s |\n", f.key, f.flag, prefix(service)+f.env, def,
			strings.ReplaceAll(f.meaning(), "|", `\|`))
	}
	return b.String(), nil
}

func (f *field) meaning() string {
	if f.enum != nil {
		return strings.TrimPrefix(f.help+" (one of "+strings.Join(f.enum, ", ")+")", " ")
	}
	return f.help
}

func writeHelp(w io.Writer, service string, paths instance.Paths, fields []*field) {
	fmt.Fprintf(w, "Usage: sluice-%s [flags]\n\nEach flag can also be a key in the file or a variable %s…; flags win over\nvariables, variables over the file.\n\n", service, prefix(service))
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(flag, def, help string) {
		if def != "" {
			help += " [" + def + "]"
		}
		fmt.Fprintf(tw, "  --%s\t%s\n", flag, help)
	}
	row("config", paths.ConfigFile(service), "configuration file; it may be absent unless given here")
	row("instance", "", "name of this copy, part of every directory it uses")
	row("print-config", "", "print the effective configuration as YAML and exit")
	row("version", "", "print the version and exit")
	for _, f := range fields {
		row(f.flag, f.def, f.meaning())
	}
	tw.Flush()
}

// writeYAML writes a file that reproduces this configuration, with the source of each value as a
// comment.
func writeYAML(w io.Writer, eff *Effective, fields []*field) {
	root := &yaml.Node{Kind: yaml.MappingNode}
	groups := map[string]*yaml.Node{"": root}
	var group func(path string) *yaml.Node
	group = func(path string) *yaml.Node {
		if n, ok := groups[path]; ok {
			return n
		}
		parent, name := "", path
		if i := strings.LastIndexByte(path, '.'); i >= 0 {
			parent, name = path[:i], path[i+1:]
		}
		n := &yaml.Node{Kind: yaml.MappingNode}
		p := group(parent)
		p.Content = append(p.Content, scalarNode(name), n)
		groups[path] = n
		return n
	}
	for _, f := range fields {
		parent, name := "", f.key
		if i := strings.LastIndexByte(f.key, '.'); i >= 0 {
			parent, name = f.key[:i], f.key[i+1:]
		}
		var v *yaml.Node
		switch {
		case f.secret:
			continue
		case f.isList():
			v = &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
			for i := range f.value.Len() {
				v.Content = append(v.Content, scalarNode(textOf(f.value.Index(i))))
			}
		case f.isMap():
			v = &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
			for _, kv := range strings.Split(f.text(), ",") {
				if k, e, ok := strings.Cut(kv, "="); ok {
					v.Content = append(v.Content, scalarNode(k), scalarNode(e))
				}
			}
		default:
			v = scalarNode(f.text())
		}
		k := scalarNode(name)
		k.HeadComment = string(f.source)
		p := group(parent)
		p.Content = append(p.Content, k, v)
	}
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	enc.Encode(root) //nolint:errcheck // errors writing to a terminal are visible to the user
	enc.Close()      // as above
}

// scalarNode quotes text that YAML would parse as another type. Reading it back is safe, because
// this package accepts quoted text for every type.
func scalarNode(s string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(s)
	return n
}
