// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package check compares the kernel with what should be there.
package check

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Command is `check`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare the kernel with what should be there",
		Long: `Compare maps, pins, programs, filters, routes, rules and sysctls with what should
be there, and with --repair make it so. The exit code is 1 if a difference
remains. The datapath does the same by itself from time to time.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), inv, repair) },
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "repair what is found")
	return cmd
}

// result is one difference.
type result struct {
	Subject  string `json:"subject"`
	Key      string `json:"key"`
	Want     string `json:"want"`
	Have     string `json:"have"`
	Repaired bool   `json:"repaired"`
	Error    string `json:"error,omitempty"`
}

func run(ctx context.Context, inv *invocation.Invocation, repair bool) error {
	all := []result{}
	remain := 0
	call, request := datapathv1.DatapathServiceClient.AuditMaps, &datapathv1.AuditMapsRequest{Repair: repair}
	if err := invocation.Stream(ctx, inv, invocation.Datapath, call, request, func(m *datapathv1.AuditMapsResponse) error {
		d := m.GetDifference()
		all = append(all, result{d.GetSubject(), d.GetKey(), d.GetWant(), d.GetHave(), m.GetRepaired(), m.GetError()})
		if !m.GetRepaired() {
			remain++
		}
		return nil
	}); err != nil {
		return err
	}
	if err := inv.Show(all, func(w io.Writer) {
		if len(all) == 0 {
			fmt.Fprintln(w, "The kernel is as it should be.")
			return
		}
		output.Row(w, "WHAT", "WHICH", "WANT", "HAVE", "REPAIRED")
		for _, d := range all {
			repaired := "no"
			switch {
			case d.Repaired:
				repaired = "yes"
			case d.Error != "":
				repaired = "no: " + d.Error
			}
			output.Row(w, d.Subject, d.Key, d.Want, d.Have, repaired)
		}
	}); err != nil {
		return err
	}
	if remain > 0 {
		return invocation.ErrReported
	}
	return nil
}
