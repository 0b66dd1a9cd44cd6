// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package message converts messages of the services to JSON for programs, and back. It does not use protojson, which
// omits zero values, encodes 64-bit numbers as text, and has no stable output.
//
//   - Keys are the fields' names in lower camel case, in the order of the message. endpoint_index is endpointId.
//   - Zero values are present. A message, an optional field or a member of a oneof that is not set is absent, and so
//     is an enum that is UNSPECIFIED. Lists and maps are never null.
//   - Enums are in lower case without their prefix, with "-" between words. Flags in bits are a list of such names.
//   - Numbers are numbers; the fields in Unbounded are text.
//   - Times are RFC 3339 in UTC. Durations are text such as "1m30s". Bytes are hexadecimal, but a manifest is text.
//   - Labels are SOURCE:KEY=VALUE, sorted.
//   - Deprecated fields are absent.
//   - Keys that a command adds follow the fields of the message.
package message

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Unbounded lists the 64-bit fields that are encoded as text, because their values may reach 2^53. Readers that use
// floating point, such as jq, round larger numbers.
var Unbounded = map[protoreflect.FullName]bool{
	"sluice.ipam.v1.Pool.address_count":  true, // a /64 has 2^64 addresses
	"sluice.ipam.v1.Pool.reserved_count": true, // an excluded range may be as large
	"sluice.ipam.v1.Pool.free_count":     true,
}

// Text lists the fields of type bytes that contain text.
var Text = map[protoreflect.FullName]bool{"sluice.policy.v1.Policy.manifest": true}

// Flags lists the fields that contain named bits, with the names of the bits, lowest bit first.
var Flags = map[protoreflect.FullName][]string{
	"sluice.datapath.v1.Flow.tcp_flags": {"fin", "syn", "rst", "psh", "ack", "urg", "ece", "cwr"},
}

// renamed lists the keys that differ from the names of their fields.
var renamed = map[protoreflect.Name]string{"endpoint_index": "endpointId"}

// Object is a message that encoding/json encodes by the rules of this package.
type Object struct {
	Message proto.Message
	// Facts are additional keys after the fields of the message. A fact with the key of a field replaces the field.
	Facts []Fact
}

// Fact is a key with a value for encoding/json. It is absent if the value is nil.
type Fact struct {
	Key   string
	Value any
}

// Of wraps m for encoding/json.
func Of(m proto.Message, facts ...Fact) Object { return Object{m, facts} }

// Join returns an object that consists of facts only, for a command whose output contains several messages.
func Join(facts ...Fact) Object { return Object{Facts: facts} }

// One is a message as a field of a struct that encoding/json encodes by the rules of this package. With omitzero, an
// unset message is absent.
type One[M proto.Message] struct{ Message M }

// IsZero reports whether the message is not set.
func (o One[M]) IsZero() bool { return !o.Message.ProtoReflect().IsValid() }

// MarshalJSON implements json.Marshaler.
func (o One[M]) MarshalJSON() ([]byte, error) { return Of(o.Message).MarshalJSON() }

// Items are messages that encoding/json encodes and decodes by the rules of this package.
type Items[M proto.Message] []M

// List wraps all for encoding/json.
func List[M proto.Message](all []M) Items[M] { return all }

// MarshalJSON implements json.Marshaler.
func (l Items[M]) MarshalJSON() ([]byte, error) {
	b := []byte{'['}
	var err error
	for i, m := range l {
		if i > 0 {
			b = append(b, ',')
		}
		if b, err = Of(m).Append(b); err != nil {
			return nil, err
		}
	}
	return append(b, ']'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *Items[M]) UnmarshalJSON(data []byte) error {
	var all []json.RawMessage
	if err := json.Unmarshal(data, &all); err != nil {
		return err
	}
	*l = make(Items[M], len(all))
	for i, one := range all {
		var typ M
		(*l)[i], _ = typ.ProtoReflect().New().Interface().(M)
		if err := Unmarshal(one, (*l)[i]); err != nil {
			return err
		}
	}
	return nil
}

// MarshalJSON implements json.Marshaler.
func (o Object) MarshalJSON() ([]byte, error) { return o.Append(nil) }

// Append appends the JSON of the object to b.
func (o Object) Append(b []byte) ([]byte, error) {
	switch {
	case o.Message != nil && o.Message.ProtoReflect().IsValid():
		return appendFields(b, o.Message.ProtoReflect(), o.Facts)
	case len(o.Facts) > 0:
		b, err := appendFacts(append(b, '{'), o.Facts, all)
		return append(b, '}'), err
	}
	return append(b, "null"...), nil
}

// Appender appends its JSON to b.
type Appender interface {
	Append(b []byte) ([]byte, error)
}

// buffers are reused by WriteLine.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// WriteLine writes the JSON of one value as a line, for streams.
func WriteLine(w io.Writer, v Appender) error {
	buffer, _ := buffers.Get().(*[]byte)
	defer buffers.Put(buffer)
	b, err := v.Append((*buffer)[:0])
	if err != nil {
		return err
	}
	*buffer = append(b, '\n')
	_, err = w.Write(*buffer)
	return err
}

// Shown reports whether the field can occur in the JSON of its message.
func Shown(f protoreflect.FieldDescriptor) bool {
	options, ok := f.Options().(*descriptorpb.FieldOptions)
	return !ok || !options.GetDeprecated()
}

// field is the precomputed encoding of a field.
type field struct {
	protoreflect.FieldDescriptor
	name       string
	key        string // with quotes and colon
	presence   bool
	hidesZero  bool // an enum that begins with UNSPECIFIED
	labels     bool
	appendEach func(b []byte, v protoreflect.Value) ([]byte, error)
}

// plans caches the fields of each type of message.
var plans sync.Map // protoreflect.MessageDescriptor → []field

func fieldsOf(d protoreflect.MessageDescriptor) []field {
	if known, ok := plans.Load(d); ok {
		return known.([]field)
	}
	var fields []field
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if !Shown(f) {
			continue
		}
		name := f.JSONName()
		if other := renamed[f.Name()]; other != "" {
			name = other
		}
		fields = append(fields, field{
			FieldDescriptor: f, name: name, key: strconv.Quote(name) + ":", presence: f.HasPresence(),
			hidesZero: f.Kind() == protoreflect.EnumKind && !f.IsList() && strings.HasSuffix(zeroName(f.Enum()), unspecified),
			labels:    f.IsList() && isLabel(f), appendEach: appender(f),
		})
	}
	plans.Store(d, fields)
	return fields
}

