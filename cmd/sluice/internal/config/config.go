// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package config shows the settings of running processes.
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
	"github.com/sluice-net/sluice/kit/nearest"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// Command is `config`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var changed bool
	cmd := &cobra.Command{
		Use:   "config COMPONENT",
		Short: "Show the settings of a running component, with values and sources",
		Long: `Show the settings of a running component: each key, its value, and whether the value is the
default or comes from the configuration file, the environment or a flag. Secrets are not
shown. COMPONENT is identity, ipam, policy, loadbalancer, datapath, dns, controller, hubble
or store. For the settings of a process that is not running, use sluice-COMPONENT --print-config.`,
		Args:      invocation.Args(1, "a component: "+strings.Join(invocation.Components, ", ")),
		ValidArgs: invocation.Components,
		RunE: func(cmd *cobra.Command, args []string) error {
			process, err := processOf(args[0])
			if err != nil {
				return err
			}
			r, err := invocation.Ask(cmd.Context(), inv, process, client.GetConfig, &statusv1.GetConfigRequest{})
			if err != nil {
				return err
			}
			if changed {
				r.Settings = slices.DeleteFunc(r.GetSettings(), func(s *statusv1.Setting) bool {
					return s.GetSource() == statusv1.SettingSource_SETTING_SOURCE_DEFAULT
				})
			}
			shown := message.Of(r, message.Fact{Key: "component", Value: strings.TrimPrefix(args[0], "sluice-")})
			return inv.Show(shown, func(w io.Writer) { table(w, r) })
		},
	}
	cmd.Flags().BoolVar(&changed, "changed", false, "only settings that are not at their default")
	return cmd
}

func processOf(component string) (invocation.Service[client], error) {
	process, ok := invocation.ProcessOf(component)
	if !ok {
		return process, invocation.Usagef("no component %q; the components are %s%s", component,
			strings.Join(invocation.Components, ", "), nearest.Hint(component, invocation.Components))
	}
	return process, nil
}

// client shortens the calls of package invocation.
type client = statusv1.ProcessServiceClient

func table(w io.Writer, c *statusv1.GetConfigResponse) {
	output.Table(w, []output.Column[*statusv1.Setting]{
		{Header: "SETTING", Cell: func(s *statusv1.Setting) any { return s.GetKey() }},
		{Header: "VALUE", Cell: func(s *statusv1.Setting) any { return s.GetValue() }},
		{Header: "SOURCE", Cell: func(s *statusv1.Setting) any {
			if s.GetSource() == statusv1.SettingSource_SETTING_SOURCE_FILE {
				return c.GetFile()
			}
			return output.Enum(s.GetSource(), "SETTING_SOURCE_")
		}},
	}, c.GetSettings())
	now := output.Enum(c.GetLogLevel(), levelPrefix)
	for _, s := range c.GetSettings() {
		if s.GetKey() == "log.level" && now != "" && now != s.GetValue() {
			fmt.Fprintln(w, "The log level is "+now+" until the process ends; see `sluice log-level`")
		}
	}
	for _, name := range c.GetIgnoredVariables() {
		fmt.Fprintln(w, output.Printable("Ignored: "+name+" is not a setting"))
	}
}
