// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/controller/internal/nodereports"
)

// reports sends some reports to each watch.
type reports struct {
	identityv1.UnimplementedClusterServiceServer
	send chan *identityv1.WatchRefusalsResponse
}

func (r *reports) WatchRefusals(
	_ *identityv1.WatchRefusalsRequest, stream grpc.ServerStreamingServer[identityv1.WatchRefusalsResponse],
) error {
	for {
		select {
		case m := <-r.send:
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

func serveReports(t *testing.T) (*reports, *Reports) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	r := &reports{send: make(chan *identityv1.WatchRefusalsResponse)}
	srv, done := grpc.NewServer(), make(chan error, 1)
	identityv1.RegisterClusterServiceServer(srv, r)
	go func() { done <- srv.Serve(l) }()
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); srv.Stop(); <-done })
	return r, NewReports(conn, slog.New(slog.DiscardHandler))
}

func TestReportsOfAllNodesAreToldOnceTheyAreComplete(t *testing.T) {
	r, followed := serveReports(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended, said := make(chan error, 1), make(chan string)
	go func() {
		ended <- followed.Follow(ctx, func(all nodereports.Cluster) {
			var nodes []string
			for node, r := range all.Services {
				nodes = append(nodes, fmt.Sprint(node, " services ", len(r.Refused)))
			}
			for node, r := range all.Policies {
				text := fmt.Sprint(node, " ", len(r.Refused), "+", r.Omitted)
				if r.Unreadable {
					text += " unreadable"
				} else if r.Omitted > 0 {
					text += fmt.Sprint(" A ", r.Reasons["A"])
				}
				for _, x := range r.Refused {
					text += fmt.Sprint(" ", x.Key, ": ", x.Reason)
				}
				nodes = append(nodes, text)
			}
			said <- strings.Join(nodes, "; ")
		})
	}()
	one := &identityv1.PolicyRefusal{Kind: "NetworkPolicy", Namespace: "a", Name: "p", Reason: "too large"}
	r.send <- &identityv1.WatchRefusalsResponse{Node: "n1", Refusals: []*identityv1.PolicyRefusal{one}}
	r.send <- &identityv1.WatchRefusalsResponse{Complete: true}
	if got, want := <-said, "n1 1+0 NetworkPolicy a/p: too large"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for _, omitted := range []uint32{7, 8} {
		m := &identityv1.WatchRefusalsResponse{Node: "n1", Omitted: omitted, OmittedReasons: map[string]uint32{"A": 5}}
		if omitted == 7 {
			m.Refusals = []*identityv1.PolicyRefusal{one}
		}
		r.send <- m
		if got, want := <-said, fmt.Sprintf("n1 %d+%d A 5", len(m.GetRefusals()), omitted); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for _, omitted := range []uint32{0, 1} {
		r.send <- &identityv1.WatchRefusalsResponse{Node: "n1", Omitted: omitted, Unreadable: true}
		if got, want := <-said, fmt.Sprintf("n1 0+%d unreadable", omitted); !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	// The report about Services is another one.
	m := &identityv1.WatchRefusalsResponse{
		Node: "n1", Subject: identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES,
		Refusals: []*identityv1.PolicyRefusal{{Kind: "Service", Namespace: "a", Name: "s"}},
	}
	r.send <- m
	if got, want := <-said, "n1 services 1; n1 0+1 unreadable"; !strings.HasPrefix(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	m.Refusals = nil
	r.send <- m
	if got, want := <-said, "n1 0+1 unreadable"; !strings.HasPrefix(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	r.send <- &identityv1.WatchRefusalsResponse{Node: "n1"}
	if got := <-said; got != "" {
		t.Errorf("%q after the report was removed", got)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
