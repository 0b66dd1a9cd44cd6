// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// errGap: the watch cannot continue where it was; list again.
var errGap = errors.New("gap in the watch")

// reader takes what follow brings of one prefix. Its functions are called one
// at a time.
type reader struct {
	prefix   string
	keysOnly bool
	begin    func()                                // a listing begins
	listed   func(*mvccpb.KeyValue)                // a key of the listing
	complete func(revision int64, asked time.Time) // the listing is over; it began at that time
	// changes are the events up to a revision, perhaps none. asked is not zero
	// if everything up to then has come.
	changes func(events []*clientv3.Event, revision int64, asked time.Time)
}

// follow lists a prefix, watches it from there, and returns only with an error
// of the listing or when ctx is done. An interrupted watch continues where it
// was; only what etcd compacted, or lost with its history, is listed again.
func (s *Store) follow(ctx context.Context, r reader) error {
	for {
		s.mu.Lock()
		history := s.history
		s.mu.Unlock()
		asked := time.Now()
		r.begin()
		revision, err := s.list(ctx, r.prefix, r.keysOnly, r.listed)
		if errors.Is(err, rpctypes.ErrCompacted) {
			continue // compacted between two pages
		}
		if errors.Is(err, errHistory) {
			continue // noticed by this very listing
		}
		if err != nil {
			return err
		}
		r.complete(revision, asked)
		var wait time.Duration
		for next := revision + 1; ; {
			began := time.Now()
			next, err = s.watch(ctx, r, next, history)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if errors.Is(err, errGap) {
				break
			}
			s.cfg.Log.Debug("watching goes on where it was", "prefix", r.prefix, "revision", next, log.Err(err))
			if time.Since(began) > maxPause {
				wait = 0
			}
			pause(ctx, &wait)
		}
	}
}

// maxPause is the longest pause between two attempts to watch.
const maxPause = 2 * time.Second

// pause waits longer each time, up to maxPause, and never as long as the other
// nodes do.
func pause(ctx context.Context, d *time.Duration) {
	*d = min(max(2**d, maxPause/20), maxPause)
	t := time.NewTimer(*d/2 + rand.N(*d))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// watch returns the revision at which the next watch goes on.
func (s *Store) watch(ctx context.Context, r reader, next int64, history <-chan struct{}) (int64, error) {
	// The context ends the watch on the server too.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	// A stream of its own, which the client tells by the metadata: etcd reports
	// the progress of a stream only when all its watches are at a revision that
	// it has reached (3.6), and another's may begin at the next one.
	ctx = metadata.AppendToOutgoingContext(ctx, "sluice-watch", r.prefix)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	// Progress notifications move the revision on although nothing changes
	// here, so that a compaction finds nothing that was not seen.
	events := s.client.Watch(ctx, r.prefix, clientv3.WithPrefix(), clientv3.WithRev(next), clientv3.WithProgressNotify())
	heads := make(chan head, 1)
	wg.Go(func() { s.listen(ctx, heads) })
	var awaited head // everything up to its revision was there at its time
	for {
		select {
		case <-history:
			return next, errGap
		case awaited = <-heads:
			if awaited.revision < next {
				r.changes(nil, next-1, awaited.asked)
				awaited = head{}
			}
		case resp, ok := <-events:
			switch {
			case resp.CompactRevision != 0:
				s.cfg.Log.Info("etcd compacted what was not seen yet; listing again", "prefix", r.prefix, "from", next, "compacted", resp.CompactRevision)
				return next, errGap
			case resp.Err() != nil:
				return next, s.fault(ctx, "watch "+r.prefix, resp.Err())
			case !ok:
				return next, fmt.Errorf("watch %s: %w: the watch ended", r.prefix, allocator.ErrUnavailable)
			}
			switch {
			case resp.IsProgressNotify():
				next = max(next, resp.Header.Revision+1)
			case len(resp.Events) > 0:
				// The events of one revision come in one answer.
				next = max(next, resp.Events[len(resp.Events)-1].Kv.ModRevision+1)
			default:
				continue
			}
			var asked time.Time
			if awaited.revision != 0 && awaited.revision < next {
				asked, awaited = awaited.asked, head{}
			}
			r.changes(resp.Events, next-1, asked)
		}
	}
}

// head is the revision that etcd had when it was asked.
type head struct {
	asked    time.Time
	revision int64
}

// listen asks etcd for its revision again and again, and to tell the watch that
// it has brought everything up to there. A watch that brings nothing may have
// nothing to bring, or may be cut off: only this tells the two apart.
func (s *Store) listen(ctx context.Context, heads chan<- head) {
	tick := time.NewTicker(s.cfg.Listen)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asked := time.Now()
		limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		revision, err := s.head(limited)
		if err == nil {
			select {
			case heads <- head{asked: asked, revision: revision}:
				err = s.client.RequestProgress(limited)
			default: // the one before was not looked at yet
			}
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			s.cfg.Log.Debug("asking etcd for its revision", log.Err(err))
		}
	}
}

// head reads the revision that etcd has. Only a linearised read tells.
func (s *Store) head(ctx context.Context) (int64, error) {
	resp, err := s.get(ctx, "read revision", s.collectorKey(), clientv3.WithKeysOnly())
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}

// Follow implements allocator.Store.
func (s *Store) Follow(ctx context.Context, sink func(allocator.Update)) error {
	var u allocator.Update
	var of, now <-chan struct{} // the history that the mirror is of, and that of the listing
	return s.follow(ctx, reader{
		prefix: s.cfg.Prefix + "/id/",
		begin: func() {
			s.mu.Lock()
			now = s.history
			s.mu.Unlock()
			u = allocator.Update{Complete: true}
		},
		listed: func(kv *mvccpb.KeyValue) {
			if e, ok := s.entry(kv); ok {
				u.Upserts = append(u.Upserts, e)
			}
		},
		complete: func(revision int64, asked time.Time) {
			// What the mirror had before is not from this run's history.
			u.Revision, u.Heard, u.Reset = revision, asked, of != now
			of = now
			sink(u)
			u = allocator.Update{}
		},
		changes: func(events []*clientv3.Event, _ int64, asked time.Time) {
			u := s.update(events)
			u.Heard = asked
			if len(u.Upserts)+len(u.Deletes) > 0 || !u.Heard.IsZero() {
				sink(u)
			}
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
	return s.follow(ctx, reader{
		prefix: prefix, keysOnly: true,
		begin:  func() { start(true) },
		listed: func(kv *mvccpb.KeyValue) { add(kv.Key, 1) },
		complete: func(revision int64, _ time.Time) {
			u.Revision = revision
			sink(u)
		},
		changes: func(events []*clientv3.Event, revision int64, _ time.Time) {
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
