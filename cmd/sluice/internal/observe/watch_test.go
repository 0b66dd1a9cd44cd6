// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// observer is a fake datapath: it sends some events, then blocks until the call ends.
type observer struct {
	datapathv1.UnimplementedObserverServiceServer
	events   []*datapathv1.ObserveResponse
	err      error
	requests chan *datapathv1.ObserveRequest
	end      bool // end the call after the events
}

func (o *observer) Observe(r *datapathv1.ObserveRequest,
	s grpc.ServerStreamingServer[datapathv1.ObserveResponse],
) error {
	o.requests <- r
	if o.err != nil {
		return o.err
	}
	if err := s.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for _, e := range o.events {
		if err := s.Send(e); err != nil {
			return err
		}
	}
	if o.end {
		return nil
	}
	<-s.Context().Done()
	return s.Context().Err()
}

// serve runs a datapath until it is stopped.
func (o *observer) serve(t *testing.T, dir string) (stop func()) {
	t.Helper()
	return o.serveAs(t, dir, datapath)
}

// serveAs runs a service until it is stopped.
func (o *observer) serveAs(t *testing.T, dir, service string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(dir, service, service+".sock"))
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	datapathv1.RegisterObserverServiceServer(s, o)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(l)
	}()
	return func() {
		s.Stop()
		<-served
	}
}

func flowNumbered(n int) *datapathv1.ObserveResponse {
	return &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: &datapathv1.Flow{
		Uuid: fmt.Sprintf("00000000-0000-8000-8000-%012d", n), Time: timestamppb.New(time.Unix(int64(n), 0)),
		Length: uint32(n),
	}}}
}

// lostByKernel is a message without an ID.
var lostByKernel = &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
	Lost: &datapathv1.LostEvents{Source: datapathv1.LossSource_LOSS_SOURCE_KERNEL, Count: 1},
}}

// shown collects the output.
type shown struct {
	mu    sync.Mutex
	texts []string      // guarded by mu
	news  chan struct{} // receives a value per text
}

func (s *shown) Write(e Event) error {
	text := e.uuid()
	switch {
	case e.Note != "":
		text = e.Note
	case e.GetLost() != nil:
		text = "lost by " + output.Enum(e.GetLost().GetSource(), "LOSS_SOURCE_")
	}
	s.mu.Lock()
	s.texts = append(s.texts, text)
	s.mu.Unlock()
	s.news <- struct{}{}
	return nil
}

func (*shown) Close() error { return nil }

func runDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sl") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, service := range []string{datapath, hubble} {
		if err := os.Mkdir(filepath.Join(dir, service), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFollowGoesOnOverARestartOfTheDatapath(t *testing.T) {
	dir := runDir(t)
	out := &shown{news: make(chan struct{}, 100)}
	w := watch{inv: &invocation.Invocation{RunDir: dir, Timeout: time.Minute}, out: out, service: datapath}
	requests := make(chan *datapathv1.ObserveRequest, 10)
	stop := (&observer{
		events:   []*datapathv1.ObserveResponse{flowNumbered(1), flowNumbered(2)},
		requests: requests,
	}).serve(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.run(ctx, &datapathv1.ObserveRequest{Follow: true, Last: 2}) }()
	if r := <-requests; r.GetAfterUuid() != "" || r.GetLast() != 2 {
		t.Errorf("first request %v", r)
	}
	<-out.news
	<-out.news
	stop()
	<-out.news // the note that the datapath is unavailable
	lost := &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
		Lost: &datapathv1.LostEvents{Source: datapathv1.LossSource_LOSS_SOURCE_RESTART},
	}}
	stop = (&observer{events: []*datapathv1.ObserveResponse{lost, flowNumbered(3)}, requests: requests}).serve(t, dir)
	r := <-requests
	if r.GetAfterUuid() != "00000000-0000-8000-8000-000000000002" || r.GetLast() != 0 || !r.GetFollow() {
		t.Errorf("second request %v", r)
	}
	for range 3 {
		<-out.news
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	stop()
	got := strings.Join(out.texts, "|")
	if !strings.Contains(got, "002|datapath is unavailable: ") || !strings.Contains(got, "|datapath is back after ") ||
		!strings.HasSuffix(got, "|lost by restart|00000000-0000-8000-8000-000000000003") || len(out.texts) != 6 {
		t.Errorf("shown: %s", got)
	}
}

// TestFollowWithoutEventsGoesOnFromItsBeginning: without an event to resume after, the stream resumes at its start
// time.
func TestFollowWithoutEventsGoesOnFromItsBeginning(t *testing.T) {
	dir := runDir(t)
	out := &shown{news: make(chan struct{}, 100)}
	w := watch{inv: &invocation.Invocation{RunDir: dir, Timeout: time.Minute}, out: out, service: datapath}
	requests := make(chan *datapathv1.ObserveRequest, 10)
	stop := (&observer{events: []*datapathv1.ObserveResponse{lostByKernel}, requests: requests}).serve(t, dir)
	ended := make(chan error, 1)
	go func() { ended <- w.run(t.Context(), &datapathv1.ObserveRequest{Follow: true}) }()
	if r := <-requests; r.GetSince() != nil {
		t.Errorf("first request %v", r)
	}
	<-out.news
	stop()
	<-out.news
	// Errors that a retry cannot fix end the command.
	stop = (&observer{requests: requests, err: status.Error(codes.PermissionDenied, "no")}).serve(t, dir)
	defer stop()
	if r := <-requests; r.GetSince() == nil || r.GetAfterUuid() != "" {
		t.Errorf("second request %v", r)
	}
	if err := <-ended; status.Code(err) != codes.PermissionDenied {
		t.Errorf("ended with %v", err)
	}
}

