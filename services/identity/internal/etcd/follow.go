// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Mirror keeps a copy of the keys of nodes, from which the next process resumes. The mirror handles its errors itself;
// they are reported, and Follow does not wait for it.
type Mirror interface {
	// ReplaceKeys has all keys. The point is kept by the next NoteKeys.
	ReplaceKeys(cluster.Keys) error
	// NoteKeys adds the changes since the previous call. It is called before readers get them.
	NoteKeys(of string, c cluster.Change) error
}

// Keep sets the mirror that gets the keys of nodes. It is called before Follow.
func (s *Store) Keep(m Mirror) { s.mirror = m }

// Prepare sets a function that gets updates of nodes before the mirror does; the sink of Observe gets them afterwards.
// It is called before Follow.
func (s *Store) Prepare(f func(registry.Update)) { s.prepare = f }

// Observe sets the sink of the updates of nodes and addresses. It gets them after the identities that were written
// before them. It is called before Follow.
func (s *Store) Observe(sink func(registry.Update)) { s.observe = sink }

// Spread delays each listing of Follow by a random time below the result of f. It is called before Follow.
func (s *Store) Spread(f func() time.Duration) { s.spread = f }

// Resume passes on the keys of a mirror as if they had been listed. If etcd's history still contains their revision,
// Follow continues from there. It is called after Observe and before Follow.
func (s *Store) Resume(k cluster.Keys) {
	if k.Of != s.nodes.keys.all() {
		return // nothing was kept, or of another cluster's place in etcd
	}
	s.position = positionOf(k, s.nodes.keys.ipam())
	u := registry.Update{Complete: true, Cluster: k.At.Cluster, Revision: k.At.Revision}
	for _, key := range k.All {
		s.nodes.decoder.update(&u, &mvccpb.KeyValue{
			Key: []byte(key.Name), Value: key.Value, CreateRevision: key.Created, ModRevision: key.Modified,
		}, false)
	}
	u.Removed = nil
	s.observe(u)
}

// following is the state of one call of Follow.
type following struct {
	*Store
	sink    func(allocator.Update)
	u       allocator.Update
	nodes   registry.Update
	keys    []cluster.Key  // of a listing: the keys of nodes
	changed cluster.Change // changes of these keys in the present answer

	of, now <-chan struct{} // the history that the sinks have, and that of the listing
}

// Follow implements allocator.Store. It passes updates of nodes to the sink of Observe.
func (s *Store) Follow(ctx context.Context, sink func(allocator.Update)) error {
	f := &following{Store: s, sink: sink}
	if s.position.lacksSettings() {
		if err := s.readIPAM(ctx); err != nil {
			return err
		}
	}
	return s.session.Follow(ctx, session.Reader{
		// From id/ to ipam, which includes ip/.
		Prefix: s.cfg.Prefix + "/id/", End: s.nodes.keys.ipam() + "\x00",
		From: s.position.start(), Witness: s.position.witness,
		Spread: s.spread,
		Resumed: func() {
			f.of = s.session.History()
			s.nodes.followed.Store(f.of)
		},
		Begin: func() {
			f.now = s.session.History()
			f.u, f.nodes, f.keys = allocator.Update{Complete: true}, registry.Update{Complete: true}, nil
		},
		Listed:   f.listed,
		Complete: f.complete,
		Changes: func(events []*clientv3.Event, revision int64, asked time.Time) {
			s.position.at.Revision = revision
			f.update(events)
			f.u.Heard = asked
			f.deliver(func() error { return s.mirror.NoteKeys(s.nodes.keys.all(), f.changed) })
		},
	})
}

func (f *following) listed(kv *mvccpb.KeyValue) {
	switch {
	case !f.Store.nodes.keys.watched(kv):
		if e, ok := f.entry(kv); ok {
			f.u.Upserts = append(f.u.Upserts, e)
		}
	default:
		f.Store.nodes.decoder.update(&f.nodes, kv, false)
		if f.mirror != nil {
			f.keys = append(f.keys, keyOf(kv))
		}
	}
}

func (f *following) complete(at cluster.Point, asked time.Time) {
	f.listings.Add(1)
	f.position.at = at
	// Updates from before this run may belong to another history of the store.
	f.u.Heard, f.u.Reset = asked, f.of != f.now
	f.of = f.now
	f.nodes.Removed = nil
	f.deliver(func() error {
		return f.mirror.ReplaceKeys(cluster.Keys{Of: f.Store.nodes.keys.all(), At: at, All: f.keys})
	})
}

