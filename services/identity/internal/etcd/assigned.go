// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Assign implements registry.Store.
func (s *Nodes) Assign(ctx context.Context, put []registry.AssignmentKey, drop []string) error {
	var ops []clientv3.Op
	for _, k := range put {
		ops = append(ops, clientv3.OpPut(s.keys.assignment(k.Node), toJSON(k.Assignment)))
	}
	for _, node := range drop {
		ops = append(ops, clientv3.OpDelete(s.keys.assignment(node)))
	}
	ops = append(ops, clientv3.OpPut(s.keys.allAssigned(), "1"))
	for len(ops) > 0 {
		n := min(len(ops), maxOps)
		limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		_, err := s.session.Commit(limited, "write the ranges that are assigned to nodes",
			s.session.Txn(limited).Then(ops[:n]...))
		cancel()
		if err != nil {
			return denied(err, s.keys.assigned(), "the etcd role of the nodes that run sluice-status")
		}
		ops = ops[n:]
	}
	return nil
}
