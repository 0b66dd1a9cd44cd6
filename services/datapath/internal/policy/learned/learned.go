// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package learned reports to sluice-policy which addresses of DNS names are still used by connections after the TTL of
// the DNS answer has passed. sluice-policy then keeps these addresses.
package learned

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"
)

// MinInterval is the least time between two reports.
const MinInterval = 20 * time.Second

// unsupportedPause is the pause before another call to a policy service that did not know the call:
// it may have been upgraded.
const unsupportedPause = 10 * time.Minute

// ErrUnsupported: this version of the policy service drops addresses when their TTL has passed, whether or not they are
// in use.
var ErrUnsupported = errors.New("this version of sluice-policy does not accept reports of connections to learned addresses")

// Service is the part of sluice-policy that receives the reports.
type Service interface {
	// HoldAddresses reports which of the addresses from the previous call are in use by connections, and returns the
	// addresses to look for next. ErrUnsupported if the service does not have the call.
	HoldAddresses(ctx context.Context, inUse []netip.Addr) (expiring []netip.Addr, err error)
}

// Reporter reports after passes of the connection collector. Wanted and Passed may be called
// concurrently.
type Reporter struct {
	service  Service
	log      *slog.Logger
	interval time.Duration
	wanted   atomic.Pointer[map[netip.Addr]struct{}]
	passes   chan pass
}

type pass struct {
	wanted *map[netip.Addr]struct{} // the addresses that the pass looked for
	inUse  []netip.Addr
}

// New returns a reporter that does nothing before Run.
func New(service Service, log *slog.Logger) *Reporter {
	r := &Reporter{service: service, log: log, interval: MinInterval, passes: make(chan pass, 1)}
	r.wanted.Store(&map[netip.Addr]struct{}{})
	return r
}

// Wanted returns the addresses that a pass of the collector looks for, and a function that takes
// the addresses found by a complete pass. A failed pass does not call the function.
func (r *Reporter) Wanted() (addresses map[netip.Addr]struct{}, passed func(inUse []netip.Addr)) {
	wanted := r.wanted.Load()
	return *wanted, func(inUse []netip.Addr) {
		select {
		case <-r.passes: // An earlier pass that was not reported yet is dropped.
		default:
		}
		select {
		case r.passes <- pass{wanted, inUse}:
		default:
		}
	}
}

// Run reports until ctx ends. It logs the first of consecutive errors, and the next success.
func (r *Reporter) Run(ctx context.Context) error {
	failing := false
	var pause time.Duration
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		var p pass
		for p.wanted != r.wanted.Load() { // A pass that began before the last answer has looked for other addresses.
			select {
			case <-ctx.Done():
				return ctx.Err()
			case p = <-r.passes:
			}
		}
		expiring, err := r.service.HoldAddresses(ctx, p.inUse)
		pause = r.interval
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrUnsupported):
			pause = unsupportedPause
			fallthrough
		case err != nil:
			if !failing {
				r.log.Warn("connections to learned addresses are not reported", "error", err)
			}
			failing = true
			continue
		case failing:
			r.log.Info("connections to learned addresses are reported again")
			failing = false
		}
		next := make(map[netip.Addr]struct{}, len(expiring))
		for _, a := range expiring {
			next[a] = struct{}{}
		}
		r.wanted.Store(&next)
	}
}
