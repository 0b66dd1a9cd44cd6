// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// elsewhere are directories whose tests are run by other commands or that contain third-party code: test/k8s is a
// separate module that `make test-k8s` builds, and `scripts/check style` runs the tests of scripts/style, which is in
// no module.
var elsewhere = []string{"bin", "third_party", "test/k8s", "scripts/style"}

// others are the build constraints of files that other commands build: the tags of `make test-kernels`, `make
// test-upgrade`, `make test-hubble` and `make test-browser`.
var others = []string{"modules", "upgrade", "hubble", "browser"}

// satisfied are the build constraints that a part of `make test` satisfies: it tests packages with and without the
// race detector.
var satisfied = []string{"race", "!race", "linux"}

// tree contains what the test files below a directory declare.
type tree struct {
	declared    []test
	constraints []string // constraints that no known run satisfies, with their files
}

// readTree reads every test file below a directory.
func readTree(root string) (*tree, error) {
	t := &tree{}
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		base := d.Name()
		if d.IsDir() {
			hidden := rel != "." && strings.HasPrefix(base, ".")
			if hidden || base == "testdata" || slices.Contains(elsewhere, filepath.ToSlash(rel)) {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(base, "_test.go") {
			return nil
		}
		return t.add(root, file)
	})
	return t, err
}

// add adds the declarations of a file.
func (t *tree) add(root, file string) error {
	source, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if line := constraintOf(source); line != "" && !slices.Contains(satisfied, line) {
		if !slices.Contains(others, line) {
			t.constraints = append(t.constraints, fmt.Sprintf("%s: //go:build %s", file, line))
		}
		return nil
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), file, source, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	pkg, err := importPath(root, filepath.Dir(file))
	if err != nil {
		return err
	}
	for _, decl := range parsed.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && isTest(f) {
			t.declared = append(t.declared, test{pkg, f.Name.Name})
		}
	}
	return nil
}

// constraintOf returns the expression of a file's //go:build line, or an empty string.
func constraintOf(source []byte) string {
	for line := range bytes.Lines(source) {
		text := strings.TrimSpace(string(line))
		if constraint.IsGoBuild(text) {
			return strings.TrimSpace(strings.TrimPrefix(text, "//go:build"))
		}
		if strings.HasPrefix(text, "package ") {
			break
		}
	}
	return ""
}

// isTest reports whether the go command runs a function as a test: its name is Test or Fuzz, or continues with a
// character that is not a lower-case letter, and its only parameter is a *testing.T or *testing.F.
func isTest(f *ast.FuncDecl) bool {
	params := f.Type.Params.List
	if f.Recv != nil || len(params) != 1 || len(params[0].Names) > 1 {
		return false
	}
	star, ok := params[0].Type.(*ast.StarExpr)
	if !ok {
		return false
	}
	selector, ok := star.X.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	for prefix, parameter := range map[string]string{"Test": "T", "Fuzz": "F"} {
		rest, ok := strings.CutPrefix(f.Name.Name, prefix)
		first, _ := utf8.DecodeRuneInString(rest)
		if ok && selector.Sel.Name == parameter && (rest == "" || !unicode.IsLower(first)) {
			return true
		}
	}
	return false
}

// importPath returns the import path of the package in a directory, from the go.mod above it.
func importPath(root, dir string) (string, error) {
	for at := dir; ; at = filepath.Dir(at) {
		content, err := os.ReadFile(filepath.Join(at, "go.mod"))
		if err == nil {
			module, err := moduleOf(content)
			if err != nil {
				return "", fmt.Errorf("%s: %w", filepath.Join(at, "go.mod"), err)
			}
			rel, err := filepath.Rel(at, dir)
			return path.Join(module, filepath.ToSlash(rel)), err
		}
		if rel, err := filepath.Rel(root, at); err != nil || rel == "." {
			return "", fmt.Errorf("%s belongs to no module", dir)
		}
	}
}

func moduleOf(content []byte) (string, error) {
	for lines := bufio.NewScanner(bytes.NewReader(content)); lines.Scan(); {
		if module, ok := strings.CutPrefix(lines.Text(), "module "); ok {
			return strings.TrimSpace(module), nil
		}
	}
	return "", fmt.Errorf("has no line module")
}
