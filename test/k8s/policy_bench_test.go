// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"syscall"
	"testing"
	"time"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// tables returns a channel that reports the revisions of db's policy tables.
func (n *policyNode) tables(ctx context.Context) <-chan uint64 {
	n.t.Helper()
	stream, err := n.WatchPolicyTables(ctx)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := stream.Send(&policyv1.WatchPolicyTablesRequest{Message: &policyv1.WatchPolicyTablesRequest_Subscribe{
		Subscribe: &policyv1.Subscribe{
			Name: "bench", Subjects: []uint32{n.db}, Role: policyv1.SubscriberRole_SUBSCRIBER_ROLE_WATCHES,
			Formats: []policyv1.TableFormat{policyv1.TableFormat_TABLE_FORMAT_RANGES},
		},
	}}); err != nil {
		n.t.Fatal(err)
	}
	revisions := make(chan uint64, 1000)
	go func() {
		defer close(revisions)
		for {
			message, err := stream.Recv()
			if err != nil {
				return
			}
			for _, step := range message.GetSteps() {
				if b := step.GetBarrier(); b != nil {
					revisions <- b.GetPolicyRevision()
				}
			}
		}
	}()
	return revisions
}

// BenchmarkAPIWriteToTables measures the time from the request that changes a NetworkPolicy, and from its response,
// to the revision of the tables.
func BenchmarkAPIWriteToTables(b *testing.B) {
	a := newAPI(b)
	a.shop()
	n := newPolicyNode(b, a)
	a.do(http.MethodPost, networking, networkPolicy("p", 1))
	n.reaches("the policy", 1, true)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	revisions := n.tables(ctx)
	last := uint64(0)
	for last == 0 {
		last = <-revisions
	}
	var request, answer []time.Duration
	port := 1
	for b.Loop() {
		port = port%60_000 + 1
		began := time.Now()
		a.do(http.MethodPatch, networking+"/p", object{"spec": networkPolicy("p", port+1)["spec"]})
		answered := time.Now()
		for before := last; last == before; {
			revision, ok := <-revisions
			if !ok {
				b.Fatal("the stream of tables ended")
			}
			last = revision
		}
		request = append(request, time.Since(began))
		answer = append(answer, max(0, time.Since(answered)))
	}
	for name, all := range map[string][]time.Duration{"request": request, "answer": answer} {
		slices.Sort(all)
		for _, p := range []int{50, 99} {
			b.ReportMetric(float64(all[(len(all)-1)*p/100].Microseconds())/1000, fmt.Sprintf("ms-p%d-from-%s", p, name))
		}
	}
}

// BenchmarkAPITenThousandPolicies measures the memory of the service with 10,000 policies, and the time until it has
// all of them, with an empty state and after a restart.
func BenchmarkAPITenThousandPolicies(b *testing.B) {
	const policies = 10_000
	a := newAPI(b)
	a.shop()
	n := newPolicyNode(b, a)
	n.source("before", true)
	without := n.resident()
	done := make(chan bool, 8)
	for w := range cap(done) {
		go func() {
			good := true
			for i := w; i < policies && good; i += cap(done) {
				status, _ := a.call(http.MethodPost, networking, networkPolicy(fmt.Sprint("p", i), 1+i))
				good = status == http.StatusCreated
			}
			done <- good
		}()
	}
	for range cap(done) {
		if !<-done {
			b.Fatal("the API server did not accept all policies")
		}
	}
	all := func() {
		eventually(b, "all policies", func() error {
			st, err := n.GetStatus(b.Context(), &policyv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			for _, s := range st.GetSources() {
				if s.GetName() == "kubernetes" && s.GetSynced() && s.GetPolicies() == policies {
					return nil
				}
			}
			return fmt.Errorf("the sources are %v", st.GetSources())
		})
	}
	all()
	came := n.resident()
	for b.Loop() {
		n.end(syscall.SIGTERM)
		began := time.Now()
		n.start()
		all()
		b.ReportMetric(time.Since(began).Seconds(), "s-restart")
		b.ReportMetric(float64(n.resident())/1024, "MB-restart")

		n.end(syscall.SIGTERM)
		n.forget()
		began = time.Now()
		n.start()
		all()
		b.ReportMetric(time.Since(began).Seconds(), "s-empty-state")
		b.ReportMetric(float64(n.resident())/1024, "MB-empty-state")
	}
	b.ReportMetric(float64(without)/1024, "MB-without")
	b.ReportMetric(float64(came)/1024, "MB-as-they-came")
}
