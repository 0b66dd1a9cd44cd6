// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Identities are the identities of the cluster and this node's references to them.
type Identities struct {
	session *session.Session
	cfg     session.Config // of the session
	ids     identityKeys
	layout  *layout
	steps   *claimSteps
	epoch   atomic.Pointer[epoch]
}

// epoch is the key of the store's epoch as it was last read, and the zone of its numbers.
type epoch struct {
	kv   *mvccpb.KeyValue // nil: the store is another etcd than sluice-store
	zone allocator.Zone
}

// Zone implements allocator.Store.
func (s *Identities) Zone() allocator.Zone { return s.epoch.Load().zone }

// unchanged returns the condition that the store has this epoch. It compares the value and not the revision: each epoch
// of a store in Kubernetes begins with an empty etcd, so the key may have the same revision in two epochs.
func (e *epoch) unchanged(key string) clientv3.Cmp {
	if e.kv == nil {
		return session.Unchanged(key, nil)
	}
	return clientv3.Compare(clientv3.Value(key), "=", string(e.kv.Value))
}

// sees records the key of the epoch. It returns true if the epoch has changed since a candidate was chosen.
func (s *Identities) sees(kvs []*mvccpb.KeyValue, chosen *epoch) bool {
	e := &epoch{}
	if len(kvs) > 0 {
		e.kv = kvs[0]
		if n, err := strconv.ParseUint(string(e.kv.Value), 10, 64); err == nil && n > 0 {
			e.zone = allocator.ZoneOf(n)
		}
	}
	s.epoch.Store(e)
	if chosen.kv == nil || e.kv == nil {
		return chosen.kv != e.kv
	}
	return !bytes.Equal(chosen.kv.Value, e.kv.Value)
}

func newIdentities(s *session.Session, ids identityKeys, l *layout) *Identities {
	i := &Identities{session: s, cfg: s.Config(), ids: ids, layout: l, steps: newClaimSteps(s)}
	i.epoch.Store(&epoch{})
	return i
}

// put returns the writes that create an identity and this node's reference to it.
func (s *Identities) put(n identity.Numeric, l label.Canonical, lease clientv3.LeaseID, create bool) []clientv3.Op {
	ops := []clientv3.Op{
		clientv3.OpPut(s.ids.fence(n), ""),
		clientv3.OpPut(s.ids.reference(n), "", clientv3.WithLease(lease)),
	}
	if create {
		ops = append(ops, clientv3.OpPut(s.ids.labels(l), s.layout.value(n, l)), clientv3.OpPut(s.ids.id(n), l.Text()))
	}
	return ops
}

// refer writes a reference to an existing identity. If the identity does not exist unchanged, ok is false and have is
// the current state.
func (s *Identities) refer(ctx context.Context, n identity.Numeric, l label.Canonical, lease clientv3.LeaseID) (_ allocator.Claim, have state, ok bool, err error) {
	exists := func(labels string) []clientv3.Cmp {
		return []clientv3.Cmp{
			clientv3.Compare(clientv3.Value(s.ids.labels(l)), "=", labels),
			clientv3.Compare(clientv3.Value(s.ids.id(n)), "=", l.Text()),
		}
	}
	put := s.put(n, l, lease, false)
	// Nodes of layout 1 use labels/ as the fence.
	both := append(slices.Clip(put), clientv3.OpPut(s.ids.labels(l), labelsValue1(n, l)))
	c := &claim{
		what: "refer to identity", number: n, labels: l, when: exists(labelsValue(n)), then: put,
		orElse: []clientv3.Op{clientv3.OpTxn(exists(labelsValue1(n, l)), both, s.gets(n, l))},
	}
	if err := s.steps.commit(ctx, c); err != nil {
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

// maxRaces bounds how often one call starts again after a conflict with another call. With each conflict, the other
// call has succeeded.
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

// restsAfterAnother reports whether the number is in quarantine after another label set than l.
func (h state) restsAfterAnother(l label.Canonical) bool {
	return h.rest != nil && string(h.rest.Value) != hashText(l)
}

func (s *Identities) gets(n identity.Numeric, l label.Canonical) []clientv3.Op {
	return []clientv3.Op{
		clientv3.OpGet(s.ids.labels(l)),
		clientv3.OpGet(s.ids.id(n)),
		clientv3.OpGet(s.ids.quarantine(n)),
	}
}

// Claim implements allocator.Store.
func (s *Identities) Claim(ctx context.Context, l label.Canonical, known, candidate identity.Numeric) (allocator.Claim, error) {
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
		// One round trip creates the identity, or returns the reason why not. Without a candidate it only reads,
		// because number 0 is never created.
		chosen := s.epoch.Load()
		first := &claim{what: "allocate identity", number: candidate, labels: l, then: s.gets(candidate, l)}
		when, reads := waiting(s.cfg)
		if candidate != 0 {
			first.when = []clientv3.Cmp{
				clientv3.Compare(clientv3.CreateRevision(s.ids.labels(l)), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(s.ids.id(candidate)), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(s.ids.quarantine(candidate)), "=", 0),
			}
			if candidate != known { // a known number may be written again at any time
				first.when = append(first.when, chosen.unchanged(epochKey(s.cfg.Prefix)))
				first.when = append(first.when, when...)
			}
			first.orElse = append(append(first.then, clientv3.OpGet(epochKey(s.cfg.Prefix))), reads...)
			first.then = s.put(candidate, l, lease, true)
		}
		if err := s.steps.commit(ctx, first); err != nil {
			return allocator.Claim{}, err
		}
		if first.succeeded && candidate != 0 {
			return allocator.Claim{Number: candidate, Revision: first.revision, Created: true}, nil
		}
		n, have := candidate, stateOf(first.responses)
		if have.labels == nil && candidate != 0 && candidate != known {
			moved := s.sees(first.responses[3].GetResponseRange().GetKvs(), chosen)
			if err := refused(s.cfg, first.responses[4:]); err != nil {
				return allocator.Claim{}, fmt.Errorf("allocate identity: %w", err)
			}
			if moved {
				return allocator.Claim{}, fmt.Errorf("allocate identity: %w", allocator.ErrZone)
			}
		}
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
			// A deletion of id/ left labels/ behind, and the number is in quarantine after another label set: this set
			// has no number.
			if _, err := s.session.Commit(ctx, "remove stray label set", s.session.Txn(ctx).If(
				session.Unchanged(s.ids.labels(l), have.labels), session.Unchanged(s.ids.id(n), nil),
			).Then(clientv3.OpDelete(s.ids.labels(l)))); err != nil {
				return allocator.Claim{}, err
			}
			continue
		case have.labels != nil && have.id != nil:
			return allocator.Claim{}, fmt.Errorf("%w: %s refers to %d, but %s does not have the label set %s",
				allocator.ErrCorrupt, s.ids.labels(l), n, s.ids.id(n), l)
		case n == 0, have.labels == nil && (have.id != nil && !have.is(l) || have.restsAfterAnother(l)):
			return allocator.Claim{}, allocator.ErrOccupied
		}
		// Either the number is in quarantine and belonged to this label set, which may have it again, or only one of
		// the keys id/ and labels/ was deleted.
		if c, ok, err := s.create(ctx, n, l, lease, have); err != nil || ok {
			return c, err
		}
	}
	return allocator.Claim{}, fmt.Errorf("%w: %s changed during each of %d attempts", allocator.ErrUnavailable,
		s.ids.labels(l), maxRaces)
}

