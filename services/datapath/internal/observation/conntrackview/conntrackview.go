// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package conntrackview describes tracked connections with the information of other maps: the Service that they were
// opened to, the address that a backend sees, and whether their verdict is still valid. It lists and flushes
// connections for callers that do not know these maps. It owns no maps.
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

// Connection is a tracked connection with related information.
type Connection struct {
	*conntrack.Connection
	// Asked is the original destination of the initiator, and Service the service and port that it belongs to; not valid
	// if the initiator connected to the responder itself, or if it is unknown.
	Asked   netip.AddrPort
	Service string
	// Source is the address that the responder sees instead of the initiator; not valid: the responder sees the initiator.
	Source netip.AddrPort
	// Current is true if the verdict is valid: no epoch was bumped since the evaluation.
	Current bool
}

// Table is the table of connections, with related maps.
type Table struct {
	Connections *conntrack.Connections
	Endpoints   *endpointmap.Maps
	Addresses   *ipmap.Maps
	Services    *servicemap.Maps
}

// List calls visit with the connections that match a filter, until visit returns an error or ctx ends. It sets f.Asked
// itself. The argument of visit is reused.
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

// Flush removes the connections that match a filter. It sets f.Asked itself.
func (t *Table) Flush(ctx context.Context, f conntrack.Filter, validateOnly bool) (conntrack.Flushed, error) {
	f.Asked = t.fronts().asked
	return t.Connections.Flush(ctx, f, validateOnly)
}

// current reports whether the verdict on a connection is valid, by the same comparison as the programs.
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

// fronts maps IDs of fronts to frontends. It is loaded when a connection with a front is found.
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
			return servicemap.Frontend{}, false // the maps are being closed, and a later call returns the error
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

// asked returns the original destination of the connection.
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