// TestFollowDoesNotWaitForADatapathThatWasNeverThere: the instance name may be wrong.
func TestFollowDoesNotWaitForADatapathThatWasNeverThere(t *testing.T) {
	w := watch{inv: &invocation.Invocation{RunDir: runDir(t), Timeout: time.Minute}, out: &shown{}, service: datapath}
	if err := w.run(t.Context(), &datapathv1.ObserveRequest{Follow: true}); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestFollowEndsAtItsTimeThoughTheDatapathIsAway(t *testing.T) {
	dir := runDir(t)
	out := &shown{news: make(chan struct{}, 100)}
	w := watch{inv: &invocation.Invocation{RunDir: dir, Timeout: time.Minute}, out: out, service: datapath}
	requests := make(chan *datapathv1.ObserveRequest, 10)
	stop := (&observer{events: []*datapathv1.ObserveResponse{lostByKernel}, requests: requests}).serve(t, dir)
	ended := make(chan error, 1)
	go func() {
		ended <- w.run(t.Context(), &datapathv1.ObserveRequest{
			Follow: true, Until: timestamppb.New(time.Now().Add(time.Second)),
		})
	}()
	<-requests
	<-out.news
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestEventsOfATimeComeFromTheirKeeper: sluice-hubble is asked for a time if its socket exists, and the datapath if
// sluice-hubble does not run, does not answer, or is of a version without events.
func TestEventsOfATimeComeFromTheirKeeper(t *testing.T) {
	for name, x := range map[string]struct {
		prepare func(t *testing.T, dir string, requests chan *datapathv1.ObserveRequest)
		want    string // the service that shows its event
		note    string
	}{
		"sluice-hubble runs": {func(t *testing.T, dir string, requests chan *datapathv1.ObserveRequest) {
			t.Cleanup((&observer{
				events: []*datapathv1.ObserveResponse{flowNumbered(2)}, requests: requests, end: true,
			}).serveAs(t, dir, hubble))
		}, hubble, ""},
		"no sluice-hubble": {func(*testing.T, string, chan *datapathv1.ObserveRequest) {}, datapath, ""},
		"it was killed": {func(t *testing.T, dir string, _ chan *datapathv1.ObserveRequest) {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, hubble, hubble+".sock"), Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}, datapath, "sluice-hubble does not answer: "},
		"an earlier version": {func(t *testing.T, dir string, requests chan *datapathv1.ObserveRequest) {
			t.Cleanup((&observer{err: status.Error(codes.Unimplemented, "no"), requests: requests}).serveAs(t, dir, hubble))
		}, datapath, "sluice-hubble does not answer: "},
	} {
		t.Run(name, func(t *testing.T) {
			dir := runDir(t)
			requests := make(chan *datapathv1.ObserveRequest, 10)
			x.prepare(t, dir, requests)
			defer (&observer{
				events: []*datapathv1.ObserveResponse{flowNumbered(1)}, requests: requests, end: true,
			}).serve(t, dir)()
			out := &shown{news: make(chan struct{}, 100)}
			var notes bytes.Buffer
			inv := &invocation.Invocation{RunDir: dir, Timeout: time.Minute, ErrOut: &notes}
			w := watch{inv: inv, out: out, service: keeper(inv)}
			if err := w.run(t.Context(), &datapathv1.ObserveRequest{Since: timestamppb.New(time.Unix(1, 0))}); err != nil {
				t.Fatal(err)
			}
			want := map[string]string{datapath: "000000000001", hubble: "000000000002"}[x.want]
			if got := strings.Join(out.texts, "|"); !strings.HasSuffix(got, want) || len(out.texts) != 1 {
				t.Errorf("shown: %s, want the event of %s", got, x.want)
			}
			if got := notes.String(); !strings.Contains(got, x.note) || (x.note == "") != (got == "") {
				t.Errorf("notes: %q, want %q", got, x.note)
			}
		})
	}
}

// TestLossOfStoredEventsNamesItsTime: as text, and as JSON that is read again.
func TestLossOfStoredEventsNamesItsTime(t *testing.T) {
	until := time.Date(2026, 11, 30, 10, 2, 3, 0, time.Local)
	for count, want := range map[uint64]string{
		0: "--- events up to 10:02:03.000 are missing in the history ---",
		1: "--- 1 event up to 10:02:03.000 is missing in the history ---",
		7: "--- 7 events up to 10:02:03.000 are missing in the history ---",
	} {
		e := Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
			Lost: &datapathv1.LostEvents{
				Source: datapathv1.LossSource_LOSS_SOURCE_HISTORY, Count: count,
				FirstTime: timestamppb.New(until.Add(-time.Hour)), LastTime: timestamppb.New(until),
			},
		}}}
		if got := e.Line(until); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		text, err := e.Append(nil)
		var again Event
		if err == nil {
			err = json.Unmarshal(text, &again)
		}
		if err != nil || !proto.Equal(again.ObserveResponse, e.ObserveResponse) {
			t.Errorf("%s is read as %v, %v", text, again.ObserveResponse, err)
		}
	}
}