// create writes an identity if its keys are unchanged since they were read.
func (s *Identities) create(ctx context.Context, n identity.Numeric, l label.Canonical, lease clientv3.LeaseID, have state) (_ allocator.Claim, ok bool, err error) {
	resp, err := s.session.Commit(ctx, "create identity", s.session.Txn(ctx).If(
		session.Unchanged(s.ids.labels(l), have.labels),
		session.Unchanged(s.ids.id(n), have.id),
		session.Unchanged(s.ids.quarantine(n), have.rest),
	).Then(append(s.put(n, l, lease, true), clientv3.OpDelete(s.ids.quarantine(n)))...))
	if err != nil {
		return allocator.Claim{}, false, err
	}
	return allocator.Claim{Number: n, Revision: resp.Header.Revision, Created: have.id == nil}, resp.Succeeded, nil
}

// Restore implements allocator.Store.
func (s *Identities) Restore(ctx context.Context, id identity.Identity) (allocator.Claim, error) {
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
			if conflict.Occupant, err = s.ids.read(have.id); err != nil {
				return allocator.Claim{}, err
			}
			conflict.Revision = have.id.ModRevision
		}
		if conflict.Moved != 0 || !conflict.Occupant.Labels.IsZero() || have.restsAfterAnother(id.Labels) {
			return allocator.Claim{}, conflict
		}
		// The identity was removed, at least in part. No other label set has the number, so the identity can be created
		// again.
		if c, ok, err := s.create(ctx, id.Number, id.Labels, lease, have); err != nil || ok {
			return c, err
		}
	}
	return allocator.Claim{}, fmt.Errorf("%w: %s changed during each of %d attempts", allocator.ErrUnavailable,
		s.ids.id(id.Number), maxRaces)
}

// Renew implements allocator.Store.
func (s *Identities) Renew(ctx context.Context, ids []identity.Identity) ([]allocator.Claim, error) {
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
				clientv3.Compare(clientv3.Value(s.ids.labels(id.Labels)), "=", labelsValue(id.Number)),
				clientv3.Compare(clientv3.Value(s.ids.id(id.Number)), "=", id.Labels.Text()))
			put = append(put, s.put(id.Number, id.Labels, lease, false)...)
		}
		resp, err := s.session.Commit(ctx, "refer to identities", s.session.Txn(ctx).If(exist...).Then(put...))
		if err != nil {
			return done, err
		}
		if !resp.Succeeded {
			continue // one identity differs: it has to be restored alone
		}
		for _, id := range some {
			done = append(done, allocator.Claim{Number: id.Number, Revision: resp.Header.Revision})
		}
	}
	return done, nil
}

// Release implements allocator.Store.
func (s *Identities) Release(ctx context.Context, refs ...allocator.Reference) error {
	for some := range slices.Chunk(refs, maxOps/2) {
		var ops []clientv3.Op
		for _, ref := range some {
			key := s.ids.reference(ref.Number)
			ops = append(ops, clientv3.OpTxn(
				[]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", ref.Revision)},
				[]clientv3.Op{clientv3.OpDelete(key)}, nil))
		}
		if _, err := s.session.Commit(ctx, "release identities", s.session.Txn(ctx).Then(ops...)); err != nil {
			return err
		}
	}
	return nil
}

// References implements allocator.Store.
func (s *Identities) References(ctx context.Context) ([]allocator.Reference, error) {
	lease, err := s.session.Lease()
	if err != nil {
		return nil, err
	}
	var refs []allocator.Reference
	_, err = s.session.List(ctx, s.ids.references(), true, func(kv *mvccpb.KeyValue) {
		n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.ids.references()))
		if err != nil {
			s.cfg.Log.Error("unexpected etcd key below the prefix of this node's references, ignored", "key", string(kv.Key))
			return
		}
		refs = append(refs, allocator.Reference{Number: n, Revision: kv.ModRevision, Present: kv.Lease != 0 && clientv3.LeaseID(kv.Lease) == lease})
	})
	return refs, err
}
