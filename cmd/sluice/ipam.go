// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

func (c *command) ipamCommand() *cobra.Command {
	return group("ipam", "Show the addresses of the node",
		&cobra.Command{
			Use: "pools", Short: "Show the ranges and how full they are", Args: args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return c.ipamPools(cmd.Context()) },
		},
		&cobra.Command{
			Use: "list", Short: "List who holds which addresses", Args: args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return c.ipamList(cmd.Context()) },
		},
	)
}

type pool struct {
	CIDR      string `json:"cidr"`
	Gateway   string `json:"gateway"`
	Size      uint64 `json:"size"`
	Reserved  uint64 `json:"reserved"`
	Leased    uint64 `json:"leased"`
	Confirmed uint64 `json:"confirmed"`
	Resting   uint64 `json:"resting"`
	Free      uint64 `json:"free"`
}

func poolOf(p *ipamv1.Pool) pool {
	return pool{
		CIDR: p.GetCidr(), Gateway: p.GetGateway(), Size: p.GetSize(), Reserved: p.GetReserved(),
		Leased: p.GetLeased(), Confirmed: p.GetConfirmed(), Resting: p.GetResting(), Free: p.GetFree(),
	}
}

// countText shortens what no one counts: a /64 saturates the field.
func countText(n uint64) string {
	switch {
	case n == math.MaxUint64:
		return "2^64"
	case n >= 1<<40:
		return "~2^" + strconv.Itoa(int(math.Round(math.Log2(float64(n)))))
	default:
		return strconv.FormatUint(n, 10)
	}
}

func (c *command) ipamPools(ctx context.Context) error {
	conn, err := c.dial("ipam")
	if err != nil {
		return err
	}
	defer conn.Close()
	resp, err := ipamv1.NewIPAMServiceClient(conn).ListPools(ctx, &ipamv1.ListPoolsRequest{})
	if err != nil {
		return err
	}
	all := []pool{}
	for _, p := range resp.GetPools() {
		all = append(all, poolOf(p))
	}
	return c.show(all, func(w io.Writer) {
		row(w, "POOL", "GATEWAY", "SIZE", "RESERVED", "LEASED", "CONFIRMED", "RESTING", "FREE")
		for _, p := range all {
			row(w, p.CIDR, p.Gateway, countText(p.Size), countText(p.Reserved), p.Leased, p.Confirmed, p.Resting, countText(p.Free))
		}
	})
}

type allocation struct {
	Owner     owner      `json:"owner"`
	State     string     `json:"state"`
	Addresses []string   `json:"addresses"`
	Expires   *time.Time `json:"leaseExpireTime,omitempty"`
}

func (c *command) ipamList(ctx context.Context) error {
	conn, err := c.dial("ipam")
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	stream, err := ipamv1.NewIPAMServiceClient(conn).ListAllocations(ctx, &ipamv1.ListAllocationsRequest{})
	if err != nil {
		return err
	}
	all := []allocation{}
	if err := each(stream, func(m *ipamv1.ListAllocationsResponse) {
		a := m.GetAllocation()
		shown := allocation{Owner: ownerOf(a.GetOwner()), State: enum(a.GetState(), "ALLOCATION_STATE_"), Expires: when(a.GetLeaseExpireTime())}
		for _, address := range a.GetAddresses() {
			shown.Addresses = append(shown.Addresses, addressText(address.GetAddress()))
		}
		all = append(all, shown)
	}); err != nil {
		return err
	}
	return c.show(all, func(w io.Writer) {
		row(w, "CONTAINER", "STATE", "ADDRESSES", "LEASE ENDS IN")
		for _, a := range all {
			left := ""
			if a.Expires != nil {
				left = time.Until(*a.Expires).Round(time.Second).String()
			}
			row(w, a.Owner, a.State, strings.Join(a.Addresses, ","), left)
		}
	})
}
