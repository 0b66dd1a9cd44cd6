// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package manifest decodes YAML and JSON into Go structs and reports the location of mistakes.
//
// It is strict: it rejects values of the wrong type, duplicate keys, and documents that are too large, nested too deep,
// or become too large through aliases. Errors contain the path of the field. Like an API server, it reports unknown
// fields and drops them. Field names come from json tags.
package manifest

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/kit/yamlstream"
)

// Limits of the input. An API server accepts objects of about 1.5 MB. With these limits, hostile input can use at most
// some tens of megabytes of memory.
const (
	MaxBytes = 3 << 20 // one stream of documents in Parse; one document in Each
	maxMarks = 120_000 // characters that can begin a value, see yamlstream.Marks
	maxNodes = 100_000 // values in one document, with aliases expanded
	maxDepth = 64
	maxKey   = 1 << 10   // bytes per key
	maxText  = 256 << 10 // bytes per string; annotations of an object may be as long

	maxProblems = 50  // listed problems
	maxPath     = 300 // bytes of a path in a message
	maxMessage  = 300 // bytes of the rest of a message
)

// Problem is one mistake in a manifest.
type Problem struct {
	Path string // such as spec.ingress[0].toPorts[1]; empty for the whole manifest
	Text string
	// Schema is set if only the published schema forbids the value. The meaning of the value is clear, and a server
	// without the schema would accept it.
	Schema bool
	// Held is set if an API server may contain objects with this mistake, because they were created before it began
	// to reject the mistake. Their meaning is clear.
	Held bool
	// Stops is set if the problem prevented the rest of the document from being read.
	Stops bool
}

// String returns "path: text".
func (p Problem) String() string {
	if p.Path == "" {
		return p.Text
	}
	return p.Path + ": " + p.Text
}

// Problems is the error of a rejected manifest.
type Problems []Problem

// Error joins all problems.
func (ps Problems) Error() string {
	s := make([]string, len(ps))
	for i, p := range ps {
		s[i] = p.String()
	}
	return strings.Join(s, "; ")
}

// Add appends a problem. A long list ends with "and more".
func (ps *Problems) Add(path, format string, args ...any) {
	ps.add(Problem{}, path, format, args...)
}

// AddSchema appends a problem with Schema set.
func (ps *Problems) AddSchema(path, format string, args ...any) {
	ps.add(Problem{Schema: true}, path, format, args...)
}

// AddHeld appends a problem with Held set.
func (ps *Problems) AddHeld(path, format string, args ...any) {
	ps.add(Problem{Held: true}, path, format, args...)
}

func (ps *Problems) add(p Problem, path, format string, args ...any) {
	n := len(*ps)
	if n >= maxProblems {
		last := &(*ps)[n-1]
		last.Schema, last.Held, last.Stops = last.Schema && p.Schema, last.Held && p.Held, last.Stops || p.Stops
		return
	}
	p.Text = "and more"
	if n < maxProblems-1 {
		p.Path, p.Text = shorten(path, maxPath), shorten(fmt.Sprintf(format, args...), maxMessage)
	}
	*ps = append(*ps, p)
}

// shorten cuts a text to about limit bytes.
func shorten(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}

// SchemaOnly reports whether there is at least one problem, and all problems have Schema set.
func (ps Problems) SchemaOnly() bool {
	return len(ps) > 0 && !slices.ContainsFunc(ps, func(p Problem) bool { return !p.Schema })
}

// Meaningful reports whether the meaning of the manifest is clear in spite of the problems, because each problem has
// Schema or Held set.
func (ps Problems) Meaningful() bool {
	return !slices.ContainsFunc(ps, func(p Problem) bool { return !p.Schema && !p.Held })
}

// At reports whether there is a problem at the path, below it or above it, or a problem with Stops.
func (ps Problems) At(path string) bool {
	return slices.ContainsFunc(ps, func(p Problem) bool {
		return p.Stops || Within(p.Path, path) || Within(path, p.Path)
	})
}

// Within reports whether a path equals another path or is below it. Every path is within the empty path.
func Within(path, of string) bool {
	rest, ok := strings.CutPrefix(path, of)
	return ok && (rest == "" || of == "" || rest[0] == '.' || rest[0] == '[')
}

