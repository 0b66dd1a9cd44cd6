// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/spool"
)

// CNI codes that are the plugin's own to define, from 100 upwards, and those
// of STATUS, which the library has no names for.
const (
	CodeInternal    uint = 100 // a bug, or something that nobody foresaw
	CodeDifferent   uint = 101 // CHECK: the attachment is not what ADD made
	CodePermission  uint = 102 // a service does not take calls from this user
	CodeUnavailable uint = 50  // STATUS: ADD cannot be served
	CodeLimited     uint = 51  // STATUS: and existing attachments suffer
)

// cniError chooses the CNI code of whatever went wrong in doing what. It is the
// only place where that is decided; errors that are CNI errors already keep
// their code.
func cniError(what string, err error) *types.Error {
	var ready *types.Error
	if errors.As(err, &ready) {
		return ready
	}
	answer := func(code uint, details string) *types.Error {
		text := message(err)
		if strings.Contains(text, details) {
			details = "" // most servers say it in the message too
		}
		return types.NewError(code, what+": "+text, details)
	}
	switch {
	case errors.Is(err, netns.ErrInvalid):
		return answer(types.ErrInvalidEnvironmentVariables, "")
	case errors.Is(err, spool.ErrFull):
		return answer(types.ErrTryAgainLater, "start sluice-datapath; it empties the spool")
	case errors.Is(err, spool.ErrNoState):
		// The runtime repeats it, until the datapath serves or the node is prepared.
		return answer(types.ErrTryAgainLater, "runDir and stateDir must be those of the services of this node; see `sluice prepare`")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), isShort(err):
		return answer(types.ErrTryAgainLater, "")
	}
	st, ok := status.FromError(err)
	if !ok {
		return answer(CodeInternal, "")
	}
	switch st.Code() {
	case codes.InvalidArgument:
		if aboutEnvironment(st) {
			return answer(types.ErrInvalidEnvironmentVariables, details(st))
		}
		return answer(types.ErrInvalidNetworkConfig, details(st))
	case codes.AlreadyExists:
		return answer(types.ErrInvalidNetworkConfig, details(st))
	case codes.FailedPrecondition:
		// A lease that was lost again and again, or an address that another owner
		// has; but not a device name that is taken inside the container.
		if aboutEnvironment(st) {
			return answer(types.ErrInvalidEnvironmentVariables, details(st))
		}
		return answer(types.ErrTryAgainLater, details(st))
	case codes.Unavailable:
		return answer(types.ErrTryAgainLater, "see `sluice status`")
	case codes.Aborted, codes.ResourceExhausted, codes.DeadlineExceeded, codes.Canceled:
		return answer(types.ErrTryAgainLater, details(st))
	case codes.Unimplemented:
		return answer(types.ErrIncompatibleCNIVersion, "the services are older than the plugin")
	case codes.PermissionDenied, codes.Unauthenticated:
		return answer(CodePermission, "the plugin must run as root")
	default:
		return answer(CodeInternal, details(st))
	}
}

// isShort says whether the machine lacks something, or refuses writes, for which
// neither the plugin nor its caller is to blame. The error's text has the file.
func isShort(err error) bool {
	for _, e := range []syscall.Errno{
		syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EIO, syscall.ENOMEM, syscall.ENFILE, syscall.EMFILE,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// message is the text of an error without gRPC's own wrapping.
func message(err error) string {
	var away *absentError
	if errors.As(err, &away) {
		return away.Error()
	}
	if st, ok := status.FromError(err); ok {
		return fmt.Sprintf("%s: %s", st.Code(), connection(st))
	}
	return err.Error()
}

// connection is the text of a status; of a connection that could not be made,
// what the kernel said, without gRPC's layers around it.
func connection(st *status.Status) string {
	text := st.Message()
	if i := strings.Index(text, "dial unix "); st.Code() == codes.Unavailable && i >= 0 {
		return strings.TrimSuffix(text[i:], `"`)
	}
	return text
}

// aboutEnvironment says whether what a service refuses came from a CNI
// variable: the container id, the interface name or the namespace.
func aboutEnvironment(st *status.Status) bool {
	from := func(field string) bool {
		return field == "network_namespace" || field == "owner" || strings.HasPrefix(field, "owner.") || field == "interface_name"
	}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				if from(v.GetField()) {
					return true
				}
			}
		case *errdetails.PreconditionFailure:
			for _, v := range d.GetViolations() {
				if from(v.GetSubject()) {
					return true
				}
			}
		}
	}
	return false
}

// leaseLost says whether the datapath refuses because the lease of the addresses
// is gone, which a new one cures; not because a device has the name already.
func leaseLost(err error) bool {
	st, ok := status.FromError(err)
	return ok && st.Code() == codes.FailedPrecondition && !aboutEnvironment(st)
}

// details puts the details of a status into words.
func details(st *status.Status) string {
	var words []string
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				words = append(words, about(v.GetField(), v.GetDescription()))
			}
		case *errdetails.PreconditionFailure:
			for _, v := range d.GetViolations() {
				words = append(words, about(v.GetSubject(), v.GetDescription()))
			}
		case *errdetails.QuotaFailure:
			for _, v := range d.GetViolations() {
				words = append(words, about(v.GetSubject(), v.GetDescription()))
			}
		}
	}
	return strings.Join(words, "; ")
}

// about joins what and text, unless text begins with it already.
func about(what, text string) string {
	if strings.HasPrefix(text, what) {
		return text
	}
	return what + ": " + text
}

// answered says whether an error was decided by the server, rather than by the
// way to it: then the server has undone what it did. An UNAVAILABLE that a
// server decides on carries a delay, as RetryInfo; one of the connection does
// not. INTERNAL may be a handler that broke off half-way.
func answered(err error) bool {
	st, ok := status.FromError(err)
	if !ok {
		return false
	}
	switch st.Code() {
	case codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.Internal:
		return false
	case codes.Unavailable:
		_, ok := retryDelay(err)
		return ok
	}
	return true
}
