// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

// pairs are the messages of this package and their counterparts in the API.
var pairs = []struct {
	api  proto.Message
	ours Message
	read bool // an answer: of it, only what the plugin reads is listed
}{
	{&ipamv1.AllocateRequest{}, &AllocateRequest{}, false},
	{&ipamv1.AllocateResponse{}, &AllocateResponse{}, true},
	{&ipamv1.ReleaseRequest{}, &ReleaseRequest{}, false},
	{&ipamv1.ReleaseResponse{}, &ReleaseResponse{}, true},
	{&datapathv1.CreateEndpointRequest{}, &CreateEndpointRequest{}, false},
	{&datapathv1.CreateEndpointResponse{}, &CreateEndpointResponse{}, true},
	{&datapathv1.GetEndpointRequest{}, &GetEndpointRequest{}, false},
	{&datapathv1.GetEndpointResponse{}, &GetEndpointResponse{}, true},
	{&datapathv1.DeleteEndpointRequest{}, &DeleteEndpointRequest{}, false},
	{&datapathv1.DeleteEndpointResponse{}, &DeleteEndpointResponse{}, true},
	{&datapathv1.CheckEndpointRequest{}, &CheckEndpointRequest{}, false},
	{&datapathv1.CheckEndpointResponse{}, &CheckEndpointResponse{}, true},
	{&datapathv1.ReclaimEndpointsRequest{}, &ReclaimEndpointsRequest{}, false},
	{&datapathv1.ReclaimEndpointsResponse{}, &ReclaimEndpointsResponse{}, true},
	{&datapathv1.GetStatusRequest{}, &GetStatusRequest{}, false},
	{&datapathv1.GetStatusResponse{}, &GetStatusResponse{}, true},
	{&grpc_health_v1.HealthCheckRequest{}, &HealthCheckRequest{}, false},
	{&grpc_health_v1.HealthCheckResponse{}, &HealthCheckResponse{}, true},
	{&statuspb.Status{}, &Status{}, true},
	{&errdetails.ErrorInfo{}, &ErrorInfo{}, true},
	{&errdetails.RetryInfo{}, &RetryInfo{}, true},
	{&errdetails.BadRequest{}, &BadRequest{}, true},
	{&errdetails.QuotaFailure{}, &QuotaFailure{}, true},
}

// fresh is an empty message of the type of m.
func fresh(m Message) Message {
	return reflect.New(reflect.TypeOf(m).Elem()).Interface().(Message)
}

func name(p protoreflect.Message) string { return string(p.Descriptor().FullName()) }

// plain normalises a name for comparison.
func plain(name string) string { return strings.ToLower(strings.ReplaceAll(name, "_", "")) }

// ourField returns the struct's field that corresponds to a field of the API.
func ourField(v reflect.Value, fd protoreflect.FieldDescriptor) (reflect.Value, bool) {
	want := plain(string(fd.Name()))
	for i := range v.NumField() {
		if plain(v.Type().Field(i).Name) == want {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// differ compares a message of this package with the API's, field by field and by their names, as far as it has them.
func differ(path string, v reflect.Value, m protoreflect.Message) []string {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return []string{path + " is nil"}
		}
		v = v.Elem()
	}
	var found []string
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		ours, ok := ourField(v, fd)
		if !ok {
			continue
		}
		at := path + "." + string(fd.Name())
		value := m.Get(fd)
		switch {
		case fd.IsMap():
			if ours.Len() != value.Map().Len() {
				found = append(found, fmt.Sprintf("%s has %d entries, want %d", at, ours.Len(), value.Map().Len()))
			}
			value.Map().Range(func(k protoreflect.MapKey, e protoreflect.Value) bool {
				if got := ours.MapIndex(reflect.ValueOf(k.String())); !got.IsValid() || got.String() != e.String() {
					found = append(found, fmt.Sprintf("%s[%q] is %v, want %q", at, k.String(), got, e.String()))
				}
				return true
			})
		case fd.IsList():
			if ours.Len() != value.List().Len() {
				found = append(found, fmt.Sprintf("%s has %d, want %d", at, ours.Len(), value.List().Len()))
				continue
			}
			for j := range ours.Len() {
				found = append(found, differOne(fmt.Sprintf("%s[%d]", at, j), ours.Index(j), fd,
					value.List().Get(j))...)
			}
		case fd.Kind() == protoreflect.MessageKind && !m.Has(fd):
			if ours.Kind() == reflect.Pointer && !ours.IsNil() {
				found = append(found, at+" is there")
			}
		default:
			found = append(found, differOne(at, ours, fd, value)...)
		}
	}
	return found
}

