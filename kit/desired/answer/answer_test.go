// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package answer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// file describes the API of a service with reasons 1 to 15.
var file = func() protoreflect.FileDescriptor {
	enum := &descriptorpb.EnumDescriptorProto{Name: proto.String("ErrorReason")}
	for i := range int32(16) {
		enum.Value = append(enum.Value, &descriptorpb.EnumValueDescriptorProto{
			Name: proto.String(fmt.Sprint("ERROR_REASON_", i)), Number: proto.Int32(i),
		})
	}
	f, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("t.proto"), Package: proto.String("sluice.test.v1"), Syntax: proto.String("proto3"),
		EnumType: []*descriptorpb.EnumDescriptorProto{enum},
	}, nil)
	if err != nil {
		panic(err)
	}
	return f
}()

type reason int32

func (reason) Descriptor() protoreflect.EnumDescriptor { return file.Enums().Get(0) }
func (reason) Type() protoreflect.EnumType             { return nil }
func (r reason) Number() protoreflect.EnumNumber       { return protoreflect.EnumNumber(r) }

var errOwn = errors.New("error of the service itself")

var answers = Reasons{
	NotFound: reason(1), Owned: reason(2), Foreign: reason(3), Changed: reason(4), Limit: reason(5), Empty: reason(6),
	Revision: reason(7), Refused: reason(8), Storage: reason(9), Stopped: reason(10), Replaced: reason(11),
	Ack: reason(12), Field: reason(13), Internal: reason(14), Resource: "object", Quota: "objects",
}.Table(rpcerr.On(errOwn, codes.DataLoss, reason(15)))

// TestErrorsHaveTheirCodes checks code and reason of each error, also when it is wrapped.
func TestErrorsHaveTheirCodes(t *testing.T) {
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason reason
	}{
		{failure.ErrNotFound, codes.NotFound, 1},
		{failure.ErrOwned, codes.AlreadyExists, 2},
		{failure.ErrForeign, codes.FailedPrecondition, 3},
		{failure.ErrChanged, codes.Aborted, 4},
		{failure.ErrLimit, codes.ResourceExhausted, 5},
		{failure.ErrEmpty, codes.FailedPrecondition, 6},
		{failure.ErrRevision, codes.OutOfRange, 7},
		{failure.ErrRefused, codes.FailedPrecondition, 8},
		{failure.ErrStorage, codes.Unavailable, 9},
		{failure.ErrStopped, codes.Unavailable, 10},
		{failure.ErrReplaced, codes.Aborted, 11},
		{failure.ErrAck, codes.InvalidArgument, 12},
		{&failure.FieldError{Field: "f", Err: errors.New("x")}, codes.InvalidArgument, 13},
		{&failure.FieldError{Field: "f", Err: failure.ErrNotFound}, codes.NotFound, 1},
		{ErrNoSubscribe, codes.InvalidArgument, 13},
		{ErrSubscribed, codes.InvalidArgument, 13},
		{errors.New("a bug"), codes.Internal, 14},
		{fmt.Errorf("%w: %w", errOwn, failure.ErrLimit), codes.DataLoss, 15},
	} {
		got := answers.Status(fmt.Errorf("wrapped: %w", c.err))
		if status.Code(got) != c.code || !rpcerr.Is(got, c.reason) {
			t.Errorf("%v is answered with %v, want %s and reason %d", c.err, got, c.code, c.reason)
		}
	}
}

// conn is a stream whose client side is the test. Recv and Send return when the call ends.
type conn struct {
	grpc.ServerStream
	ctx context.Context
	in  chan string // closed when the client has closed its side
	out chan string
}

func (c *conn) Context() context.Context { return c.ctx }

func (c *conn) Recv() (*string, error) {
	select {
	case m, ok := <-c.in:
		if !ok {
			return nil, io.EOF
		}
		return &m, nil
	case <-c.ctx.Done():
		return nil, status.FromContextError(c.ctx.Err()).Err()
	}
}

func (c *conn) Send(m *string) error {
	select {
	case c.out <- *m:
		return nil
	case <-c.ctx.Done():
		return status.FromContextError(c.ctx.Err()).Err()
	}
}

// TestSessionsEndAsTheyShould ends a session in each possible way and checks the status of the
// call.
func TestSessionsEndAsTheyShould(t *testing.T) {
	gone := errors.New("gone")
	for name, c := range map[string]struct {
		end  func(client *conn, cancel func(), s *session)
		want codes.Code
		is   reason // 0 for none
	}{
		"the subscriber closes its side": {func(c *conn, _ func(), _ *session) { close(c.in) }, codes.OK, 0},
		"the call is cancelled":          {func(_ *conn, cancel func(), _ *session) { cancel() }, codes.Canceled, 0},
		"the service ends the session": {
			func(_ *conn, _ func(), s *session) { s.why = failure.ErrReplaced; close(s.ended) }, codes.Aborted, 11,
		},
		"a message is refused": {
			func(c *conn, _ func(), _ *session) { c.in <- "refused" }, codes.InvalidArgument, 12,
		},
		"there is no next message": {
			func(_ *conn, _ func(), s *session) { close(s.messages) }, codes.ResourceExhausted, 5,
		},
		"a check finds a slow subscriber": {
			func(_ *conn, _ func(), s *session) { s.why = errOwn; close(s.slow) }, codes.DataLoss, 15,
		},
		"the service fails without a row": {
			func(_ *conn, _ func(), s *session) { s.why = gone; close(s.ended) }, codes.Internal, 14,
		},
	} {
		ctx, cancel := context.WithCancel(context.Background())
		client := &conn{ctx: ctx, in: make(chan string), out: make(chan string)}
		s := &session{messages: make(chan string), ended: make(chan struct{}), slow: make(chan struct{})}
		ended := make(chan error, 1)
		go func() {
			ended <- Serve(client, Session[string, string]{
				Next: s.next, Take: s.take, Ended: s.ended, Err: func() error { return s.why }, Check: s.check,
			}, &answers)
		}()
		s.messages <- "one"
		if got := <-client.out; got != "one" {
			t.Errorf("%s: the subscriber got %q", name, got)
		}
		client.in <- "ack"
		c.end(client, cancel, s)
		err := <-ended
		if status.Code(err) != c.want || c.is != 0 && !rpcerr.Is(err, c.is) {
			t.Errorf("%s: answered with %v, want %s and reason %d", name, err, c.want, c.is)
		}
		cancel()
	}
}

// session is a Session whose events the tests trigger.
type session struct {
	messages chan string // closed when the subscriber's queue is full
	slow     chan struct{}
	ended    chan struct{}
	why      error
}

func (s *session) next(ctx context.Context) (*string, error) {
	select {
	case m, ok := <-s.messages:
		if !ok {
			return nil, failure.ErrLimit
		}
		return &m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *session) take(_ context.Context, m *string) error {
	if *m == "refused" {
		return failure.ErrAck
	}
	return nil
}

// check asks to be called again after a moment, until the subscriber is slow.
func (s *session) check() time.Duration {
	select {
	case <-s.slow:
		close(s.ended)
		return time.Hour
	default:
		return time.Millisecond
	}
}
