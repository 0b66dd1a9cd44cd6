// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/nodefiles"
)

func (c *command) prepareCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "prepare",
		Short: "Make the directories that the services find at their start",
		Long: `Make the run and state directories of an instance, each with the user of its
service, and give what an earlier version left under other users to those of
today. Mount the bpffs in which the datapath pins maps and programs, and move
there what an earlier version pinned elsewhere. It runs as root, before the
services; running it again changes nothing.`,
		Args: args(0, ""),
		RunE: func(*cobra.Command, []string) error { return c.prepare() },
	}
}

func (c *command) prepare() error {
	if c.runDir != "" {
		return usagef("--run-dir: the directories are those of an --instance")
	}
	paths, err := instance.New(c.instance)
	if err != nil {
		return usagef("--instance: %w", err)
	}
	if err := nodefiles.Root(); err != nil {
		return err
	}
	changes, err := nodefiles.Prepare(paths, nodefiles.Services()...)
	shown := c.show(map[string][]string{"changes": changes}, func(w io.Writer) {
		for _, change := range changes {
			fmt.Fprintln(w, change)
		}
	})
	if err != nil {
		return err
	}
	return shown
}