// Err returns the problems as an error, or nil without problems.
func (ps Problems) Err() error {
	if len(ps) == 0 {
		return nil
	}
	return ps
}

// Document is one object that is not decoded yet.
type Document struct {
	APIVersion string
	Kind       string

	Number int    // index in its stream, not counting empty documents
	Line   int    // first line in its stream, counted from 1
	Text   []byte // original text
	// Err is why the document cannot be decoded: it is not YAML, is too large, or is a list. In this case only its
	// position is set.
	Err error

	node  *yaml.Node
	plain bool // see PlainWords
}

// Parse splits a text into YAML or JSON documents, each of which must be an object. Empty documents are skipped.
func Parse(data []byte) ([]Document, error) {
	if err := Check(data); err != nil {
		return nil, err
	}
	roots, err := yamlstream.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("document %d: %w", len(roots)+1, err)
	}
	docs := make([]Document, len(roots))
	for i, root := range roots {
		if docs[i] = newDocument(root); docs[i].Err != nil {
			return nil, fmt.Errorf("document %d: %w", i+1, docs[i].Err)
		}
	}
	return docs, nil
}

// Check returns an error if a manifest has too many bytes, or too many characters that can begin a YAML value.
func Check(data []byte) error {
	if len(data) > MaxBytes {
		return fmt.Errorf("manifest of %d bytes is larger than %d", len(data), MaxBytes)
	}
	if n := yamlstream.Marks(data); n > maxMarks {
		return fmt.Errorf("manifest has %d characters that can begin a value, more than %d: divide it", n, maxMarks)
	}
	return nil
}

// newDocument reads the version and kind of an object. Decode reports other mistakes.
func newDocument(node *yaml.Node) Document {
	d := Document{node: node}
	if node.Kind == yaml.AliasNode {
		d.node = node.Alias
	}
	if d.node.Kind != yaml.MappingNode {
		d.Err = fmt.Errorf("is not an object but %s", describe(node))
		return d
	}
	head := d.head()
	d.APIVersion, d.Kind = head.APIVersion, head.Kind
	return d
}

// head holds the type of an object.
type head struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

func (d Document) head() head {
	var h head
	_, _ = d.Decode(&h) // Decode reports its problems
	return h
}

// PlainWords returns a document that treats unquoted words such as yes and on as text, as earlier versions of Sluice
// did. YAML 1.1, which kubectl uses, reads these words as true and false.
func (d Document) PlainWords() Document {
	d.plain = true
	h := d.head()
	d.APIVersion, d.Kind = h.APIVersion, h.Kind
	return d
}

// Number is a number or a string, such as the port of a NetworkPolicy.
type Number struct {
	IsString bool
	String   string
	Int      int64
}

// Type returns the API version and the kind.
func (d Document) Type() (apiVersion, kind string) { return d.APIVersion, d.Kind }

// Decode decodes the document into a pointer to a struct, and returns the paths of unknown fields.
func (d Document) Decode(into any) (unknown []string, err error) {
	dec := decoder{plain: d.plain}
	dec.value(d.node, reflect.ValueOf(into).Elem(), nil, 0)
	return dec.unknown, dec.problems.Err()
}

type decoder struct {
	problems Problems
	unknown  []string
	nodes    int
	stop     bool
	plain    bool // treat words of YAML 1.1 as text
}

// place is the location of a value. It is converted to text only for messages: aliases can create very many values
// with long paths.
type place struct {
	parent *place
	key    string
	index  int // index in a list, if key is empty
}

func (p *place) field(key string) *place { return &place{parent: p, key: key, index: -1} }
func (p *place) item(i int) *place       { return &place{parent: p, index: i} }

// String returns the path. It omits the start of a long path.
func (p *place) String() string {
	var parts []string
	size := 0
	for ; p != nil && size < maxPath; p = p.parent {
		part := "[" + strconv.Itoa(p.index) + "]"
		if p.index < 0 {
			part = shorten(p.key, maxPath/2)
			if p.parent != nil {
				part = "." + part
			}
		}
		parts = append(parts, part)
		size += len(part)
	}
	if p != nil {
		parts = append(parts, "…")
	}
	slices.Reverse(parts)
	return strings.Join(parts, "")
}

func (d *decoder) fail(at *place, format string, args ...any) {
	d.problems.Add(at.String(), format, args...)
}

