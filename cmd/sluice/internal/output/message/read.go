// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Unmarshal decodes JSON that this package wrote, in this version or another, into m. It ignores keys that are not
// fields of m.
func Unmarshal(data []byte, m proto.Message) error { return readFields(data, m.ProtoReflect()) }

func readFields(data []byte, m protoreflect.Message) error {
	var values map[string]json.RawMessage
	if err := json.Unmarshal(data, &values); err != nil {
		return err
	}
	for _, f := range fieldsOf(m.Descriptor()) {
		raw, ok := values[f.name]
		if !ok || string(raw) == "null" {
			continue
		}
		if err := f.read(raw, m); err != nil {
			return fmt.Errorf("%s: %w", f.FullName(), err)
		}
	}
	return nil
}

func (f *field) read(raw json.RawMessage, m protoreflect.Message) error {
	switch {
	case f.IsMap():
		return errors.New("maps are not read")
	case f.IsList():
		var all []json.RawMessage
		if err := json.Unmarshal(raw, &all); err != nil {
			return err
		}
		list := m.Mutable(f.FieldDescriptor).List()
		for _, one := range all {
			v, err := f.value(one, list.NewElement)
			if err != nil {
				return err
			}
			list.Append(v)
		}
		return nil
	}
	v, err := f.value(raw, func() protoreflect.Value { return m.NewField(f.FieldDescriptor) })
	if err == nil {
		m.Set(f.FieldDescriptor, v)
	}
	return err
}

// value decodes one value. create returns an empty message.
func (f *field) value(raw json.RawMessage, create func() protoreflect.Value) (v protoreflect.Value, err error) {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		v = create()
		return v, readMessage(raw, v.Message())
	case protoreflect.BoolKind:
		var b bool
		err = json.Unmarshal(raw, &b)
		return protoreflect.ValueOfBool(b), err
	case protoreflect.Uint32Kind:
		if names := Flags[f.FullName()]; names != nil {
			bits, err := readFlags(raw, names)
			return protoreflect.ValueOfUint32(bits), err
		}
		n, err := strconv.ParseUint(string(raw), 10, 32)
		return protoreflect.ValueOfUint32(uint32(n)), err
	case protoreflect.Uint64Kind:
		n, err := strconv.ParseUint(strings.Trim(string(raw), `"`), 10, 64)
		return protoreflect.ValueOfUint64(n), err
	case protoreflect.Int64Kind:
		n, err := strconv.ParseInt(strings.Trim(string(raw), `"`), 10, 64)
		return protoreflect.ValueOfInt64(n), err
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return v, err
	}
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(text), nil
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(enumNumber(f.Enum(), text)), nil
	case protoreflect.BytesKind:
		if Text[f.FullName()] {
			return protoreflect.ValueOfBytes([]byte(text)), nil
		}
		b, err := hex.DecodeString(text)
		return protoreflect.ValueOfBytes(b), err
	}
	return v, fmt.Errorf("%s is not read", f.Kind())
}

func readMessage(raw json.RawMessage, m protoreflect.Message) error {
	var text string
	switch m := m.Interface().(type) {
	case *timestamppb.Timestamp:
		var at time.Time
		err := json.Unmarshal(raw, &at)
		proto.Merge(m, timestamppb.New(at))
		return err
	case *durationpb.Duration:
		if err := json.Unmarshal(raw, &text); err != nil {
			return err
		}
		d, err := time.ParseDuration(text)
		proto.Merge(m, durationpb.New(d))
		return err
	case *workloadv1.Label:
		err := json.Unmarshal(raw, &text)
		source, rest, _ := strings.Cut(text, ":")
		m.Source = source
		m.Key, m.Value, _ = strings.Cut(rest, "=")
		return err
	}
	return readFields(raw, m)
}

func readFlags(raw json.RawMessage, names []string) (bits uint32, err error) {
	var set []string
	if err := json.Unmarshal(raw, &set); err != nil {
		return 0, err
	}
	for _, name := range set {
		if i := slices.Index(names, name); i >= 0 {
			bits |= 1 << i
			continue
		}
		n, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			return 0, err
		}
		bits |= uint32(n)
	}
	return bits, nil
}

// enumNumber returns the number of the enum value with this text, or UNSPECIFIED for a name of a newer version.
func enumNumber(e protoreflect.EnumDescriptor, text string) protoreflect.EnumNumber {
	for n, name := range textsOf(e) {
		if name == text {
			return n
		}
	}
	n, _ := strconv.ParseInt(text, 10, 32)
	return protoreflect.EnumNumber(n)
}
