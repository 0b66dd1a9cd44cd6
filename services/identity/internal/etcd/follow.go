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
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Follow implements allocator.Store. What it reads of nodes goes to the sink of
// Observe.
func (s *Store) Follow(ctx context.Context, sink func(allocator.Update)) error {
	var u allocator.Update
	var nodes registry.Update
	var of, now <-chan struct{} // the history that the mirror is of, and that of the listing
	var cluster uint64          // that was listed
	deliver := func() {
		sink(u)
		if s.observe != nil {
			s.observe(nodes)
		}
		u, nodes = allocator.Update{}, registry.Update{}
	}
	return s.session.Follow(ctx, session.Reader{
		Prefix: s.cfg.Prefix + "/id/", End: clientv3.GetPrefixRangeEnd(s.nodesPrefix()),
		Begin: func() {
			now = s.session.History()
			u, nodes = allocator.Update{Complete: true}, registry.Update{Complete: true}
		},
		Listed: func(kv *mvccpb.KeyValue) {
			if s.isNode(kv) {
				s.nodeUpdate(&nodes, kv, false)
			} else if e, ok := s.entry(kv); ok {
				u.Upserts = append(u.Upserts, e)
			}
		},
		Complete: func(at session.Point, asked time.Time) {
			// What the mirror had before is not from this run's history.
			u.Cluster, u.Revision, u.Heard, u.Reset = at.Cluster, at.Revision, asked, of != now
			nodes.Cluster, nodes.Revision, nodes.Removed = at.Cluster, at.Revision, nil
			of, cluster = now, at.Cluster
			deliver()
		},
		Changes: func(events []*clientv3.Event, revision int64, asked time.Time) {
			s.update(&u, &nodes, events)
			u.Cluster, u.Revision, u.Heard = cluster, revision, asked
			nodes.Cluster, nodes.Revision = cluster, revision
			deliver()
		},
	})
}

func (s *Store) isNode(kv *mvccpb.KeyValue) bool {
	return strings.HasPrefix(string(kv.Key), s.nodesPrefix())
}

// update turns the events of one answer into changes. Of several events of a
// key the last one counts.
func (s *Store) update(u *allocator.Update, nodes *registry.Update, events []*clientv3.Event) {
	last := make(map[string]*clientv3.Event, len(events))
	for _, e := range events {
		last[string(e.Kv.Key)] = e
	}
	for _, e := range events {
		if last[string(e.Kv.Key)] != e {
			continue
		}
		if s.isNode(e.Kv) {
			s.nodeUpdate(nodes, e.Kv, e.Type == clientv3.EventTypeDelete)
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
