// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/kinds"
	"github.com/sluice-net/sluice/services/identity/internal/labels"
	"github.com/sluice-net/sluice/services/identity/internal/refusals"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// ClusterHub is the source of WatchCluster; the registry publishes into it.
type ClusterHub = watch.Hub[registry.Key, registry.Item]

// History of cluster changes for resume tokens, which permanently uses memory, and maximum number of outstanding
// changes of a reader: a node with all its endpoints is added or removed in one step.
const (
	clusterHistory = 8_192
	clusterPending = 65_536
)

// NewClusterHub returns a hub whose listing is complete once the registry calls Loaded.
func NewClusterHub() *ClusterHub {
	return watch.NewHub[registry.Key](watch.Options[registry.Item]{
		Loading: true, Equal: registry.Item.Equal, History: clusterHistory, Pending: clusterPending,
		Quiet: quiet,
	})
}

// EndpointPublisher passes the endpoints of this node to their readers and to the
// registry, which publishes their addresses in the cluster.
type EndpointPublisher struct {
	*EndpointHub
	Registry *registry.Registry
}

// Upsert implements allocator.EndpointPublisher.
func (p EndpointPublisher) Upsert(h allocator.Holder, e allocator.Endpoint) uint64 {
	var addresses []netip.Addr
	for _, text := range e.Workload.Addresses {
		if a, err := netip.ParseAddr(text); err == nil { // the server accepts only valid addresses
			addresses = append(addresses, a)
		}
	}
	p.Registry.Set(endpointName(h), addresses, e.Identity.Number)
	return p.EndpointHub.Upsert(h, e)
}

// Delete implements allocator.EndpointPublisher.
func (p EndpointPublisher) Delete(h allocator.Holder) bool {
	p.Registry.Remove(endpointName(h))
	return p.EndpointHub.Delete(h)
}

// endpointName returns the key of an endpoint in the store. It is a hash, because other nodes do not need the owner,
// whose name may be long.
func endpointName(h allocator.Holder) string {
	sum := sha256.Sum256([]byte(h))
	return hex.EncodeToString(sum[:16])
}

// mostEvents is the largest number of changes in one message of WatchCluster, and of mappings in one of ListIPMappings.
const mostEvents = 1000

// Cluster implements identityv1.ClusterServiceServer.
type Cluster struct {
	identityv1.UnimplementedClusterServiceServer

	Registry *registry.Registry
	Hub      *ClusterHub
	Node     string
	// NodeFilter selects the labels of this node that are part of identities.
	NodeFilter labels.Filter
	// Connected reports whether the store answers.
	Connected func() bool
	// Kinds has the kinds of policy that the API server has.
	Kinds *kinds.Board
	// Refusals stores the policies and Services that nodes do not enforce as written.
	Refusals refusals.Store
	// Confirming returns why this node cannot confirm mappings, or cannot request confirmations; nil if it can.
	Confirming func() error
	// Roles returns why etcd does not enforce the roles of nodes; nil if it does, or if nodes have no roles.
	Roles func() error
}

// RegisterNode implements the service.
func (c *Cluster) RegisterNode(ctx context.Context,
	req *identityv1.RegisterNodeRequest,
) (*identityv1.RegisterNodeResponse, error) {
	if err := mayRegister(ctx, req); err != nil {
		return nil, err
	}
	underlay, err := fromUnderlay(req.GetUnderlay())
	if err != nil {
		return nil, err
	}
	ipam, err := fromIPAM("ipam", req.GetIpam())
	if err != nil {
		return nil, err
	}
	said := registry.Registration{Underlay: underlay, IPAM: ipam}
	if req.PodRanges != nil {
		ranges := []netip.Prefix{}
		for i, text := range req.GetPodRanges().GetPrefixes() {
			p, err := prefixOf(text)
			if err != nil {
				return nil, invalid(fmt.Sprintf("pod_ranges.prefixes[%d]", i), err)
			}
			ranges = append(ranges, p)
		}
		said.Ranges = &ranges
	}
	if req.Labels != nil {
		labels, err := c.labels(req.GetLabels().GetLabels())
		if err != nil {
			return nil, err
		}
		said.Labels = &labels
	}
	node, registered, err := c.Registry.Register(ctx, said, req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.RegisterNodeResponse{Node: toNode(node), Registered: registered, StoreConnected: c.Connected()},
		nil
}

// labels returns the labels of a Node that are part of identities.
func (c *Cluster) labels(all map[string]string) (map[string]string, error) {
	out := map[string]string{}
	for key, value := range all {
		l := label.Label{Source: label.SourceNode, Key: key, Value: value}
		if err := l.Check(0); err != nil {
			return nil, invalid(fmt.Sprintf("labels.labels[%q]", key), err)
		}
		if c.NodeFilter.Keeps(l) {
			out[key] = value
		}
	}
	return out, nil
}

func prefixOf(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return p, fmt.Errorf("%q is not a prefix", text)
	case p.Addr().Is4In6():
		return p, fmt.Errorf("%q is an IPv4 prefix in IPv6 form", text)
	case p != p.Masked():
		return p, fmt.Errorf("%q has host bits; write %s", text, p.Masked())
	}
	return p, nil
}

