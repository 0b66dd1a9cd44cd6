// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package servicemap writes and reads the maps through which packets and sockets
// find the backends of services: it gives frontends, lists and backends their
// numbers, exchanges lists so that a program finds the one of before or of after,
// and adopts what an earlier process has written. It does not know which backends
// a service has, and it does not end sockets that use a removed one.
//
// A list comes into use in this order: the words of its backends, its members at
// unused places, the word of its front, the key of its frontend. It leaves in the
// reverse order, and what it held is used again no earlier than one grace period
// later; a number of a front or a backend not before nothing names it any more. So
// the maps are whole after every single write, and a process that is killed leaves
// only elements that nothing leads to.
package servicemap

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// DefaultRest is for how long a number rests that nobody can say is unused.
const DefaultRest = 10 * time.Minute

// Shrink gives the maps of services the smallest size there is, for a node without
// services. Maps of another size are other maps: those of before stay pinned as the
// maps of an earlier version do, and a node that gets services again meanwhile
// adopts what was in them.
func Shrink(spec *ebpf.CollectionSpec) {
	for _, name := range []string{
		bpf.MapsMapSlFe4, bpf.MapsMapSlFe6, bpf.MapsMapSlFront, bpf.MapsMapSlMember, bpf.MapsMapSlBe4, bpf.MapsMapSlBe6,
		bpf.MapsMapSlNs, bpf.MapsMapSlAff4, bpf.MapsMapSlAff6, bpf.MapsMapSlXl4, bpf.MapsMapSlXl6,
		bpf.MapsMapSlPodAff4, bpf.MapsMapSlPodAff6, bpf.MapsMapSlPodXl4, bpf.MapsMapSlPodXl6,
		bpf.MapsMapSlAnswers4, bpf.MapsMapSlAnswers6,
		bpf.MapsMapSlSrc4, bpf.MapsMapSlSrc6, bpf.MapsMapSlShare,
	} {
		if ms := spec.Maps[name]; ms != nil {
			ms.MaxEntries = 1
		}
	}
}

// Options say how numbers are kept.
type Options struct {
	// Rest is for how long a number of a front or backend is not given out again
	// after it was removed, while no Users say who names it. Zero means
	// DefaultRest.
	Rest time.Duration
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	Log *slog.Logger
}

// Maps are the maps of services. Its methods may be called concurrently; changes
// are applied one after the other.
type Maps struct {
	log  *slog.Logger
	rest time.Duration
	now  func() time.Time

	freed chan struct{} // see Freed

	gate  pin.Gate
	store *store
}

// Open finds the maps of services among all and adopts what is in them. It writes
// nothing.
func Open(pm *pin.Maps, o Options) (*Maps, error) {
	if o.Rest == 0 {
		o.Rest = DefaultRest
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	m := &Maps{
		log: o.Log, rest: o.Rest, now: o.Now, freed: make(chan struct{}, 1),
		gate: pin.Gate{ValidateOnly: pm.ValidateOnly}, store: newStore(openRawMaps(pm)),
	}
	if pm.Adopted {
		if err := m.store.adopt(); err != nil {
			return nil, fmt.Errorf("adopt the services: %w", err)
		}
	}
	return m, nil
}

// Close refuses every later call.
func (m *Maps) Close() { m.gate.Close() }
