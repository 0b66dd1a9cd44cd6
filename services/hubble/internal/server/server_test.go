// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/client/peers"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var start = time.Unix(1_800_000_000, 0).UTC()

func at(seconds int) *timestamppb.Timestamp {
	return timestamppb.New(start.Add(time.Duration(seconds) * time.Second))
}

// bench is a server with a history.
type bench struct {
	*Server
	h        *history.History
	dir      string
	t        testing.TB
	now      time.Time
	others   func() ([]peers.Node, <-chan struct{})
	flow     func(record []byte) (*flow.Flow, error)
	describe func(record []byte) (history.Facts, error)
}

// asFlow returns the flow of a record. In these tests a record is the flow itself, so that it can have fields that no
// event of the datapath sets.
func asFlow(record []byte) (*flow.Flow, error) {
	f := &flow.Flow{}
	return f, proto.Unmarshal(record, f)
}

func described(data []byte) (history.Facts, error) {
	f, err := asFlow(data)
	return record.Facts(f), err
}

func newBench(t testing.TB, maxBytes int64) *bench {
	t.Helper()
	b := &bench{t: t, dir: t.TempDir(), now: start.Add(time.Hour), flow: asFlow, describe: described}
	b.others = func() ([]peers.Node, <-chan struct{}) { return nil, nil }
	b.open(maxBytes)
	return b
}

func (b *bench) open(maxBytes int64) {
	b.t.Helper()
	clock := func() time.Time { return b.now }
	h, err := history.Open(history.Options{
		Dir: b.dir, MaxBytes: maxBytes, MaxAge: 24 * time.Hour, Now: clock, Log: log.Discard(),
		Describe: func(data []byte) (history.Facts, error) { return b.describe(data) },
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = h.Close() })
	b.h = h
	b.Server = New(Options{
		Version: "v1", Started: start, Now: clock, History: h, Node: func() string { return "node-1" },
		Flow: func(record []byte) (*flow.Flow, error) { return b.flow(record) },
		Rate: func() float64 { return 2 }, Source: func() error { return nil }, Address: "unix:///run/x.sock",
		Others: func() ([]peers.Node, <-chan struct{}) { return b.others() },
	})
}

