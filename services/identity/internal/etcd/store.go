// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package etcd keeps the identities of a cluster in etcd, as the allocator's Store,
// and its nodes, as the registry's.
//
// It owns the keys below one prefix. It writes this node's keys with the lease of its session:
//
//	layout               version of this layout, 2
//	id/<number>          the label set of the number, as canonical text
//	labels/<sha256>      the number of the label set with this hash
//	fence/<number>       rewritten with every reference to the number
//	ref/<node>/<number>  a reference of the node to the number; with the node's lease
//	rest/<number>        the hash of the label set of a collected number; expires
//	collector            the node that collects; with the node's lease
//	cluster/numbers      how many numbers tenants have, as JSON; written by the collector
//	alive/<node>         the session that owns the node's name
//	ip/<node>/node       the record of the node; see package registry
//	ip/<node>/ep/<hash>  the addresses and the identity of one of its endpoints
//	ip/<node>/range/<slot>  one of the ranges that the node claims; see package registry
//	ip/<node>/rest/<cidr>   a range in quarantine, which only this node may get; expires
//	range/<pool>/<cidr>  the node that has this range of addresses
//	ipam                 the settings of ranges for all nodes
//
// id and labels are written and deleted together, in one transaction. There are no locks. Collection is safe because
// every transaction that writes a reference also writes fence/<number>: a collector deletes an identity only if the
// revision of that key is unchanged since the collector saw no reference. All nodes watch only id/ and ip/, so fences
// cost the other nodes nothing.
//
// The keys id/, ip/ and ipam are neighbours in etcd, so that one watch covers them: a node receives an identity before
// the addresses with this identity.
//
// range/ keeps two nodes from claiming one range at the same time. Every node can write all of it, so readers do not
// trust it: the slots below ip/ define which node has a range, and their revisions since when.
//
// In layout 1, labels/<sha256> contains "<number> <canonical text>" and is also the fence. While nodes of that version
// may run, identities are created in layout 1, and a reference to an identity writes both fences; see layout.go.
package etcd

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/batch"
	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// Store is the allocator's Store in etcd.
type Store struct {
	session  *session.Session
	cfg      session.Config // of the session
	nodes    *Nodes         // their keys are followed with the identities
	claims   *batch.Group[*claim]
	observe  func(registry.Update) // nil: Follow drops the keys of nodes
	prepare  func(registry.Update) // nil: nothing is done before the mirror
	mirror   Mirror                // nil: no copy of the keys of nodes is kept
	spread   func() time.Duration  // nil: listings begin at once
	position position

	listings atomic.Uint64 // that Follow made

	mu     sync.Mutex
	layout int // guarded by mu; that identities are made in; 0: not read yet
}

// New returns a Store with the keys below the prefix of a session, which Nodes shares.
func New(session *session.Session, nodes *Nodes) *Store {
	s := &Store{session: session, cfg: session.Config(), nodes: nodes}
	s.claims = &batch.Group[*claim]{Do: s.commitAll, Fits: disjoint, AtOnce: claimsAtOnce}
	return s
}

// Join implements allocator.Store.
func (s *Store) Join(ctx context.Context) (fresh bool, err error) {
	return s.session.Join(ctx, s.readLayout)
}

// Ping implements allocator.Store.
func (s *Store) Ping(ctx context.Context) error { return s.session.Ping(ctx) }

// Severed implements allocator.Store.
func (s *Store) Severed(ctx context.Context) error { return s.session.Severed(ctx) }

// Session implements allocator.Store.
func (s *Store) Session() string { return s.session.Name() }

// Listings is how often Follow listed everything.
func (s *Store) Listings() uint64 { return s.listings.Load() }

// Endpoints names the store for messages.
func (s *Store) Endpoints() []string { return s.cfg.Client.Endpoints }

func (s *Store) idKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/id/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) fenceKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/fence/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) quarantineKey(n identity.Numeric) string {
	return s.cfg.Prefix + "/rest/" + strconv.FormatUint(uint64(n), 10)
}

func (s *Store) labelsKey(l label.Canonical) string {
	return s.cfg.Prefix + "/labels/" + hashText(l)
}

func (s *Store) refPrefix() string { return s.cfg.Prefix + "/ref/" + s.cfg.Node + "/" }

func (s *Store) refKey(n identity.Numeric) string {
	return s.refPrefix() + strconv.FormatUint(uint64(n), 10)
}

func hashText(l label.Canonical) string {
	sum := l.Hash()
	return hex.EncodeToString(sum[:])
}

func parseNumber(s string) (identity.Numeric, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || identity.Numeric(n).Scope() != identity.ScopeCluster || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%w: %q is not the number of a cluster identity", allocator.ErrCorrupt, s)
	}
	return identity.Numeric(n), nil
}

// parseID reads a key below id/.
func (s *Store) parseID(kv *mvccpb.KeyValue) (identity.Identity, error) {
	n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.cfg.Prefix+"/id/"))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w", kv.Key, err)
	}
	labels, err := label.Parse(string(kv.Value))
	if err != nil {
		return identity.Identity{}, fmt.Errorf("%s: %w: %w", kv.Key, allocator.ErrCorrupt, err)
	}
	if labels.Set().HasSource(label.SourceReserved) {
		// A key in etcd cannot give reserved identities such as host or world.
		return identity.Identity{}, fmt.Errorf("%s: %w: reserved labels %s", kv.Key, allocator.ErrCorrupt, labels)
	}
	return identity.Identity{Number: n, Labels: labels}, nil
}

// Release implements allocator.Store.
func (s *Store) Release(ctx context.Context, refs ...allocator.Reference) error {
	for some := range slices.Chunk(refs, maxOps/2) {
		var ops []clientv3.Op
		for _, ref := range some {
			key := s.refKey(ref.Number)
			ops = append(ops, clientv3.OpTxn(
				[]clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", ref.Revision)},
				[]clientv3.Op{clientv3.OpDelete(key)}, nil))
		}
		if _, err := s.session.Commit(ctx, "release identities", s.session.Txn(ctx).Then(ops...)); err != nil {
			return err
		}
	}
	return nil
}

// References implements allocator.Store.
func (s *Store) References(ctx context.Context) ([]allocator.Reference, error) {
	lease, err := s.session.Lease()
	if err != nil {
		return nil, err
	}
	var refs []allocator.Reference
	_, err = s.session.List(ctx, s.refPrefix(), true, func(kv *mvccpb.KeyValue) {
		n, err := parseNumber(strings.TrimPrefix(string(kv.Key), s.refPrefix()))
		if err != nil {
			s.cfg.Log.Error("unexpected etcd key below the prefix of this node's references, ignored", "key", string(kv.Key))
			return
		}
		refs = append(refs, allocator.Reference{Number: n, Revision: kv.ModRevision, Present: kv.Lease != 0 && clientv3.LeaseID(kv.Lease) == lease})
	})
	return refs, err
}

// clusterPrefix begins the keys that one node writes for all nodes.
func clusterPrefix(prefix string) string { return prefix + "/cluster/" }

// reportPrefix begins the keys of nodes' reports; each node writes below its own name.
func reportPrefix(prefix string) string { return prefix + "/report/" }
