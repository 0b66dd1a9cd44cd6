// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// AbsentError means that a call was not sent. Either the connection to the socket failed, or the server process sent
// nothing because it is stopped or hangs. The code is UNAVAILABLE, without a reason, since no server answered.
type AbsentError struct {
	Socket string
	Err    error // the kernel's error if it refused the connection, such as syscall.ECONNREFUSED
}

func (e *AbsentError) Error() string { return e.Err.Error() }

// Unwrap returns the kernel's error.
func (e *AbsentError) Unwrap() error { return e.Err }

// GRPCStatus makes package status find the code UNAVAILABLE.
func (e *AbsentError) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// socket is the socket of a connection.
type socket struct {
	path string
	last atomic.Pointer[AbsentError] // error of the last attempt to connect; nil if it succeeded
}

// dial connects. It returns the kernel's error, not an AbsentError: an error with a gRPC status
// would also end calls that wait for the server.
func (s *socket) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", s.path)
	if err != nil {
		s.last.Store(&AbsentError{Socket: s.path, Err: err})
		return nil, err
	}
	s.last.Store(nil)
	return conn, nil
}

// explain replaces gRPC's text for a failed connection with the kernel's error.
func (s *socket) explain(err error) error {
	if err != nil && silentServer(status.Convert(err).Message()) {
		return &AbsentError{Socket: s.path, Err: fmt.Errorf("unix %s: accepts connections, but sends no answer", s.path)}
	}
	absent := s.last.Load()
	if _, decided := rpcerr.ReasonIn(err); absent == nil || decided || status.Code(err) != codes.Unavailable {
		return err
	}
	return absent
}

// silentServer reports whether a gRPC error text describes a connection that ended before the
// server's first bytes, while the client read or wrote the HTTP/2 preface. If flushing the preface
// fails, the text is the error of the write alone.
func silentServer(message string) bool {
	return strings.Contains(message, "error reading server preface") ||
		strings.Contains(message, "failed to write client preface") ||
		strings.Contains(message, "failed to write initial settings frame") ||
		strings.HasPrefix(message, "write unix ")
}

// A connection to a listening server takes a fraction of these times. If a server closes each connection because it has
// too many, gRPC continues to retry after the last attempt.
const (
	reconnectTries = 5
	reconnectTime  = 100 * time.Millisecond // per attempt
)

// reconnect connects again if the last attempt failed. gRPC itself would fail calls until its next attempt, even if the
// server is back; a connection attempt shows at once whether it is. If the server is absent, the call also fails at
// once, unless it uses WaitForReady.
func reconnect(ctx context.Context, cc *grpc.ClientConn, to *socket, opts []grpc.CallOption) error {
	for range reconnectTries {
		// gRPC fails calls a moment before it reports that an attempt has failed, so wait for the
		// attempt that follows a failed one.
		state := cc.GetState()
		failed := state == connectivity.TransientFailure ||
			state == connectivity.Connecting && to.last.Load() != nil
		if !failed {
			return nil
		}
		probe, err := to.dial(ctx)
		switch {
		case err == nil:
			probe.Close()
		case waits(opts):
			return nil
		case ctx.Err() != nil:
			return status.FromContextError(ctx.Err()).Err()
		default:
			return &AbsentError{Socket: to.path, Err: err}
		}
		cc.ResetConnectBackoff()
		try, cancel := context.WithTimeout(ctx, reconnectTime)
		cc.WaitForStateChange(try, state)
		cancel()
	}
	return nil
}

// waits reports whether a call waits for an absent server. The last option in opts takes precedence over earlier ones
// and over the options of Dial.
func waits(opts []grpc.CallOption) bool {
	wait := false
	for _, o := range opts {
		if f, ok := o.(grpc.FailFastCallOption); ok {
			wait = !f.FailFast
		}
	}
	return wait
}

func reconnectUnary(to *socket) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if err := reconnect(ctx, cc, to, opts); err != nil {
			return err
		}
		return to.explain(invoke(ctx, method, req, reply, cc, opts...))
	}
}

func reconnectStream(to *socket) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		if err := reconnect(ctx, cc, to, opts); err != nil {
			return nil, err
		}
		stream, err := open(ctx, desc, cc, method, opts...)
		return stream, to.explain(err)
	}
}
