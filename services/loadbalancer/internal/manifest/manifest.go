// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package manifest reads Services and EndpointSlices from YAML and JSON, and reports the location of mistakes.
//
// Texts are read strictly: unknown fields, duplicate fields, values of the wrong type and invalid values are rejected
// with the document and the path of the field. A known field that has no effect in Sluice leads to a note. A document
// may be a list of objects.
//
// An API server has already accepted its objects (OfService, OfSlice). If Sluice does not support a part of such an
// object, it omits that part with a note and uses all other parts. Only an object without a name is rejected.
package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	kjson "sigs.k8s.io/json"

	"github.com/sluice-net/sluice/kit/nearest"
	"github.com/sluice-net/sluice/kit/yamlstream"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest/wire"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Limits on the input, which limit the memory that hostile input can use.
const (
	maxBytes = 3 << 20 // of one document
	maxMarks = 120_000 // characters that can begin a value, in one JSON object or one YAML document
	maxNodes = 200_000 // values of one YAML document, aliases expanded
	maxDepth = 64

	maxViolations = 50
	maxDropped    = 20
	maxRemarks    = 20  // number of notes about parts of an object of an API server
	maxText       = 300 // bytes of a text in a message
)

// Options configure the decoding of manifests.
type Options struct {
	// Namespace is the namespace of objects that do not specify one; if empty, "default".
	Namespace string
	// AllowUnknown drops unknown fields instead of rejecting them.
	AllowUnknown bool
}

// Object is one object of a manifest.
type Object struct {
	Key      service.ObjectKey
	Document int              // from 0; empty documents are not counted
	Service  *service.Service // of a Service
	Slice    *service.Slice   // of an EndpointSlice
	Dropped  []string         // unknown fields that were dropped
	Notes    []string         // messages for its author
}

// name sets the key of a decoded object.
func (o *Object) name(kind service.Kind) {
	o.Key.Kind = kind
	if o.Service != nil {
		o.Key.Name = o.Service.Name
	} else {
		o.Key.Name = o.Slice.Name
	}
}

// Violation is one mistake in a manifest.
type Violation struct {
	Document int    // from 0
	Path     string // such as spec.ports[0].port; empty for the whole document
	Text     string
}

// Where implements rpcerr.Violation.
func (v Violation) Where() (document int, path, mistake string) { return v.Document, v.Path, v.Text }

// Error describes the mistakes in a manifest.
type Error struct {
	// Whole is the error if the text could not be split into documents; Error then has no violations.
	Whole      error
	Violations []Violation
}

// Error returns the violations as one text.
func (e *Error) Error() string {
	if e.Whole != nil {
		return e.Whole.Error()
	}
	var parts []string
	for _, v := range e.Violations {
		text := fmt.Sprintf("document %d: ", v.Document+1)
		if v.Path != "" {
			text += v.Path + ": "
		}
		parts = append(parts, text+v.Text)
	}
	return strings.Join(parts, "; ")
}

// Unreadable is an object or document that cannot be read.
type Unreadable struct {
	// Key identifies the object; the zero value if the document does not identify an object.
	Key service.ObjectKey
	// Service contains the readable parts of a Service.
	Service *service.Service
	// Why is the reason, with the document, its line in the stream and the mistakes.
	Why string
}

// DecodeEach reads the objects of a stream one by one. Objects that cannot be read are returned
// separately.
func (o Options) DecodeEach(data []byte) ([]Object, []Unreadable) {
	d := o.decode(data)
	return d.objects, d.unreadable
}

// Decode reads all objects of a stream of YAML or JSON documents. Its error is an *Error.
func (o Options) Decode(data []byte) ([]Object, error) {
	d := o.decode(data)
	if len(d.violations) > 0 {
		return nil, &Error{Violations: d.violations}
	}
	return d.objects, nil
}

func (o Options) decode(data []byte) *decoder {
	d := &decoder{options: o}
	if o.Namespace == "" {
		d.options.Namespace = "default"
	}
	if d.readAllOnce(data) {
		return d
	}
	if texts, ok := jsonDocuments(data); ok {
		for i, text := range texts {
			d.document(i, text)
		}
	} else {
		_ = yamlstream.Each(data, check, func(y yamlstream.Document) error { // it returns no error
			d.number, d.path, d.line = y.Number, "", y.Line
			if y.Err != nil {
				d.failWhole("", "%v", y.Err)
				return nil
			}
			text, err := toJSON(y.Root)
			if err != nil {
				d.failWhole(err.path, "%s", err.text)
				return nil
			}
			d.document(y.Number, text)
			return nil
		})
	}
	return d
}

