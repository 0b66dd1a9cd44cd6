// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// Fill levels in tenths. If the first level is reached, another block is claimed. A block is returned only if the
// remaining blocks then stay below the second level.
const (
	growAt   = 8
	shrinkTo = 5
)

// blocks contains the blocks of one family.
type blocks struct {
	all          []ipam.Figures // serving and draining blocks, in the order of use
	usable, used uint64         // addresses of the serving blocks
	free         uint64
}

func blocksOf(sum *ipam.Summary, f ipam.Family) (b blocks) {
	for _, p := range sum.Pools {
		if ipam.FamilyOf(p.Prefix.Addr()) != f {
			continue
		}
		b.all = append(b.all, p)
		if p.Serves() {
			b.usable += p.Size - p.Reserved
			b.used += p.Leased + p.Confirmed + p.Quarantined
			b.free += p.Free
		}
	}
	return b
}

// full reports whether another block is needed soon.
func (b *blocks) full() bool {
	return b.usable == 0 || b.used >= tenths(b.usable, growAt)
}

// tenths returns k tenths of n, rounded up; k is at most 10.
func tenths(n, k uint64) uint64 { return n/10*k + (n%10*k+9)/10 }

// grow claims a block for a family if one is needed.
func (a *Agent) grow(ctx context.Context, f ipam.Family, wanted bool, answer Answer, away error) {
	b, pause := blocksOf(a.Ranges.Summary(), f), a.pause[f]
	var err error
	switch {
	case !b.full() && (!wanted || b.free > 0):
	case len(b.all) >= a.Settings.MaxBlocks && b.free > 0:
	case time.Now().Before(pause.until):
		return // the result of the last claim remains valid
	case len(b.all) >= a.Settings.MaxBlocks:
		err = fmt.Errorf("%s: %w: %d", a.Settings.name(f), ErrMaxBlocks, len(b.all))
	case away != nil:
		err = fmt.Errorf("%s: %w: %w", a.Settings.name(f), ErrAway, away)
	case !answer.Connected:
		err = fmt.Errorf("%s: %w: etcd does not answer", a.Settings.name(f), ErrAway)
	default:
		if err = a.claim(ctx, f, b); err != nil {
			err = fmt.Errorf("%s: %w", a.Settings.name(f), err)
		}
	}
	if err == nil || errors.Is(err, ErrMaxBlocks) {
		delete(a.pause, f)
	} else {
		a.pause[f] = pause.longer()
	}
	a.mu.Lock()
	a.grown[f] = err
	a.mu.Unlock()
	a.complain(f.String(), err)
}

// backoff delays repeated claims, so that nodes that find the pool full do not claim continuously.
type backoff struct {
	wait  time.Duration
	until time.Time
}

func (b backoff) longer() backoff {
	wait := min(max(2*b.wait, 500*time.Millisecond), 10*time.Second)
	return backoff{wait: wait, until: time.Now().Add(wait)}
}

// claim claims a block, and adds it to the serving ranges.
func (a *Agent) claim(ctx context.Context, f ipam.Family, b blocks) error {
	var known []netip.Prefix
	for _, p := range b.all {
		known = append(known, p.Prefix)
	}
	if err := faultAsked.Hit(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	p, err := a.Registry.Claim(ctx, f, known)
	switch {
	case errors.Is(err, ErrPoolFull):
		return err
	case err != nil:
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	if err := faultClaimed.Hit(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	if err := a.Ranges.SetRanges(ctx, append(a.serving(), p)); err != nil {
		return fmt.Errorf("the block %s: %w", p, err)
	}
	a.Log.Info("allocating addresses from a new block of the cluster's pool", "range", p)
	if err := faultServed.Hit(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	return nil
}

// serving returns the serving ranges in the state file, in the order of use.
func (a *Agent) serving() (ranges []netip.Prefix) {
	for _, p := range a.Ranges.Summary().Pools {
		if !p.Draining {
			ranges = append(ranges, p.Prefix)
		}
	}
	return ranges
}

// letGo removes blocks that the cluster has given to another node meanwhile. This node does not get them back.
func (a *Agent) letGo(ctx context.Context, taken []netip.Prefix) error {
	all := a.serving()
	rest := slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return slices.Contains(taken, p) })
	if len(rest) == len(all) {
		return nil
	}
	a.Log.Error("blocks of this node belong to other nodes; their addresses drain", "ranges", taken)
	return a.Ranges.SetRanges(ctx, rest)
}

// shrink returns one block that is not needed and was already empty at the previous check. It keeps the primary block
// of each family, because the node's overlay address is in it.
func (a *Agent) shrink(ctx context.Context) {
	spares := map[netip.Prefix]bool{}
	for _, f := range a.Settings.Families() {
		b := blocksOf(a.Ranges.Summary(), f)
		serving := slices.DeleteFunc(slices.Clone(b.all), func(p ipam.Figures) bool { return !p.Serves() })
		for _, p := range serving {
			size := p.Size - p.Reserved
			if p.Primary || p.Leased+p.Confirmed+p.Quarantined > 0 || b.used >= tenths(b.usable-size, shrinkTo) {
				continue
			}
			spares[p.Prefix] = true
			if a.spares[p.Prefix] {
				a.giveBack(ctx, p.Prefix)
				delete(spares, p.Prefix)
				break // return one block at a time, because the others may now be needed
			}
		}
	}
	a.spares = spares
	for p := range a.owed {
		if err := a.Registry.Return(ctx, p); err != nil {
			a.complain("return", err)
			continue
		}
		delete(a.owed, p)
		a.Log.Info("returned a block to the cluster's pool", "range", p)
		_ = faultReturned.Hit(ctx) // a test kills the process there
	}
}

// giveBack removes a block from the file and then returns it. If the return fails, the next registration returns the
// block.
func (a *Agent) giveBack(ctx context.Context, p netip.Prefix) {
	retired, err := a.Ranges.Retire(ctx, p)
	if err != nil || !retired {
		a.complain("return", err)
		return
	}
	a.owed[p] = true
	_ = faultRetired.Hit(ctx) // a test kills the process there
}
