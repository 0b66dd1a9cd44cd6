// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Collection removes identities that no node refers to. One node of the cluster collects.
type Collection struct {
	session *session.Session
	cfg     session.Config // of the session
	ids     identityKeys
	layout  *layout
}

func collectorKey(prefix string) string { return prefix + "/collector" }

// collects is a condition for transactions of the node of a session: they fail unless it is the collector.
func collects(cfg session.Config) clientv3.Cmp {
	return clientv3.Compare(clientv3.Value(collectorKey(cfg.Prefix)), "=", cfg.Node)
}

// Lead implements allocator.Store. It reads first, because every node calls it in every round, and each write is a
// proposal in etcd even if it changes nothing.
func (s *Collection) Lead(ctx context.Context) (bool, error) {
	lease, err := s.session.Lease()
	if err != nil {
		return false, err
	}
	key := collectorKey(s.cfg.Prefix)
	get, err := s.session.Get(ctx, "read collector", key)
	if err != nil {
		return false, err
	}
	var have *mvccpb.KeyValue
	if len(get.Kvs) > 0 {
		have = get.Kvs[0]
		if string(have.Value) != s.cfg.Node || clientv3.LeaseID(have.Lease) == lease {
			return string(have.Value) == s.cfg.Node, nil
		}
		// The key was written by the previous process, and would be deleted with that process's lease.
	}
	resp, err := s.session.Commit(ctx, "lead collection", s.session.Txn(ctx).If(session.Unchanged(key, have)).
		Then(clientv3.OpPut(key, s.cfg.Node, clientv3.WithLease(lease))))
	if err != nil {
		return false, err
	}
	return resp.Succeeded, nil
}

