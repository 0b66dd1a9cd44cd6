// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-net/sluice/kit/log"
)

// warned reports whether Failed has reported a restored server since the last call of warned. It fails the test if the
// last call of Failed had an error.
func (s *seen) warned(t *testing.T) (restored bool) {
	t.Helper()
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.failures {
		restored = restored || strings.Contains(f, "everything is listed again")
	}
	if n := len(s.failures); n > 0 && s.failures[n-1] != "<nil>" {
		t.Errorf("the last failure is %s", s.failures[n-1])
	}
	s.failures = nil
	return restored
}

func TestRestoredServerIsListedAgain(t *testing.T) {
	const (
		soon  = 12 * time.Second // enough for a check and a listing
		later = checkEvery + soon
	)
	for name, c := range map[string]struct {
		do   func(*server)
		wait time.Duration
	}{
		"the watches ended": {func(s *server) {
			s.restore(20, map[string]string{"b": "0", "old": "1"})
			s.end(nil)
		}, 2*soon + 10*time.Second},
		"the watches stay open": {func(s *server) { s.restore(20, map[string]string{"b": "0", "old": "1"}) }, later},
		"the revision is passed before the listing": {func(s *server) {
			s.restore(20, map[string]string{"b": "0", "old": "0"})
			for {
				time.Sleep(time.Second)
				s.mu.Lock()
				asked := s.asked[len(s.asked)-1]
				s.mu.Unlock()
				if time.Since(asked) < time.Second {
					break
				}
			}
			for range 200 {
				s.set("old", "1")
			}
		}, soon},
		"the revision is passed before the check": {func(s *server) {
			s.restore(20, map[string]string{"b": "0", "old": "0"})
			s.end(nil)
			for range 200 {
				s.set("old", "1")
			}
		}, 2*soon + 10*time.Second},
		"another cluster with a higher revision": {func(s *server) {
			s.restore(5000, map[string]string{"b": "0", "old": "1"})
			s.mu.Lock()
			s.uid = "2"
			s.mu.Unlock()
		}, later},
		"another cluster without kube-system yet": {func(s *server) {
			s.restore(5000, map[string]string{"b": "0", "old": "1"})
			s.mu.Lock()
			s.uid = ""
			s.mu.Unlock()
		}, later},
		"twice, the second time while the first is listed": {func(s *server) {
			s.restore(100, map[string]string{"a": "3"})
			time.Sleep(checkEvery)
			s.restore(20, map[string]string{"b": "0", "old": "1"})
			s.end(nil)
		}, later},
		"while the API is unavailable": {func(s *server) {
			s.fail(refused, refused)
			s.end(nil)
			time.Sleep(time.Hour)
			s.restore(20, map[string]string{"b": "0", "old": "1"})
			s.fail(nil, nil)
		}, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			following(t, func(t *testing.T, s *server, h *seen) {
				for i := range 110 {
					s.set("b", fmt.Sprint(i))
				}
				time.Sleep(3 * checkEvery)
				s.early()
				h.want(t, "before", "a=1 b=109")
				if h.warned(t) {
					t.Error("Failed was called for a restore that did not happen")
				}
				c.do(s)
				time.Sleep(c.wait)
				h.want(t, "afterwards", "b=0 old=1")
				if !h.warned(t) {
					t.Error("Failed was not called for the restore")
				}
				s.set("b", "2")
				s.set("old", "")
				h.want(t, "a later change", "b=2")
				time.Sleep(24 * time.Hour)
				if h.warned(t) {
					t.Error("Failed was called for the restore twice")
				}
			})
		})
	}
}

// TestRestoreIsNoticedByWhatAWatchHasShown: a restore is detected because an event had a higher revision than the
// restored store, although the last check saw a lower revision.
func TestRestoreIsNoticedByWhatAWatchHasShown(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		synctest.Wait()
		for i := range 100 {
			s.set("b", fmt.Sprint(i))
		}
		h.want(t, "before", "a=1 b=99")
		s.restore(60, map[string]string{"b": "50"})
		s.end(nil)
		time.Sleep(time.Minute)
		h.want(t, "afterwards", "b=50")
		if !h.warned(t) {
			t.Error("Failed was not called for the restore")
		}
	})
}

