// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package socketend ends the sockets that send to a removed backend. A connected
// UDP socket asks no map again: a resolver would wait for its timeout, again and
// again, at an address that nothing has, or already another pod. A backend that
// drains is not removed, and its sockets stay.
//
// A socket that is ended is disconnected, not closed: the call that waits in it
// returns ECONNABORTED, later ones EDESTADDRREQ.
//
// A connection of TCP is left to its ends: a backend that terminates finishes it,
// and TCP finds out that one does not answer.
//
// It also says which numbers of fronts and backends the sockets name, so that none is
// given to another one meanwhile.
package socketend

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketlist"
)

// Options say which sockets are ended.
type Options struct {
	Sockets *socketlist.List
	// Each calls fn with every network namespace of the node whose sockets are
	// translated. One that has gone meanwhile is left out. It returns the errors of
	// fn, joined, and goes on behind them.
	Each func(ctx context.Context, fn func(*netns.Namespace) error) error
	// Keeps says whether a front still leads to a backend of a generation, or drains it.
	Keeps func(front uint32, ipv6 bool, backend uint32, generation uint8) bool
}

// Ender ends sockets. Its methods may be called concurrently.
type Ender struct {
	o     Options
	ended atomic.Uint64
}

// New returns an Ender.
func New(o Options) *Ender { return &Ender{o: o} }

// Ended is how many sockets it has ended.
func (e *Ender) Ended() uint64 { return e.ended.Load() }

// End ends the connected sockets that a frontend has led to a backend which was removed
// from it before the call, and is not drained by it. When it returns without an error none is left, provided that no call to
// connect has been under way since before the removal. It may be called again.
func (e *Ender) End(ctx context.Context) error {
	return e.o.Each(ctx, func(ns *netns.Namespace) error {
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
		n, err := destroy(ns, sockets)
		e.ended.Add(uint64(n))
		return err
	})
}

// Named returns the numbers by which End would decide about a socket. Of sockets that is
// all who goes by a number after its removal:
//
//   - Connected UDP sockets, which are listed here. One that was ended sends nothing,
//     whatever number its storage has.
//   - What other sockets remember is read by address alone. They may name any number.
//   - What a client keeps by affinity is a member of the list at hand of the same
//     generation, or it is nothing.
//
// Sockets of namespaces that are neither the node's nor an endpoint's are not ended, and
// keep no number.
func (e *Ender) Named(ctx context.Context) (servicemap.Numbers, error) {
	n := servicemap.NoNumbers()
	err := e.o.Each(ctx, func(ns *netns.Namespace) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		sockets, err := e.o.Sockets.In(ns)
		for _, s := range sockets {
			if s.Remote.Port() != 0 {
				n.Name(s.Front, s.IPv6, s.Backend)
			}
		}
		return err
	})
	return n, err
}
