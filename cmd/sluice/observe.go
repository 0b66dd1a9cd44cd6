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
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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
	labels     []string
	verdicts   []string
	types      []string
}

func (c *command) observeCommand() *cobra.Command {
	var o observeFlags
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to packets",
		Long: `Show what the eBPF programs report: drops with their reason, the policies' verdicts
on connections with the deciding rule, and the ends of connections. Without
--follow it shows what is remembered and ends. Criteria of different kinds must all hold; of
one kind, one must hold. Events that were lost are shown where they are missing.`,
		Args: args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := o.request(time.Now())
			if err != nil {
				return err
			}
			if len(o.owners) > 0 {
				if err := c.completeOwners(cmd.Context(), o.owners, req.GetOwners()); err != nil {
					return err
				}
			}
			return c.observe(cmd.Context(), req)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&o.follow, "follow", "f", false, "stay and show new events")
	f.DurationVar(&o.since, "since", 0, "begin with events of this long ago, for example 1m")
	f.StringSliceVar(&o.owners, "container", nil, "events about CONTAINER or CONTAINER/INTERFACE; of a container that is there, the start of its id is enough")
	f.UintSliceVar(&o.identities, "identity", nil, "events with this identity on either side")
	f.StringSliceVar(&o.prefixes, "address", nil, "events with an address in this prefix on either side")
	f.StringSliceVar(&o.reasons, "reason", nil, "events with this reason, for example spoofed-ip")
	f.StringVar(&o.direction, "direction", "", "egress or ingress, seen from the container")
	f.StringSliceVar(&o.protocols, "protocol", nil, "tcp, udp, sctp, icmp, icmpv6 or a number")
	f.UintSliceVar(&o.ports, "port", nil, "events with this port on either side")
	f.StringArrayVar(&o.labels, "label", nil, "events with a pod of these labels on either side, as kubectl selects: app=web,tier in (a,b),!x; may be repeated")
	f.StringSliceVar(&o.verdicts, "verdict", nil, "forwarded, dropped, audited or redirected")
	f.StringSliceVar(&o.types, "type", nil, "drop, policy-verdict or connection-closed")
	return cmd
}

// completeOwners takes the start of a container's id for the container, where
// one of this node begins so. Others may be gone, or may come.
func (c *command) completeOwners(ctx context.Context, names []string, owners []*workloadv1.Owner) error {
	all, err := c.endpoints(ctx)
	if err != nil {
		return err
	}
	for i, name := range names {
		e, err := matchEndpoint(all, name)
		if err != nil {
			return usagef("--container: %w", err)
		}
		if e != nil {
			owners[i] = e.GetOwner()
		}
	}
	return nil
}

// enumNamed finds a value by its last words, in lower case with "-".
func enumNamed[E ~int32](flag, text, prefix string, values map[string]int32) (E, error) {
	n, ok := values[prefix+strings.ToUpper(strings.ReplaceAll(text, "-", "_"))]
	if ok && n != 0 {
		return E(n), nil
	}
	var names []string
	for name, n := range values {
		if n != 0 {
			names = append(names, strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, prefix), "_", "-")))
		}
	}
	slices.Sort(names)
	return 0, usagef("%s: %q is not one of %s", flag, text, strings.Join(names, ", "))
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
	for _, s := range o.labels {
		if strings.TrimSpace(s) == "" {
			return nil, usagef("--label: an empty selector")
		}
		req.LabelSelectors = append(req.LabelSelectors, s)
	}
	for _, s := range o.verdicts {
		v, err := enumNamed[datapathv1.Verdict]("--verdict", s, "VERDICT_", datapathv1.Verdict_value)
		if err != nil {
			return nil, err
		}
		req.Verdicts = append(req.Verdicts, v)
	}
	for _, s := range o.types {
		v, err := enumNamed[datapathv1.FlowType]("--type", s, "FLOW_TYPE_", datapathv1.FlowType_value)
		if err != nil {
			return nil, err
		}
		req.Types = append(req.Types, v)
	}
	return req, nil
}