func fromUnderlay(u *identityv1.Underlay) (*registry.Underlay, error) {
	if u == nil {
		return nil, nil //nolint:nilnil // the request has no underlay
	}
	if u.GetMtu() != 0 && u.GetMtu() < 1280 {
		return nil, invalid("underlay.mtu", fmt.Errorf("%d is below 1280", u.GetMtu()))
	}
	out := &registry.Underlay{TunnelPort: uint16(u.GetTunnelPort()), MTU: u.GetMtu(), Mode: modes[u.GetMode()]}
	for _, f := range []struct {
		name string
		from []string
		to   *[]netip.Addr
	}{
		{"addresses", u.GetAddresses(), &out.Addresses},
		{"overlay_addresses", u.GetOverlayAddresses(), &out.Overlay},
	} {
		for i, text := range f.from {
			a, err := wire.AddressOf(text)
			if err == nil && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast()) {
				err = fmt.Errorf("%s is not an address at which a node can be reached", a)
			}
			if err != nil {
				return nil, invalid(fmt.Sprintf("underlay.%s[%d]", f.name, i), err)
			}
			*f.to = append(*f.to, a)
		}
	}
	return out, nil
}

var modes = map[identityv1.RoutingMode]registry.RoutingMode{
	identityv1.RoutingMode_ROUTING_MODE_UNSPECIFIED: registry.ModeUnset,
	identityv1.RoutingMode_ROUTING_MODE_OVERLAY:     registry.ModeOverlay,
	identityv1.RoutingMode_ROUTING_MODE_NATIVE:      registry.ModeNative,
}

func toMode(m registry.RoutingMode) identityv1.RoutingMode {
	for api, mode := range modes {
		if mode == m {
			return api
		}
	}
	return identityv1.RoutingMode_ROUTING_MODE_UNSPECIFIED // the mode of a later version
}

// toClusterStatus converts a status. The number of nodes includes this node.
func toClusterStatus(s registry.Status) *identityv1.ClusterStatus {
	out := &identityv1.ClusterStatus{
		Registered: s.Registered, Nodes: uint32(s.Nodes),
		Mappings: uint32(s.Mappings), RefusedMappings: uint32(s.Refused), RefusedRanges: uint32(len(s.Ranges)),
		PendingPublications: uint32(s.Pending),
	}
	if s.Registered {
		out.Nodes++
	}
	if s.Problem != nil {
		out.PublicationError = s.Problem.Error()
	}
	if s.Unassigned != nil {
		out.AssignmentError = s.Unassigned.Error()
	}
	out.RangeOverlapCount = uint32(len(s.Overlaps))
	for _, o := range s.Overlaps[:min(len(s.Overlaps), mostOverlaps)] {
		out.RangeOverlaps = append(out.RangeOverlaps, &identityv1.RangeOverlap{
			Node: o.Node, Claimed: o.Claimed, Prefix: o.Range.String(), Holder: o.Holder, Reason: o.Reason,
			DiffersFromStore: o.Differs,
		})
	}
	return out
}

// mostOverlaps is the maximum number of ranges of other nodes in a status.
const mostOverlaps = 32

