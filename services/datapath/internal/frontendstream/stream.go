// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontendstream follows sluice-loadbalancer: it applies the frontends
// that come to the kernel, one transaction for each state, and acknowledges what
// every packet finds and what no socket uses any more. It does not know how
// frontends lie in the kernel, nor how sockets are ended.
package frontendstream

import (
	"context"

	"github.com/sluice-net/sluice/services/datapath/internal/frontend"
)

// Subscription is how a stream begins.
type Subscription struct {
	Name        string
	Incarnation string // of the last barrier that was carried out; empty: none
	Seq         uint64
	Capacity    Capacity // zero: it is not known
}

// Capacity is what the kernel can hold, as the service wants to know it.
type Capacity struct {
	Frontends       int // elements of each of the maps of frontends
	Backends        int // of each family
	Members         int // of all lists together
	BackendsPerList int
}

// Step is one change: one of its fields is set.
type Step struct {
	Upsert *frontend.Frontend
	Remove *frontend.Key
	// Refuse is a frontend that cannot be, with the reason.
	Refuse  *frontend.Refusal
	Barrier *Barrier
}

// Barrier ends the steps that lead to one state.
type Barrier struct {
	Incarnation string // of the service
	Seq         uint64
	Revision    uint64
	// SnapshotComplete says that the stream began with every frontend, and that
	// these are all.
	SnapshotComplete bool
	// State names what the service keeps on stable storage.
	State string
	// SourcesComplete says that every source of the service was listed completely
	// in this state.
	SourcesComplete bool
}

// Stream is one subscription to the service. Recv is called by one goroutine, the
// rest by another.
type Stream interface {
	Recv() ([]Step, error)
	// Ack says up to which barrier every packet finds the frontends, and up to
	// which no socket uses a backend that was removed.
	Ack(enforced, ended uint64) error
	Refuse(k frontend.Key, reason string) error
}

// Service is where the frontends come from. The stream ends with ctx.
type Service interface {
	Subscribe(ctx context.Context, s Subscription) (Stream, error)
}

// Kernel is where they go.
type Kernel interface {
	// Apply returns when every packet and every socket that asks from then on
	// finds the frontends as they should be, those refused excepted.
	Apply(ctx context.Context, tx *frontend.Transaction) (frontend.Result, error)
	// Barrier returns when every program run has ended that began before.
	Barrier(ctx context.Context) error
	// Keys are those of all frontends, also of earlier processes.
	Keys() ([]frontend.Key, error)
}

// Ender ends sockets.
type Ender interface {
	// End ends what still sends to a backend that the frontend by which it was
	// chosen does not lead to any more. No program run is under way that has found
	// such a backend.
	End(ctx context.Context) error
}

// Memory keeps the name of the state whose frontends the kernel has, over restarts
// and boots.
type Memory interface {
	// Load returns "" if nothing was saved.
	Load() (state string, err error)
	// Save returns when the name is on stable storage.
	Save(state string) error
}
