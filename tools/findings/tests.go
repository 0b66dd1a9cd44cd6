// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// declarations are the test functions of the tree and the strings that can name their subtests.
type declarations struct {
	// packages maps a test function to the directories that declare it, relative to the root.
	packages map[string][]string
	// literals maps a directory to the string literals of its test files, in the form in which `go test` writes
	// subtest names.
	literals map[string]map[string]bool
}

// readTests reads every test file below root, outside of third_party, bin and hidden directories.
func readTests(root string) (*declarations, error) {
	d := &declarations{packages: map[string][]string{}, literals: map[string]map[string]bool{}}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := e.Name()
		if e.IsDir() {
			if path != root && (name == "third_party" || name == "bin" || strings.HasPrefix(name, ".")) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		return d.add(filepath.ToSlash(dir), path)
	})
	return d, err
}

func (d *declarations) add(dir, path string) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	if d.literals[dir] == nil {
		d.literals[dir] = map[string]bool{}
	}
	for _, decl := range file.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || fn.Recv != nil || !isTest(fn.Name.Name) || slices.Contains(d.packages[fn.Name.Name], dir) {
			continue
		}
		d.packages[fn.Name.Name] = append(d.packages[fn.Name.Name], dir)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
			if text, err := strconv.Unquote(l.Value); err == nil {
				d.literals[dir][strings.ReplaceAll(text, " ", "_")] = true
			}
		}
		return true
	})
	return nil
}

func isTest(name string) bool {
	return strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz") || strings.HasPrefix(name, "Benchmark")
}

// missing returns why a test with this name does not exist, or an empty string if it exists. The last element of a
// subtest's name must be a string literal of the package.
func (d *declarations) missing(name string) string {
	function, sub, isSub := strings.Cut(name, "/")
	dirs := d.packages[function]
	if len(dirs) == 0 {
		return "no such test function"
	}
	if isSub {
		last := sub[strings.LastIndex(sub, "/")+1:]
		if !slices.ContainsFunc(dirs, func(dir string) bool { return d.literals[dir][last] }) {
			return fmt.Sprintf("no string literal in the test's package is the subtest name %s", last)
		}
	}
	return ""
}

// show prints the findings and attacks with these ids, with the commands that run their tests. For the id of a
// cause or the number of a round it prints one line for each finding.
func show(w io.Writer, r *record, d *declarations, ids []string) error {
	for _, id := range ids {
		var t tests
		if i := slices.IndexFunc(r.findings, func(f finding) bool { return f.id == id }); i >= 0 {
			f := r.findings[i]
			fmt.Fprintf(w, "%s  %s, %s\n%s\n", f.id, f.severity, f.cause, f.title)
			for _, c := range f.commits {
				fmt.Fprintf(w, "  commit  %s\n", c)
			}
			t = f.tests
		} else if i := slices.IndexFunc(r.attacks, func(a attack) bool { return a.id == id }); i >= 0 {
			a := r.attacks[i]
			fmt.Fprintf(w, "%s\n%s\n  result  %s\n", a.id, a.attack, a.result)
			t = a.tests
		} else if in := r.of(func(f finding) bool { return f.cause == id || strconv.Itoa(f.round) == id }); len(in) > 0 {
			for _, f := range in {
				fmt.Fprintf(w, "%s  %-11s  %s\n", f.id, f.severity, f.title)
			}
		} else {
			return fmt.Errorf("no finding, attack, cause or round is called %s", id)
		}
		for _, name := range t.names {
			function, _, _ := strings.Cut(name, "/")
			for _, dir := range d.packages[function] {
				fmt.Fprintf(w, "  test    go test -count=1 ./%s -run '%s'\n", dir, pattern(name))
			}
		}
		if t.none != "" {
			fmt.Fprintf(w, "  no test: %s\n", t.none)
		}
	}
	return nil
}

// pattern returns the argument of -run that selects one test.
func pattern(name string) string {
	elements := strings.Split(name, "/")
	for i, e := range elements {
		// A quote would end the argument in a shell, so replace it with a pattern.
		elements[i] = "^" + strings.ReplaceAll(e, "'", ".") + "$"
	}
	return strings.Join(elements, "/")
}
