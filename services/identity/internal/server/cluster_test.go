// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// nodeStore keeps what the node writes; tests pass the keys of other nodes to Observe.
type nodeStore struct {
	mu        sync.Mutex
	record    registry.Record // guarded by mu
	ipam      registry.IPAM   // guarded by mu; IPAM settings of the cluster
	endpoints map[string]registry.Addresses
	assigned  map[string]registry.Assignment // guarded by mu
	away      bool
}

func (s *nodeStore) ask() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return fmt.Errorf("nodes: %w", errAway)
	}
	return nil
}

var errAway = errors.New("away")

func (s *nodeStore) Register(_ context.Context, st registry.Statement) (registry.Written, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record = st.Record
	if st.IPAM != nil {
		s.ipam = *st.IPAM
	}
	return registry.Written{Record: st.Record, Revision: 1}, nil
}

func (s *nodeStore) Assign(_ context.Context, put []registry.AssignmentKey, drop []string) error {
	if err := s.ask(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range put {
		s.assigned[k.Node] = k.Assignment
	}
	for _, node := range drop {
		delete(s.assigned, node)
	}
	return nil
}

func (s *nodeStore) Own(context.Context) (registry.Record, int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.record, 1, nil
}

func (s *nodeStore) Agrees(_ context.Context, want registry.IPAM) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ipam.Equal(want) {
		return fmt.Errorf("%w: %s, %s", registry.ErrIPAMDiffers, want, s.ipam)
	}
	return nil
}

// ClaimRange takes the blocks in their order.
func (s *nodeStore) ClaimRange(_ context.Context, c registry.RangeClaim) (netip.Prefix, int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range c.IPAM.Blocks(c.IPv6) {
		if p := c.IPAM.Block(c.IPv6, i); !slices.Contains(s.record.Ranges, p) {
			s.record.Ranges = append(slices.Clone(s.record.Ranges), p)
			return p, 1, nil
		}
	}
	return netip.Prefix{}, 0, &registry.FullError{
		IPAM: c.IPAM, IPv6: c.IPv6, Blocks: c.IPAM.Blocks(c.IPv6),
		Held: len(s.record.Ranges),
	}
}

func (s *nodeStore) Publish(_ context.Context, _ int64, changes []registry.Change) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return 0, errAway
	}
	if s.endpoints == nil {
		s.endpoints = map[string]registry.Addresses{}
	}
	for _, c := range changes {
		if c.Value == nil {
			delete(s.endpoints, c.Endpoint)
		} else {
			s.endpoints[c.Endpoint] = *c.Value
		}
	}
	return 1, nil
}

func (s *nodeStore) published() map[string]registry.Addresses {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]registry.Addresses{}
	for k, v := range s.endpoints {
		out[k] = v
	}
	return out
}

func (s *nodeStore) Forget(_ context.Context, node string, force, _ bool) (registry.Record, error) {
	switch {
	case node != "other":
		return registry.Record{}, fmt.Errorf("%w: %q", registry.ErrNoNode, node)
	case !force:
		return registry.Record{}, fmt.Errorf("%w: %q", registry.ErrAlive, node)
	}
	return other().Record, nil
}

func (s *nodeStore) Alive(context.Context) (map[string]bool, error) {
	return map[string]bool{"n1": true, "other": true}, s.ask()
}

func other() registry.NodeKey {
	return registry.NodeKey{Name: "other", Created: 1, Record: registry.Record{
		Incarnation: "o", Version: "v", Ranges: []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")},
		Underlay: registry.Underlay{
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.2")},
			Overlay:   []netip.Addr{netip.MustParseAddr("10.0.2.1")},
			Mode:      registry.ModeOverlay, TunnelPort: 4789, MTU: 1450,
		},
	}}
}

func mappingOf(host int, n identity.Numeric) registry.AddressesKey {
	return registry.AddressesKey{Node: "other", Endpoint: fmt.Sprint(host), Value: registry.Addresses{
		Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(2 + host>>8), byte(host)})}, Identity: n,
		Incarnation: "o",
	}}
}

// violated returns the first field that an error names.
func violated(err error) string {
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			return bad.GetFieldViolations()[0].GetField()
		}
	}
	return ""
}

