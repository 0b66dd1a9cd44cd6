// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package manifest reads files of policies and services as far as the name of each object, and puts what a service says
// about a document into words of files. What is in an object is for that service to check.
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

// MaxBytes is what a service takes in one call, in bytes.
const MaxBytes = 3 << 20

// maxInput bounds what is read of all files together, in bytes.
const maxInput = 256 << 20

// Document is one object of a stream of YAML or JSON documents.
type Document struct {
	File  string // as the person named it; "-" is standard input
	Index int    // within the file, 1 first
	Item  int    // within the list that the document is, 1 first; 0: it is none
	Line  int    // line of the file that it begins at, 1 first
	text  []byte
	group string              // of its apiVersion
	Key   *policyv1.PolicyKey // as written: the namespace may be missing
	// Service is the service that an endpoint slice says it is of.
	Service string
	// Selector says that spec has a selector.
	Selector bool
}

// Place is how a message names the document.
func (d Document) Place() string {
	if d.Item > 0 {
		return fmt.Sprintf("%s: document %d, item %d (line %d)", fileText(d.File), d.Index, d.Item, d.Line)
	}
	return fmt.Sprintf("%s: document %d (line %d)", fileText(d.File), d.Index, d.Line)
}

// Facts are the file and the document within it, for JSON.
func (d Document) Facts() []message.Fact {
	return []message.Fact{{Key: "file", Value: d.File}, {Key: "document", Value: d.Index}}
}

// fileText is how a message names a file.
func fileText(file string) string {
	if file == "-" {
		return "standard input"
	}
	return file
}

// FileError is why a file, or a document of it, cannot be read as manifests.
type FileError struct {
	File     string
	Document int   // 1 first; 0: the whole file
	Line     int   // at which the document begins
	Err      error // names the file, the document and its line
}

// FileErrors are the files and documents that cannot be read, beside others that
// can.
type FileErrors []FileError

// Files counts the files of which not everything can be read.
func (e FileErrors) Files() int {
	names := make(map[string]struct{})
	for _, f := range e {
		names[f.File] = struct{}{}
	}
	return len(names)
}

// Error has a line for each.
func (e FileErrors) Error() string {
	lines := make([]string, len(e))
	for i, f := range e {
		lines[i] = f.Err.Error()
	}
	return strings.Join(lines, "\n")
}

// Read reads files, directories and standard input, in the order
// given. It looks no deeper than at the name of each object; what is in it is
// for the service to check. With an error of the type FileErrors it
// returns the documents that can be read.
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
				return nil, fmt.Errorf("%s: the files are larger than %d bytes together: divide them", fileText(file),
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
		return nil, fmt.Errorf("%s: no document in it", strings.Join(names, ", "))
	}
	return all, nil
}

// Fits returns an error if the documents are more than a service takes in one call.
func Fits(docs []Document) error {
	size := 0
	for _, d := range docs {
		if size += len(d.text) + len(marker) + 1; size > MaxBytes {
			return fmt.Errorf("%s: the manifests up to here are larger than %d bytes together, which is all that the "+
				"service takes at once", d.Place(), MaxBytes)
		}
	}
	return nil
}

// Only leaves out objects whose group and kind are not wanted, and names them. what
// is what they are not: "no policy". An object without version or kind may be
// wanted: it is kept, for the service to refuse.
func Only(docs []Document, wanted func(group, kind string) bool, what string) (kept []Document, others []string) {
	for _, d := range docs {
		switch {
		case d.Key.GetKind() == "" || d.group == "", wanted(d.group, d.Key.GetKind()):
			kept = append(kept, d)
		case d.group == "cilium.io":
			others = append(others, d.Problem("is a kind of Cilium that Sluice does not implement, and left out; "+
				"what it asks for does not happen"))
		default:
			others = append(others, d.Problem("is "+what+", and left out"))
		}
	}
	return kept, others
}

// manifestFiles are the files that a path stands for: a directory's own YAML
// and JSON files, sorted, without hidden ones and subdirectories.
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
		return nil, fmt.Errorf("%s: no .yaml, .yml or .json file in it", path)
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
	// One byte more than is taken, so that a file too large is noticed.
	content, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	var perr *fs.PathError
	if err != nil && !errors.As(err, &perr) {
		err = fmt.Errorf("read %s: %w", fileText(file), err)
	}
	return content, err
}

// documents are the objects of a file; those of a list stand for it. broken are the
// documents that cannot be read.
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
			if kind != "" && node.Kind == yaml.MappingNode { // items of a typed list need not say it
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

// itemText is an item of a list as a document of its own.
func itemText(node *yaml.Node) ([]byte, error) {
	if refers(node) {
		return nil, errors.New("has an anchor or an alias, which an object of a list may not have")
	}
	return yaml.Marshal(node)
}

// refers reports whether a value, or one within it, is shared with others.
func refers(n *yaml.Node) bool {
	return n.Kind == yaml.AliasNode || n.Anchor != "" || slices.ContainsFunc(n.Content, refers)
}

// scalar is the text of a key that has one.
func scalar(of *yaml.Node, key string) string {
	if at := yamlstream.Field(of, key); at >= 0 && of.Content[at].Kind == yaml.ScalarNode {
		return of.Content[at].Value
	}
	return ""
}

// describe reads line, group and name of an object, as far as it has them.
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
	d.group, _, _ = strings.Cut(scalar(object, "apiVersion"), "/")
}

// marker stands before each document of a stream.
const marker = "---\n"

// Join makes one stream of documents again, in which they have the numbers
// that they have in the list.
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
