// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Exit codes.
const (
	ExitFailed   = 1
	ExitUsage    = 2
	ExitNotReady = 3 // `status`: a service does not serve, or ADD is refused; `policy`: the kernel does not enforce it
)

// ExitError ends the program with an exit code.
type ExitError struct {
	Code int
	Err  error // nil: the output has said why
}

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d: %v", e.Code, e.Err) }

func (e *ExitError) Unwrap() error { return e.Err }

var (
	// ErrReported is returned by commands whose output says what is wrong.
	ErrReported error = &ExitError{Code: ExitFailed}
	// ErrNotReady is returned by commands whose output says why the node is not
	// ready, or why the kernel does not enforce a change.
	ErrNotReady error = &ExitError{Code: ExitNotReady}
)

// complain prints an error to standard error, in the format that was asked for.
func (c *Invocation) complain(err error) {
	var usage *UsageError
	text := err.Error()
	if !errors.As(err, &usage) {
		text = c.explain(err)
	}
	if c.Format == "json" {
		encoder := json.NewEncoder(c.ErrOut)
		encoder.SetEscapeHTML(false)
		if encoder.Encode(map[string]string{"error": text}) == nil {
			return
		}
	}
	fmt.Fprintf(c.ErrOut, "sluice: %s\n", text)
}

// UsageError is a mistake on the command line.
type UsageError struct{ err error }

func (e *UsageError) Error() string { return e.err.Error() }

func (e *UsageError) Unwrap() error { return e.err }

// Usagef is a UsageError of a formatted text.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// explain puts an error into words, and says what to look at where that is
// known.
func (c *Invocation) explain(err error) string {
	st, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	text := Reason(st)
	switch st.Code() {
	case codes.Unavailable:
		if strings.HasSuffix(text, syscall.EACCES.Error()) {
			return text + "\n" + WhoMay
		}
		if dir, err := c.socket("ipam"); err == nil {
			return fmt.Sprintf("%s\n%sDoes it run? Its sockets are expected under %s; `sluice status` shows which services answer.", text, c.OtherNodes(), filepath.Dir(filepath.Dir(dir)))
		}
	case codes.PermissionDenied: // the socket let the caller in, the method did not
		return text + "\n" + rootOnly
	case codes.NotFound, codes.InvalidArgument, codes.AlreadyExists, codes.FailedPrecondition, codes.ResourceExhausted, codes.OutOfRange, codes.Aborted:
		return text
	case codes.Unimplemented:
		return text + "\nIs the service of an older version than this program?"
	}
	return fmt.Sprintf("%s: %s", st.Code(), text)
}

// OtherNodes names the development nodes of this machine, of which one was
// probably meant if no instance was named.
func (c *Invocation) OtherNodes() string {
	if c.Instance != "" || c.RunDir != "" {
		return ""
	}
	found, err := filepath.Glob("/run/sluice-*/dev.json")
	if err != nil || len(found) == 0 || len(found) > 8 {
		return ""
	}
	for i, path := range found {
		found[i] = "--instance " + strings.TrimPrefix(filepath.Base(filepath.Dir(path)), "sluice-")
	}
	return fmt.Sprintf("There are development nodes: %s.\n", strings.Join(found, ", "))
}

// Who may open a socket, and what that is not enough for.
const (
	WhoMay   = "Be root, or a member of group 65700."
	rootOnly = "Only root may do this; the group may only read."
)

// Reason is a status in words. Of a connection that could not be made it is
// what the kernel said, without gRPC's layers around it.
func Reason(st *status.Status) string {
	text := st.Message()
	if i := strings.Index(text, "dial unix "); st.Code() == codes.Unavailable && i >= 0 {
		return strings.TrimSuffix(text[i:], `"`)
	}
	return text
}
