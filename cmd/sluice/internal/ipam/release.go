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
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func releaseCommand(inv *invocation.Invocation) *cobra.Command {
	var force, dryRun bool
	cmd := &cobra.Command{
		Use:   "release CONTAINER|POD|ADDRESS",
		Short: "Release the addresses of an owner that has no endpoint",
		Long: `Release all addresses of an owner. The argument is a container, a pod, or one of the
addresses. Confirmed addresses then stay in quarantine, as after any release, before another
owner gets them.

Without --force, the command refuses to release addresses of an endpoint, and leases: a
lease belongs to an ADD in progress and expires by itself. If you release the addresses of
an endpoint by force, the endpoint keeps using them. The datapath does not give these
addresses to another endpoint, and allocates them again after a restart of sluice-ipam.`,
		Args: invocation.Args(1, "a container, a pod or an address"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return release(cmd.Context(), inv, a[0], force, dryRun)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false,
		"also release addresses of an endpoint, leases, and addresses that cannot be checked because the datapath does "+
			"not respond")
	invocation.ValidateFlag(cmd, &dryRun, "show what would be released; release nothing")
	return cmd
}

func release(ctx context.Context, inv *invocation.Invocation, name string, force, dryRun bool) error {
	all, err := allocations(ctx, inv)
	if err != nil {
		return err
	}
	pods, _ := podsOf(ctx, inv) // a container or an address is found without the datapath
	held, err := match(all, name, pods)
	if err != nil {
		return err
	}
	// Ask the datapath after ipam, for the reason given at listAll.
	if why, err := inUse(ctx, inv, held); !force {
		switch {
		case err != nil:
			return fmt.Errorf("cannot check whether an endpoint still uses the addresses; use --force to release them "+
				"anyway: %w",
				err)
		case why != "":
			return fmt.Errorf("%s: %s; use --force to release its addresses anyway", workload.OwnerOf(held.GetOwner()), why)
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
			fmt.Fprintf(w, "%s has no addresses any more.\n", output.Printable(owner.String()))
		case dryRun:
			fmt.Fprintf(w, "Nothing was released: --dry-run. %s would lose %s.\n", output.Printable(owner.String()),
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

// podsOf asks the datapath for the pods of the endpoints of this node.
func podsOf(
	ctx context.Context, inv *invocation.Invocation,
) (map[workload.Owner]*workloadv1.PodReference, error) {
	endpoints, err := endpoint.List(ctx, inv)
	return endpoint.Pods(endpoints), err
}

// match returns the allocation with an address, or of a container or a pod.
func match(
	all []*ipamv1.Allocation, name string, pods map[workload.Owner]*workloadv1.PodReference,
) (*ipamv1.Allocation, error) {
	if addr, err := netip.ParseAddr(name); err == nil {
		text := addr.Unmap().String()
		for _, a := range all {
			if slices.Contains(addressesOf(a), text) {
				return a, nil
			}
		}
		return nil, invocation.NotFound("allocation of", text, "ipam list")
	}
	// Allocations are converted to endpoints, because both are found by owner in the same way.
	owners := make([]*datapathv1.Endpoint, 0, len(all))
	for _, a := range all {
		owners = append(owners, &datapathv1.Endpoint{Owner: a.GetOwner(), Pod: pods[workload.OwnerOf(a.GetOwner())]})
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

// inUse returns why the addresses of an allocation should not be released; empty if they can be released.
func inUse(ctx context.Context, inv *invocation.Invocation, a *ipamv1.Allocation) (string, error) {
	endpoints, err := endpoint.List(ctx, inv)
	if err != nil {
		return "", err
	}
	owner, addresses := workload.OwnerOf(a.GetOwner()), addressesOf(a)
	for _, e := range endpoints {
		o := workload.OwnerOf(e.GetOwner())
		if o == owner {
			return "it has an endpoint; delete the endpoint to release its addresses", nil
		}
		for _, x := range e.GetAddresses() {
			if slices.Contains(addresses, x) {
				return fmt.Sprintf("the endpoint %s has %s", o, x), nil
			}
		}
	}
	if a.GetState() == ipamv1.AllocationState_ALLOCATION_STATE_LEASED {
		return fmt.Sprintf("an ADD is in progress, or has failed; the lease expires at %s",
			a.GetLeaseExpireTime().AsTime().Format("15:04:05 MST")), nil
	}
	if a.GetManager() != "" {
		return fmt.Sprintf("the manager %q owns it and decides when it is released", a.GetManager()), nil
	}
	return "", nil
}
