// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	"github.com/sluice-net/sluice/kit/log"
)

func TestMain(m *testing.M) {
	// One of the handlers sleeps until a time outside of a synctest bubble.
	utilruntime.ErrorHandlers = nil
	leaktest.Main(m)
}

var pods = schema.GroupResource{Resource: "pods"}

// server simulates an API server with one kind, and its faults.
type server struct {
	mu       sync.Mutex
	revision int               // guarded by mu
	values   map[string]string // guarded by mu
	modified map[string]int    // guarded by mu; revisions of values
	watchers []*watcher        // guarded by mu
	history  []watch.Event     // guarded by mu
	listErr  error             // guarded by mu
	watchErr error             // guarded by mu
	streams  bool              // guarded by mu; it supports sendInitialEvents
	calls    int               // guarded by mu
	behind   int               // guarded by mu; how far the revision of Namespaces lags behind
	kindErr  error             // guarded by mu; the kind fails while the server answers
	uid      types.UID         // guarded by mu; UID of kube-system
	size     int               // guarded by mu; number of Nodes
	asked    []time.Time       // guarded by mu; times of calls of origin
	listed   []time.Time       // guarded by mu; times at which a listing started
	began    time.Time         // guarded by mu; start of the newest watch
}

// watcher receives the events of later revisions.
type watcher struct {
	server *server
	events chan watch.Event
	from   int
	ended  bool // guarded by server.mu
}

// ResultChan implements watch.Interface.
func (w *watcher) ResultChan() <-chan watch.Event { return w.events }

// Stop implements watch.Interface.
func (w *watcher) Stop() {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	w.end()
}

func (w *watcher) end() {
	if !w.ended {
		w.ended = true
		close(w.events)
	}
}

func (w *watcher) send(events ...watch.Event) {
	for _, e := range events {
		if p, ok := e.Object.(*corev1.Pod); !w.ended && (!ok || e.Type == watch.Bookmark || revision(p) > w.from) {
			w.events <- e
		}
	}
}

// origin implements prober.
func (s *server) origin(context.Context) (origin, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, time.Now())
	return origin{uint64(s.revision - s.behind), s.uid}, s.listErr
}

// nodes implements prober.
func (s *server) nodes(context.Context) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.size, s.listErr
}

// restore replaces the store. As with a real API server, open watches continue and stay silent until set passes their
// revision.
func (s *server) restore(to int, values map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision, s.values = to, values
	for name, at := range s.modified {
		s.modified[name] = min(at, to)
	}
	s.history = slices.DeleteFunc(s.history, func(e watch.Event) bool { return revision(e.Object) > to })
}

func revision(o runtime.Object) int {
	n, err := strconv.Atoi(o.(*corev1.Pod).ResourceVersion)
	if err != nil {
		panic(err)
	}
	return n
}

func (s *server) pod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "n", Name: name, ResourceVersion: strconv.Itoa(max(1, s.modified[name])),
		Labels: map[string]string{"v": s.values[name]},
	}}
}

func (s *server) list(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if err := cmp.Or(s.kindErr, s.listErr); err != nil {
		return nil, err
	}
	if o.FieldSelector != "" { // reads one object from the store
		l := &corev1.PodList{}
		for name := range s.values {
			if o.FieldSelector == "metadata.name="+name+",metadata.namespace=n" {
				l.Items = append(l.Items, *s.pod(name))
			}
		}
		return l, nil
	}
	s.listed = append(s.listed, time.Now())
	if o.ResourceVersion == "0" {
		return nil, errors.New("the client accepts any state, even one older than it has seen")
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
	case s.kindErr != nil:
		return nil, s.kindErr
	case initial && !s.streams:
		return nil, apierrors.NewInvalid(schema.GroupKind{}, "", nil)
	}
	w := &watcher{server: s, events: make(chan watch.Event, 1000)}
	if initial {
		s.listed = append(s.listed, time.Now())
		for name := range s.values {
			w.send(watch.Event{Type: watch.Added, Object: s.pod(name)})
		}
		w.send(watch.Event{Type: watch.Bookmark, Object: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(s.revision), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}}})
		w.from = s.revision
	} else {
		from, err := strconv.Atoi(o.ResourceVersion)
		if err != nil {
			return nil, err
		}
		w.from = from
		w.send(s.history...)
	}
	s.watchers, s.began = append(s.watchers, w), time.Now()
	if o.TimeoutSeconds != nil {
		time.AfterFunc(time.Duration(*o.TimeoutSeconds)*time.Second, w.Stop)
	}
	return w, nil
}

