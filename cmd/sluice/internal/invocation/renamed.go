// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// formerUntil is the first release without the former names of commands and flags.
const formerUntil = "0.2.0"

// RenamedFlag adds a hidden flag under a former name. If it is used, one line with the new name is printed to standard
// error.
func RenamedFlag(cmd *cobra.Command, former, name string) {
	formerFlag(cmd, former, name)
	alias := cmd.Flags().Lookup(former)
	alias.Value = &renamed{alias.Value, func() { tellName(cmd, "--"+former, "--"+name) }}
}

// formerFlag is RenamedFlag without the line on standard error, for flags that programs pass.
func formerFlag(cmd *cobra.Command, former, name string) {
	alias := *cmd.Flags().Lookup(name)
	alias.Name, alias.Shorthand, alias.Hidden = former, "", true
	cmd.Flags().AddFlag(&alias)
}

// renamed is the value of a flag under its former name.
type renamed struct {
	pflag.Value
	tell func()
}

// Set implements pflag.Value.
func (r *renamed) Set(text string) error {
	r.tell()
	return r.Value.Set(text)
}

// RenamedCommand returns a hidden command under a former name. If it is used, one line with the new name is printed to
// standard error.
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

// tellName prints the new name to standard error, because a program may read standard output.
func tellName(cmd *cobra.Command, former, name string) {
	fmt.Fprintf(cmd.ErrOrStderr(), "sluice: %s is now called %s; %s removes the former name\n", former, name,
		formerUntil)
}
