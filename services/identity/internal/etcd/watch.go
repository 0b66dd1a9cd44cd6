// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Mirror keeps a copy of the keys of nodes, with which the next process resumes. Its errors are logged; the mirror
// handles them itself, and Follow does not wait.
type Mirror interface {
	// ReplaceKeys replaces all keys. The next NoteKeys saves the point.
	ReplaceKeys(cluster.Keys) error
	// NoteKeys adds the changes since the previous call, before readers receive them.
	NoteKeys(of string, c cluster.Change) error
}

// Readers receive the keys that a Store's Watch reads. Each field may be nil.
type Readers struct {
	// Prepare receives updates of nodes before the mirror.
	Prepare func(registry.Update)
	// Mirror keeps a copy of the keys of nodes.
	Mirror Mirror
	// Observe receives updates of nodes and addresses, after the identities that were written before them.
	Observe func(registry.Update)
	// Spread returns the maximum random delay of each listing. Nil: listings begin at once.
	Spread func() time.Duration
}

// Watch follows the keys of identities and nodes, which are neighbours in etcd, so that a node receives an identity
// before the addresses with this identity.
type Watch struct {
	session  *session.Session
	cfg      session.Config // of the session
	ids      identityKeys
	nodes    *Nodes
	readers  Readers
	position position
	listings atomic.Uint64
}

// Listings returns how often Follow has listed all keys.
func (w *Watch) Listings() uint64 { return w.listings.Load() }

// Resume passes on the keys of a mirror like a listing. If etcd's history still contains their revision, Follow
// continues from there. It must be called before Follow.
func (w *Watch) Resume(k cluster.Keys) {
	if k.Of != w.nodes.keys.all() {
		return // no keys were saved, or the keys of another prefix
	}
	w.position = positionOf(k, w.nodes.keys.ipam())
	u := registry.Update{Complete: true, Cluster: k.At.Cluster, Revision: k.At.Revision}
	for _, key := range k.All {
		w.nodes.decoder.update(&u, &mvccpb.KeyValue{
			Key: []byte(key.Name), Value: key.Value, CreateRevision: key.Created, ModRevision: key.Modified,
		}, false)
	}
	u.Removed = nil
	w.readers.Observe(u)
}

// following is the state of one call of Follow.
type following struct {
	w       *Watch
	sink    func(allocator.Update)
	u       allocator.Update
	nodes   registry.Update
	keys    []cluster.Key  // the keys of nodes in the listing
	changed cluster.Change // changes of these keys in the present answer

	of, now <-chan struct{} // closed when the history that the sinks have, or the history of the listing, ends
}

// Follow implements allocator.Store. It passes updates of nodes to the readers.
func (w *Watch) Follow(ctx context.Context, sink func(allocator.Update)) error {
	f := &following{w: w, sink: sink}
	if w.position.lacksSettings() {
		if err := w.readIPAM(ctx); err != nil {
			return err
		}
	}
	return w.session.Follow(ctx, session.Reader{
		// From id/ to ipam, which includes ip/.
		Prefix: w.ids.all(), End: w.nodes.keys.ipam() + "\x00",
		From: w.position.start(), Witness: w.position.witness, Gone: w.position.gone,
		Spread: w.readers.Spread,
		Resumed: func() {
			f.of = w.session.History()
			w.nodes.followed.Store(f.of)
		},
		Begin: func() {
			f.now = w.session.History()
			f.u, f.nodes, f.keys = allocator.Update{Complete: true}, registry.Update{Complete: true}, nil
		},
		Listed:   f.listed,
		Complete: f.complete,
		Changes: func(events []*clientv3.Event, revision int64, asked time.Time) {
			w.position.at.Revision = revision
			f.update(events)
			f.u.Heard = asked
			f.deliver(func() error { return w.readers.Mirror.NoteKeys(w.nodes.keys.all(), f.changed) })
		},
	})
}

func (f *following) listed(kv *mvccpb.KeyValue) {
	switch {
	case !f.w.nodes.keys.watched(kv):
		if e, ok := f.entry(kv); ok {
			f.u.Upserts = append(f.u.Upserts, e)
		}
	default:
		f.w.nodes.decoder.update(&f.nodes, kv, false)
		if f.w.readers.Mirror != nil {
			f.keys = append(f.keys, keyOf(kv))
		}
	}
}

