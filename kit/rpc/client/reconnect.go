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

// AbsentError says that a call was not sent, because the socket could not be
// connected to, or nothing came from behind it: the process was stopped, or hangs. Its code is UNAVAILABLE, and no server gave it a reason.
type AbsentError struct {
	Socket string
	Err    error // the kernel's, for example a syscall.ECONNREFUSED, if it refused
}

func (e *AbsentError) Error() string { return e.Err.Error() }

// Unwrap returns the kernel's error.
func (e *AbsentError) Unwrap() error { return e.Err }

// GRPCStatus is the error as those of gRPC.
func (e *AbsentError) GRPCStatus() *status.Status { return status.New(codes.Unavailable, e.Error()) }

// socket is what a connection goes to.
type socket struct {
	path string
	last atomic.Pointer[AbsentError] // how the last attempt to connect ended; nil if it did well
}

// dial connects. The error is the kernel's, not an AbsentError: gRPC ends also
// those calls that wait for a server when an attempt to connect fails with a
// status.
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

// explain gives an error of gRPC's the kernel's words, where gRPC has put its own
// around them.
func (s *socket) explain(err error) error {
	if err != nil && silentServer(status.Convert(err).Message()) {
		return &AbsentError{Socket: s.path, Err: fmt.Errorf("unix %s: it accepts connections and answers none", s.path)}
	}
	absent := s.last.Load()
	if _, decided := rpcerr.ReasonIn(err); absent == nil || decided || status.Code(err) != codes.Unavailable {
		return err
	}
	return absent
}

// silentServer says whether gRPC's words are about a connection that ended before the
// first bytes from the other side: reading or writing what both begin with.
func silentServer(message string) bool {
	return strings.Contains(message, "error reading server preface") ||
		strings.Contains(message, "failed to write client preface")
}

// A server that listens is connected to in a fraction of these. One that closes
// each connection, because it has too many, is left to gRPC after the last.
const (
	reconnectTries = 5
	reconnectTime  = 100 * time.Millisecond // of one
)

// reconnect connects anew if the last attempt failed. By itself gRPC would fail
// calls until its next attempt, though the server is back: the kernel says at
// once whether it is. A server that is away makes the call fail at once too,
// unless it is to wait.
func reconnect(ctx context.Context, cc *grpc.ClientConn, to *socket, opts []grpc.CallOption) error {
	for range reconnectTries {
		// gRPC fails calls a moment before it says that an attempt has failed. An
		// attempt after one that failed is waited for.
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

// waits says whether a call waits for an absent server. The last option counts;
// those of Dial come first.
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