func isLabel(f protoreflect.FieldDescriptor) bool {
	return f.Message() != nil && f.Message().FullName() == (*workloadv1.Label)(nil).ProtoReflect().Descriptor().FullName()
}

func appendFields(b []byte, m protoreflect.Message, facts []Fact) ([]byte, error) {
	b = append(b, '{')
	begin := len(b)
	var err error
	fields := fieldsOf(m.Descriptor())
	for i := range fields {
		f := &fields[i]
		if at := slices.IndexFunc(facts, func(x Fact) bool { return x.Key == f.name }); at >= 0 {
			if b, err = appendFacts(b, facts[at:at+1], all); err != nil {
				return b, err
			}
			continue
		}
		if f.presence && !m.Has(f.FieldDescriptor) {
			continue
		}
		v := m.Get(f.FieldDescriptor)
		if f.hidesZero && v.Enum() == 0 {
			continue
		}
		if len(b) > begin {
			b = append(b, ',')
		}
		b = append(b, f.key...)
		if b, err = f.append(b, v); err != nil {
			return b, fmt.Errorf("%s: %w", f.FullName(), err)
		}
	}
	b, err = appendFacts(b, facts, func(x Fact) bool {
		return !slices.ContainsFunc(fields, func(f field) bool { return f.name == x.Key })
	})
	return append(b, '}'), err
}

// appendFacts appends the selected facts to an object.
func appendFacts(b []byte, facts []Fact, which func(Fact) bool) ([]byte, error) {
	var err error
	for _, fact := range facts {
		if fact.Value == nil || !which(fact) {
			continue
		}
		if b[len(b)-1] != '{' {
			b = append(b, ',')
		}
		b = append(strconv.AppendQuote(b, fact.Key), ':')
		if b, err = appendAny(b, fact.Value); err != nil {
			return b, fmt.Errorf("%s: %w", fact.Key, err)
		}
	}
	return b, nil
}

func all(Fact) bool { return true }

func (f *field) append(b []byte, v protoreflect.Value) ([]byte, error) {
	switch {
	case f.IsMap():
		return appendMap(b, f, v.Map())
	case f.labels:
		labels := make([]*workloadv1.Label, v.List().Len())
		for i := range labels {
			labels[i] = v.List().Get(i).Message().Interface().(*workloadv1.Label)
		}
		return appendTexts(b, workload.LabelTexts(labels)), nil
	case f.IsList():
		var err error
		b = append(b, '[')
		for i := range v.List().Len() {
			if i > 0 {
				b = append(b, ',')
			}
			if b, err = f.appendEach(b, v.List().Get(i)); err != nil {
				return b, err
			}
		}
		return append(b, ']'), nil
	}
	return f.appendEach(b, v)
}

// appendMap appends a map as an object, sorted by the text of the keys.
func appendMap(b []byte, f *field, m protoreflect.Map) ([]byte, error) {
	keys := make([]protoreflect.MapKey, 0, m.Len())
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		keys = append(keys, k)
		return true
	})
	slices.SortFunc(keys, func(a, b protoreflect.MapKey) int { return strings.Compare(a.String(), b.String()) })
	b = append(b, '{')
	var err error
	for i, k := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendText(b, k.String()), ':')
		if b, err = f.appendEach(b, m.Get(k)); err != nil {
			return b, err
		}
	}
	return append(b, '}'), nil
}