func TestRegistrationIsCheckedAndWritten(t *testing.T) {
	s := serve(t)
	s.reg.Observe(registry.Update{Complete: true})
	good := &identityv1.Underlay{
		Addresses: []string{"192.0.2.1", "2001:db8::1"},
		Mode:      identityv1.RoutingMode_ROUTING_MODE_NATIVE, Mtu: 1500,
	}
	for field, req := range map[string]*identityv1.RegisterNodeRequest{
		"underlay.mtu": {Underlay: &identityv1.Underlay{Mtu: 1279}},
		"underlay.addresses[1]": {Underlay: &identityv1.Underlay{Addresses: []string{
			"192.0.2.1",
			"127.0.0.1",
		}}},
		"underlay.addresses[0]":         {Underlay: &identityv1.Underlay{Addresses: []string{"::ffff:192.0.2.1"}}},
		"underlay.overlay_addresses[0]": {Underlay: &identityv1.Underlay{OverlayAddresses: []string{"0.0.0.0"}}},
		"pod_ranges.prefixes[0]":        {PodRanges: &identityv1.PodRanges{Prefixes: []string{"10.0.1.5/24"}}},
		`labels.labels["a\nb"]`:         {Labels: &identityv1.NodeLabels{Labels: map[string]string{"a\nb": "c"}}},
		"underlay.tunnel_port":          {Underlay: &identityv1.Underlay{TunnelPort: 65_536}},
	} {
		_, err := s.cluster.RegisterNode(t.Context(), req)
		if got := violated(err); status.Code(err) != codes.InvalidArgument || got != field {
			t.Errorf("%s: %v names %q", field, err, got)
		}
	}
	labelled, err := s.cluster.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
		Labels: &identityv1.NodeLabels{Labels: map[string]string{"zone": "a", "left.out": "b"}}, ValidateOnly: true,
	})
	if err != nil || !maps.Equal(labelled.GetNode().GetLabels(), map[string]string{"zone": "a"}) {
		t.Errorf("of the labels zone and left.out count %v, %v", labelled.GetNode().GetLabels(), err)
	}
	// One part alone is not what the node is.
	if _, err := s.cluster.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{Underlay: good}); err != nil {
		t.Fatal(err)
	}
	s.resolve("c1", newLabel("cni", "app", "web"))
	resp, err := s.cluster.RegisterNode(t.Context(),
		&identityv1.RegisterNodeRequest{
			PodRanges:    &identityv1.PodRanges{Prefixes: []string{"10.0.1.0/24"}},
			ValidateOnly: true,
		})
	if err != nil || resp.GetRegistered() || len(resp.GetNode().GetPodRanges()) != 1 ||
		resp.GetNode().GetUnderlay().GetMtu() != 1500 {
		t.Fatalf("%v, %v", resp, err)
	}
	if s.store.record.Incarnation != "" {
		t.Error("half of a record, or one that was only to be checked, was written")
	}
	if _, err = s.cluster.RegisterNode(t.Context(),
		&identityv1.RegisterNodeRequest{PodRanges: &identityv1.PodRanges{Prefixes: []string{"10.0.1.0/24"}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ResolveEndpoint(t.Context(), &identityv1.ResolveEndpointRequest{
		Owner: owner("c2"), Labels: []*workloadv1.Label{newLabel("cni", "app", "web")}, Addresses: []string{"10.0.1.5"},
	}); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the record and one endpoint with an address", func() bool {
		resp, err := s.cluster.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{Underlay: good})
		return err == nil && resp.GetRegistered() && len(s.store.published()) == 1
	})
	for _, a := range s.store.published() {
		if a.Addresses[0] != netip.MustParseAddr("10.0.1.5") || a.Identity < identity.MinCluster ||
			a.Incarnation != "i" {
			t.Errorf("published %+v", a)
		}
	}
	if _, err := s.ReleaseIdentity(t.Context(),
		&identityv1.ReleaseIdentityRequest{
			Holder: &identityv1.ReleaseIdentityRequest_Owner{Owner: owner("c2")},
		}); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "the endpoint to go", func() bool { return len(s.store.published()) == 0 })
}

// state is the state of a client of WatchCluster.
type state struct {
	nodes    map[string]*identityv1.Node
	mappings map[string]*identityv1.IPMapping
	messages int
	token    []byte
}

