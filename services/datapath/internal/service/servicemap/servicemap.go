// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package servicemap reads and writes the maps through which packets and sockets find the backends of services. It
// assigns IDs to frontends, lists and backends, exchanges lists so that a program sees either the old or the new one,
// and adopts the state of a previous process. It does not select the backends of a service, and does not end sockets
// that use a removed backend.
//
// A list is written in this order: the packed entries of its backends, its members in unused elements, the packed entry
// of its front, the key of its frontend. It is removed in reverse order. Its elements are reused after a grace period
// at the earliest, and IDs of fronts and backends only when nothing references them. Therefore the maps are consistent
// after every single write, and a killed process only leaves elements that nothing refers to.
package servicemap

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// DefaultRest is the quarantine of an ID if no Users can tell whether it is referenced.
const DefaultRest = 10 * time.Minute

// Shrink gives the maps of services the minimum size, for a node without services. A map of another size is a different
// map: the previous ones stay pinned, like the maps of an earlier version, and a node on which services are enabled
// again adopts them.
func Shrink(spec *ebpf.CollectionSpec) {
	for _, name := range []string{
		bpf.MapsMapSlFe4, bpf.MapsMapSlFe6, bpf.MapsMapSlFront, bpf.MapsMapSlMember, bpf.MapsMapSlBe4, bpf.MapsMapSlBe6,
		bpf.MapsMapSlNs, bpf.MapsMapSlAff4, bpf.MapsMapSlAff6, bpf.MapsMapSlXl4, bpf.MapsMapSlXl6,
		bpf.MapsMapSlPodAff4, bpf.MapsMapSlPodAff6, bpf.MapsMapSlPodXl4, bpf.MapsMapSlPodXl6,
		bpf.MapsMapSlAnswers4, bpf.MapsMapSlAnswers6, bpf.MapsMapSlPodAnswers4, bpf.MapsMapSlPodAnswers6,
		bpf.MapsMapSlSrc4, bpf.MapsMapSlSrc6, bpf.MapsMapSlShare,
	} {
		if ms := spec.Maps[name]; ms != nil {
			ms.MaxEntries = 1
		}
	}
}

// Options are the options of Maps.
type Options struct {
	// Rest is the quarantine of the ID of a removed front or backend, if there are no Users. Zero means DefaultRest.
	Rest time.Duration
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	Log *slog.Logger
}

// Maps are the maps of services. Their methods may be called concurrently; changes are serialised.
type Maps struct {
	log  *slog.Logger
	rest time.Duration
	now  func() time.Time

	freed chan struct{} // see Freed

	gate  pin.Gate
	store *store
}

// Open finds the maps of services and adopts their content. It writes nothing.
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

// Close makes every later call fail.
func (m *Maps) Close() { m.gate.Close() }
