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

// errGap: the watch cannot continue from its revision, and the keys must be listed again.
var errGap = errors.New("gap in the watch")

// Reader receives the keys of one prefix from Follow. Its functions are called one at a time.
type Reader struct {
	Prefix   string
	End      string // first key that is not wanted; "": the first one after the prefix
	KeysOnly bool
	// From is the point up to which the reader has all changes. If etcd's history contains it, Follow calls Resumed and
	// watches from there. Otherwise, or if its revision is 0, Follow lists all keys.
	From    cluster.Point
	Witness cluster.Key // a key that etcd has at From: the one written last; without a name, it is not compared
	// Gone is the newest deletion up to From. An etcd that lost this deletion has the key again. Not used if it has no
	// name.
	Gone    cluster.Removed
	Resumed func()
	// Spread is called before a listing. It returns the maximum random delay of the listing, so that not all nodes list
	// at the same time. Nil: no delay.
	Spread   func() time.Duration
	Begin    func()                                  // a listing begins
	Listed   func(*mvccpb.KeyValue)                  // a key of the listing
	Complete func(at cluster.Point, asked time.Time) // the listing is over; it began at that time
	// Changes receives the events up to a revision of the listing's cluster, which may be none. If asked is not zero,
	// all changes up to that time have been delivered.
	Changes func(events []*clientv3.Event, revision int64, asked time.Time)
}

func (r Reader) end() string { return cmp.Or(r.End, clientv3.GetPrefixRangeEnd(r.Prefix)) }

// Follow watches a prefix from the reader's point, or lists the prefix and then watches it. It returns only with an
// error before the watch begins, or when ctx is done. An interrupted watch continues from its last revision. Keys are
// listed again only if etcd has compacted these revisions or lost its history.
func (s *Session) Follow(ctx context.Context, r Reader) error {
	for resume := r.From.Revision != 0; ; resume = false {
		history := s.History()
		at := r.From
		var err error
		if resume {
			resume, err = s.resume(ctx, r)
		}
		if err == nil && !resume {
			at, err = s.listAll(ctx, r, history)
		}
		if errors.Is(err, rpctypes.ErrCompacted) {
			continue // compacted between two pages
		}
		if errors.Is(err, errHistory) {
			continue // the request itself has noticed the other history
		}
		if err != nil {
			return err
		}
		if err := s.watchFrom(ctx, r, at.Revision+1, history); err != nil {
			return err
		}
	}
}

// resume asks etcd whether its history contains the reader's point. This needs a linearised read: a watch from a
// revision that etcd has not reached receives nothing.
func (s *Session) resume(ctx context.Context, r Reader) (bool, error) {
	limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	at, err := s.head(limited)
	if err != nil {
		return false, err
	}
	past := at.Cluster == r.From.Cluster && at.Revision >= r.From.Revision
	if past && r.Witness.Name != "" {
		if past, err = s.remembers(limited, r.Witness); err != nil {
			return false, err
		}
	}
	if past && r.Gone.Name != "" {
		if past, err = s.lacksSince(limited, r.Gone); err != nil {
			return false, err
		}
	}
	if !past {
		s.cfg.Log.Info("etcd may have another history than what was saved; listing", "prefix", r.Prefix,
			"cluster", fmt.Sprintf("%x", at.Cluster), "revision", at.Revision, "saved_cluster",
			fmt.Sprintf("%x", r.From.Cluster), "saved_revision", r.From.Revision, "saved_key", r.Witness.Name,
			"saved_deletion", r.Gone.Name)
		return false, nil
	}
	s.cfg.Log.Info("continuing where the previous process stopped",
		"prefix", r.Prefix, "revision", r.From.Revision, "head", at.Revision)
	r.Resumed()
	return true, nil
}

// remembers reports whether etcd's history contains a key as it was saved. A cluster that was restored from a backup
// may have passed the saved revision since. The result is false if the key was changed and its history was compacted.
func (s *Session) remembers(ctx context.Context, k cluster.Key) (bool, error) {
	now, err := s.Get(ctx, "read "+k.Name, k.Name)
	if err != nil || isKey(k, now.Kvs) {
		return err == nil, err
	}
	then, err := s.Get(ctx, "read "+k.Name, k.Name, clientv3.WithRev(k.Modified))
	if errors.Is(err, rpctypes.ErrCompacted) {
		return false, nil
	}
	return err == nil && isKey(k, then.Kvs), err
}

// lacksSince reports whether etcd still lacks a deleted key.
func (s *Session) lacksSince(ctx context.Context, gone cluster.Removed) (bool, error) {
	now, err := s.Get(ctx, "read "+gone.Name, gone.Name)
	return err == nil && !isBack(gone, now.Kvs), err
}

