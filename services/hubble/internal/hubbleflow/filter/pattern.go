// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package filter

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// defaultCluster is the cluster of a node whose name contains no cluster.
const defaultCluster = "default"

// anyName matches every DNS name, including names with underscores.
const anyName = `[-0-9_a-z]+(?:\.[-0-9_a-z]+)*`

// translate writes the regular expression for a pattern. "*" matches any characters.
func translate(out *strings.Builder, pattern string) error {
	pattern = strings.ToLower(strings.TrimSuffix(strings.TrimSpace(pattern), "."))
	if pattern == "" {
		return errors.New("a pattern is empty")
	}
	if strings.HasSuffix(pattern, ".") {
		return fmt.Errorf("%q ends in several dots", pattern)
	}
	for _, r := range pattern {
		switch {
		case r == '.':
			out.WriteString(`\.`)
		case r == '*':
			out.WriteString(`[-.0-9a-z]*`)
		case r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z':
			out.WriteRune(r)
		default:
			return fmt.Errorf("%q: a pattern has letters, digits, '-', '_', '.' and '*'", pattern)
		}
	}
	return nil
}

// compilePatterns compiles patterns to one regular expression that matches if one of the patterns matches.
func compilePatterns(patterns []string, write func(*strings.Builder, string) error) (*regexp.Regexp, error) {
	var out strings.Builder
	out.WriteString(`\A(?:`)
	for i, p := range patterns {
		if i > 0 {
			out.WriteByte('|')
		}
		if err := write(&out, p); err != nil {
			return nil, err
		}
	}
	out.WriteString(`)\z`)
	return regexp.Compile(out.String())
}

// namePattern compiles patterns of names of DNS.
func namePattern(patterns []string) (*regexp.Regexp, error) {
	return compilePatterns(patterns, translate)
}

// nodePattern compiles patterns of nodes: "node", "cluster/node", "cluster/".
func nodePattern(patterns []string) (*regexp.Regexp, error) {
	return compilePatterns(patterns, func(out *strings.Builder, p string) error {
		if p == "" {
			return errors.New("a pattern is empty")
		}
		cluster, node := "", p
		if before, after, ok := strings.Cut(p, "/"); ok {
			cluster, node = before, after
			if strings.Contains(node, "/") {
				return fmt.Errorf("%q has more than one slash", p)
			}
		}
		for i, part := range []string{cluster, node} {
			if i > 0 {
				out.WriteByte('/')
			}
			if part == "" {
				out.WriteString("(?:" + anyName + ")")
			} else if err := translate(out, part); err != nil {
				return err
			}
		}
		return nil
	})
}
