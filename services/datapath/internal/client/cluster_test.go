// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// scriptedCluster sends messages to the first watch, rejects the token expired, and keeps registrations.
type scriptedCluster struct {
	identityv1.UnimplementedClusterServiceServer
	send chan *identityv1.WatchClusterResponse // messages that the server sends; nil ends a watch

	mu         sync.Mutex
	tokens     []string                          // guarded by mu; tokens with which the watches began
	expired    string                            // guarded by mu; a token that the server rejects
	registered []*identityv1.RegisterNodeRequest // guarded by mu
	refuse     error                             // guarded by mu
}

func (s *scriptedCluster) WatchCluster(
	r *identityv1.WatchClusterRequest, stream grpc.ServerStreamingServer[identityv1.WatchClusterResponse],
) error {
	s.mu.Lock()
	s.tokens = append(s.tokens, string(r.GetResumeToken()))
	expired := s.expired != "" && s.expired == string(r.GetResumeToken())
	s.mu.Unlock()
	if expired {
		return status.Error(codes.OutOfRange, "too old")
	}
	for {
		select {
		case m := <-s.send:
			if m == nil {
				return status.Error(codes.Unavailable, "the end")
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (s *scriptedCluster) RegisterNode(
	_ context.Context, r *identityv1.RegisterNodeRequest,
) (*identityv1.RegisterNodeResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refuse != nil {
		return nil, s.refuse
	}
	s.registered = append(s.registered, r)
	return &identityv1.RegisterNodeResponse{Registered: true, Node: &identityv1.Node{Name: "n"}}, nil
}

func serveCluster(t *testing.T) (*scriptedCluster, *Cluster) {
	t.Helper()
	s := &scriptedCluster{send: make(chan *identityv1.WatchClusterResponse, 16)}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "identity.sock"))
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	identityv1.RegisterClusterServiceServer(srv, s)
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(srv.Stop)
	cc, err := grpc.NewClient("unix:"+l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return s, NewCluster(cc, log.Discard())
}

// known is a sink that keeps the received state.
type known struct {
	mu       sync.Mutex
	set      map[cluster.Key]cluster.Item
	complete int
	err      error
}

func (k *known) Apply(_ context.Context, c watch.Changes[cluster.Key, cluster.Item]) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key, item := range c.Upserts {
		k.set[key] = item
	}
	for key := range c.Deletes {
		delete(k.set, key)
	}
	return nil
}

func (k *known) Complete(_ context.Context, listed map[cluster.Key]struct{}) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.complete++
	for key := range k.set {
		if _, ok := listed[key]; !ok {
			delete(k.set, key)
		}
	}
	return nil
}

func (k *known) Failed(_ context.Context, why error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.err = why
	return nil
}

func (k *known) text() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []string
	for key, item := range k.set {
		if item.Node != nil {
			out = append(out, fmt.Sprintf("%s %s %v %v", key.Node, item.Node.Incarnation, item.Node.Addresses, item.Node.Ranges))
		} else {
			out = append(out, fmt.Sprintf("%v %s %d", key.Prefix, item.On, item.Identity))
		}
	}
	slices.Sort(out)
	return fmt.Sprintf("%d %q", k.complete, out)
}

// everything returns the bookmark after a complete listing.
func everything(token string) *identityv1.WatchClusterResponse {
	return &identityv1.WatchClusterResponse{
		Bookmark: &identityv1.Bookmark{SnapshotComplete: true}, ResumeToken: []byte(token),
	}
}

