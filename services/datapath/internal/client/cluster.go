// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"iter"
	"log/slog"
	"math"
	"net/netip"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/node/belief"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// Cluster implements cluster.Source and cluster.Registry by the identity service.
type Cluster struct {
	Health
	client identityv1.ClusterServiceClient
	log    *slog.Logger
	name   atomic.Pointer[string] // this node's name; nil: not known yet
}

// NodeName returns the name that identity registered this node under; empty until this node is registered.
func (c *Cluster) NodeName() string {
	if name := c.name.Load(); name != nil {
		return *name
	}
	return ""
}

// NewCluster returns a client that uses cc, a connection to identity's socket.
func NewCluster(cc grpc.ClientConnInterface, l *slog.Logger) *Cluster {
	return &Cluster{
		Health: Health{Name: "identity"}, client: identityv1.NewClusterServiceClient(cc), log: l.With("source", "cluster"),
	}
}

// Watch implements cluster.Source.
func (c *Cluster) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[cluster.Key, cluster.Item], error] {
	return watch.ReceiveBatches(func() (grpc.ServerStreamingClient[identityv1.WatchClusterResponse], error) {
		return c.client.WatchCluster(ctx, &identityv1.WatchClusterRequest{ResumeToken: token})
	}, c.events)
}

// events yields the events of a message in the order of its fields, then a bookmark with the token. It skips events
// that it cannot parse.
func (c *Cluster) events(m *identityv1.WatchClusterResponse) iter.Seq[watch.Event[cluster.Key, cluster.Item]] {
	type event = watch.Event[cluster.Key, cluster.Item]
	return func(yield func(event) bool) {
		for _, n := range m.GetNodes() {
			e := event{Kind: watch.Upsert, Key: cluster.Key{Node: n.GetName()}, Value: cluster.Item{Node: c.node(n)}}
			if n.GetName() != "" && !yield(e) {
				return
			}
		}
		for _, x := range m.GetMappings() {
			item := cluster.Item{On: x.GetNode(), Identity: identity.Numeric(x.GetIdentity())}
			p, ok := c.prefix(x.GetPrefix())
			if ok && !yield(event{Kind: watch.Upsert, Key: cluster.Key{Prefix: p}, Value: item}) {
				return
			}
		}
		for _, text := range m.GetRemovedPrefixes() {
			if p, ok := c.prefix(text); ok && !yield(event{Kind: watch.Delete, Key: cluster.Key{Prefix: p}}) {
				return
			}
		}
		for _, name := range m.GetRemovedNodes() {
			if name != "" && !yield(event{Kind: watch.Delete, Key: cluster.Key{Node: name}}) {
				return
			}
		}
		at := m.GetStoreRevision()
		yield(event{
			Kind: watch.Bookmark, SnapshotComplete: m.GetBookmark().GetSnapshotComplete(), Token: m.GetResumeToken(),
			Origin: watch.Origin{Store: at.GetClusterId(), Revision: at.GetRevision()},
		})
	}
}

func (c *Cluster) prefix(text string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		c.log.Error("invalid prefix ignored", "prefix", text)
	}
	return p, err == nil
}

func (c *Cluster) node(n *identityv1.Node) *cluster.Node {
	u := n.GetUnderlay()
	out := &cluster.Node{
		Incarnation: n.GetIncarnation(), Mode: cluster.None,
		TunnelPort: uint16(min(u.GetTunnelPort(), math.MaxUint16)), //nolint:gosec // bounded
		MTU:        uint16(min(u.GetMtu(), math.MaxUint16)),        //nolint:gosec // bounded
	}
	for mode, wire := range modes {
		if wire == u.GetMode() {
			out.Mode = mode
		}
	}
	for _, text := range u.GetAddresses() {
		if a, err := wire.AddressOf(text); err == nil {
			out.Addresses = append(out.Addresses, a)
		}
	}
	for _, text := range u.GetOverlayAddresses() {
		if a, err := wire.AddressOf(text); err == nil {
			out.Overlay = append(out.Overlay, a)
		}
	}
	for _, text := range n.GetPodRanges() {
		if p, ok := c.prefix(text); ok {
			out.Ranges = append(out.Ranges, p)
		}
	}
	return out
}

// modes maps the routing modes to the API. A node that registered no mode has None.
var modes = map[cluster.Mode]identityv1.RoutingMode{
	cluster.Overlay: identityv1.RoutingMode_ROUTING_MODE_OVERLAY,
	cluster.Native:  identityv1.RoutingMode_ROUTING_MODE_NATIVE,
}

// Published waits until the store has the addresses of an endpoint, for at most atMost. It returns false if the store
// may not have them.
func (c *Cluster) Published(ctx context.Context, o workload.Owner, atMost time.Duration) bool {
	resp, err := c.client.WaitForPublication(ctx, &identityv1.WaitForPublicationRequest{
		Owner: wire.Owner(o), Timeout: durationpb.New(atMost),
	})
	return err == nil && resp.GetPublished()
}

// Register implements cluster.Registry.
func (c *Cluster) Register(ctx context.Context, u cluster.Underlay) error {
	r, err := c.client.RegisterNode(ctx, &identityv1.RegisterNodeRequest{Underlay: &identityv1.Underlay{
		Addresses: wire.Addresses(u.Addresses), OverlayAddresses: wire.Addresses(u.Overlay), Mtu: uint32(u.MTU),
		Mode: modes[u.Mode], TunnelPort: uint32(u.Port),
	}})
	if name := r.GetNode().GetName(); err == nil && name != "" {
		c.name.Store(&name)
	}
	return c.translate(err)
}

// Confirm implements belief.Service.
func (c *Cluster) Confirm(ctx context.Context, applied watch.Origin) (a belief.Answer, err error) {
	req := &identityv1.ConfirmMappingsRequest{}
	if applied.Revision != 0 {
		req.Applied = &identityv1.StoreRevision{ClusterId: applied.Store, Revision: applied.Revision}
	}
	resp, err := c.client.ConfirmMappings(ctx, req)
	switch {
	case status.Code(err) == codes.Unimplemented:
		return a, belief.ErrUnsupported
	case err != nil:
		return a, c.translate(err)
	}
	a.Stale = resp.GetStaleMappings().AsDuration()
	if a.Heard = resp.GetSilence() != nil; a.Heard {
		a.Silence = resp.GetSilence().AsDuration()
	}
	return a, nil
}
