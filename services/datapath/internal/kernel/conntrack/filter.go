// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
)

// Local is an endpoint as connections name it. A slot is used again, so that its
// addresses have to be those of the end, too.
type Local struct {
	Slot  endpointmap.ID
	Addrs []netip.Addr
}

// Filter says which connections are meant. Criteria of different kinds must all hold;
// of one kind, one must hold; a kind left empty always holds.
type Filter struct {
	// Locals are endpoints, of which one is an end.
	Locals []Local
	// Prefixes have an address of either end, or the one that was asked for.
	Prefixes []netip.Prefix
	// Ports of either end, or the one that was asked for.
	Ports     []uint16
	Protocols []uint8
	// States are of Connection.Words.
	States []string
	// Without leaves out the connections of a family, that of IPv4 first.
	Without [2]bool

	// Asked is what the packets of a connection with a front asked for, not valid if
	// that is not known; nil: it never is.
	Asked func(*Connection) netip.AddrPort
}

// matches says whether the connection is meant.
func (f *Filter) matches(c *Connection) bool {
	if c.Asked || f.Without[c.family()] || len(f.Protocols) > 0 && !slices.Contains(f.Protocols, c.Protocol) {
		return false
	}
	if len(f.States) > 0 && !slices.ContainsFunc(c.FlagNames(), func(w string) bool {
		return slices.Contains(f.States, w)
	}) {
		return false
	}
	if len(f.Locals) > 0 && !slices.ContainsFunc(f.Locals, func(l Local) bool {
		return l.Slot == c.From.Slot && slices.Contains(l.Addrs, c.Initiator.Addr()) ||
			l.Slot == c.To.Slot && slices.Contains(l.Addrs, c.Responder.Addr())
	}) {
		return false
	}
	if len(f.Prefixes) == 0 && len(f.Ports) == 0 {
		return true
	}
	var asked netip.AddrPort
	if c.Value.Front != 0 && f.Asked != nil {
		asked = f.Asked(c)
	}
	return f.hasAddress(c, asked) && f.hasPort(c, asked)
}

func (f *Filter) hasAddress(c *Connection, asked netip.AddrPort) bool {
	return len(f.Prefixes) == 0 || slices.ContainsFunc(f.Prefixes, func(p netip.Prefix) bool {
		return p.Contains(c.Initiator.Addr()) || p.Contains(c.Responder.Addr()) || p.Contains(asked.Addr())
	})
}

func (f *Filter) hasPort(c *Connection, asked netip.AddrPort) bool {
	return len(f.Ports) == 0 || slices.Contains(f.Ports, c.Initiator.Port()) ||
		slices.Contains(f.Ports, c.Responder.Port()) || asked.IsValid() && slices.Contains(f.Ports, asked.Port())
}
