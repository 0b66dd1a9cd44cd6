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
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// reports receives reports.
type reports struct {
	identityv1.UnimplementedClusterServiceServer
	got chan *identityv1.ReportRefusalsRequest
}

func (r *reports) ReportRefusals(
	_ context.Context, req *identityv1.ReportRefusalsRequest,
) (*identityv1.ReportRefusalsResponse, error) {
	r.got <- req
	return &identityv1.ReportRefusalsResponse{}, nil
}

func serveReports(t *testing.T) (*reports, *Refusals) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	r := &reports{got: make(chan *identityv1.ReportRefusalsRequest)}
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

// calls counts the calls of a client.
type calls struct {
	grpc.ClientConnInterface
	n int
}

func (c *calls) Invoke(context.Context, string, any, any, ...grpc.CallOption) error {
	c.n++
	return nil
}

// TestUnchangedReportIsSentAgain: an unchanged report is sent again, so that a report that was lost or corrupted in
// etcd is replaced. An empty report is sent again too: it deletes the stored report.
func TestUnchangedReportIsSentAgain(t *testing.T) {
	for what, list := range map[string][]Refused{
		"a report": {{policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: "p"}, "too many rules", "A"}}, "an empty one": nil,
	} {
		synctest.Test(t, func(t *testing.T) {
			var sent calls
			ctx, cancel := context.WithTimeout(t.Context(), 3*reportAgain+time.Minute)
			defer cancel()
			r := NewRefusals(&sent, slog.New(slog.DiscardHandler))
			if err := r.Report(ctx, func(context.Context) ([]Refused, error) { return list, nil }); err != nil {
				t.Error(err)
			}
			if sent.n != 4 {
				t.Errorf("%s was sent %d times in 31 minutes, want 4", what, sent.n)
			}
		})
	}
}

func TestReportHasABound(t *testing.T) {
	r, refusals := serveReports(t)
	var list []Refused
	for i := range 5000 {
		k := policy.Key{Kind: "NetworkPolicy", Namespace: "shop", Name: fmt.Sprint("p", i)}
		list = append(list, Refused{k, strings.Repeat("x", 1000), []string{"A", "B"}[i%2]})
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
	counts := got.GetOmittedReasons()
	if a, b := counts["A"], counts["B"]; a+b != got.GetOmitted() || max(a, b)-min(a, b) > 1 || len(counts) != 2 {
		t.Errorf("%d omitted, by reason %v", got.GetOmitted(), counts)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
