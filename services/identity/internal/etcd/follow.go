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
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Follow implements allocator.Store.
func (s *Store) Follow(ctx context.Context, sink func(allocator.Update)) error {
	var u allocator.Update
	var of, now <-chan struct{} // the history that the mirror is of, and that of the listing
	var cluster uint64          // that was listed
	return s.session.Follow(ctx, session.Reader{
		Prefix: s.cfg.Prefix + "/id/",
		Begin: func() {
			now = s.session.History()
			u = allocator.Update{Complete: true}
		},
		Listed: func(kv *mvccpb.KeyValue) {
			if e, ok := s.entry(kv); ok {
				u.Upserts = append(u.Upserts, e)
			}
		},
		Complete: func(at session.Point, asked time.Time) {
			// What the mirror had before is not from this run's history.
			u.Cluster, u.Revision, u.Heard, u.Reset = at.Cluster, at.Revision, asked, of != now
			of, cluster = now, at.Cluster
			sink(u)
			u = allocator.Update{}
		},
		Changes: func(events []*clientv3.Event, revision int64, asked time.Time) {
			u := s.update(events)
			u.Cluster, u.Revision, u.Heard = cluster, revision, asked
			sink(u)
		},
	})
}

// update turns the events of one answer into changes. Of several events of a
// number the last one counts.
func (s *Store) update(events []*clientv3.Event) allocator.Update {
	var u allocator.Update
	last := make(map[string]*clientv3.Event, len(events))
	for _, e := range events {
		last[string(e.Kv.Key)] = e
	}
	for _, e := range events {
		if last[string(e.Kv.Key)] != e {
			continue
		}
		if e.Type == clientv3.EventTypePut {
			if entry, ok := s.entry(e.Kv); ok {
				u.Upserts = append(u.Upserts, entry)
			}
			continue
		}
		n, err := parseNumber(strings.TrimPrefix(string(e.Kv.Key), s.cfg.Prefix+"/id/"))
		if err != nil {
			continue // it was reported when it was put
		}
		u.Deletes = append(u.Deletes, allocator.Deletion{Number: n, Revision: e.Kv.ModRevision})
	}
	return u
}

// entry reads an identity; a damaged one is reported and left out, because one
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
		Complete: func(at session.Point, _ time.Time) {
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
