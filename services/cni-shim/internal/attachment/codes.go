// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
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
	if ready, ok := errors.AsType[*types.Error](err); ok {
		return ready
	}
	answer := func(code uint, advice string) *types.Error {
		return types.NewError(code, what+": "+message(err), join(details(err), advice))
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
	case codes.InvalidArgument, codes.FailedPrecondition:
		switch {
		case aboutEnvironment(err):
			return answer(types.ErrInvalidEnvironmentVariables, "")
		case st.Code() == codes.InvalidArgument:
			return answer(types.ErrInvalidNetworkConfig, "")
		}
		// A lease that was lost again and again, an address that another owner has,
		// or a record that cannot be read.
		return answer(types.ErrTryAgainLater, "")
	case codes.AlreadyExists:
		return answer(types.ErrInvalidNetworkConfig, "")
	case codes.Unavailable:
		return answer(types.ErrTryAgainLater, "see `sluice status`")
	case codes.Aborted, codes.ResourceExhausted, codes.DeadlineExceeded, codes.Canceled:
		return answer(types.ErrTryAgainLater, "")
	case codes.Unimplemented:
		return answer(types.ErrIncompatibleCNIVersion, "the services are older than the plugin")
	case codes.PermissionDenied, codes.Unauthenticated:
		return answer(CodePermission, "the plugin must run as root")
	default:
		return answer(CodeInternal, "")
	}
}

// isShort says whether the machine lacks something, or refuses writes, for which
// neither the plugin nor its caller is to blame. The error's text has the file.
func isShort(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{
		syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EIO, syscall.ENOMEM, syscall.ENFILE, syscall.EMFILE,
	}, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// message is the text of an error without gRPC's own wrapping.
func message(err error) string {
	if away, ok := errors.AsType[*absentError](err); ok {
		return away.Error()
	}
	if st, ok := status.FromError(err); ok {
		return fmt.Sprintf("%s: %s", st.Code(), st.Message())
	}
	return err.Error()
}

// aboutEnvironment says whether what a service refuses came from a CNI
// variable: the container id, the interface name or the namespace.
func aboutEnvironment(err error) bool {
	if rpcerr.Is(err,
		datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED,
		datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED, datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN,
	) {
		return true
	}
	for _, v := range rpcerr.Fields(err) {
		field := v.GetField()
		if field == "network_namespace" || field == "owner" || strings.HasPrefix(field, "owner.") || field == "interface_name" {
			return true
		}
	}
	return false
}

// leaseLost says whether the datapath refuses because the lease of the addresses
// is gone, which a new one cures.
func leaseLost(err error) bool {
	return rpcerr.Is(err,
		datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST, ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND,
		ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER, ipamv1.ErrorReason_ERROR_REASON_ADDRESS_UNAVAILABLE,
	)
}

// addressInUse says whether the datapath refuses because a live endpoint has one
// of the addresses.
func addressInUse(err error) bool {
	return rpcerr.Is(err, datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE)
}

// details puts the reason and the details of a service's answer into words,
// less what its text says already.
func details(err error) string {
	var words []string
	if reason, ok := rpcerr.ReasonIn(err); ok {
		text := "reason " + reason.String()
		facts := rpcerr.Facts(err)
		for _, k := range slices.Sorted(maps.Keys(facts)) {
			text += fmt.Sprintf(" %s=%s", k, facts[k])
		}
		words = append(words, text)
	}
	add := func(what, text string) {
		if text = about(what, text); !strings.Contains(err.Error(), text) {
			words = append(words, text)
		}
	}
	for _, v := range rpcerr.Fields(err) {
		add(v.GetField(), v.GetDescription())
	}
	for _, v := range rpcerr.Quotas(err) {
		add(v.GetSubject(), v.GetDescription())
	}
	return join(words...)
}

func join(words ...string) string {
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), "; ")
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
// service decides on has a reason; one of the connection does not. INTERNAL may
// be a handler that broke off half-way.
func answered(err error) bool {
	switch status.Code(err) {
	case codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.Internal:
		return false
	case codes.Unavailable:
		_, ok := rpcerr.ReasonIn(err)
		return ok
	}
	return true
}
