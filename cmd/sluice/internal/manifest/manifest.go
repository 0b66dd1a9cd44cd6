// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package manifest reads files of policies as far as the name of each object, and puts what the policy service says
// about a document into words of files. What is in an object is for that service to judge.
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

	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// MaxBytes is what the policy service takes in one call, in bytes.
const MaxBytes = 3 << 20

// Document is one object of a stream of YAML or JSON documents.
type Document struct {
	File  string // as the person named it; "-" is standard input
	Index int    // within the file, 1 first
	Item  int    // within the list that the document is, 1 first; 0: it is none
	Line  int    // line of the file that it begins at, 1 first
	text  []byte
	group string              // of its apiVersion
	Key   *policyv1.PolicyKey // as written: the namespace may be missing
}

// Place is how a message names the document.
func (d Document) Place() string {
	if d.Item > 0 {
		return fmt.Sprintf("%s: document %d, item %d (line %d)", fileText(d.File), d.Index, d.Item, d.Line)
	}
	return fmt.Sprintf("%s: document %d (line %d)", fileText(d.File), d.Index, d.Line)
}

// fileText is how a message names a file.
func fileText(file string) string {
	if file == "-" {
		return "standard input"
	}
	return file
}

// FileError is why a file cannot be read as manifests.
type FileError struct {
	File string
	Err  error // names the file
}

// FileErrors are the files that cannot be read, beside others that can.
type FileErrors []FileError

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
// for the policy service to judge. With an error of the type fileErrors it
// returns the documents of the other files.
func Read(paths []string, stdin io.Reader) ([]Document, error) {
	var (
		all    []Document
		broken FileErrors
		size   int
	)
	for _, path := range paths {
		files, err := manifestFiles(path)
		if err != nil {
			broken = append(broken, FileError{path, err})
			continue
		}
		for _, file := range files {
			content, err := readFile(file, stdin)
			if err != nil {
				broken = append(broken, FileError{file, err})
				continue
			}
			if size += len(content); size > MaxBytes {
				return nil, fmt.Errorf("%s: the manifests are larger than %d bytes together, which is all that the policy "+
					"service takes at once", fileText(file), MaxBytes)
			}
			docs, err := splitDocuments(file, content)
			if err != nil {
				broken = append(broken, FileError{file, err})
				continue
			}
			all = append(all, docs...)
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

// PoliciesOnly leaves out objects that are of no kind of policy, and names them.
func PoliciesOnly(docs []Document) (kept []Document, others []string) {
	for _, d := range docs {
		if policykind.IsPolicy(d.group, d.Key.GetKind()) {
			kept = append(kept, d)
		} else {
			others = append(others, d.Problem("is no policy, and left out"))
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
	content, err := io.ReadAll(io.LimitReader(in, MaxBytes+1))
	var perr *fs.PathError
	if err != nil && !errors.As(err, &perr) {
		err = fmt.Errorf("read %s: %w", fileText(file), err)
	}
	return content, err
}

// splitDocuments cuts a stream at its document markers, which YAML allows at
// the start of a line and nowhere else. Documents without content are left
// out.
func splitDocuments(file string, content []byte) ([]Document, error) {
	var (
		docs    []Document
		current = Document{File: file, Line: 1}
		line    int
		index   int
	)
	end := func() error {
		defer func() { current = Document{File: file, Line: line + 1} }()
		// Empty lines in front give the parser's messages the file's lines.
		padded := append(bytes.Repeat([]byte("\n"), current.Line-1), current.text...)
		decoder := yaml.NewDecoder(bytes.NewReader(padded))
		var node, more yaml.Node
		err := decoder.Decode(&node)
		if err == nil {
			err = decoder.Decode(&more)
		}
		if err == nil {
			err = errors.New("documents need a line of --- between them")
		}
		if !errors.Is(err, io.EOF) {
			return fmt.Errorf("%s: %w", fileText(file), err)
		}
		if len(node.Content) == 0 || node.Content[0].Tag == "!!null" {
			return nil
		}
		current.Line = node.Content[0].Line
		index++
		current.Index = index
		current.describe(node.Content[0])
		items, err := current.items(node.Content[0])
		if err != nil {
			return fmt.Errorf("%s: %w", current.Place(), err)
		}
		docs = append(docs, items...)
		return nil
	}
	for text := range bytes.Lines(content) {
		line++
		if string(bytes.TrimRight(text, " \t\r\n")) == "..." {
			if err := end(); err != nil {
				return nil, err
			}
			continue
		}
		rest, marker := bytes.CutPrefix(text, []byte("---"))
		if marker && (len(rest) == 0 || bytes.ContainsRune([]byte(" \t\r\n"), rune(rest[0]))) {
			line-- // what follows the marker is on its line
			if err := end(); err != nil {
				return nil, err
			}
			line++
			current.text = append(current.text, "   "...)
			current.text = append(current.text, rest...)
			continue
		}
		current.text = append(current.text, text...)
	}
	if err := end(); err != nil {
		return nil, err
	}
	return docs, nil
}

// field is the value of a key of a mapping; nil if there is none.
func field(of *yaml.Node, name string) *yaml.Node {
	if of != nil && of.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(of.Content); i += 2 {
			if of.Content[i].Value == name {
				return of.Content[i+1]
			}
		}
	}
	return nil
}

// scalar is the text of a node that has one.
func scalar(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode {
		return ""
	}
	return n.Value
}

// describe reads the group and the name of an object, as far as it has them.
func (d *Document) describe(object *yaml.Node) {
	meta := field(object, "metadata")
	d.Key = &policyv1.PolicyKey{
		Kind: scalar(field(object, "kind")), Namespace: scalar(field(meta, "namespace")), Name: scalar(field(meta, "name")),
	}
	d.group, _, _ = strings.Cut(scalar(field(object, "apiVersion")), "/")
}

// items are the objects of a list, as `kubectl get -o yaml` writes it; of a
// document that is none, the document.
func (d Document) items(object *yaml.Node) ([]Document, error) {
	list := field(object, "items")
	kind, ok := strings.CutSuffix(d.Key.GetKind(), "List")
	if !ok || list == nil || list.Kind != yaml.SequenceNode {
		return []Document{d}, nil
	}
	var docs []Document
	for i, node := range list.Content {
		one := Document{File: d.File, Index: d.Index, Item: i + 1, Line: node.Line}
		item := *node
		if kind != "" && node.Kind == yaml.MappingNode { // items of a typed list need not say it
			for _, missing := range []struct{ key, value string }{
				{"kind", kind},
				{"apiVersion", scalar(field(object, "apiVersion"))},
			} {
				if field(node, missing.key) == nil {
					item.Content = append([]*yaml.Node{
						{Kind: yaml.ScalarNode, Tag: "!!str", Value: missing.key},
						{Kind: yaml.ScalarNode, Tag: "!!str", Value: missing.value},
					}, item.Content...)
				}
			}
		}
		var err error
		if one.text, err = yaml.Marshal(&item); err != nil {
			return nil, err
		}
		one.describe(&item)
		docs = append(docs, one)
	}
	return docs, nil
}

// Join makes one stream of documents again, in which they have the numbers
// that they have in the list.
func Join(docs []Document) []byte {
	var b bytes.Buffer
	for _, d := range docs {
		b.WriteString("---\n")
		b.Write(d.text)
		if !bytes.HasSuffix(d.text, []byte("\n")) {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}
