// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package prepare creates the directories and mounts that the services need.
package prepare

import (
	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

// Command is `prepare`.
func Command(inv *invocation.Invocation) *cobra.Command {
	dryRun := false
	cmd := &cobra.Command{
		Use:   "prepare",
		Short: "Create the directories and the bpffs that the services need",
		Long: `Create the run and state directories of an instance, each owned by the user of its service;
files that an earlier version created as another user get this user as owner. Mount the
bpffs for the pins of the datapath, and move pins of an earlier version there. Open
/dev/net/tun, and give it to the datapath if its user has no access. Run the command as root
before you start the services; a repeated run changes nothing.`,
		Args: invocation.Args(0, ""),
		RunE: func(*cobra.Command, []string) error { return run(inv, dryRun) },
	}
	invocation.ValidateFlag(cmd, &dryRun, "show which directories and mounts would be made; change nothing")
	return cmd
}

func run(inv *invocation.Invocation, dryRun bool) error {
	if inv.RunDir != "" {
		return invocation.Usagef("--run-dir: not valid here; choose the directories with --instance")
	}
	paths, err := instance.New(inv.Instance)
	if err != nil {
		return invocation.Usagef("--instance: %w", err)
	}
	if err := nodefiles.Root(); err != nil {
		return err
	}
	services := append(nodefiles.Services(), nodefiles.Store())
	if dryRun {
		return inv.ShowPlan(nodefiles.Plan(paths, services...))
	}
	changes, err := nodefiles.Prepare(paths, services...)
	return inv.ShowChanges(changes, err)
}
