// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package conntrack reads and cleans up the connection tracking maps, which the programs write. It lists
// connections, removes ended ones, gives each endpoint its budget of new connections, and drains the maps of
// the previous version.
package conntrack

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Connections are the tracked connections of an instance: the current ones, terminated ones, and
// entries of the previous version. Its methods may be called concurrently.
type Connections struct {
	log       *slog.Logger
	pins      *pin.Maps
	endpoints *endpointmap.Maps
	bounds    *bound.Bounds
	worlds    [2]identity.Numeric // identities of addresses outside the ipcache

	gate        pin.Gate
	overlap     overlap
	removers    [2]remover              // of IPv4 and IPv6
	states      map[string]stateAt      // by name of the map
	batches     [2]sync.Pool            // of *batch, for IPv4 and IPv6
	expired     sync.Mutex              // held while the counter of expired connections changes
	flushing    chan struct{}           // has a token while Flush runs
	keepAnswers func(*Connection) error // see Options
	ended       ended                   // connections to services that have ended since the last TakeEnded
}

// Options configure how Connections interprets an entry.
type Options struct {
	// Endpoints are the endpoints that connections belong to.
	Endpoints *endpointmap.Maps
	// Bounds divides the records of terminated connections among the endpoints.
	Bounds *bound.Bounds
	// Worlds are the identities of addresses outside the ipcache, for IPv4 and IPv6.
	Worlds [2]identity.Numeric
	// KeepAnswers stores what later answers of a connection to a service need, before its entry is flushed; nil: nothing.
	KeepAnswers func(c *Connection) error
	Log         *slog.Logger
}

// Open returns the connections in the given maps. It writes nothing.
func Open(pm *pin.Maps, o Options) (*Connections, error) {
	ct := &Connections{
		log: o.Log, pins: pm, endpoints: o.Endpoints, bounds: o.Bounds, worlds: o.Worlds,
		gate:     pin.Gate{ValidateOnly: pm.ValidateOnly},
		flushing: make(chan struct{}, 1), keepAnswers: o.KeepAnswers,
	}
	return ct, ct.findStates()
}

// Initialise prepares adopted maps before a program uses them.
func (ct *Connections) Initialise() error {
	if err := ct.dropStale(); err != nil {
		return fmt.Errorf("compare connections with the previous version's: %w", err)
	}
	if lostConnections(ct.pins) {
		ct.log.Warn("connection maps were recreated: connections are not picked up for the lifetime of an " +
			"established connection, because a policy may have terminated them")
		ct.endpoints.StopPickUp()
	}
	return nil
}

// FiltersReplaced notifies Connections that every filter has a program of this build: from now on the maps of the
// previous version are drained.
func (ct *Connections) FiltersReplaced() { ct.overlap.replaced.Store(true) }

// Close makes every later call fail.
func (ct *Connections) Close() error {
	ct.gate.Close()
	return errors.Join(ct.removers[0].close(), ct.removers[1].close())
}
