// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/identity/internal/refusals"
)

func TestReportsOfRefusedPoliciesReachTheWatcher(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t)
	var all []*Refusals
	for _, name := range []string{"one", "two", "reader"} {
		s := newSession(t, c.Endpoint, name)
		if _, err := s.Join(t.Context(), func(context.Context) error { return nil }); err != nil {
			t.Fatal(err)
		}
		all = append(all, NewRefusals(s))
	}
	one, two, reader := all[0], all[1], all[2]
	report := func(s *Refusals, names ...string) {
		t.Helper()
		var r refusals.Report
		for _, name := range names {
			x := refusals.Refusal{Kind: "NetworkPolicy", Namespace: "shop", Name: name, Reason: "too large"}
			r.Refusals = append(r.Refusals, x)
		}
		if err := s.ReportRefusals(t.Context(), refusals.Policies, r); err != nil {
			t.Fatal(err)
		}
	}
	report(one, "a", "b")
	report(two)
	if _, err := c.admin.Put(t.Context(), testPrefix+"/report/two/confirmed", "7"); err != nil {
		t.Fatal(err)
	}
	said := make(chan string, 10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- reader.FollowRefusals(ctx, refusals.Sink{
			Begin: func() { said <- "begin" },
			Node: func(node string, subject refusals.Subject, r refusals.Report) {
				text := node
				if subject == refusals.Services {
					text += " services"
				}
				if r.Corrupt {
					text += " corrupt"
				}
				for _, x := range r.Refusals {
					text += " " + x.Namespace + "/" + x.Name
				}
				said <- text
			},
			Complete: func() { said <- "complete" },
		})
	}()
	want := func(lines ...string) {
		t.Helper()
		for _, line := range lines {
			if got := <-said; got != line {
				t.Errorf("%q, want %q", got, line)
			}
		}
	}
	want("begin", "one shop/a shop/b", "complete")
	report(one, "a", "b") // the same
	report(two, "c")
	want("two shop/c")
	report(one)
	want("one")
	for _, corrupt := range []string{`{"refusals":[{"kind":`, "", "null", "{}"} {
		if _, err := c.admin.Put(t.Context(), testPrefix+"/report/one/refused", corrupt); err != nil {
			t.Fatal(err)
		}
		want("one corrupt")
		report(one, "d")
		want("one shop/d")
	}
	if _, err := c.admin.Put(t.Context(), testPrefix+"/report/one/refused", "{"); err != nil {
		t.Fatal(err)
	}
	report(one)
	want("one corrupt", "one")
	// The report about Services has a key of its own: neither replaces the other.
	services := refusals.Report{Refusals: []refusals.Refusal{{Kind: "Service", Namespace: "shop", Name: "web"}}}
	for _, r := range []refusals.Report{services, {}, services} {
		if err := two.ReportRefusals(t.Context(), refusals.Services, r); err != nil {
			t.Fatal(err)
		}
	}
	want("two services shop/web", "two services", "two services shop/web")
	report(two, "e")
	want("two shop/e")
	for _, key := range []string{"/report/two/refused", "/report/two/refused-services"} {
		resp, err := c.admin.Get(t.Context(), testPrefix+key)
		if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].Lease == 0 {
			t.Errorf("%s: %v, %v: the report does not end with the lease of its node", key, resp, err)
		}
	}
	var many []refusals.Refusal
	for i := range 1000 {
		many = append(many, refusals.Refusal{Kind: "NetworkPolicy", Name: fmt.Sprint(i), Reason: strings.Repeat("x", 100)})
	}
	err := one.ReportRefusals(t.Context(), refusals.Services, refusals.Report{Refusals: many})
	if !errors.Is(err, refusals.ErrTooLarge) {
		t.Errorf("a report of more than %d bytes: %v", refusals.MaxBytes, err)
	}
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
