// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// formerUntil is the release that no longer knows former names of commands and flags.
const formerUntil = "0.2.0"

// RenamedFlag has the flags of a command take the former name of one of them. Who gives it is told the new name by one
// line on standard error.
func RenamedFlag(cmd *cobra.Command, former, name string) {
	formerFlag(cmd, former, name)
	alias := cmd.Flags().Lookup(former)
	alias.Value = &renamed{alias.Value, func() { tellName(cmd, "--"+former, "--"+name) }}
}

// formerFlag is RenamedFlag for a flag that programs give: nobody is told.
func formerFlag(cmd *cobra.Command, former, name string) {
	alias := *cmd.Flags().Lookup(name)
	alias.Name, alias.Shorthand, alias.Hidden = former, "", true
	cmd.Flags().AddFlag(&alias)
}

// renamed is the value of a flag, given by its former name.
type renamed struct {
	pflag.Value
	tell func()
}

// Set implements pflag.Value.
func (r *renamed) Set(text string) error {
	r.tell()
	return r.Value.Set(text)
}

// RenamedCommand is a command under its former name, which help does not show. Who gives it is told the new name by one
// line on standard error.
func RenamedCommand(former string, command func(*Invocation) *cobra.Command) func(*Invocation) *cobra.Command {
	return func(inv *Invocation) *cobra.Command {
		cmd := command(inv)
		run, name := cmd.RunE, cmd.Name()
		cmd.Use, cmd.Hidden = former, true
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			tellName(cmd, former, name)
			return run(cmd, args)
		}
		return cmd
	}
}

// tellName names what a former name stands for. Standard output may be read by a program.
func tellName(cmd *cobra.Command, former, name string) {
	fmt.Fprintf(cmd.ErrOrStderr(), "sluice: %s is %s now; %s knows the former name no more\n", former, name, formerUntil)
}
