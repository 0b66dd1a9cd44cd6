// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

const levelPrefix = "LOG_LEVEL_"

// levels are the values of LEVEL.
var levels = []string{"debug", "info", "warn", "error", "default"}

// LogLevelCommand is `log-level`.
func LogLevelCommand(inv *invocation.Invocation) *cobra.Command {
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "log-level COMPONENT [LEVEL]",
		Short: "Show or change the log level of a running component",
		Long: `Show the log level of a running component, or change it without a restart. LEVEL is debug,
info, warn, error, or default for the level of the setting log.level. The level holds until
the process ends. COMPONENT is identity, ipam, policy, loadbalancer, datapath, dns,
controller, hubble or store. Only root may change it.`,
		Example: `  sluice log-level datapath debug
  sluice log-level datapath default`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 && len(args) != 2 {
				return invocation.Usagef("sluice log-level wants a component (%s), and a level to change it (%s)",
					strings.Join(invocation.Components, ", "), strings.Join(levels, ", "))
			}
			return nil
		},
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			switch len(args) {
			case 0:
				return invocation.Components, cobra.ShellCompDirectiveNoFileComp
			case 1:
				return levels, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			process, err := processOf(args[0])
			if err != nil {
				return err
			}
			component := message.Fact{Key: "component", Value: process.Name()}
			if len(args) == 1 {
				c, err := invocation.Ask(cmd.Context(), inv, process, client.GetConfig, &statusv1.GetConfigRequest{})
				if err != nil {
					return err
				}
				if c.GetLogLevel() == statusv1.LogLevel_LOG_LEVEL_UNSPECIFIED {
					return fmt.Errorf("sluice-%s is of an earlier version and does not report its log level; "+
						"see `sluice config %s`", process.Name(), process.Name())
				}
				r := &statusv1.SetLogLevelResponse{Level: c.GetLogLevel()}
				return inv.Show(message.Of(r, component), func(w io.Writer) {
					fmt.Fprintln(w, output.Enum(r.GetLevel(), levelPrefix))
				})
			}
			level, err := parseLevel(args[1])
			if err != nil {
				return err
			}
			r, err := invocation.Ask(cmd.Context(), inv, process, client.SetLogLevel,
				&statusv1.SetLogLevelRequest{Level: level, ValidateOnly: dryRun})
			if err != nil {
				return err
			}
			return inv.Show(message.Of(r, component), func(w io.Writer) {
				if dryRun {
					fmt.Fprintf(w, "Nothing was changed: --dry-run. sluice-%s would log at level %s; now: %s.\n",
						process.Name(), output.Enum(r.GetLevel(), levelPrefix), output.Enum(r.GetPrevious(), levelPrefix))
					return
				}
				fmt.Fprintf(w, "sluice-%s logs at level %s until it ends; before: %s.\n", process.Name(),
					output.Enum(r.GetLevel(), levelPrefix), output.Enum(r.GetPrevious(), levelPrefix))
			})
		},
	}
	invocation.ValidateFlag(cmd, &dryRun, "show what would be changed; change nothing")
	return cmd
}

func parseLevel(text string) (statusv1.LogLevel, error) {
	if !slices.Contains(levels, text) {
		return 0, invocation.NotOneOf("", text, levels)
	}
	// "default" has no value and gives LOG_LEVEL_UNSPECIFIED.
	return statusv1.LogLevel(statusv1.LogLevel_value[levelPrefix+strings.ToUpper(text)]), nil
}