// noise returns a text of the given length that cannot be compressed to less than half.
func noise(length int) string {
	b := make([]byte, length/2)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// add stores a flow with the time second. Flows of odd seconds are dropped flows.
func (b *bench) add(second int, pad int) {
	b.t.Helper()
	f := &flow.Flow{
		Time: at(second), Uuid: fmt.Sprint(second), NodeName: "node-1", Verdict: flow.Verdict_FORWARDED,
		Source:  &flow.Endpoint{Namespace: "shop", PodName: "web-" + noise(pad)},
		Summary: "TCP", //nolint:staticcheck // the CLI prints it
	}
	if second%2 == 1 {
		f.Verdict, f.DropReasonDesc = flow.Verdict_DROPPED, flow.DropReason_POLICY_DENIED
	}
	data, err := proto.Marshal(f)
	if err != nil {
		b.t.Fatal(err)
	}
	b.h.Append(history.Entry{Part: "shop", Time: f.GetTime().AsTime(), Data: data, Facts: record.Facts(f)})
}

func (b *bench) addLoss(count uint64, second int) {
	b.t.Helper()
	data, err := proto.Marshal(&flow.LostEvent{
		Source: flow.LostEventSource_PERF_EVENT_RING_BUFFER, NumEventsLost: count, First: at(second), Last: at(second),
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.h.Append(history.Entry{Part: "system", Time: at(second).AsTime(), Loss: true, Data: data})
}

// stream receives the answers of a call. It ends the call after enough of them.
type stream struct {
	grpc.ServerStream
	ctx    context.Context
	cancel context.CancelFunc
	enough int
	got    []*observer.GetFlowsResponse
	first  func() // called when the first answer arrives; may be nil
}

func (s *stream) Context() context.Context { return s.ctx }

func (s *stream) Send(m *observer.GetFlowsResponse) error {
	s.got = append(s.got, proto.CloneOf(m))
	if len(s.got) == 1 && s.first != nil {
		s.first()
	}
	if s.enough > 0 && len(s.got) >= s.enough {
		s.cancel()
	}
	return nil
}

// texts returns the ID of each flow, and "lost N" for each loss.
func (s *stream) texts() (texts []string) {
	for _, m := range s.got {
		if l := m.GetLostEvents(); l != nil {
			texts = append(texts, fmt.Sprintf("lost %d", l.GetNumEventsLost()))
			continue
		}
		texts = append(texts, m.GetFlow().GetUuid())
	}
	return texts
}

func (b *bench) ask(r *observer.GetFlowsRequest, enough int) (*stream, error) {
	b.t.Helper()
	s := &stream{enough: enough}
	return s, b.answers(b.t.Context(), r, s)
}

// answers makes a call whose answers a stream receives.
func (b *bench) answers(ctx context.Context, r *observer.GetFlowsRequest, s *stream) error {
	b.t.Helper()
	s.ctx, s.cancel = context.WithCancel(ctx)
	defer s.cancel()
	return b.GetFlows(r, s)
}

// TestFlowsOfARange: number, first, since and until have the same meaning as in Hubble, with and without filters.
func TestFlowsOfARange(t *testing.T) {
	b := newBench(t, 64<<20)
	for i := range 10 {
		b.add(i, 0)
	}
	dropped := []*flow.FlowFilter{{Verdict: []flow.Verdict{flow.Verdict_DROPPED}}}
	for _, reopened := range []bool{false, true} {
		if reopened { // the flows are then only in files
			if err := b.h.Close(); err != nil {
				t.Fatal(err)
			}
			b.open(64 << 20)
		}
		for _, c := range []struct {
			name string
			r    *observer.GetFlowsRequest
			want string
		}{
			{"all", &observer.GetFlowsRequest{}, "0 1 2 3 4 5 6 7 8 9"},
			{"the last three", &observer.GetFlowsRequest{Number: 3}, "7 8 9"},
			{"the first three", &observer.GetFlowsRequest{Number: 3, First: true}, "0 1 2"},
			{"more than there are", &observer.GetFlowsRequest{Number: 30}, "0 1 2 3 4 5 6 7 8 9"},
			{"since", &observer.GetFlowsRequest{Since: at(7)}, "7 8 9"},
			{"since, two", &observer.GetFlowsRequest{Since: at(5), Number: 2}, "5 6"},
			{"until", &observer.GetFlowsRequest{Until: at(2)}, "0 1 2"},
			{"the last two until", &observer.GetFlowsRequest{Until: at(5), Number: 2}, "4 5"},
			{"between", &observer.GetFlowsRequest{Since: at(3), Until: at(4)}, "3 4"},
			{"dropped", &observer.GetFlowsRequest{Whitelist: dropped}, "1 3 5 7 9"},
			{"the last two dropped", &observer.GetFlowsRequest{Whitelist: dropped, Number: 2}, "7 9"},
			{"not dropped", &observer.GetFlowsRequest{Blacklist: dropped, Number: 2}, "6 8"},
			{
				"of another namespace",
				&observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{{SourcePod: []string{"data/"}}}, Number: 2}, "",
			},
		} {
			s, err := b.ask(c.r, 0)
			if got := strings.Join(s.texts(), " "); err != nil || got != c.want {
				t.Errorf("%s, reopened %t: %q, %v; want %q", c.name, reopened, got, err, c.want)
			}
		}
	}
}

// TestFollowedFlowsContinueTheStoredOnes: new flows follow the stored flows, without gaps and duplicates.
func TestFollowedFlowsContinueTheStoredOnes(t *testing.T) {
	b := newBench(t, 64<<20)
	for i := range 5 {
		b.add(i, 0)
	}
	added := make(chan struct{})
	go func() {
		defer close(added)
		for i := 5; i < 200; i++ {
			b.add(i, 0)
		}
	}()
	s, err := b.ask(&observer.GetFlowsRequest{Follow: true, Since: at(3)}, 197)
	<-added
	if status.Code(err) != codes.Canceled {
		t.Errorf("the call ended with %v", err)
	}
	for i, text := range s.texts() {
		if text != fmt.Sprint(i+3) {
			t.Fatalf("message %d is %s", i, text)
		}
	}
	// An end in the past is reached at once.
	if s, err := b.ask(&observer.GetFlowsRequest{Follow: true, Number: 1, Until: at(4)}, 0); err != nil ||
		!slices.Equal(s.texts(), []string{"4"}) {
		t.Errorf("until: %q, %v", s.texts(), err)
	}
}

// TestMaskReducesFlows: a field mask removes the fields that the client does not request.
func TestMaskReducesFlows(t *testing.T) {
	b := newBench(t, 64<<20)
	b.add(0, 0)
	s, err := b.ask(&observer.GetFlowsRequest{
		FieldMask: &fieldmaskpb.FieldMask{Paths: []string{"uuid", "source.namespace", "destination.pod_name"}},
	}, 0)
	want := &flow.Flow{Uuid: "0", Source: &flow.Endpoint{Namespace: "shop"}}
	if err != nil || len(s.got) != 1 || !proto.Equal(s.got[0].GetFlow(), want) {
		t.Errorf("%v, %v; want %v", s.got, err, want)
	}
	if s.got[0].GetNodeName() != "node-1" || s.got[0].GetTime() == nil {
		t.Errorf("the message lost its node or time: %v", s.got[0])
	}
}

// TestLossesAreMerged: consecutive losses become one message at the position where flows are missing, because clients
// print one line for each message.
func TestLossesAreMerged(t *testing.T) {
	b := newBench(t, 64<<20)
	b.add(0, 0)
	b.addLoss(3, 1)
	b.addLoss(4, 2)
	b.add(3, 0)
	b.addLoss(5, 4)
	s, err := b.ask(&observer.GetFlowsRequest{}, 0)
	if want := []string{"0", "lost 7", "3", "lost 5"}; err != nil || !slices.Equal(s.texts(), want) {
		t.Errorf("%q, %v; want %q", s.texts(), err, want)
	}
	l := s.got[1].GetLostEvents()
	if !proto.Equal(l.GetFirst(), at(1)) || !proto.Equal(l.GetLast(), at(2)) {
		t.Errorf("the loss lasted from %s to %s", l.GetFirst().AsTime(), l.GetLast().AsTime())
	}
}

// TestFollowerGetsALossWithoutAFurtherFlow: the losses of a second become one message, which is sent without waiting
// for another record. Losses before the call become one message, too. Losses after the first answer are sent while
// the call follows.
func TestFollowerGetsALossWithoutAFurtherFlow(t *testing.T) {
	for name, c := range map[string]struct {
		before []uint64 // losses before the call
		after  []uint64 // losses after the first answer
		want   []string
	}{
		"while it follows":   {nil, []uint64{3, 4, 5}, []string{"0", "lost 3", "lost 9"}},
		"before it follows":  {[]uint64{3, 4, 5}, nil, []string{"0", "lost 12"}},
		"before and then on": {[]uint64{3}, []uint64{4, 5}, []string{"0", "lost 3", "lost 9"}},
	} {
		b := newBench(t, 64<<20)
		b.add(0, 0)
		for i, count := range c.before {
			b.addLoss(count, 1+i)
		}
		s := &stream{enough: len(c.want), first: func() {
			for i, count := range c.after {
				b.addLoss(count, 10+i)
			}
		}}
		err := b.answers(t.Context(), &observer.GetFlowsRequest{Follow: true, Since: at(0)}, s)
		if status.Code(err) != codes.Canceled || !slices.Equal(s.texts(), c.want) {
			t.Errorf("losses %s: %q, %v; want %q", name, s.texts(), err, c.want)
		}
	}
}

// TestAnswerSaysFromWhenOnItIsComplete: the oldest flows of the requested time were displaced. The answer contains
// the time from which it is complete.
func TestAnswerSaysFromWhenOnItIsComplete(t *testing.T) {
	b := newBench(t, history.MinBytes)
	for i := range 30_000 {
		b.add(i, 300)
	}
	b.h.Flush()
	b.now = start.Add(20 * time.Hour)
	s, err := b.ask(&observer.GetFlowsRequest{Since: at(0), Number: 1}, 0)
	if err != nil || len(s.got) != 2 {
		t.Fatalf("%q, %v", s.texts(), err)
	}
	l, first := s.got[0].GetLostEvents(), s.got[1].GetFlow()
	if l == nil || l.GetSource() != flow.LostEventSource_HUBBLE_RING_BUFFER ||
		!first.GetTime().AsTime().Equal(l.GetLast().AsTime().Add(time.Second)) {
		t.Errorf("the answer begins with %v, and then %v", l, first)
	}
	if s, err := b.ask(&observer.GetFlowsRequest{Since: at(29_990)}, 0); err != nil || len(s.got) != 10 {
		t.Errorf("the last ten: %q, %v", s.texts(), err)
	}
}

// TestCorruptSegmentIsALoss: if a segment is corrupt, a client learns that flows are missing.
func TestCorruptSegmentIsALoss(t *testing.T) {
	b := newBench(t, 64<<20)
	for i := range 3 * history.Recent {
		b.add(i, 100)
	}
	if err := b.h.Close(); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(b.dir, "*.segment"))
	if err != nil || len(files) == 0 {
		t.Fatalf("segments: %v, %v", files, err)
	}
	content, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	content[len(content)-1] ^= 1
	if err := os.WriteFile(files[0], content, 0o600); err != nil {
		t.Fatal(err)
	}
	b.open(64 << 20)
	s, err := b.ask(&observer.GetFlowsRequest{Until: at(history.Recent)}, 0)
	if err != nil || !strings.HasPrefix(s.texts()[0], "lost ") {
		t.Fatalf("the answer has %d messages, %v", len(s.got), err)
	}
	if lost := s.got[0].GetLostEvents().GetNumEventsLost(); int(lost)+len(s.got)-1 != history.Recent+1 {
		t.Errorf("%d flows and %d lost ones, want %d together", len(s.got)-1, lost, history.Recent+1)
	}
}

// TestRecordThatCannotBeReadIsALoss: GetFlows counts a record that it cannot decode as a lost event, and continues.
func TestRecordThatCannotBeReadIsALoss(t *testing.T) {
	b := newBench(t, 64<<20)
	b.add(0, 0)
	for _, loss := range []bool{false, true} {
		b.h.Append(history.Entry{Part: "shop", Time: at(1).AsTime(), Loss: loss, Data: []byte{0xff}})
	}
	b.add(2, 0)
	for name, r := range map[string]*observer.GetFlowsRequest{
		"all": {}, "the last two": {Number: 2}, "until": {Until: at(2)},
	} {
		s, err := b.ask(r, 0)
		if want := []string{"0", "lost 2", "2"}; err != nil || !slices.Equal(s.texts(), want) {
			t.Errorf("%s: %q, %v; want %q", name, s.texts(), err, want)
		}
	}
}

// TestClientThatDoesNotReadDelaysNoOther: more clients than may read the history at the same time stop reading in
// their first answer. Another client still gets its answer.
func TestClientThatDoesNotReadDelaysNoOther(t *testing.T) {
	b := newBench(t, 64<<20)
	const flows = 20_000
	for i := range flows {
		b.add(i, 100)
	}
	stopped, ended := make(chan struct{}), make(chan error)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 4 * scans {
		s := &stuckStream{stream: stream{ctx: ctx, cancel: cancel}, stopped: stopped}
		go func() { ended <- b.GetFlows(&observer.GetFlowsRequest{}, s) }()
		<-stopped
	}
	s, err := b.ask(&observer.GetFlowsRequest{}, 0)
	if err != nil || len(s.got) != flows {
		t.Errorf("with clients that do not read: %d flows, %v", len(s.got), err)
	}
	cancel()
	for range 4 * scans {
		if err := <-ended; err == nil {
			t.Error("a client that did not read got a whole answer")
		}
	}
}

// stuckStream blocks in its first answer until the call ends.
type stuckStream struct {
	stream
	stopped chan<- struct{}
}

func (s *stuckStream) Send(*observer.GetFlowsResponse) error {
	s.stopped <- struct{}{}
	<-s.ctx.Done()
	return s.ctx.Err()
}

// TestAnswersOfManyTurnsAreComplete: an answer that takes several turns contains every flow once and each loss once.
func TestAnswersOfManyTurnsAreComplete(t *testing.T) {
	b := newBench(t, 64<<20)
	const flows = 20_000 // several times turnBytes
	for i := range flows {
		b.add(i, 100)
	}
	s, err := b.ask(&observer.GetFlowsRequest{Number: flows / 2}, 0)
	if err != nil || len(s.got) != flows/2 {
		t.Fatalf("%d flows, %v; want %d", len(s.got), err, flows/2)
	}
	for i, text := range s.texts() {
		if text != fmt.Sprint(flows/2+i) {
			t.Fatalf("message %d is flow %s", i, text)
		}
	}
}

func TestInvalidRequestsAreRefused(t *testing.T) {
	b := newBench(t, 64<<20)
	for name, c := range map[string]struct {
		r    *observer.GetFlowsRequest
		want codes.Code
		text string
	}{
		"first and follow": {&observer.GetFlowsRequest{First: true, Follow: true}, codes.InvalidArgument, "first"},
		"address": {
			&observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{{SourceIp: []string{"x"}}}}, codes.InvalidArgument,
			"whitelist[0].source_ip",
		},
		"expression": {
			&observer.GetFlowsRequest{Blacklist: []*flow.FlowFilter{{
				Experimental: &flow.FlowFilter_Experimental{CelExpression: []string{"true"}},
			}}},
			codes.Unimplemented, "cel_expression",
		},
		"mask": {
			&observer.GetFlowsRequest{FieldMask: &fieldmaskpb.FieldMask{Paths: []string{"x"}}}, codes.InvalidArgument,
			"field_mask",
		},
		"since": {&observer.GetFlowsRequest{Since: &timestamppb.Timestamp{Nanos: -1}}, codes.InvalidArgument, "since"},
	} {
		_, err := b.ask(c.r, 0)
		if status.Code(err) != c.want || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %s about %s", name, err, c.want, c.text)
		}
	}
	if err := b.GetAgentEvents(nil, nil); status.Code(err) != codes.Unimplemented {
		t.Errorf("agent events: %v", err)
	}
	if err := b.GetDebugEvents(nil, nil); status.Code(err) != codes.Unimplemented {
		t.Errorf("debug events: %v", err)
	}
}

