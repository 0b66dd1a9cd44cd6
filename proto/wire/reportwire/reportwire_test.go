// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package reportwire

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
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

func serveReports(t *testing.T) (*reports, *Reporter) {
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
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); srv.Stop(); <-done })
	return r, New(identityv1.NewClusterServiceClient(conn), Options{Log: slog.New(slog.DiscardHandler)})
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
		"a report": {{"NetworkPolicy", "shop", "p", "too many rules", "A"}}, "an empty one": nil,
	} {
		synctest.Test(t, func(t *testing.T) {
			var sent calls
			ctx, cancel := context.WithTimeout(t.Context(), 3*reportAgain+time.Minute)
			defer cancel()
			r := New(identityv1.NewClusterServiceClient(&sent), Options{Log: slog.New(slog.DiscardHandler)})
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
		list = append(list, Refused{
			"NetworkPolicy", "shop", fmt.Sprint("p", i), strings.Repeat("…", 400), []string{"A", "B"}[i%2],
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- refusals.Report(ctx, func(context.Context) ([]Refused, error) { return list, nil }) }()
	got := <-r.got
	bytes := 0
	for _, x := range got.GetRefusals() {
		bytes += len(x.GetName()) + len(x.GetReason())
	}
	if n := len(got.GetRefusals()); n == 0 || n+int(got.GetOmitted()) != len(list) || bytes > maxBytes {
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

// TestNodesOfALargeClusterReportLessOften: the same objects are beyond a share on every node, and a tenant can change
// them at any time, so the interval grows with the cluster.
func TestNodesOfALargeClusterReportLessOften(t *testing.T) {
	for nodes, want := range map[int]time.Duration{1: 10 * time.Second, 500: 10 * time.Second, 5000: 100 * time.Second} {
		r := New(nil, Options{Nodes: func() int { return nodes }})
		if got := r.interval(); got != want {
			t.Errorf("%d nodes report every %s, want %s", nodes, got, want)
		}
	}
}

// TestReportOfASubjectHasItsOwnBound: it is smaller than the common one.
func TestReportOfASubjectHasItsOwnBound(t *testing.T) {
	r, reporter := serveReports(t)
	reporter.options.Subject = identityv1.RefusalSubject_REFUSAL_SUBJECT_SERVICES
	reporter.options.MaxBytes = 1000
	var list []Refused
	for i := range 100 {
		list = append(list, Refused{"Service", "shop", fmt.Sprint("s", i), "frontends", "A"})
	}
	go reporter.send(t.Context(), list) //nolint:errcheck // compared below
	got := <-r.got
	if n := len(got.GetRefusals()); n == 0 || n > 10 || n+int(got.GetOmitted()) != len(list) ||
		got.GetSubject() != reporter.options.Subject {
		t.Errorf("%d Services and %d omitted, about %s", n, got.GetOmitted(), got.GetSubject())
	}
}

// TestReportThatChangesAllTheTimeIsSentLessOften: when the changes end, the report is sent as often as before.
func TestReportThatChangesAllTheTimeIsSentLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent calls
		var mu sync.Mutex
		asked, changing := 0, true // guarded by mu
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		r := New(identityv1.NewClusterServiceClient(&sent), Options{Log: slog.New(slog.DiscardHandler)})
		go func() {
			ended <- r.Report(ctx, func(context.Context) ([]Refused, error) {
				mu.Lock()
				defer mu.Unlock()
				if changing {
					asked++
				}
				return []Refused{{"Service", "shop", fmt.Sprint("s", asked), "frontends", "A"}}, nil
			})
		}()
		time.Sleep(time.Hour)
		synctest.Wait()
		if sent.n < 20 || sent.n > 36 {
			t.Errorf("%d reports in an hour, want one in 2 to 3 minutes", sent.n)
		}
		mu.Lock()
		changing = false
		mu.Unlock()
		time.Sleep(2 * slowest * reportEvery)
		synctest.Wait()
		before := sent.n
		mu.Lock()
		asked++
		mu.Unlock()
		time.Sleep(2 * reportEvery)
		synctest.Wait()
		if sent.n != before+1 {
			t.Errorf("%d reports about a change, want 1 within 20 s", sent.n-before)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