// jsonDocuments returns the documents of a stream that contains only JSON, which can be read without building trees. It
// returns false for any other stream.
func jsonDocuments(data []byte) (texts [][]byte, ok bool) {
	for _, chunk := range yamlstream.Chunks(data) {
		chunk = trimMarker(chunk)
		switch {
		case len(chunk) == 0:
		case chunk[0] != '{' || !json.Valid(chunk):
			return nil, false
		default:
			texts = append(texts, chunk)
		}
	}
	return texts, len(texts) > 0
}

// check rejects a text that is too large to be decoded.
func check(text []byte) error {
	if len(text) > maxBytes {
		return fmt.Errorf("document of %d bytes is larger than %d: divide it", len(text), maxBytes)
	}
	if n := yamlstream.Marks(text); n > maxMarks {
		return fmt.Errorf("document has %d characters that can begin a value, more than %d: divide it", n, maxMarks)
	}
	return nil
}

type decoder struct {
	options    Options
	objects    []Object
	violations []Violation
	unreadable []Unreadable
	failed     []string // first mistakes of the object, for unreadable

	// lenient means that the object comes from an API server.
	lenient bool

	// The following fields are the state of the current object.
	number  int
	line    int    // line of the stream at which the document begins; 0: unknown
	remarks int    // number of calls of remark
	path    string // prefix of paths in the document, such as "items[3]."
	dropped []string
	notes   []string
}

// fail records a mistake at a path of the object.
func (d *decoder) fail(path, format string, args ...any) {
	if text := fmt.Sprintf(format, args...); len(d.failed) < maxFailed {
		if at := strings.TrimSuffix(d.path+path, "."); at != "" {
			text = shorten(at) + ": " + text
		}
		d.failed = append(d.failed, shorten(strings.ToValidUTF8(text, "\uFFFD")))
	}
	switch n := len(d.violations); {
	case n > maxViolations:
		return
	case n == maxViolations:
		d.violations = append(d.violations, Violation{Document: d.number, Text: "and more"})
		return
	}
	text := strings.ToValidUTF8(fmt.Sprintf(format, args...), "\uFFFD")
	d.violations = append(d.violations, Violation{d.number, shorten(strings.TrimSuffix(d.path+path, ".")), shorten(text)})
}

// maxFailed limits the number of mistakes in Unreadable.Why.
const maxFailed = 3

// leaveOut adds an object with mistakes to the unreadable ones.
func (d *decoder) leaveOut(key service.ObjectKey, s *service.Service) (bad bool) {
	if len(d.failed) == 0 {
		return false
	}
	at := fmt.Sprintf("document %d", d.number+1)
	if d.line > 0 {
		at += fmt.Sprintf(", line %d", d.line)
	}
	if key.Name.Name != "" {
		at += ", " + key.String()
	}
	d.unreadable = append(d.unreadable, Unreadable{Key: key, Service: s, Why: at + ": " + strings.Join(d.failed, "; ")})
	d.failed = nil
	return true
}

// failWhole records a mistake in a document that does not identify its object.
func (d *decoder) failWhole(path, format string, args ...any) {
	d.fail(path, format, args...)
	d.leaveOut(service.ObjectKey{}, nil)
}

// part records an unusable part of an object. In the text of a manifest, it records a violation. In an object of an
// API server, it records a note, and the caller omits the part.
func (d *decoder) part(path, format string, args ...any) {
	if !d.lenient {
		d.fail(path, format, args...)
		return
	}
	d.remark(path, fmt.Sprintf(format, args...)+": it is left out")
}

// remark adds a note about a part of an object, unless the object already has the maximum number of notes.
func (d *decoder) remark(path, text string) {
	if d.remarks++; d.remarks <= maxRemarks {
		d.notef("%s: %s", path, strings.ToValidUTF8(text, "\uFFFD"))
	}
}

