// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipam shows address pools and allocations, compares them with the endpoints, and releases leaked addresses.
package ipam

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Command is `ipam`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("ipam", "Show, check and release the addresses of the node",
		&cobra.Command{
			Use: "pools", Short: "Show the address pools and their usage", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printPools(cmd.Context(), inv) },
		},
		&cobra.Command{
			Use: "list", Short: "List the allocated addresses and their owners",
			Long: `List the allocated addresses and their owners. POD is empty if the owner is no pod, has no
endpoint, or the datapath does not respond.`,
			Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printAllocations(cmd.Context(), inv) },
		},
		checkCommand(inv), releaseCommand(inv),
	)
}

// poolColumns are the columns of `ipam pools`.
var poolColumns = []output.Column[*ipamv1.Pool]{
	{Header: "POOL", Cell: func(p *ipamv1.Pool) any { return p.GetPrefix() }},
	{Header: "STATE", Cell: func(p *ipamv1.Pool) any { return output.Enum(p.GetState(), "RANGE_STATE_") }},
	{Header: "GATEWAY", Cell: func(p *ipamv1.Pool) any { return p.GetGateway() }},
	{Header: "SIZE", Cell: func(p *ipamv1.Pool) any { return output.Count(p.GetAddressCount()) }},
	{Header: "RESERVED", Cell: func(p *ipamv1.Pool) any { return output.Count(p.GetReservedCount()) }},
	{Header: "LEASED", Cell: func(p *ipamv1.Pool) any { return p.GetLeasedCount() }},
	{Header: "CONFIRMED", Cell: func(p *ipamv1.Pool) any { return p.GetConfirmedCount() }},
	{Header: "QUARANTINE", Cell: func(p *ipamv1.Pool) any { return p.GetQuarantinedCount() }},
	{Header: "FREE", Cell: func(p *ipamv1.Pool) any { return output.Count(p.GetFreeCount()) }},
}

func printPools(ctx context.Context, inv *invocation.Invocation) error {
	resp, err := invocation.Ask(ctx, inv, invocation.IPAM, ipamv1.IPAMServiceClient.ListPools, &ipamv1.ListPoolsRequest{})
	if err != nil {
		return err
	}
	return inv.Show(message.List(resp.GetPools()), func(w io.Writer) {
		output.Table(w, poolColumns, resp.GetPools())
		for _, p := range resp.GetPools() {
			if p.GetRefusedReason() != "" {
				fmt.Fprintf(w, "%s is refused: %s\n", p.GetPrefix(), p.GetRefusedReason())
			}
		}
	})
}

// allocation is an allocation and the pod of its owner's endpoint, which is nil if the owner has no endpoint or the
// datapath does not respond.
type allocation struct {
	*ipamv1.Allocation

	pod *workloadv1.PodReference
}

// allocationColumns are the columns of `ipam list`.
var allocationColumns = []output.Column[allocation]{
	{Header: "CONTAINER", Cell: func(a allocation) any { return workload.OwnerOf(a.GetOwner()) }},
	{Header: "POD", Cell: func(a allocation) any { return endpoint.PodText(a.pod) }},
	{Header: "STATE", Cell: func(a allocation) any { return output.Enum(a.GetState(), "ALLOCATION_STATE_") }},
	{Header: "ADDRESSES", Cell: func(a allocation) any { return strings.Join(addressesOf(a.Allocation), ",") }},
	{Header: "LEASE ENDS IN", Cell: func(a allocation) any {
		if a.GetLeaseExpireTime() == nil {
			return ""
		}
		return time.Until(a.GetLeaseExpireTime().AsTime()).Round(time.Second)
	}},
}

func printAllocations(ctx context.Context, inv *invocation.Invocation) error {
	held, err := allocations(ctx, inv)
	if err != nil {
		return err
	}
	pods, err := podsOf(ctx, inv)
	if err != nil {
		fmt.Fprintln(inv.ErrOut, output.Printable(fmt.Sprintf("warning: the pods are missing: %v", err)))
	}
	rows, objects := make([]allocation, len(held)), make([]message.Object, len(held))
	for i, a := range held {
		rows[i] = allocation{a, pods[workload.OwnerOf(a.GetOwner())]}
		objects[i] = message.Of(a)
		if pod := rows[i].pod; pod != nil {
			objects[i].Facts = []message.Fact{{Key: "pod", Value: message.Of(pod)}}
		}
	}
	return inv.Show(objects, func(w io.Writer) { output.FoldedTable(w, inv.Wide(), allocationColumns, rows) })
}
