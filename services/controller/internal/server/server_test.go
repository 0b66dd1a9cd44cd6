// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
	"github.com/sluice-net/sluice/services/controller/internal/election"
	"github.com/sluice-net/sluice/services/controller/internal/subject"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// fixed is a Subject whose status does not change.
type fixed subject.Status

func (f fixed) Status() subject.Status { return subject.Status(f) }

// serve returns a server with the election e, whose evaluation responds with fault.
func serve(e election.Status, fault error) *Server {
	return New(Options{
		Version: "v1", Started: time.Unix(1e9, 0),
		Election: func() election.Status { return e },
		Answers:  func(context.Context) error { return fault },
		Subjects: []Subject{
			fixed{Name: "policy status", Pending: 2, Done: 3, Failed: 1, Problem: "refused"},
			fixed{Name: "node garbage collection", Done: 5},
		},
	})
}

func get(t *testing.T, s *Server) *controllerv1.GetStatusResponse {
	t.Helper()
	r, err := s.GetStatus(t.Context(), &controllerv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func problems(r *controllerv1.GetStatusResponse) string {
	var texts []string
	for _, p := range r.GetService().GetProblems() {
		texts = append(texts, p.GetText())
	}
	return strings.Join(texts, "; ")
}

// TestStatusHasTheElectionAndEverySubject: only the failures of the elected process are problems.
func TestStatusHasTheElectionAndEverySubject(t *testing.T) {
	e := election.Status{
		Namespace: "n", Lease: "l", Identity: "a", Holder: "a", Leading: true, Elected: time.Unix(2e9, 0),
	}
	r := get(t, serve(e, nil))
	if x := r.GetElection(); !x.GetLeading() || x.GetLease() != "l" || x.GetElectedTime().AsTime().Unix() != 2e9 {
		t.Errorf("the election is %v", x)
	}
	if all := r.GetSubjects(); len(all) != 2 || all[0].GetName() != "node garbage collection" ||
		all[1].GetPending() != 2 || all[1].GetRequests() != 3 || all[1].GetFailedRequests() != 1 ||
		all[1].GetError() != "refused" {
		t.Errorf("the subjects are %v", all)
	}
	if got := problems(r); got != "policy status: refused" {
		t.Errorf("the problems of the elected process are %q", got)
	}

	e = election.Status{Namespace: "n", Lease: "l", Identity: "b", Holder: "a", Problem: "away"}
	r = get(t, serve(e, nil))
	if got := problems(r); got != "cannot read or write the Lease: away" || r.GetElection().GetElectedTime() != nil {
		t.Errorf("the problems of another process are %q, its election is %v", got, r.GetElection())
	}
}

// TestStatusWaitsForTheEvaluation: a probe restarts a process whose evaluation does not respond.
func TestStatusWaitsForTheEvaluation(t *testing.T) {
	for fault, want := range map[error]codes.Code{
		context.DeadlineExceeded: codes.DeadlineExceeded, errors.New("closed"): codes.Unknown,
	} {
		_, err := serve(election.Status{}, fault).GetStatus(t.Context(), &controllerv1.GetStatusRequest{})
		if status.Code(err) != want {
			t.Errorf("%v: %v, want %v", fault, err, want)
		}
	}
}

func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	doc, err := os.ReadFile("../../../../docs/reference/controller.md")
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(serve(election.Status{Leading: true}, nil).Collector()); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string]bool)
	for _, m := range regexp.MustCompile("`(sluice_controller_[a-z_]+)`").FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = true
	}
	for _, f := range families {
		if !documented[f.GetName()] {
			t.Errorf("%s is not in docs/reference/controller.md", f.GetName())
		}
		delete(documented, f.GetName())
	}
	for name := range documented {
		t.Errorf("docs/reference/controller.md has %s, but the process does not", name)
	}
}