// odd records a contradiction between parts of an object: a violation in the text of a manifest, a note in an object
// of an API server.
func (d *decoder) odd(path, format string, args ...any) {
	if d.lenient {
		d.remark(path, fmt.Sprintf(format, args...))
		return
	}
	d.fail(path, format, args...)
}

func (d *decoder) notef(format string, args ...any) {
	d.notes = append(d.notes, shorten(fmt.Sprintf(format, args...)))
}

// shorten shortens a text from a manifest for messages.
func shorten(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "") + "…"
}

// list is a document that contains several objects.
type list struct {
	wire.Head
	Metadata json.RawMessage   `json:"metadata"`
	Items    []json.RawMessage `json:"items"`
}

// kinds by API version and kind.
var kinds = map[wire.Head]service.Kind{
	{APIVersion: "v1", Kind: "Service"}:                        service.KindService,
	{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}: service.KindSlice,
}

// similarKinds are the kinds for suggestions.
var similarKinds = []nearest.Kind{
	{Name: "Service", Plural: "services"}, {Group: "discovery.k8s.io", Name: "EndpointSlice", Plural: "endpointslices"},
}

func (d *decoder) document(number int, text []byte) {
	if !d.readOnce(number, text) {
		d.examine(number, text)
	}
}

// examine reads a document and finds its mistakes.
func (d *decoder) examine(number int, text []byte) {
	d.number, d.path = number, ""
	if len(text) > maxBytes {
		d.failWhole("", "has %d bytes, more than %d: divide it", len(text), maxBytes)
		return
	}
	h, ok := d.head(text)
	if !ok {
		d.leaveOut(service.ObjectKey{}, nil)
		return
	}
	of, isList := strings.CutSuffix(h.Kind, "List")
	if !isList {
		d.object(h, text)
		return
	}
	var l list
	if !d.strict(text, &l) {
		d.leaveOut(service.ObjectKey{}, nil)
		return
	}
	for i, item := range l.Items {
		d.path = "items[" + strconv.Itoa(i) + "]."
		ih, ok := d.head(item)
		if !ok {
			d.leaveOut(service.ObjectKey{}, nil)
			continue
		}
		if of != "" && ih == (wire.Head{}) { // items of a typed list may omit the kind
			ih = wire.Head{APIVersion: l.APIVersion, Kind: of}
		}
		d.object(ih, item)
	}
}

