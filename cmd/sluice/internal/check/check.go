// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package check compares the kernel with the desired state.
package check

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// Command is `check`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare the kernel with the desired state, and repair it",
		Long: `Compare maps, pins, programs, filters, routes, rules and sysctls with the desired state,
and with --repair correct them. The exit code is 1 if a difference remains. The datapath
also checks and repairs periodically by itself.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), inv, repair) },
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "repair the differences")
	return cmd
}

// columns are the columns of `check`.
var columns = []output.Column[*datapathv1.AuditMapsResponse]{
	{Header: "WHAT", Cell: func(r *datapathv1.AuditMapsResponse) any { return r.GetDifference().GetSubject() }},
	{Header: "WHICH", Cell: func(r *datapathv1.AuditMapsResponse) any { return r.GetDifference().GetKey() }},
	{Header: "WANT", Cell: func(r *datapathv1.AuditMapsResponse) any { return r.GetDifference().GetWant() }},
	{Header: "HAVE", Cell: func(r *datapathv1.AuditMapsResponse) any { return r.GetDifference().GetHave() }},
	{Header: "REPAIRED", Cell: func(r *datapathv1.AuditMapsResponse) any { return repairText(r) }},
}

// repairText returns "yes", or "no" with the reason.
func repairText(r *datapathv1.AuditMapsResponse) string {
	switch {
	case r.GetRepaired():
		return "yes"
	case r.GetError() != "":
		return "no: " + r.GetError()
	}
	return "no"
}

func run(ctx context.Context, inv *invocation.Invocation, repair bool) error {
	var all []*datapathv1.AuditMapsResponse
	remain := 0
	call, request := datapathv1.DatapathServiceClient.AuditMaps, &datapathv1.AuditMapsRequest{Repair: repair}
	if err := invocation.Stream(ctx, inv, invocation.Datapath, call, request, func(m *datapathv1.AuditMapsResponse) error {
		all = append(all, m)
		if !m.GetRepaired() {
			remain++
		}
		return nil
	}); err != nil {
		return err
	}
	if err := inv.Show(message.List(all), func(w io.Writer) {
		if len(all) == 0 {
			fmt.Fprintln(w, "No differences found.")
			return
		}
		output.Table(w, columns, all)
	}); err != nil {
		return err
	}
	if remain > 0 {
		return invocation.ErrReported
	}
	return nil
}