var numberType = reflect.TypeFor[Number]()

// over counts a value. It returns true if the document has too many values or is nested too deep. The caller must
// then stop reading.
func (d *decoder) over(at *place, depth int) bool {
	if d.nodes++; d.stop {
		return true
	}
	switch {
	case d.nodes > maxNodes:
		d.problems.add(Problem{Stops: true}, at.String(), "the document has more than %d values", maxNodes)
	case depth > maxDepth:
		d.problems.add(Problem{Stops: true}, at.String(), "is nested more than %d deep", maxDepth)
	default:
		return false
	}
	d.stop = true
	return true
}

// text returns the text of a string; false if it is too long.
func (d *decoder) text(n *yaml.Node, at *place) (string, bool) {
	if len(n.Value) > maxText {
		d.fail(at, "is a text of %d bytes, more than %d", len(n.Value), maxText)
		return "", false
	}
	return n.Value, true
}

// value decodes n into v. Null leaves v unchanged.
func (d *decoder) value(n *yaml.Node, v reflect.Value, at *place, depth int) {
	if d.over(at, depth) {
		return
	}
	if n.Kind == yaml.AliasNode {
		d.value(n.Alias, v, at, depth+1)
		return
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		return
	}
	if v.Type() == numberType {
		d.number(n, v, at)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		d.value(n, v.Elem(), at, depth)
	case reflect.Struct:
		d.structure(n, v, at, depth)
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			d.fail(at, "must be a list, is %s", describe(n))
			return
		}
		s := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
		for i, c := range n.Content {
			d.value(c, s.Index(i), at.item(i), depth+1)
		}
		v.Set(s)
	case reflect.Map:
		d.mapping(n, v, at, depth)
	case reflect.String:
		if !d.isText(n) {
			d.fail(at, "must be a string, is %s%s", describe(n), quoteIt(n))
			return
		}
		if text, ok := d.text(n, at); ok {
			v.SetString(text)
		}
	case reflect.Bool:
		b, ok := truth(n)
		if !ok {
			d.fail(at, "must be true or false, is %s", describe(n))
			return
		}
		v.SetBool(b)
	case reflect.Int64:
		i, ok := integer(n)
		if !ok {
			d.fail(at, "must be a whole number, is %s", describe(n))
			return
		}
		v.SetInt(i)
	case reflect.Interface: // content is not decoded
		d.opaque(n, at, depth)
		v.Set(reflect.ValueOf(true))
	default:
		panic("manifest: no decoding for " + v.Type().String())
	}
}

// truth returns the boolean that a word means in YAML 1.1.
func truth(n *yaml.Node) (is, ok bool) {
	if is, ok := yamlstream.Word(n); ok {
		return is, true
	}
	return is, n.Kind == yaml.ScalarNode && n.ShortTag() == "!!bool" && n.Decode(&is) == nil
}

func isWord(n *yaml.Node) bool { _, ok := yamlstream.Word(n); return ok }

// isText reports whether a value is a string. As in kubectl, unquoted dates are strings.
func (d *decoder) isText(n *yaml.Node) bool {
	if n.Kind != yaml.ScalarNode || isWord(n) && !d.plain {
		return false
	}
	tag := n.ShortTag()
	return tag == "!!str" || tag == "!!timestamp" && n.Style == 0
}

// quoteIt returns the advice at the end of a message about an unquoted value that should be a string.
func quoteIt(n *yaml.Node) string {
	if isWord(n) {
		return ", as kubectl and YAML 1.1 read it: put it into quotes to have it as text"
	}
	return ""
}

func integer(n *yaml.Node) (int64, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" {
		return 0, false
	}
	var i int64
	if n.Decode(&i) != nil {
		return 0, false
	}
	return i, true
}

func (d *decoder) number(n *yaml.Node, v reflect.Value, at *place) {
	if d.isText(n) {
		if text, ok := d.text(n, at); ok {
			v.Set(reflect.ValueOf(Number{IsString: true, String: text}))
		}
		return
	}
	i, ok := integer(n)
	if !ok {
		d.fail(at, "must be a whole number or a string, is %s%s", describe(n), quoteIt(n))
		return
	}
	v.Set(reflect.ValueOf(Number{Int: i}))
}