// TestRestoreThatPassedTheRevisionIsNoticedByTheLastChange: the revision of the restored store is already higher than
// the last one seen when Follow lists again. The restore is detected by the object that changed last: in the backup it
// has an older version, does not exist, or exists although it was deleted.
func TestRestoreThatPassedTheRevisionIsNoticedByTheLastChange(t *testing.T) {
	for name, last := range map[string]func(*server){
		"changed": func(s *server) { s.set("b", "2") },
		"created": func(s *server) { s.set("c", "1") },
		"deleted": func(s *server) { s.set("b", "") },
	} {
		t.Run(name, func(t *testing.T) {
			following(t, func(t *testing.T, s *server, h *seen) {
				for range 100 {
					s.set("a", "1")
				}
				last(s)
				time.Sleep(3 * checkEvery)
				s.early()
				h.warned(t)
				s.restore(20, map[string]string{"a": "1", "b": "1"})
				s.end(nil)
				for range 200 {
					s.set("other", "1")
				}
				time.Sleep(time.Minute)
				h.want(t, "afterwards", "a=1 b=1 other=1")
				if !h.warned(t) {
					t.Error("Failed was not called for the restore")
				}
			})
		})
	}
}

// TestChangesBesideBrokenWatchesAreNoRestore changes and deletes the objects that changed last, while watches end
// continually.
func TestChangesBesideBrokenWatchesAreNoRestore(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		time.Sleep(3 * checkEvery)
		for i := range 200 {
			name := fmt.Sprint("x", i%7)
			s.set(name, "1")
			s.end(nil)
			switch i % 3 {
			case 0:
				s.set(name, "")
			case 1:
				s.set(name, "2")
			}
			time.Sleep(rand.N(20 * time.Second))
			if i%20 == 0 {
				s.failKinds(refused)
				s.set(name, "")
				time.Sleep(time.Minute)
				s.failKinds(nil)
			}
		}
		time.Sleep(time.Hour)
		if h.warned(t) {
			t.Error("Failed was called for a restore that did not happen")
		}
	})
}

// slowProber answers after a delay.
type slowProber struct {
	*server
	takes time.Duration
}

func (p slowProber) origin(ctx context.Context) (origin, error) {
	o, err := p.server.origin(ctx)
	time.Sleep(p.takes)
	return o, err
}

// TestWatchThatEndsDuringACheckIsFollowedByAnother: a watch ends while a check is running. Another check follows,
// because the answer of the first may predate the end of the watch.
func TestWatchThatEndsDuringACheckIsFollowedByAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{revision: 10, uid: "1", size: 1}
		m := newMonitor(slowProber{s, 3 * time.Second}, log.Discard())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); m.run(ctx) }()
		for range 2 { // the first check, and a scheduled one
			synctest.Wait()
			s.mu.Lock()
			before := len(s.asked)
			s.mu.Unlock()
			for {
				time.Sleep(time.Second)
				s.mu.Lock()
				n := len(s.asked)
				s.mu.Unlock()
				if n > before {
					break
				}
			}
			m.disturbed()
			time.Sleep(15 * time.Second)
			s.mu.Lock()
			if n := len(s.asked); n < before+2 {
				t.Errorf("there were %d checks after a watch ended during one", n-before-1)
			}
			s.mu.Unlock()
		}
		cancel()
		<-ended
	})
}

// TestSecondRestoreDuringAListingIsListedOnceMore: the store is restored again while a kind is being listed. The kind
// is listed once more, because the first listing may predate the second restore.
func TestSecondRestoreDuringAListingIsListedOnceMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMonitor(&server{revision: 10, uid: "1", size: 1}, log.Discard())
		var told []*RestoredError
		f := &follower{restored: func(err *RestoredError) { told = append(told, err) }}
		m.follow(f)
		restored := func(why string) bool {
			m.mu.Lock()
			defer m.mu.Unlock()
			return m.restored(why)
		}
		if !restored("first") {
			t.Fatal("no round was started")
		}
		done := make(chan struct{})
		go func() { defer close(done); m.listAgain(t.Context()) }()
		<-f.relist
		f.begin()
		if restored("second") {
			t.Error("a second round was started while the first was running")
		}
		f.listed()
		if len(told) != 2 || told[1] == nil {
			t.Errorf("the listing of the first restore counts for the second: %v", told)
		}
		<-f.relist
		f.begin()
		f.listed()
		<-done
		if len(told) != 3 || told[2] != nil {
			t.Errorf("the handler was called with %v", told)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.listing != nil {
			t.Errorf("a round is still running: %v", m.listing)
		}
	})
}

