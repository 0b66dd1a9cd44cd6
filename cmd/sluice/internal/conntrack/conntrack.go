// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package conntrack lists and flushes tracked connections.
package conntrack

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/flagvalue"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Command is `conntrack`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.WithAlias("ct", invocation.Group("conntrack", "List and flush tracked connections",
		listCommand(inv), flushCommand(inv)))
}

// filter contains the values of the filter flags.
type filter struct {
	containers []string
	addresses  []string
	ports      []uint
	protocols  []string
	states     []string
	v4, v6     bool
}

func (o *filter) add(f *pflag.FlagSet) {
	f.StringSliceVar(&o.containers, "container", nil,
		"connections of the container CONTAINER[/INTERFACE] or the pod NAMESPACE/NAME at either end")
	f.StringSliceVar(&o.addresses, "address", nil,
		"connections whose source, destination or service address is in this prefix")
	f.UintSliceVar(&o.ports, "port", nil, "connections whose source, destination or Service port is this one")
	f.Lookup("port").DefValue = "" // otherwise help shows an empty list
	f.StringSliceVar(&o.protocols, "protocol", nil, "tcp, udp, sctp, icmp, icmpv6 or a number")
	f.StringSliceVar(&o.states, "state", nil,
		"opening, established, half-closed, closing, reset or revoked; or one of the "+
			"marks picked-up, either-way, via-stack, proxied and hairpin")
	f.BoolVarP(&o.v4, "ipv4", "4", false, "only IPv4 connections")
	f.BoolVarP(&o.v6, "ipv6", "6", false, "only IPv6 connections")
}

// empty reports whether no filter is given.
func (o *filter) empty() bool {
	return len(o.containers)+len(o.addresses)+len(o.ports)+len(o.protocols)+len(o.states) == 0 && !o.v4 && !o.v6
}

// criteria maps the fields of the service's filter to flags.
var criteria = map[string]string{
	"owners": "--container", "prefixes": "--address", "ports": "--port", "protocols": "--protocol", "states": "--state",
	"filter": "--all", "all": "--all",
}

// inFlags replaces the field names in a service's validation errors by the names of the flags.
func inFlags(err error) error {
	var lines []string
	for _, v := range rpcerr.Fields(err) {
		name := strings.TrimPrefix(v.GetField(), "filter.")
		if i := strings.IndexAny(name, "[."); i >= 0 {
			name = name[:i]
		}
		flag, ok := criteria[name]
		if !ok {
			return err
		}
		lines = append(lines, flag+": "+strings.TrimPrefix(v.GetDescription(), v.GetField()+": "))
	}
	if len(lines) == 0 {
		return err
	}
	return invocation.Usagef("%s", strings.Join(lines, "\n"))
}

// request returns the filter for the service.
func (o *filter) request(ctx context.Context, inv *invocation.Invocation) (*datapathv1.ConnectionFilter, error) {
	req := &datapathv1.ConnectionFilter{}
	switch {
	case o.v4 && o.v6:
		return nil, invocation.Usagef("--ipv4 and --ipv6 together match no connection")
	case o.v4:
		req.Family = datapathv1.AddressFamily_ADDRESS_FAMILY_IPV4
	case o.v6:
		req.Family = datapathv1.AddressFamily_ADDRESS_FAMILY_IPV6
	}
	for _, s := range o.addresses {
		p, err := flagvalue.Prefix("--address", s)
		if err != nil {
			return nil, err
		}
		req.Prefixes = append(req.Prefixes, p.String())
	}
	for _, p := range o.ports {
		if p > 65535 {
			return nil, invocation.Usagef("--port: %d is not a port", p)
		}
		req.Ports = append(req.Ports, uint32(p))
	}
	for _, s := range o.protocols {
		n, err := flagvalue.Protocol("--protocol", s)
		if err != nil {
			return nil, err
		}
		req.Protocols = append(req.Protocols, netv1.Protocol(n))
	}
	for _, s := range o.states {
		n, ok := datapathv1.ConnectionState_value[statePrefix+strings.ToUpper(strings.ReplaceAll(s, "-", "_"))]
		if !ok || n == 0 {
			return nil, invocation.NotOneOf("--state", s, states())
		}
		req.States = append(req.States, datapathv1.ConnectionState(n))
	}
	var err error
	req.Owners, err = owners(ctx, inv, o.containers)
	return req, err
}

const statePrefix = "CONNECTION_STATE_"

// states returns the names of the connection states, sorted.
func states() []string {
	var names []string
	for name, n := range datapathv1.ConnectionState_value {
		if n != 0 {
			names = append(names, strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, statePrefix), "_", "-")))
		}
	}
	slices.Sort(names)
	return names
}

func owners(ctx context.Context, inv *invocation.Invocation, names []string) (found []*workloadv1.Owner, err error) {
	if len(names) == 0 {
		return nil, nil
	}
	all, err := endpoint.List(ctx, inv)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		e, err := endpoint.Match(all, name)
		if err != nil {
			return nil, invocation.Usagef("--container: %w", err)
		}
		if e == nil {
			return nil, endpoint.NotFound(name)
		}
		found = append(found, e.GetOwner())
	}
	return found, nil
}
