// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"context"
	"errors"
	"fmt"

	"buf.build/go/protovalidate"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// What is said of a bad message: it goes into headers, of which clients take
// little, and is made of what a hostile caller sent.
const (
	maxViolations = 32       // that are named; the others are counted
	maxExplained  = 64 << 10 // bytes of a message of which more than the first violation is looked for
)

// checkMessage answers INVALID_ARGUMENT with a BadRequest that names the fields
// which break a rule of their proto file: at most maxViolations of them, and
// one of a large message, whose millions of bad elements would each be an object.
func checkMessage(v protovalidate.Validator, msg any) error {
	m, ok := msg.(proto.Message)
	if !ok {
		return status.Errorf(codes.Internal, "a message of type %T is not a proto.Message", msg)
	}
	err := v.Validate(m, protovalidate.WithFailFast())
	if err == nil {
		return nil
	}
	if proto.Size(m) <= maxExplained {
		err = v.Validate(m)
	}
	var invalid *protovalidate.ValidationError
	if !errors.As(err, &invalid) { // the rule itself does not compile or run
		return status.Errorf(codes.Internal, "validate %s: %v", m.ProtoReflect().Descriptor().FullName(), err)
	}
	more := len(invalid.Violations) - maxViolations
	if more > 0 {
		invalid.Violations = invalid.Violations[:maxViolations]
	}
	bad := &errdetails.BadRequest{}
	for _, violation := range invalid.Violations {
		bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field:       protovalidate.FieldPathString(violation.Proto.GetField()),
			Description: violation.Proto.GetMessage(),
			Reason:      violation.Proto.GetRuleId(),
		})
	}
	text := invalid.Error()
	if more > 0 {
		text += fmt.Sprintf("\n - and %d more", more)
	}
	st := status.New(codes.InvalidArgument, text)
	if detailed, err := st.WithDetails(bad); err == nil {
		st = detailed
	}
	return st.Err()
}

func (s *Server) validateUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if !always(info.FullMethod) {
		if err := checkMessage(s.validator, req); err != nil {
			return nil, err
		}
	}
	return next(ctx, req)
}

func (s *Server) validateStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if !always(info.FullMethod) {
		ss = &validatingStream{ServerStream: ss, validator: s.validator}
	}
	return next(srv, ss)
}

type validatingStream struct {
	grpc.ServerStream
	validator protovalidate.Validator
}

func (s *validatingStream) RecvMsg(m any) error {
	if err := s.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return checkMessage(s.validator, m)
}
