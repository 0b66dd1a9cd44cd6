// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) {
	// One of them sleeps until a time that is not that of a synctest bubble.
	utilruntime.ErrorHandlers = nil
	leaktest.Main(m)
}

var pods = schema.GroupResource{Resource: "pods"}

// server is an API with one kind, and the faults of one.
type server struct {
	mu       sync.Mutex
	revision int               // guarded by mu
	values   map[string]string // guarded by mu
	watchers []*watch.FakeWatcher
	listErr  error // guarded by mu
	watchErr error // guarded by mu
	streams  bool  // guarded by mu; it knows sendInitialEvents
	calls    int   // guarded by mu
}

func (s *server) pod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "n", Name: name, ResourceVersion: strconv.Itoa(s.revision), Labels: map[string]string{"v": s.values[name]},
	}}
}

func (s *server) list(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if s.listErr != nil {
		return nil, s.listErr
	}
	if o.ResourceVersion == "0" {
		return nil, errors.New("any state is asked for, also one that is older than what was told")
	}
	l := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.revision)}}
	for name := range s.values {
		l.Items = append(l.Items, *s.pod(name))
	}
	return l, nil
}

func (s *server) watch(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	initial := o.SendInitialEvents != nil
	switch {
	case s.watchErr != nil:
		return nil, s.watchErr
	case initial && !s.streams:
		return nil, apierrors.NewInvalid(schema.GroupKind{}, "", nil)
	}
	w := watch.NewFakeWithChanSize(100, false)
	if initial {
		for name := range s.values {
			w.Add(s.pod(name))
		}
		w.Action(watch.Bookmark, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(s.revision), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	s.watchers = append(s.watchers, w)
	return w, nil
}

// set changes an object; without a value it removes it.
func (s *server) set(name, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	_, had := s.values[name]
	before := s.pod(name)
	delete(s.values, name)
	if value != "" {
		s.values[name] = value
	}
	for _, w := range s.watchers {
		switch {
		case value == "":
			w.Delete(before)
		case had:
			w.Modify(s.pod(name))
		default:
			w.Add(s.pod(name))
		}
	}
}

// end ends every watch, with a last event or without one.
func (s *server) end(last *metav1.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watchers {
		if last != nil {
			w.Error(last)
		}
		w.Stop()
	}
	s.watchers = nil
}

func (s *server) fail(list, watch error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listErr, s.watchErr = list, watch
}

// seen is a Handler.
type seen struct {
	mu       sync.Mutex
	set      map[string]string // guarded by mu
	complete int               // guarded by mu
	failures []string          // guarded by mu
	deleted  []string          // guarded by mu
}

func (s *seen) Upsert(n types.NamespacedName, v string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set[n.Name] = v
}

func (s *seen) Delete(n types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.set, n.Name)
	s.deleted = append(s.deleted, n.Name)
}

func (s *seen) Complete() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.complete++
}

func (s *seen) Failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = append(s.failures, fmt.Sprint(err))
}

// want fails unless the handler has the objects, as "a=1 b=2".
func (s *seen) want(t *testing.T, what, set string) {
	t.Helper()
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	var have []string
	for _, name := range slices.Sorted(maps.Keys(s.set)) {
		have = append(have, name+"="+s.set[name])
	}
	if got := strings.Join(have, " "); got != set || (s.complete == 0 && set != "") {
		t.Errorf("%s: %q after %d listings, want %q", what, got, s.complete, set)
	}
}

func (s *seen) last() string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.failures) == 0 {
		return ""
	}
	return s.failures[len(s.failures)-1]
}

// following runs f beside Follow, of a server with streams and of one without.
func following(t *testing.T, f func(*testing.T, *server, *seen)) {
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("streams=%t", streams), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &server{revision: 10, values: map[string]string{"a": "1", "b": "1"}, streams: streams}
				h := &seen{set: map[string]string{}}
				k := Kind[string]{
					Resource: "pods", Type: &corev1.Pod{}, Trim: func(o runtime.Object) string { return o.(*corev1.Pod).Labels["v"] },
				}
				lw := &cache.ListWatch{ListWithContextFunc: s.list, WatchFuncWithContext: s.watch}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- follow(ctx, lw, k, h, slog.New(slog.DiscardHandler)) }()
				f(t, s, h)
				begin := time.Now()
				cancel()
				if err := <-ended; err != nil {
					t.Errorf("it ended with %v", err)
				}
				if d := time.Since(begin); d != 0 {
					t.Errorf("it ended %v after its context", d)
				}
			})
		})
	}
}

