// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"io"

	"google.golang.org/grpc"
)

// each calls f for every message of a stream that ends by itself.
func each[T any](stream grpc.ServerStreamingClient[T], f func(*T)) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		f(m)
	}
}