// rangeProblems describes the ranges that nodes claim but do not have, first this node's.
func rangeProblems(s registry.Status) (all []string) {
	for _, r := range s.Ranges {
		what := "is not accepted in the cluster"
		if r.Kept {
			what = "is not used for new addresses"
		}
		all = append(all, fmt.Sprintf("the range %s of this node %s: %s", r.Range, what, r.Reason))
	}
	if s.Unassigned != nil {
		all = append(all, "ranges of nodes are not compared with the podCIDRs of their Nodes: "+s.Unassigned.Error())
	}
	const most = 8 // of other nodes
	for i, o := range s.Overlaps {
		switch {
		case i == most:
			return append(all, fmt.Sprintf("%d more ranges of other nodes are not accepted", len(s.Overlaps)-most))
		case o.Claimed && o.Differs:
			all = append(all, fmt.Sprintf("etcd and this node differ about the range %s of node %s: %s", o.Range, o.Node,
				o.Reason))
		case o.Claimed:
			all = append(all, fmt.Sprintf("the range %s of node %s is not accepted: %s", o.Range, o.Node, o.Reason))
		default:
			all = append(all, fmt.Sprintf("the range %s waits for node %s: %s", o.Range, o.Node, o.Reason))
		}
	}
	return all
}

func toNode(n registry.Node) *identityv1.Node {
	u := n.Record.Underlay
	out := &identityv1.Node{
		Name: n.Name, Version: n.Record.Version, Incarnation: n.Record.Incarnation,
		PodRanges: prefixes(n.Record.Ranges), Labels: n.Record.Labels,
		Underlay: &identityv1.Underlay{
			Addresses: wire.Addresses(u.Addresses), OverlayAddresses: wire.Addresses(u.Overlay),
			Mode: toMode(u.Mode), TunnelPort: uint32(u.TunnelPort), Mtu: u.MTU,
		},
	}
	for _, r := range n.Refused {
		out.RefusedRanges = append(out.RefusedRanges, &identityv1.RefusedRange{
			Prefix: r.Range.String(),
			Holder: r.Holder, Reason: r.Reason, Kept: r.Kept, DiffersFromStore: r.Differs,
		})
	}
	return out
}

func prefixes(all []netip.Prefix) (out []string) {
	for _, p := range all {
		out = append(out, p.String())
	}
	return out
}

// WatchCluster implements the service.
func (c *Cluster) WatchCluster(req *identityv1.WatchClusterRequest,
	stream grpc.ServerStreamingServer[identityv1.WatchClusterResponse],
) error {
	return watch.ServeBatches(stream.Context(), c.Hub, req.GetResumeToken(), mostEvents,
		func(events []watch.Event[registry.Key, registry.Item]) error {
			b := batch{send: stream.Send}
			for _, e := range events {
				if stage := stageOf(e); req.GetNodesOnly() && (stage == stageMapping || stage == stageRemovedMapping) {
					continue
				}
				if err := b.add(e); err != nil {
					return err
				}
			}
			return b.flush()
		})
}

// batch collects events in messages. Applying the fields of a message in order must preserve the order of the events.
type batch struct {
	send  func(*identityv1.WatchClusterResponse) error
	m     *identityv1.WatchClusterResponse
	stage int // the last field of m that is not empty
}

// add adds an event. If the message would apply the event too early, it starts another message.
func (b *batch) add(e watch.Event[registry.Key, registry.Item]) error {
	stage := stageOf(e)
	if b.m != nil && (stage < b.stage || stage == stageBookmark) {
		if err := b.flush(); err != nil {
			return err
		}
	}
	if b.m == nil {
		b.m = &identityv1.WatchClusterResponse{}
	}
	b.stage = stage
	b.m.ResumeToken = e.Token
	if at := toStoreRevision(e.Origin); at != nil {
		b.m.StoreRevision = at
	}
	switch stage {
	case stageNode:
		b.m.Nodes = append(b.m.Nodes, toNode(*e.Value.Node))
	case stageMapping:
		b.m.Mappings = append(b.m.Mappings, toMapping(e.Key.Prefix, e.Value.On, e.Value.Identity))
	case stageRemovedMapping:
		b.m.RemovedPrefixes = append(b.m.RemovedPrefixes, e.Key.Prefix.String())
	case stageRemovedNode:
		b.m.RemovedNodes = append(b.m.RemovedNodes, e.Key.Node)
	default:
		b.m.Bookmark = &identityv1.Bookmark{SnapshotComplete: e.SnapshotComplete}
		return b.flush()
	}
	return nil
}

func (b *batch) flush() error {
	if b.m == nil {
		return nil
	}
	m := b.m
	b.m, b.stage = nil, 0
	return b.send(m)
}

// The fields of a message, in the order of their application.
const (
	stageNode = iota + 1
	stageMapping
	stageRemovedMapping
	stageRemovedNode
	stageBookmark
)

