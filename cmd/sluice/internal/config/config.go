// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package config shows what running processes use.
package config

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// Config is what `config -o json` prints.
type Config struct {
	Service  string    `json:"service"`
	Instance string    `json:"instance"`
	File     string    `json:"file"`
	Settings []setting `json:"settings"`
	Ignored  []string  `json:"ignoredVariables"`
}

type setting struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Source string `json:"source"` // default, file, environment or flag
}

// Command is `config`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var changed bool
	cmd := &cobra.Command{
		Use:   "config SERVICE",
		Short: "Show what a running service uses: each setting, its value and where that came from",
		Long: `Show what a running service uses: each setting, its value, and whether that is the
default or came from the configuration file, the environment or a flag. Secrets are
not shown. SERVICE is identity, ipam, policy, loadbalancer or datapath. What a new
process would use, sluice-SERVICE --print-config shows.`,
		Args:      invocation.Args(1, "a service: "+strings.Join(invocation.Services, ", ")),
		ValidArgs: invocation.Services,
		RunE: func(cmd *cobra.Command, args []string) error {
			process, ok := invocation.ProcessOf(args[0])
			if !ok {
				return invocation.Usagef("there is no service %q; there are %s", args[0], strings.Join(invocation.Services, ", "))
			}
			r, err := invocation.Ask(cmd.Context(), inv, process, client.GetConfig, &statusv1.GetConfigRequest{})
			if err != nil {
				return err
			}
			c := configOf(strings.TrimPrefix(args[0], "sluice-"), r, changed)
			return inv.Show(c, c.table)
		},
	}
	cmd.Flags().BoolVar(&changed, "changed", false, "only settings that are not the default")
	return cmd
}

// client has the calls of the service.
type client = statusv1.ProcessServiceClient

func configOf(service string, r *statusv1.GetConfigResponse, changed bool) Config {
	c := Config{
		Service: service, Instance: r.GetInstance(), File: r.GetFile(), Settings: []setting{},
		Ignored: append([]string{}, r.GetIgnoredVariables()...),
	}
	for _, s := range r.GetSettings() {
		source := output.Enum(s.GetSource(), "SETTING_SOURCE_")
		if !changed || s.GetSource() != statusv1.SettingSource_SETTING_SOURCE_DEFAULT {
			c.Settings = append(c.Settings, setting{s.GetKey(), s.GetValue(), source})
		}
	}
	return c
}

func (c Config) table(w io.Writer) {
	output.Row(w, "SETTING", "VALUE", "SOURCE")
	for _, s := range c.Settings {
		source := s.Source
		if source == "file" {
			source = c.File
		}
		output.Row(w, s.Key, s.Value, source)
	}
	for _, name := range c.Ignored {
		fmt.Fprintln(w, output.Printable("Ignored: "+name+" names no setting"))
	}
}
