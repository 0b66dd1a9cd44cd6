// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package socketend ends sockets that send to a removed backend. A connected UDP socket never looks up the service
// again: a resolver would repeatedly wait for its timeout, at an address that is unassigned or belongs to another pod.
// A draining backend is not removed, and its sockets are kept.
//
// Ending a socket disconnects it, but does not close it: a call that is waiting returns ECONNABORTED, later ones
// EDESTADDRREQ.
//
// TCP connections are left alone: a backend that terminates closes them, and TCP detects a backend that does not
// answer.
//
// The package also lists which IDs of fronts and backends sockets reference, so that these IDs are not reused.
package socketend

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketlist"
)

// Options are the dependencies of an Ender.
type Options struct {
	Sockets *socketlist.List
	// Each calls fn with every network namespace of the node whose sockets are translated. It skips deleted namespaces,
	// continues after errors of fn, and returns them joined.
	Each func(ctx context.Context, fn func(*netns.Namespace) error) error
	// Keeps reports whether a backend, by ID and generation, is still active or draining in a front.
	Keeps func(front uint32, ipv6 bool, backend uint32, generation uint8) bool
}

// Ender ends sockets. Its methods may be called concurrently.
type Ender struct {
	o     Options
	ended atomic.Uint64

	mu sync.Mutex
	// missed are the sockets that the last complete call of End did not find; guarded by mu
	missed map[socketlist.ID]struct{}
}

// mostMissed limits the IDs that sockets of a namespace keep in use although End has not found them. The kernel finds a
// socket by its addresses, so a socket with a twin cannot be ended. Without the limit, a pod with such sockets could
// keep the IDs of all removed backends, also of Services of other tenants, for which these IDs count.
const mostMissed = 64

// New returns an Ender.
func New(o Options) *Ender { return &Ender{o: o} }

// Ended returns how many sockets were ended.
func (e *Ender) Ended() uint64 { return e.ended.Load() }

// End ends the connected sockets whose backend was removed from their frontend before the call and is not draining. If
// it returns no error, none is left, provided that every call of connect that began before the removal has returned. It
// may be called again.
func (e *Ender) End(ctx context.Context) error {
	missed := make(map[socketlist.ID]struct{})
	err := e.o.Each(ctx, func(ns *netns.Namespace) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		sockets, err := e.o.Sockets.In(ns)
		if err != nil {
			return err
		}
		sockets = slices.DeleteFunc(sockets, func(s socketlist.Socket) bool {
			return s.Remote.Port() == 0 || e.o.Keeps(s.Front, s.IPv6, s.Backend, s.Generation)
		})
		if len(sockets) == 0 {
			return nil
		}
		n, left, err := destroy(ns, sockets)
		e.ended.Add(uint64(n))
		for _, s := range left {
			missed[s.ID] = struct{}{}
		}
		return err
	})
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.missed = missed
	return nil
}

// isMissed reports whether a socket sends to a removed backend, and End has not found it.
func (e *Ender) isMissed(s socketlist.Socket) bool {
	e.mu.Lock()
	_, missed := e.missed[s.ID]
	e.mu.Unlock()
	return missed && !e.o.Keeps(s.Front, s.IPv6, s.Backend, s.Generation)
}

// Named returns the IDs that End evaluates. Of all sockets, only connected UDP sockets rely on an ID after its removal:
//
//   - Connected UDP sockets are listed here. An ended socket sends nothing, whatever ID its storage has.
//   - The storage of other sockets is only read by address. They may reference any ID.
//   - Affinity selects a member of the current list with the same generation, or nothing.
//
// Of the sockets that End has not found, at most mostMissed of a namespace count. If another backend gets the ID of a
// socket that does not count, the only effect is that End keeps the socket.
//
// Sockets in namespaces of neither the node nor an endpoint are not ended, and keep no ID in use.
func (e *Ender) Named(ctx context.Context) (servicemap.Numbers, error) {
	n := servicemap.NoNumbers()
	err := e.o.Each(ctx, func(ns *netns.Namespace) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		sockets, err := e.o.Sockets.In(ns)
		missed := 0
		for _, s := range sockets {
			if s.Remote.Port() == 0 {
				continue
			}
			if e.isMissed(s) {
				if missed++; missed > mostMissed {
					continue
				}
			}
			n.Name(s.Front, s.IPv6, s.Backend)
		}
		return err
	})
	return n, err
}