func stageOf(e watch.Event[registry.Key, registry.Item]) int {
	switch {
	case e.Kind == watch.Bookmark:
		return stageBookmark
	case e.Key.Node != "" && e.Kind == watch.Upsert:
		return stageNode
	case e.Key.Node != "":
		return stageRemovedNode
	case e.Kind == watch.Upsert:
		return stageMapping
	}
	return stageRemovedMapping
}

func toMapping(p netip.Prefix, node string, n identity.Numeric) *identityv1.IPMapping {
	return &identityv1.IPMapping{Prefix: p.String(), Node: node, Identity: uint32(n)}
}

// publicationTimeout is the timeout of a call whose request has none.
const publicationTimeout = 200 * time.Millisecond

// WaitForPublication implements the service.
func (c *Cluster) WaitForPublication(ctx context.Context,
	req *identityv1.WaitForPublicationRequest,
) (*identityv1.WaitForPublicationResponse, error) {
	timeout := cmp.Or(req.GetTimeout().AsDuration(), publicationTimeout)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	published := c.Registry.Await(ctx, endpointName(endpoint(req.GetOwner())))
	return &identityv1.WaitForPublicationResponse{Published: published}, nil
}

// ListNodes implements the service.
func (c *Cluster) ListNodes(_ *identityv1.ListNodesRequest,
	stream grpc.ServerStreamingServer[identityv1.ListNodesResponse],
) error {
	alive, err := c.Registry.Alive(stream.Context())
	for _, k := range c.Registry.Nodes() {
		m := &identityv1.ListNodesResponse{
			Node: toNode(k.Node), MappingCount: uint32(k.Mappings), RefusedMappingCount: uint32(k.Refused),
			Local: k.Node.Name == c.Node,
		}
		switch {
		case err != nil: // etcd does not answer, so the reachability of nodes is unknown
		case alive[k.Node.Name]:
			m.State = identityv1.NodeState_NODE_STATE_ALIVE
		default:
			m.State = identityv1.NodeState_NODE_STATE_SILENT
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// GetIPMapping implements the service.
func (c *Cluster) GetIPMapping(_ context.Context,
	req *identityv1.GetIPMappingRequest,
) (*identityv1.GetIPMappingResponse, error) {
	a, err := wire.AddressOf(req.GetAddress())
	if err != nil {
		return nil, invalid("address", err)
	}
	f, err := c.Registry.Find(a)
	if err != nil {
		return nil, statusOf(err)
	}
	out := &identityv1.GetIPMappingResponse{RangeNode: f.RangeNode}
	if f.Range.IsValid() {
		out.Range = f.Range.String()
	}
	mapping := func(m registry.Mapping) *identityv1.IPMapping {
		return toMapping(netip.PrefixFrom(m.Address, m.Address.BitLen()), m.Node, m.Identity)
	}
	if f.Mapping.Identity != 0 {
		out.Mapping = mapping(f.Mapping)
	}
	for _, m := range f.Refused {
		out.Refused = append(out.Refused, &identityv1.RefusedMapping{Mapping: mapping(m), Reason: m.Reason})
	}
	return out, nil
}

// ListIPMappings implements the service.
func (c *Cluster) ListIPMappings(req *identityv1.ListIPMappingsRequest,
	stream grpc.ServerStreamingServer[identityv1.ListIPMappingsResponse],
) error {
	return c.Registry.EachMapping(req.GetNode(), func(all []registry.Mapping) error {
		for part := range slices.Chunk(all, mostEvents) {
			m := &identityv1.ListIPMappingsResponse{}
			for _, x := range part {
				m.Mappings = append(m.Mappings,
					toMapping(netip.PrefixFrom(x.Address, x.Address.BitLen()), x.Node, x.Identity))
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		return nil
	})
}

// ForgetNode implements the service.
func (c *Cluster) ForgetNode(ctx context.Context, req *identityv1.ForgetNodeRequest) (*identityv1.ForgetNodeResponse,
	error,
) {
	if cred, ok := rpc.PeerCred(ctx); ok && cred.UID == instance.ControllerID && req.GetForce() {
		return nil, forbidden(cred.UID, "forget a node that is alive")
	}
	k, err := c.Registry.Forget(ctx, req.GetName(), req.GetForce(), req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	return &identityv1.ForgetNodeResponse{Node: toNode(k.Node), MappingCount: uint32(k.Mappings)}, nil
}
