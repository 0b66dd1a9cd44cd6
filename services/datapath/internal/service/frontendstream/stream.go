// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontendstream follows sluice-loadbalancer: it applies the frontends
// that come to the kernel, one transaction for each state, and acknowledges what
// every packet finds and what no socket uses any more. It does not know how
// frontends lie in the kernel, nor how sockets are ended.
package frontendstream

import (
	"context"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// Subscription is how a stream begins.
type Subscription struct {
	Name        string
	Incarnation string // of the last barrier that was carried out; empty: none
	Seq         uint64
	Capacity    frontend.Capacity // zero: it is not known
}

// Stream is one subscription to the service. Recv is called by one goroutine, the
// rest by another.
type Stream interface {
	Recv() ([]frontend.Step, error)
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
	Apply(ctx context.Context, tx *frontendtx.Transaction) (frontendtx.Result, error)
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
