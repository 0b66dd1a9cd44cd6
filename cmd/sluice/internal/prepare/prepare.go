// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package prepare makes what the services find at their start.
package prepare

import (
	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

// Command is `prepare`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "prepare",
		Short: "Make the directories that the services find at their start",
		Long: `Make the run and state directories of an instance, each with the user of its
service, and give what an earlier version left under other users to those of
today. Mount the bpffs in which the datapath pins maps and programs, and move
there what an earlier version pinned elsewhere. It runs as root, before the
services; running it again changes nothing.`,
		Args: invocation.Args(0, ""),
		RunE: func(*cobra.Command, []string) error { return run(inv) },
	}
}

func run(inv *invocation.Invocation) error {
	if inv.RunDir != "" {
		return invocation.Usagef("--run-dir: the directories are those of an --instance")
	}
	paths, err := instance.New(inv.Instance)
	if err != nil {
		return invocation.Usagef("--instance: %w", err)
	}
	if err := nodefiles.Root(); err != nil {
		return err
	}
	changes, err := nodefiles.Prepare(paths, nodefiles.Services()...)
	return inv.ShowChanges(changes, err)
}
