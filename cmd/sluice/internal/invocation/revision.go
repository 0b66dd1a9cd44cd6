// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"strconv"

	"github.com/spf13/cobra"
)

// Revision is the value of --expect-revision. The zero value means that the flag is not set.
type Revision struct{ number *uint64 }

// Flag adds --expect-revision to a command. what describes the revision: "the policy revision".
func (r *Revision) Flag(cmd *cobra.Command, what string) {
	cmd.Flags().Var(r, "expect-revision", "change nothing and fail unless "+what+" is this one")
	RenamedFlag(cmd, "if-revision", "expect-revision")
}

// Expected returns the revision, or nil if the flag is not set.
func (r *Revision) Expected() *uint64 { return r.number }

// Set implements pflag.Value.
func (r *Revision) Set(text string) error {
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return Usagef("%q is not a whole number from 0 on", text)
	}
	r.number = &n
	return nil
}

// String implements pflag.Value.
func (r *Revision) String() string {
	if r.number == nil {
		return ""
	}
	return strconv.FormatUint(*r.number, 10)
}

// Type implements pflag.Value.
func (*Revision) Type() string { return "revision" }
