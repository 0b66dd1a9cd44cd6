// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpcid adds the request identifier to the metadata of gRPC calls, and reads it from there.
package rpcid

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/sluice-net/sluice/kit/requestid"
)

// incoming takes the identifier from the peer's metadata, or creates one.
func incoming(ctx context.Context) context.Context {
	if ids := metadata.ValueFromIncomingContext(ctx, requestid.Key); len(ids) == 1 && requestid.Valid(ids[0]) {
		return requestid.Into(ctx, ids[0])
	}
	return requestid.Into(ctx, requestid.New())
}

func outgoing(ctx context.Context) context.Context {
	id := requestid.From(ctx)
	if id == "" {
		return ctx
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok && len(md.Get(requestid.Key)) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, requestid.Key, id)
}

// UnaryServer adds the caller's identifier, or a new one, to the handler's context.
func UnaryServer() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		return next(incoming(ctx), req)
	}
}

// StreamServer is UnaryServer for streams.
func StreamServer() grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return next(srv, &serverStream{ServerStream: ss, ctx: incoming(ss.Context())})
	}
}

type serverStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *serverStream) Context() context.Context { return s.ctx }

// UnaryClient sends the identifier in the context with each call.
func UnaryClient() grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		return invoke(outgoing(ctx), method, req, reply, cc, opts...)
	}
}

// StreamClient is UnaryClient for streams.
func StreamClient() grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		return open(outgoing(ctx), desc, cc, method, opts...)
	}
}
