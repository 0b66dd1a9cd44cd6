// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpcerr

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// file describes the API of a test service, because package kit knows no real one.
var file = built(&descriptorpb.FileDescriptorProto{
	Name: proto.String("t.proto"), Package: proto.String("sluice.ipam.v1"), Syntax: proto.String("proto3"),
	EnumType: []*descriptorpb.EnumDescriptorProto{{
		Name: proto.String("ErrorReason"),
		Value: []*descriptorpb.EnumValueDescriptorProto{
			{Name: proto.String("ERROR_REASON_UNSPECIFIED"), Number: proto.Int32(0)},
			{Name: proto.String("ERROR_REASON_POOL_EXHAUSTED"), Number: proto.Int32(1)},
		},
	}},
})

func built(p *descriptorpb.FileDescriptorProto) protoreflect.FileDescriptor {
	f, err := protodesc.NewFile(p, nil)
	if err != nil {
		panic(err)
	}
	return f
}

type reason int32

func (reason) Descriptor() protoreflect.EnumDescriptor { return file.Enums().Get(0) }
func (reason) Type() protoreflect.EnumType             { return nil }
func (r reason) Number() protoreflect.EnumNumber       { return protoreflect.EnumNumber(r) }

var exhausted = Reason{Domain: "ipam.sluice.io", Name: "POOL_EXHAUSTED"}

func TestReasonIsNamedByTheEnumOfItsService(t *testing.T) {
	if got := Of(reason(1)); got != exhausted {
		t.Errorf("Of(POOL_EXHAUSTED) = %v, want %v", got, exhausted)
	}
	if got, want := Of(reason(7)).String(), "ipam.sluice.io/UNKNOWN"; got != want {
		t.Errorf("a number without a name is %s, want %s", got, want)
	}
}

func TestAnswerIsReadAsItWasBuilt(t *testing.T) {
	err := New(codes.ResourceExhausted, exhausted, errors.New("no free address"),
		Quota("pool:10.0.0.0/24", "all in use"), Retry(time.Second), Quota("pool:fd00::/64", "all in use"),
		Field("addresses", "is not in a pool"), Metadata(map[string]string{"family": "IPv4"}))
	wrapped := fmt.Errorf("add: %w", err)
	if status.Code(wrapped) != codes.ResourceExhausted {
		t.Errorf("code is %s", status.Code(wrapped))
	}
	if r, ok := ReasonIn(wrapped); !ok || r != exhausted {
		t.Errorf("reason is %v, %v; want %v", r, ok, exhausted)
	}
	if !Is(wrapped, reason(0), reason(1)) || Is(wrapped, reason(0)) || Is(wrapped) {
		t.Error("Is does not find the reason, or finds another")
	}
	if !Has(wrapped, TooManyCalls, exhausted) || Has(wrapped, TooManyCalls) {
		t.Error("Has does not find the reason, or finds another")
	}
	if d, ok := RetryDelay(wrapped); !ok || d != time.Second {
		t.Errorf("retry delay is %v, %v; want 1s", d, ok)
	}
	if got := Quotas(wrapped); len(got) != 2 || got[1].GetSubject() != "pool:fd00::/64" {
		t.Errorf("quotas are %v, want the quotas of both pools", got)
	}
	if got := Fields(wrapped); len(got) != 1 || got[0].GetField() != "addresses" {
		t.Errorf("fields are %v, want addresses", got)
	}
	seen := map[string]bool{}
	for i, d := range status.Convert(err).Details() {
		name := string(protoadapt.MessageV2Of(d.(protoadapt.MessageV1)).ProtoReflect().Descriptor().FullName())
		if seen[name] {
			t.Errorf("%s is repeated", name)
		}
		seen[name] = true
		if info, ok := d.(*errdetails.ErrorInfo); ok && (i != 0 || info.GetMetadata()["family"] != "IPv4") {
			t.Errorf("detail %d is %v, want it first and with the metadata", i, info)
		}
	}
}

func TestErrorsWithoutAnAnswerHaveNoReason(t *testing.T) {
	for name, err := range map[string]error{
		"nil": nil, "plain": errors.New("plain"), "of the connection": status.Error(codes.Unavailable, "dial unix /x: connection refused"),
	} {
		if r, ok := ReasonIn(err); ok {
			t.Errorf("%s: reason %v", name, r)
		}
		if _, ok := RetryDelay(err); ok || Is(err, reason(1)) || Fields(err) != nil {
			t.Errorf("%s: details are read from it", name)
		}
	}
}

