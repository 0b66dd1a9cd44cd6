// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestMessagesAreWrittenByTheRules(t *testing.T) {
	at := timestamppb.New(time.Unix(1e9, 5000).In(time.FixedZone("", 3600)))
	for what, x := range map[string]struct {
		object message.Object
		want   string
	}{
		"zero values, in the order of the message": {
			message.Of(&datapathv1.FlushConnectionsResponse{BusyCount: 3}),
			`{"flushedCount":0,"terminatedCount":0,"unrememberedCount":0,"busyCount":3}`,
		},
		"a number below zero": {
			message.Of(&datapathv1.MapUsage{Name: "sl_ct", Entries: -1}),
			`{"name":"sl_ct","entries":-1,"maxEntries":0,"bytes":0}`,
		},
		"facts of the command, and text without escapes": {
			message.Of(&datapathv1.DumpMapResponse{Key: "<&>\x1b"}, message.Fact{Key: "node", Value: "n1"}),
			`{"key":"<&>\u001b","value":"","omittedEntryCount":0,"node":"n1"}`,
		},
		"facts instead of fields, and without a value": {
			message.Of(&datapathv1.FlushConnectionsResponse{}, message.Fact{Key: "busyCount", Value: []message.Object{
				message.Of(&datapathv1.DifferenceTarget{}, message.Fact{Key: "a", Value: "<"}),
			}}, message.Fact{Key: "flushedCount"}, message.Fact{Key: "validateOnly"}),
			`{"terminatedCount":0,"unrememberedCount":0,"busyCount":[{"inContainer":false,"a":"<"}]}`,
		},
		"facts alone": {message.Join(message.Fact{Key: "a"}, message.Fact{Key: "b", Value: 1}), `{"b":1}`},
		"a number that may be large, an enum": {
			message.Of(&ipamv1.Pool{
				Prefix: "fd00::/64", AddressCount: math.MaxUint64, LeasedCount: 2, State: ipamv1.RangeState_RANGE_STATE_SERVING,
			}),
			`{"prefix":"fd00::/64","gateway":"","addressCount":"18446744073709551615","reservedCount":"0","leasedCount":2,` +
				`"confirmedCount":0,"quarantinedCount":0,"freeCount":"0","state":"serving","refusedReason":"","primary":false}`,
		},
		"an unknown value of an enum": {
			message.Of(&datapathv1.DifferenceTarget{Kind: 9999}), `{"kind":"9999","inContainer":false}`,
		},
		"messages and enums that are not set": {
			message.Of(&datapathv1.Difference{Target: &datapathv1.DifferenceTarget{}}),
			`{"subject":"","key":"","want":"","have":"","target":{"inContainer":false}}`,
		},
		"times, and a list without elements": {
			message.Of(&policyv1.LearnedName{Addresses: []*policyv1.LearnedAddress{{ExpireTime: at}}}),
			`{"name":"","addresses":[{"address":"","expireTime":"2001-09-09T01:46:40.000005Z"}],"usedBy":[],` +
				`"omittedUseCount":0}`,
		},
		"labels": {
			message.Of(&identityv1.Identity{Number: 300, Labels: []*workloadv1.Label{
				{Source: "k8s", Key: "b"}, {Source: "k8s", Key: "a", Value: "1"},
			}}),
			`{"number":300,"labels":["k8s:a=1","k8s:b"]}`,
		},
	} {
		got, err := json.Marshal(x.object)
		if err != nil || string(got) != strings.NewReplacer("<", `\u003c`, ">", `\u003e`, "&", `\u0026`).Replace(x.want) {
			t.Errorf("%s: %s, %v, want %s", what, got, err, x.want)
		}
	}
}

// TestEveryMessageIsWritten: all fields of all messages can be encoded.
func TestEveryMessageIsWritten(t *testing.T) {
	count := 0
	protoregistry.GlobalTypes.RangeMessages(func(typ protoreflect.MessageType) bool {
		if !strings.HasPrefix(string(typ.Descriptor().FullName()), "sluice.") {
			return true
		}
		count++
		m := typ.New()
		fill(m, 0)
		text, err := json.Marshal(message.Of(m.Interface()))
		if err != nil {
			t.Errorf("%s: %v", typ.Descriptor().FullName(), err)
			return true
		}
		if strings.Contains(string(text), ":null") || strings.Contains(string(text), `"slot"`) {
			t.Errorf("%s: %s", typ.Descriptor().FullName(), text)
		}
		back := typ.New().Interface()
		if err := message.Unmarshal(text, back); err != nil {
			if !strings.Contains(err.Error(), "maps are not read") {
				t.Errorf("%s: %v", typ.Descriptor().FullName(), err)
			}
			return true
		}
		if again, _ := json.Marshal(message.Of(back)); string(again) != string(text) {
			t.Errorf("%s: read and written it is %s, want %s", typ.Descriptor().FullName(), again, text)
		}
		return true
	})
	if count < 100 {
		t.Errorf("%d messages were looked at", count)
	}
}

