// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package event reads what the programs report: events about packets and connections, and packet counters by reason. It
// maps the programs' numbers to names.
package event

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Type is the type of an event.
type Type uint32

const (
	// PacketDropped reports a dropped packet.
	PacketDropped = Type(bpf.MapsSlEventTypeSL_EVENT_DROP)
	// ConnectionEvaluated reports the first packet of a connection, or the first one after a policy change.
	ConnectionEvaluated = Type(bpf.MapsSlEventTypeSL_EVENT_VERDICT)
	// ConnectionClosed reports the packet that closed a connection.
	ConnectionClosed = Type(bpf.MapsSlEventTypeSL_EVENT_CLOSED)
)

// String returns "drop", "verdict" or "closed".
func (t Type) String() string {
	switch t {
	case PacketDropped:
		return "drop"
	case ConnectionEvaluated:
		return "verdict"
	case ConnectionClosed:
		return "closed"
	}
	return fmt.Sprintf("event-%d", uint32(t))
}

// By is the origin of a side's verdict.
type By uint8

// Origins of verdicts, as described in bpf/include/sluice/abi.h.
const (
	ByNobody          = By(bpf.MapsSlBySL_BY_NOBODY)
	ByRule            = By(bpf.MapsSlBySL_BY_RULE)
	ByDefault         = By(bpf.MapsSlBySL_BY_DEFAULT)
	ByHostAllow       = By(bpf.MapsSlBySL_BY_HOST_ALLOW)
	ByUnknownIdentity = By(bpf.MapsSlBySL_BY_UNKNOWN_IDENTITY)
	ByTable           = By(bpf.MapsSlBySL_BY_TABLE)
)

// Actions of a rule, with the programs' numbers.
const (
	ActionDeny     = uint8(bpf.MapsSlActionSL_ACTION_DENY)
	ActionRedirect = uint8(bpf.MapsSlActionSL_ACTION_REDIRECT)
	ActionAllow    = uint8(bpf.MapsSlActionSL_ACTION_ALLOW)
	ActionPass     = uint8(bpf.MapsSlActionSL_ACTION_PASS)
)

// SideVerdict is the verdict of one side's policy table.
type SideVerdict struct {
	// By is ByNobody if the side was not evaluated; then no other field is set.
	By By
	// Table is unknown when a connection is closed.
	Table nodetable.ID
	// Epoch is the policy epoch of the endpoint at the evaluation.
	Epoch uint32
	// Rule is the number of the deciding rule in the table, 0 if no rule decided.
	Rule uint16
	// Action is ActionDeny, ActionRedirect or ActionAllow.
	Action uint8
	// Audited is set if the side denied the packet, but it was forwarded because of audit mode.
	Audited bool
}

// Redirects reports whether the side redirects the packet to a proxy.
func (s SideVerdict) Redirects() bool { return s.By != ByNobody && s.Action == ActionRedirect }

// Event is the programs' report about one packet.
type Event struct {
	Type Type
	// Time is the time at which the program processed the packet.
	Time time.Time
	// Lost is the number of events of this reason that this CPU dropped since its last event, because of the rate limit or
	// a full buffer.
	Lost      uint32
	Reason    Reason
	Direction Direction
	// Ifindex is the device at whose hook the program saw the packet.
	Ifindex uint32
	// Length is the length of the packet in bytes with its Ethernet header, or of all segments of a GSO packet.
	Length uint32
	// EtherType is the protocol of the Ethernet frame, in host byte order.
	EtherType uint16
	// SourceMAC is the Ethernet source address.
	SourceMAC [6]byte
	// Source and Destination are invalid if the packet was dropped before they were parsed. Ports are 0 for protocols
	// without ports and for fragments; for ICMP, the destination port is type<<8|code.
	Source, Destination netip.AddrPort
	// Original is the destination before the translation to a backend of a service; invalid if the packet was not
	// translated.
	Original netip.AddrPort
	// Protocol is the IP protocol number after extension headers.
	Protocol uint8
	TCPFlags uint8
	// SourceIdentity and DestinationIdentity are 0 if not determined.
	SourceIdentity, DestinationIdentity identity.Numeric
	// Node is the node ID of the other node that the packet came from or goes to without passing this node's stack; 0:
	// none.
	Node uint16
	// SourceSlot and DestinationSlot are NoID if the end is not local or not determined.
	SourceSlot, DestinationSlot endpointmap.ID
	// Egress and Ingress are the verdicts of the sender's and the receiver's policies. For a reply, they are the verdicts
	// on its connection: the sender of the connection's first packet has the egress side.
	Egress, Ingress SideVerdict
	// Connection is the state of the packet's connection, 0 if it has none.
	Connection conntrack.Flags
	// Reply is set if the packet travels against the direction of its connection's first packet.
	Reply bool
}

// Reader reads events in the order in which they were sent.
type Reader struct {
	ring   *ringbuf.Reader
	rec    ringbuf.Record
	bounds *bound.Bounds
}

