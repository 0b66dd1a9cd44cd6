// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func deleteCommand(inv *invocation.Invocation) *cobra.Command {
	var force, validate bool
	cmd := &cobra.Command{
		Use:   "delete CONTAINER|POD",
		Short: "Delete the endpoint of a container that has ended",
		Long: `Delete an endpoint as CNI DEL does, for a runtime that will not send the DEL: traffic
stops, the device is removed, the addresses and the identity are released. While the
network namespace or the device of the container exists, the command requires --force.
If the record of an endpoint is corrupt, "endpoint list" does not show it: give the whole
container ID and the interface.

` + NameHelp,
		Args: invocation.Args(1, NameForms),
		RunE: func(cmd *cobra.Command, a []string) error {
			return remove(cmd.Context(), inv, a[0], force, validate)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false,
		"delete the endpoint even if the container still exists; the container loses its network")
	invocation.ValidateFlag(cmd, &validate, "show what would be deleted; delete nothing")
	return cmd
}

func remove(ctx context.Context, inv *invocation.Invocation, name string, force, validate bool) error {
	all, err := List(ctx, inv)
	if err != nil {
		return err
	}
	n, err := ParseName(name)
	if err != nil {
		return err
	}
	found, err := n.Match(all)
	if err != nil {
		return err
	}
	owner := found.GetOwner()
	if found == nil {
		// If the record of an endpoint is corrupt, the endpoint is not listed, but it can still be deleted by
		// its whole name.
		if owner = n.Owner(); owner == nil || !n.Whole() {
			return NotFound(name)
		}
	}
	resp, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.DeleteEndpoint,
		&datapathv1.DeleteEndpointRequest{Owner: owner, UnlessInUse: !force, ValidateOnly: validate})
	switch {
	case rpcerr.Is(err, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE):
		return fmt.Errorf("%w\nThe container runtime deletes it when the container ends; --force deletes it now, and the "+
			"container loses its network", rpcerr.Answer(err))
	case err != nil:
		return err
	case !resp.GetExisted():
		return NotFound(name)
	}
	return inv.Show(message.Of(resp, message.Fact{Key: "owner", Value: message.Of(owner)},
		message.Fact{Key: "deleted", Value: !validate}), func(w io.Writer) {
		if validate {
			fmt.Fprint(w, "Nothing was deleted: --dry-run. ")
		}
		fmt.Fprintln(w, removedText(owner, resp.GetEndpoint(), validate))
	})
}

// removedText describes the deleted endpoint. e is nil if its record cannot be read.
func removedText(owner *workloadv1.Owner, e *datapathv1.Endpoint, validate bool) string {
	was := "was deleted"
	if validate {
		was = "would be deleted"
	}
	text := fmt.Sprintf("The endpoint of %s %s", output.Printable(workload.OwnerOf(owner).String()), was)
	if e == nil {
		return text + "; its record cannot be read."
	}
	parts := []string{}
	if e.GetIdentity() != 0 {
		parts = append(parts, "identity "+output.Printable(identityText(e)))
	}
	parts = append(parts, "addresses "+strings.Join(e.GetAddresses(), " "))
	if name := e.GetHostInterface().GetName(); name != "" {
		parts = append(parts, "device "+name)
	}
	return text + ": " + strings.Join(parts, ", ") + "."
}

// NotFound returns the error for a name that matches no endpoint.
func NotFound(name string) error {
	return invocation.NotFound("container or pod", name, "endpoint list")
}
