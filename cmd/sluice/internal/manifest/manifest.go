// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package manifest reads files of policies and services, and translates the errors of a service about documents into
// files and lines. It parses only the name and kind of each object; the service checks the rest.
package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/kit/yamlstream"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// MaxBytes is the largest size of the manifests in one call to a service.
const MaxBytes = 3 << 20

// maxInput limits the total size of all files in bytes.
const maxInput = 256 << 20

// Document is one object of a stream of YAML or JSON documents.
type Document struct {
	File    string // as given on the command line; "-" is standard input
	Index   int    // in the file, from 1
	Item    int    // in the list, from 1; 0: the document is not a list
	Line    int    // first line in the file, from 1
	text    []byte
	version string              // its apiVersion
	Key     *policyv1.PolicyKey // as written: the namespace may be missing
	// Service is the name of the service of an endpoint slice.
	Service string
	// Selector is true if spec has a selector.
	Selector bool
}

// Place returns the file, the position and the line of the document for messages.
func (d Document) Place() string {
	if d.Item > 0 {
		return fmt.Sprintf("%s: document %d, item %d (line %d)", fileText(d.File), d.Index, d.Item, d.Line)
	}
	return fmt.Sprintf("%s: document %d (line %d)", fileText(d.File), d.Index, d.Line)
}

// Facts returns the file and the position of the document as JSON keys.
func (d Document) Facts() []message.Fact {
	return []message.Fact{{Key: "file", Value: d.File}, {Key: "document", Value: d.Index}}
}

func fileText(file string) string {
	if file == "-" {
		return "standard input"
	}
	return file
}

// FileError is the error of a file or document that cannot be read.
type FileError struct {
	File     string
	Document int   // from 1; 0: the whole file
	Line     int   // first line of the document
	Err      error // includes the file, the document and its line
}

// FileErrors are the errors of all files and documents that cannot be read.
type FileErrors []FileError

// Files returns the number of files with errors.
func (e FileErrors) Files() int {
	names := make(map[string]struct{})
	for _, f := range e {
		names[f.File] = struct{}{}
	}
	return len(names)
}

// Error returns one line per error.
func (e FileErrors) Error() string {
	lines := make([]string, len(e))
	for i, f := range e {
		lines[i] = f.Err.Error()
	}
	return strings.Join(lines, "\n")
}

// Read reads files, directories and standard input, in the given order. If it returns an error of type FileErrors, it
// also returns the readable documents.
func Read(paths []string, stdin io.Reader) ([]Document, error) {
	var (
		all    []Document
		broken FileErrors
		size   int
	)
	for _, path := range paths {
		files, err := manifestFiles(path)
		if err != nil {
			broken = append(broken, FileError{File: path, Err: err})
			continue
		}
		for _, file := range files {
			content, err := readFile(file, stdin)
			if err != nil {
				broken = append(broken, FileError{File: file, Err: err})
				continue
			}
			if size += len(content); size > maxInput {
				return nil, fmt.Errorf("%s: the files together are larger than %d bytes; split them", fileText(file),
					maxInput)
			}
			docs, bad := documents(file, content)
			all, broken = append(all, docs...), append(broken, bad...)
		}
	}
	if len(broken) > 0 {
		return all, broken
	}
	if len(all) == 0 {
		names := make([]string, 0, len(paths))
		for _, path := range paths {
			names = append(names, fileText(path))
		}
		return nil, fmt.Errorf("%s: no documents found", strings.Join(names, ", "))
	}
	return all, nil
}

// Fits returns an error if the documents are larger than MaxBytes.
func Fits(docs []Document) error {
	size := 0
	for _, d := range docs {
		if size += len(d.text) + len(marker) + 1; size > MaxBytes {
			return fmt.Errorf("%s: the manifests up to here are larger than %d bytes, the limit of the service for one "+
				"call", d.Place(), MaxBytes)
		}
	}
	return nil
}

// Only returns the objects of wanted kinds, and a message for each object that it skips. what names the wanted kinds in
// messages: "a policy". It keeps objects without apiVersion or kind, so that the service can refuse them.
func Only(docs []Document, wanted func(apiVersion, kind string) bool, what string) (kept []Document, others []string) {
	for _, d := range docs {
		switch {
		case d.Key.GetKind() == "" || d.version == "", wanted(d.version, d.Key.GetKind()):
			kept = append(kept, d)
		case strings.HasPrefix(d.version, "cilium.io/"):
			others = append(others, d.Problem("is a kind of Cilium that Sluice does not implement; skipped: "+
				"it has no effect"))
		default:
			others = append(others, d.Problem("is not "+what+"; skipped"))
		}
	}
	return kept, others
}