// head reads version and kind.
func (d *decoder) head(text []byte) (h wire.Head, ok bool) {
	if bytes.Equal(text, []byte("null")) || len(text) == 0 || text[0] != '{' {
		d.fail("", "is not an object")
		return h, false
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(text, &h); err != nil {
		d.typeError(err)
		return h, false
	}
	return h, true
}

func (d *decoder) object(h wire.Head, text []byte) {
	d.dropped, d.notes = nil, nil
	kind, ok := kinds[h]
	switch {
	case ok:
	case h.Kind == "":
		d.failWhole("kind", "is missing")
		return
	case h.APIVersion == "":
		d.failWhole("apiVersion", "is missing")
		return
	default:
		hint := ""
		if k, ok := nearest.KindOf(h.APIVersion, h.Kind, similarKinds); ok && k.Name != h.Kind {
			hint = "; did you mean " + k.Name + "?"
		}
		d.failWhole("kind", "%q of %q is not supported: use v1 Service or discovery.k8s.io/v1 EndpointSlice%s", h.Kind,
			h.APIVersion, hint)
		return
	}
	if n := yamlstream.Marks(text); n > maxMarks {
		d.failWhole("", "has %d characters that can begin a value, more than %d", n, maxMarks)
		return
	}
	out := Object{Document: d.number}
	if kind == service.KindService {
		out.Service = d.service(text)
	} else {
		out.Slice = d.slice(text)
	}
	if len(d.failed) > 0 {
		d.leaveOut(d.lenientOf(kind, text))
		return
	}
	out.Dropped, out.Notes = d.dropped, d.notes
	out.name(kind)
	d.objects = append(d.objects, out)
}

// lenientOf reads the usable parts of an invalid object: its key, and the readable parts of a Service. If the object
// has no valid name, the key is the zero value.
func (d *decoder) lenientOf(kind service.Kind, text []byte) (service.ObjectKey, *service.Service) {
	l := &decoder{lenient: true}
	var meta *wire.Metadata
	var s *service.Service
	check := checkSubdomain
	if kind == service.KindService {
		var in wire.Service
		// UnmarshalCaseSensitivePreserveInts sets all valid fields. The mistakes were recorded before.
		_ = kjson.UnmarshalCaseSensitivePreserveInts(text, &in)
		meta, s, check = &in.Metadata, l.serviceOf(&in), checkLabel
	} else {
		var in struct {
			Metadata wire.Metadata `json:"metadata"`
		}
		_ = kjson.UnmarshalCaseSensitivePreserveInts(text, &in)
		meta = &in.Metadata
	}
	if meta.Namespace == "" {
		meta.Namespace = d.options.Namespace
	}
	if check(meta.Name) != nil || checkLabel(meta.Namespace) != nil {
		return service.ObjectKey{}, nil
	}
	key := service.ObjectKey{Kind: kind, Name: service.Name{Namespace: meta.Namespace, Name: meta.Name}}
	if s != nil {
		s.Name = key.Name
	}
	return key, s
}

// OfService converts a Service of an API server. Parts that Sluice does not support are omitted with notes. It returns
// an *Error if the Service has no name or no namespace.
func OfService(s *wire.Service) (Object, error) {
	d := &decoder{lenient: true}
	return d.one(service.KindService, d.serviceOf(s), nil)
}

// OfSlice converts an EndpointSlice of an API server, with the same rules as OfService.
func OfSlice(s *wire.Slice) (Object, error) {
	d := &decoder{lenient: true}
	return d.one(service.KindSlice, nil, d.sliceOf(s))
}

// one returns the single object that was converted.
func (d *decoder) one(kind service.Kind, s *service.Service, slice *service.Slice) (Object, error) {
	if len(d.violations) > 0 {
		return Object{}, &Error{Violations: d.violations}
	}
	if n := d.remarks - maxRemarks; n > 0 {
		d.notef("%d more notes are left out", n)
	}
	out := Object{Service: s, Slice: slice, Notes: d.notes}
	out.name(kind)
	return out, nil
}

// strict decodes text into a value, and reports whether there were no mistakes.
func (d *decoder) strict(text []byte, into any) bool {
	before := len(d.violations)
	problems, err := kjson.UnmarshalStrict(text, into)
	if err != nil {
		d.typeError(err)
		return false
	}
	for _, p := range problems {
		kind, path := "", p.Error()
		if fields := strings.SplitN(path, `"`, 3); len(fields) == 3 {
			kind, path = strings.TrimSpace(fields[0]), fields[1]
		}
		switch {
		case kind == "unknown field" && d.options.AllowUnknown:
			if len(d.dropped) < maxDropped {
				d.dropped = append(d.dropped, shorten(path))
			}
		case kind == "unknown field":
			d.fail(path, "no such field%s", nearest.Hint(path[strings.LastIndexByte(path, '.')+1:],
				fieldsBeside(reflect.TypeOf(into), path)))
		case kind == "duplicate field":
			d.fail(path, "is given twice")
		default:
			d.fail("", "%s", p)
		}
	}
	return len(d.violations) == before
}

// fieldsBeside returns the names of all fields of the object that contains the field path of a type.
func fieldsBeside(t reflect.Type, path string) (names []string) {
	parents := strings.Split(path, ".")
	for i := 0; ; i++ {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return nil
		}
		fields := make(map[string]reflect.Type)
		for _, f := range reflect.VisibleFields(t) {
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
				fields[name] = f.Type
			}
		}
		if i == len(parents)-1 {
			return slices.Sorted(maps.Keys(fields))
		}
		parent, _, _ := strings.Cut(parents[i], "[") // the parent is an item of a list
		if t = fields[parent]; t == nil {
			return nil
		}
	}
}

// typeError records a value of a wrong type.
func (d *decoder) typeError(err error) {
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		d.fail(wrong.Field, "must be %s, is %s", typeName(wrong.Type.Kind().String()), wrong.Value)
		return
	}
	d.fail("", "%s", strings.TrimPrefix(err.Error(), "json: "))
}

func typeName(kind string) string {
	switch {
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "a whole number"
	case kind == "bool":
		return "true or false"
	case kind == "slice":
		return "a list"
	case kind == "struct", kind == "map":
		return "an object"
	}
	return "a " + kind
}
