// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/services/policy/internal/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Learn stores the addresses of a name. When it returns, the kernel of every connected enforcing subscriber knows
// them, if any table uses the name.
func (o *Owner) Learn(ctx context.Context, name string, addrs []netip.Addr, ttl time.Duration) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	_, err = o.subscribers.await(ctx, nil, func() (stream.Barrier, error) {
		o.loop.Rename(opLearn)
		if err := o.learn(name, addrs, ttl); err != nil {
			return stream.Barrier{}, err
		}
		if used = o.engine.Wants(name); !used {
			return stream.Barrier{}, nil
		}
		return stream.Barrier{Address: o.publisher.barrier.Address}, nil
	})
	return used, err
}

// ValidateLearn returns the result that Learn would have if there is capacity, and changes nothing.
func (o *Owner) ValidateLearn(ctx context.Context, name string) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	return loop.Ask(ctx, o.loop, opRead, func() (bool, error) {
		return o.engine.Wants(name), nil
	})
}

func (o *Owner) learn(name string, addrs []netip.Addr, ttl time.Duration) error {
	now := o.config.Now()
	fresh, gone, err := o.names.Room(name, addrs, now)
	o.forget(gone)
	if err != nil {
		return fmt.Errorf("%w: %w", failure.ErrLimit, err)
	}
	if len(fresh) > 0 {
		learnt := []engine.Name{{Name: name, Addrs: fresh}}
		if err := o.compiler.apply(engine.Change{Learn: learnt}); err != nil {
			o.problems.Note("learned addresses", o.compiler.apply(engine.Change{Forget: learnt}))
			o.publisher.barrier.Address++
			return err
		}
		o.publisher.barrier.Address++
	}
	wake, changed := o.names.Add(name, addrs, ttl, now)
	o.alarm.set(wake)
	if changed {
		o.storage.save(o.names.Record(name))
	}
	return nil
}

// forget removes addresses from the engine that the table of names has removed.
func (o *Owner) forget(gone []engine.Name) {
	if len(gone) == 0 {
		return
	}
	o.publisher.barrier.Address++
	o.problems.Note("learned addresses", o.compiler.apply(engine.Change{Forget: gone}))
	var rec record.Cache
	for _, n := range gone {
		r := o.names.Record(n.Name)
		rec.Names = append(rec.Names, r.Names...)
		rec.GoneNames = append(rec.GoneNames, r.GoneNames...)
	}
	o.storage.save(rec)
}

// HoldAddresses keeps the expired addresses that connections use; inUse is a part of the result of the previous call.
// It returns the addresses that are expired now.
func (o *Owner) HoldAddresses(ctx context.Context, inUse []netip.Addr) (expiring []netip.Addr, err error) {
	return loop.Ask(ctx, o.loop, opLearn, func() ([]netip.Addr, error) {
		return o.names.Hold(inUse, o.config.Now()), nil
	})
}

// sweepNames removes addresses whose TTL and grace period are over.
func (o *Owner) sweepNames(now time.Time) {
	gone, wake := o.names.Expire(now)
	o.forget(gone)
	o.alarm.set(wake)
}

// Names returns learned names and the rules that select them, sorted. The owner copies the names; the caller's
// goroutine finds the rules.
func (o *Owner) Names(ctx context.Context, f names.Filter) ([]names.Used, error) {
	match, err := f.Match()
	if err != nil {
		return nil, &failure.FieldError{Field: "pattern", Err: err}
	}
	var objects []policy.Object
	list, err := loop.Ask(ctx, o.loop, opRead, func() ([]names.Learned, error) {
		for _, p := range o.policies.all {
			if p.inForce() {
				objects = append(objects, p.object)
			}
		}
		return o.names.List(match, f.Address), nil
	})
	if err != nil {
		return nil, err
	}
	return names.WithUses(ctx, list, objects)
}

// forgetAtOnce is the number of names that are removed in one turn.
const forgetAtOnce = 256

// Forget removes the names that the filter matches, or the filter's address from each, and returns the addresses that
// each had. When it returns, the kernel of every connected enforcing subscriber has removed them. The owner serves
// other calls between its turns.
func (o *Owner) Forget(ctx context.Context, f names.Filter, validateOnly bool) (gone []engine.Name, err error) {
	match, err := f.Match()
	if err != nil {
		return nil, &failure.FieldError{Field: "pattern", Err: err}
	}
	list, err := loop.Ask(ctx, o.loop, opRead, func() ([]names.Learned, error) {
		return o.names.List(match, f.Address), nil
	})
	if err != nil {
		return nil, err
	}
	if validateOnly {
		return names.Would(list, f.Address), nil
	}
	for chunk := range slices.Chunk(list, forgetAtOnce) {
		some, err := loop.Ask(ctx, o.loop, opLearn, func() (some []engine.Name, _ error) {
			for _, l := range chunk {
				some = append(some, o.names.Forget(l.Name, f.Address)...)
			}
			o.forget(some)
			return some, nil
		})
		if err != nil {
			return gone, err
		}
		gone = append(gone, some...)
	}
	// Wait even if nothing was removed: the caller of an earlier Forget may not have waited.
	_, err = o.subscribers.await(ctx, nil, func() (stream.Barrier, error) {
		o.loop.Rename(opLearn)
		return stream.Barrier{Address: o.publisher.barrier.Address}, nil
	})
	return gone, err
}
