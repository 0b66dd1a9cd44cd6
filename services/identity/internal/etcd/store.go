// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package etcd stores in etcd the data that the nodes of a cluster share. Store has the identities, for the allocator.
// Nodes has the nodes and their addresses, for the registry. Confirmed, Kinds and Refusals have the reports of nodes.
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
//	restored             prevents new numbers and ranges; written by sluice-store, expires
//	allocate             allows new numbers and ranges; written by sluice-store in Kubernetes, expires
//	epoch                the epoch of sluice-store, which decides the zone of new numbers; written by sluice-store
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

	"github.com/sluice-net/sluice/services/identity/internal/etcd/session"
)

// Store implements allocator.Store in etcd. It consists of the session of this node and three parts, one for each
// subject.
type Store struct {
	*Identities
	*Collection
	*Watch
	session *session.Session
	layout  *layout
}

// New returns a Store with the keys below the prefix of a session. The Nodes have the same session.
func New(s *session.Session, nodes *Nodes, readers Readers) *Store {
	cfg := s.Config()
	ids := identityKeys{prefix: cfg.Prefix, node: cfg.Node}
	l := &layout{session: s, cfg: cfg, ids: ids}
	return &Store{
		Identities: newIdentities(s, ids, l),
		Collection: &Collection{session: s, cfg: cfg, ids: ids, layout: l},
		Watch:      &Watch{session: s, cfg: cfg, ids: ids, nodes: nodes, readers: readers},
		session:    s, layout: l,
	}
}

// Join implements allocator.Store.
func (s *Store) Join(ctx context.Context) (fresh bool, err error) {
	return s.session.Join(ctx, s.layout.read)
}

// Ping implements allocator.Store.
func (s *Store) Ping(ctx context.Context) error { return s.session.Ping(ctx) }

// Severed implements allocator.Store.
func (s *Store) Severed(ctx context.Context) error { return s.session.Severed(ctx) }

// Session implements allocator.Store.
func (s *Store) Session() string { return s.session.Name() }

// Endpoints returns the addresses of etcd, for messages.
func (s *Store) Endpoints() []string { return s.session.Endpoints() }

// clusterPrefix returns the prefix of the keys that one node writes for all nodes.
func clusterPrefix(prefix string) string { return prefix + "/cluster/" }

// reportPrefix returns the prefix of the reports of nodes; each node writes below its own name.
func reportPrefix(prefix string) string { return prefix + "/report/" }
