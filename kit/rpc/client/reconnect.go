// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

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
func reconnect(ctx context.Context, cc *grpc.ClientConn, path string, opts []grpc.CallOption) error {
	for range reconnectTries {
		if cc.GetState() != connectivity.TransientFailure {
			return nil
		}
		var d net.Dialer
		probe, err := d.DialContext(ctx, "unix", path)
		switch {
		case err == nil:
			probe.Close()
		case waits(opts):
			return nil
		case ctx.Err() != nil:
			return status.FromContextError(ctx.Err()).Err()
		default:
			return status.Error(codes.Unavailable, err.Error())
		}
		cc.ResetConnectBackoff()
		try, cancel := context.WithTimeout(ctx, reconnectTime)
		cc.WaitForStateChange(try, connectivity.TransientFailure)
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

func reconnectUnary(path string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if err := reconnect(ctx, cc, path, opts); err != nil {
			return err
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

func reconnectStream(path string) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		if err := reconnect(ctx, cc, path, opts); err != nil {
			return nil, err
		}
		return open(ctx, desc, cc, method, opts...)
	}
}
