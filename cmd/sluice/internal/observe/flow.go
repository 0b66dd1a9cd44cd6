// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// flow is what is shown of one packet.
type flow struct {
	Time                *time.Time      `json:"time,omitempty"`
	Verdict             string          `json:"verdict,omitempty"`
	Reason              string          `json:"reason,omitempty"`
	Direction           string          `json:"direction,omitempty"`
	Owner               *workload.Owner `json:"owner,omitempty"`
	Slot                uint32          `json:"slot,omitempty"`
	Source              string          `json:"sourceAddress,omitempty"`
	SourcePort          uint32          `json:"sourcePort,omitempty"`
	SourceIdentity      uint32          `json:"sourceIdentity,omitempty"`
	Destination         string          `json:"destinationAddress,omitempty"`
	DestinationPort     uint32          `json:"destinationPort,omitempty"`
	DestinationIdentity uint32          `json:"destinationIdentity,omitempty"`
	Protocol            string          `json:"protocol,omitempty"`
	Length              uint32          `json:"length,omitempty"`
	SourceMAC           string          `json:"sourceMac,omitempty"`
	Ethertype           uint32          `json:"ethertype,omitempty"`
	Type                string          `json:"type,omitempty"`
	Egress              *verdict.Side   `json:"egress,omitempty"`
	Ingress             *verdict.Side   `json:"ingress,omitempty"`
	SourceLabels        []string        `json:"sourceLabels,omitempty"`
	DestinationLabels   []string        `json:"destinationLabels,omitempty"`
	TCPFlags            string          `json:"tcpFlags,omitempty"`
	Reply               bool            `json:"reply,omitempty"`
	// Lost is how many events are missing here; the rest is empty then.
	Lost   uint64 `json:"lost,omitempty"`
	LostBy string `json:"lostBy,omitempty"`
}

func flowOf(m *datapathv1.ObserveResponse) flow {
	if l := m.GetLost(); l != nil {
		return flow{Lost: l.GetCount(), LostBy: output.Enum(l.GetSource(), "LOSS_SOURCE_")}
	}
	f := m.GetFlow()
	shown := flow{
		Time: output.When(f.GetTime()), Verdict: output.Enum(f.GetVerdict(), "VERDICT_"),
		Reason:    output.Enum(f.GetReason(), "REASON_"),
		Direction: output.Enum(f.GetDirection(), "DIRECTION_"), Slot: f.GetSlot(),
		Source: f.GetSourceAddress(), SourcePort: f.GetSourcePort(),
		SourceIdentity: f.GetSourceIdentity(),
		Destination:    f.GetDestinationAddress(), DestinationPort: f.GetDestinationPort(),
		DestinationIdentity: f.GetDestinationIdentity(),
		Protocol:            ports.ProtocolText(uint32(f.GetProtocol())), Length: f.GetLength(),
		SourceMAC: f.GetSourceMac(),
		Ethertype: f.GetEthertype(),
		Egress:    verdict.SideOf(f.GetEgress()), Ingress: verdict.SideOf(f.GetIngress()),
		SourceLabels:      workload.LabelTextsInOrder(f.GetSourceLabels()),
		DestinationLabels: workload.LabelTextsInOrder(f.GetDestinationLabels()),
		TCPFlags:          tcpFlagsText(f.GetTcpFlags()), Reply: f.GetReply(),
		Type: output.Enum(f.GetType(), "FLOW_TYPE_"),
	}
	if f.GetOwner() != nil {
		o := workload.OwnerOf(f.GetOwner())
		shown.Owner = &o
	}
	return shown
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
		s := output.OrDash(address)
		if ports && address != "" {
			if a, err := netip.ParseAddr(address); err == nil {
				s = netip.AddrPortFrom(a, uint16(port)).String()
			}
		}
		switch {
		case len(labels) > 0:
			s += " (" + workload.Text(labels) + ")"
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
	outcome := f.Verdict
	if f.Type == "connection-closed" {
		outcome = "closed"
	}
	arrow := "->"
	if f.Reply {
		arrow = "-> (reply)"
	}
	line := fmt.Sprintf("%s  %-9s %-14s %-7s %s  %s %s %s  %s", at, outcome, f.Reason, f.Direction, who,
		side(f.Source, f.SourcePort, f.SourceIdentity, f.SourceLabels, ports), arrow,
		side(f.Destination, f.DestinationPort, f.DestinationIdentity, f.DestinationLabels, ports), what)
	for _, s := range []struct {
		name string
		said *verdict.Side
	}{{"egress", f.Egress}, {"ingress", f.Ingress}} {
		// Of a dropped packet only the side that dropped it matters, and at the
		// end of a connection only rules.
		matters := s.said != nil && (f.Verdict != "dropped" || s.said.Verdict != "forwarded")
		if matters && (f.Type != "connection-closed" || s.said.Rule != 0) {
			line += fmt.Sprintf("; %s %s %s", s.name, s.said.Verdict, s.said.Because())
		}
	}
	return output.Printable(line)
}
