// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// maxManifests is what the policy service takes in one call, in bytes.
const maxManifests = 3 << 20

// document is one object of a stream of YAML or JSON documents.
type document struct {
	file  string // as the person named it; "-" is standard input
	index int    // within the file, 1 first
	item  int    // within the list that the document is, 1 first; 0: it is none
	line  int    // line of the file that it begins at, 1 first
	text  []byte
	group string              // of its apiVersion
	key   *policyv1.PolicyKey // as written: the namespace may be missing
}

// place is how a message names the document.
func (d document) place() string {
	if d.item > 0 {
		return fmt.Sprintf("%s: document %d, item %d (line %d)", fileText(d.file), d.index, d.item, d.line)
	}
	return fmt.Sprintf("%s: document %d (line %d)", fileText(d.file), d.index, d.line)
}

// fileText is how a message names a file.
func fileText(file string) string {
	if file == "-" {
		return "standard input"
	}
	return file
}

// fileError is why a file cannot be read as manifests.
type fileError struct {
	file string
	err  error // names the file
}

// fileErrors are the files that cannot be read, beside others that can.
type fileErrors []fileError

// Error has a line for each.
func (e fileErrors) Error() string {
	lines := make([]string, len(e))
	for i, f := range e {
		lines[i] = f.err.Error()
	}
	return strings.Join(lines, "\n")
}

// readManifests reads files, directories and standard input, in the order
// given. It looks no deeper than at the name of each object; what is in it is
// for the policy service to judge. With an error of the type fileErrors it
// returns the documents of the other files.
func readManifests(paths []string, stdin io.Reader) ([]document, error) {
	var (
		all    []document
		broken fileErrors
		size   int
	)
	for _, path := range paths {
		files, err := manifestFiles(path)
		if err != nil {
			broken = append(broken, fileError{path, err})
			continue
		}
		for _, file := range files {
			content, err := readManifest(file, stdin)
			if err != nil {
				broken = append(broken, fileError{file, err})
				continue
			}
			if size += len(content); size > maxManifests {
				return nil, fmt.Errorf("%s: the manifests are larger than %d bytes together, which is all that the policy service takes at once", fileText(file), maxManifests)
			}
			docs, err := splitDocuments(file, content)
			if err != nil {
				broken = append(broken, fileError{file, err})
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

// policiesOnly leaves out objects that are of no kind of policy, and names them.
func policiesOnly(docs []document) (kept []document, others []string) {
	for _, d := range docs {
		if isPolicyKind(d.group, d.key.GetKind()) {
			kept = append(kept, d)
		} else {
			others = append(others, d.problem("is no policy, and left out"))
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

func readManifest(file string, stdin io.Reader) ([]byte, error) {
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
	content, err := io.ReadAll(io.LimitReader(in, maxManifests+1))
	var perr *fs.PathError
	if err != nil && !errors.As(err, &perr) {
		err = fmt.Errorf("read %s: %w", fileText(file), err)
	}
	return content, err
}

// splitDocuments cuts a stream at its document markers, which YAML allows at
// the start of a line and nowhere else. Documents without content are left
// out.
func splitDocuments(file string, content []byte) ([]document, error) {
	var (
		docs    []document
		current = document{file: file, line: 1}
		line    int
		index   int
	)
	end := func() error {
		defer func() { current = document{file: file, line: line + 1} }()
		// Empty lines in front give the parser's messages the file's lines.
		padded := append(bytes.Repeat([]byte("\n"), current.line-1), current.text...)
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
		current.line = node.Content[0].Line
		index++
		current.index = index
		current.describe(node.Content[0])
		items, err := current.items(node.Content[0])
		if err != nil {
			return fmt.Errorf("%s: %w", current.place(), err)
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
func (d *document) describe(object *yaml.Node) {
	meta := field(object, "metadata")
	d.key = &policyv1.PolicyKey{
		Kind: scalar(field(object, "kind")), Namespace: scalar(field(meta, "namespace")), Name: scalar(field(meta, "name")),
	}
	d.group, _, _ = strings.Cut(scalar(field(object, "apiVersion")), "/")
}

// items are the objects of a list, as `kubectl get -o yaml` writes it; of a
// document that is none, the document.
func (d document) items(object *yaml.Node) ([]document, error) {
	list := field(object, "items")
	kind, ok := strings.CutSuffix(d.key.GetKind(), "List")
	if !ok || list == nil || list.Kind != yaml.SequenceNode {
		return []document{d}, nil
	}
	var docs []document
	for i, node := range list.Content {
		one := document{file: d.file, index: d.index, item: i + 1, line: node.Line}
		item := *node
		if kind != "" && node.Kind == yaml.MappingNode { // items of a typed list need not say it
			for _, missing := range []struct{ key, value string }{{"kind", kind}, {"apiVersion", scalar(field(object, "apiVersion"))}} {
				if field(node, missing.key) == nil {
					item.Content = append([]*yaml.Node{
						{Kind: yaml.ScalarNode, Tag: "!!str", Value: missing.key}, {Kind: yaml.ScalarNode, Tag: "!!str", Value: missing.value},
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

// join makes one stream of documents again, in which they have the numbers
// that they have in the list.
func join(docs []document) []byte {
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

// documentField is how the service's messages name a document of a stream, 0
// first, and a field in it.
var documentField = regexp.MustCompile(`^(?:manifests|documents?)\[(\d+)\]\.?(.*)$`)

// inDocuments says in words of files what the service says about a refused
// stream of documents.
func inDocuments(err error, docs []document) error {
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.InvalidArgument {
		return err
	}
	var lines []string
	for _, detail := range st.Details() {
		bad, ok := detail.(*errdetails.BadRequest)
		if !ok {
			continue
		}
		for _, v := range bad.GetFieldViolations() {
			match := documentField.FindStringSubmatch(v.GetField())
			if match == nil {
				lines = append(lines, strings.TrimPrefix(v.GetField()+": "+v.GetDescription(), ": "))
				continue
			}
			text := v.GetDescription()
			if match[2] != "" && !strings.HasPrefix(text, match[2]+": ") {
				text = match[2] + ": " + text
			}
			n, err := strconv.Atoi(match[1])
			if err != nil || n >= len(docs) {
				lines = append(lines, "document "+match[1]+": "+text)
				continue
			}
			lines = append(lines, docs[n].problem(inFiles(text, docs)))
		}
	}
	if len(lines) == 0 {
		return err
	}
	return errors.New(strings.Join(lines, "\n"))
}

// samePolicy is how the service says that two documents have one name.
var samePolicy = regexp.MustCompile(`document (\d+) is the same policy`)

// inFiles replaces numbers of documents in a message by their places.
func inFiles(text string, docs []document) string {
	match := samePolicy.FindStringSubmatch(text)
	if match == nil {
		return text
	}
	n, err := strconv.Atoi(match[1])
	if err != nil || n >= len(docs) {
		return text
	}
	return strings.Replace(text, match[0], "is the same policy as "+docs[n].place(), 1)
}

// problem is a message about the document.
func (d document) problem(text string) string {
	name := keyText(d.key)
	if name != "" {
		name += ": "
	}
	return printable(d.place() + ": " + name + text)
}
