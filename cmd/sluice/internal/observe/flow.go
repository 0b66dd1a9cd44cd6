// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Event is a line of `observe`: a packet, a repair, lost events, or a note about the stream.
type Event struct {
	*datapathv1.ObserveResponse
	// Note describes a change of the stream, and Noted is the time of the note. A note has no message.
	Note  string
	Noted time.Time
	// Node is the node that a note or lost events come from. It is only set if the events of several nodes are
	// shown.
	Node string
}

// missing is the JSON form of lost events and notes. Its keys distinguish the kinds of events.
type missing struct {
	Type   string     `json:"type,omitempty"`
	Time   *time.Time `json:"time,omitempty"`
	Node   string     `json:"nodeName,omitempty"`
	Lost   uint64     `json:"lost,omitempty"` // if 0 with LostBy, the number is unknown
	LostBy string     `json:"lostBy,omitempty"`
	From   *time.Time `json:"lostFrom,omitempty"`  // time from which on events are missing, if known
	Until  *time.Time `json:"lostUntil,omitempty"` // time until which events are missing, if known
	Note   string     `json:"note,omitempty"`
}

// typeRepair is the type of a repair in JSON.
const typeRepair = "repair"

// Append appends the JSON of the event to b.
func (e Event) Append(b []byte) ([]byte, error) {
	switch {
	case e.GetFlow() != nil:
		return message.Of(e.GetFlow()).Append(b)
	case e.GetRepair() != nil:
		return message.Of(e.GetRepair(), message.Fact{Key: "type", Value: typeRepair}).Append(b)
	}
	m := missing{Node: e.Node, Note: e.Note, Lost: e.GetLost().GetCount()}
	if !e.Noted.IsZero() {
		m.Time = &e.Noted
	}
	if l := e.GetLost(); l != nil {
		m.LostBy = output.Enum(l.GetSource(), "LOSS_SOURCE_")
		m.From, m.Until = timeOrNil(l.GetFirstTime()), timeOrNil(l.GetLastTime())
	}
	text, err := json.Marshal(m)
	return append(b, text...), err
}

