// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"
)

// emit returns the lines of a node in block style.
func emit(n *node, indent int) (lines []string) {
	pad := strings.Repeat(" ", indent)
	for _, e := range n.entries {
		if e.lines != nil {
			lines = append(lines, e.lines(indent)...)
			continue
		}
		condition := condition(e.on, e.off)
		if condition != "" {
			lines = append(lines, "{{- if "+condition+" }}")
		}
		switch {
		case n.list:
			lines = append(lines, item(e.node, indent)...)
		case len(e.node.entries) > 0:
			lines = append(lines, pad+e.key+":")
			lines = append(lines, emit(e.node, indent+2)...)
		default:
			text := inline(e.node, indent+2)
			lines = append(lines, pad+quote(e.key)+": "+text)
		}
		if condition != "" {
			lines = append(lines, "{{- end }}")
		}
	}
	return lines
}

// item returns the lines of an item of a list.
func item(n *node, indent int) []string {
	pad := strings.Repeat(" ", indent)
	if len(n.entries) == 0 {
		return []string{pad + "- " + inline(n, indent+2)}
	}
	lines := emit(n, indent+2)
	if strings.HasPrefix(lines[0], "{{-") {
		return append([]string{pad + "-"}, lines...)
	}
	lines[0] = pad + "- " + lines[0][indent+2:]
	return lines
}

// inline returns a scalar or an empty collection as the value after a key. Further lines have the indentation indent.
func inline(n *node, indent int) string {
	switch {
	case n.raw != "":
		return n.raw
	case n.list:
		return "[]"
	case n.entries != nil:
		return "{}"
	case len(n.changed) > 0:
		var b strings.Builder
		for i := len(n.changed) - 1; i >= 0; i-- {
			word := "{{ else if "
			if i == len(n.changed)-1 {
				word = "{{ if "
			}
			b.WriteString(word + enabled(n.changed[i].component) + " }}" + quote(n.changed[i].value))
		}
		return b.String() + "{{ else }}" + quote(n.scalar) + "{{ end }}"
	}
	if s, ok := n.scalar.(string); ok && strings.Contains(strings.TrimSuffix(s, "\n"), "\n") && literal(s) {
		pad := "\n" + strings.Repeat(" ", indent)
		chomp := "|-"
		if strings.HasSuffix(s, "\n") {
			chomp = "|"
		}
		return chomp + pad + strings.ReplaceAll(strings.TrimSuffix(escape(s), "\n"), "\n", pad)
	}
	return quote(n.scalar)
}

// literal reports whether a text can be a literal block without an indicator of its indentation.
func literal(s string) bool {
	return s[0] != ' ' && s[0] != '\n' && !strings.HasSuffix(s, "\n\n") &&
		!strings.Contains(s, " \n") && !strings.Contains(s, "\t")
}

var plain = regexp.MustCompile(`^[A-Za-z0-9/_.][A-Za-z0-9/_. @$()-]*$`)

// quote returns a scalar as YAML on one line, and as a template that yields it.
func quote(v any) string {
	s, ok := v.(string)
	if ok && plain.MatchString(s) && !strings.HasSuffix(s, " ") {
		var parsed any
		if err := yaml.Unmarshal([]byte(s), &parsed); err == nil && parsed == s {
			return s
		}
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // a decoded value
	}
	return escape(strings.TrimSuffix(b.String(), "\n"))
}

// escape returns a template that yields the text.
func escape(s string) string { return strings.ReplaceAll(s, "{{", `{{ "{{" }}`) }

// condition returns the expression for an entry of some components, "" if it is always there.
func condition(on, off []string) string {
	var parts []string
	one := func(components []string) string {
		if len(components) == 1 {
			return enabled(components[0])
		}
		var all []string
		for _, c := range components {
			all = append(all, enabled(c))
		}
		return "(or " + strings.Join(all, " ") + ")"
	}
	if len(on) > 0 {
		parts = append(parts, one(on))
	}
	feature, isFeature := "", false
	if len(off) == 1 {
		feature, isFeature = featureOf(off[0])
	}
	switch {
	case isFeature:
		parts = append(parts, "$.Values.features."+feature)
	case len(off) > 0:
		parts = append(parts, "(not "+one(off)+")")
	}
	if len(parts) == 2 {
		return "and " + parts[0] + " " + parts[1]
	}
	return strings.TrimSuffix(strings.TrimPrefix(strings.Join(parts, ""), "("), ")")
}

// enabled is the expression that is true with a component.
func enabled(component string) string {
	if feature, ok := featureOf(component); ok {
		return fmt.Sprintf("(not $.Values.features.%s)", feature)
	}
	return fmt.Sprintf("$.Values.components.%s.enabled", component)
}
