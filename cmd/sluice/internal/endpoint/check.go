// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

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

func checkCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "check CONTAINER|POD",
		Short: "Compare an endpoint with the kernel, as CNI CHECK does",
		Long: `Compare an endpoint with the kernel: devices, addresses, routes, rules and neighbours
on both sides, eBPF programs and map entries. Nothing is changed. The exit code is 1 if
there are differences; "sluice check --repair" repairs them.

` + NameHelp,
		Args: invocation.Args(1, NameForms),
		RunE: func(cmd *cobra.Command, a []string) error { return check(cmd.Context(), inv, a[0]) },
	}
}

// differenceColumns are the columns of the differences between the kernel and the desired state.
var differenceColumns = []output.Column[*datapathv1.Difference]{
	{Header: "WHAT", Cell: func(d *datapathv1.Difference) any { return d.GetSubject() }},
	{Header: "WHICH", Cell: func(d *datapathv1.Difference) any { return d.GetKey() }},
	{Header: "WANT", Cell: func(d *datapathv1.Difference) any { return d.GetWant() }},
	{Header: "HAVE", Cell: func(d *datapathv1.Difference) any { return d.GetHave() }},
}

func check(ctx context.Context, inv *invocation.Invocation, name string) error {
	e, err := Find(ctx, inv, name)
	if err != nil {
		return err
	}
	resp, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.CheckEndpoint,
		&datapathv1.CheckEndpointRequest{Owner: e.GetOwner()})
	if err != nil {
		return err
	}
	all := resp.GetDifferences()
	if err := inv.Show(message.List(all), func(w io.Writer) {
		if len(all) == 0 {
			fmt.Fprintln(w, "No differences found.")
			return
		}
		output.Table(w, differenceColumns, all)
	}); err != nil {
		return err
	}
	if len(all) > 0 {
		return invocation.ErrReported
	}
	return nil
}
