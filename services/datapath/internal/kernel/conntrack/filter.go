// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
)

// Local is an endpoint as connections refer to it. Because endpoint IDs are reused, the address of the end must
// match, too.
type Local struct {
	Slot  endpointmap.ID
	Addrs []netip.Addr
}

// Filter selects connections. All non-empty criteria must match. Within one criterion, one of the values must
// match.
type Filter struct {
	// Locals match if one of the endpoints is an end of the connection.
	Locals []Local
	// Prefixes match the address of either end, or the requested address.
	Prefixes []netip.Prefix
	// Ports match the port of either end, or the requested port.
	Ports     []uint16
	Protocols []uint8
	// States are values of Connection.FlagNames.
	States []string
	// Without leaves out a family: IPv4 first, then IPv6.
	Without [2]bool

	// Asked returns the requested address and port of a connection with a front; not valid if unknown. If
	// nil, requested addresses never match.
	Asked func(*Connection) netip.AddrPort
}

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
