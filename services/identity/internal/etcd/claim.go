// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// put are the writes that make an identity referred to by this node.
func (s *Store) put(n identity.Numeric, l label.Canonical, lease clientv3.LeaseID, create bool) []clientv3.Op {
	ops := []clientv3.Op{
		clientv3.OpPut(s.fenceKey(n), ""),
		clientv3.OpPut(s.refKey(n), "", clientv3.WithLease(lease)),
	}
	if create {
		ops = append(ops, clientv3.OpPut(s.labelsKey(l), s.labelsValue(n, l)), clientv3.OpPut(s.idKey(n), l.Text()))
	}
	return ops
}

// refer refers to an identity that exists unchanged. If it does not, ok is false and have is the present state.
func (s *Store) refer(ctx context.Context, n identity.Numeric, l label.Canonical, lease clientv3.LeaseID) (_ allocator.Claim, have state, ok bool, err error) {
	exists := func(labels string) []clientv3.Cmp {
		return []clientv3.Cmp{
			clientv3.Compare(clientv3.Value(s.labelsKey(l)), "=", labels),
			clientv3.Compare(clientv3.Value(s.idKey(n)), "=", l.Text()),
		}
	}
	put := s.put(n, l, lease, false)
	// Nodes of layout 1 take labels/ for the fence.
	both := append(slices.Clip(put), clientv3.OpPut(s.labelsKey(l), labelsValue1(n, l)))
	c := &claim{
		what: "refer to identity", number: n, labels: l, when: exists(labelsValue(n)), then: put,
		orElse: []clientv3.Op{clientv3.OpTxn(exists(labelsValue1(n, l)), both, s.gets(n, l))},
	}
	if err := s.commit(ctx, c); err != nil {
		return allocator.Claim{}, state{}, false, err
	}
	if ok = c.succeeded; !ok {
		inner := c.responses[0].GetResponseTxn()
		if ok = inner.GetSucceeded(); !ok {
			have = stateOf(inner.GetResponses())
		}
	}
	return allocator.Claim{Number: n, Revision: c.revision}, have, ok, nil
}

// maxRaces bounds how often one call starts over after a conflict with another call. After each conflict the other
// call made progress.
const maxRaces = 16

// state is etcd's content for a label set and a number.
type state struct {
	labels, id, rest *mvccpb.KeyValue // nil: no such key
}

func stateOf(resp []*etcdserverpb.ResponseOp) state {
	first := func(i int) *mvccpb.KeyValue {
		if kvs := resp[i].GetResponseRange().GetKvs(); len(kvs) > 0 {
			return kvs[0]
		}
		return nil
	}
	return state{labels: first(0), id: first(1), rest: first(2)}
}

// is reports whether the number belongs to the label set.
func (h state) is(l label.Canonical) bool { return h.id != nil && string(h.id.Value) == l.Text() }

// restsAfterAnother reports whether the number is in quarantine and belonged to another label set than l.
func (h state) restsAfterAnother(l label.Canonical) bool {
	return h.rest != nil && string(h.rest.Value) != hashText(l)
}

func (s *Store) gets(n identity.Numeric, l label.Canonical) []clientv3.Op {
	return []clientv3.Op{
		clientv3.OpGet(s.labelsKey(l)),
		clientv3.OpGet(s.idKey(n)),
		clientv3.OpGet(s.quarantineKey(n)),
	}
}

// Claim implements allocator.Store.
func (s *Store) Claim(ctx context.Context, l label.Canonical, known, candidate identity.Numeric) (allocator.Claim, error) {
	lease, err := s.session.Lease()
	if err != nil {
		return allocator.Claim{}, err
	}
	if known != 0 {
		if c, _, ok, err := s.refer(ctx, known, l, lease); err != nil || ok {
			return c, err
		}
	}
	for range maxRaces {
		// One round trip creates it, or returns why not. Without a candidate it only reads: number 0 is never created.
		first := &claim{what: "allocate identity", number: candidate, labels: l, then: s.gets(candidate, l)}
		if candidate != 0 {
			first.when = []clientv3.Cmp{
				clientv3.Compare(clientv3.CreateRevision(s.labelsKey(l)), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(s.idKey(candidate)), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(s.quarantineKey(candidate)), "=", 0),
			}
			first.then, first.orElse = s.put(candidate, l, lease, true), first.then
		}
		if err := s.commit(ctx, first); err != nil {
			return allocator.Claim{}, err
		}
		if first.succeeded && candidate != 0 {
			return allocator.Claim{Number: candidate, Revision: first.revision, Created: true}, nil
		}
		n, have := candidate, stateOf(first.responses)
		if have.labels != nil {
			if n, err = numberOf(have.labels, l); err != nil {
				return allocator.Claim{}, err
			}
			var c allocator.Claim
			var ok bool
			if c, have, ok, err = s.refer(ctx, n, l, lease); err != nil || ok {
				return c, err
			}
		}
		switch {
		case have.labels != nil && have.id == nil && have.restsAfterAnother(l):
			// The deletion of id/ left labels/ behind, and the number is in quarantine for another set: this set has
			// no number.
			if _, err := s.session.Commit(ctx, "remove stray label set", s.session.Txn(ctx).If(
				session.Unchanged(s.labelsKey(l), have.labels), session.Unchanged(s.idKey(n), nil),
			).Then(clientv3.OpDelete(s.labelsKey(l)))); err != nil {
				return allocator.Claim{}, err
			}
			continue
		case have.labels != nil && have.id != nil:
			return allocator.Claim{}, fmt.Errorf("%w: %s refers to %d, but %s does not have the label set %s",
				allocator.ErrCorrupt, s.labelsKey(l), n, s.idKey(n), l)
		case n == 0, have.labels == nil && (have.id != nil && !have.is(l) || have.restsAfterAnother(l)):
			return allocator.Claim{}, allocator.ErrOccupied
		}
		// The number is in quarantine after this same set, which may have it back; or one of id/ and labels/ was
		// deleted alone, and the other still has the content.
		if c, ok, err := s.create(ctx, n, l, lease, have); err != nil || ok {
			return c, err
		}
	}
	return allocator.Claim{}, fmt.Errorf("%w: %s changed during each of %d attempts", allocator.ErrUnavailable,
		s.labelsKey(l), maxRaces)
}

