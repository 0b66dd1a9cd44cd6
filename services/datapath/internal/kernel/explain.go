// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/event"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/policymap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Peer is one end of a connection as the maps know it.
type Peer struct {
	Addr     netip.Addr
	Identity identity.Numeric
	// Word of the identity; not Known: the tables do not know it.
	Word policytable.Identity
	// Slot of the endpoint, HostSlot for the node's own addresses, NoSlot else.
	Slot slotmap.Slot
	// Entry of the ipcache that holds the address; not valid: none does, and
	// the address is the world's.
	Entry netip.Prefix
}

// Side is what one side's table says, step by step.
type Side struct {
	event.SideVerdict
	// Lookup is what the table said; zero for tables with a fixed meaning.
	Lookup policymap.Verdict
}

// Explanation is what would become of the first packet of a connection, and
// why.
type Explanation struct {
	// Reason is why it would be forwarded or dropped.
	Reason              event.Reason
	Source, Destination Peer
	// Egress and Ingress are the sides that are judged: those of local ends.
	// With a drop on one side the other is explained all the same, unless the
	// packet would be dropped before any policy is asked.
	Egress, Ingress *Side
	// Connection is the tracked one, if Tracked. Current says whether nothing
	// by which it was judged has changed since.
	Connection       conntrack.Connection
	Tracked, Current bool
}

// ErrNotLocal says that neither end is an endpoint of this node.
var ErrNotLocal = errors.New("neither address belongs to an endpoint of this node")

// Explain takes the steps of the programs on the live maps for the first
// packet of a connection: from the endpoint that has the source address, else
// from the host's stack to the one that has the destination. Destination's
// port is the packet's, or type << 8 | code of ICMP; Source's port is for the
// connection's state alone, and is the identifier of an echo. Nothing changes.
//
// What needs a packet is taken for granted: whole headers, the endpoint's own
// Ethernet addresses, a size that fits, no mark of another program.
func (k *Kernel) Explain(t conntrack.Tuple) (Explanation, error) {
	if err := t.Validate(); err != nil {
		return Explanation{}, err
	}
	x := Explanation{}
	var err error
	if x.Source, err = k.peer(t.Initiator.Addr()); err != nil {
		return x, err
	}
	if x.Destination, err = k.peer(t.Responder.Addr()); err != nil {
		return x, err
	}
	fromPod, toPod := x.Source.endpoint(), x.Destination.endpoint()
	if !fromPod && !toPod {
		return x, fmt.Errorf("%v, %v: %w", t.Initiator.Addr(), t.Responder.Addr(), ErrNotLocal)
	}
	if err := k.explainConnection(&x, t); err != nil {
		return x, err
	}
	if x.Reason = k.addressReason(&x, t, fromPod); x.Reason != 0 {
		return x, nil
	}
	// what the programs ask: both ends if they are local, the host's too
	point := uint32(t.Protocol)<<16 | uint32(point(t))
	var egress, ingress event.Reason
	if x.Source.Slot != slotmap.NoSlot {
		if x.Egress, egress, err = k.explainSide(x.Source.Slot, event.Egress, x.Destination, point); err != nil {
			return x, err
		}
	}
	if x.Destination.Slot != slotmap.NoSlot {
		if x.Ingress, ingress, err = k.explainSide(x.Destination.Slot, event.Ingress, x.Source, point); err != nil {
			return x, err
		}
	}
	switch {
	case egress != 0:
		x.Reason = egress
	case ingress != 0:
		x.Reason = ingress
	case !fromPod:
		x.Reason = event.ForwardFromStack
	case x.Destination.Slot == slotmap.HostSlot:
		x.Reason = event.ForwardHost
	case !toPod:
		x.Reason = event.ForwardOutside
	default:
		to, err := k.Endpoints.At(x.Destination.Slot)
		if err != nil {
			return x, err
		}
		x.Reason = event.ForwardPeer
		if to.Deliver == slotmap.DeliverRedirect {
			x.Reason = event.ForwardRedirect
		}
	}
	return x, nil
}

// point is the port that tables are asked about; other protocols have none.
func point(t conntrack.Tuple) uint16 {
	switch t.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return t.Responder.Port()
	}
	return 0
}

// endpoint says whether the end is a pod.
func (p Peer) endpoint() bool { return p.Slot != slotmap.NoSlot && p.Slot != slotmap.HostSlot }

// peer finds out what the maps know of an address.
func (k *Kernel) peer(a netip.Addr) (Peer, error) {
	p := Peer{Addr: a}
	var err error
	if p.Slot, err = k.Endpoints.SlotOf(a); err != nil {
		return p, fmt.Errorf("slot of %v: %w", a, err)
	}
	world4, world6 := k.opened.worlds()
	p.Identity = world4
	if a.Is6() {
		p.Identity = world6
	}
	info, found, err := k.Addresses.Match(a)
	if err != nil {
		return p, fmt.Errorf("ipcache of %v: %w", a, err)
	}
	if found {
		p.Identity = info.Identity
		if p.Entry, err = k.entryOf(a); err != nil {
			return p, err
		}
	}
	// whoever is local says it of itself
	switch {
	case p.Slot == slotmap.HostSlot:
		p.Identity = identity.Host
	case p.Slot != slotmap.NoSlot:
		e, err := k.Endpoints.At(p.Slot)
		if err != nil {
			return p, err
		}
		p.Identity = e.Identity
	}
	p.Word = k.Tables.Identity(p.Identity)
	return p, nil
}

