// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package peers follows the other nodes of the cluster, which sluice-identity knows.
package peers

import (
	"cmp"
	"context"
	"iter"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/watch"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
)

// maxNodes is the maximum number of nodes. A listing with more nodes is rejected, and the last known nodes stay.
const maxNodes = 20_000

// Node is another node.
type Node struct {
	Name    string
	Version string
	// Addresses are the addresses at which other nodes reach the node. The preferred address of each family comes
	// first.
	Addresses []netip.Addr
}

// Nodes contains the other nodes of the cluster. While sluice-identity is unavailable, the last known nodes stay.
type Nodes struct {
	client identityv1.ClusterServiceClient
	log    *slog.Logger

	mu      sync.Mutex
	nodes   map[string]Node // guarded by mu
	changed chan struct{}   // guarded by mu; closed and replaced at each change
}

// New returns Nodes that use a connection to the socket of sluice-identity. It is empty until Run has received nodes.
func New(conn grpc.ClientConnInterface, l *slog.Logger) *Nodes {
	return &Nodes{
		client: identityv1.NewClusterServiceClient(conn), log: l.With("source", "nodes"), nodes: make(map[string]Node),
		changed: make(chan struct{}),
	}
}

// Run follows the nodes until ctx ends.
func (n *Nodes) Run(ctx context.Context) error {
	return watch.Follow(ctx, n, n, watch.FollowOptions{
		Max: maxNodes, RetryMin: 50 * time.Millisecond, RetryMax: 2 * time.Second, Log: n.log,
	})
}

// Others returns the nodes, sorted by name, and a channel that is closed when they change.
func (n *Nodes) Others() (all []Node, changed <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, node := range n.nodes {
		all = append(all, node)
	}
	slices.SortFunc(all, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return all, n.changed
}

// Watch implements watch.Source.
func (n *Nodes) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[string, Node], error] {
	return watch.ReceiveBatches(func() (grpc.ServerStreamingClient[identityv1.WatchClusterResponse], error) {
		return n.client.WatchCluster(ctx, &identityv1.WatchClusterRequest{ResumeToken: token, NodesOnly: true})
	}, events)
}

// events yields the events of a message, then a bookmark with its token. Earlier versions of sluice-identity also send
// mappings, which are ignored.
func events(m *identityv1.WatchClusterResponse) iter.Seq[watch.Event[string, Node]] {
	type event = watch.Event[string, Node]
	return func(yield func(event) bool) {
		for _, x := range m.GetNodes() {
			if !yield(event{Kind: watch.Upsert, Key: x.GetName(), Value: node(x)}) {
				return
			}
		}
		for _, name := range m.GetRemovedNodes() {
			if !yield(event{Kind: watch.Delete, Key: name}) {
				return
			}
		}
		yield(event{
			Kind: watch.Bookmark, SnapshotComplete: m.GetBookmark().GetSnapshotComplete(), Token: m.GetResumeToken(),
		})
	}
}

func node(x *identityv1.Node) Node {
	n := Node{Name: x.GetName(), Version: x.GetVersion()}
	for _, text := range x.GetUnderlay().GetAddresses() {
		if a, err := wire.AddressOf(text); err == nil {
			n.Addresses = append(n.Addresses, a)
		}
	}
	return n
}

// Apply implements watch.Sink.
func (n *Nodes) Apply(_ context.Context, c watch.Changes[string, Node]) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, node := range c.Upserts {
		n.nodes[name] = node
	}
	for name := range c.Deletes {
		delete(n.nodes, name)
	}
	if len(c.Upserts)+len(c.Deletes) > 0 {
		n.tell()
	}
	return nil
}

// Complete implements watch.Sink.
func (n *Nodes) Complete(_ context.Context, listed map[string]struct{}) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := len(n.nodes)
	for name := range n.nodes {
		if _, ok := listed[name]; !ok {
			delete(n.nodes, name)
		}
	}
	if len(n.nodes) != before {
		n.tell()
	}
	return nil
}

// Failed implements watch.Sink. The last known nodes stay. Follow logs the reason.
func (*Nodes) Failed(context.Context, error) error { return nil }

// tell wakes callers that wait for a change. Called with mu held.
func (n *Nodes) tell() {
	close(n.changed)
	n.changed = make(chan struct{})
}
