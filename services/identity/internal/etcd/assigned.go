// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// assignedPrefix is the beginning of the keys of assignments. They are below ip/, so that the watch of the claims
// delivers them, and the copy on the disk includes them. It is not a valid node name, so no node's role allows it to
// write them.
func (s *Store) assignedPrefix() string { return s.nodesPrefix() + ".assigned/" }

// assignmentKey has the ranges that are assigned to a node.
func (s *Store) assignmentKey(node string) string { return s.assignedPrefix() + "of/" + node }

// allAssignedKey exists once the assignments of all nodes were written.
func (s *Store) allAssignedKey() string { return s.assignedPrefix() + "all" }

// assignmentUpdate adds a key of assignments to a step; name is the part after their prefix. While an assignment
// cannot be read, it assigns nothing.
func (s *Store) assignmentUpdate(u *registry.Update, name string, kv *mvccpb.KeyValue, removed bool) {
	if string(kv.Key) == s.allAssignedKey() {
		u.Assigned, u.Unassigned = !removed, removed
		return
	}
	node, ok := strings.CutPrefix(name, "of/")
	switch {
	case !ok || node == "":
	case removed:
		u.Removed = append(u.Removed, registry.Removal{Node: node, Assignment: true, Revision: kv.ModRevision})
	default:
		a, err := read[registry.Assignment](kv)
		if err == nil {
			err = registry.CheckAssignment(a)
		}
		if err != nil {
			s.cfg.Log.Error("an unreadable assignment of ranges in etcd assigns none", "node", node, log.Err(err))
			a = registry.Assignment{}
		}
		u.Assignments = append(u.Assignments, registry.AssignmentKey{Node: node, Assignment: a})
	}
}

// Assign implements registry.Store.
func (s *Store) Assign(ctx context.Context, put []registry.AssignmentKey, drop []string) error {
	var ops []clientv3.Op
	for _, k := range put {
		ops = append(ops, clientv3.OpPut(s.assignmentKey(k.Node), toJSON(k.Assignment)))
	}
	for _, node := range drop {
		ops = append(ops, clientv3.OpDelete(s.assignmentKey(node)))
	}
	ops = append(ops, clientv3.OpPut(s.allAssignedKey(), "1"))
	for len(ops) > 0 {
		n := min(len(ops), maxOps)
		limited, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
		_, err := s.session.Commit(limited, "write the ranges that are assigned to nodes",
			s.session.Txn(limited).Then(ops[:n]...))
		cancel()
		if err != nil {
			return denied(err, s.assignedPrefix(), "the role of the nodes that run sluice-status")
		}
		ops = ops[n:]
	}
	return nil
}