// early waits until the watch is far from its scheduled end: a watch runs for 5 to 10 minutes.
func (s *server) early() {
	for {
		s.mu.Lock()
		age := time.Since(s.began)
		s.mu.Unlock()
		if age > 2*time.Second && age < 4*time.Minute { // a client lists again after a watch of less than a second
			return
		}
		time.Sleep(time.Second)
	}
}

// set changes an object; an empty value removes it.
func (s *server) set(name, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	if s.modified == nil {
		s.modified = make(map[string]int)
	}
	s.modified[name] = s.revision
	_, had := s.values[name]
	before := s.pod(name)
	delete(s.values, name)
	if value != "" {
		s.values[name] = value
	}
	event := watch.Event{Type: watch.Added, Object: s.pod(name)}
	switch {
	case value == "":
		event = watch.Event{Type: watch.Deleted, Object: before}
	case had:
		event.Type = watch.Modified
	}
	s.history = append(s.history, event)
	for _, w := range s.watchers {
		w.send(event)
	}
}

// end ends every watch, after a last event if last is not nil.
func (s *server) end(last *metav1.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watchers {
		if last != nil {
			w.send(watch.Event{Type: watch.Error, Object: last})
		}
		w.end()
	}
	s.watchers = nil
}

func (s *server) fail(list, watch error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listErr, s.watchErr = list, watch
}

// failKinds makes requests for the kind fail while the server answers other requests.
func (s *server) failKinds(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kindErr = err
}

// seen is a Handler that records its calls.
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

// following runs f while Follow follows a server, once with streamed lists and once without.
func following(t *testing.T, f func(*testing.T, *server, *seen)) {
	for _, streams := range []bool{true, false} {
		t.Run(fmt.Sprintf("streams=%t", streams), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &server{revision: 10, uid: "1", size: 1, values: map[string]string{"a": "1", "b": "1"}, streams: streams}
				h := &seen{set: map[string]string{}}
				k := Kind[string]{
					Resource: "pods", Type: &corev1.Pod{}, Trim: func(o runtime.Object) string { return o.(*corev1.Pod).Labels["v"] },
				}
				lw := &cache.ListWatch{ListWithContextFunc: s.list, WatchFuncWithContext: s.watch}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				m := newMonitor(s, log.Discard())
				go func() { ended <- follow(ctx, m, lw, k, h, log.Discard()) }()
				checks := make(chan struct{})
				go func() { defer close(checks); m.run(ctx) }()
				f(t, s, h)
				begin := time.Now()
				cancel()
				if err := <-ended; err != nil {
					t.Errorf("Follow returned %v", err)
				}
				<-checks
				if d := time.Since(begin); d != 0 {
					t.Errorf("Follow returned %v after its context ended", d)
				}
			})
		})
	}
}

// refused is the error of a connection to a closed port.
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
			t.Errorf("Failed was called with %q without a failure", got)
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
			t.Errorf("Failed was called with %q", got)
		}
		s.mu.Lock()
		if calls := s.calls; calls > 40_000 || calls < 4_000 {
			t.Errorf("%d requests in a day, want one every 5 to 20 seconds", calls)
		}
		s.mu.Unlock()
		s.fail(nil, nil)
		time.Sleep(time.Minute)
		h.want(t, "a minute after the API is back", "b=1 c=1")
		if got := h.last(); got != "<nil>" {
			t.Errorf("the last call of Failed had %q", got)
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
			follow(ctx, newMonitor(s, log.Discard()), lw, k, h, log.Discard()) //nolint:errcheck // nil
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
		s.watchers = nil // they miss the following changes
		s.mu.Unlock()
		s.set("a", "")
		s.set("b", "2")
		gone := apierrors.NewResourceExpired("too old resource version").Status()
		s.mu.Lock()
		for _, w := range expired {
			w.send(watch.Event{Type: watch.Error, Object: &gone})
			w.end()
		}
		s.mu.Unlock()
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
			t.Errorf("Failed was called with %q", got)
		}
		s.fail(nil, nil)
		s.set("b", "2")
		time.Sleep(time.Minute)
		h.want(t, "with rights", "a=1 b=2")
	})
}
