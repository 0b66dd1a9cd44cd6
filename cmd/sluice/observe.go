// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// observeFlags are the criteria as given.
type observeFlags struct {
	follow     bool
	since      time.Duration
	owners     []string
	identities []uint
	prefixes   []string
	reasons    []string
	direction  string
	protocols  []string
	ports      []uint
}

func (c *command) observeCommand() *cobra.Command {
	var o observeFlags
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to packets",
		Long: `Show what the eBPF programs report: drops with their reason. Without --follow it
shows what is remembered and ends. Criteria of different kinds must all hold; of
one kind, one must hold. Events that were lost are shown where they are missing.`,
		Args: args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := o.request(time.Now())
			if err != nil {
				return err
			}
			return c.observe(cmd.Context(), req)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&o.follow, "follow", "f", false, "stay and show new events")
	f.DurationVar(&o.since, "since", 0, "begin with events of this long ago, for example 1m")
	f.StringSliceVar(&o.owners, "container", nil, "events about CONTAINER or CONTAINER/INTERFACE (eth0)")
	f.UintSliceVar(&o.identities, "identity", nil, "events with this identity on either side")
	f.StringSliceVar(&o.prefixes, "address", nil, "events with an address in this prefix on either side")
	f.StringSliceVar(&o.reasons, "reason", nil, "events with this reason, for example spoofed-ip")
	f.StringVar(&o.direction, "direction", "", "egress or ingress, seen from the container")
	f.StringSliceVar(&o.protocols, "protocol", nil, "tcp, udp, sctp, icmp, icmpv6 or a number")
	f.UintSliceVar(&o.ports, "port", nil, "events with this port on either side")
	return cmd
}

