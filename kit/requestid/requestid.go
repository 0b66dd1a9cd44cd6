// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package requestid passes one identifier through all processes that handle a request, so that
// their logs can be correlated.
//
// The identifier is not trusted: it is only used in logs, so it need not be hard to guess. The
// package links neither gRPC nor cryptography, because the CNI plugin, which runs for a few
// milliseconds, uses it; package rpcid of kit/rpc adds the identifier to calls.
package requestid

import (
	"context"
	"fmt"
	"math/rand/v2"
)

// Key is the gRPC metadata key that carries the identifier.
const Key = "sluice-request-id"

// MaxLen is the maximum length of an identifier from a peer.
const MaxLen = 64

type contextKey struct{}

// New returns a random identifier of 16 hexadecimal digits.
func New() string { return fmt.Sprintf("%016x", rand.Uint64()) }

// Valid reports whether id may be logged: 1 to MaxLen letters, digits, "-", "_", "." and ":".
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

// Into returns a context with id, or ctx itself if id is invalid.
func Into(ctx context.Context, id string) context.Context {
	if !Valid(id) {
		return ctx
	}
	return context.WithValue(ctx, contextKey{}, id)
}

// From returns the identifier in ctx, or "".
func From(ctx context.Context) string {
	id, _ := ctx.Value(contextKey{}).(string)
	return id
}