func differOne(at string, ours reflect.Value, fd protoreflect.FieldDescriptor, value protoreflect.Value) []string {
	var got, want any
	switch fd.Kind() {
	case protoreflect.MessageKind:
		return differ(at, ours, value.Message())
	case protoreflect.EnumKind:
		got, want = ours.Int(), int64(value.Enum())
	case protoreflect.BytesKind:
		got, want = string(ours.Bytes()), string(value.Bytes())
	case protoreflect.Int32Kind, protoreflect.Int64Kind:
		got, want = ours.Int(), value.Int()
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		got, want = ours.Uint(), value.Uint()
	default:
		got, want = ours.Interface(), value.Interface()
	}
	if got != want {
		return []string{fmt.Sprintf("%s is %v, want %v", at, got, want)}
	}
	return nil
}

// fill gives every field of m a random value.
func fill(r *rand.Rand, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		switch {
		case fd.IsMap():
			for range 1 + r.IntN(3) {
				m.Mutable(fd).Map().Set(protoreflect.ValueOfString(word(r)).MapKey(), scalar(r, fd.MapValue()))
			}
		case fd.IsList() && fd.Kind() == protoreflect.MessageKind:
			for range 1 + r.IntN(3) {
				fill(r, m.Mutable(fd).List().AppendMutable().Message())
			}
		case fd.IsList():
			for range 1 + r.IntN(3) {
				m.Mutable(fd).List().Append(scalar(r, fd))
			}
		case fd.Kind() == protoreflect.MessageKind:
			fill(r, m.Mutable(fd).Message())
		default:
			m.Set(fd, scalar(r, fd))
		}
	}
}

func word(r *rand.Rand) string {
	return strings.Repeat([]string{"a", "ä", "\x00", "0", "😀"}[r.IntN(5)], 1+r.IntN(200))
}

// scalar is a value that is not the default, often one at the edge of its type.
func scalar(r *rand.Rand, fd protoreflect.FieldDescriptor) protoreflect.Value {
	n := []uint64{1, 127, 128, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 62, 1<<64 - 1, r.Uint64() | 1}[r.IntN(9)]
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(word(r))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(word(r)))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(int32(n | 1)))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(n | 1))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(n))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(n | 1))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(n)
	}
	panic("no value for a " + fd.Kind().String())
}

func encoded(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMessagesAreEqualThereAndBack(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		for _, p := range pairs {
			msg := p.api.ProtoReflect().New()
			fill(r, msg)
			ours := fresh(p.ours)
			b := encoded(t, msg.Interface())
			if err := Unmarshal(b, ours); err != nil {
				t.Fatalf("%s: %v", name(msg), err)
			}
			if found := differ(name(msg), reflect.ValueOf(ours), msg); len(found) > 0 {
				t.Fatalf("%s", strings.Join(found, "\n"))
			}
			if p.read {
				continue
			}
			if got := Marshal(ours); !bytes.Equal(got, b) {
				t.Fatalf("%s: encoded as\n%x, want\n%x", name(msg), got, b)
			}
		}
	}
}

