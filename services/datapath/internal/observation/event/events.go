// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package event reads what the programs report: events of packets and
// connections, and the counters of every reason to forward or drop. The numbers
// of the programs get their names here.
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

// Type is what an event is about.
type Type uint32

const (
	// PacketDropped is a packet that ended here.
	PacketDropped = Type(bpf.MapsSlEventTypeSL_EVENT_DROP)
	// ConnectionEvaluated is the first packet of a connection, or the first after
	// a policy had changed.
	ConnectionEvaluated = Type(bpf.MapsSlEventTypeSL_EVENT_VERDICT)
	// ConnectionClosed is the packet that ended a connection.
	ConnectionClosed = Type(bpf.MapsSlEventTypeSL_EVENT_CLOSED)
)

// String is "drop", "verdict" or "closed".
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

// By says what a side's verdict comes from.
type By uint8

// The origins of verdicts, as bpf/include/sluice/abi.h explains them.
const (
	ByNobody          = By(bpf.MapsSlBySL_BY_NOBODY)
	ByRule            = By(bpf.MapsSlBySL_BY_RULE)
	ByDefault         = By(bpf.MapsSlBySL_BY_DEFAULT)
	ByHostAllow       = By(bpf.MapsSlBySL_BY_HOST_ALLOW)
	ByUnknownIdentity = By(bpf.MapsSlBySL_BY_UNKNOWN_IDENTITY)
	ByTable           = By(bpf.MapsSlBySL_BY_TABLE)
)

// What a rule does, in the numbers of the programs.
const (
	ActionDeny     = uint8(bpf.MapsSlActionSL_ACTION_DENY)
	ActionRedirect = uint8(bpf.MapsSlActionSL_ACTION_REDIRECT)
	ActionAllow    = uint8(bpf.MapsSlActionSL_ACTION_ALLOW)
	ActionPass     = uint8(bpf.MapsSlActionSL_ACTION_PASS)
)

// SideVerdict is what one side's table said.
type SideVerdict struct {
	// By is ByNobody if the side was not asked; nothing else is set then.
	By By
	// Table is not known for the end of a connection.
	Table nodetable.ID
	// Epoch of the endpoint's word that was read.
	Epoch uint32
	// Rule is the number of the deciding rule in the table, 0 if none decided.
	Rule uint16
	// Action is ActionDeny, ActionRedirect or ActionAllow.
	Action uint8
	// Audited is set if the side denied and the packet passed all the same.
	Audited bool
}

// Redirects says whether the side sends the packet to a proxy.
func (s SideVerdict) Redirects() bool { return s.By != ByNobody && s.Action == ActionRedirect }

// Event is what the programs report about one packet.
type Event struct {
	Type Type
	// Time is when the program saw the packet.
	Time time.Time
	// Lost is how many events of this reason this CPU left out since the last
	// one it sent, by rate limit or because the buffer was full.
	Lost      uint32
	Reason    Reason
	Direction Direction
	// Ifindex is the device whose hook saw the packet.
	Ifindex uint32
	// Length of the packet in bytes with its Ethernet header, or of all
	// segments of a GSO packet.
	Length uint32
	// EtherType is the protocol that the frame names, in host byte order.
	EtherType uint16
	// SourceMAC is the Ethernet source address.
	SourceMAC [6]byte
	// Source and Destination are invalid if the packet was dropped before they
	// were read. Ports are 0 for protocols without ports and for fragments;
	// ICMP has type<<8|code as its destination port.
	Source, Destination netip.AddrPort
	// Original is the destination that the packet had before a program led it to a
	// backend of a service; invalid: none did.
	Original netip.AddrPort
	// Protocol is the IP protocol number after extension headers.
	Protocol uint8
	TCPFlags uint8
	// SourceIdentity and DestinationIdentity are 0 if not determined.
	SourceIdentity, DestinationIdentity identity.Numeric
	// Node is the number of the other node that the packet came from or goes to past
	// the stack of this one, 0 without one.
	Node uint16
	// SourceSlot and DestinationSlot are NoID if not local or not determined.
	SourceSlot, DestinationSlot endpointmap.ID
	// Egress and Ingress are what the policies of the sender and of the
	// receiver said. For a reply they are those of its connection: the sender
	// of the connection's first packet has the egress side.
	Egress, Ingress SideVerdict
	// Connection is the state of the packet's connection, 0 if it has none.
	Connection conntrack.Flags
	// Reply is set if the connection began in the other direction.
	Reply bool
}

// Reader reads events in the order in which they were sent.
type Reader struct {
	ring   *ringbuf.Reader
	rec    ringbuf.Record
	bounds *bound.Bounds
}

// Read opens a reader on the programs' events. The ring buffer has one reader:
// two would share the events between them. The caller closes it.
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

// Read returns the next event. It ends with ctx's error, or with pin.ErrClosed
// after Close. One goroutine reads at a time.
func (r *Reader) Read(ctx context.Context) (Event, error) {
	for {
		if err := ctx.Err(); err != nil {
			return Event{}, err
		}
		// a deadline could not be moved while the reader waits
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
			// by this context, or late by that of an earlier call
		default:
			return Event{}, fmt.Errorf("read events: %w", err)
		}
	}
}

// charged is the slot whose share of the ring an event was taken from, HostID without one.
func charged(raw []byte) endpointmap.ID {
	const at = int(unsafe.Offsetof(bpf.MapsSlEvent{}.Charged))
	if len(raw) < at+2 {
		return endpointmap.HostID
	}
	return binary.NativeEndian.Uint16(raw[at:])
}

// Waiting is how many bytes of events have not been read.
func (r *Reader) Waiting() int { return r.ring.AvailableBytes() }

// Close ends a Read that waits.
func (r *Reader) Close() error { return r.ring.Close() }

// decodeEvent reads what the programs wrote. A longer record is one of a newer
// program: what it appends is ignored.
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

// addrPort is an address of a family as events have it, invalid without a family.
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
		// what had allowed it, as the connection's entry remembers it
		s := SideVerdict{By: ByDefault, Epoch: w.Epoch, Rule: w.Rule, Action: ActionAllow}
		if w.Rule != 0 {
			s.By = ByRule
		}
		return s
	}
	return SideOf(w)
}

// SideOf reads what the programs say about a side.
func SideOf(w bpf.MapsSlSide) SideVerdict {
	if By(w.By) == ByNobody {
		return SideVerdict{}
	}
	return SideVerdict{
		By: By(w.By), Table: nodetable.ID(w.Table), Epoch: w.Epoch, Rule: w.Rule, Action: w.Action, Audited: w.Audited != 0,
	}
}
