// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ipam shows the pools of addresses and their owners, compares them with
// the endpoints, and releases what no endpoint has.
package ipam

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

// Command is `ipam`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("ipam", "Show, check and release the addresses of the node",
		&cobra.Command{
			Use: "pools", Short: "Show the ranges and how full they are", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printPools(cmd.Context(), inv) },
		},
		&cobra.Command{
			Use: "list", Short: "List who holds which addresses", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printAllocations(cmd.Context(), inv) },
		},
		checkCommand(inv), releaseCommand(inv),
	)
}

// Pool is a range of addresses and how full it is.
type Pool struct {
	CIDR        string `json:"cidr"`
	State       string `json:"state"`
	Gateway     string `json:"gateway"`
	Size        amount `json:"size"`
	Reserved    uint64 `json:"reserved"`
	Leased      uint64 `json:"leased"`
	Confirmed   uint64 `json:"confirmed"`
	Quarantined uint64 `json:"quarantined"`
	Free        amount `json:"free"`
	// RefusedReason says why the cluster refuses the range; empty if it does not.
	RefusedReason string `json:"refusedReason,omitempty"`
}

// PoolOf shows a pool of the service.
func PoolOf(p *ipamv1.Pool) Pool {
	return Pool{
		CIDR: p.GetPrefix(), State: output.Enum(p.GetState(), "RANGE_STATE_"), Gateway: p.GetGateway(),
		Size: amount(p.GetAddressCount()), Reserved: p.GetReservedCount(),
		Leased: p.GetLeasedCount(), Confirmed: p.GetConfirmedCount(),
		Quarantined: p.GetQuarantinedCount(), Free: amount(p.GetFreeCount()),
		RefusedReason: p.GetRefusedReason(),
	}
}

func printPools(ctx context.Context, inv *invocation.Invocation) error {
	resp, err := invocation.Ask(ctx, inv, invocation.IPAM, ipamv1.IPAMServiceClient.ListPools, &ipamv1.ListPoolsRequest{})
	if err != nil {
		return err
	}
	all := []Pool{}
	for _, p := range resp.GetPools() {
		all = append(all, PoolOf(p))
	}
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "POOL", "STATE", "GATEWAY", "SIZE", "RESERVED", "LEASED", "CONFIRMED", "QUARANTINE", "FREE")
		for _, p := range all {
			output.Row(w, p.CIDR, p.State, p.Gateway, output.Count(uint64(p.Size)), output.Count(p.Reserved),
				p.Leased, p.Confirmed, p.Quarantined,
				output.Count(uint64(p.Free)))
		}
		for _, p := range all {
			if p.RefusedReason != "" {
				fmt.Fprintf(w, "%s is refused: %s\n", p.CIDR, p.RefusedReason)
			}
		}
	})
}

type allocation struct {
	Owner     workload.Owner `json:"owner"`
	State     string         `json:"state"`
	Addresses []string       `json:"addresses"`
	Expires   *time.Time     `json:"leaseExpireTime,omitempty"`
}

func printAllocations(ctx context.Context, inv *invocation.Invocation) error {
	held, err := allocations(ctx, inv)
	if err != nil {
		return err
	}
	all := []allocation{}
	for _, a := range held {
		all = append(all, allocation{
			Owner: workload.OwnerOf(a.GetOwner()), State: output.Enum(a.GetState(), "ALLOCATION_STATE_"),
			Addresses: addressesOf(a), Expires: output.When(a.GetLeaseExpireTime()),
		})
	}
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "CONTAINER", "STATE", "ADDRESSES", "LEASE ENDS IN")
		for _, a := range all {
			left := ""
			if a.Expires != nil {
				left = time.Until(*a.Expires).Round(time.Second).String()
			}
			output.Row(w, a.Owner, a.State, strings.Join(a.Addresses, ","), left)
		}
	})
}

// amount is a number of addresses. In JSON it is at most the largest one that readers with floating point, such as jq,
// know exactly: a /64 has more addresses than anything counts.
type amount uint64

// MarshalJSON implements json.Marshaler.
func (n amount) MarshalJSON() ([]byte, error) {
	return strconv.AppendUint(nil, uint64(min(n, 1<<53-1)), 10), nil
}