// pairs calls f for each key of a mapping, and reports duplicate keys as problems.
func (d *decoder) pairs(n *yaml.Node, at *place, f func(key string, value *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		d.fail(at, "must be an object, is %s", describe(n))
		return
	}
	seen := make(map[string]bool, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content) && !d.stop; i += 2 {
		k := n.Content[i]
		if k.Kind == yaml.AliasNode {
			k = k.Alias
		}
		if k.Kind != yaml.ScalarNode {
			d.fail(at, "has a key that is %s", describe(k))
			continue
		}
		if k.ShortTag() == "!!merge" {
			d.fail(at, "uses a merge key (<<), which is not supported: write the keys of the merged object instead")
			continue
		}
		if other := d.otherKey(k); other != "" {
			d.fail(at.field(k.Value), "is a key that kubectl and YAML 1.1 read as %q: put it into quotes", other)
			continue
		}
		if seen[k.Value] {
			d.fail(at.field(k.Value), "is given twice")
			continue
		}
		seen[k.Value] = true
		if len(k.Value) > maxKey {
			d.fail(at.field(k.Value), "is a key of %d bytes, more than %d", len(k.Value), maxKey)
			continue
		}
		f(k.Value, n.Content[i+1])
	}
}

// otherKey returns the text that kubectl reads for an unquoted key that is not a string. It returns "" if kubectl
// reads the same text.
func (d *decoder) otherKey(k *yaml.Node) string {
	if d.plain || k.Style != 0 {
		return ""
	}
	other := ""
	switch k.ShortTag() {
	case "!!null":
		other = "null"
	case "!!int":
		if i, ok := integer(k); ok {
			other = strconv.FormatInt(i, 10)
		}
	case "!!float":
		var f float64
		if k.Decode(&f) == nil {
			other = strconv.FormatFloat(f, 'g', -1, 64)
		}
	default:
		if is, ok := truth(k); ok {
			other = strconv.FormatBool(is)
		}
	}
	if other == k.Value && other != "null" {
		return ""
	}
	return other
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value, at *place, depth int) {
	m := reflect.MakeMap(v.Type())
	d.pairs(n, at, func(key string, value *yaml.Node) {
		e := reflect.New(v.Type().Elem()).Elem()
		d.value(value, e, at.field(key), depth+1)
		m.SetMapIndex(reflect.ValueOf(key), e)
	})
	v.Set(m)
}

func (d *decoder) structure(n *yaml.Node, v reflect.Value, at *place, depth int) {
	d.pairs(n, at, func(key string, value *yaml.Node) {
		f, ok := field(v, key)
		if !ok {
			if len(d.unknown) < 20 {
				d.unknown = append(d.unknown, at.field(key).String())
			}
			d.opaque(value, at.field(key), depth+1)
			return
		}
		d.value(value, f, at.field(key), depth+1)
	})
}

// opaque checks the limits and the rules for keys in a part of the document that is not decoded.
func (d *decoder) opaque(n *yaml.Node, at *place, depth int) {
	if d.over(at, depth) {
		return
	}
	switch n.Kind {
	case yaml.AliasNode:
		d.opaque(n.Alias, at, depth+1)
	case yaml.SequenceNode:
		for i, c := range n.Content {
			d.opaque(c, at.item(i), depth+1)
		}
	case yaml.MappingNode:
		defer func(was bool) { d.plain = was }(d.plain)
		d.plain = true // the meaning of keys does not matter here
		d.pairs(n, at, func(key string, value *yaml.Node) { d.opaque(value, at.field(key), depth+1) })
	}
}

// field finds the field with a json name; embedded structs are part of their parent.
func field(v reflect.Value, name string) (reflect.Value, bool) {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Anonymous {
			if found, ok := field(v.Field(i), name); ok {
				return found, true
			}
			continue
		}
		if f.Tag.Get("json") == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		value := n.Value
		value = shorten(value, 40)
		if isWord(n) {
			return "the truth value " + value
		}
		switch n.ShortTag() {
		case "!!str", "!!timestamp":
			return "the string " + strconv.Quote(value)
		case "!!int", "!!float":
			return "the number " + value
		case "!!bool":
			return "the truth value " + value
		}
		return strconv.Quote(value)
	}
	return "something else"
}