// appender returns the function that appends one value of a field.
func appender(f protoreflect.FieldDescriptor) func([]byte, protoreflect.Value) ([]byte, error) {
	name := f.FullName()
	if f.IsMap() {
		f = f.MapValue()
	}
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return appendMessage
	case protoreflect.EnumKind:
		texts := textsOf(f.Enum())
		return func(b []byte, v protoreflect.Value) ([]byte, error) {
			return appendText(b, enumText(texts, v.Enum())), nil
		}
	case protoreflect.BytesKind:
		if Text[name] {
			return func(b []byte, v protoreflect.Value) ([]byte, error) { return appendText(b, string(v.Bytes())), nil }
		}
		return func(b []byte, v protoreflect.Value) ([]byte, error) {
			return append(hex.AppendEncode(append(b, '"'), v.Bytes()), '"'), nil
		}
	case protoreflect.StringKind:
		return func(b []byte, v protoreflect.Value) ([]byte, error) { return appendText(b, v.String()), nil }
	case protoreflect.BoolKind:
		return func(b []byte, v protoreflect.Value) ([]byte, error) { return strconv.AppendBool(b, v.Bool()), nil }
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		switch names := Flags[name]; {
		case names != nil:
			return func(b []byte, v protoreflect.Value) ([]byte, error) {
				return appendTexts(b, FlagTexts(names, v.Uint())), nil
			}
		case Unbounded[name]:
			return func(b []byte, v protoreflect.Value) ([]byte, error) {
				return append(strconv.AppendUint(append(b, '"'), v.Uint(), 10), '"'), nil
			}
		}
		return func(b []byte, v protoreflect.Value) ([]byte, error) { return strconv.AppendUint(b, v.Uint(), 10), nil }
	}
	return func(b []byte, v protoreflect.Value) ([]byte, error) { return appendAny(b, v.Interface()) }
}

func appendMessage(b []byte, v protoreflect.Value) ([]byte, error) {
	switch m := v.Message().Interface().(type) {
	case *timestamppb.Timestamp:
		return append(m.AsTime().AppendFormat(append(b, '"'), time.RFC3339Nano), '"'), nil
	case *durationpb.Duration:
		return appendText(b, m.AsDuration().String()), nil
	case *workloadv1.Label:
		return appendText(b, workload.LabelTexts([]*workloadv1.Label{m})[0]), nil
	}
	return appendFields(b, v.Message(), nil)
}

// FlagTexts returns the names of the set bits. A bit without a name becomes its number.
func FlagTexts(names []string, bits uint64) []string {
	set := []string{}
	for i := 0; bits>>i != 0; i++ {
		switch {
		case bits&(1<<i) == 0:
		case i < len(names):
			set = append(set, names[i])
		default:
			set = append(set, strconv.FormatUint(1<<i, 10))
		}
	}
	return set
}

// unspecified is the suffix of the name of an enum's zero value, after the common prefix.
const unspecified = "UNSPECIFIED"

func zeroName(e protoreflect.EnumDescriptor) string { return string(e.Values().Get(0).Name()) }

// enumTexts caches the names of the values of each enum.
var enumTexts sync.Map // protoreflect.EnumDescriptor → map[protoreflect.EnumNumber]string

func textsOf(e protoreflect.EnumDescriptor) map[protoreflect.EnumNumber]string {
	if known, ok := enumTexts.Load(e); ok {
		return known.(map[protoreflect.EnumNumber]string)
	}
	texts := map[protoreflect.EnumNumber]string{}
	for i := range e.Values().Len() {
		v := e.Values().Get(i)
		name := strings.TrimPrefix(string(v.Name()), strings.TrimSuffix(zeroName(e), unspecified))
		if _, there := texts[v.Number()]; !there {
			texts[v.Number()] = strings.ToLower(strings.ReplaceAll(name, "_", "-"))
		}
	}
	enumTexts.Store(e, texts)
	return texts
}

// EnumText returns the name of a value in lower case without the prefix of its enum: "ready" for
// ENDPOINT_STATE_READY. For an unknown value it returns the number.
func EnumText(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	return enumText(textsOf(e), n)
}

func enumText(texts map[protoreflect.EnumNumber]string, n protoreflect.EnumNumber) string {
	if text, ok := texts[n]; ok {
		return text
	}
	return strconv.Itoa(int(n))
}

func appendTexts(b []byte, all []string) []byte {
	b = append(b, '[')
	for i, s := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendText(b, s)
	}
	return append(b, ']')
}

// appendText appends s as encoding/json does, with a fast path for text without escapes.
func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			b, _ = appendAny(b, s) // strings can always be encoded
			return b
		}
	}
	return append(append(append(b, '"'), s...), '"')
}

// appendAny appends v as encoding/json does, without escaping <, > and &.
func appendAny(b []byte, v any) ([]byte, error) {
	w := bytes.NewBuffer(b)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return b, err
	}
	return bytes.TrimSuffix(w.Bytes(), []byte{'\n'}), nil
}
