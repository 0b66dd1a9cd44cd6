// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package equivalence

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// service is a fake policy service that sends a test's messages to the datapath's own client.
type service struct {
	messages chan *policyv1.WatchPolicyTablesResponse
	acks     chan uint64
	nacks    chan *policyv1.Nack
	streams  atomic.Int32
	begun    chan struct{} // of streams after the first
}

func newService() *service {
	return &service{
		messages: make(chan *policyv1.WatchPolicyTablesResponse),
		acks:     make(chan uint64, 1),
		nacks:    make(chan *policyv1.Nack, 64),
		begun:    make(chan struct{}, 1),
	}
}

// Invoke implements grpc.ClientConnInterface.
func (s *service) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	return errors.New("only streams are supported")
}

// NewStream implements grpc.ClientConnInterface.
func (s *service) NewStream(ctx context.Context, _ *grpc.StreamDesc, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	if s.streams.Add(1) > 1 { // the client abandoned the previous stream
		select {
		case s.begun <- struct{}{}:
		default:
		}
	}
	return &stream{ctx, s}, nil
}

// stream is the client's end.
type stream struct {
	ctx context.Context
	s   *service
}

func (st *stream) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (st *stream) Trailer() metadata.MD         { return nil }
func (st *stream) CloseSend() error             { return nil }
func (st *stream) Context() context.Context     { return st.ctx }

func (st *stream) SendMsg(m any) error {
	switch x := m.(*policyv1.WatchPolicyTablesRequest).GetMessage().(type) {
	case *policyv1.WatchPolicyTablesRequest_Ack:
		select {
		case st.s.acks <- x.Ack.GetSeq():
		case <-st.ctx.Done():
			return st.ctx.Err()
		}
	case *policyv1.WatchPolicyTablesRequest_Nack:
		select {
		case st.s.nacks <- x.Nack:
		default:
		}
	}
	return nil
}

func (st *stream) RecvMsg(m any) error {
	select {
	case r := <-st.s.messages:
		proto.Merge(m.(*policyv1.WatchPolicyTablesResponse), r)
		return nil
	case <-st.ctx.Done():
		return st.ctx.Err()
	}
}

// say sends a message and waits until the datapath has applied it.
func (s *service) say(ctx context.Context, m *policyv1.WatchPolicyTablesResponse) error {
	select {
	case s.messages <- m:
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		select {
		case n := <-s.nacks:
			return fmt.Errorf("subject %d: Nack: %s", n.GetSubject(), n.GetReason())
		case <-s.begun:
			return errors.New("the datapath abandoned the stream and began a new one")
		case seq := <-s.acks:
			if seq == m.GetSeq() {
				return nil
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
