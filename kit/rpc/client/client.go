// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client dials a gRPC server on a unix socket.
//
// It imports no metrics, no validation and no server code, because a process
// that lives for a few milliseconds uses it. Metrics are added through
// Options.Dial by those who want them.
package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/sluice-net/sluice/kit/requestid"
)

// Options change how calls behave. The zero value is usable.
type Options struct {
	// Timeout is the deadline of a unary call whose context has none, 10 s if
	// 0. A negative value sets none. Streams get none.
	Timeout time.Duration
	// Idempotent names what may be sent again when the server answers
	// UNAVAILABLE or cannot be reached: "package.Service" for all methods of a
	// service, "/package.Service/Method" for one. Such calls are repeated with
	// growing pauses (50 ms to 1 s) until MaxAttempts or the deadline.
	Idempotent []string
	// MaxAttempts counts the first one, 5 if 0, at most 5.
	MaxAttempts int
	// WaitForReady makes calls wait for an absent server until their deadline,
	// instead of failing with UNAVAILABLE.
	WaitForReady bool
	MaxRecv      int // bytes of a response; 16 MiB if 0
	MaxSend      int // bytes of a request; 4 MiB if 0
	// Dial is added at the end.
	Dial []grpc.DialOption
}

// Dial returns a connection to the socket at path. It connects on the first
// call and again whenever the server came back, so it succeeds while nothing
// listens.
func Dial(path string, o Options) (*grpc.ClientConn, error) {
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("dial %q: the socket's path is not absolute", path)
	}
	if len(path) > 107 {
		return nil, fmt.Errorf("dial %q: the path is %d bytes long; at most 107 fit into a unix address", path, len(path))
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
	if o.MaxAttempts == 0 {
		o.MaxAttempts = 5
	}
	if o.MaxAttempts < 1 || o.MaxAttempts > 5 {
		return nil, fmt.Errorf("dial %s: MaxAttempts is %d, want 1 to 5", path, o.MaxAttempts)
	}
	if o.MaxRecv == 0 {
		o.MaxRecv = 16 << 20
	}
	if o.MaxSend == 0 {
		o.MaxSend = 4 << 20
	}
	config, err := serviceConfig(o)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	opts := []grpc.DialOption{
		// The kernel guards the socket by its mode; there is nothing to encrypt.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}),
		grpc.WithAuthority("localhost"),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultServiceConfig(config),
		grpc.WithConnectParams(grpc.ConnectParams{
			// Local: a restarted server is back in a blink.
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(o.MaxRecv),
			grpc.MaxCallSendMsgSize(o.MaxSend),
			grpc.WaitForReady(o.WaitForReady),
		),
		grpc.WithChainUnaryInterceptor(requestid.UnaryClient(), deadline(o.Timeout)),
		grpc.WithChainStreamInterceptor(requestid.StreamClient()),
		grpc.WithIdleTimeout(0),
	}
	// "passthrough" keeps the resolver, which is not needed, out of the way.
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

func serviceConfig(o Options) (string, error) {
	type name struct {
		Service string `json:"service"`
		Method  string `json:"method,omitempty"`
	}
	type retry struct {
		MaxAttempts          int      `json:"maxAttempts"`
		InitialBackoff       string   `json:"initialBackoff"`
		MaxBackoff           string   `json:"maxBackoff"`
		BackoffMultiplier    float64  `json:"backoffMultiplier"`
		RetryableStatusCodes []string `json:"retryableStatusCodes"`
	}
	type method struct {
		Name  []name `json:"name"`
		Retry retry  `json:"retryPolicy"`
	}
	var config struct {
		Method []method `json:"methodConfig,omitempty"`
	}
	if len(o.Idempotent) > 0 && o.MaxAttempts > 1 {
		m := method{Retry: retry{
			MaxAttempts: o.MaxAttempts, InitialBackoff: "0.05s", MaxBackoff: "1s", BackoffMultiplier: 2,
			RetryableStatusCodes: []string{"UNAVAILABLE"},
		}}
		for _, s := range o.Idempotent {
			service, rpc, _ := strings.Cut(strings.TrimPrefix(s, "/"), "/")
			if service == "" || strings.HasPrefix(s, "/") != (rpc != "") {
				return "", fmt.Errorf("idempotent %q is neither \"package.Service\" nor \"/package.Service/Method\"", s)
			}
			m.Name = append(m.Name, name{Service: service, Method: rpc})
		}
		config.Method = []method{m}
	}
	b, err := json.Marshal(config)
	return string(b), err
}
