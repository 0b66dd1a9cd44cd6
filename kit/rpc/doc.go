// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpc serves gRPC on unix sockets and identifies callers by kernel peer credentials.
//
// A Server is built from a table that defines, for every method, its permitted callers and its maximum number of
// concurrent calls. If the table lacks a registered method, NewServer fails. Every call passes these interceptors, in
// this order: request identifier, Prometheus, log of the finished call, authorisation, limits, protovalidate, panic
// recovery. The health and reflection services are always available to every user who can connect; all callers except
// root share MaxAlwaysStreams concurrent streams of these two services.
//
// The mode and the group of the socket decide who can connect. Peer credentials contain only the
// primary group of a peer, so "the group" in a table means every user who could connect.
//
// Clients use package client, which imports little, so that short-lived processes start fast.
package rpc
