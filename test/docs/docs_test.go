// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package docs tests all documents of the repository together.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`^#{1,6} +(.*)$`)
	// Characters that GitHub removes from anchors. It keeps letters, digits, '-' and '_', and replaces spaces by '-'.
	dropped = regexp.MustCompile(`[^\p{L}\p{N}\-_ ]`)
)

// document contains the anchors and links of a document.
type document struct {
	links   []string
	anchors map[string]bool
}

func read(t *testing.T, path string) document {
	t.Helper()
	content, err := os.ReadFile(path) //nolint:gosec // a document of the repository
	if err != nil {
		t.Fatal(err)
	}
	d := document{anchors: map[string]bool{}}
	code := false
	for line := range strings.Lines(string(content)) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		}
		if code {
			continue
		}
		if h := heading.FindStringSubmatch(line); h != nil {
			d.anchors[anchor(h[1])] = true
		}
		for _, l := range link.FindAllStringSubmatch(line, -1) {
			d.links = append(d.links, l[1])
		}
	}
	return d
}

// anchor returns GitHub's anchor of a heading.
func anchor(heading string) string {
	return strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

// documents returns the paths of all documents of the repository, without third-party ones.
func documents(t *testing.T) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", "third_party", "bin", "node_modules"}, d.Name()):
			return fs.SkipDir
		case filepath.Ext(path) == ".md":
			paths = append(paths, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// TestLinksLeadToHeadings: the heading exists for each link between documents. A test of cmd/sluice covers the files.
func TestLinksLeadToHeadings(t *testing.T) {
	links := 0
	for _, path := range documents(t) {
		for _, l := range read(t, path).links {
			file, name, found := strings.Cut(l, "#")
			if !found || strings.Contains(l, "://") {
				continue
			}
			links++
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if filepath.Ext(target) == ".md" && !read(t, target).anchors[name] {
				t.Errorf("%s links to %s: no such heading", path, l)
			}
		}
	}
	if links < 100 {
		t.Errorf("the documents have %d links to headings", links)
	}
}

// TestMessagesNameSectionsThatExist looks up every section that a Go file names: docs/x.md, "A section".
func TestMessagesNameSectionsThatExist(t *testing.T) {
	named := regexp.MustCompile(`(docs/[a-z/-]+\.md),? \\?"([^"\\]+)\\?"`)
	found := 0
	for _, dir := range []string{"cmd", "devnode", "kit", "kube", "model", "services"} {
		for _, name := range packages(t, dir) {
			for _, m := range named.FindAllStringSubmatch(direct(t, dir+"/"+name), -1) {
				found++
				if !read(t, filepath.Join(root, m[1])).anchors[anchor(m[2])] {
					t.Errorf("%s/%s names the section %q of %s: no such heading", dir, name, m[2], m[1])
				}
			}
		}
	}
	if found < 5 {
		t.Errorf("the code names %d sections", found)
	}
}

// TestEveryDocumentIsInTheIndex: docs/README.md links to each page.
func TestEveryDocumentIsInTheIndex(t *testing.T) {
	index := read(t, filepath.Join(root, "docs", "README.md"))
	for _, pattern := range []string{"docs/*.md", "docs/how-to/*.md", "docs/operations/*.md", "docs/tutorials/*.md"} {
		pages, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(pages) == 0 {
			t.Fatalf("%s: %v, %v", pattern, pages, err)
		}
		for _, page := range pages {
			name, err := filepath.Rel(filepath.Join(root, "docs"), page)
			if err != nil {
				t.Fatal(err)
			}
			listed := func(l string) bool { return l == name || strings.HasPrefix(l, name+"#") }
			if name != "README.md" && !slices.ContainsFunc(index.links, listed) {
				t.Errorf("docs/README.md has no link to %s", name)
			}
		}
	}
}

// TestConsoleOutputIsExecutedOrAnExcerpt: a block with a command and its output is marked as an excerpt, or as console.
// Tests execute the latter.
func TestConsoleOutputIsExecutedOrAnExcerpt(t *testing.T) {
	// the programs that execute console blocks name their documents
	var programs strings.Builder
	for _, dir := range []string{"services/loadbalancer", "test/install", "test/node"} {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			content, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			programs.Write(content)
		}
	}
	checked := 0
	for _, path := range documents(t) {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(path, root+"/")
		inside, kind, before, command, output := false, "", "", false, false
		for number, line := range strings.Split(string(content), "\n") {
			text := strings.TrimSpace(line)
			switch {
			case !inside && strings.HasPrefix(text, "```"):
				inside, kind, command, output = true, strings.TrimPrefix(text, "```"), false, false
			case !inside && text != "":
				before = text
			case inside && text == "```":
				inside = false
				checked++
				switch {
				case kind == "console" && !strings.Contains(programs.String(), `"`+name+`"`):
					t.Errorf("%s:%d: no test executes the console blocks of this document", name, number+1)
				case kind != "console" && command && output && before != "<!-- excerpt -->":
					t.Errorf("%s:%d: a block with output is neither console nor marked as an excerpt", name, number+1)
				}
				before = ""
			case inside && strings.HasPrefix(line, "$ "):
				command = true
			case inside && command && text != "" && !strings.HasPrefix(line, " ") && !strings.HasPrefix(line, "\t") &&
				!strings.HasPrefix(line, "#"):
				output = true
			}
		}
	}
	if checked < 100 {
		t.Errorf("the documents have %d blocks", checked)
	}
}
