// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// position is the newest revision of etcd that this process has seen.
type position struct {
	history  uint64 // incremented when etcd turns out to have another history
	cluster  uint64
	revision int64
}

func (s *Session) position() position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pos
}

// errHistory: etcd's history differs from the one that this process saw, because its data was restored from an older
// state or belongs to another cluster. All data of this process is then invalid, so it is an ErrSessionLost.
var errHistory = fmt.Errorf("etcd has another history than before: %w", cluster.ErrSessionLost)

// saw compares the response to a linearised request with etcd's position when the request was sent. Leases prove
// nothing, because a backup contains them, too. A watch would silently wait for revisions that etcd has not reached
// yet, and deliver other changes under the same revisions.
func (s *Session) saw(before position, h *etcdserverpb.ResponseHeader) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before.history != s.pos.history {
		return errHistory // The answer comes from an older state, or is for a session that has ended.
	}
	if before.cluster != 0 && (before.cluster != h.GetClusterId() || h.GetRevision() < before.revision) {
		return s.leavePast(before, h, "")
	}
	s.pos.cluster = h.GetClusterId()
	s.pos.revision = max(s.pos.revision, h.GetRevision())
	return nil
}

// leavePast is called when etcd's history has changed. It ends the session and everything else that depends on the
// former history, and returns errHistory. key is the key that revealed the change; empty: the cluster ID or the
// revision did. Called with mu held.
func (s *Session) leavePast(before position, h *etcdserverpb.ResponseHeader, key string) error {
	s.cfg.Log.Error("etcd went back to an older state, lost its data, is another cluster, or has compacted what this "+
		"node saw; everything is read again and held identities are claimed again", "key", key,
		"cluster", fmt.Sprintf("%x", h.GetClusterId()), "revision", h.GetRevision(),
		"was_cluster", fmt.Sprintf("%x", before.cluster), "was_revision", before.revision)
	s.pos = position{history: s.pos.history + 1, cluster: h.GetClusterId(), revision: h.GetRevision()}
	s.leave()
	s.last = 0 // The lease of the former history may still have references written there.
	s.witness = witness{}
	close(s.history)
	s.history = make(chan struct{})
	return errHistory
}

// witness is a key by which a session recognises etcd's history. The cluster ID is not sufficient: a cluster that lost
// its data has the same ID if its members are the same, and a restored cluster may have any ID. Neither is the
// revision: while this node is disconnected, other nodes may write more revisions than were lost.
type witness struct {
	proven cluster.Key // a key that etcd had when the name was last read, or the first key; without Name: none yet
	newest cluster.Key // the newest key that this process wrote or Follow received
	// Deletions that Follow received prove the history, too: if etcd loses its newest changes, deleted keys return.
	provenGone, newestGone cluster.Removed
}

// deleted records the newest deletion that Follow received in the current history. Called with mu held.
func (s *Session) deleted(kv *mvccpb.KeyValue) {
	if kv.ModRevision <= s.witness.newestGone.Revision {
		return
	}
	s.witness.newestGone = cluster.Removed{Name: string(kv.Key), Revision: kv.ModRevision}
	if s.witness.provenGone.Name == "" {
		s.witness.provenGone = s.witness.newestGone
	}
}

// gone returns the keys that etcd must not have as they were before their deletion.
func (w witness) gone() []cluster.Removed {
	switch {
	case w.provenGone.Name == "":
		return nil
	case w.newestGone == w.provenGone:
		return []cluster.Removed{w.provenGone}
	}
	return []cluster.Removed{w.provenGone, w.newestGone}
}

// received records the newest key that this process wrote or Follow received in the current history. Called with mu
// held.
func (s *Session) received(kv *mvccpb.KeyValue) {
	if kv.ModRevision <= s.witness.newest.Modified {
		return
	}
	s.witness.newest = keyOf(kv)
	if s.witness.proven.Name == "" {
		s.witness.proven = s.witness.newest // later keys may belong to another history
	}
}

// keys returns the keys that etcd's history must contain. The newest key may already be of another history, if the
// connection was lost and the name was not read since; the proven key is not.
func (w witness) keys() []cluster.Key {
	switch {
	case w.proven.Name == "":
		return nil
	case w.newest.Modified == w.proven.Modified:
		return []cluster.Key{w.proven}
	}
	return []cluster.Key{w.proven, w.newest}
}

