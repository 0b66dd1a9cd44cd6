// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// limitAnswers fails streamed answers that are larger than limit bytes.
func limitAnswers(limit int) grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
		opts ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		s, err := streamer(ctx, desc, cc, method, opts...)
		if err != nil {
			return nil, err
		}
		return &limitedStream{ClientStream: s, limit: limit, left: limit}, nil
	}
}

type limitedStream struct {
	grpc.ClientStream
	limit, left int // bytes
}

// RecvMsg implements grpc.ClientStream.
func (s *limitedStream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil {
		return err
	}
	if m, ok := m.(proto.Message); ok {
		s.left -= proto.Size(m)
	}
	if s.left < 0 {
		return status.Errorf(codes.ResourceExhausted, "the answer is longer than %d bytes", s.limit)
	}
	return nil
}
