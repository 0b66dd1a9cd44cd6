// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package message writes messages of the services as JSON for programs. The JSON of protobuf itself is not used: it
// leaves zero values out, has every 64-bit number as text, and promises no stable bytes.
//
//   - Keys are the fields' names in lower camel case, in the order of the message.
//   - Zero values are present. A message, an optional field or a member of a oneof that is not set is absent, and so
//     is an enum that is UNSPECIFIED. Lists and maps are never null.
//   - Enums are in lower case without their prefix, with "-" between words.
//   - Numbers are numbers; the fields in Unbounded are text.
//   - Times are RFC 3339 in UTC. Durations are text such as "1m30s". Bytes are hexadecimal.
//   - Labels are SOURCE:KEY=VALUE, sorted.
//   - Deprecated fields are absent.
package message

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Unbounded are the 64-bit fields whose values may reach 2^53, from which on readers with floating point, such as jq,
// round numbers. They are text.
var Unbounded = map[protoreflect.FullName]bool{
	"sluice.ipam.v1.Pool.address_count":  true, // a /64 has 2^64 addresses
	"sluice.ipam.v1.Pool.reserved_count": true, // an exclusion may be as large
	"sluice.ipam.v1.Pool.free_count":     true,
}

// Object is a message that encoding/json writes by the rules of this package.
type Object struct {
	Message proto.Message
	// Facts are additional keys, behind the fields of the message.
	Facts []Fact
}

// Fact is a key with a value that encoding/json can write.
type Fact struct {
	Key   string
	Value any
}

// Of wraps m for encoding/json.
func Of(m proto.Message, facts ...Fact) Object { return Object{m, facts} }

// List returns all as objects.
func List[M proto.Message](all []M) []Object {
	objects := make([]Object, 0, len(all))
	for _, m := range all {
		objects = append(objects, Of(m))
	}
	return objects
}

// MarshalJSON implements json.Marshaler.
func (o Object) MarshalJSON() ([]byte, error) {
	var w bytes.Buffer
	if err := writeFields(&w, o.Message.ProtoReflect(), o.Facts); err != nil {
		return nil, err
	}
	return w.Bytes(), nil
}

// Shown tells whether the JSON of a message can have the field.
func Shown(f protoreflect.FieldDescriptor) bool {
	options, ok := f.Options().(*descriptorpb.FieldOptions)
	return !ok || !options.GetDeprecated()
}

func writeFields(w *bytes.Buffer, m protoreflect.Message, facts []Fact) error {
	w.WriteByte('{')
	first := true
	key := func(name string) error {
		if !first {
			w.WriteByte(',')
		}
		first = false
		err := writeAny(w, name)
		w.WriteByte(':')
		return err
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !Shown(f) || f.HasPresence() && !m.Has(f) || isUnspecified(f, m.Get(f)) {
			continue
		}
		if err := key(f.JSONName()); err != nil {
			return err
		}
		if err := writeField(w, f, m.Get(f)); err != nil {
			return fmt.Errorf("%s: %w", f.FullName(), err)
		}
	}
	for _, fact := range facts {
		if err := key(fact.Key); err != nil {
			return err
		}
		if err := writeAny(w, fact.Value); err != nil {
			return fmt.Errorf("%s: %w", fact.Key, err)
		}
	}
	w.WriteByte('}')
	return nil
}

func isUnspecified(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
	return f.Kind() == protoreflect.EnumKind && !f.IsList() && !f.IsMap() && v.Enum() == 0 &&
		strings.HasSuffix(zeroName(f.Enum()), unspecified)
}

func writeField(w *bytes.Buffer, f protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch {
	case f.IsMap():
		return writeMap(w, f, v.Map())
	case f.IsList() && isLabels(f):
		labels := make([]*workloadv1.Label, v.List().Len())
		for i := range labels {
			labels[i] = v.List().Get(i).Message().Interface().(*workloadv1.Label)
		}
		return writeAny(w, workload.LabelTexts(labels))
	case f.IsList():
		w.WriteByte('[')
		for i := range v.List().Len() {
			if i > 0 {
				w.WriteByte(',')
			}
			if err := writeValue(w, f, v.List().Get(i)); err != nil {
				return err
			}
		}
		w.WriteByte(']')
		return nil
	}
	return writeValue(w, f, v)
}

func isLabels(f protoreflect.FieldDescriptor) bool {
	return f.Message() != nil && f.Message().FullName() == (*workloadv1.Label)(nil).ProtoReflect().Descriptor().FullName()
}

// writeMap writes an object, whose keys are sorted by their text.
func writeMap(w *bytes.Buffer, f protoreflect.FieldDescriptor, m protoreflect.Map) error {
	keys := make([]protoreflect.MapKey, 0, m.Len())
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
		keys = append(keys, k)
		return true
	})
	slices.SortFunc(keys, func(a, b protoreflect.MapKey) int { return strings.Compare(a.String(), b.String()) })
	w.WriteByte('{')
	for i, k := range keys {
		if i > 0 {
			w.WriteByte(',')
		}
		if err := writeAny(w, k.String()); err != nil {
			return err
		}
		w.WriteByte(':')
		if err := writeValue(w, f.MapValue(), m.Get(k)); err != nil {
			return err
		}
	}
	w.WriteByte('}')
	return nil
}

// writeValue writes one value of a field.
func writeValue(w *bytes.Buffer, f protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		switch m := v.Message().Interface().(type) {
		case *timestamppb.Timestamp:
			return writeAny(w, m.AsTime().Format(time.RFC3339Nano))
		case *durationpb.Duration:
			return writeAny(w, m.AsDuration().String())
		case *workloadv1.Label:
			return writeAny(w, workload.LabelTexts([]*workloadv1.Label{m})[0])
		}
		return writeFields(w, v.Message(), nil)
	case protoreflect.EnumKind:
		return writeAny(w, EnumText(f.Enum(), v.Enum()))
	case protoreflect.BytesKind:
		return writeAny(w, hex.EncodeToString(v.Bytes()))
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return writeNumber(w, f, strconv.FormatUint(v.Uint(), 10))
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return writeNumber(w, f, strconv.FormatInt(v.Int(), 10))
	}
	return writeAny(w, v.Interface())
}

func writeNumber(w *bytes.Buffer, f protoreflect.FieldDescriptor, text string) error {
	if Unbounded[f.FullName()] {
		return writeAny(w, text)
	}
	w.WriteString(text)
	return nil
}

// unspecified ends the name of an enum's zero value, behind the prefix that all its values have.
const unspecified = "UNSPECIFIED"

func zeroName(e protoreflect.EnumDescriptor) string { return string(e.Values().Get(0).Name()) }

// EnumText is the name of a value in lower case without the prefix of its enum: "ready" for ENDPOINT_STATE_READY. It
// is the number of a value that this program does not know.
func EnumText(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := e.Values().ByNumber(n)
	if v == nil {
		return strconv.Itoa(int(n))
	}
	name := strings.TrimPrefix(string(v.Name()), strings.TrimSuffix(zeroName(e), unspecified))
	return strings.ToLower(strings.ReplaceAll(name, "_", "-"))
}

// writeAny writes v as encoding/json does, without escapes of <, > and &.
func writeAny(w *bytes.Buffer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	if err == nil {
		w.Truncate(w.Len() - 1) // the end of the line
	}
	return err
}
