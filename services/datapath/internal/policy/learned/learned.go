// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package learned reports to sluice-policy which addresses of DNS names connections use
// although the time of the DNS answer is over, so that sluice-policy does not forget them.
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

// unsupportedPause is the time after which a policy service that does not know the call is
// asked again: it may have been upgraded.
const unsupportedPause = 10 * time.Minute

// ErrUnsupported says that the policy service is of a version that forgets addresses by
// their time alone.
var ErrUnsupported = errors.New("sluice-policy does not ask for connections to learned addresses")

// Service is the part of sluice-policy that the reports go to.
type Service interface {
	// HoldAddresses reports the addresses that connections use, of those that the call
	// before returned, and returns the addresses to look for next. It returns
	// ErrUnsupported if the service does not have the call.
	HoldAddresses(ctx context.Context, inUse []netip.Addr) (expiring []netip.Addr, err error)
}

// Reporter reports after passes of the connection collector. Wanted and Passed may be
// called from any goroutine.
type Reporter struct {
	service  Service
	log      *slog.Logger
	interval time.Duration
	wanted   atomic.Pointer[map[netip.Addr]struct{}]
	passes   chan pass
}

type pass struct {
	wanted *map[netip.Addr]struct{} // that it looked for
	inUse  []netip.Addr
}

// New returns a reporter that does nothing before Run.
func New(service Service, log *slog.Logger) *Reporter {
	r := &Reporter{service: service, log: log, interval: MinInterval, passes: make(chan pass, 1)}
	r.wanted.Store(&map[netip.Addr]struct{}{})
	return r
}

// Wanted returns the addresses that a pass of the collector looks for, and a function that
// takes what the whole pass found. A pass that fails does not call it.
func (r *Reporter) Wanted() (addresses map[netip.Addr]struct{}, passed func(inUse []netip.Addr)) {
	wanted := r.wanted.Load()
	return *wanted, func(inUse []netip.Addr) {
		select {
		case <-r.passes: // an earlier pass that was not reported
		default:
		}
		select {
		case r.passes <- pass{wanted, inUse}:
		default:
		}
	}
}

// Run reports until ctx ends. Errors are logged when they begin and when they end.
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
		for p.wanted != r.wanted.Load() { // one that began before the last answer says nothing of it
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
