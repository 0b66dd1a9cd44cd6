// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// errGap: the watch cannot continue where it was; list again.
var errGap = errors.New("gap in the watch")

// Follow implements allocator.Store. The client resumes an interrupted watch
// by itself; what it cannot resume, because etcd compacted or lost the
// revisions between, becomes a new listing.
func (s *Store) Follow(ctx context.Context, sink func(allocator.Update)) error {
	reset := true // whatever the mirror has, it is not from this run's history
	for {
		s.mu.Lock()
		history := s.history
		s.mu.Unlock()
		u := allocator.Update{Complete: true, Reset: reset, Heard: time.Now()}
		revision, err := s.list(ctx, s.cfg.Prefix+"/id/", 0, false, func(kv *mvccpb.KeyValue) {
			if e, ok := s.entry(kv); ok {
				u.Upserts = append(u.Upserts, e)
			}
		})
		if errors.Is(err, rpctypes.ErrCompacted) {
			continue // compacted between two pages
		}
		if err != nil {
			return err
		}
		u.Revision = revision
		sink(u)
		err = s.watch(ctx, revision+1, history, sink)
		if !errors.Is(err, errGap) {
			return err
		}
		s.mu.Lock()
		reset = history != s.history
		s.mu.Unlock()
	}
}

func (s *Store) watch(ctx context.Context, from int64, history <-chan struct{}, sink func(allocator.Update)) error {
	// The context ends the watch on the server too.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := s.client.Watch(ctx, s.cfg.Prefix+"/id/", clientv3.WithPrefix(), clientv3.WithRev(from))
	heads := make(chan head, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.listen(ctx, heads) })
	var awaited head // everything up to it makes the mirror complete as of its time
	for {
		select {
		case <-history:
			return errGap
		case awaited = <-heads:
			if awaited.revision < from {
				sink(allocator.Update{Heard: awaited.asked})
				awaited = head{}
			}
		case resp, ok := <-events:
			switch {
			case resp.CompactRevision != 0:
				s.cfg.Log.Info("etcd compacted what was not seen yet; listing again", "from", from, "compacted", resp.CompactRevision)
				return errGap
			case resp.Err() != nil:
				return s.fault(ctx, "watch identities", resp.Err())
			case !ok && ctx.Err() != nil:
				return ctx.Err()
			case !ok:
				return fmt.Errorf("watch identities: %w: the watch ended", allocator.ErrUnavailable)
			}
			u := s.update(resp.Events)
			switch {
			case resp.IsProgressNotify():
				from = max(from, resp.Header.Revision+1)
			case len(resp.Events) > 0:
				// Others of the answer's revision may still come.
				from = max(from, resp.Events[len(resp.Events)-1].Kv.ModRevision)
			}
			if awaited.revision != 0 && awaited.revision < from {
				u.Heard, awaited = awaited.asked, head{}
			}
			if len(u.Upserts)+len(u.Deletes) > 0 || !u.Heard.IsZero() {
				sink(u)
			}
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
	resp, err := s.client.Get(ctx, s.cfg.Prefix+"/collector", clientv3.WithKeysOnly())
	if err != nil {
		return 0, s.fault(ctx, "read revision", err)
	}
	s.saw(resp.Header)
	return resp.Header.Revision, nil
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