// read applies messages until the bookmark of a listing, or n messages.
func (st *state) read(t *testing.T, stream identityv1.ClusterService_WatchClusterClient, n int) {
	t.Helper()
	for ; n != 0; n-- {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		st.messages++
		if m.ResumeToken != nil {
			st.token = m.ResumeToken
		}
		for _, node := range m.GetNodes() {
			st.nodes[node.GetName()] = node
		}
		for _, mapping := range m.GetMappings() {
			if st.nodes[mapping.GetNode()] == nil {
				t.Errorf("%v is on a node that was not sent", mapping)
			}
			st.mappings[mapping.GetPrefix()] = mapping
		}
		for _, p := range m.GetRemovedPrefixes() {
			delete(st.mappings, p)
		}
		for _, name := range m.GetRemovedNodes() {
			delete(st.nodes, name)
		}
		if m.GetBookmark().GetSnapshotComplete() {
			return
		}
	}
}

// TestPodCIDRsArePublished: podCIDRs are validated, and differences are written. If they are missing, the status has
// the reason.
func TestPodCIDRsArePublished(t *testing.T) {
	s := serve(t)
	of := func(name string, podCIDRs ...string) *identityv1.NodePodCIDRs {
		return &identityv1.NodePodCIDRs{Name: name, PodCidrs: podCIDRs}
	}
	publish := func(nodes ...*identityv1.NodePodCIDRs) error {
		_, err := s.cluster.PublishPodCIDRs(t.Context(), &identityv1.PublishPodCIDRsRequest{Nodes: nodes})
		return err
	}
	unassigned := func() string {
		t.Helper()
		resp, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetCluster().GetAssignmentError()
	}
	for field, nodes := range map[string][]*identityv1.NodePodCIDRs{
		"nodes[1].pod_cidrs[1]": {of("a", "10.0.1.0/24"), of("b", "10.0.2.0/24", "10.0.3.1/24")},
		"nodes[1].name":         {of("a", "10.0.1.0/24"), of("a", "10.0.2.0/24")},
	} {
		if err := publish(nodes...); status.Code(err) != codes.InvalidArgument || violated(err) != field {
			t.Errorf("%s: %v names %q", field, err, violated(err))
		}
	}
	all := []*identityv1.NodePodCIDRs{of("n1", "10.0.1.0/24", "fd00:0:0:1::/64"), of("new")}
	s.reg.Observe(registry.Update{Complete: true, Revision: 3})
	if err := publish(all...); status.Code(err) != codes.Unavailable {
		t.Errorf("before the mode is known: %v", err)
	}
	for i, mode := range []registry.IPAMMode{registry.IPAMPool, registry.IPAMKubernetes} {
		s.reg.Observe(registry.Update{
			Complete: true, Revision: 6,
			IPAM: &registry.IPAMKey{Settings: registry.IPAM{Mode: mode}, Revision: int64(4 + i)},
		})
		if got := unassigned(); (got != "") != (mode == registry.IPAMKubernetes) {
			t.Errorf("in mode %s the status says %q", mode, got)
		}
		if err := publish(all...); err != nil {
			t.Errorf("in mode %s: %v", mode, err)
		}
		s.store.mu.Lock()
		if n := len(s.store.assigned); n != map[registry.IPAMMode]int{registry.IPAMKubernetes: 2}[mode] {
			t.Errorf("in mode %s %d assignments are written", mode, n)
		}
		s.store.mu.Unlock()
	}
	s.store.mu.Lock()
	s.store.away = true
	s.store.mu.Unlock()
	if err := publish(all...); err == nil || unassigned() == "" {
		t.Errorf("while etcd is unavailable: %v, the status says %q", err, unassigned())
	}
}

