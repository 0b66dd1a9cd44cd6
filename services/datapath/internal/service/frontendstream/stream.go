// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontendstream follows sluice-loadbalancer: it applies the received frontends to the kernel, one transaction
// per state, and acknowledges when all packets use the new state and when no socket uses removed backends. It does not
// know the layout of the kernel's maps, nor how sockets are ended.
package frontendstream

import (
	"context"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// Subscription is the start of a stream.
type Subscription struct {
	Name        string
	Incarnation string // of the last barrier that was applied; empty: none
	Seq         uint64
	Capacity    frontend.Capacity // zero: unknown
}

// Stream is one subscription to the service. One goroutine calls Recv, another one the other methods.
type Stream interface {
	Recv() ([]frontend.Step, error)
	// Ack reports the barrier up to which every packet uses the frontends, and the barrier up to which no socket uses a
	// removed backend.
	Ack(enforced, ended uint64) error
	Refuse(k frontend.Key, reason string) error
}

// Service is the source of frontends. The stream ends with ctx.
type Service interface {
	Subscribe(ctx context.Context, s Subscription) (Stream, error)
}

// Kernel applies frontends.
type Kernel interface {
	// Apply returns when every later packet and socket call sees the frontends of the transaction, except for refused
	// ones.
	Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error)
	// Barrier returns when every program run that began before has ended.
	Barrier(ctx context.Context) error
	// Keys returns the keys of all frontends, including frontends of previous processes.
	Keys() ([]frontend.Key, error)
}

// Ender ends sockets.
type Ender interface {
	// End ends sockets that send to a backend which was removed from the frontend that selected it. It is called when no
	// program run that may have found such a backend is still active.
	End(ctx context.Context) error
}

// Memory keeps the name of the state whose frontends the kernel has, across restarts and reboots.
type Memory interface {
	// Load returns "" if nothing was saved.
	Load() (state string, err error)
	// Save returns when the name is on stable storage.
	Save(state string) error
}
