// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client follows the events of sluice-datapath.
package client

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Pauses between attempts to open the stream.
const (
	firstPause   = 100 * time.Millisecond
	longestPause = time.Second
)

// Sink receives the events. Its methods are not called concurrently.
type Sink interface {
	Flow(*datapathv1.Flow)
	Repair(*datapathv1.AttachmentRepair)
	// Lost reports that events are missing at this position. count is 0 if their number is unknown.
	Lost(source datapathv1.LossSource, count uint64)
}

// Stream follows the events of the datapath.
type Stream struct {
	client datapathv1.ObserverServiceClient
	sink   Sink
	log    *slog.Logger

	mu  sync.Mutex
	err error // guarded by mu; why the stream is not open; nil while it is open
}

// New returns a stream. Run opens it.
func New(conn grpc.ClientConnInterface, sink Sink, l *slog.Logger) *Stream {
	return &Stream{
		client: datapathv1.NewObserverServiceClient(conn), sink: sink, log: l, err: errors.New("not connected yet"),
	}
}

// Err returns the reason why the stream is not open; nil while it is open.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *Stream) setErr(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && (s.err == nil || s.err.Error() != err.Error()) {
		s.log.Warn("no events from the datapath; retrying", log.Err(err))
	}
	if err == nil && s.err != nil {
		s.log.Info("receiving events from the datapath")
	}
	s.err = err
}

// Run follows the events after the event with the ID after, or all stored events if after is empty, until ctx ends.
// When it reopens the stream, it continues after the last event, so that the sink gets no event twice.
func (s *Stream) Run(ctx context.Context, after string) error {
	return watch.Retry(ctx, firstPause, longestPause, func(ctx context.Context) error {
		return s.follow(ctx, &after)
	}, func(err error) error {
		s.setErr(err)
		return nil
	})
}

// follow opens the stream once. It keeps the ID of the last event in after.
func (s *Stream) follow(ctx context.Context, after *string) error {
	request := &datapathv1.ObserveRequest{Follow: true, AfterUuid: *after}
	if *after == "" {
		request.Since = timestamppb.New(time.Unix(0, 0))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.client.Observe(ctx, request)
	if err != nil {
		return err
	}
	if _, err := stream.Header(); err != nil { // the server sends the header before the first event
		return err
	}
	s.setErr(nil)
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return errors.New("the datapath ended the stream")
		}
		if err != nil {
			return err
		}
		switch e := m.GetEvent().(type) {
		case *datapathv1.ObserveResponse_Flow:
			*after = e.Flow.GetUuid()
			s.sink.Flow(e.Flow)
		case *datapathv1.ObserveResponse_Lost:
			s.sink.Lost(e.Lost.GetSource(), e.Lost.GetCount())
		case *datapathv1.ObserveResponse_Repair:
			*after = e.Repair.GetUuid()
			s.sink.Repair(e.Repair)
		}
	}
}