// deliver passes on the gathered changes: identities before the addresses that have them, to the disk before the
// readers. The point of the mirror covers the identities too, so it is saved after them.
func (f *following) deliver(keep func() error) {
	at := f.position.at
	f.u.Cluster, f.u.Revision = at.Cluster, at.Revision
	f.nodes.Cluster, f.nodes.Revision, f.changed.At = at.Cluster, at.Revision, at
	f.nodes.Heard = f.u.Heard
	f.u.Beside = len(f.changed.Put)+len(f.changed.Drop) > 0
	f.sink(f.u)
	if f.prepare != nil {
		f.prepare(f.nodes)
	}
	if f.mirror != nil {
		if err := keep(); err != nil {
			f.cfg.Log.Error("the keys of nodes were not saved; after a restart without etcd, fewer are known", log.Err(err))
		}
	}
	if f.observe != nil {
		f.observe(f.nodes)
	}
	f.Store.nodes.followed.Store(f.of)
	f.u, f.nodes, f.changed, f.keys = allocator.Update{}, registry.Update{}, cluster.Change{}, nil
}

func keyOf(kv *mvccpb.KeyValue) cluster.Key {
	return cluster.Key{Name: string(kv.Key), Value: kv.Value, Created: kv.CreateRevision, Modified: kv.ModRevision}
}

// readIPAM passes on the settings of ipam.
func (s *Store) readIPAM(ctx context.Context) error {
	have, err := getAll(ctx, s.session, "read settings of ipam", s.nodes.keys.ipam())
	if err != nil || have[0] == nil || s.observe == nil {
		return err
	}
	var u registry.Update
	s.nodes.decoder.update(&u, have[0], false)
	s.observe(u)
	return nil
}

// update turns the events of one answer into changes. Of several events of a key only the last one is used.
func (f *following) update(events []*clientv3.Event) {
	last := make(map[string]*clientv3.Event, len(events))
	for _, e := range events {
		last[string(e.Kv.Key)] = e
	}
	for _, e := range events {
		if last[string(e.Kv.Key)] != e {
			continue
		}
		if f.Store.nodes.keys.watched(e.Kv) {
			gone := e.Type == clientv3.EventTypeDelete
			f.Store.nodes.decoder.update(&f.nodes, e.Kv, gone)
			if gone {
				f.changed.Drop = append(f.changed.Drop, string(e.Kv.Key))
			} else {
				f.changed.Put = append(f.changed.Put, keyOf(e.Kv))
			}
			continue
		}
		if e.Type == clientv3.EventTypePut {
			if entry, ok := f.entry(e.Kv); ok {
				f.u.Upserts = append(f.u.Upserts, entry)
			}
			continue
		}
		n, err := parseNumber(strings.TrimPrefix(string(e.Kv.Key), f.cfg.Prefix+"/id/"))
		if err != nil {
			continue // it was reported when it was put
		}
		f.u.Deletes = append(f.u.Deletes, allocator.Deletion{Number: n, Revision: e.Kv.ModRevision})
	}
}

// entry reads an identity; a corrupt one is reported and left out, because one
// bad key must not hide all others. Its number stays occupied.
func (s *Store) entry(kv *mvccpb.KeyValue) (allocator.Entry, bool) {
	id, err := s.parseID(kv)
	if err != nil {
		s.cfg.Log.Error("unreadable identity in etcd is ignored", log.Err(err))
		return allocator.Entry{}, false
	}
	return allocator.Entry{Identity: id, Revision: kv.ModRevision}, true
}

// FollowReferences implements allocator.Store.
func (s *Store) FollowReferences(ctx context.Context, sink func(allocator.References)) error {
	prefix := s.cfg.Prefix + "/ref/"
	var u allocator.References
	add := func(key []byte, by int) {
		node, number, ok := strings.Cut(strings.TrimPrefix(string(key), prefix), "/")
		n, err := parseNumber(number)
		if !ok || err != nil {
			return // no reference to a number; the node that has it reports it
		}
		u.Numbers[n] += by
		u.Nodes[node] += by
	}
	start := func(complete bool) {
		u = allocator.References{Complete: complete, Numbers: map[identity.Numeric]int{}, Nodes: map[string]int{}}
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix: prefix, KeysOnly: true,
		Begin:  func() { start(true) },
		Listed: func(kv *mvccpb.KeyValue) { add(kv.Key, 1) },
		Complete: func(at cluster.Point, _ time.Time) {
			u.Revision = at.Revision
			sink(u)
		},
		Changes: func(events []*clientv3.Event, revision int64, _ time.Time) {
			start(false)
			for _, e := range events {
				switch {
				case e.IsCreate():
					add(e.Kv.Key, 1)
				case e.Type == clientv3.EventTypeDelete:
					add(e.Kv.Key, -1)
				}
			}
			u.Revision = revision
			sink(u)
		},
	})
}
