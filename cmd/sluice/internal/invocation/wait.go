// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"cmp"
	"errors"
	"strconv"
	"time"

	"github.com/spf13/cobra"
)

// Wait is the value of --wait: how long to wait for the kernel to enforce a change.
type Wait struct {
	off   bool
	limit time.Duration // 0: the value of --timeout
}

// Flag adds --wait to a command.
func (w *Wait) Flag(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(w, "wait",
		"wait up to this `duration` for the kernel to enforce the change; false: do not wait (default: --timeout)")
	f.Lookup("wait").NoOptDefVal = "true"
	f.Lookup("wait").DefValue = ""
}

// WithoutWait takes the duration of "--wait 5s" from the arguments of a command. The flag has an optional value,
// which pflag accepts only as "--wait=5s".
func WithoutWait(cmd *cobra.Command, args []string) []string {
	f := cmd.Flags().Lookup("wait")
	if f == nil || !f.Changed || len(args) == 0 {
		return args
	}
	w, ok := f.Value.(*Wait)
	if !ok || w.off || w.limit != 0 {
		return args
	}
	if d, err := time.ParseDuration(args[0]); err != nil || d <= 0 {
		return args
	}
	_ = w.Set(args[0]) // args[0] is a valid duration
	return args[1:]
}

// Off reports whether the command does not wait.
func (w *Wait) Off() bool { return w.off }

// Limit returns the duration of --wait, or timeout if --wait has none.
func (w *Wait) Limit(timeout time.Duration) time.Duration { return cmp.Or(w.limit, timeout) }

// String implements pflag.Value.
func (w *Wait) String() string {
	switch {
	case w.off:
		return "false"
	case w.limit == 0:
		return "true"
	default:
		return w.limit.String()
	}
}

// Set implements pflag.Value.
func (w *Wait) Set(text string) error {
	if on, err := strconv.ParseBool(text); err == nil {
		*w = Wait{off: !on}
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return errors.New("want true, false or a duration such as 5s")
	}
	*w = Wait{limit: d}
	return nil
}

// Type implements pflag.Value.
func (*Wait) Type() string { return "wait" }