// listAll passes all keys of the prefix to the reader.
func (s *Session) listAll(ctx context.Context, r Reader, history <-chan struct{}) (cluster.Point, error) {
	if r.Spread != nil {
		if most := r.Spread(); most > 0 {
			wait := rand.N(most)
			s.cfg.Log.Info("delaying the listing, so that nodes do not list at the same time", "prefix", r.Prefix,
				"in", wait, "at_most", most)
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return cluster.Point{}, ctx.Err()
			}
		}
	}
	asked := time.Now()
	r.Begin()
	listed := r.Listed
	if !r.KeysOnly {
		listed = func(kv *mvccpb.KeyValue) {
			s.follows(history, kv)
			r.Listed(kv)
		}
	}
	at, err := s.list(ctx, r.Prefix, r.end(), r.KeysOnly, listed)
	if err == nil {
		r.Complete(at, asked)
	}
	return at, err
}

// follows records a key that was received in a history.
func (s *Session) follows(history <-chan struct{}, kv *mvccpb.KeyValue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if history == s.history {
		s.received(kv)
	}
}

// followsDeletion records a deletion that was received in a history.
func (s *Session) followsDeletion(history <-chan struct{}, kv *mvccpb.KeyValue) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if history == s.history {
		s.deleted(kv)
	}
}

// watchFrom watches until ctx is done, which is its error, or until there is a gap.
func (s *Session) watchFrom(ctx context.Context, r Reader, next int64, history <-chan struct{}) (err error) {
	var wait time.Duration
	for {
		began := time.Now()
		next, err = s.watch(ctx, r, next, history)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, errGap) {
			return nil
		}
		s.cfg.Log.Debug("the watch continues at the saved revision", "prefix", r.Prefix, "revision", next, log.Err(err))
		if time.Since(began) > maxPause {
			wait = 0
		}
		pause(ctx, &wait)
	}
}

// maxPause is the longest pause between two attempts to watch.
const maxPause = 2 * time.Second

// pause waits for a random time around *d, which doubles with each call up to maxPause, so that nodes do not retry at
// the same time.
func pause(ctx context.Context, d *time.Duration) {
	*d = min(max(2**d, maxPause/20), maxPause)
	select {
	case <-time.After(*d/2 + rand.N(*d)):
	case <-ctx.Done():
	}
}

// watch watches once, and returns the revision at which the next watch continues.
func (s *Session) watch(ctx context.Context, r Reader, next int64, history <-chan struct{}) (int64, error) {
	// Cancelling the context ends the watch on the server, too.
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	// The metadata gives this watch its own stream. etcd reports the progress of a stream only if all its watches are
	// at a revision that it has reached (3.6), and another watch may begin at the next revision.
	ctx = metadata.AppendToOutgoingContext(ctx, "sluice-watch", r.Prefix)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	// Progress notifications advance the revision even if no key of the prefix changes. Otherwise, the watch would fall
	// behind and a compaction could remove revisions that it has not received.
	events := s.client.Watch(ctx, r.Prefix, clientv3.WithRange(r.end()), clientv3.WithRev(next),
		clientv3.WithProgressNotify())
	heads := make(chan head, 1)
	wg.Go(func() { s.listen(ctx, heads) })
	var awaited head // when the watch reaches this revision, all changes up to its time were delivered
	for {
		select {
		case <-ctx.Done(): // while etcd is unavailable, the client may not end the watch
			return next, ctx.Err()
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
				s.cfg.Log.Info("etcd compacted unseen changes; listing again", "prefix", r.Prefix, "from", next, "compacted",
					resp.CompactRevision)
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
				// All events of one revision are in one response.
				next = max(next, resp.Events[len(resp.Events)-1].Kv.ModRevision+1)
				for _, e := range resp.Events {
					if e.IsCreate() || e.IsModify() {
						s.follows(history, e.Kv)
					} else {
						s.followsDeletion(history, e.Kv)
					}
				}
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

// head is etcd's revision at the time of a request.
type head struct {
	asked    time.Time
	revision int64
}

// listen regularly asks etcd for its revision, and makes the watch report that it has delivered all changes up to
// there. This distinguishes a watch without changes from one that is cut off.
func (s *Session) listen(ctx context.Context, heads chan<- head) {
	tick := time.NewTicker(s.cfg.Listen)
	defer tick.Stop()
	for first := true; ; first = false {
		if !first { // without a first pause: a resumed reader needs the answer soon
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
		asked := time.Now()
		limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		at, err := s.head(limited)
		if err == nil {
			select {
			case heads <- head{asked: asked, revision: at.Revision}:
				err = s.client.RequestProgress(limited)
			default: // the watch has not taken the previous revision yet
			}
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			s.cfg.Log.Debug("asking etcd for its revision", log.Err(err))
		}
	}
}

// head reads etcd's revision. This needs a linearised read.
func (s *Session) head(ctx context.Context) (cluster.Point, error) {
	resp, err := s.Get(ctx, "read revision", s.aliveKey(), clientv3.WithKeysOnly())
	if err != nil {
		return cluster.Point{}, err
	}
	return cluster.Point{Cluster: resp.Header.ClusterId, Revision: resp.Header.Revision}, nil
}
