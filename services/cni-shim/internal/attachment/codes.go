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

	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
	"github.com/sluice-net/sluice/services/cni-shim/internal/netns"
	"github.com/sluice-net/sluice/services/cni-shim/internal/spool"
	"github.com/sluice-net/sluice/services/cni-shim/internal/unary"
)

// CNI reserves codes from 100 upwards for the plugin. The library has no constants for the codes of STATUS.
const (
	CodeInternal    uint = 100 // a bug, or an unforeseen error
	CodeDifferent   uint = 101 // CHECK: the attachment differs from ADD's result
	CodePermission  uint = 102 // a service refuses calls of this user
	CodeUnavailable uint = 50  // STATUS: ADD cannot be served
	CodeLimited     uint = 51  // STATUS: ADD cannot be served, and existing attachments are impaired
)

// cniError converts an error of the action what to a CNI error. Codes are chosen only here; an error that is already a
// CNI error keeps its code.
func cniError(what string, err error) *cni.Error {
	if ready, ok := errors.AsType[*cni.Error](err); ok {
		return ready
	}
	answer := func(code uint, advice string) *cni.Error {
		return cni.NewError(code, what+": "+explain(err), join(details(err), advice))
	}
	switch {
	case errors.Is(err, netns.ErrInvalid):
		return answer(cni.ErrInvalidEnvironment, "")
	case errors.Is(err, spool.ErrFull):
		return answer(cni.ErrTryAgainLater, "start sluice-datapath; it empties the spool")
	case errors.Is(err, spool.ErrNoState):
		// The runtime repeats the call until the datapath serves or the node is prepared.
		return answer(cni.ErrTryAgainLater, "set runDir and stateDir to the directories of this node's services; see `sluice prepare`")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), isShort(err):
		return answer(cni.ErrTryAgainLater, "")
	}
	code := unary.CodeOf(err)
	switch code {
	case unary.InvalidArgument, unary.FailedPrecondition:
		switch {
		case aboutEnvironment(err):
			return answer(cni.ErrInvalidEnvironment, "")
		case code == unary.InvalidArgument:
			return answer(cni.ErrInvalidConfig, "")
		}
		// The reason is a lease that was lost repeatedly, an address of another owner, or a record that cannot
		// be read.
		return answer(cni.ErrTryAgainLater, "")
	case unary.AlreadyExists:
		return answer(cni.ErrInvalidConfig, "")
	case unary.Unavailable:
		return answer(cni.ErrTryAgainLater, "see `sluice status`")
	case unary.Aborted, unary.ResourceExhausted, unary.DeadlineExceeded, unary.Canceled:
		return answer(cni.ErrTryAgainLater, "")
	case unary.Unimplemented:
		return answer(cni.ErrIncompatibleVersion, "the services are older than the plugin")
	case unary.PermissionDenied, unary.Unauthenticated:
		return answer(CodePermission, "the plugin must run as root")
	default:
		return answer(CodeInternal, "")
	}
}

// isShort reports whether the error is caused by the machine: it lacks a resource, or refuses writes. The text of the
// error contains the file.
func isShort(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{
		syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EIO, syscall.ENOMEM, syscall.ENFILE, syscall.EMFILE,
	}, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// explain returns the text of an error without gRPC's prefix.
func explain(err error) string {
	if away, ok := errors.AsType[*absentError](err); ok {
		return away.Error()
	}
	if e, ok := errors.AsType[*unary.Error](err); ok {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return err.Error()
}

// text returns the text of a call's error, without its code.
func text(err error) string {
	if e, ok := errors.AsType[*unary.Error](err); ok {
		return e.Message
	}
	return err.Error()
}

// Reasons in answers of services on which the plugin acts.
const (
	reasonNamespaceUnusable  = "datapath.sluice.io/NETWORK_NAMESPACE_UNUSABLE"
	reasonNamespaceRemoved   = "datapath.sluice.io/NETWORK_NAMESPACE_REMOVED"
	reasonSecondInterface    = "datapath.sluice.io/SECOND_INTERFACE_REFUSED"
	reasonInterfaceNameTaken = "datapath.sluice.io/INTERFACE_NAME_TAKEN"
	reasonAddressInUse       = "datapath.sluice.io/ADDRESS_IN_USE"
	reasonLeaseLost          = "datapath.sluice.io/LEASE_LOST"
	reasonAllocationNotFound = "ipam.sluice.io/ALLOCATION_NOT_FOUND"
	reasonAddressesDiffer    = "ipam.sluice.io/ADDRESSES_DIFFER"
	reasonAddressUnavailable = "ipam.sluice.io/ADDRESS_UNAVAILABLE"
)

// hasReason reports whether an answer has one of these reasons.
func hasReason(err error, reasons ...string) bool {
	reason, _, ok := unary.Reason(err)
	return ok && slices.Contains(reasons, reason)
}

// aboutEnvironment reports whether a service refused a value from a CNI variable: the container ID, the interface name
// or the namespace.
func aboutEnvironment(err error) bool {
	if hasReason(err, reasonNamespaceUnusable, reasonNamespaceRemoved, reasonSecondInterface, reasonInterfaceNameTaken) {
		return true
	}
	for _, v := range unary.Fields(err) {
		field := v.Field
		if field == "network_namespace" || field == "owner" || strings.HasPrefix(field, "owner.") || field == "interface_name" {
			return true
		}
	}
	return false
}

// leaseLost reports whether the datapath has refused a call because the lease of the addresses has ended, so that a new
// lease helps.
func leaseLost(err error) bool {
	return hasReason(err, reasonLeaseLost, reasonAllocationNotFound, reasonAddressesDiffer, reasonAddressUnavailable)
}

// addressInUse reports whether the datapath has refused a call because another endpoint has one of the addresses.
func addressInUse(err error) bool {
	return hasReason(err, reasonAddressInUse)
}

// details formats the reason and the details of a service's answer, except those that its text already contains.
func details(err error) string {
	var words []string
	if reason, facts, ok := unary.Reason(err); ok {
		text := "reason " + reason
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
	for _, v := range unary.Fields(err) {
		add(v.Field, v.Description)
	}
	for _, v := range unary.Quotas(err) {
		add(v.Subject, v.Description)
	}
	return join(words...)
}

func join(words ...string) string {
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), "; ")
}

// about puts what before text, unless text already begins with it.
func about(what, text string) string {
	if strings.HasPrefix(text, what) {
		return text
	}
	return what + ": " + text
}

// answered reports whether an error is the answer of the server, which has then undone its steps, and not an error of
// the connection. UNAVAILABLE has a reason if it comes from a service. INTERNAL does not count, because a handler may
// have failed after some steps.
func answered(err error) bool {
	switch unary.CodeOf(err) {
	case unary.DeadlineExceeded, unary.Canceled, unary.Unknown, unary.Internal:
		return false
	case unary.Unavailable:
		_, _, ok := unary.Reason(err)
		return ok
	}
	return true
}