// fill sets every field of a message, down to a depth.
func fill(m protoreflect.Message, depth int) {
	if depth > 3 {
		return
	}
	switch x := m.Interface().(type) {
	case *timestamppb.Timestamp:
		proto.Merge(x, timestamppb.New(time.Unix(1e9, 0)))
		return
	case *durationpb.Duration:
		proto.Merge(x, durationpb.New(time.Minute))
		return
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		switch f := fields.Get(i); {
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			fill(m.Mutable(f).List().AppendMutable().Message(), depth+1)
		case f.IsList():
		case f.Message() != nil:
			fill(m.Mutable(f).Message(), depth+1)
		default:
			m.Set(f, m.Get(f))
		}
	}
}

func TestMessagesAreReadAsTheyAreWritten(t *testing.T) {
	at := timestamppb.New(time.Unix(1e9, 5000))
	for _, want := range []proto.Message{
		&datapathv1.Flow{
			Time: at, Verdict: datapathv1.Verdict_VERDICT_DROPPED, Protocol: 47, TcpFlags: 0x112, Reply: true,
			Source: &datapathv1.FlowEnd{
				Address: "10.244.0.2", EndpointIndex: 7,
				Labels: []*workloadv1.Label{{Source: "k8s", Key: "a", Value: "x=\"<1>"}, {Source: "k8s", Key: "b"}},
			},
			Egress: &datapathv1.SideVerdict{Revision: math.MaxUint64, RuleSources: []string{"a\nb", "ü"}},
		},
		&ipamv1.Pool{AddressCount: math.MaxUint64},
		&datapathv1.MapUsage{Entries: -1},
		&policyv1.Policy{Manifest: []byte("kind: x\n"), Subjects: []uint32{300, 301}},
		&policyv1.UpsertPoliciesResponse{Incarnation: []byte{0, 255}},
	} {
		text, err := json.Marshal(message.Of(want, message.Fact{Key: "fact", Value: 1}))
		if err != nil {
			t.Fatal(err)
		}
		got := want.ProtoReflect().New().Interface()
		if err := message.Unmarshal(text, got); err != nil || !proto.Equal(got, want) {
			t.Errorf("%s was read as %v, %v", text, got, err)
		}
	}
	for _, wrong := range []string{
		"[]", `{"length":"x"}`, `{"length":-1}`, `{"time":"x"}`, `{"source":1}`, `{"tcpFlags":["x"]}`,
	} {
		if err := message.Unmarshal([]byte(wrong), &datapathv1.Flow{}); err == nil {
			t.Errorf("%s was read", wrong)
		}
	}
	newer := &datapathv1.Flow{}
	if err := message.Unmarshal([]byte(`{"reason":"of-a-newer-version","new":{}}`), newer); err != nil || newer.Reason != 0 {
		t.Errorf("a name of a newer version: %v, %v", newer, err)
	}
}

func TestAMessageOfAStructIsAbsentUnlessItIsSet(t *testing.T) {
	var node struct {
		Stream message.One[*datapathv1.IdentityStream] `json:"stream,omitzero"`
		Map    message.One[*datapathv1.MapUsage]       `json:"map,omitzero"`
	}
	node.Stream.Message = &datapathv1.IdentityStream{Changed: 3}
	const want = `{"stream":{"complete":false,"error":"","changed":3,"pending":0}}`
	if got, err := json.Marshal(node); err != nil || string(got) != want {
		t.Errorf("%s, %v, want %s", got, err, want)
	}
}

// fieldsWithRules are the fields with special encodings, and their kinds.
func fieldsWithRules() map[protoreflect.FullName]protoreflect.Kind {
	kinds := map[protoreflect.FullName]protoreflect.Kind{}
	for name := range message.Unbounded {
		kinds[name] = protoreflect.Uint64Kind
	}
	for name := range message.Text {
		kinds[name] = protoreflect.BytesKind
	}
	for name := range message.Flags {
		kinds[name] = protoreflect.Uint32Kind
	}
	return kinds
}

// TestFieldsWithRulesExist: if a field with a rule were renamed, its JSON would change silently.
func TestFieldsWithRulesExist(t *testing.T) {
	for name, kind := range fieldsWithRules() {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if k := d.(protoreflect.FieldDescriptor).Kind(); k != kind {
			t.Errorf("%s is %s", name, k)
		}
	}
}
