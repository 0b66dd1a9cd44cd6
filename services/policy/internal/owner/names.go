// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// ErrNotSelected means that no rule of the pod that asked for a name selects it.
var ErrNotSelected = errors.New("no egress rule of the pod that asked selects the name")

// Names holds the learned addresses of DNS names, and passes them to the engine. The exported methods may be called
// concurrently; all other methods and fields belong to the loop.
type Names struct {
	loop        *loop.Loop
	now         func() time.Time
	alarm       *alarm
	table       *names.Table
	compiler    *compiler
	publisher   *publisher
	storage     *storage
	policies    *policySet
	subscribers *Subscribers
	problems    *problem.Set
}

// newNames returns the names of an owner whose other fields are set.
func newNames(o *Owner, table *names.Table) *Names {
	return &Names{
		loop: o.loop, now: o.config.Now, alarm: o.alarm, table: table, compiler: o.compiler, publisher: o.publisher,
		storage: o.storage, policies: o.policies, subscribers: o.subscribers, problems: o.problems,
	}
}

// Learn stores the addresses of a name. The asker pays for them, and only pods of its namespace may use them. If a
// table uses the name, Learn waits until every connected enforcing subscriber has the addresses in the kernel. If no
// rule of the asker selects the name, Learn stores nothing and returns ErrNotSelected.
func (n *Names) Learn(
	ctx context.Context, by names.Asker, name string, addrs []netip.Addr, ttl time.Duration,
) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	_, err = n.subscribers.await(ctx, nil, func() (stream.Barrier, error) {
		n.loop.Rename(opLearn)
		if by.Identity != 0 && !n.compiler.engine.SelectsName(by.Identity, name) {
			return stream.Barrier{}, ErrNotSelected
		}
		if err := n.learn(by, by.Key(name), addrs, ttl); err != nil {
			return stream.Barrier{}, err
		}
		if used = n.compiler.engine.Wants(name); !used {
			return stream.Barrier{}, nil
		}
		return stream.Barrier{Address: n.publisher.barrier.Address}, nil
	})
	return used, err
}

// ValidateLearn changes nothing, and returns the result that Learn would return if the table had enough capacity.
func (n *Names) ValidateLearn(ctx context.Context, name string) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	return loop.Ask(ctx, n.loop, opRead, func() (bool, error) {
		return n.compiler.engine.Wants(name), nil
	})
}

// freedAtOnce is the maximum number of expired addresses that are removed when a table is full. It is large, so that not
// each answer has to sort the addresses.
const freedAtOnce = 1024

func (n *Names) learn(by names.Asker, key dnsname.Learned, addrs []netip.Addr, ttl time.Duration) error {
	now, name := n.now(), string(key)
	fresh, gone, err := n.table.FreeCapacity(by, name, addrs, now)
	n.forget(gone)
	if err != nil {
		return fmt.Errorf("%w: %w", failure.ErrLimit, err)
	}
	if len(fresh) > 0 {
		err := n.learnFresh(key, fresh)
		if errors.As(err, new(*table.ErrTooLarge)) {
			if gone := n.table.FreeTables(by, addrs, freedAtOnce, now); len(gone) > 0 {
				n.forget(gone)
				err = n.learnFresh(key, fresh)
			}
		}
		n.publisher.barrier.Address++
		if err != nil {
			return err
		}
	}
	wake, changed := n.table.Add(by, name, addrs, ttl, now)
	n.alarm.set(wake)
	if changed {
		n.storage.save(n.table.Record(name))
	}
	return nil
}

// learnFresh adds addresses of a name to the engine, or none of them if there is an error.
func (n *Names) learnFresh(key dnsname.Learned, fresh []netip.Addr) error {
	learned := []engine.Name{{Name: key, Addrs: fresh}}
	err := n.compiler.apply(engine.Change{Learn: learned})
	if err != nil {
		n.problems.Note("learned addresses", n.compiler.apply(engine.Change{Forget: learned}))
	}
	return err
}

// forget removes addresses from the engine after the table of names has removed them.
func (n *Names) forget(gone []engine.Name) {
	if len(gone) == 0 {
		return
	}
	n.publisher.barrier.Address++
	n.problems.Note("learned addresses", n.compiler.apply(engine.Change{Forget: gone}))
	var rec record.Cache
	for _, one := range gone {
		r := n.table.Record(string(one.Name))
		rec.Names = append(rec.Names, r.Names...)
		rec.GoneNames = append(rec.GoneNames, r.GoneNames...)
	}
	n.storage.save(rec)
}

// HoldAddresses keeps the expired addresses in inUse, because connections use them. It returns all expired addresses.
// The caller then looks for connections to them, and passes the addresses that have connections to the next call.
func (n *Names) HoldAddresses(ctx context.Context, inUse []netip.Addr) (expiring []netip.Addr, err error) {
	return loop.Ask(ctx, n.loop, opLearn, func() ([]netip.Addr, error) {
		return n.table.Hold(inUse, n.now()), nil
	})
}

// sweep removes addresses whose TTL and grace period are over.
func (n *Names) sweep(now time.Time) {
	gone, wake := n.table.Expire(now)
	n.forget(gone)
	n.alarm.set(wake)
}

// List returns learned names and the rules that select them, sorted. The copy of the names is made in a turn of the
// owner, and the rules are found in the caller's goroutine.
func (n *Names) List(ctx context.Context, f names.Filter) ([]names.Used, error) {
	match, err := f.Match()
	if err != nil {
		return nil, &failure.FieldError{Field: "pattern", Err: err}
	}
	var objects []policy.Object
	list, err := loop.Ask(ctx, n.loop, opRead, func() ([]names.Learned, error) {
		for _, p := range n.policies.all {
			if p.inForce() {
				objects = append(objects, *p.object)
			}
		}
		return n.table.List(match, f.Address), nil
	})
	if err != nil {
		return nil, err
	}
	return names.WithUses(ctx, list, objects)
}

// forgetAtOnce is the number of names that are removed in one turn.
const forgetAtOnce = 256

// Forget removes the names that the filter matches, or, if the filter has an address, only this address from each of
// the names. It returns the removed addresses of each name. It waits until every connected enforcing subscriber has
// removed them from the kernel. It takes several turns, between which the owner serves other calls.
func (n *Names) Forget(ctx context.Context, f names.Filter, validateOnly bool) (gone []engine.Name, err error) {
	match, err := f.Match()
	if err != nil {
		return nil, &failure.FieldError{Field: "pattern", Err: err}
	}
	list, err := loop.Ask(ctx, n.loop, opRead, func() ([]names.Learned, error) {
		return n.table.List(match, f.Address), nil
	})
	if err != nil {
		return nil, err
	}
	if validateOnly {
		return names.Would(list, f.Address), nil
	}
	for chunk := range slices.Chunk(list, forgetAtOnce) {
		some, err := loop.Ask(ctx, n.loop, opLearn, func() (some []engine.Name, _ error) {
			for _, l := range chunk {
				some = append(some, n.table.Forget(l.Key, f.Address)...)
			}
			n.forget(some)
			return some, nil
		})
		if err != nil {
			return gone, err
		}
		gone = append(gone, some...)
	}
	// Wait even if nothing was removed: an earlier Forget may have removed the addresses, and its caller may have
	// stopped waiting.
	_, err = n.subscribers.await(ctx, nil, func() (stream.Barrier, error) {
		n.loop.Rename(opLearn)
		return stream.Barrier{Address: n.publisher.barrier.Address}, nil
	})
	return gone, err
}