// flow is what is shown of one packet.
type flow struct {
	Time                *time.Time   `json:"time,omitempty"`
	Verdict             string       `json:"verdict,omitempty"`
	Reason              string       `json:"reason,omitempty"`
	Direction           string       `json:"direction,omitempty"`
	Owner               *owner       `json:"owner,omitempty"`
	Slot                uint32       `json:"slot,omitempty"`
	Source              string       `json:"sourceAddress,omitempty"`
	SourcePort          uint32       `json:"sourcePort,omitempty"`
	SourceIdentity      uint32       `json:"sourceIdentity,omitempty"`
	Destination         string       `json:"destinationAddress,omitempty"`
	DestinationPort     uint32       `json:"destinationPort,omitempty"`
	DestinationIdentity uint32       `json:"destinationIdentity,omitempty"`
	Protocol            string       `json:"protocol,omitempty"`
	Length              uint32       `json:"length,omitempty"`
	SourceMAC           string       `json:"sourceMac,omitempty"`
	Ethertype           uint32       `json:"ethertype,omitempty"`
	Type                string       `json:"type,omitempty"`
	Egress              *sideVerdict `json:"egress,omitempty"`
	Ingress             *sideVerdict `json:"ingress,omitempty"`
	SourceLabels        []string     `json:"sourceLabels,omitempty"`
	DestinationLabels   []string     `json:"destinationLabels,omitempty"`
	TCPFlags            string       `json:"tcpFlags,omitempty"`
	Reply               bool         `json:"reply,omitempty"`
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
		Egress: sideVerdictOf(f.GetEgress()), Ingress: sideVerdictOf(f.GetIngress()),
		SourceLabels: f.GetSourceLabels(), DestinationLabels: f.GetDestinationLabels(), TCPFlags: tcpFlagsText(f.GetTcpFlags()), Reply: f.GetReply(),
	}
	if f.GetType() != datapathv1.FlowType_FLOW_TYPE_UNSPECIFIED {
		shown.Type = enum(f.GetType(), "FLOW_TYPE_")
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

// tcpFlagsText are the flags of a TCP header, the lowest bit first.
func tcpFlagsText(flags uint32) string {
	var set []string
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"} {
		if flags&(1<<i) != 0 {
			set = append(set, name)
		}
	}
	return strings.Join(set, ",")
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
	side := func(address string, port, identity uint32, labels []string, ports bool) string {
		s := orDash(address)
		if ports && address != "" {
			if a, err := netip.ParseAddr(address); err == nil {
				s = netip.AddrPortFrom(a, uint16(port)).String()
			}
		}
		switch {
		case len(labels) > 0:
			s += " (" + workloadText(labels) + ")"
		case identity != 0:
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
	case f.TCPFlags != "":
		what += " " + f.TCPFlags
	}
	if f.Length > 0 {
		what += fmt.Sprintf(", %d bytes", f.Length)
	}
	// The sender is known by more than its hardware address, if it is known.
	if f.SourceMAC != "" && (f.SourceIdentity == 0 || strings.HasPrefix(f.Reason, "spoofed")) {
		what += ", from " + f.SourceMAC
	}
	verdict := f.Verdict
	if f.Type == "connection-closed" {
		verdict = "closed"
	}
	arrow := "->"
	if f.Reply {
		arrow = "-> (reply)"
	}
	line := fmt.Sprintf("%s  %-9s %-14s %-7s %s  %s %s %s  %s", at, verdict, f.Reason, f.Direction, who,
		side(f.Source, f.SourcePort, f.SourceIdentity, f.SourceLabels, ports), arrow,
		side(f.Destination, f.DestinationPort, f.DestinationIdentity, f.DestinationLabels, ports), what)
	for _, s := range []struct {
		name    string
		verdict *sideVerdict
	}{{"egress", f.Egress}, {"ingress", f.Ingress}} {
		// Of a dropped packet only the side that dropped it matters, and at the
		// end of a connection only rules.
		matters := s.verdict != nil && (f.Verdict != "dropped" || s.verdict.Verdict != "forwarded")
		if matters && (f.Type != "connection-closed" || s.verdict.Rule != 0) {
			line += fmt.Sprintf("; %s %s %s", s.name, s.verdict.Verdict, s.verdict.because())
		}
	}
	return printable(line)
}

// criterion is a field of the request in a message of the service.
var criterion = regexp.MustCompile(`^([a-z_]+)(?:\[\d+\])?: `)

// inFlags names the flag that the service found a mistake in.
func inFlags(err error) error {
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.InvalidArgument {
		return err
	}
	match := criterion.FindStringSubmatch(st.Message())
	if match == nil {
		return err
	}
	flag, ok := map[string]string{"label_selectors": "--label", "reasons": "--reason", "owners": "--container", "prefixes": "--address"}[match[1]]
	if !ok {
		return err
	}
	return usagef("%s: %s", flag, strings.TrimPrefix(st.Message(), match[0]))
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
		return inFlags(err)
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
			return inFlags(err)
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
