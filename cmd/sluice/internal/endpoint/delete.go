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
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func deleteCommand(inv *invocation.Invocation) *cobra.Command {
	var force, validate bool
	cmd := &cobra.Command{
		Use:   "delete CONTAINER[/INTERFACE]",
		Short: "Delete the endpoint of a container that has ended",
		Long: `Delete an endpoint as a CNI DEL does, where the runtime that made it does not come back
to do so: its traffic stops, its device is removed, its addresses and its identity are
released. A container whose network namespace or device is still there keeps its endpoint
without --force. An endpoint whose record cannot be read is not in "endpoint list"; it is
named by the whole id and the interface.`,
		Args: invocation.Args(1, "a container's id"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return remove(cmd.Context(), inv, a[0], force, validate)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "delete it although the container is still there, which loses its network")
	invocation.ValidateFlag(cmd, &validate, "say what would be deleted, but delete nothing")
	return cmd
}

// removal is what was deleted.
type removal struct {
	Owner   workload.Owner `json:"owner"`
	Deleted bool           `json:"deleted"`
	// Endpoint is nil if its record cannot be read.
	Endpoint *endpoint `json:"endpoint,omitempty"`
}

func remove(ctx context.Context, inv *invocation.Invocation, name string, force, validate bool) error {
	all, err := List(ctx, inv)
	if err != nil {
		return err
	}
	found, err := Match(all, name)
	if err != nil {
		return err
	}
	owner := found.GetOwner()
	if found == nil {
		id, ifname, both := strings.Cut(name, "/")
		if !both {
			return NotFound(name)
		}
		owner = &workloadv1.Owner{ContainerId: id, InterfaceName: ifname}
	}
	resp, err := invocation.Ask(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.DeleteEndpoint,
		&datapathv1.DeleteEndpointRequest{Owner: owner, UnlessInUse: !force, ValidateOnly: validate})
	switch {
	case rpcerr.Is(err, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE):
		return fmt.Errorf("%w\nWhoever made it deletes it when the container ends; --force deletes it now, and the "+
			"container loses its network", rpcerr.Answer(err))
	case err != nil:
		return err
	case !resp.GetExisted():
		return NotFound(name)
	}
	gone := removal{Owner: workload.OwnerOf(owner), Deleted: !validate}
	if e := resp.GetEndpoint(); e != nil {
		was := shown(e)
		gone.Endpoint = &was
	}
	return inv.Show(gone, func(w io.Writer) {
		if validate {
			fmt.Fprint(w, "Nothing was deleted: --validate-only. ")
		}
		fmt.Fprintln(w, gone.text(validate))
	})
}

func (r removal) text(validate bool) string {
	was := "was deleted"
	if validate {
		was = "would be deleted"
	}
	text := fmt.Sprintf("The endpoint of %s %s", output.Printable(r.Owner.String()), was)
	e := r.Endpoint
	if e == nil {
		return text + "; its record cannot be read."
	}
	parts := []string{}
	if e.Identity != 0 {
		parts = append(parts, "identity "+output.Printable(workload.IdentityText(e.Identity, e.Labels)))
	}
	parts = append(parts, "addresses "+strings.Join(e.Addresses, " "))
	if e.Host.Name != "" {
		parts = append(parts, "device "+e.Host.Name)
	}
	return text + ": " + strings.Join(parts, ", ") + "."
}

// NotFound says that no endpoint has the name.
func NotFound(name string) error {
	return invocation.NotFound("endpoint of container", name, "endpoint list")
}