// TestNodesAreWatchedWithoutMappings: a caller that wants only nodes gets no mapping, neither in the listing nor later.
func TestNodesAreWatchedWithoutMappings(t *testing.T) {
	s := serve(t)
	u := registry.Update{Complete: true, Cluster: 7, Revision: 70, Nodes: []registry.NodeKey{other()}}
	u.Nodes[0].Record.Ranges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}
	u.Addresses = []registry.AddressesKey{mappingOf(5, 300), mappingOf(6, 300)}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := s.cluster.WatchCluster(ctx, &identityv1.WatchClusterRequest{NodesOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	s.reg.Observe(u)
	st := &state{nodes: map[string]*identityv1.Node{}, mappings: map[string]*identityv1.IPMapping{}}
	st.read(t, stream, -1)
	s.reg.Observe(registry.Update{
		Revision: 71, Addresses: []registry.AddressesKey{mappingOf(5, 301)},
		Removed: []registry.Removal{{Node: "other", Endpoint: "6"}},
	})
	changed := other()
	changed.Record.Ranges, changed.Record.Version = u.Nodes[0].Record.Ranges, "later"
	s.reg.Observe(registry.Update{Revision: 72, Nodes: []registry.NodeKey{changed}})
	for st.nodes["other"].GetVersion() != "later" {
		st.read(t, stream, 1)
	}
	if len(st.nodes) != 1 || len(st.mappings) != 0 {
		t.Errorf("%d nodes, mappings %v", len(st.nodes), st.mappings)
	}
}

func TestClusterIsWatchedInFewMessages(t *testing.T) {
	s := serve(t)
	const endpoints = 2500
	u := registry.Update{Complete: true, Cluster: 7, Revision: 70, Nodes: []registry.NodeKey{other()}}
	u.Nodes[0].Record.Ranges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}
	for i := range endpoints {
		u.Addresses = append(u.Addresses, mappingOf(i+5, 300))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := s.cluster.WatchCluster(ctx, &identityv1.WatchClusterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	s.reg.Observe(u)
	st := &state{nodes: map[string]*identityv1.Node{}, mappings: map[string]*identityv1.IPMapping{}}
	st.read(t, stream, -1)
	if len(st.nodes) != 1 || len(st.mappings) != endpoints+2 {
		t.Fatalf("%d nodes, %d mappings", len(st.nodes), len(st.mappings))
	}
	if st.messages > 20 {
		t.Errorf("%d messages", st.messages)
	}
	if n := st.nodes["other"]; n.GetUnderlay().GetMode() != identityv1.RoutingMode_ROUTING_MODE_OVERLAY ||
		n.GetUnderlay().GetTunnelPort() != 4789 || n.GetIncarnation() != "o" {
		t.Errorf("node %v", n)
	}
	if m := st.mappings["192.0.2.2/32"]; m.GetIdentity() != 6 || m.GetNode() != "other" {
		t.Errorf("the node's address: %v", m)
	}
	cancel()
	// While the reader is disconnected, one endpoint moves and one is removed.
	s.reg.Observe(registry.Update{
		Revision: 71, Addresses: []registry.AddressesKey{mappingOf(5, 301)},
		Removed: []registry.Removal{{Node: "other", Endpoint: "6"}},
	})
	servicetest.Eventually(t, "a token to continue from", func() bool {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := s.cluster.WatchCluster(ctx, &identityv1.WatchClusterRequest{ResumeToken: st.token})
		if err != nil {
			t.Fatal(err)
		}
		before := st.messages
		for st.mappings["10.0.2.5/32"].GetIdentity() != 301 || st.mappings["10.0.2.6/32"] != nil {
			st.read(t, stream, 1)
		}
		return st.messages-before <= 3
	})
	if len(st.mappings) != endpoints+1 {
		t.Errorf("%d mappings", len(st.mappings))
	}
	if n := len(listMappings(t, s.cluster, "other")); n != endpoints-1 {
		t.Errorf("%d mappings are listed of %d endpoints without the one that went", n, endpoints)
	}
}

func TestNodesAndAddressesAreShown(t *testing.T) {
	s := serve(t)
	foreign := mappingOf(5, 300)
	foreign.Endpoint, foreign.Value.Addresses = "foreign", []netip.Addr{netip.MustParseAddr("10.9.0.1")}
	s.reg.Observe(registry.Update{
		Complete: true, Nodes: []registry.NodeKey{other()},
		Addresses: []registry.AddressesKey{mappingOf(5, 300), foreign},
	})
	list := func() *identityv1.ListNodesResponse {
		stream, err := s.cluster.ListNodes(t.Context(), &identityv1.ListNodesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("more than one node: %v", err)
		}
		return m
	}
	if m := list(); m.GetState() != identityv1.NodeState_NODE_STATE_ALIVE || m.GetMappingCount() != 1 ||
		m.GetRefusedMappingCount() != 1 || m.GetLocal() {
		t.Errorf("listed: %v", m)
	}
	s.store.mu.Lock()
	s.store.away = true
	s.store.mu.Unlock()
	if m := list(); m.GetState() != identityv1.NodeState_NODE_STATE_UNSPECIFIED {
		t.Errorf("listed without a store: %v", m)
	}
	for node, want := range map[string]string{"": "10.0.2.5/32", "other": "10.0.2.5/32", "absent": "", "node": ""} {
		if got := listMappings(t, s.cluster, node); strings.Join(got, " ") != want {
			t.Errorf("mappings of %q: %q, want %q", node, got, want)
		}
	}
	m, err := s.cluster.GetIPMapping(t.Context(), &identityv1.GetIPMappingRequest{Address: "10.0.2.5"})
	if err != nil || m.GetMapping().GetIdentity() != 300 || m.GetRange() != "10.0.2.0/24" ||
		m.GetRangeNode() != "other" {
		t.Errorf("10.0.2.5: %v, %v", m, err)
	}
	m, err = s.cluster.GetIPMapping(t.Context(), &identityv1.GetIPMappingRequest{Address: "10.9.0.1"})
	if err != nil || m.Mapping != nil || len(m.GetRefused()) != 1 ||
		m.GetRefused()[0].GetReason() != "the address lies in no range of the node" {
		t.Errorf("10.9.0.1: %v, %v", m, err)
	}
	m, err = s.cluster.GetIPMapping(t.Context(), &identityv1.GetIPMappingRequest{Address: "10.0.2.77"})
	if err != nil || m.Mapping != nil || m.GetRangeNode() != "other" {
		t.Errorf("10.0.2.77: %v, %v", m, err)
	}
	if _, err := s.cluster.ForgetNode(t.Context(),
		&identityv1.ForgetNodeRequest{Name: "absent"}); status.Code(err) != codes.NotFound {
		t.Errorf("forget a node that is not registered: %v", err)
	}
	if _, err := s.cluster.ForgetNode(t.Context(),
		&identityv1.ForgetNodeRequest{Name: "other"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("forget a living node: %v", err)
	}
	if m, err := s.cluster.ForgetNode(t.Context(), &identityv1.ForgetNodeRequest{
		Name:  "other",
		Force: true,
	}); err != nil || m.GetMappingCount() != 1 || m.GetNode().GetName() != "other" {
		t.Errorf("forget by force: %v, %v", m, err)
	}
}

// listMappings returns the prefixes that ListIPMappings has of a node.
func listMappings(t *testing.T, client identityv1.ClusterServiceClient, node string) (prefixes []string) {
	t.Helper()
	stream, err := client.ListIPMappings(t.Context(), &identityv1.ListIPMappingsRequest{Node: node})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return prefixes
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := len(m.GetMappings()); n == 0 || n > mostEvents {
			t.Errorf("a message of %d mappings", n)
		}
		for _, x := range m.GetMappings() {
			prefixes = append(prefixes, x.GetPrefix())
		}
	}
}

// TestStatusCountsTheCluster: the status has the state of this node in the cluster, refused ranges and mappings, and
// pending writes to the store.
func TestStatusCountsTheCluster(t *testing.T) {
	s := serve(t)
	want := func(what string, want *identityv1.ClusterStatus) {
		t.Helper()
		servicetest.EventuallyNil(t, what, func() error {
			st, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
			if err == nil && !proto.Equal(st.GetCluster(), want) {
				err = fmt.Errorf("%v, want %v", st.GetCluster(), want)
			}
			return err
		})
	}
	foreign := mappingOf(6, 300)
	foreign.Value.Addresses = []netip.Addr{netip.MustParseAddr("10.9.0.1")}
	s.reg.Observe(registry.Update{
		Complete: true, Nodes: []registry.NodeKey{other()}, Addresses: []registry.AddressesKey{
			mappingOf(5, 300),
			foreign,
		},
	})
	resolve := func(id, address string) {
		t.Helper()
		if _, err := s.ResolveEndpoint(t.Context(), &identityv1.ResolveEndpointRequest{
			Owner: owner(id), Labels: []*workloadv1.Label{newLabel("cni", "app", "web")}, Addresses: []string{address},
		}); err != nil {
			t.Fatal(err)
		}
	}
	resolve("c1", "10.0.1.5")
	want("before this node is registered", &identityv1.ClusterStatus{
		Nodes: 1, Mappings: 1, RefusedMappings: 1, PendingPublications: 1,
	})
	if _, err := s.cluster.RegisterNode(t.Context(), &identityv1.RegisterNodeRequest{
		Underlay:  &identityv1.Underlay{Addresses: []string{"192.0.2.1"}},
		PodRanges: &identityv1.PodRanges{Prefixes: []string{"10.0.1.0/24"}},
	}); err != nil {
		t.Fatal(err)
	}
	want("when it is registered", &identityv1.ClusterStatus{
		Registered: true, Nodes: 2, Mappings: 1, RefusedMappings: 1,
	})
	s.store.mu.Lock()
	s.store.away = true
	s.store.mu.Unlock()
	resolve("c2", "10.0.1.6")
	want("while the store is unavailable", &identityv1.ClusterStatus{
		Registered: true, Nodes: 2, Mappings: 1, RefusedMappings: 1, PendingPublications: 1,
		PublicationError: "publish 1 endpoints: away",
	})
}

// TestOldEtcdIsAProblemOnceThereAreOtherNodes: a node that is alone in its cluster cannot write keys of other nodes.
func TestOldEtcdIsAProblemOnceThereAreOtherNodes(t *testing.T) {
	s := serve(t)
	s.impl.Cluster.Roles = func() error { return errors.New("etcd is old") }
	problems := func() (texts []string) {
		t.Helper()
		st, err := s.GetStatus(t.Context(), &identityv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range st.GetService().GetProblems() {
			texts = append(texts, p.GetReason().String()+" "+p.GetText())
		}
		return texts
	}
	if all := problems(); len(all) != 0 {
		t.Errorf("alone: %q", all)
	}
	s.reg.Observe(registry.Update{Complete: true, Nodes: []registry.NodeKey{other()}})
	if all := problems(); len(all) != 1 || all[0] != "PROBLEM_REASON_STORE etcd is old" {
		t.Errorf("with another node: %q", all)
	}
}

// TestAnAddressIsOutsideOnlyOnceTheClusterIsKnown: an address is not reported as unknown while it may still belong to
// another node or to this node.
func TestAnAddressIsOutsideOnlyOnceTheClusterIsKnown(t *testing.T) {
	s := serve(t)
	want := func(when, address string, code codes.Code) {
		t.Helper()
		_, err := s.cluster.GetIPMapping(t.Context(), &identityv1.GetIPMappingRequest{Address: address})
		if status.Code(err) != code {
			t.Errorf("%s, %s: %v, want %s", when, address, err, code)
		}
	}
	want("before anything is known", "10.0.2.5", codes.Unavailable)
	underlay := &registry.Underlay{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	if _, _, err := s.reg.Register(t.Context(), registry.Registration{Underlay: underlay}, false); err != nil {
		t.Fatal(err)
	}
	want("before the nodes were listed", "10.0.2.5", codes.Unavailable)
	s.reg.Observe(registry.Update{
		Complete: true, Nodes: []registry.NodeKey{other()}, Addresses: []registry.AddressesKey{mappingOf(5, 300)},
	})
	want("once the nodes were listed", "10.0.2.5", codes.OK)
	want("once the nodes were listed", "198.51.100.1", codes.NotFound)
}

func TestAddressesOfAPIServersHaveIdentities(t *testing.T) {
	s := serve(t)
	s.reg.Observe(registry.Update{Complete: true, Nodes: []registry.NodeKey{other()}})
	if _, _, err := s.reg.Register(t.Context(), registry.Registration{Underlay: &registry.Underlay{}}, false); err != nil {
		t.Fatal(err)
	}
	const local = identity.MinNodeLocal
	s.reg.SetAPIServers(map[netip.Addr]identity.Numeric{
		netip.MustParseAddr("192.0.2.2"):    local,
		netip.MustParseAddr("198.51.100.7"): local,
	})
	for a, want := range map[string]uint32{"192.0.2.2": 7, "198.51.100.7": uint32(local), "10.0.2.1": 6} {
		m, err := s.cluster.GetIPMapping(t.Context(), &identityv1.GetIPMappingRequest{Address: a})
		if err != nil || m.GetMapping().GetIdentity() != want {
			t.Errorf("%s: %v, %v; want %d", a, m, err, want)
		}
	}
	s.reg.SetAPIServers(nil)
	if m, err := s.cluster.GetIPMapping(t.Context(),
		&identityv1.GetIPMappingRequest{Address: "192.0.2.2"}); err != nil || m.GetMapping().GetIdentity() != 6 {
		t.Errorf("192.0.2.2 without an API server: %v, %v", m, err)
	}
}