func (f *following) complete(at cluster.Point, asked time.Time) {
	f.w.listings.Add(1)
	f.w.position.at = at
	// Updates from before this run may belong to another history of the store.
	f.u.Heard, f.u.Reset = asked, f.of != f.now
	f.of = f.now
	f.nodes.Removed = nil
	f.deliver(func() error {
		return f.w.readers.Mirror.ReplaceKeys(cluster.Keys{Of: f.w.nodes.keys.all(), At: at, All: f.keys})
	})
}

// deliver passes on the collected changes: identities before the addresses with these identities, and to the disk
// before the readers. The point of the mirror also covers the identities, so it is saved after them.
func (f *following) deliver(keep func() error) {
	at := f.w.position.at
	f.u.Cluster, f.u.Revision = at.Cluster, at.Revision
	f.nodes.Cluster, f.nodes.Revision, f.changed.At = at.Cluster, at.Revision, at
	f.nodes.Heard = f.u.Heard
	f.u.Beside = len(f.changed.Put)+len(f.changed.Drop) > 0
	f.sink(f.u)
	if f.w.readers.Prepare != nil {
		f.w.readers.Prepare(f.nodes)
	}
	if f.w.readers.Mirror != nil {
		if err := keep(); err != nil {
			f.w.cfg.Log.Error("the keys of nodes were not saved; after a restart without etcd, fewer are known", log.Err(err))
		}
	}
	if f.w.readers.Observe != nil {
		f.w.readers.Observe(f.nodes)
	}
	f.w.nodes.followed.Store(f.of)
	f.u, f.nodes, f.changed, f.keys = allocator.Update{}, registry.Update{}, cluster.Change{}, nil
}

func keyOf(kv *mvccpb.KeyValue) cluster.Key {
	return cluster.Key{Name: string(kv.Key), Value: kv.Value, Created: kv.CreateRevision, Modified: kv.ModRevision}
}

// readIPAM passes on the settings of ipam.
func (w *Watch) readIPAM(ctx context.Context) error {
	have, err := getAll(ctx, w.session, "read settings of ipam", w.nodes.keys.ipam())
	if err != nil || have[0] == nil || w.readers.Observe == nil {
		return err
	}
	var u registry.Update
	w.nodes.decoder.update(&u, have[0], false)
	w.readers.Observe(u)
	return nil
}

// update converts the events of one response to changes. Of several events of a key, it uses only the last one.
func (f *following) update(events []*clientv3.Event) {
	last := make(map[string]*clientv3.Event, len(events))
	for _, e := range events {
		last[string(e.Kv.Key)] = e
		if e.Type == clientv3.EventTypeDelete {
			f.changed.Gone = cluster.Removed{Name: string(e.Kv.Key), Revision: e.Kv.ModRevision}
		}
	}
	for _, e := range events {
		if last[string(e.Kv.Key)] != e {
			continue
		}
		if f.w.nodes.keys.watched(e.Kv) {
			gone := e.Type == clientv3.EventTypeDelete
			f.w.nodes.decoder.update(&f.nodes, e.Kv, gone)
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
		n, err := parseNumber(strings.TrimPrefix(string(e.Kv.Key), f.w.ids.all()))
		if err != nil {
			continue // the key was already reported when it was written
		}
		f.u.Deletes = append(f.u.Deletes, allocator.Deletion{Number: n, Revision: e.Kv.ModRevision})
	}
}

// entry decodes an identity. A corrupt identity is logged and omitted, because it must not hide others. Its number
// stays occupied.
func (f *following) entry(kv *mvccpb.KeyValue) (allocator.Entry, bool) {
	id, err := f.w.ids.read(kv)
	if err != nil {
		f.w.cfg.Log.Error("unreadable identity in etcd is ignored", log.Err(err))
		return allocator.Entry{}, false
	}
	return allocator.Entry{Identity: id, Revision: kv.ModRevision}, true
}
