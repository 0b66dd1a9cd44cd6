// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package conntrackview describes tracked connections by what other maps know of them: what
// they asked for, what a backend sees, and whether their verdict still stands. It
// lists and flushes them for those who do not know these maps, and owns nothing.
package conntrackview

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// Connection is a tracked connection and what is known about it.
type Connection struct {
	*conntrack.Connection
	// Asked is what the initiator asked for, and Service the service and port that it
	// belongs to; not valid if it asked for the responder itself, or if that is not
	// known.
	Asked   netip.AddrPort
	Service string
	// Source is what the responder sees in place of the initiator; not valid: that.
	Source netip.AddrPort
	// Current says that no epoch under which it was evaluated has moved.
	Current bool
}

// Table is the table of connections, with the maps that describe them.
type Table struct {
	Connections *conntrack.Connections
	Endpoints   *endpointmap.Maps
	Addresses   *ipmap.Maps
	Services    *servicemap.Maps
}

// List describes the connections that pass a filter, whose Asked is not looked at, to
// visit, until that returns an error or ctx ends. What visit gets is reused.
func (t *Table) List(ctx context.Context, f conntrack.Filter, visit func(*Connection) error) error {
	fronts := t.fronts()
	f.Asked = fronts.asked
	return t.Connections.List(ctx, f, func(c *conntrack.Connection) error {
		described := Connection{Connection: c, Asked: fronts.asked(c), Service: fronts.service(c)}
		var err error
		if described.Current, err = t.current(c); err != nil {
			return err
		}
		if port := c.Value.NatPort; port != 0 {
			a, err := t.Endpoints.OwnAt(c.Value.NatAddress)
			if err != nil {
				return err
			}
			described.Source = netip.AddrPortFrom(a, port)
		}
		return visit(&described)
	})
}

// Flush removes the connections that pass a filter, whose Asked is not looked at.
func (t *Table) Flush(ctx context.Context, f conntrack.Filter, validateOnly bool) (conntrack.Flushed, error) {
	f.Asked = t.fronts().asked
	return t.Connections.Flush(ctx, f, validateOnly)
}

// current says whether the verdict on a connection stands, as the programs compare it.
func (t *Table) current(c *conntrack.Connection) (bool, error) {
	for _, end := range []struct {
		conntrack.End
		addr netip.Addr
	}{{c.From, c.Initiator.Addr()}, {c.To, c.Responder.Addr()}} {
		epoch, err := t.Addresses.Epoch(end.addr)
		if err != nil {
			return false, fmt.Errorf("epoch of %v: %w", end.addr, err)
		}
		if epoch != end.AddressEpoch {
			return false, nil
		}
		if end.Epoch == 0 { // not local
			continue
		}
		if end.Slot > endpointmap.MaxEndpoints {
			return false, nil
		}
		e, err := t.Endpoints.At(end.Slot)
		if err != nil {
			return false, err
		}
		if e.Policy.Epoch != end.Epoch {
			return false, nil
		}
	}
	return true, nil
}

// fronts lead from the number of a front to what asks for it. They are read once a
// connection has one.
type fronts struct {
	table *Table
	known map[uint32]servicemap.Frontend // nil: not read yet
}

func (t *Table) fronts() *fronts { return &fronts{table: t} }

func (f *fronts) of(c *conntrack.Connection) (servicemap.Frontend, bool) {
	if c.Value.Front == 0 {
		return servicemap.Frontend{}, false
	}
	if f.known == nil {
		f.known = map[uint32]servicemap.Frontend{}
		list, err := f.table.Services.List()
		if err != nil {
			return servicemap.Frontend{}, false // it is being closed; what follows says so
		}
		for _, fe := range list {
			for _, front := range []*servicemap.Front{fe.Inside, fe.Outside} {
				if front != nil {
					f.known[front.Number] = fe
				}
			}
		}
	}
	fe, ok := f.known[c.Value.Front]
	return fe, ok
}

// asked is what the connection asked for.
func (f *fronts) asked(c *conntrack.Connection) netip.AddrPort {
	fe, ok := f.of(c)
	if !ok || fe.Key.Protocol != frontend.Protocol(c.Protocol) {
		return netip.AddrPort{}
	}
	addr := fe.Key.Addr
	if fe.Key.Node {
		if own, err := f.table.Endpoints.OwnAt(c.Value.AskedAddress); err == nil && own.IsValid() {
			addr = own
		}
	}
	return netip.AddrPortFrom(addr, fe.Key.Port)
}

func (f *fronts) service(c *conntrack.Connection) string {
	fe, _ := f.of(c)
	return fe.Service
}