// TestAnswerOfAnotherServiceKeepsItsReason: a service that calls another one passes on its reason and details.
func TestAnswerOfAnotherServiceKeepsItsReason(t *testing.T) {
	lease := errors.New("the addresses are unavailable")
	theirs := New(codes.ResourceExhausted, exhausted, errors.New("no free address"), Quota("pool:10.0.0.0/24", "all in use"))
	err := fmt.Errorf("claim: %w: %w", lease, Answer(theirs))
	if want := "claim: the addresses are unavailable: no free address"; err.Error() != want {
		t.Errorf("text is %q, want %q", err, want)
	}
	if !errors.Is(err, lease) {
		t.Error("the core's own error is not found")
	}
	ours := New(codes.FailedPrecondition, Reason{"datapath.sluice.io", "LEASE_LOST"}, err, Retry(time.Second))
	if r, _ := ReasonIn(ours); r != exhausted {
		t.Errorf("reason is %v, want %v", r, exhausted)
	}
	if got := Quotas(ours); len(got) != 1 {
		t.Errorf("quotas are %v, want ipam's", got)
	}
	if _, ok := RetryDelay(ours); ok {
		t.Error("the answer asks to be repeated, which ipam did not")
	}
	if st := status.Convert(ours); st.Code() != codes.FailedPrecondition || st.Message() != err.Error() {
		t.Errorf("answer is %v, want the code and text of the service that gives it", st)
	}

	away := fmt.Errorf("claim: %w: %w", lease, Answer(status.Error(codes.Unavailable, "connection refused")))
	ours = New(codes.Unavailable, Reason{"datapath.sluice.io", "SERVICE_UNAVAILABLE"}, away, Retry(time.Second))
	if r, _ := ReasonIn(ours); r.Domain != "datapath.sluice.io" {
		t.Errorf("reason is %v; no other service gave one", r)
	}
	if _, ok := RetryDelay(ours); !ok {
		t.Error("the delay is lost")
	}
}

func TestSystemCallsErrorIsNamed(t *testing.T) {
	err := New(codes.Unavailable, Reason{"ipam.sluice.io", "STORAGE_FAILED"},
		fmt.Errorf("commit: %w", &os.PathError{Op: "fdatasync", Path: "/state", Err: syscall.EROFS}), Metadata(map[string]string{"file": "/state"}))
	if got := Facts(err); got["errno"] != "EROFS" || got["file"] != "/state" {
		t.Errorf("metadata is %v, want errno EROFS and the other keys", got)
	}
	if got := Facts(New(codes.Internal, exhausted, errors.New("x"))); len(got) != 0 {
		t.Errorf("metadata is %v without a system call", got)
	}
}

// TestHostileDetailsAreBounded: input from another service or from a caller is bounded before it is passed on.
func TestHostileDetailsAreBounded(t *testing.T) {
	long := strings.Repeat("\xffä", 1<<20)
	bad, quota := &errdetails.BadRequest{}, &errdetails.QuotaFailure{}
	for range 10_000 {
		bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: "f", Description: "d"})
		quota.Violations = append(quota.Violations, &errdetails.QuotaFailure_Violation{Subject: "s"})
	}
	bad.FieldViolations[0].Description, quota.Violations[0].Subject = long, long
	info := &errdetails.ErrorInfo{Domain: long, Reason: long, Metadata: map[string]string{}}
	for i := range 1000 {
		info.Metadata[fmt.Sprint(i)] = long[:4000]
	}
	err := New(codes.Internal, Reason{long, long}, errors.New(long), bad, quota, info, Resource(long, long, long), &emptypb.Empty{})
	st := status.Convert(err)
	if n := len(st.Message()); n > MaxText || !utf8.ValidString(st.Message()) {
		t.Errorf("the text is %d bytes long, want <= %d, in UTF-8", n, MaxText)
	}
	if n := len(st.Details()); n != 4 {
		t.Errorf("%d details, want the four that services send", n)
	}
	if n, limit := proto.Size(st.Proto()), 128<<10; n > limit {
		t.Errorf("the answer is %d bytes long, want <= %d", n, limit)
	}
	if len(Fields(err)) != MaxViolations || len(Quotas(err)) != MaxViolations {
		t.Errorf("%d and %d violations, want %d", len(Fields(err)), len(Quotas(err)), MaxViolations)
	}
}
