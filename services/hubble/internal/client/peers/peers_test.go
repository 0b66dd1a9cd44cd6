// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peers

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// identity simulates a registry of nodes. The test provides its answers, each as a stream of messages.
type identity struct {
	identityv1.UnimplementedClusterServiceServer
	streams chan chan *identityv1.WatchClusterResponse // a closed inner channel ends the stream; nil rejects the token
	tokens  chan string
}

func (i *identity) WatchCluster(
	r *identityv1.WatchClusterRequest, stream grpc.ServerStreamingServer[identityv1.WatchClusterResponse],
) error {
	if !r.GetNodesOnly() {
		return status.Error(codes.InvalidArgument, "mappings are requested")
	}
	ended := stream.Context().Done()
	select {
	case i.tokens <- string(r.GetResumeToken()):
	case <-ended:
		return stream.Context().Err()
	}
	var messages chan *identityv1.WatchClusterResponse
	select {
	case messages = <-i.streams:
	case <-ended:
		return stream.Context().Err()
	}
	for {
		select {
		case m, ok := <-messages:
			switch {
			case !ok:
				return status.Error(codes.Unavailable, "the service is stopping")
			case m == nil:
				return status.Error(codes.OutOfRange, "the token is too old")
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-ended:
			return stream.Context().Err()
		}
	}
}

// listing returns messages that list nodes, with a bookmark. The last message has the token.
func listing(token string, names ...string) (all []*identityv1.WatchClusterResponse) {
	m := &identityv1.WatchClusterResponse{}
	for _, name := range names {
		name, address, _ := strings.Cut(name, "@")
		m.Nodes = append(m.Nodes, &identityv1.Node{
			Name: name, Version: "v", Underlay: &identityv1.Underlay{Addresses: []string{address}},
		})
	}
	return append(all, m, &identityv1.WatchClusterResponse{
		ResumeToken: []byte(token), Bookmark: &identityv1.Bookmark{SnapshotComplete: true},
	})
}

// TestNodesAreThoseOfTheRegistry: during an interruption, the last known nodes stay. The next listing removes the
// nodes that left in the meantime.
func TestNodesAreThoseOfTheRegistry(t *testing.T) {
	service := &identity{streams: make(chan chan *identityv1.WatchClusterResponse), tokens: make(chan string)}
	socket := filepath.Join(t.TempDir(), "identity.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	identityv1.RegisterClusterServiceServer(server, service)
	go server.Serve(l) //nolint:errcheck // ends with Stop
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	n := New(conn, log.Discard())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		conn.Close() //nolint:errcheck // nothing was written
		server.Stop()
	})
	open := func(token string) chan *identityv1.WatchClusterResponse {
		t.Helper()
		if got := <-service.tokens; got != token {
			t.Errorf("the watch continues after %q, want %q", got, token)
		}
		stream := make(chan *identityv1.WatchClusterResponse)
		service.streams <- stream
		return stream
	}
	wants := func(want string) {
		t.Helper()
		for {
			all, changed := n.Others()
			var got []string
			for _, x := range all {
				got = append(got, fmt.Sprint(x.Name, x.Addresses))
			}
			if strings.Join(got, " ") == want {
				return
			}
			select {
			case <-changed:
			case <-t.Context().Done():
				t.Fatalf("%s, want %s", got, want)
			}
		}
	}
	stream := open("")
	for _, m := range listing("1", "b@192.0.2.2", "a@192.0.2.1", "c@nonsense") {
		stream <- m
	}
	wants("a[192.0.2.1] b[192.0.2.2] c[]")
	stream <- &identityv1.WatchClusterResponse{
		ResumeToken: []byte("2"), RemovedNodes: []string{"c"},
		Mappings: []*identityv1.IPMapping{{Prefix: "10.0.0.1/32", Node: "a"}}, // as from an earlier version
	}
	wants("a[192.0.2.1] b[192.0.2.2]")
	close(stream)
	stream = open("2")
	wants("a[192.0.2.1] b[192.0.2.2]")
	stream <- nil
	stream = open("")
	for _, m := range listing("7", "b@192.0.2.3", "d@2001:db8::1") {
		stream <- m
	}
	wants("b[192.0.2.3] d[2001:db8::1]")
}
