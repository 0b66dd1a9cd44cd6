// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/services/hubble/internal/api/peer"
	"github.com/sluice-net/sluice/services/hubble/internal/client/peers"
)

// notified receives messages about peers.
type notified struct {
	grpc.ServerStream
	ctx context.Context
	got chan string
}

func (n *notified) Context() context.Context { return n.ctx }

func (n *notified) Send(m *peer.ChangeNotification) error {
	n.got <- fmt.Sprintf("%s %s at %q as %q", strings.TrimPrefix(m.GetType().String(), "PEER_"), m.GetName(),
		m.GetAddress(), m.GetTls().GetServerName())
	return nil
}

func other(name string, addresses ...string) peers.Node {
	n := peers.Node{Name: name, Version: "v2"}
	for _, a := range addresses {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
	}
	return n
}

// TestPeersAreToldOnceAndWhenTheyChange: this node is sent first. A change of a node that does not affect its address
// is not sent.
func TestPeersAreToldOnceAndWhenTheyChange(t *testing.T) {
	b := newBench(t, 64<<20)
	b.o.Address = "192.0.2.1:4244"
	type state struct {
		nodes   []peers.Node
		changed chan struct{}
	}
	states := make(chan state, 1)
	change := func(nodes ...peers.Node) chan struct{} {
		s := state{nodes, make(chan struct{})}
		states <- s
		return s.changed
	}
	b.others = func() ([]peers.Node, <-chan struct{}) {
		s := <-states
		return s.nodes, s.changed
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream := &notified{ctx: ctx, got: make(chan string)}
	ended := make(chan error)
	next := change(other("node-0"), other("node-1", "192.0.2.9"), other("node-2", "2001:db8::2", "192.0.2.2"),
		other("node-3", "2001:db8::3"))
	go func() { ended <- b.Notify(nil, stream) }()
	wants := func(all ...string) {
		t.Helper()
		for _, want := range all {
			if got := <-stream.got; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		}
	}
	wants(`ADDED node-1 at "192.0.2.1:4244" as "node-1"`, `ADDED node-0 at "" as "node-0"`,
		`ADDED node-2 at "192.0.2.2:4244" as "node-2"`, `ADDED node-3 at "[2001:db8::3]:4244" as "node-3"`)
	close(next)
	node3 := other("node-3", "2001:db8::3")
	node3.Version = "v3"
	next = change(other("node-0", "192.0.2.10"), node3)
	wants(`DELETED node-2 at "192.0.2.2:4244" as "node-2"`, `UPDATED node-0 at "192.0.2.10:4244" as "node-0"`)
	close(next)
	change(other("node-0", "192.0.2.10"), node3, other("node-4", "192.0.2.4"))
	wants(`ADDED node-4 at "192.0.2.4:4244" as "node-4"`)
	cancel()
	if err := <-ended; status.Code(err) != codes.Canceled {
		t.Errorf("the call ended with %v", err)
	}
}

// TestNodesOfTheClusterAreListed: the state of another node is unknown. If this node has no port for other machines,
// the addresses of other nodes are unknown, too.
func TestNodesOfTheClusterAreListed(t *testing.T) {
	b := newBench(t, 64<<20)
	b.others = func() ([]peers.Node, <-chan struct{}) { return []peers.Node{other("node-2", "192.0.2.2")}, nil }
	for own, want := range map[string]string{
		"unix:///run/x.sock": `node-1 NODE_CONNECTED "unix:///run/x.sock" "", node-2 UNKNOWN_NODE_STATE "" ""`,
		"node-1:4244": `node-1 NODE_CONNECTED "node-1:4244" "node-1", ` +
			`node-2 UNKNOWN_NODE_STATE "192.0.2.2:4244" "node-2"`,
	} {
		b.o.Address = own
		nodes, err := b.GetNodes(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, n := range nodes.GetNodes() {
			got = append(got, fmt.Sprintf("%s %s %q %q", n.GetName(), n.GetState(), n.GetAddress(), n.GetTls().GetServerName()))
		}
		if got := strings.Join(got, ", "); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	b.o.Address, b.o.ServerName = "node-1:4244", "hubble.example"
	nodes, err := b.GetNodes(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.GetNodes() {
		if n.GetTls().GetServerName() != b.o.ServerName {
			t.Errorf("with one certificate for all nodes, the server name of %s is %q", n.GetName(), n.GetTls().GetServerName())
		}
	}
}