// create writes an identity if its keys are unchanged since they were read.
func (s *Store) create(ctx context.Context, n identity.Numeric, l label.Canonical, lease clientv3.LeaseID, have state) (_ allocator.Claim, ok bool, err error) {
	resp, err := s.session.Commit(ctx, "create identity", s.session.Txn(ctx).If(
		session.Unchanged(s.labelsKey(l), have.labels),
		session.Unchanged(s.idKey(n), have.id),
		session.Unchanged(s.quarantineKey(n), have.rest),
	).Then(append(s.put(n, l, lease, true), clientv3.OpDelete(s.quarantineKey(n)))...))
	if err != nil {
		return allocator.Claim{}, false, err
	}
	return allocator.Claim{Number: n, Revision: resp.Header.Revision, Created: have.id == nil}, resp.Succeeded, nil
}

// Restore implements allocator.Store.
func (s *Store) Restore(ctx context.Context, id identity.Identity) (allocator.Claim, error) {
	lease, err := s.session.Lease()
	if err != nil {
		return allocator.Claim{}, err
	}
	for range maxRaces {
		c, have, ok, err := s.refer(ctx, id.Number, id.Labels, lease)
		if err != nil || ok {
			return c, err
		}
		conflict := &allocator.ConflictError{Held: id}
		if have.labels != nil {
			n, err := numberOf(have.labels, id.Labels)
			if err != nil {
				return allocator.Claim{}, err
			}
			if n != id.Number {
				conflict.Moved = n
			}
		}
		if have.id != nil && !have.is(id.Labels) {
			if conflict.Occupant, err = s.parseID(have.id); err != nil {
				return allocator.Claim{}, err
			}
			conflict.Revision = have.id.ModRevision
		}
		if conflict.Moved != 0 || !conflict.Occupant.Labels.IsZero() || have.restsAfterAnother(id.Labels) {
			return allocator.Claim{}, conflict
		}
		// Removed, wholly or in part: no other set has the number, so it is as it was.
		if c, ok, err := s.create(ctx, id.Number, id.Labels, lease, have); err != nil || ok {
			return c, err
		}
	}
	return allocator.Claim{}, fmt.Errorf("%w: %s changed during each of %d attempts", allocator.ErrUnavailable,
		s.idKey(id.Number), maxRaces)
}

// Renew implements allocator.Store.
func (s *Store) Renew(ctx context.Context, ids []identity.Identity) ([]allocator.Claim, error) {
	lease, err := s.session.Lease()
	if err != nil {
		return nil, err
	}
	var done []allocator.Claim
	for _, some := range chunks(ids, maxOps/2, func(id identity.Identity) int { return len(id.Labels.Text()) }) {
		var exist []clientv3.Cmp
		var put []clientv3.Op
		for _, id := range some {
			exist = append(exist,
				clientv3.Compare(clientv3.Value(s.labelsKey(id.Labels)), "=", labelsValue(id.Number)),
				clientv3.Compare(clientv3.Value(s.idKey(id.Number)), "=", id.Labels.Text()))
			put = append(put, s.put(id.Number, id.Labels, lease, false)...)
		}
		resp, err := s.session.Commit(ctx, "refer to identities", s.session.Txn(ctx).If(exist...).Then(put...))
		if err != nil {
			return done, err
		}
		if !resp.Succeeded {
			continue // one of them needs a closer look
		}
		for _, id := range some {
			done = append(done, allocator.Claim{Number: id.Number, Revision: resp.Header.Revision})
		}
	}
	return done, nil
}
