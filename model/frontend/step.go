// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontend

// Step is one change of the frontends, or a barrier. Exactly one field is set.
type Step struct {
	// Upsert is a frontend that is new or has changed. It replaces the frontend of its key.
	Upsert *Frontend
	// Remove is the key of a frontend that was removed.
	Remove *Key
	// Refuse is a frontend that a reader cannot take. Only readers of messages make it.
	Refuse *Refusal
	// Barrier ends the steps that lead to one state.
	Barrier *Barrier
}

// Barrier ends the steps that lead to one state. A subscriber acknowledges its Seq.
type Barrier struct {
	// Incarnation is the run of the load balancer in which Seq counts.
	Incarnation string
	Seq         uint64
	// Revision is the revision of the Services and EndpointSlices.
	Revision uint64
	// SnapshotComplete says that the steps so far name every frontend. Only the first
	// barrier of a stream can set it.
	SnapshotComplete bool
	// State is the name of the state that the load balancer keeps on stable storage.
	State string
	// SourcesComplete says that every source of the load balancer is listed completely in
	// this state.
	SourcesComplete bool
}

// Refusal says that a subscriber does not enforce a frontend as it was sent. A new frontend has no
// backends: connections are refused, unless the error says that packets pass. A new frontend of an
// external address, or of a host port, is absent. An existing frontend loses the backends that the
// change removes and gets none that it adds.
type Refusal struct {
	Key Key
	Err error
}

// Capacity says how many elements the maps of a datapath can hold. The zero Capacity is
// unknown.
type Capacity struct {
	Frontends       int // elements of each map of frontends
	Backends        int // of each family
	Members         int // of all lists together
	BackendsPerList int
}

// A table needs so many units of the limit of backends for each backend that it leads to, and so
// many at most. Up to fewTable backends have none.
const (
	unitsOfTable = 68
	mostOfTable  = 17408
	fewTable     = 16
)

// Units returns how many units of the limit of backends a port of a Service needs for n backends
// and so many lists with a rendezvous table. A unit is two members of lists, one for each list
// that a port has at most. A table has 64 to 128 slots for each backend, at most 32,768, and a
// sixteenth more for its members.
func Units(n, tables int) int {
	if n <= fewTable {
		return n
	}
	return max(n, tables*min(n*unitsOfTable, mostOfTable))
}
