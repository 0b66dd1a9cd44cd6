// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// errGap: the watch cannot continue where it was; list again.
var errGap = errors.New("gap in the watch")

// Reader takes what Follow brings of one prefix. Its functions are called one
// at a time.
type Reader struct {
	Prefix   string
	End      string // first key that is not wanted; "": the first one after the prefix
	KeysOnly bool
	Begin    func()                          // a listing begins
	Listed   func(*mvccpb.KeyValue)          // a key of the listing
	Complete func(at Point, asked time.Time) // the listing is over; it began at that time
	// Changes are the events up to a revision of the listing's cluster, perhaps none. asked is not zero
	// if everything up to then has come.
	Changes func(events []*clientv3.Event, revision int64, asked time.Time)
}

func (r Reader) end() string { return cmp.Or(r.End, clientv3.GetPrefixRangeEnd(r.Prefix)) }

// Follow lists a prefix, watches it from there, and returns only with an error
// of the listing or when ctx is done. An interrupted watch continues where it
// was; only what etcd compacted, or lost with its history, is listed again.
func (s *Session) Follow(ctx context.Context, r Reader) error {
	for {
		history := s.History()
		asked := time.Now()
		r.Begin()
		at, err := s.list(ctx, r.Prefix, r.end(), r.KeysOnly, r.Listed)
		if errors.Is(err, rpctypes.ErrCompacted) {
			continue // compacted between two pages
		}
		if errors.Is(err, errHistory) {
			continue // noticed by this very listing
		}
		if err != nil {
			return err
		}
		r.Complete(at, asked)
		var wait time.Duration
		for next := at.Revision + 1; ; {
			began := time.Now()
			next, err = s.watch(ctx, r, next, history)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if errors.Is(err, errGap) {
				break
			}
			s.cfg.Log.Debug("watching goes on where it was", "prefix", r.Prefix, "revision", next, log.Err(err))
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
	select {
	case <-time.After(*d/2 + rand.N(*d)):
	case <-ctx.Done():
	}
}

// watch returns the revision at which the next watch goes on.
func (s *Session) watch(ctx context.Context, r Reader, next int64, history <-chan struct{}) (int64, error) {
	// The context ends the watch on the server too.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	// A stream of its own, which the client tells by the metadata: etcd reports
	// the progress of a stream only when all its watches are at a revision that
	// it has reached (3.6), and another's may begin at the next one.
	ctx = metadata.AppendToOutgoingContext(ctx, "sluice-watch", r.Prefix)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	// Progress notifications move the revision on although nothing changes
	// here, so that a compaction finds nothing that was not seen.
	events := s.client.Watch(ctx, r.Prefix, clientv3.WithRange(r.end()), clientv3.WithRev(next),
		clientv3.WithProgressNotify())
	heads := make(chan head, 1)
	wg.Go(func() { s.listen(ctx, heads) })
	var awaited head // everything up to its revision was there at its time
	for {
		select {
		case <-history:
			return next, errGap
		case awaited = <-heads:
			if awaited.revision < next {
				r.Changes(nil, next-1, awaited.asked)
				awaited = head{}
			}
		case resp, ok := <-events:
			switch {
			case resp.CompactRevision != 0:
				s.cfg.Log.Info("etcd compacted what was not seen yet; listing again", "prefix", r.Prefix, "from", next, "compacted", resp.CompactRevision)
				return next, errGap
			case resp.Err() != nil:
				return next, s.Fault(ctx, "watch "+r.Prefix, resp.Err())
			case !ok:
				return next, fmt.Errorf("watch %s: %w: the watch ended", r.Prefix, cluster.ErrUnavailable)
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
			r.Changes(resp.Events, next-1, asked)
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
func (s *Session) listen(ctx context.Context, heads chan<- head) {
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
func (s *Session) head(ctx context.Context) (int64, error) {
	resp, err := s.Get(ctx, "read revision", s.aliveKey(), clientv3.WithKeysOnly())
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}