// refused is what a closed port answers.
var refused = &netError{syscall.ECONNREFUSED}

type netError struct{ error }

func (e *netError) Unwrap() error { return e.error }

func TestFollowTellsEveryChange(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		h.want(t, "at the start", "a=1 b=1")
		s.set("b", "2")
		s.set("c", "1")
		s.set("a", "")
		h.want(t, "after changes", "b=2 c=1")
		if got := h.last(); got != "" {
			t.Errorf("nothing failed, and the handler was told %q", got)
		}
	})
}

func TestNothingIsDeletedWhileTheAPIIsAway(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		h.want(t, "at the start", "a=1 b=1")
		s.fail(refused, refused)
		s.end(nil)
		s.set("a", "")
		s.set("c", "1")
		time.Sleep(24 * time.Hour)
		h.want(t, "a day later", "a=1 b=1")
		if got := h.last(); !strings.Contains(got, "connection refused") || !strings.Contains(got, " pods: ") {
			t.Errorf("the handler was told %q", got)
		}
		s.mu.Lock()
		if calls := s.calls; calls > 40_000 || calls < 4_000 {
			t.Errorf("%d requests in a day, want one in 5 to 20 seconds", calls)
		}
		s.mu.Unlock()
		s.fail(nil, nil)
		time.Sleep(time.Minute)
		h.want(t, "a minute after it is back", "b=1 c=1")
		if got := h.last(); got != "<nil>" {
			t.Errorf("the handler was told %q last", got)
		}
	})
}

func TestStartWithoutAPICompletesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{values: map[string]string{"a": "1"}, listErr: refused, watchErr: refused}
		h := &seen{set: map[string]string{}}
		k := Kind[string]{Resource: "pods", Type: &corev1.Pod{}, Trim: func(runtime.Object) string { return "x" }}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			lw := &cache.ListWatch{ListWithContextFunc: s.list, WatchFuncWithContext: s.watch}
			follow(ctx, lw, k, h, slog.New(slog.DiscardHandler)) //nolint:errcheck // nil
		}()
		time.Sleep(time.Hour)
		h.want(t, "an hour without API", "")
		if h.complete != 0 {
			t.Error("a kind that was never listed is complete")
		}
		s.fail(nil, nil)
		time.Sleep(time.Minute)
		h.want(t, "later", "a=x")
		cancel()
		<-ended
	})
}

func TestExpiredWatchIsListedAgainAndTellsTheDifference(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		h.want(t, "at the start", "a=1 b=1")
		s.mu.Lock()
		expired := s.watchers
		s.watchers = nil // they miss what follows
		s.mu.Unlock()
		s.set("a", "")
		s.set("b", "2")
		gone := apierrors.NewResourceExpired("too old resource version").Status()
		for _, w := range expired {
			w.Error(&gone)
			w.Stop()
		}
		time.Sleep(time.Minute)
		h.want(t, "after 410 Gone", "b=2")
		if !slices.Equal(h.deleted, []string{"a"}) {
			t.Errorf("deleted %q", h.deleted)
		}
	})
}

func TestForbiddenKindIsToldByKindAndVerb(t *testing.T) {
	following(t, func(t *testing.T, s *server, h *seen) {
		h.want(t, "at the start", "a=1 b=1")
		denied := func(verb string) error { return apierrors.NewForbidden(pods, "", errors.New("may not "+verb)) }
		s.fail(denied("list"), denied("watch"))
		s.end(nil)
		time.Sleep(time.Hour)
		h.want(t, "an hour without rights", "a=1 b=1")
		got := h.last()
		if !strings.HasPrefix(got, "list pods: ") && !strings.HasPrefix(got, "watch pods: ") ||
			!strings.Contains(got, "forbidden") {
			t.Errorf("the handler was told %q", got)
		}
		s.fail(nil, nil)
		s.set("b", "2")
		time.Sleep(time.Minute)
		h.want(t, "with rights", "a=1 b=2")
	})
}
