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
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func checkCommand(inv *invocation.Invocation) *cobra.Command {
	return &cobra.Command{
		Use:   "check CONTAINER[/INTERFACE]",
		Short: "Compare one endpoint with the kernel, as CNI CHECK does",
		Long: `Compare one endpoint with the kernel: devices, addresses, routes, rules and neighbours
on both sides, eBPF programs and map entries. It changes nothing. The exit code is 1 if
something differs; "sluice check --repair" repairs.`,
		Args: invocation.Args(1, "a container's id"),
		RunE: func(cmd *cobra.Command, a []string) error { return check(cmd.Context(), inv, a[0]) },
	}
}

// difference is one deviation of the kernel from an endpoint.
type difference struct {
	Subject     string `json:"subject"`
	Key         string `json:"key"`
	Want        string `json:"want"`
	Have        string `json:"have"`
	Kind        string `json:"kind,omitempty"`
	InContainer bool   `json:"inContainer"`
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
	all := []difference{}
	for _, d := range resp.GetDifferences() {
		all = append(all, difference{
			d.GetSubject(), d.GetKey(), d.GetWant(), d.GetHave(), output.Enum(d.GetTarget().GetKind(), "TARGET_KIND_"),
			d.GetTarget().GetInContainer(),
		})
	}
	if err := inv.Show(all, func(w io.Writer) {
		if len(all) == 0 {
			fmt.Fprintln(w, "The kernel has the endpoint as it should be.")
			return
		}
		output.Row(w, "WHAT", "WHICH", "WANT", "HAVE")
		for _, d := range all {
			output.Row(w, d.Subject, d.Key, d.Want, d.Have)
		}
	}); err != nil {
		return err
	}
	if len(all) > 0 {
		return invocation.ErrReported
	}
	return nil
}
