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

// Wait is the value of --wait: how long to wait until the kernel enforces a
// change.
type Wait struct {
	off   bool
	limit time.Duration // 0: that of --timeout
}

// Flag adds --wait to a command.
func (w *Wait) Flag(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(w, "wait",
		"wait at most this `duration` until the kernel enforces it; false: do not wait (default: as --timeout)")
	f.Lookup("wait").NoOptDefVal = "true"
	f.Lookup("wait").DefValue = ""
}

// WithoutWait are the arguments of a command without the time that its --wait was given as a word of its own: a flag
// that needs no value has it after "=" alone.
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
	_ = w.Set(args[0]) // it is a time
	return args[1:]
}

// Off says that the command does not wait.
func (w *Wait) Off() bool { return w.off }

// Limit is the time of --wait, or timeout if it has none.
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
		return errors.New("want true, false or a time such as 5s")
	}
	*w = Wait{limit: d}
	return nil
}

// Type implements pflag.Value.
func (*Wait) Type() string { return "wait" }
