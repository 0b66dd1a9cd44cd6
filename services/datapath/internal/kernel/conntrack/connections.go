// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package conntrack reads and tidies the maps of connections. The programs write
// them; this package lists what is tracked, removes what is over, gives every
// endpoint its budget of new connections, and drains the maps that a version
// before has left.
package conntrack

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Connections are the tracked connections of an instance, those that a policy
// has terminated, and those of the version before. Its methods may be called
// concurrently.
type Connections struct {
	log       *slog.Logger
	pins      *pin.Maps
	endpoints *endpointmap.Maps
	worlds    [2]identity.Numeric // of addresses that the ipcache does not know

	gate     pin.Gate
	overlap  overlap
	removers [2]remover         // of the maps of IPv4 and IPv6
	states   map[string]stateAt // of the maps of connections, by name
	batches  [2]sync.Pool       // of *batch, for the maps of IPv4 and IPv6
	expired  sync.Mutex         // held while their count changes
	flushing chan struct{}      // has a token while Flush runs
	ended    ended              // by services, since the last TakeEnded
}

// Options say what is needed to understand a connection.
type Options struct {
	// Endpoints that connections belong to.
	Endpoints *endpointmap.Maps
	// Worlds are the identities of addresses outside, IPv4 and IPv6.
	Worlds [2]identity.Numeric
	Log    *slog.Logger
}

// Open finds the maps of connections among all. It writes nothing.
func Open(pm *pin.Maps, o Options) (*Connections, error) {
	ct := &Connections{
		log: o.Log, pins: pm, endpoints: o.Endpoints, worlds: o.Worlds, gate: pin.Gate{ValidateOnly: pm.ValidateOnly},
		flushing: make(chan struct{}, 1),
	}
	return ct, ct.findStates()
}

// Initialise makes adopted maps ready before a program uses them.
func (ct *Connections) Initialise() error {
	if err := ct.dropStale(); err != nil {
		return fmt.Errorf("compare connections with those of the version before: %w", err)
	}
	if lostConnections(ct.pins) {
		ct.log.Warn("connections were lost: what a policy may have terminated is not picked up for the life of a connection")
		ct.endpoints.StopPickUp()
	}
	return nil
}

// FiltersReplaced says that every filter holds a program of this build: from
// now on the maps of the version before drain.
func (ct *Connections) FiltersReplaced() { ct.overlap.replaced.Store(true) }

// Close refuses every later call.
func (ct *Connections) Close() error {
	ct.gate.Close()
	return errors.Join(ct.removers[0].close(), ct.removers[1].close())
}
