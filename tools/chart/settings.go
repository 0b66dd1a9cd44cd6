// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

const module = "github.com/sluice-net/sluice/"

// setting is a setting of a service.
type setting struct {
	key, flag, env string
	help           string
	def            string // as the reference shows it
	enum           []string
	kind           string // the Go type, such as []string or time.Duration
}

// settingsOf returns the settings of a service. Types and help texts are from its struct Config. Variables and defaults
// are from the table of the reference, which a test of the service compares with the struct.
func settingsOf(root, service string) ([]setting, error) {
	own, err := typesOf(root, filepath.Join("services", service))
	if err != nil {
		return nil, err
	}
	common, err := typesOf(root, filepath.Join("kit", "process"))
	if err != nil {
		return nil, err
	}
	var all []setting
	for _, from := range []struct {
		page  string
		types map[string]setting
	}{{service, own}, {"process", common}} {
		rows, err := table(filepath.Join(root, "docs", "reference", from.page+".md"))
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			s, ok := from.types[row.key]
			if !ok {
				return nil, fmt.Errorf("docs/reference/%s.md: the row %s is no setting of the code", from.page, row.key)
			}
			delete(from.types, row.key)
			row.env = strings.ReplaceAll(row.env, "<SERVICE>", strings.ToUpper(service))
			row.help, row.enum, row.kind = s.help, s.enum, s.kind
			all = append(all, row)
		}
		for key := range from.types {
			return nil, fmt.Errorf("docs/reference/%s.md has no row for the setting %s", from.page, key)
		}
	}
	return all, nil
}

// table returns the rows of the first table with settings.
func table(page string) (rows []setting, err error) {
	content, err := os.ReadFile(page) //nolint:gosec // a page of the repository
	if err != nil {
		return nil, err
	}
	_, section, _ := strings.Cut(string(content), "\n| key | flag |")
	for line := range strings.Lines(section) {
		switch {
		case line == "\n" && rows != nil:
			return rows, nil
		case !strings.HasPrefix(line, "| `"):
			continue
		}
		cells := strings.Split(strings.ReplaceAll(strings.Trim(strings.TrimSpace(line), "|"), `\|`, "\x00"), "|")
		for i, c := range cells {
			cells[i] = strings.Trim(strings.TrimSpace(strings.ReplaceAll(c, "\x00", "|")), "`")
		}
		rows = append(rows, setting{key: cells[0], flag: cells[1], env: cells[2], def: cells[3]})
	}
	return nil, fmt.Errorf("%s has no table of settings, or it does not end in an empty line", page)
}

// typesOf returns the settings of the struct Config, or settings, of a directory by their keys.
func typesOf(root, dir string) (map[string]setting, error) {
	w := walker{root: root, packages: map[string]*source{}, found: map[string]setting{}}
	pkg, err := w.load(dir)
	if err != nil {
		return nil, err
	}
	name := "Config"
	if pkg.types[name] == nil {
		name = "settings"
	}
	if err := w.walk(dir, name, ""); err != nil {
		return nil, err
	}
	return w.found, nil
}

// walker collects the settings of a struct and of the structs in it.
type walker struct {
	root     string
	packages map[string]*source
	found    map[string]setting
}

// source contains the types that a package declares, with the imports of their files.
type source struct {
	types   map[string]ast.Expr
	imports map[string]map[string]string
}

func (w *walker) load(dir string) (*source, error) {
	if s, ok := w.packages[dir]; ok {
		return s, nil
	}
	s := &source{types: map[string]ast.Expr{}, imports: map[string]map[string]string{}}
	files, err := filepath.Glob(filepath.Join(w.root, dir, "*.go"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: %w", dir, fs.ErrNotExist)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		imports := map[string]string{}
		for _, i := range file.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			as := path[strings.LastIndexByte(path, '/')+1:]
			if i.Name != nil {
				as = i.Name.Name
			}
			imports[as] = path
		}
		for _, d := range file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			for _, spec := range g.Specs {
				t := spec.(*ast.TypeSpec)
				s.types[t.Name.Name], s.imports[t.Name.Name] = t.Type, imports
			}
		}
	}
	w.packages[dir] = s
	return s, nil
}

func (w *walker) walk(dir, name, at string) error {
	pkg, err := w.load(dir)
	if err != nil {
		return err
	}
	of, ok := pkg.types[name].(*ast.StructType)
	if !ok {
		return fmt.Errorf("%s: %s is no struct", dir, name)
	}
	for _, field := range of.Fields.List {
		if field.Tag == nil {
			continue
		}
		text, err := strconv.Unquote(field.Tag.Value)
		if err != nil {
			return err
		}
		tag := reflect.StructTag(text)
		key, ok := tag.Lookup("config")
		if !ok {
			continue
		}
		key = at + strings.TrimSuffix(key, ",inline")
		inner, kind, err := w.resolve(dir, pkg.imports[name], field.Type)
		if err != nil {
			return fmt.Errorf("%s: %s.%s: %w", dir, name, key, err)
		}
		if inner.name != "" {
			prefix := key
			if prefix != "" && !strings.HasSuffix(prefix, ".") {
				prefix += "."
			}
			if err := w.walk(inner.dir, inner.name, prefix); err != nil {
				return err
			}
			continue
		}
		s := setting{key: key, help: tag.Get("help"), kind: kind}
		if e := tag.Get("enum"); e != "" {
			s.enum = strings.Split(e, ",")
		}
		w.found[key] = s
	}
	return nil
}

// group is a struct of settings.
type group struct{ dir, name string }

// resolve returns the group of a field, or the name of its type.
func (w *walker) resolve(dir string, imports map[string]string, t ast.Expr) (group, string, error) {
	switch t := t.(type) {
	case *ast.ArrayType:
		_, kind, err := w.resolve(dir, imports, t.Elt)
		return group{}, "[]" + kind, err
	case *ast.MapType:
		return group{}, "map", nil
	case *ast.Ident:
		pkg, err := w.load(dir)
		if err != nil {
			return group{}, "", err
		}
		return w.named(pkg, dir, t.Name)
	case *ast.SelectorExpr:
		path := imports[t.X.(*ast.Ident).Name]
		in, ok := strings.CutPrefix(path, module)
		if !ok {
			return group{}, path[strings.LastIndexByte(path, '/')+1:] + "." + t.Sel.Name, nil
		}
		pkg, err := w.load(in)
		if err != nil {
			return group{}, "", err
		}
		return w.named(pkg, in, t.Sel.Name)
	}
	return group{}, "", errors.New("a type that a setting cannot have")
}

// named returns the group or the name of a type of the repository or of Go.
func (w *walker) named(pkg *source, dir, name string) (group, string, error) {
	switch of := pkg.types[name].(type) {
	case nil:
		return group{}, name, nil // of Go
	case *ast.StructType:
		if slices.ContainsFunc(of.Fields.List, func(f *ast.Field) bool {
			return f.Tag != nil && strings.Contains(f.Tag.Value, `config:"`)
		}) {
			return group{dir, name}, "", nil
		}
	}
	return group{}, filepath.Base(dir) + "." + name, nil
}
