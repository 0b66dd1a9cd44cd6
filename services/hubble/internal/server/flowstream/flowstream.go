// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flowstream lets parts of this process call Hubble's API like a client, and writes its messages as JSON.
package flowstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
)

// Flows is the call GetFlows of the server.
type Flows func(*observer.GetFlowsRequest, grpc.ServerStreamingServer[observer.GetFlowsResponse]) error

// stream is the stream of one call.
type stream struct {
	grpc.ServerStream

	ctx  context.Context
	send func(*observer.GetFlowsResponse) error
}

// To returns a stream that passes each message to a function. The call ends with the function's error, or with ctx.
func To(
	ctx context.Context, send func(*observer.GetFlowsResponse) error,
) grpc.ServerStreamingServer[observer.GetFlowsResponse] {
	return &stream{ctx: ctx, send: send}
}

func (s *stream) Context() context.Context                { return s.ctx }
func (s *stream) Send(m *observer.GetFlowsResponse) error { return s.send(m) }
func (s *stream) SendHeader(metadata.MD) error            { return nil }
func (s *stream) SetHeader(metadata.MD) error             { return nil }
func (s *stream) SetTrailer(metadata.MD)                  {}
func (s *stream) SendMsg(any) error                       { return errors.ErrUnsupported }
func (s *stream) RecvMsg(any) error                       { return io.EOF }

// Line returns a message as one line of JSON, with the names of Hubble's API, as `hubble observe -o json` prints it.
func Line(m proto.Message) ([]byte, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, err
	}
	var line bytes.Buffer
	if err := json.Compact(&line, text); err != nil { // protojson adds blanks at random
		return nil, err
	}
	line.WriteByte('\n')
	return line.Bytes(), nil
}
