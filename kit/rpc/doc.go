// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpc serves gRPC on a unix socket to peers that the kernel vouches for.
//
// A Server is built from a table that says, for every method, who may call it
// and how much of it may run at once; a method that the table forgets makes
// NewServer fail. Every call passes, in this order: request identifier,
// Prometheus, logging of the finish, authorisation, limits, protovalidate,
// recovery. Health and reflection are always served, to whoever can connect;
// all callers but root may have MaxAlwaysStreams of their streams open together.
//
// Who can connect is decided by the socket's mode and group; the kernel tells
// only the primary group of a peer, so "the group" in a table means everybody
// who got as far as connecting.
//
// The client side is in package client, which imports little, so that a
// short-lived process starts fast.
package rpc