// entryOf is the prefix of the ipcache that counts for an address: a lookup
// says what an entry holds, and not which it is.
func (k *Kernel) entryOf(a netip.Addr) (netip.Prefix, error) {
	all, err := k.Addresses.List()
	if err != nil {
		return netip.Prefix{}, err
	}
	var longest netip.Prefix
	for _, e := range all {
		if e.Prefix.Contains(a) && (!longest.IsValid() || e.Prefix.Bits() > longest.Bits()) {
			longest = e.Prefix
		}
	}
	return longest, nil
}

// addressReason is what the addresses alone decide, 0 if nothing.
func (k *Kernel) addressReason(x *Explanation, t conntrack.Tuple, fromPod bool) event.Reason {
	if r := destinationReason(x.Destination.Addr); r != 0 {
		return r
	}
	if !fromPod {
		return 0
	}
	dst := x.Destination
	switch {
	case linkLocal(dst.Addr):
		return event.DropLinkLocal
	case dst.Slot == x.Source.Slot:
		return event.DropHairpin
	case dst.Slot == slotmap.NoSlot:
		info, found, err := k.Addresses.Match(dst.Addr)
		if err == nil && found && info.Flags&ipmap.PodRange != 0 {
			return event.DropNoRoute
		}
	}
	if t.Protocol == unix.IPPROTO_UDP && (dst.Slot == slotmap.HostSlot || dst.Identity == identity.Host || dst.Identity == identity.RemoteNode) {
		for _, port := range k.opened.TunnelPorts {
			if t.Responder.Port() == port {
				return event.DropTunnelPort
			}
		}
	}
	return 0
}

// linkLocal: IPv4's gateway, and everything link-local of IPv6.
func linkLocal(a netip.Addr) bool {
	return a == netip.AddrFrom4([4]byte{169, 254, 1, 1}) || a.Is6() && a.IsLinkLocalUnicast()
}

// destinationReason is about addresses that nobody can have.
func destinationReason(a netip.Addr) event.Reason {
	switch {
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return event.QuietBroadcast
	case a.IsMulticast():
		return event.QuietMulticast
	case a.Is4():
		first := a.As4()[0]
		if first >= 240 || first == 127 || first == 0 {
			return event.DropMartian
		}
	case a.IsUnspecified(), a.IsLoopback(), a.Is4In6():
		return event.DropMartian
	}
	return 0
}

// explainSide asks the table of a slot about a peer: what it says, and why the
// packet would be dropped, 0 if it would not.
func (k *Kernel) explainSide(s slotmap.Slot, d event.Direction, peer Peer, point uint32) (*Side, event.Reason, error) {
	own, err := k.Endpoints.At(s)
	if err != nil {
		return nil, 0, err
	}
	pol := own.Policy
	side := &Side{SideVerdict: event.SideVerdict{By: event.ByTable, Table: pol.Egress, Gen: pol.Gen, Action: event.ActionDeny}}
	if d == event.Ingress {
		side.Table = pol.Ingress
	}
	reason := event.Reason(0)
	switch t := side.Table; {
	case t == policytable.Deny:
		reason = event.DropPolicyDenied
	case t == policytable.Allow:
		side.Action = event.ActionAllow
	case t == policytable.Pending && d == event.Ingress && peer.Identity == identity.Host:
		side.Action = event.ActionAllow
	case t == policytable.Pending:
		reason = event.DropPolicyPending
	default:
		v, err := k.Tables.Lookup(t, peer.Identity, peer.Addr, point)
		switch {
		case errors.Is(err, policytable.ErrNoTable):
			return side, event.DropPolicyTable, nil
		case errors.Is(err, policymap.ErrCorrupt):
			return side, event.DropTableCorrupt, nil
		case err != nil:
			return nil, 0, err
		}
		side.Lookup = v
		side.By, side.Rule, side.Action = event.By(v.By), v.Rule, v.Action
		switch {
		case v.Action == event.ActionRedirect:
			return side, event.DropNoProxy, nil
		case v.Action == event.ActionDeny && side.By == event.ByUnknownIdentity:
			reason = event.DropIdentityUnknown
		case v.Action == event.ActionDeny:
			reason = event.DropPolicyDenied
		}
	}
	if reason != 0 && own.Audit {
		side.Audited = true
		reason = 0
	}
	return side, reason, nil
}

// explainConnection looks for the tracked connection.
func (k *Kernel) explainConnection(x *Explanation, t conntrack.Tuple) error {
	switch t.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		t.Responder = netip.AddrPortFrom(t.Responder.Addr(), t.Initiator.Port())
	default:
		t.Initiator = netip.AddrPortFrom(t.Initiator.Addr(), 0)
		t.Responder = netip.AddrPortFrom(t.Responder.Addr(), 0)
	}
	var err error
	if x.Connection, x.Tracked, err = k.Connections.Lookup(t); err != nil || !x.Tracked {
		return err
	}
	c := x.Connection
	x.Current = true
	for _, e := range []struct {
		conntrack.End
		addr netip.Addr
	}{{c.From, c.Initiator.Addr()}, {c.To, c.Responder.Addr()}} {
		if e.Gen != 0 {
			if local, err := k.Endpoints.At(e.Slot); err != nil || local.Policy.Gen != e.Gen {
				x.Current = false
			}
		}
		gen, err := k.Addresses.Epoch(e.addr)
		if err != nil {
			return err
		}
		if gen != e.AddressGen {
			x.Current = false
		}
	}
	return nil
}