// TestOldListingDoesNotTakeTheWarningBack: a Joint treats Complete as the end of a failure. So the warning is
// repeated after the Complete of a listing that predates the restore.
func TestOldListingDoesNotTakeTheWarningBack(t *testing.T) {
	m := newMonitor(&server{}, log.Discard())
	h := &seen{set: map[string]string{}}
	s := &store[string]{handler: h, log: log.Discard()}
	s.follower = &follower{restored: s.restored}
	m.follow(s.follower)
	m.mu.Lock()
	m.restored("test")
	m.mu.Unlock()
	if err := s.Replace(nil, "20"); err != nil {
		t.Fatal(err)
	}
	if len(h.failures) != 2 || h.failures[0] != h.failures[1] || h.failures[1] == "<nil>" {
		t.Errorf("the handler was called with %q, want the restore reported again after Complete", h.failures)
	}
	s.follower.begin()
	if err := s.Replace(nil, "20"); err != nil {
		t.Fatal(err)
	}
	if last := h.failures[len(h.failures)-1]; last != "<nil>" {
		t.Errorf("after a new listing the handler was called with %q", last)
	}
}

func TestNothingIsListedAgainWithoutARestore(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		synctest.Wait()
		s.mu.Lock()
		before := len(s.listed)
		s.mu.Unlock()
		for range 1000 {
			time.Sleep(time.Minute)
			s.set("b", fmt.Sprint(rand.IntN(10)))
			if rand.IntN(10) == 0 {
				s.end(nil)
			}
		}
		if h.warned(t) {
			t.Error("Failed was called for a restore that did not happen")
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.streams && len(s.listed) != before {
			t.Errorf("there were %d listings in addition to the first", len(s.listed)-before)
		}
	})
}

func TestKindInAStoreOfItsOwnIsNotListedForEver(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		s.mu.Lock()
		s.behind = 5 // the revision of Namespaces lags behind
		s.mu.Unlock()
		time.Sleep(3 * checkEvery)
		h.warned(t)
		s.mu.Lock()
		before := len(s.listed)
		s.mu.Unlock()
		time.Sleep(24 * time.Hour)
		if h.warned(t) {
			t.Error("every check calls Failed")
		}
		s.mu.Lock()
		if len(s.listed) > before {
			t.Errorf("the kind was listed another %d times", len(s.listed)-before)
		}
		s.mu.Unlock()
		s.restore(8, map[string]string{"c": "1"})
		time.Sleep(2 * checkEvery)
		h.want(t, "both stores were restored", "c=1")
	})
}

// TestChecksAreSpread measures the requests of one process; each node runs four.
func TestChecksAreSpread(t *testing.T) {
	const nodes, processes = 5000, 4 * 5000
	run := func(disturb time.Duration) (perSecond float64, shortest time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			s := &server{revision: 10, uid: "1", size: nodes}
			m := newMonitor(s, log.Discard())
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); m.run(ctx) }()
			const long = 10 * 24 * time.Hour
			for end := time.Now().Add(long); time.Now().Before(end); time.Sleep(disturb) {
				m.disturbed()
			}
			cancel()
			<-ended
			perSecond = float64(len(s.asked)*processes) / long.Seconds()
			shortest = long
			for i := range s.asked[2:] {
				shortest = min(shortest, s.asked[i+2].Sub(s.asked[i+1]))
			}
		})
		return perSecond, shortest
	}
	if rate, shortest := run(10 * 24 * time.Hour); rate > 90 || shortest < 4*time.Minute {
		t.Errorf("%.0f requests per second, the shortest interval is %s", rate, shortest)
	}
	if rate, shortest := run(time.Second); rate > 100 || shortest < 200*time.Second {
		t.Errorf("while watches end continually: %.0f requests per second, the shortest interval is %s", rate, shortest)
	}
}

func TestListingsAreSpreadAndPoliciesAreFirst(t *testing.T) {
	var firsts, all []time.Duration
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			m := newMonitor(&server{revision: 10, uid: "1", size: 5000}, log.Discard())
			ctx, cancel := context.WithCancel(t.Context())
			var parts sync.WaitGroup
			parts.Go(func() { m.run(ctx) })
			synctest.Wait()
			begin := time.Now()
			at := map[string]time.Duration{}
			var mu sync.Mutex
			for name, f := range map[string]*follower{
				"policies": {first: true}, "more policies": {first: true}, "nodes": {}, "servers": {last: true},
			} {
				f.restored = func(*RestoredError) {}
				m.follow(f)
				parts.Go(func() {
					select {
					case <-f.relist:
					case <-ctx.Done():
						return
					}
					mu.Lock()
					at[name] = time.Since(begin)
					mu.Unlock()
					f.begin()
					time.Sleep(time.Second)
					f.listed()
				})
			}
			m.mu.Lock()
			started := m.restored("test")
			m.mu.Unlock()
			if !started {
				t.Fatal("no round was started")
			}
			m.listAgain(ctx)
			cancel()
			parts.Wait()
			if at["nodes"] < at["policies"]+time.Second || at["nodes"] > at["policies"]+firstFor ||
				at["policies"] != at["more policies"] || at["servers"] < at["nodes"] {
				t.Errorf("listed at %v", at)
			}
			firsts, all = append(firsts, at["policies"]), append(all, at["servers"])
		})
	}
	slices.Sort(firsts)
	slices.Sort(all)
	if last := firsts[len(firsts)-1]; firsts[0] > 30*time.Second || last < 220*time.Second || last > 250*time.Second {
		t.Errorf("the first kinds were listed from %s to %s after the restore, want 0 to 250 s", firsts[0], last)
	}
	if last := all[len(all)-1]; last > 5*250*time.Second+firstFor {
		t.Errorf("the last listing began %s after the restore", last)
	}
}

