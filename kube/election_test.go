// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
)

// leases is an API server with one Lease, as the transport of its clients. All its requests are of one bubble.
type leases struct {
	t *testing.T

	mu       sync.Mutex
	lease    *coordinationv1.Lease // guarded by mu
	revision int                   // guarded by mu
	away     map[string]bool       // guarded by mu; processes that it does not answer
	slow     time.Duration         // guarded by mu; between a write and its answer
	written  time.Time             // guarded by mu; when the last write with a slow answer began
}

// answers says whether a process reaches the server.
func (l *leases) answers(identity string, answers bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away[identity] = !answers
}

// of is the transport of a process.
func (l *leases) of(identity string) http.RoundTripper { return transport{l, identity} }

type transport struct {
	*leases
	identity string
}

// RoundTrip implements http.RoundTripper.
func (c transport) RoundTrip(r *http.Request) (*http.Response, error) {
	response, slow, err := c.answer(r)
	select {
	case <-time.After(slow):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	return response, err
}

func (c transport) answer(r *http.Request) (_ *http.Response, slow time.Duration, _ error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away[c.identity] {
		return nil, 0, errors.New("no route to host")
	}
	code, reason := http.StatusOK, metav1.StatusReason("")
	switch r.Method {
	case http.MethodGet:
		if c.lease == nil {
			code, reason = http.StatusNotFound, metav1.StatusReasonNotFound
		}
	case http.MethodPost, http.MethodPut:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, 0, err
		}
		next := &coordinationv1.Lease{}
		if err := json.Unmarshal(body, next); err != nil {
			c.t.Errorf("%s: %v", body, err)
		}
		switch {
		case r.Method == http.MethodPost && c.lease != nil:
			code, reason = http.StatusConflict, metav1.StatusReasonAlreadyExists
		case r.Method == http.MethodPut && (c.lease == nil || next.ResourceVersion != c.lease.ResourceVersion):
			code, reason = http.StatusConflict, metav1.StatusReasonConflict
		default:
			c.revision++
			next.ResourceVersion = strconv.Itoa(c.revision)
			c.lease = next
			if slow = c.slow; slow > 0 {
				c.written = time.Now()
			}
		}
	}
	var answer any = c.lease
	if reason != "" {
		answer = metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
			Reason: reason, Code: int32(code),
		}
	} else {
		c.lease.TypeMeta = metav1.TypeMeta{Kind: "Lease", APIVersion: "coordination.k8s.io/v1"}
	}
	text, err := json.Marshal(answer)
	return &http.Response{
		StatusCode: code, Request: r, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader(text)),
	}, slow, err
}

// process takes part in the election until stop is called.
type process struct {
	stop    func()
	leading atomic.Bool
}

func (l *leases) process(t *testing.T, identity string) *process {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := coordinationv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	client, err := rest.RESTClientFor(&rest.Config{
		Host: "http://api", APIPath: "/apis", Transport: l.of(identity), QPS: -1,
		ContentConfig: rest.ContentConfig{
			GroupVersion:         &coordinationv1.SchemeGroupVersion,
			NegotiatedSerializer: serializer.NewCodecFactory(scheme).WithoutConversion(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	e := &Election{
		client: client, namespace: "sluice", name: "status", identity: identity, log: slog.New(slog.DiscardHandler),
	}
	p := &process{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := e.Run(ctx, func(ctx context.Context) {
			p.leading.Store(true)
			<-ctx.Done()
			p.leading.Store(false)
		}); err != nil {
			t.Error(err)
		}
	}()
	p.stop = func() {
		cancel()
		<-done
	}
	return p
}

// TestOneProcessLeads: one process leads. One that the API does not answer any more stops before another begins, and
// one that ends gives the lease back.
func TestOneProcessLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{t: t, away: map[string]bool{}}
		a := l.process(t, "a")
		synctest.Wait()
		b := l.process(t, "b")
		after := func(d time.Duration, what string, leadsA, leadsB bool) {
			t.Helper()
			for end := time.Now().Add(d); ; {
				synctest.Wait()
				if a.leading.Load() && b.leading.Load() {
					t.Fatalf("%s: both lead", what)
				}
				if !time.Now().Before(end) {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			if a.leading.Load() != leadsA || b.leading.Load() != leadsB {
				t.Fatalf("%s: a leads: %t, b: %t", what, a.leading.Load(), b.leading.Load())
			}
		}
		after(time.Minute, "at first", true, false)
		l.answers("a", false)
		after(renewDeadline-leaseRetry-time.Second, "while a may renew its lease yet", true, false)
		after(2*leaseRetry, "when it may not", false, false)
		after(leaseDuration, "after the lease", false, true)
		l.answers("a", true)
		after(time.Minute, "when a is back", false, true)
		b.stop()
		after(2*leaseRetry, "after b has ended", true, false)
		a.stop()
	})
}

// TestSlowRenewalMakesNoSecondLeader: a renewal counts from its beginning. Another process
// sees it when it is written, and counts from there.
func TestSlowRenewalMakesNoSecondLeader(t *testing.T) {
	for range 20 { // other pauses
		synctest.Test(t, func(t *testing.T) {
			l := &leases{t: t, away: map[string]bool{}}
			a := l.process(t, "a")
			synctest.Wait()
			b := l.process(t, "b")
			time.Sleep(time.Minute)
			synctest.Wait()
			if !a.leading.Load() {
				t.Fatal("the first process does not lead")
			}
			l.mu.Lock()
			l.slow = 7 * time.Second
			l.mu.Unlock()
			var written time.Time
			for written.IsZero() {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
				l.mu.Lock()
				written = l.written
				l.mu.Unlock()
			}
			l.answers("a", false) // but the renewal, which is on its way
			l.mu.Lock()
			l.slow = 0
			l.mu.Unlock()
			for time.Since(written) < 3*leaseDuration {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
				if a.leading.Load() && (b.leading.Load() || time.Since(written) > renewDeadline+time.Second) {
					t.Fatalf("%s after its last renewal began the first process leads; the other: %t",
						time.Since(written), b.leading.Load())
				}
			}
			if !b.leading.Load() {
				t.Error("no process leads")
			}
			b.stop()
			a.stop()
		})
	}
}

// TestLeaseEndsByTheTimeThatItWasNotRenewed: a clock that goes wrong on one machine gives the lease to no other
// process: the time that a lease has not changed counts, not the one that is written in it.
func TestLeaseEndsByTheTimeThatItWasNotRenewed(t *testing.T) {
	holder, seconds := "other", int32(15)
	now := time.Unix(1e9, 0)
	for what, written := range map[string]time.Time{
		"in the past": now.Add(-time.Hour), "now": now, "in the future": now.Add(time.Hour),
	} {
		at := metav1.NewMicroTime(written)
		lease := &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &at,
		}}
		lease.ResourceVersion = "1"
		e := &Election{identity: "me"}
		for _, look := range []struct {
			after   time.Duration
			version string
			free    bool
		}{
			{0, "1", false},
			{15 * time.Second, "1", false},
			{16 * time.Second, "2", false},
			{31 * time.Second, "2", false},
			{32 * time.Second, "2", true},
		} {
			lease.ResourceVersion = look.version
			if got := e.free(lease, now.Add(look.after)); got != look.free {
				t.Errorf("renewed %s, version %s, after %s: free %t, want %t", what, look.version, look.after, got, look.free)
			}
		}
	}
}