// manifestFiles returns the files at a path: the file itself, or the YAML and JSON files of a directory, sorted,
// without hidden files and subdirectories.
func manifestFiles(path string) ([]string, error) {
	if path == "-" {
		return []string{path}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		extension := filepath.Ext(e.Name())
		if e.IsDir() || strings.HasPrefix(e.Name(), ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, extension) {
			continue
		}
		files = append(files, filepath.Join(path, e.Name()))
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no .yaml, .yml or .json files found", path)
	}
	return files, nil
}

func readFile(file string, stdin io.Reader) ([]byte, error) {
	in := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	// Read one byte more than the limit, to detect files that are too large.
	content, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	var perr *fs.PathError
	if err != nil && !errors.As(err, &perr) {
		err = fmt.Errorf("read %s: %w", fileText(file), err)
	}
	return content, err
}

// documents returns the objects in a file, and the documents that cannot be read. The items of lists are returned as
// objects.
func documents(file string, content []byte) (docs []Document, broken FileErrors) {
	_ = yamlstream.Each(content, nil, func(y yamlstream.Document) error { // it returns no error
		d := Document{File: file, Index: y.Number + 1, Line: y.Line, text: y.Text}
		fail := func(d Document, err error) {
			broken = append(broken, FileError{file, d.Index, d.Line, fmt.Errorf("%s: %w", d.Place(), err)})
		}
		if y.Err != nil {
			fail(d, y.Err)
			return nil
		}
		d.describe(y.Root, y.Before)
		kind, isList := strings.CutSuffix(d.Key.GetKind(), "List")
		at := yamlstream.Field(y.Root, "items")
		if !isList || at < 0 || y.Root.Content[at].Kind != yaml.SequenceNode {
			docs = append(docs, d)
			return nil
		}
		// A list, as `kubectl get -o yaml` writes it.
		for i, node := range y.Root.Content[at].Content {
			one := Document{File: file, Index: d.Index, Item: i + 1}
			if kind != "" && node.Kind == yaml.MappingNode { // items of a typed list may omit the kind
				node = yamlstream.WithDefaults(node, "kind", kind, "apiVersion", scalar(y.Root, "apiVersion"))
			}
			one.describe(node, y.Before)
			var err error
			if one.text, err = itemText(node); err != nil {
				fail(one, err)
				continue
			}
			docs = append(docs, one)
		}
		return nil
	})
	return docs, broken
}

// itemText returns an item of a list as a document.
func itemText(node *yaml.Node) ([]byte, error) {
	if refers(node) {
		return nil, errors.New("anchors and aliases are not allowed in objects of a list")
	}
	return yaml.Marshal(node)
}

// refers reports whether a value has an anchor or an alias.
func refers(n *yaml.Node) bool {
	return n.Kind == yaml.AliasNode || n.Anchor != "" || slices.ContainsFunc(n.Content, refers)
}

// scalar returns the scalar value of a key, or an empty string.
func scalar(of *yaml.Node, key string) string {
	if at := yamlstream.Field(of, key); at >= 0 && of.Content[at].Kind == yaml.ScalarNode {
		return of.Content[at].Value
	}
	return ""
}

// describe sets the line, group, key and other properties of an object.
func (d *Document) describe(object *yaml.Node, before int) {
	meta := &yaml.Node{}
	if at := yamlstream.Field(object, "metadata"); at >= 0 {
		meta = object.Content[at]
	}
	d.Line = before + object.Line
	d.Key = &policyv1.PolicyKey{
		Kind: scalar(object, "kind"), Namespace: scalar(meta, "namespace"), Name: scalar(meta, "name"),
	}
	if at := yamlstream.Field(meta, "labels"); at >= 0 {
		d.Service = scalar(meta.Content[at], "kubernetes.io/service-name")
	}
	if at := yamlstream.Field(object, "spec"); at >= 0 {
		d.Selector = yamlstream.Field(object.Content[at], "selector") >= 0
	}
	d.version = scalar(object, "apiVersion")
}

// marker begins each document of a stream.
const marker = "---\n"

// Join returns a stream with the documents in the order of the list.
func Join(docs []Document) []byte {
	var b bytes.Buffer
	for _, d := range docs {
		if !bytes.HasPrefix(d.text, []byte("---")) {
			b.WriteString(marker)
		}
		b.Write(d.text)
		if !bytes.HasSuffix(d.text, []byte("\n")) {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}
