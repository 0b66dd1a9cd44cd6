// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// view is the state that the datapath and the policy service of a full node have from their watches.
type view struct {
	node   *node
	world  *cluster
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu         sync.Mutex
	nodes      map[string]bool    // guarded by mu
	mappings   map[string]mapping // guarded by mu; by prefix
	identities map[uint32]string  // guarded by mu; labels
	early      int                // guarded by mu; mappings whose node was not known
	listed     chan struct{}      // guarded by mu; closed when WatchCluster was complete
	lag        []time.Duration    // guarded by mu
}

func newView(n *node, c *cluster) *view {
	ctx, cancel := context.WithCancel(context.Background())
	v := &view{node: n, world: c, cancel: cancel, listed: make(chan struct{})}
	follow := func(watch func(context.Context) error) {
		v.done.Go(func() {
			for ctx.Err() == nil {
				_ = watch(ctx) // the watch ends with the process, or with the view
				_ = sleep(ctx, 10*time.Millisecond)
			}
		})
	}
	follow(v.followCluster)
	follow(v.followIdentities)
	return v
}

func (v *view) close() {
	v.cancel()
	v.done.Wait()
}

// restarted records that the node has a new process.
func (v *view) restarted() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.listed = make(chan struct{})
}

// complete waits until WatchCluster of the process has listed everything.
func (v *view) complete(ctx context.Context) error {
	v.mu.Lock()
	listed := v.listed
	v.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-listed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("WatchCluster is not complete: %w", ctx.Err())
	}
}

func (v *view) reset() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lag = nil
}

func (v *view) lags() []time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.lag
}

// followCluster follows WatchCluster. When its listing is complete, the listing replaces the former content.
func (v *view) followCluster(ctx context.Context) error {
	stream, err := v.node.cluster.WatchCluster(ctx, &identityv1.WatchClusterRequest{})
	if err != nil {
		return err
	}
	nodes, mappings := map[string]bool{}, map[string]mapping{}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		now := time.Now()
		v.mu.Lock()
		for _, n := range m.GetNodes() {
			nodes[n.GetName()] = true
		}
		for _, p := range m.GetMappings() {
			if !nodes[p.GetNode()] {
				v.early++
			}
			mappings[strings.Clone(p.GetPrefix())] = mapping{p.GetNode(), p.GetIdentity()}
			if prefix, err := netip.ParsePrefix(p.GetPrefix()); err == nil {
				if at, ok := v.world.sentAt(prefix.Addr()); ok {
					v.lag = append(v.lag, now.Sub(at))
				}
			}
		}
		for _, p := range m.GetRemovedPrefixes() {
			delete(mappings, p)
		}
		for _, name := range m.GetRemovedNodes() {
			delete(nodes, name)
		}
		if m.GetBookmark().GetSnapshotComplete() {
			v.nodes, v.mappings = nodes, mappings
			select {
			case <-v.listed:
			default:
				close(v.listed)
			}
		}
		v.mu.Unlock()
	}
}

func (v *view) followIdentities(ctx context.Context) error {
	stream, err := v.node.identity.WatchIdentities(ctx, &identityv1.WatchIdentitiesRequest{})
	if err != nil {
		return err
	}
	all := map[uint32]string{}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		v.mu.Lock()
		switch {
		case m.GetUpsert() != nil:
			var text strings.Builder
			for _, l := range m.GetUpsert().GetLabels() {
				fmt.Fprintf(&text, "%s:%s=%s;", l.GetSource(), l.GetKey(), l.GetValue())
			}
			all[m.GetUpsert().GetNumber()] = text.String()
		case m.GetBookmark().GetSnapshotComplete():
			v.identities = all
		case m.GetBookmark() == nil:
			delete(all, m.GetDelete())
		}
		v.mu.Unlock()
	}
}

// equal returns an error if the view differs from what was written.
func (v *view) equal(nodes map[string]bool, mappings map[string]mapping, c *cluster) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.early > 0 {
		return fmt.Errorf("%d mappings came before their node", v.early)
	}
	if len(v.nodes) != len(nodes) {
		return fmt.Errorf("it knows %d nodes, want %d", len(v.nodes), len(nodes))
	}
	for name := range nodes {
		if !v.nodes[name] {
			return fmt.Errorf("it does not know %s", name)
		}
	}
	if len(v.mappings) != len(mappings) {
		return fmt.Errorf("it has %d mappings, want %d", len(v.mappings), len(mappings))
	}
	for p, want := range mappings {
		if have := v.mappings[p]; have != want {
			return fmt.Errorf("%s is %d on %q, want %d on %q", p, have.number, have.node, want.number, want.node)
		}
	}
	for _, id := range c.identities {
		if have := v.identities[uint32(id.Number)]; have != id.Labels.Text() {
			return fmt.Errorf("identity %d is %q, want %q", id.Number, have, id.Labels.Text())
		}
	}
	return nil
}
