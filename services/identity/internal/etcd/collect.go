// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"path"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/identity"
)

// Lead implements allocator.Store.
func (s *Store) Lead(ctx context.Context) (bool, error) {
	lease, err := s.session()
	if err != nil {
		return false, err
	}
	key := s.cfg.Prefix + "/collector"
	put := clientv3.OpPut(key, s.cfg.Node, clientv3.WithLease(lease))
	resp, err := s.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(put).Else(clientv3.OpGet(key)).Commit()
	if err != nil {
		return false, s.fault(ctx, "lead collection", err)
	}
	s.saw(resp.Header)
	if resp.Succeeded {
		return true, nil
	}
	kvs := resp.Responses[0].GetResponseRange().GetKvs()
	if len(kvs) == 0 || string(kvs[0].Value) != s.cfg.Node {
		return false, nil
	}
	if clientv3.LeaseID(kvs[0].Lease) == lease {
		return true, nil
	}
	// Of the process before; it would go with that one's lease.
	resp, err = s.client.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "=", kvs[0].ModRevision)).
		Then(put).Commit()
	if err != nil {
		return false, s.fault(ctx, "lead collection", err)
	}
	return resp.Succeeded, nil
}

// Unreferenced implements allocator.Store. Everything is read as of one revision.
func (s *Store) Unreferenced(ctx context.Context) ([]allocator.Candidate, error) {
	used := map[string]bool{}
	revision, err := s.list(ctx, s.cfg.Prefix+"/ref/", 0, true, func(kv *mvccpb.KeyValue) {
		used[path.Base(string(kv.Key))] = true
	})
	if err != nil {
		return nil, err
	}
	var unused []allocator.Candidate
	_, err = s.list(ctx, s.cfg.Prefix+"/labels/", revision, false, func(kv *mvccpb.KeyValue) {
		n, text, err := parseLabelsValue(kv)
		if err != nil {
			s.cfg.Log.Error("unreadable label set in etcd is ignored", log.Err(err))
			return
		}
		if used[path.Base(s.idKey(n))] {
			return
		}
		labels, err := identity.ParseLabels(text)
		if err != nil {
			s.cfg.Log.Error("unreadable label set in etcd is ignored", "key", string(kv.Key), log.Err(err))
			return
		}
		unused = append(unused, allocator.Candidate{
			Identity: identity.Identity{Number: n, Labels: labels},
			Fence:    kv.ModRevision,
		})
	})
	return unused, err
}

// Collect implements allocator.Store.
func (s *Store) Collect(ctx context.Context, unused []allocator.Candidate, rest time.Duration) ([]identity.Numeric, error) {
	if len(unused) == 0 {
		return nil, nil
	}
	// One lease ends the rest of all; it is nobody's to keep alive.
	lease, err := s.client.Grant(ctx, max(1, int64((rest+time.Second-1)/time.Second)))
	if err != nil {
		return nil, s.fault(ctx, "grant lease of resting numbers", err)
	}
	var gone []identity.Numeric
	for _, c := range unused {
		n, l := c.Identity.Number, c.Identity.Labels
		resp, err := s.client.Txn(ctx).If(
			clientv3.Compare(clientv3.ModRevision(s.labelsKey(l)), "=", c.Fence),
			clientv3.Compare(clientv3.Value(s.idKey(n)), "=", l.Text()),
		).Then(
			clientv3.OpDelete(s.labelsKey(l)),
			clientv3.OpDelete(s.idKey(n)),
			clientv3.OpPut(s.restKey(n), hashText(l), clientv3.WithLease(lease.ID)),
		).Commit()
		if err != nil {
			return gone, s.fault(ctx, "collect identity", err)
		}
		s.saw(resp.Header)
		if resp.Succeeded {
			gone = append(gone, n)
		}
	}
	return gone, nil
}
