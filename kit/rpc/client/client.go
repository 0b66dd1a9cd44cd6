// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client connects to a gRPC server on a unix socket.
//
// It imports no metrics, validation or server code, because the command line uses it. Callers that
// want metrics add them through Options.Dial.
package client

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/sluice-net/sluice/kit/rpc/rpcid"
)

// Options change how calls behave. The zero value is usable.
type Options struct {
	// Timeout is the deadline of a unary call whose context has none, 10 s if 0. A negative value
	// means no deadline. It does not apply to streams.
	Timeout time.Duration
	// WaitForReady makes calls wait for an absent server until their deadline, instead of failing
	// with UNAVAILABLE.
	WaitForReady bool
	// Dial options are appended last.
	Dial []grpc.DialOption
}

// maxRequest is the maximum size of a request in bytes.
const maxRequest = 4 << 20

// Dial returns a connection to the socket at path. It connects on the first call, so Dial succeeds while no server
// listens, and reconnects when the server is back. The first call after the server is back reaches it, however long it
// was absent. No call is sent twice.
func Dial(path string, o Options) (*grpc.ClientConn, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("dial %q: the socket's path is not absolute", path)
	}
	if len(path) > 107 {
		return nil, fmt.Errorf("dial %q: the path is %d bytes long; at most 107 fit into a unix socket address", path,
			len(path))
	}
	o.Timeout = cmp.Or(o.Timeout, 10*time.Second)
	to := &socket{path: path}
	opts := []grpc.DialOption{
		// The mode of the socket protects it; encryption is not needed.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return to.dial(ctx) }),
		grpc.WithAuthority("localhost"),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithConnectParams(grpc.ConnectParams{
			// The server is local: it restarts quickly, and a connection attempt costs one system
			// call.
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 100 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(16<<20),
			grpc.MaxCallSendMsgSize(maxRequest),
			grpc.WaitForReady(o.WaitForReady),
		),
		grpc.WithChainUnaryInterceptor(rpcid.UnaryClient(), deadline(o.Timeout), reconnectUnary(to)),
		grpc.WithChainStreamInterceptor(rpcid.StreamClient(), reconnectStream(to)),
		grpc.WithIdleTimeout(0),
	}
	// The "passthrough" scheme bypasses name resolution, which is not needed.
	cc, err := grpc.NewClient("passthrough:///"+path, append(opts, o.Dial...)...)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return cc, nil
}

func deadline(d time.Duration) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if _, ok := ctx.Deadline(); !ok && d > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}