// TestKindThatTheRestoredServerLacksIsNotFound: if the restored server does not know the kind, Follow gets a NotFound
// error. The caller then ends Follow.
func TestKindThatTheRestoredServerLacksIsNotFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{revision: 100, uid: "1", size: 1, values: map[string]string{"a": "1"}, streams: true}
		m := newMonitor(s, log.Discard())
		var last error
		h := &failing{seen: seen{set: map[string]string{}}, failed: func(err error) { last = err }}
		ctx, cancel := context.WithCancel(t.Context())
		var parts sync.WaitGroup
		parts.Go(func() { m.run(ctx) })
		kind := Kind[string]{Resource: "pods", Type: &corev1.Pod{}, Trim: func(runtime.Object) string { return "x" }}
		lw := &cache.ListWatch{ListWithContextFunc: s.list, WatchFuncWithContext: s.watch}
		following, leave := context.WithCancel(ctx)
		left := make(chan struct{})
		parts.Go(func() {
			defer close(left)
			follow(following, m, lw, kind, h, log.Discard()) //nolint:errcheck // nil
		})
		time.Sleep(time.Hour)
		gone := apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "")
		s.restore(20, nil)
		s.failKinds(gone)
		s.end(nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		var restored *RestoredError
		if !apierrors.IsNotFound(last) || !errors.As(last, &restored) {
			t.Errorf("the failure is %v, want a restore and NotFound", last)
		}
		leave()
		<-left
		time.Sleep(time.Minute)
		m.mu.Lock()
		if m.listing != nil {
			t.Error("the monitor waits for a kind that is no longer followed")
		}
		m.mu.Unlock()
		cancel()
		parts.Wait()
	})
}

// failing is a Handler that calls failed with each failure.
type failing struct {
	seen
	failed func(error)
}

func (f *failing) Failed(err error) { f.failed(err) }

func TestProbeAsksTheStoreForItsRevision(t *testing.T) {
	var asked []string
	answers := map[string]string{
		"/api/v1/namespaces?fieldSelector=metadata.name%3Dkube-system": `{"kind":"PartialObjectMetadataList",
			"apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"1485"},
			"items":[{"metadata":{"name":"kube-system","uid":"u-1"}}]}`,
		"/api/v1/nodes?limit=1": `{"metadata":{"continue":"x","remainingItemCount":41},"items":[{}]}`,
	}
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.String())
		answer, ok := answers[r.URL.String()]
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.WriteHeader(http.StatusForbidden)
			answer = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`
		}
		fmt.Fprint(w, answer)
	}))
	defer api.Close()
	c := &Client{Config: &rest.Config{Host: api.URL}}
	client, err := c.REST(schema.GroupVersion{Version: "v1"}, metav1.AddMetaToScheme)
	if err != nil {
		t.Fatal(err)
	}
	p := apiProber{client}
	if o, err := p.origin(t.Context()); err != nil || o != (origin{1485, "u-1"}) {
		t.Errorf("the origin is %v, %v", o, err)
	}
	if n, err := p.nodes(t.Context()); err != nil || n != 42 {
		t.Errorf("there are %d Nodes, %v, want 42", n, err)
	}
	if want := slices.Collect(maps.Keys(answers)); len(asked) != len(want) {
		t.Errorf("it asked %q, want %q", asked, want)
	}
	for body, want := range map[string]int{
		`{"metadata":{},"items":[]}`:                   0,
		`{"metadata":{},"items":[{}]}`:                 1,
		`{"metadata":{"continue":"x"},"items":[{}]}`:   -1,
		`{"metadata":{"continue":"x"},"items":"what"}`: -1,
	} {
		answers["/api/v1/nodes?limit=1"] = body
		if n, err := p.nodes(t.Context()); (err != nil) != (want < 0) || err == nil && n != want {
			t.Errorf("%s: %d Nodes, %v, want %d", body, n, err, want)
		}
	}
	clear(answers)
	if _, err := p.origin(t.Context()); !apierrors.IsForbidden(err) {
		t.Errorf("a forbidden list fails with %v", err)
	}
}