// readName reads alive/<node> and, in the same request, the witness of etcd's history. It returns nil if the name is
// free.
func (s *Session) readName(ctx context.Context) (*mvccpb.KeyValue, error) {
	s.mu.Lock()
	before, w := s.pos, s.witness
	s.mu.Unlock()
	ops := []clientv3.Op{clientv3.OpGet(s.aliveKey())}
	for _, k := range w.keys() {
		ops = append(ops, clientv3.OpGet(k.Name))
	}
	for _, k := range w.gone() {
		ops = append(ops, clientv3.OpGet(k.Name))
	}
	resp, err := s.Commit(ctx, "read name", s.client.Txn(ctx).Then(ops...))
	if err != nil {
		return nil, err
	}
	changed := false
	for i, k := range w.keys() {
		if isKey(k, resp.Responses[1+i].GetResponseRange().GetKvs()) {
			continue
		}
		same, err := s.remembers(ctx, k)
		if err != nil {
			return nil, err
		}
		if !same {
			return nil, fmt.Errorf("read name: %w", s.lacks(before, resp.Header, k.Name))
		}
		changed = true
	}
	for i, k := range w.gone() {
		if isBack(k, resp.Responses[1+len(w.keys())+i].GetResponseRange().GetKvs()) {
			return nil, fmt.Errorf("read name: %w", s.lacks(before, resp.Header, k.Name))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pos.history != before.history {
		return nil, fmt.Errorf("read name: %w", errHistory)
	}
	kvs := resp.Responses[0].GetResponseRange().GetKvs()
	if len(kvs) == 0 {
		return nil, nil
	}
	s.witness.proven, s.witness.provenGone = w.newest, w.newestGone
	if changed { // After a compaction of its revision, no answer could show any more that the key existed.
		s.witness.proven = keyOf(kvs[0])
		if s.witness.newest.Modified == w.newest.Modified {
			s.witness.newest = s.witness.proven
		}
	}
	return kvs[0], nil
}

// lacks ends everything that depends on the history that this process saw, because etcd lacks one of its keys, or has a
// key that was deleted in it.
func (s *Session) lacks(before position, h *etcdserverpb.ResponseHeader, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pos.history != before.history {
		return errHistory // another request has already noticed the change
	}
	return s.leavePast(before, h, key)
}

func keyOf(kv *mvccpb.KeyValue) cluster.Key {
	return cluster.Key{Name: string(kv.Key), Value: kv.Value, Modified: kv.ModRevision}
}

// isKey reports whether an answer contains a key with unchanged value and revision.
func isKey(k cluster.Key, kvs []*mvccpb.KeyValue) bool {
	return len(kvs) == 1 && kvs[0].ModRevision == k.Modified && bytes.Equal(kvs[0].Value, k.Value)
}

// isBack reports whether a response contains a deleted key as it was before its deletion. A key that was created later
// under that name does not count.
func isBack(k cluster.Removed, kvs []*mvccpb.KeyValue) bool {
	return len(kvs) > 0 && kvs[0].ModRevision < k.Revision
}

// Get reads a key, linearised. Errors contain the text in what.
func (s *Session) Get(ctx context.Context, what, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	before := s.position()
	resp, err := s.client.Get(ctx, key, opts...)
	if err != nil {
		return nil, s.Fault(ctx, what, err)
	}
	if err := s.saw(before, resp.Header); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return resp, nil
}

// Txn returns an empty transaction. The caller adds conditions and operations and passes it to Commit.
func (s *Session) Txn(ctx context.Context) clientv3.Txn { return s.client.Txn(ctx) }

// Commit runs a transaction. Errors contain the text in what.
func (s *Session) Commit(ctx context.Context, what string, txn clientv3.Txn) (*clientv3.TxnResponse, error) {
	before := s.position()
	resp, err := txn.Commit()
	if err != nil {
		return nil, s.Fault(ctx, what, err)
	}
	if err := s.saw(before, resp.Header); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return resp, nil
}

// Fault converts an error of the client to an error of package cluster.
func (s *Session) Fault(ctx context.Context, what string, err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		s.mu.Lock()
		s.leave()
		s.mu.Unlock()
		return fmt.Errorf("%s: %w: %w", what, cluster.ErrSessionLost, err)
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%s: %w: %w", what, cluster.ErrNoSpace, err)
	case errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case errors.Is(err, rpctypes.ErrRequestTooLarge), errors.Is(err, rpctypes.ErrTooManyOps), status.Code(err) == codes.InvalidArgument:
		return fmt.Errorf("%s: %w", what, err)
	}
	if failure := s.tls.failure(); failure != nil {
		return fmt.Errorf("%s: %w: %w; %w", what, cluster.ErrUnavailable, err, failure)
	}
	if why := s.why(ctx); why != nil {
		// The client tries to connect until the deadline, and its error only reports the deadline.
		return fmt.Errorf("%s: %w: %w", what, cluster.ErrUnavailable, why)
	}
	return fmt.Errorf("%s: %w: %w", what, cluster.ErrUnavailable, err)
}

// Number of keys in one page of a listing. For each page, etcd counts all remaining keys, so many small pages take
// quadratic time. Keys without values are short enough for large pages.
const (
	pageSize = 1000
	keysSize = 10_000
)

// List passes every key below a prefix to f, all as of one revision, which it returns. Each page has its own deadline,
// the configured timeout.
func (s *Session) List(ctx context.Context, prefix string, keysOnly bool, f func(*mvccpb.KeyValue)) (cluster.Point, error) {
	return s.list(ctx, prefix, clientv3.GetPrefixRangeEnd(prefix), keysOnly, f)
}

func (s *Session) list(ctx context.Context, prefix, end string, keysOnly bool, f func(*mvccpb.KeyValue)) (at cluster.Point,
	err error,
) {
	from := prefix
	for {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(at.Revision)}
		if keysOnly {
			opts = append(opts, clientv3.WithKeysOnly(), clientv3.WithLimit(keysSize))
		}
		page, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		resp, err := s.Get(page, "list "+prefix, from, opts...)
		cancel()
		if err != nil {
			return cluster.Point{}, err
		}
		if at.Revision == 0 {
			at = cluster.Point{Cluster: resp.Header.ClusterId, Revision: resp.Header.Revision}
		}
		for _, kv := range resp.Kvs {
			f(kv)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return at, nil
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// Unchanged returns the condition that a key is unchanged since it was read; nil: that it does not exist.
func Unchanged(key string, kv *mvccpb.KeyValue) clientv3.Cmp {
	var revision int64 // the revision that etcd reports for a missing key
	if kv != nil {
		revision = kv.ModRevision
	}
	return clientv3.Compare(clientv3.ModRevision(key), "=", revision)
}

// History returns a channel that is closed when etcd's history differs from the one that this process saw: all data
// read before is then invalid.
func (s *Session) History() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history
}