func TestStatusNodesAndNamespaces(t *testing.T) {
	b := newBench(t, 64<<20)
	for i := range 3 {
		b.add(3500+i, 0)
	}
	b.h.Flush()
	st, err := b.ServerStatus(t.Context(), nil)
	if err != nil || st.GetNumFlows() != 3 || st.GetSeenFlows() != 3 || st.GetMaxFlows() < 100_000 ||
		st.GetUptimeNs() != uint64(time.Hour) || st.GetVersion() != "v1" || st.GetFlowsRate() != 2 {
		t.Errorf("status: %v, %v", st, err)
	}
	nodes, err := b.GetNodes(t.Context(), nil)
	if err != nil || len(nodes.GetNodes()) != 1 || nodes.GetNodes()[0].GetName() != "node-1" ||
		nodes.GetNodes()[0].GetState().String() != "NODE_CONNECTED" {
		t.Errorf("nodes: %v, %v", nodes, err)
	}
	b.o.Source = func() error { return errors.New("away") }
	nodes, err = b.GetNodes(t.Context(), nil)
	if err != nil || nodes.GetNodes()[0].GetState().String() != "NODE_UNAVAILABLE" {
		t.Errorf("without the datapath: %v, %v", nodes, err)
	}
	if names, err := b.GetNamespaces(t.Context(), nil); err != nil || len(names.GetNamespaces()) != 1 ||
		names.GetNamespaces()[0].GetNamespace() != "shop" {
		t.Errorf("namespaces: %v, %v", names, err)
	}
	b.now = start.Add(3 * time.Hour)
	if names, err := b.GetNamespaces(t.Context(), nil); err != nil || len(names.GetNamespaces()) != 0 {
		t.Errorf("namespaces two hours later: %v, %v", names, err)
	}
}
