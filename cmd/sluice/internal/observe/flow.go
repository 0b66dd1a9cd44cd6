// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Flow is what is shown of one packet.
type Flow struct {
	Time                *time.Time      `json:"time,omitempty"`
	UUID                string          `json:"uuid,omitempty"`
	Node                string          `json:"nodeName,omitempty"`
	Verdict             string          `json:"verdict,omitempty"`
	Reason              string          `json:"reason,omitempty"`
	Direction           string          `json:"direction,omitempty"`
	Owner               *workload.Owner `json:"owner,omitempty"`
	EndpointID          uint32          `json:"endpointId,omitempty"`
	Source              string          `json:"sourceAddress,omitempty"`
	SourcePort          uint32          `json:"sourcePort,omitempty"`
	SourceIdentity      uint32          `json:"sourceIdentity,omitempty"`
	SourceOwner         *workload.Owner `json:"sourceOwner,omitempty"`
	SourcePod           string          `json:"sourcePod,omitempty"`
	SourceNode          string          `json:"sourceNode,omitempty"` // another than this one
	Destination         string          `json:"destinationAddress,omitempty"`
	DestinationPort     uint32          `json:"destinationPort,omitempty"`
	DestinationIdentity uint32          `json:"destinationIdentity,omitempty"`
	DestinationOwner    *workload.Owner `json:"destinationOwner,omitempty"`
	DestinationPod      string          `json:"destinationPod,omitempty"`
	DestinationNode     string          `json:"destinationNode,omitempty"`
	// Original is what the packet asked for before it was led to a backend of a service.
	Original          string        `json:"originalDestinationAddress,omitempty"`
	OriginalPort      uint32        `json:"originalDestinationPort,omitempty"`
	Service           string        `json:"service,omitempty"` // "shop/web"
	ServicePort       string        `json:"servicePortName,omitempty"`
	ICMP              *icmp         `json:"icmp,omitempty"`
	Protocol          string        `json:"protocol,omitempty"`
	Length            uint32        `json:"length,omitempty"`
	SourceMAC         string        `json:"sourceMac,omitempty"`
	Ethertype         uint32        `json:"ethertype,omitempty"`
	Type              string        `json:"type,omitempty"`
	Egress            *verdict.Side `json:"egress,omitempty"`
	Ingress           *verdict.Side `json:"ingress,omitempty"`
	SourceLabels      []string      `json:"sourceLabels,omitempty"`
	DestinationLabels []string      `json:"destinationLabels,omitempty"`
	TCPFlags          string        `json:"tcpFlags,omitempty"`
	Reply             bool          `json:"reply,omitempty"`
	// Repair is a program that was put back on an endpoint's device; the packet is empty then.
	Repair *repair `json:"repair,omitempty"`
	// Lost is how many events are missing here, 0 with LostBy if that is not known; the rest is empty then.
	Lost   uint64 `json:"lost,omitempty"`
	LostBy string `json:"lostBy,omitempty"`
	// Note says what became of the stream; besides the time the rest is empty then.
	Note string `json:"note,omitempty"`
}

// repair is what was wrong with the programs of an endpoint.
type repair struct {
	Device string `json:"device"`
	Want   string `json:"want,omitempty"`
	Have   string `json:"have,omitempty"`
	Error  string `json:"error,omitempty"` // why it could not be put back
}

func repairOf(r *datapathv1.AttachmentRepair) Flow {
	owner := workload.OwnerOf(r.GetOwner())
	return Flow{
		Time: output.When(r.GetTime()), UUID: r.GetUuid(), Node: r.GetNodeName(), Type: "repair", Owner: &owner,
		EndpointID: r.GetEndpointIndex(), SourceIdentity: r.GetIdentity(), SourcePod: podText(r.GetPod()),
		Repair: &repair{
			Device: r.GetDifference().GetKey(), Want: r.GetDifference().GetWant(), Have: r.GetDifference().GetHave(),
			Error: r.GetError(),
		},
	}
}

func flowOf(m *datapathv1.ObserveResponse) Flow {
	if l := m.GetLost(); l != nil {
		return Flow{Lost: l.GetCount(), LostBy: output.Enum(l.GetSource(), "LOSS_SOURCE_")}
	}
	if r := m.GetRepair(); r != nil {
		return repairOf(r)
	}
	f := m.GetFlow()
	source, destination := f.GetSource(), f.GetDestination()
	shown := Flow{
		Time: output.When(f.GetTime()), UUID: f.GetUuid(), Node: f.GetNodeName(),
		Type:    output.Enum(f.GetType(), "FLOW_TYPE_"),
		Verdict: output.Enum(f.GetVerdict(), "VERDICT_"), Reason: output.Enum(f.GetReason(), "REASON_"),
		Direction: output.Enum(f.GetDirection(), "DIRECTION_"), Reply: f.GetReply(),
		Source: source.GetAddress(), SourcePort: source.GetPort(), SourceIdentity: source.GetIdentity(),
		SourceLabels: workload.LabelTextsInOrder(source.GetLabels()),
		SourceOwner:  ownerOf(source), SourcePod: podText(source.GetPod()),
		Destination: destination.GetAddress(), DestinationPort: destination.GetPort(),
		DestinationIdentity: destination.GetIdentity(),
		DestinationLabels:   workload.LabelTextsInOrder(destination.GetLabels()),
		DestinationOwner:    ownerOf(destination), DestinationPod: podText(destination.GetPod()),
		Protocol: ports.ProtocolText(uint32(f.GetProtocol())), TCPFlags: tcpFlagsText(f.GetTcpFlags()),
		Length: f.GetLength(), Ethertype: f.GetEthertype(), SourceMAC: f.GetSourceMac(),
		SourceNode: source.GetNodeName(), DestinationNode: destination.GetNodeName(),
		Egress: verdict.SideOf(f.GetEgress()), Ingress: verdict.SideOf(f.GetIngress()),
	}
	shown.Original, shown.OriginalPort = f.GetOriginalDestinationAddress(), f.GetOriginalDestinationPort()
	shown.Service, shown.ServicePort, _ = strings.Cut(f.GetService(), ":")
	if h := f.GetIcmp(); h != nil {
		shown.ICMP = &icmp{Type: h.GetType(), Code: h.GetCode()}
	}
	at := destination
	if f.GetDirection() == netv1.Direction_DIRECTION_EGRESS {
		at = source
	}
	shown.Owner, shown.EndpointID = ownerOf(at), at.GetEndpointIndex()
	return shown
}

