// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Style checks what no linter here checks. In Go files, a doc comment begins with the name that it documents, and a
// line has at most 120 columns, counting a tab as one. A line of a document has at most 120 columns, too, and a table
// cell 160. Comments, messages and documents avoid constructions that readers have to read twice (english.go), and use
// the terms of docs/glossary.md (glossary.go). The documents for users have a limit of words (words.go). It reads the
// names of files from standard input.
//
// The allow list has a line for each directory with remaining violations:
// "DIRECTORY LONG-LINES UNNAMED-COMMENTS HARD-SENTENCES". The counts include all directories below. A higher count is
// an error. With -shrink, style lowers the counts in the list to the actual ones, and never raises them.
package main

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	allowList = "scripts/style/allowed.txt"
	columns   = 120
	cellWidth = 160 // characters of a table cell in Markdown
	shown     = 20  // number of places listed for each directory
)

// english are the files whose sentences are checked. Those of shell scripts are only compared with the glossary.
var english = []string{".go", ".c", ".h", ".proto", ".md"}

// Kinds of violations, in the order of the columns of the allow list.
const (
	long = iota
	unnamed
	hard
	kinds
)

// found are the violations of each kind below one directory, as "FILE:LINE: what".
type found [kinds][]string

func main() {
	if err := run(len(os.Args) > 1 && os.Args[1] == "-shrink"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(shrink bool) error {
	allowed, err := readAllowed()
	if err != nil {
		return err
	}
	all := map[string]*found{}
	var files []string
	for names := bufio.NewScanner(os.Stdin); names.Scan(); {
		files = append(files, names.Text())
		if !slices.Contains(english, filepath.Ext(names.Text())) {
			continue
		}
		dir := filepath.Dir(names.Text())
		for _, listed := allowed[dir]; !listed && dir != "."; _, listed = allowed[dir] {
			dir = filepath.Dir(dir)
		}
		if all[dir] == nil {
			all[dir] = &found{}
		}
		if err := all[dir].judge(names.Text()); err != nil {
			return err
		}
	}
	if shrink {
		return writeAllowed(allowed, all)
	}
	excess, err := checkGlossary(files)
	if err != nil {
		return err
	}
	tooLong, err := checkWords(files, mostWords)
	if err != nil {
		return err
	}
	excess = append(excess, tooLong...)
	for dir, f := range all {
		for kind, places := range f {
			if len(places) > allowed[dir][kind] {
				excess = append(excess, places[:min(len(places), shown)]...)
				if n := allowed[dir][kind]; n > 0 {
					excess = append(excess, fmt.Sprintf("%s: %d of these, of which %s allows %d", dir, len(places), allowList, n))
				}
			}
		}
	}
	if len(excess) > 0 {
		slices.Sort(excess)
		return fmt.Errorf("%s", strings.Join(excess, "\n"))
	}
	return nil
}

// judge checks one file.
func (f *found) judge(name string) error {
	content, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	f[hard] = append(f[hard], hardSentences(name, string(content))...)
	switch filepath.Ext(name) {
	case ".md":
		f[long] = append(f[long], wideText(name, string(content))...)
		return nil
	case ".go":
	default:
		return nil
	}
	line := 0
	for text := range strings.Lines(string(content)) {
		line++
		if n := utf8.RuneCountInString(strings.TrimRight(text, "\n")); n > columns {
			f[long] = append(f[long], fmt.Sprintf("%s:%d: %d columns, more than %d", name, line, n, columns))
		}
	}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, content, parser.ParseComments)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		documented := ""
		var doc *ast.CommentGroup
		switch d := decl.(type) {
		case *ast.FuncDecl:
			documented, doc = d.Name.Name, d.Doc
		case *ast.GenDecl:
			// The comment of a group documents the whole group.
			if d.Lparen.IsValid() || d.Tok == token.IMPORT {
				continue
			}
			doc = d.Doc
			switch s := d.Specs[0].(type) {
			case *ast.TypeSpec:
				documented = s.Name.Name
			case *ast.ValueSpec:
				documented = s.Names[0].Name
			}
		}
		if documented != "_" && !begins(doc.Text(), documented) {
			at := files.Position(doc.Pos())
			f[unnamed] = append(f[unnamed], fmt.Sprintf("%s:%d: the comment does not begin with %s", name, at.Line, documented))
		}
	}
	return nil
}

// wideText returns the long lines and table cells of a Markdown file outside of code blocks.
func wideText(name, content string) (wide []string) {
	line, code := 0, false
	for text := range strings.Lines(content) {
		line++
		text = strings.TrimSpace(text)
		fence := strings.HasPrefix(text, "```")
		code = code != fence
		switch {
		case code || fence:
		case strings.HasPrefix(text, "|"):
			for cell := range strings.SplitSeq(strings.ReplaceAll(text, `\|`, "/"), "|") {
				if n := utf8.RuneCountInString(strings.TrimSpace(cell)); n > cellWidth {
					wide = append(wide, fmt.Sprintf("%s:%d: a table cell of %d characters, more than %d", name, line, n, cellWidth))
				}
			}
		default:
			if n := utf8.RuneCountInString(text); n > columns {
				wide = append(wide, fmt.Sprintf("%s:%d: %d columns, more than %d", name, line, n, columns))
			}
		}
	}
	return wide
}

// begins reports whether a comment, if there is one, begins with a name or an
// article and the name.
func begins(comment, name string) bool {
	for _, article := range []string{"A ", "An ", "The "} {
		comment = strings.TrimPrefix(comment, article)
	}
	rest, ok := strings.CutPrefix(comment, name)
	next, _ := utf8.DecodeRuneInString(rest)
	return comment == "" || ok && (rest == "" || !token.IsIdentifier("x"+string(next)))
}

func readAllowed() (map[string][kinds]int, error) {
	allowed := map[string][kinds]int{}
	content, err := os.ReadFile(allowList)
	if err != nil {
		return nil, err
	}
	for text := range strings.Lines(string(content)) {
		var dir string
		var n [kinds]int
		if _, err := fmt.Sscan(text, &dir, &n[long], &n[unnamed], &n[hard]); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", allowList, text, err)
		}
		allowed[dir] = n
	}
	return allowed, nil
}

func writeAllowed(allowed map[string][kinds]int, all map[string]*found) error {
	var b strings.Builder
	for _, dir := range slices.Sorted(maps.Keys(allowed)) {
		f := all[dir]
		if f == nil {
			continue // the directory no longer exists
		}
		n := allowed[dir]
		for kind, places := range f {
			n[kind] = min(n[kind], len(places))
		}
		if n != [kinds]int{} {
			fmt.Fprintln(&b, dir, n[long], n[unnamed], n[hard])
		}
	}
	return os.WriteFile(allowList, []byte(b.String()), 0o600)
}