// Read opens a reader of the programs' events. There should be only one: two readers would share the events between
// them. The caller closes it.
func (es *Events) Read() (*Reader, error) {
	if err := es.gate.RLock(); err != nil {
		return nil, err
	}
	defer es.gate.RUnlock()
	if es.gate.ValidateOnly {
		return nil, pin.ErrValidateOnly
	}
	ring, err := ringbuf.NewReader(es.ring)
	if err != nil {
		return nil, fmt.Errorf("open the event ring: %w", err)
	}
	return &Reader{ring: ring, bounds: es.bounds}, nil
}

// Read returns the next event. It returns ctx's error, or pin.ErrClosed after Close. It must not be called
// concurrently.
func (r *Reader) Read(ctx context.Context) (Event, error) {
	for {
		if err := ctx.Err(); err != nil {
			return Event{}, err
		}
		// a deadline cannot be changed while the reader waits
		stop := context.AfterFunc(ctx, func() { _ = r.ring.Flush() })
		err := r.ring.ReadInto(&r.rec)
		stop()
		switch {
		case err == nil:
			r.bounds.TakeEvent(charged(r.rec.RawSample))
			return decodeEvent(r.rec.RawSample)
		case errors.Is(err, ringbuf.ErrClosed):
			return Event{}, fmt.Errorf("read events: %w", pin.ErrClosed)
		case errors.Is(err, ringbuf.ErrFlushed):
			// woken by this context, or by the late flush of an earlier call's context
		default:
			return Event{}, fmt.Errorf("read events: %w", err)
		}
	}
}

// charged returns the endpoint whose share of the ring an event counts towards, HostID without one.
func charged(raw []byte) endpointmap.ID {
	const at = int(unsafe.Offsetof(bpf.MapsSlEvent{}.Charged))
	if len(raw) < at+2 {
		return endpointmap.HostID
	}
	return binary.NativeEndian.Uint16(raw[at:])
}

// Waiting returns the number of unread bytes.
func (r *Reader) Waiting() int { return r.ring.AvailableBytes() }

// Close makes a waiting Read return.
func (r *Reader) Close() error { return r.ring.Close() }

// decodeEvent decodes an event. A longer record comes from a newer program; the additional bytes are ignored.
func decodeEvent(raw []byte) (Event, error) {
	var w bpf.MapsSlEvent
	n := binary.Size(w)
	if len(raw) < n {
		return Event{}, fmt.Errorf("event of %d bytes, want %d", len(raw), n)
	}
	if _, err := binary.Decode(raw[:n], binary.NativeEndian, &w); err != nil {
		return Event{}, fmt.Errorf("decode event: %w", err)
	}
	e := Event{
		Type:                Type(w.Type),
		Time:                conntrack.TimeOf(w.Time),
		Lost:                w.Lost,
		Reason:              Reason(w.Reason),
		Direction:           Direction(w.Direction),
		Ifindex:             w.Ifindex,
		Length:              w.Length,
		EtherType:           w.Ethertype,
		SourceMAC:           w.SrcMac,
		Protocol:            w.Proto,
		TCPFlags:            w.TcpFlags,
		SourceIdentity:      identity.Numeric(w.SrcIdentity),
		DestinationIdentity: identity.Numeric(w.DstIdentity),
		SourceSlot:          w.SrcSlot,
		DestinationSlot:     w.DstSlot,
		Egress:              sideOf(w.Egress, Type(w.Type)),
		Ingress:             sideOf(w.Ingress, Type(w.Type)),
		Connection:          conntrack.Flags(w.CtFlags),
		Reply:               w.Reply != 0,
		Node:                w.Node,
	}
	e.Source = addrPort(w.Family, w.Src, w.Sport)
	e.Destination = addrPort(w.Family, w.Dst, w.Dport)
	if w.OrigDst != [16]byte{} {
		e.Original = addrPort(w.Family, w.OrigDst, w.OrigDport)
	}
	return e, nil
}

// addrPort returns an address and port of a family; invalid without a family.
func addrPort(family uint8, a [16]byte, port uint16) netip.AddrPort {
	switch family {
	case 4:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(a[:4])), port)
	case 6:
		return netip.AddrPortFrom(netip.AddrFrom16(a), port)
	}
	return netip.AddrPort{}
}

func sideOf(w bpf.MapsSlSide, t Type) SideVerdict {
	if By(w.By) == ByNobody && t == ConnectionClosed && w.Epoch != 0 {
		// the verdict that had allowed the connection, from its entry
		s := SideVerdict{By: ByDefault, Epoch: w.Epoch, Rule: w.Rule, Action: ActionAllow}
		if w.Rule != 0 {
			s.By = ByRule
		}
		return s
	}
	return SideOf(w)
}

// SideOf decodes the programs' verdict of a side.
func SideOf(w bpf.MapsSlSide) SideVerdict {
	if By(w.By) == ByNobody {
		return SideVerdict{}
	}
	return SideVerdict{
		By: By(w.By), Table: nodetable.ID(w.Table), Epoch: w.Epoch, Rule: w.Rule, Action: w.Action, Audited: w.Audited != 0,
	}
}
