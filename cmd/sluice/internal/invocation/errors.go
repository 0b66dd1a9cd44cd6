// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// Exit codes.
const (
	ExitFailed   = 1
	ExitUsage    = 2
	ExitNotReady = 3 // `status`: a service does not serve, or ADD would fail; `policy`: not enforced by the kernel
)

// ExitError ends the program with an exit code.
type ExitError struct {
	Code int
	Err  error // nil: the output already explains it
}

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d: %v", e.Code, e.Err) }

func (e *ExitError) Unwrap() error { return e.Err }

var (
	// ErrReported is returned by a command that has already printed the problem.
	ErrReported error = &ExitError{Code: ExitFailed}
	// ErrNotReady is returned by a command that has already printed why the node is not ready, or why the kernel
	// does not enforce a change.
	ErrNotReady error = &ExitError{Code: ExitNotReady}
)

// complain prints an error to standard error in the format of --output.
func (c *Invocation) complain(err error) {
	var usage *UsageError
	text := err.Error()
	if !errors.As(err, &usage) {
		text = c.explain(err)
	}
	if c.Format == "json" {
		encoder := json.NewEncoder(c.ErrOut)
		encoder.SetEscapeHTML(false)
		if encoder.Encode(objectOf(text, err)) == nil {
			return
		}
	}
	// Escape control characters, because a name in the error may come from a container.
	for i, line := range strings.Split(text, "\n") {
		if i == 0 {
			line = "sluice: " + line
		}
		fmt.Fprintln(c.ErrOut, output.Printable(line))
	}
}

// wantsJSON reports whether the arguments contain --output json. It does not use the flag parser, which may have
// stopped at an earlier mistake. If --output occurs several times, the last one counts.
func wantsJSON(args []string) (wants bool) {
	for i, a := range args {
		value, given := "", true
		switch {
		case a == "--":
			return wants
		case (a == "--output" || a == "-o") && i+1 < len(args):
			value = args[i+1]
		case strings.HasPrefix(a, "--output="):
			value = strings.TrimPrefix(a, "--output=")
		case strings.HasPrefix(a, "-o"):
			value = strings.TrimPrefix(strings.TrimPrefix(a, "-o"), "=")
		default:
			given = false
		}
		if given {
			wants = value == "json"
		}
	}
	return wants
}

// object is an error as JSON. Code, reason, domain and metadata are set if a service returned them; programs branch
// on them.
type object struct {
	Error    string            `json:"error"`
	Code     string            `json:"code,omitempty"`
	Reason   string            `json:"reason,omitempty"`
	Domain   string            `json:"domain,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func objectOf(text string, err error) object {
	o := object{Error: text}
	if reason, ok := rpcerr.ReasonIn(err); ok {
		o.Code, o.Reason, o.Domain = code.Code(status.Code(err)).String(), reason.Name, reason.Domain
		o.Metadata = rpcerr.Facts(err)
	}
	return o
}

// UsageError reports a mistake on the command line.
type UsageError struct{ err error }

func (e *UsageError) Error() string { return e.err.Error() }

func (e *UsageError) Unwrap() error { return e.err }

// Usagef returns a UsageError with a formatted text.
func Usagef(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// explain returns the text of an error for people, with a hint about what to check next if there is one.
func (c *Invocation) explain(err error) string {
	st, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	text := st.Message()
	switch st.Code() {
	case codes.Unavailable:
		if errors.Is(err, syscall.EACCES) {
			return text + "\n" + WhoMay
		}
		if reason, ok := rpcerr.ReasonIn(err); ok { // the service answered
			return fmt.Sprintf("%s\nThe reason is %s; `sluice status` shows what the services report.", text, reason)
		}
		if dir, err := c.Socket("ipam"); err == nil {
			return fmt.Sprintf("%s\n%sDoes it run? Its sockets are expected under %s; `sluice status` shows which "+
				"services answer.", text, c.OtherNodes(), filepath.Dir(filepath.Dir(dir)))
		}
	case codes.PermissionDenied: // the socket admitted the caller, but the method refused the call
		return text + "\n" + rootOnly
	case codes.NotFound, codes.InvalidArgument, codes.AlreadyExists, codes.FailedPrecondition, codes.ResourceExhausted,
		codes.OutOfRange, codes.Aborted:
		return text
	case codes.Unimplemented:
		return text + "\nThe service may be older than this program."
	}
	return fmt.Sprintf("%s: %s", st.Code(), text)
}

// OtherNodes lists the development nodes of this machine, as a hint for a command without --instance, or with the
// instance of a cluster of several nodes.
func (c *Invocation) OtherNodes() string {
	if c.RunDir != "" {
		return ""
	}
	return otherNodes("/run", c.Instance)
}

func otherNodes(run, instance string) string {
	prefix := filepath.Join(run, "sluice-")
	which := "*"
	if _, err := os.Stat(prefix + instance); instance != "" && err == nil {
		which = instance + "-*"
		if _, err := os.Stat(prefix + instance + "/cluster.json"); err != nil {
			return ""
		}
	}
	found, err := filepath.Glob(prefix + which + "/dev.json")
	if err != nil || len(found) == 0 || len(found) > 16 {
		return ""
	}
	for i, path := range found {
		found[i] = "--instance " + strings.TrimPrefix(filepath.Base(filepath.Dir(path)), "sluice-")
	}
	return fmt.Sprintf("There are development nodes: %s.\n", strings.Join(found, ", "))
}

// Hints for permission errors.
const (
	WhoMay   = "Be root, or a member of group 65700."
	rootOnly = "Only root may do this; the group may only read."
)

// Note prints a note to standard error in the format of --output.
func (c *Invocation) Note(text string) {
	if c.Format == "json" {
		encoder := json.NewEncoder(c.ErrOut)
		encoder.SetEscapeHTML(false)
		_ = encoder.Encode(map[string]string{"note": text})
		return
	}
	fmt.Fprintln(c.ErrOut, output.Printable("sluice: note: "+text))
}
