// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

func releaseCommand(inv *invocation.Invocation) *cobra.Command {
	var force, dryRun bool
	cmd := &cobra.Command{
		Use:   "release CONTAINER[/INTERFACE]|ADDRESS",
		Short: "Release the addresses of an owner that has no endpoint",
		Long: `Release all addresses of an owner, which is named by the start of its container's id or
by one of the addresses. Confirmed ones are in quarantine before another owner gets
them, as after any release.

What an endpoint has is refused, and so is a lease, which belongs to an ADD in progress
and ends by itself: with --force an endpoint goes on with an address that ipam does not
hold for it any more. The datapath claims that again after a restart of sluice-ipam, and lets no
other endpoint have it meanwhile.`,
		Args: invocation.Args(1, "a container's id or an address"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return release(cmd.Context(), inv, a[0], force, dryRun)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false,
		"release what an endpoint has, or a lease, or what cannot be compared because the datapath does not answer")
	invocation.ValidateFlag(cmd, &dryRun, "say what would be released, and release nothing")
	return cmd
}

func release(ctx context.Context, inv *invocation.Invocation, name string, force, dryRun bool) error {
	all, err := allocations(ctx, inv)
	if err != nil {
		return err
	}
	held, err := match(all, name)
	if err != nil {
		return err
	}
	// After the listing of ipam, as for look.
	if why, err := inUse(ctx, inv, held); !force {
		switch {
		case err != nil:
			return fmt.Errorf("whether an endpoint has the addresses cannot be told; --force releases them all the same: %w",
				err)
		case why != "":
			return fmt.Errorf("%s: %s; --force releases its addresses all the same", workload.OwnerOf(held.GetOwner()), why)
		}
	}
	resp, err := invocation.Ask(ctx, inv, invocation.IPAM, ipamv1.IPAMServiceClient.Release,
		&ipamv1.ReleaseRequest{Owner: held.GetOwner(), Addresses: addressesOf(held), ValidateOnly: dryRun})
	if err != nil {
		return err
	}
	owner, addresses := workload.OwnerOf(held.GetOwner()), strings.Join(addressesOf(resp.GetReleased()), " and ")
	shown := message.Of(resp, message.Fact{Key: "validateOnly", Value: dryRun})
	return inv.Show(shown, func(w io.Writer) {
		switch {
		case resp.GetReleased() == nil:
			fmt.Fprintf(w, "%s holds nothing any more.\n", output.Printable(owner.String()))
		case dryRun:
			fmt.Fprintf(w, "Nothing was released: --validate-only. %s would lose %s.\n", output.Printable(owner.String()),
				addresses)
		default:
			fmt.Fprintf(w, "%s released %s.\n", output.Printable(owner.String()), addresses)
		}
	})
}

func addressesOf(a *ipamv1.Allocation) []string {
	out := []string{}
	for _, x := range a.GetAddresses() {
		out = append(out, x.GetAddress())
	}
	return out
}

// match finds the allocation of a container, of which the start of the id is
// enough, or of an address.
func match(all []*ipamv1.Allocation, name string) (*ipamv1.Allocation, error) {
	if addr, err := netip.ParseAddr(name); err == nil {
		text := addr.Unmap().String()
		for _, a := range all {
			if slices.Contains(addressesOf(a), text) {
				return a, nil
			}
		}
		return nil, invocation.NotFound("allocation of", text, "ipam list")
	}
	// An allocation is found by the name of its owner as an endpoint is.
	owners := make([]*datapathv1.Endpoint, 0, len(all))
	for _, a := range all {
		owners = append(owners, &datapathv1.Endpoint{Owner: a.GetOwner()})
	}
	found, err := endpoint.Match(owners, name)
	if err != nil {
		return nil, err
	}
	if found == nil {
		return nil, invocation.NotFound("allocation of", name, "ipam list")
	}
	return all[slices.Index(owners, found)], nil
}

// inUse says why addresses should not be released; empty if nothing speaks against
// it.
func inUse(ctx context.Context, inv *invocation.Invocation, a *ipamv1.Allocation) (string, error) {
	endpoints, err := endpoint.List(ctx, inv)
	if err != nil {
		return "", err
	}
	owner, addresses := workload.OwnerOf(a.GetOwner()), addressesOf(a)
	for _, e := range endpoints {
		o := workload.OwnerOf(e.GetOwner())
		if o == owner {
			return "it has an endpoint; delete that, and its addresses are released", nil
		}
		for _, x := range e.GetAddresses() {
			if slices.Contains(addresses, x) {
				return fmt.Sprintf("the endpoint %s has %s", o, x), nil
			}
		}
	}
	if a.GetState() == ipamv1.AllocationState_ALLOCATION_STATE_LEASED {
		return fmt.Sprintf("an ADD is in progress, or was; the lease ends by itself at %s",
			a.GetLeaseExpireTime().AsTime().Format("15:04:05 MST")), nil
	}
	if a.GetManager() != "" {
		return fmt.Sprintf("the manager %q answers for it, and says when it is released", a.GetManager()), nil
	}
	return "", nil
}