var protocolNumbers = map[string]uint32{"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132}

func (o *observeFlags) request(now time.Time) (*datapathv1.ObserveRequest, error) {
	req := &datapathv1.ObserveRequest{Follow: o.follow, Reasons: o.reasons}
	if o.since < 0 {
		return nil, usagef("--since: %s is negative", o.since)
	}
	if o.since > 0 {
		req.Since = timestamppb.New(now.Add(-o.since))
	}
	for _, s := range o.owners {
		id, ifname, found := strings.Cut(s, "/")
		if !found {
			ifname = "eth0"
		}
		req.Owners = append(req.Owners, &workloadv1.Owner{ContainerId: id, InterfaceName: ifname})
	}
	for _, n := range o.identities {
		if n == 0 || n > 0xFFFFFF {
			return nil, usagef("--identity: %d is not an identity", n)
		}
		req.Identities = append(req.Identities, uint32(n))
	}
	for _, s := range o.prefixes {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			a, aerr := netip.ParseAddr(s)
			if aerr != nil {
				return nil, usagef("--address: %q is neither an address nor a prefix", s)
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		req.Prefixes = append(req.Prefixes, p.Masked().String())
	}
	switch o.direction {
	case "":
	case "egress":
		req.Direction = datapathv1.Direction_DIRECTION_EGRESS
	case "ingress":
		req.Direction = datapathv1.Direction_DIRECTION_INGRESS
	default:
		return nil, usagef("--direction: %q is neither egress nor ingress", o.direction)
	}
	for _, s := range o.protocols {
		n, ok := protocolNumbers[strings.ToLower(s)]
		if !ok {
			v, err := strconv.ParseUint(s, 10, 8)
			if err != nil {
				return nil, usagef("--protocol: %q is not a protocol", s)
			}
			n = uint32(v)
		}
		req.Protocols = append(req.Protocols, n)
	}
	for _, p := range o.ports {
		if p > 65535 {
			return nil, usagef("--port: %d is not a port", p)
		}
		req.Ports = append(req.Ports, uint32(p))
	}
	return req, nil
}

// flow is what is shown of one packet.
type flow struct {
	Time                *time.Time `json:"time,omitempty"`
	Verdict             string     `json:"verdict,omitempty"`
	Reason              string     `json:"reason,omitempty"`
	Direction           string     `json:"direction,omitempty"`
	Owner               *owner     `json:"owner,omitempty"`
	Slot                uint32     `json:"slot,omitempty"`
	Source              string     `json:"sourceAddress,omitempty"`
	SourcePort          uint32     `json:"sourcePort,omitempty"`
	SourceIdentity      uint32     `json:"sourceIdentity,omitempty"`
	Destination         string     `json:"destinationAddress,omitempty"`
	DestinationPort     uint32     `json:"destinationPort,omitempty"`
	DestinationIdentity uint32     `json:"destinationIdentity,omitempty"`
	Protocol            string     `json:"protocol,omitempty"`
	Length              uint32     `json:"length,omitempty"`
	SourceMAC           string     `json:"sourceMac,omitempty"`
	Ethertype           uint32     `json:"ethertype,omitempty"`
	// Lost is how many events are missing here; the rest is empty then.
	Lost   uint64 `json:"lost,omitempty"`
	LostBy string `json:"lostBy,omitempty"`
}

func flowOf(m *datapathv1.ObserveResponse) flow {
	if l := m.GetLost(); l != nil {
		return flow{Lost: l.GetCount(), LostBy: enum(l.GetSource(), "LOSS_SOURCE_")}
	}
	f := m.GetFlow()
	shown := flow{
		Time: when(f.GetTime()), Verdict: enum(f.GetVerdict(), "VERDICT_"), Reason: f.GetReason(), Direction: enum(f.GetDirection(), "DIRECTION_"), Slot: f.GetSlot(),
		Source: addressText(f.GetSourceAddress()), SourcePort: f.GetSourcePort(), SourceIdentity: f.GetSourceIdentity(),
		Destination: addressText(f.GetDestinationAddress()), DestinationPort: f.GetDestinationPort(), DestinationIdentity: f.GetDestinationIdentity(),
		Protocol: protocolText(f.GetProtocol()), Length: f.GetLength(), SourceMAC: macText(f.GetSourceMac()), Ethertype: f.GetEthertype(),
	}
	if f.GetOwner() != nil {
		o := ownerOf(f.GetOwner())
		shown.Owner = &o
	}
	return shown
}

func protocolText(n uint32) string {
	if n == 0 {
		return ""
	}
	for name, number := range protocolNumbers {
		if number == n {
			return name
		}
	}
	return strconv.FormatUint(uint64(n), 10)
}

func portText(p uint32) string { return strconv.FormatUint(uint64(p), 10) }

// line is a flow for people. Lines come one by one, so no table aligns them.
func (f flow) line() string {
	if f.Lost > 0 {
		return fmt.Sprintf("--- %d events were lost by the %s ---", f.Lost, f.LostBy)
	}
	at := ""
	if f.Time != nil {
		at = f.Time.Local().Format("15:04:05.000")
	}
	who := "-"
	if f.Owner != nil {
		who = f.Owner.String()
	}
	side := func(address string, port, identity uint32, ports bool) string {
		s := orDash(address)
		if ports && address != "" {
			if a, err := netip.ParseAddr(address); err == nil {
				s = netip.AddrPortFrom(a, uint16(port)).String()
			}
		}
		if identity != 0 {
			s += fmt.Sprintf(" (identity %d)", identity)
		}
		return s
	}
	ports := f.Protocol == "tcp" || f.Protocol == "udp" || f.Protocol == "sctp"
	what := f.Protocol
	switch {
	case f.Protocol == "icmp" || f.Protocol == "icmpv6":
		what = fmt.Sprintf("%s type %d code %d", f.Protocol, f.SourcePort, f.DestinationPort)
	case f.Protocol == "":
		what = fmt.Sprintf("ethertype %#04x", f.Ethertype)
	}
	return printable(fmt.Sprintf("%s  %-9s %-14s %-7s %s  %s -> %s  %s, %d bytes, from %s", at, f.Verdict, f.Reason, f.Direction, who,
		side(f.Source, f.SourcePort, f.SourceIdentity, ports), side(f.Destination, f.DestinationPort, f.DestinationIdentity, ports), what, f.Length, orDash(f.SourceMAC)))
}

func (c *command) observe(ctx context.Context, req *datapathv1.ObserveRequest) error {
	conn, err := c.dial("datapath")
	if err != nil {
		return err
	}
	defer conn.Close()
	var cancel context.CancelFunc = func() {}
	if !req.GetFollow() {
		ctx, cancel = context.WithTimeout(ctx, c.timeout)
	}
	defer cancel()
	stream, err := datapathv1.NewObserverServiceClient(conn).Observe(ctx, req)
	if err != nil {
		return err
	}
	// JSON comes one object a line: a stream has no end to close a list at.
	encoder := json.NewEncoder(c.out)
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && req.GetFollow() && ctx.Err() != nil:
			return nil // the person has seen enough
		case err != nil:
			return err
		}
		f := flowOf(m)
		if c.format == "json" {
			err = encoder.Encode(f)
		} else {
			_, err = fmt.Fprintln(c.out, f.line())
		}
		if err != nil {
			return err
		}
	}
}