func timeOrNil(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

// UnmarshalJSON implements json.Unmarshaler.
func (e *Event) UnmarshalJSON(data []byte) error {
	var m missing
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	r := &datapathv1.ObserveResponse{}
	*e = Event{ObserveResponse: r}
	switch {
	case m.Note != "":
		e.Note, e.Node = m.Note, m.Node
		if m.Time != nil {
			e.Noted = *m.Time
		}
		return nil
	case m.LostBy != "":
		e.Node = m.Node
		lost := &datapathv1.LostEvents{}
		r.Event = &datapathv1.ObserveResponse_Lost{Lost: lost}
		if m.From != nil {
			lost.FirstTime = timestamppb.New(*m.From)
		}
		if m.Until != nil {
			lost.LastTime = timestamppb.New(*m.Until)
		}
		return message.Unmarshal(fmt.Appendf(nil, `{"source":%q,"count":%d}`, m.LostBy, m.Lost), lost)
	case m.Type == typeRepair:
		repair := &datapathv1.AttachmentRepair{}
		r.Event = &datapathv1.ObserveResponse_Repair{Repair: repair}
		return message.Unmarshal(data, repair)
	}
	flow := &datapathv1.Flow{}
	r.Event = &datapathv1.ObserveResponse_Flow{Flow: flow}
	return message.Unmarshal(data, flow)
}

// SetNode names the node that reported the event.
func (e *Event) SetNode(node string) {
	switch {
	case e.GetFlow() != nil:
		e.GetFlow().NodeName = node
	case e.GetRepair() != nil:
		e.GetRepair().NodeName = node
	default:
		e.Node = node
	}
}

// At returns the time of the event. It is zero for lost events.
func (e Event) At() time.Time {
	var at *timestamppb.Timestamp
	switch {
	case e.GetFlow() != nil:
		at = e.GetFlow().GetTime()
	case e.GetRepair() != nil:
		at = e.GetRepair().GetTime()
	}
	if at == nil {
		return e.Noted
	}
	return at.AsTime()
}

// uuid returns the event's ID, after which a stream can resume; empty if the event has no ID.
func (e Event) uuid() string { return cmp.Or(e.GetFlow().GetUuid(), e.GetRepair().GetUuid()) }

// Line returns the event as text. Events are printed as they arrive, so they are not aligned as a table.
func (e Event) Line(today time.Time) string {
	at, lost, r := timeText(e.At(), today), e.GetLost(), e.GetRepair()
	switch {
	case lost.GetSource() == datapathv1.LossSource_LOSS_SOURCE_RESTART:
		return "--- events from before the restart of the datapath may be missing ---"
	case lost.GetSource() == datapathv1.LossSource_LOSS_SOURCE_HISTORY:
		return historyLine(lost, today)
	case lost.GetSource() == datapathv1.LossSource_LOSS_SOURCE_DNS:
		return fmt.Sprintf("--- %d DNS messages were not reported by sluice-dns ---", lost.GetCount())
	case lost != nil:
		return fmt.Sprintf("--- %s lost by the %s ---", output.Plural(lost.GetCount(), "event was", "events were"),
			output.Enum(lost.GetSource(), "LOSS_SOURCE_"))
	case e.Note != "":
		return output.Printable(fmt.Sprintf("--- %s %s ---", at, e.Note))
	case r != nil:
		d := r.GetDifference()
		line := fmt.Sprintf("%s  %-9s %s  program of %s: want %s, have %s", at, "repaired", workload.OwnerOf(r.GetOwner()),
			d.GetKey(), d.GetWant(), d.GetHave())
		if r.GetError() != "" {
			line += "; not repaired: " + r.GetError()
		}
		return output.Printable(line)
	}
	if e.GetFlow().GetDns() != nil {
		return output.Printable(messageLine(e.GetFlow(), at))
	}
	return output.Printable(packetLine(e.GetFlow(), at))
}

// historyLine returns a loss in the files of sluice-hubble.
func historyLine(lost *datapathv1.LostEvents, today time.Time) string {
	what, are := "events", "are"
	if n := lost.GetCount(); n > 0 {
		what = output.Plural(n, "event", "events")
		if n == 1 {
			are = "is"
		}
	}
	if lost.GetLastTime() == nil {
		return fmt.Sprintf("--- %s %s missing in the history ---", what, are)
	}
	return fmt.Sprintf("--- %s up to %s %s missing in the history ---", what,
		timeText(lost.GetLastTime().AsTime(), today), are)
}

// timeText returns the time of an event, with the date if it is not today.
func timeText(t, today time.Time) string {
	if t.IsZero() {
		return ""
	}
	t = t.Local()
	if t.Format(time.DateOnly) != today.Local().Format(time.DateOnly) {
		return t.Format("2006-01-02 15:04:05.000")
	}
	return t.Format("15:04:05.000")
}

// endText describes one end of a packet: address and port, labels or identity, and the node if it is not the local
// node.
func endText(e *datapathv1.FlowEnd, ports bool) string {
	s := cmp.Or(e.GetAddress(), "-")
	if a, err := netip.ParseAddr(e.GetAddress()); err == nil && ports {
		s = netip.AddrPortFrom(a, uint16(e.GetPort())).String()
	}
	switch {
	case len(e.GetLabels()) > 0:
		s += " (" + workload.Text(workload.LabelTextsInOrder(e.GetLabels())) + ")"
	case e.GetIdentity() != 0:
		s += fmt.Sprintf(" (identity %d)", e.GetIdentity())
	}
	if e.GetNodeName() != "" {
		s += " on " + e.GetNodeName()
	}
	return s
}

// destinationText describes the destination of a packet. If a service address was translated, it precedes the backend;
// if no backend was chosen, the destination is the service address.
func destinationText(f *datapathv1.Flow, ports bool) string {
	to := endText(f.GetDestination(), ports)
	asked, port := f.GetOriginalDestinationAddress(), f.GetOriginalDestinationPort()
	if asked == "" {
		return to
	}
	name := strings.TrimSpace("service " + f.GetService())
	if asked == f.GetDestination().GetAddress() && port == f.GetDestination().GetPort() {
		return fmt.Sprintf("%s (%s)", to, name)
	}
	return fmt.Sprintf("%s (%s) -> %s", service.AddressText(asked, port), name, to)
}

// packetText returns the protocol and the known header fields of a packet.
func packetText(f *datapathv1.Flow, protocol string) string {
	what := protocol
	switch {
	case f.GetIcmp() != nil:
		what = fmt.Sprintf("%s type %d code %d", what, f.GetIcmp().GetType(), f.GetIcmp().GetCode())
	case what == "":
		what = fmt.Sprintf("ethertype %#04x", f.GetEthertype())
	case f.GetTcpFlags() != 0:
		names := message.FlagTexts(message.Flags["sluice.datapath.v1.Flow.tcp_flags"], uint64(f.GetTcpFlags()))
		what += " " + strings.ToUpper(strings.Join(names, ","))
	}
	if f.GetLength() > 0 {
		what += fmt.Sprintf(", %d bytes", f.GetLength())
	}
	// The MAC address is shown if nothing else identifies the sender.
	spoofed := strings.HasPrefix(f.GetReason().String(), "REASON_SPOOFED")
	if s := f.GetSource(); f.GetSourceMac() != "" && s.GetNodeName() == "" && (s.GetIdentity() == 0 || spoofed) {
		what += ", from " + f.GetSourceMac()
	}
	return what
}

// ownerText returns the owner of the local end of a flow; "-" without one.
func ownerText(f *datapathv1.Flow) string {
	here := f.GetDestination()
	if f.GetDirection() == netv1.Direction_DIRECTION_EGRESS {
		here = f.GetSource()
	}
	if here.GetOwner() == nil {
		return "-"
	}
	return workload.OwnerOf(here.GetOwner()).String()
}

// packetLine returns a packet with its time.
func packetLine(f *datapathv1.Flow, at string) string {
	who := ownerText(f)
	closed := f.GetType() == datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED
	outcome := output.Enum(f.GetVerdict(), "VERDICT_")
	if closed {
		outcome = "closed"
	}
	arrow := "->"
	if f.GetReply() {
		arrow = "-> (reply)"
	}
	protocol, hasPorts := ports.ProtocolText(uint32(f.GetProtocol())), ports.HasPorts(uint32(f.GetProtocol()))
	line := fmt.Sprintf("%s  %-9s %-14s %-7s %s  %s %s %s  %s", at, outcome, output.Enum(f.GetReason(), "REASON_"),
		output.Enum(f.GetDirection(), "DIRECTION_"), who, endText(f.GetSource(), hasPorts), arrow,
		destinationText(f, hasPorts), packetText(f, protocol))
	for _, s := range []struct {
		name string
		said *datapathv1.SideVerdict
	}{{"egress", f.GetEgress()}, {"ingress", f.GetIngress()}} {
		// For a dropped packet, show only the side that dropped it. For a closed connection, show only rules.
		matters := s.said != nil && (f.GetVerdict() != datapathv1.Verdict_VERDICT_DROPPED ||
			s.said.GetVerdict() != datapathv1.Verdict_VERDICT_FORWARDED)
		if matters && (!closed || s.said.GetRule() != 0) {
			line += fmt.Sprintf("; %s %s", s.name, verdict.Text(s.said))
		}
	}
	return line
}
