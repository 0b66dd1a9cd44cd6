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
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// reports takes reports, and sends some to each watch.
type reports struct {
	identityv1.UnimplementedClusterServiceServer
	got  chan *identityv1.ReportRefusalsRequest
	send chan *identityv1.WatchRefusalsResponse
}

func (r *reports) ReportRefusals(
	_ context.Context, req *identityv1.ReportRefusalsRequest,
) (*identityv1.ReportRefusalsResponse, error) {
	r.got <- req
	return &identityv1.ReportRefusalsResponse{}, nil
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

func serveReports(t *testing.T) (*reports, *Refusals) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	r := &reports{got: make(chan *identityv1.ReportRefusalsRequest), send: make(chan *identityv1.WatchRefusalsResponse)}
	srv, done := grpc.NewServer(), make(chan error, 1)
	identityv1.RegisterClusterServiceServer(srv, r)
	go func() { done <- srv.Serve(l) }()
	conn, err := client.Dial(socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); srv.Stop(); <-done })
	return r, NewRefusals(conn, slog.New(slog.DiscardHandler))
}

func TestReportHasABound(t *testing.T) {
	r, refusals := serveReports(t)
	var list []Refused
	for i := range 5000 {
		k := policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: fmt.Sprint("p", i)}
		list = append(list, Refused{k, strings.Repeat("x", 1000)})
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- refusals.Report(ctx, func(context.Context) ([]Refused, error) { return list, nil }) }()
	got := <-r.got
	bytes := 0
	for _, x := range got.GetRefusals() {
		bytes += len(x.GetName()) + len(x.GetReason())
	}
	if n := len(got.GetRefusals()); n == 0 || n+int(got.GetOmitted()) != len(list) || bytes > maxReportBytes {
		t.Errorf("%d refusals of %d bytes, and %d omitted", n, bytes, got.GetOmitted())
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestReportsOfAllNodesAreToldOnceTheyAreComplete(t *testing.T) {
	r, refusals := serveReports(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended, said := make(chan error, 1), make(chan string)
	go func() {
		ended <- refusals.Follow(ctx, func(all Reports) {
			var nodes []string
			for node, list := range all {
				nodes = append(nodes, fmt.Sprint(node, " ", len(list), " ", list[0].Key, ": ", list[0].Reason))
			}
			said <- strings.Join(nodes, "; ")
		})
	}()
	one := &identityv1.PolicyRefusal{Kind: "NetworkPolicy", Namespace: "a", Name: "p", Reason: "too large"}
	r.send <- &identityv1.WatchRefusalsResponse{Node: "n1", Refusals: []*identityv1.PolicyRefusal{one}}
	r.send <- &identityv1.WatchRefusalsResponse{Complete: true}
	if got, want := <-said, "n1 1 NetworkPolicy a/p: too large"; got != want {
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
