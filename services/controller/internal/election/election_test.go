// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package election

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
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // as kube.New does
	leaktest.Main(m)
}

// leases is an API server with one Lease, as the transport of its clients. All requests belong to one bubble.
type leases struct {
	t *testing.T

	mu       sync.Mutex
	lease    *coordinationv1.Lease // guarded by mu
	revision int                   // guarded by mu
	away     map[string]bool       // guarded by mu; processes whose requests fail
	slow     time.Duration         // guarded by mu; delay between a write and its response
	written  time.Time             // guarded by mu; start of the last write with a slow response
}

// answers sets whether a process can reach the server.
func (l *leases) answers(identity string, answers bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away[identity] = !answers
}

// of returns the transport of a process.
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
		if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, next); err != nil {
			c.t.Errorf("%q: %v", body, err)
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
	slow    time.Duration // time between the end of its context and the end of its work
	leading atomic.Bool
	*Election
}

func (l *leases) process(t *testing.T, identity string) *process {
	t.Helper()
	e, err := New(&rest.Config{Host: "http://api", Transport: l.of(identity), QPS: -1}, "sluice", "status", identity,
		slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Election: e}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := e.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	var parts sync.WaitGroup
	parts.Go(func() {
		e.While(ctx, func(ctx context.Context) {
			p.leading.Store(true)
			<-ctx.Done()
			time.Sleep(p.slow) // the fake clock of the test
			p.leading.Store(false)
		})
	})
	p.stop = func() {
		cancel()
		<-done
		parts.Wait()
	}
	return p
}

// TestOneProcessLeads: a leader that cannot reach the API stops before another process starts to lead, and a leader
// that ends releases the lease.
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
		after(renewDeadline-leaseRetry-time.Second, "while a may still renew its lease", true, false)
		after(2*leaseRetry, "when it may not", false, false)
		after(leaseDuration, "after the lease", false, true)
		l.answers("a", true)
		after(time.Minute, "when a is back", false, true)
		b.stop()
		after(2*leaseRetry, "after b has ended", true, false)
		a.stop()
	})
}

// TestSlowRenewalMakesNoSecondLeader: responses to renewals are slow. The leader counts its term from the start of
// the request, and other processes from the time at which they see the write. So the leader stops before another
// process leads.
func TestSlowRenewalMakesNoSecondLeader(t *testing.T) {
	for range 20 { // with different random delays
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
			l.answers("a", false) // the renewal in flight still succeeds
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

// TestLeaseEndsByTheTimeThatItWasNotRenewed: a wrong clock on one machine does not give the Lease to another process.
// Processes ignore the time written in the Lease, and measure for how long the Lease has not changed.
func TestLeaseEndsByTheTimeThatItWasNotRenewed(t *testing.T) {
	for what, wrong := range map[string]time.Duration{
		"in the past": -time.Hour, "now": 0, "in the future": time.Hour,
	} {
		synctest.Test(t, func(t *testing.T) {
			l := &leases{t: t, away: map[string]bool{}}
			holder, seconds := "other", int32(15)
			renew := func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				at := metav1.NewMicroTime(time.Now().Add(wrong))
				l.revision++
				l.lease = &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{
					HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &at,
				}}
				l.lease.Namespace, l.lease.Name = "sluice", "status"
				l.lease.ResourceVersion = strconv.Itoa(l.revision)
			}
			renew()
			a := l.process(t, "a")
			defer a.stop()
			for range 6 {
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if a.leading.Load() {
					t.Fatalf("renewed %s: the process leads while another renews the lease", what)
				}
				renew()
			}
			time.Sleep(leaseDuration)
			synctest.Wait()
			if a.leading.Load() {
				t.Fatalf("renewed %s: the process leads before the lease has ended", what)
			}
			time.Sleep(5 * leaseRetry) // a candidate reads the Lease every 2 to 4.4 s
			synctest.Wait()
			if s := a.Status(); !a.leading.Load() || !s.Leading || s.Holder != "a" {
				t.Errorf("renewed %s: the process does not lead after the lease has ended: %+v", what, s)
			}
		})
	}
}

// TestLeaseIsGivenBackAfterTheWork: a process releases the Lease only when its work has ended, even if that takes a
// while after the end of the context.
func TestLeaseIsGivenBackAfterTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{t: t, away: map[string]bool{}}
		a := l.process(t, "a")
		synctest.Wait()
		a.slow = 8 * time.Second
		b := l.process(t, "b")
		time.Sleep(time.Minute)
		go a.stop()
		for range 200 {
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
			if a.leading.Load() && b.leading.Load() {
				t.Fatal("both lead")
			}
		}
		if !b.leading.Load() {
			t.Error("the lease was not released")
		}
		b.stop()
	})
}

// TestTakenLeaseEndsTheTermAtOnce: another process overwrites the Lease. The holder stops leading immediately, and
// does not wait for its own deadline.
func TestTakenLeaseEndsTheTermAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &leases{t: t, away: map[string]bool{}}
		a := l.process(t, "a")
		defer a.stop()
		time.Sleep(time.Minute)
		synctest.Wait()
		other := "other"
		l.mu.Lock()
		l.revision++
		l.lease = l.lease.DeepCopy()
		l.lease.Spec.HolderIdentity, l.lease.ResourceVersion = &other, strconv.Itoa(l.revision)
		l.mu.Unlock()
		time.Sleep(leaseRetry + time.Second)
		synctest.Wait()
		if s := a.Status(); a.leading.Load() || s.Leading || s.Holder != other {
			t.Errorf("the process leads: %+v", s)
		}
	})
}
