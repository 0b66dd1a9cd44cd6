// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"context"
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
	<-s.Context().Done()
	return s.Context().Err()
}

// serve runs a datapath until it is stopped.
func (o *observer) serve(t *testing.T, dir string) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(dir, "datapath", "datapath.sock"))
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
	if err := os.Mkdir(filepath.Join(dir, "datapath"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestFollowGoesOnOverARestartOfTheDatapath(t *testing.T) {
	dir := runDir(t)
	out := &shown{news: make(chan struct{}, 100)}
	w := watch{inv: &invocation.Invocation{RunDir: dir, Timeout: time.Minute}, out: out}
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
	w := watch{inv: &invocation.Invocation{RunDir: dir, Timeout: time.Minute}, out: out}
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
	w := watch{inv: &invocation.Invocation{RunDir: runDir(t), Timeout: time.Minute}, out: &shown{}}
	if err := w.run(t.Context(), &datapathv1.ObserveRequest{Follow: true}); status.Code(err) != codes.Unavailable {
		t.Errorf("got %v", err)
	}
}

func TestFollowEndsAtItsTimeThoughTheDatapathIsAway(t *testing.T) {
	dir := runDir(t)
	out := &shown{news: make(chan struct{}, 100)}
	w := watch{inv: &invocation.Invocation{RunDir: dir, Timeout: time.Minute}, out: out}
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
