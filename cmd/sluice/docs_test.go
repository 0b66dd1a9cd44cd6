// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	quotedPath = regexp.MustCompile("`([A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)+/?)`")
	linkTarget = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
)

// TestDocumentsNameOnlyFilesThatExist checks that every path of the repository in a document exists: paths in
// backquotes and targets of links. Such a path begins with a top directory of the repository.
func TestDocumentsNameOnlyFilesThatExist(t *testing.T) {
	const root = "../.."
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	var top []string
	for _, e := range entries {
		if e.IsDir() && e.Name() != "bin" {
			top = append(top, e.Name())
		}
	}
	found := 0
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); name == "third_party" || name == "bin" || name == ".git" {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".md" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var names []string
		for _, m := range quotedPath.FindAllStringSubmatch(string(text), -1) {
			if first, _, _ := strings.Cut(m[1], "/"); slices.Contains(top, first) {
				names = append(names, filepath.Join(root, m[1]))
			}
		}
		for _, m := range linkTarget.FindAllStringSubmatch(string(text), -1) {
			names = append(names, filepath.Join(filepath.Dir(path), m[1]))
		}
		for _, name := range names {
			found++
			if _, err := os.Stat(name); err != nil {
				t.Errorf("%s names %s: %v", path, name, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 100 {
		t.Errorf("%d paths were found in the documents, want a hundred or more", found)
	}
}
