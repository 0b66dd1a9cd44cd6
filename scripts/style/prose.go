// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// passage is a comment, a message or a paragraph, with its line breaks.
type passage struct {
	line    int
	text    string
	comment bool
}

var (
	// inline is code in a sentence, or the target of a link.
	inline = regexp.MustCompile("`[^`]*`|\\]\\([^)]*\\)")
	// hash is a comment of a shell script, a YAML file or a Makefile, alone on its line or at its end.
	hash = regexp.MustCompile(`(?:^|\s)##?\s(.*)$`)
	// slashes is a comment of C or proto.
	slashes = regexp.MustCompile(`(?:^|[\s;{,})])(?://|/\*+|\*)(?:\s+(.*?))?\s*(?:\*/.*)?$`)
)

// allProse returns the comments, messages and paragraphs of a file, without code. names are the identifiers of a Go
// file.
func allProse(name, content string) (all []passage, names map[string]bool, err error) {
	switch filepath.Ext(name) {
	case ".md":
		return markdown(content), nil, nil
	case ".go":
		return goProse(name, content)
	case ".c", ".h", ".proto":
		return linesMatching(content, slashes), nil, nil
	}
	return linesMatching(content, hash), nil, nil
}

// markdown returns the text outside of code blocks as one passage. Code is replaced by spaces of the same number of
// lines.
func markdown(content string) []passage {
	lines := strings.Split(content, "\n")
	code := false
	for i, line := range lines {
		if fence := strings.HasPrefix(strings.TrimSpace(line), "```"); fence || code {
			lines[i] = ""
			code = code != fence
		}
	}
	text := inline.ReplaceAllStringFunc(strings.Join(lines, "\n"), func(code string) string {
		return " ` " + strings.Repeat("\n", strings.Count(code, "\n"))
	})
	return []passage{{line: 1, text: text}}
}

// linesMatching returns the texts of the first group of expr. The texts of adjacent lines are one passage.
func linesMatching(content string, expr *regexp.Regexp) (all []passage) {
	last := -1
	for i, line := range strings.Split(content, "\n") {
		m := expr.FindStringSubmatch(line)
		if m == nil || strings.HasPrefix(line, "#!") {
			continue
		}
		if last != i-1 || len(all) == 0 {
			all = append(all, passage{line: i + 1, text: m[1], comment: true})
		} else {
			all[len(all)-1].text += "\n" + m[1]
		}
		last = i
	}
	return all
}

// goProse returns the comments of a Go file, and its string literals of more than one word.
func goProse(name, content string) (all []passage, names map[string]bool, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, content, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	for _, group := range file.Comments {
		first := len(all) // group.Text() would remove lines
		for _, c := range group.List {
			if strings.HasPrefix(c.Text, "//go:") {
				continue
			}
			text := strings.TrimPrefix(strings.TrimPrefix(c.Text, "//"), "/*")
			line := files.Position(c.Pos()).Line
			if last := len(all) - 1; last >= first {
				all[last].text += "\n" + text
			} else {
				all = append(all, passage{line: line, text: text, comment: true})
			}
		}
	}
	names = map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Ident:
			names[n.Name] = true
		case *ast.BasicLit:
			if n.Kind != token.STRING {
				break
			}
			text, err := strconv.Unquote(n.Value)
			if err == nil && strings.Contains(strings.TrimSpace(text), " ") {
				if n.Value[0] != '`' {
					text = strings.ReplaceAll(text, "\n", " ") // one line of the file
				}
				all = append(all, passage{line: files.Position(n.Pos()).Line, text: text})
			}
		}
		return true
	})
	return all, names, nil
}
