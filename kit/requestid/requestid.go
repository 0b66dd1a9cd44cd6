// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package requestid carries one identifier through every process that takes
// part in one request, so that their logs can be joined.
//
// The identifier is never trusted: it appears in logs and nowhere else.
package requestid

import (
	"context"
	"crypto/rand"
	"encoding/hex"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// Key is the gRPC metadata key that carries the identifier.
const Key = "sluice-request-id"

// MaxLen is the longest identifier that is accepted from a peer.
const MaxLen = 64

type contextKey struct{}

// New returns a random identifier of 16 hexadecimal digits.
func New() string {
	var b [8]byte
	rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// Valid says whether id may be logged: 1 to MaxLen of letters, digits, "-", "_", "." and ":".
func Valid(id string) bool {
	if id == "" || len(id) > MaxLen {
		return false
	}
	for _, c := range []byte(id) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case c == '-', c == '_', c == '.', c == ':':
		default:
			return false
		}
	}
	return true
}

// Into returns a context that carries id. An invalid id is not carried.
func Into(ctx context.Context, id string) context.Context {
	if !Valid(id) {
		return ctx
	}
	return context.WithValue(ctx, contextKey{}, id)
}

// From returns the identifier that ctx carries, or "".
func From(ctx context.Context) string {
	id, _ := ctx.Value(contextKey{}).(string)
	return id
}

// incoming takes the identifier from the peer's metadata, or makes one.
func incoming(ctx context.Context) context.Context {
	if ids := metadata.ValueFromIncomingContext(ctx, Key); len(ids) == 1 && Valid(ids[0]) {
		return Into(ctx, ids[0])
	}
	return Into(ctx, New())
}

func outgoing(ctx context.Context) context.Context {
	id := From(ctx)
	if id == "" {
		return ctx
	}
	if md, ok := metadata.FromOutgoingContext(ctx); ok && len(md.Get(Key)) > 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, Key, id)
}

// UnaryServer puts the caller's identifier, or a new one, into the handler's context.
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

// UnaryClient sends the context's identifier along.
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
