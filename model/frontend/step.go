// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontend

// Step is one change of the frontends, or a barrier. Exactly one field is set.
type Step struct {
	// Upsert adds a frontend, or replaces the frontend with the same key.
	Upsert *Frontend
	// Remove is the key of a removed frontend.
	Remove *Key
	// Refuse reports a frontend that the reader cannot accept. Only readers of messages create it.
	Refuse *Refusal
	// Barrier ends the steps of one state.
	Barrier *Barrier
}

// Barrier ends the steps of one state. A subscriber acknowledges its Seq.
type Barrier struct {
	// Incarnation is the run of the load balancer in which Seq counts.
	Incarnation string
	Seq         uint64
	// Revision is the revision of the Services and EndpointSlices.
	Revision uint64
	// SnapshotComplete reports that the steps so far contain every frontend. Only the first barrier of a stream can
	// set it.
	SnapshotComplete bool
	// State is the name of the state that the load balancer keeps on stable storage.
	State string
	// SourcesComplete reports that this state contains the complete list of every source of the load balancer.
	SourcesComplete bool
}

// Refusal reports that a subscriber does not enforce a frontend as it was sent. A new frontend then has no backends:
// connections are refused, unless the error says that packets pass. A new frontend of an external address or of a
// host port is absent. An existing frontend loses the backends that the change removes, and gets no new backends.
type Refusal struct {
	Key Key
	Err error
}

// Capacity holds the sizes of a datapath's maps. The zero Capacity means unknown.
type Capacity struct {
	Frontends       int // entries in each map of frontends
	Backends        int // per family
	Members         int // in all lists together
	BackendsPerList int
}

// A rendezvous table uses unitsOfTable units of the limit of backends for each of its backends, and at most
// mostOfTable units. A list of at most fewTable backends has no table.
const (
	unitsOfTable = 68
	mostOfTable  = 17408
	fewTable     = 16
)

// Units returns how many units of the limit of backends a port of a Service uses. n is the number of its backends,
// and tables is the number of its lists with a rendezvous table. A unit is two list members, because a port has at
// most two lists. A table has 64 to 128 slots for each backend, at most 32,768, plus a sixteenth for its members.
func Units(n, tables int) int {
	if n <= fewTable {
		return n
	}
	return max(n, tables*min(n*unitsOfTable, mostOfTable))
}