// TestClusterStreamIsFollowedOverItsEnds uses real messages: several events in one message, and ends of the stream with
// valid and invalid tokens.
func TestClusterStreamIsFollowedOverItsEnds(t *testing.T) {
	s, c := serveCluster(t)
	k := &known{set: map[cluster.Key]cluster.Item{}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		o := watch.FollowOptions{Max: 100, RetryMin: 1, RetryMax: 1, Log: log.Discard()}
		done <- watch.Follow(ctx, cluster.Source(c), k, o)
	}()
	t.Cleanup(func() { cancel(); <-done })
	want := func(text string) {
		t.Helper()
		servicetest.EventuallyNil(t, "the set", func() error {
			if got := k.text(); got != text {
				return fmt.Errorf("%s, want %s", got, text)
			}
			return nil
		})
	}
	node := func(name string, ranges ...string) *identityv1.Node {
		return &identityv1.Node{
			Name: name, Incarnation: "1", PodRanges: ranges,
			Underlay: &identityv1.Underlay{Addresses: []string{"192.0.2.1", "no address"}},
		}
	}
	mapping := func(p, node string, id uint32) *identityv1.IPMapping {
		return &identityv1.IPMapping{Prefix: p, Node: node, Identity: id}
	}
	s.send <- &identityv1.WatchClusterResponse{
		Nodes: []*identityv1.Node{node("b", "10.1.0.0/24", "nothing"), node("c")},
		Mappings: []*identityv1.IPMapping{
			mapping("10.1.0.5/32", "b", 300), mapping("broken", "b", 300), mapping("192.0.2.9/32", "", 0xff0001),
		},
	}
	s.send <- everything("1")
	want(`1 ["10.1.0.5/32 b 300" "192.0.2.9/32  16711681" "b 1 [192.0.2.1] [10.1.0.0/24]" "c 1 [192.0.2.1] []"]`)
	s.send <- &identityv1.WatchClusterResponse{
		Mappings: []*identityv1.IPMapping{mapping("10.1.0.6/32", "b", 301)}, RemovedPrefixes: []string{"10.1.0.5/32"},
		RemovedNodes: []string{"c"}, ResumeToken: []byte("2"),
	}
	want(`1 ["10.1.0.6/32 b 301" "192.0.2.9/32  16711681" "b 1 [192.0.2.1] [10.1.0.0/24]"]`)
	s.send <- nil // the client continues from its last token
	s.send <- &identityv1.WatchClusterResponse{RemovedPrefixes: []string{"192.0.2.9/32"}, ResumeToken: []byte("3")}
	want(`1 ["10.1.0.6/32 b 301" "b 1 [192.0.2.1] [10.1.0.0/24]"]`)
	s.mu.Lock()
	s.expired = "3"
	s.mu.Unlock()
	s.send <- nil // lists again
	s.send <- &identityv1.WatchClusterResponse{Nodes: []*identityv1.Node{node("b")}}
	s.send <- everything("4")
	want(`2 ["b 1 [192.0.2.1] []"]`)
	s.mu.Lock()
	defer s.mu.Unlock()
	if got := []string{"", "2", "3", ""}; !slices.Equal(s.tokens, got) {
		t.Errorf("tokens of the watches: %q, want %q", s.tokens, got)
	}
}

// TestNodeIsRegisteredWheneverItChanges expects registrations at the start, after a change, after the service was
// unavailable, and after a failure, and no others.
func TestNodeIsRegisteredWheneverItChanges(t *testing.T) {
	s, c := serveCluster(t)
	var mu sync.Mutex
	u := cluster.Underlay{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, MTU: 1450}
	r := cluster.NewRegistrar(c, func() (cluster.Underlay, error) {
		mu.Lock()
		defer mu.Unlock()
		return u, nil
	}, cluster.NewChanges(), log.Discard())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	count := func(n int) {
		t.Helper()
		servicetest.EventuallyNil(t, "registrations", func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if len(s.registered) != n || r.Err() != nil {
				return fmt.Errorf("%d, want %d: %w", len(s.registered), n, r.Err())
			}
			return nil
		})
	}
	count(1)
	mu.Lock()
	u.Overlay = []netip.Addr{netip.MustParseAddr("10.1.0.1")}
	mu.Unlock()
	r.Changed()
	count(2)
	r.Changed() // nothing has changed
	r.Lost()
	count(3)
	s.mu.Lock()
	s.refuse = status.Error(codes.Unavailable, "no disk")
	s.mu.Unlock()
	r.Lost()
	servicetest.Eventually(t, "a failure", func() bool { return r.Err() != nil })
	s.mu.Lock()
	s.refuse = nil
	s.mu.Unlock()
	count(4)
	got := s.registered[3]
	if got.GetUnderlay().GetOverlayAddresses()[0] != "10.1.0.1" || got.GetUnderlay().GetMtu() != 1450 ||
		got.PodRanges != nil || got.GetUnderlay().GetMode() != 0 || got.GetUnderlay().GetTunnelPort() != 0 {
		t.Errorf("registered %v, want the underlay alone, without mode and port", got)
	}
}

// TestWhatANodeRegistersIsWhatOthersHear: mode, port, MTU and addresses pass through the API unchanged.
func TestWhatANodeRegistersIsWhatOthersHear(t *testing.T) {
	s, c := serveCluster(t)
	for i, u := range []cluster.Underlay{
		{Mode: cluster.Overlay, Port: 4789, MTU: 1450, Overlay: []netip.Addr{netip.MustParseAddr("10.1.0.1")}},
		{Mode: cluster.Native, MTU: 9000, Addresses: []netip.Addr{netip.MustParseAddr("2001:db8::1")}},
		{Mode: cluster.None},
	} {
		if err := c.Register(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		if name := c.NodeName(); name != "n" {
			t.Errorf("the node's name is %q", name)
		}
		s.mu.Lock()
		n := &identityv1.Node{Name: "n", Underlay: s.registered[i].GetUnderlay()}
		s.mu.Unlock()
		got := c.node(n)
		heard := cluster.Underlay{
			Mode: got.Mode, Port: got.TunnelPort, MTU: got.MTU, Overlay: got.Overlay, Addresses: got.Addresses,
		}
		if !reflect.DeepEqual(heard, u) {
			t.Errorf("registered %+v, others receive %+v", u, heard)
		}
	}
}
