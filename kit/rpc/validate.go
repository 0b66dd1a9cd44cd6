// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpc

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"buf.build/go/protovalidate"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// maxExplained is the maximum size in bytes of messages for which more than the first violation is
// reported.
const maxExplained = 64 << 10

// checkMessage returns INVALID_ARGUMENT with a BadRequest that names the fields which violate the rules of their proto
// file: at most rpcerr.MaxViolations fields, and only one for a large message, because each of millions of invalid
// elements would create an object.
func checkMessage(v protovalidate.Validator, msg any) error {
	m, ok := msg.(proto.Message)
	if !ok {
		return rpcerr.New(codes.Internal, rpcerr.Panicked, fmt.Errorf("a message of type %T is not a proto.Message", msg))
	}
	err := v.Validate(m, protovalidate.WithFailFast())
	if err == nil {
		return nil
	}
	if proto.Size(m) <= maxExplained {
		err = v.Validate(m)
	}
	var invalid *protovalidate.ValidationError
	if !errors.As(err, &invalid) { // the rule itself failed to compile or run
		return rpcerr.New(codes.Internal, rpcerr.Panicked, fmt.Errorf("validate %s: %w", m.ProtoReflect().Descriptor().FullName(), err))
	}
	more := len(invalid.Violations) - rpcerr.MaxViolations
	if more > 0 {
		invalid.Violations = invalid.Violations[:rpcerr.MaxViolations]
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
	return rpcerr.New(codes.InvalidArgument, rpcerr.InvalidMessage, errors.New(text), bad)
}

// prepare compiles the rules of the requests of prepared methods.
func (s *Server) prepare() {
	for name, m := range s.methods {
		if !m.Prepared {
			continue
		}
		full := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(name, "/"), "/", "."))
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(full)
		method, ok := d.(protoreflect.MethodDescriptor)
		if err != nil || !ok {
			continue // the first call compiles the rules
		}
		request, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
		if err != nil {
			continue
		}
		_ = s.validator.Validate(request.New().Interface()) // the result for an empty message does not matter
	}
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