// icmp is the beginning of an ICMP message.
type icmp struct {
	Type uint32 `json:"type"`
	Code uint32 `json:"code"`
}

// ownerOf is the endpoint at an end of a flow; nil if there is none.
func ownerOf(e *datapathv1.FlowEnd) *workload.Owner {
	if e.GetOwner() == nil {
		return nil
	}
	o := workload.OwnerOf(e.GetOwner())
	return &o
}

// podText is "namespace/name"; empty without a pod.
func podText(p *workloadv1.PodReference) string {
	if p == nil {
		return ""
	}
	return p.GetNamespace() + "/" + p.GetName()
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

// toBackend is the way to the destination past the service that the packet asked
// for; only the destination if it asked for none. A packet that was led to no backend
// has the address that it asked for as its destination.
func (f Flow) toBackend(destination string) string {
	if f.Original == "" {
		return destination
	}
	name := "service"
	if f.Service != "" {
		name += " " + f.Service
	}
	if f.ServicePort != "" {
		name += ":" + f.ServicePort
	}
	if f.Original == f.Destination && f.OriginalPort == f.DestinationPort {
		return fmt.Sprintf("%s (%s)", destination, name)
	}
	return fmt.Sprintf("%s (%s) -> %s", service.AddressText(f.Original, f.OriginalPort), name, destination)
}

// at is the time of an event. The date is there if it is not that of a day.
func (f Flow) at(today time.Time) string {
	if f.Time == nil {
		return ""
	}
	t := f.Time.Local()
	if t.Format(time.DateOnly) != today.Local().Format(time.DateOnly) {
		return t.Format("2006-01-02 15:04:05.000")
	}
	return t.Format("15:04:05.000")
}

// Line is a flow for people. Lines come one by one, so no table aligns them.
func (f Flow) Line(today time.Time) string {
	switch at := f.at(today); {
	case f.LostBy == "restart":
		return "--- events from before the restart of the datapath may be missing ---"
	case f.LostBy != "":
		return fmt.Sprintf("--- %d events were lost by the %s ---", f.Lost, f.LostBy)
	case f.Note != "":
		return output.Printable(fmt.Sprintf("--- %s %s ---", at, f.Note))
	case f.Repair != nil:
		line := fmt.Sprintf("%s  %-9s %s  program of %s: want %s, have %s", at, "repaired", f.Owner, f.Repair.Device,
			f.Repair.Want, f.Repair.Have)
		if f.Repair.Error != "" {
			line += "; not repaired: " + f.Repair.Error
		}
		return output.Printable(line)
	}
	return output.Printable(f.packetLine(f.at(today)))
}

// packetLine is a flow with its time.
func (f Flow) packetLine(at string) string {
	who := "-"
	if f.Owner != nil {
		who = f.Owner.String()
	}
	side := func(address string, port, identity uint32, labels []string, node string, ports bool) string {
		s := cmp.Or(address, "-")
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
		if node != "" {
			s += " on " + node
		}
		return s
	}
	ports := f.Protocol == "tcp" || f.Protocol == "udp" || f.Protocol == "sctp"
	what := f.Protocol
	switch {
	case f.ICMP != nil:
		what = fmt.Sprintf("%s type %d code %d", f.Protocol, f.ICMP.Type, f.ICMP.Code)
	case f.Protocol == "":
		what = fmt.Sprintf("ethertype %#04x", f.Ethertype)
	case f.TCPFlags != "":
		what += " " + f.TCPFlags
	}
	if f.Length > 0 {
		what += fmt.Sprintf(", %d bytes", f.Length)
	}
	// The sender is known by more than its hardware address, if it is known.
	if f.SourceMAC != "" && f.SourceNode == "" && (f.SourceIdentity == 0 || strings.HasPrefix(f.Reason, "spoofed")) {
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
	to := side(f.Destination, f.DestinationPort, f.DestinationIdentity, f.DestinationLabels, f.DestinationNode, ports)
	line := fmt.Sprintf("%s  %-9s %-14s %-7s %s  %s %s %s  %s", at, outcome, f.Reason, f.Direction, who,
		side(f.Source, f.SourcePort, f.SourceIdentity, f.SourceLabels, f.SourceNode, ports), arrow,
		f.toBackend(to), what)
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
	return line
}