// FollowReferences implements allocator.Store.
func (s *Collection) FollowReferences(ctx context.Context, sink func(allocator.References)) error {
	prefix := s.ids.allReferences()
	var u allocator.References
	add := func(key []byte, by int) {
		node, number, ok := strings.Cut(strings.TrimPrefix(string(key), prefix), "/")
		n, err := parseNumber(number)
		if !ok || err != nil {
			return // the key is not a valid reference; the node that wrote it logs that
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

// maxOps is how many operations a transaction may have by etcd's default.
const maxOps = 128

// Candidates implements allocator.Store.
func (s *Collection) Candidates(ctx context.Context, ids []identity.Identity) ([]allocator.Candidate, error) {
	var out []allocator.Candidate
	for some := range slices.Chunk(ids, maxOps/2) {
		ops := make([]clientv3.Op, 0, maxOps)
		for _, id := range some {
			ops = append(ops,
				clientv3.OpGet(s.ids.labels(id.Labels), clientv3.WithKeysOnly()),
				clientv3.OpGet(s.ids.fence(id.Number), clientv3.WithKeysOnly()))
		}
		resp, err := s.session.Commit(ctx, "read fences", s.session.Txn(ctx).Then(ops...))
		if err != nil {
			return nil, err
		}
		for i, id := range some {
			c := allocator.Candidate{Identity: id}
			for _, r := range resp.Responses[2*i : 2*i+2] {
				for _, kv := range r.GetResponseRange().GetKvs() {
					c.Fence = max(c.Fence, kv.ModRevision)
				}
			}
			out = append(out, c)
		}
	}
	return out, nil
}

// collectSize is the number of identities that one transaction collects.
const collectSize = maxOps / 4

// Collect implements allocator.Store.
func (s *Collection) Collect(ctx context.Context, unused []allocator.Candidate, rest time.Duration) ([]identity.Numeric, error) {
	if len(unused) == 0 {
		return nil, nil
	}
	// The quarantine of all these numbers ends with one lease, which is not renewed.
	lease, err := s.session.Grant(ctx, max(rest, time.Second))
	if err != nil {
		return nil, err
	}
	var gone []identity.Numeric
	collect := func(some []allocator.Candidate) (ok bool, err error) {
		var conditions []clientv3.Cmp
		var ops []clientv3.Op
		for _, c := range some {
			n, l := c.Identity.Number, c.Identity.Labels
			conditions = append(conditions,
				clientv3.Compare(clientv3.ModRevision(s.ids.labels(l)), "<", c.Fence+1),
				clientv3.Compare(clientv3.ModRevision(s.ids.fence(n)), "<", c.Fence+1),
				clientv3.Compare(clientv3.Value(s.ids.id(n)), "=", l.Text()))
			ops = append(ops,
				clientv3.OpDelete(s.ids.labels(l)), clientv3.OpDelete(s.ids.fence(n)), clientv3.OpDelete(s.ids.id(n)),
				clientv3.OpPut(s.ids.quarantine(n), hashText(l), clientv3.WithLease(lease)))
		}
		resp, err := s.session.Commit(ctx, "collect identities", s.session.Txn(ctx).If(conditions...).Then(ops...))
		if err != nil {
			return false, err
		}
		if resp.Succeeded {
			for _, c := range some {
				gone = append(gone, c.Identity.Number)
			}
		}
		return resp.Succeeded, nil
	}
	for _, some := range chunks(unused, collectSize, func(c allocator.Candidate) int { return len(c.Identity.Labels.Text()) }) {
		ok, err := collect(some)
		if err != nil {
			return gone, err
		}
		if ok || len(some) == 1 {
			continue
		}
		// One of the candidates is in use again: collect them one by one.
		for i := range some {
			if _, err := collect(some[i : i+1]); err != nil {
				return gone, err
			}
		}
	}
	return gone, nil
}

// maxText is the maximum size of the label sets in one transaction, in bytes: etcd refuses requests of more than 1.5
// MiB.
const maxText = 512 << 10

// chunks divides a slice into pieces of at most n elements and maxText bytes.
func chunks[T any](all []T, n int, size func(T) int) [][]T {
	var out [][]T
	begin, bytes := 0, 0
	for i, x := range all {
		if i > begin && (i-begin == n || bytes+size(x) > maxText) {
			out = append(out, all[begin:i])
			begin, bytes = i, 0
		}
		bytes += size(x)
	}
	if begin < len(all) {
		out = append(out, all[begin:])
	}
	return out
}

// Tidy implements allocator.Store.
func (s *Collection) Tidy(ctx context.Context, references allocator.References) error {
	var old []*mvccpb.KeyValue
	strays := map[string]stray{}
	if _, err := s.session.List(ctx, s.ids.allLabels(), false, func(kv *mvccpb.KeyValue) {
		n, _, final, err := parseLabelsValue(kv)
		if err != nil {
			s.cfg.Log.Error("unreadable label set in etcd is ignored", log.Err(err))
			return
		}
		strays[string(kv.Key)] = stray{n, kv.ModRevision}
		if !final {
			old = append(old, kv)
		}
	}); err != nil {
		return err
	}
	if _, err := s.session.List(ctx, s.ids.fences(), true, func(kv *mvccpb.KeyValue) {
		if n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.ids.fences())); err == nil {
			strays[string(kv.Key)] = stray{n, kv.ModRevision}
		}
	}); err != nil {
		return err
	}
	if err := s.removeStrays(ctx, strays, references.Numbers); err != nil {
		return err
	}
	final, err := s.layout.finish(ctx, references.Nodes)
	if err != nil || !final {
		return err
	}
	return s.layout.convert(ctx, old)
}

// stray is a key that may belong to a number without id/.
type stray struct {
	number   identity.Numeric
	revision int64
}

// removeStrays deletes the keys of numbers without id/ and without references. Such keys remain if an operator deleted
// keys by hand, or if a node of layout 1 was the collector. It only deletes, which a full etcd allows.
func (s *Collection) removeStrays(ctx context.Context, keys map[string]stray, referred map[identity.Numeric]int) error {
	exists := map[identity.Numeric]bool{}
	if _, err := s.session.List(ctx, s.ids.all(), true, func(kv *mvccpb.KeyValue) {
		if n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.ids.all())); err == nil {
			exists[n] = true
		}
	}); err != nil {
		return err
	}
	for key, k := range keys {
		if exists[k.number] || referred[k.number] > 0 {
			continue
		}
		limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		resp, err := s.session.Commit(limited, "remove stray key", s.session.Txn(limited).If(
			clientv3.Compare(clientv3.ModRevision(key), "=", k.revision), session.Unchanged(s.ids.id(k.number), nil),
		).Then(clientv3.OpDelete(key)))
		cancel()
		if err != nil {
			return err
		}
		if resp.Succeeded {
			s.cfg.Log.Warn("removed a key from etcd whose identity does not exist", "key", key, "identity", k.number)
		}
	}
	return nil
}
