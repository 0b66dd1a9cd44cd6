// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/failure"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// Learn remembers the addresses of a name. When it returns, the kernel of every
// connected subscriber that enforces knows them, if any table wants the name.
func (o *Owner) Learn(ctx context.Context, name string, addrs []netip.Addr, ttl time.Duration) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	_, err = o.await(ctx, nil, func() (stream.Barrier, error) {
		o.operation = opLearn
		if err := o.learn(name, addrs, ttl); err != nil {
			return stream.Barrier{}, err
		}
		if used = o.engine.Wants(name); !used {
			return stream.Barrier{}, nil
		}
		return stream.Barrier{Address: o.barrier.Address}, nil
	})
	return used, err
}

// ValidateLearn says what Learn would answer if there is room, and changes nothing.
func (o *Owner) ValidateLearn(ctx context.Context, name string) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	return ask(ctx, o, func() (bool, error) {
		o.operation = opRead
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
		if err := o.apply(engine.Change{Learn: learnt}); err != nil {
			o.problem("learned addresses", o.apply(engine.Change{Forget: learnt}))
			o.barrier.Address++
			return err
		}
		o.barrier.Address++
	}
	wake, changed := o.names.Add(name, addrs, ttl, now)
	o.wakeAt(wake)
	if changed {
		o.save(o.names.Record(name))
	}
	return nil
}

// forget drops addresses that the table of names has no more.
func (o *Owner) forget(gone []engine.Name) {
	for _, n := range gone {
		o.barrier.Address++
		o.problem("learned addresses", o.apply(engine.Change{Forget: []engine.Name{n}}))
		o.save(o.names.Record(n.Name))
	}
}

// sweepNames drops addresses whose time and grace are over.
func (o *Owner) sweepNames(now time.Time) {
	gone, wake := o.names.Expire(now)
	o.forget(gone)
	o.wakeAt(wake)
}