// TestUnknownFieldsAreSkipped: a later version of the API may have unknown fields, also of types that this version does
// not use.
func TestUnknownFieldsAreSkipped(t *testing.T) {
	var unknown []byte
	unknown = protowire.AppendTag(unknown, 1000, protowire.VarintType)
	unknown = protowire.AppendVarint(unknown, 1<<64-1)
	unknown = protowire.AppendTag(unknown, 1001, protowire.Fixed32Type)
	unknown = protowire.AppendFixed32(unknown, 7)
	unknown = protowire.AppendTag(unknown, 1002, protowire.Fixed64Type)
	unknown = protowire.AppendFixed64(unknown, 7)
	unknown = protowire.AppendTag(unknown, 1003, protowire.BytesType)
	unknown = protowire.AppendBytes(unknown, []byte{0xff})
	inner := protowire.AppendGroup(protowire.AppendTag(nil, 1, protowire.StartGroupType), 1, nil)
	inner = protowire.AppendString(protowire.AppendTag(inner, 1, protowire.BytesType), "not the owner")
	unknown = protowire.AppendTag(unknown, 1004, protowire.StartGroupType)
	unknown = protowire.AppendGroup(unknown, 1004, inner)
	unknown = protowire.AppendTag(unknown, protowire.MaxValidNumber, protowire.VarintType)
	unknown = protowire.AppendVarint(unknown, 0)
	// A known number of another type is unknown too.
	unknown = protowire.AppendTag(unknown, 7, protowire.Fixed32Type)
	unknown = protowire.AppendFixed32(unknown, 7)

	want := &datapathv1.CreateEndpointRequest{Network: "n", Mtu: 1400, Addresses: []string{"10.0.0.1"}}
	b := append(append(slices.Clone(unknown), encoded(t, want)...), unknown...)
	if err := proto.Unmarshal(b, &datapathv1.CreateEndpointRequest{}); err != nil {
		t.Fatal(err)
	}
	got := &CreateEndpointRequest{}
	if err := Unmarshal(b, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(Marshal(got), encoded(t, want)) {
		t.Errorf("decoded %+v, want %v", got, want)
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	long := append([]byte{0x08}, bytes.Repeat([]byte{0xff}, 10)...)
	for what, b := range map[string][]byte{
		"a tag alone":             {0x08},
		"a tag that is cut":       {0x88},
		"field 0":                 {0x00, 0x00},
		"a number too large":      append(protowire.AppendVarint(nil, (1<<29)<<3), 0),
		"a varint of 11 bytes":    long,
		"a length beyond the end": {0x0a, 0x05, 'a'},
		"the largest length":      append([]byte{0x0a}, protowire.AppendVarint(nil, 1<<64-1)...),
		"fixed64 that is cut":     {0x09, 1, 2, 3, 4, 5, 6, 7},
		"fixed32 that is cut":     {0x0d, 1, 2, 3},
		"type 6":                  {0x0e, 0},
		"a group's end":           {0x0c},
		"a group without an end":  {0x0b, 0x08, 0x00},
		"another group's end":     {0x0b, 0x14},
		"1000 groups":             bytes.Repeat([]byte{0x0b}, 1000),
		"text that is not UTF-8":  {0x12, 0x01, 0xff},
		"inside a message":        {0x0a, 0x02, 0x0a, 0x09},
	} {
		if err := Unmarshal(b, &CreateEndpointRequest{}); err == nil || !strings.Contains(err.Error(), "malformed") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestDurationsAndTimesAreThoseOfProtobuf(t *testing.T) {
	for _, d := range []time.Duration{0, 1, -1, time.Second, -time.Second - 1, 1<<63 - 1, -1 << 62} {
		api := durationpb.New(d)
		ours := &Duration{Seconds: api.GetSeconds(), Nanos: api.GetNanos()}
		if got := ours.Duration(); got != d && d != 1<<63-1 || got <= 0 && d > 0 {
			t.Errorf("%s is read as %s", d, got)
		}
	}
	for _, huge := range []int64{1<<63 - 1, -1 << 63} {
		if got, want := (&Duration{Seconds: huge}).Duration(),
			(&durationpb.Duration{Seconds: huge}).AsDuration(); got != want {
			t.Errorf("%d s are read as %s, want %s", huge, got, want)
		}
	}
}

// FuzzUnmarshal: the generated code decodes the same messages as the protobuf library, with the same result.
func FuzzUnmarshal(f *testing.F) {
	r := rand.New(rand.NewPCG(5, 6))
	for i, p := range pairs {
		msg := p.api.ProtoReflect().New()
		fill(r, msg)
		f.Add(i, encoded(f, msg.Interface()))
	}
	f.Add(4, bytes.Repeat([]byte{0x0b}, 200))
	f.Fuzz(func(t *testing.T, i int, b []byte) {
		if i < 0 {
			return
		}
		p := pairs[i%len(pairs)]
		api, ours := p.api.ProtoReflect().New(), fresh(p.ours)
		want, err := proto.Unmarshal(b, api.Interface()), Unmarshal(b, ours)
		if want != nil {
			return // what is skipped here may be wrong inside
		}
		if err != nil {
			if strings.Contains(err.Error(), "groups inside each other") {
				return // protobuf's own bound is higher
			}
			t.Fatalf("%s: %v, the generated code decodes %v", name(api), err, api.Interface())
		}
		if found := differ(name(api), reflect.ValueOf(ours), api); len(found) > 0 {
			t.Fatalf("%s", strings.Join(found, "\n"))
		}
		if !p.read {
			back := p.api.ProtoReflect().New()
			if err := proto.Unmarshal(Marshal(ours), back.Interface()); err != nil {
				t.Fatal(err)
			}
			if found := differ(name(api), reflect.ValueOf(ours), back); len(found) > 0 {
				t.Fatalf("%s", strings.Join(found, "\n"))
			}
		}
	})
}
