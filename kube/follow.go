// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/sluice-net/sluice/kit/log"
)

// Kind selects the objects that Follow lists and watches.
type Kind[V any] struct {
	Client    cache.Getter // of the group and version
	Resource  string       // "pods"
	Namespace string       // "": all
	Fields    string       // field selector; "": all
	Labels    string       // label selector; "": all
	Type      runtime.Object
	// Trim returns the part of an object that is kept. Follow keeps no reference to the object itself.
	Trim func(runtime.Object) V
	// First makes the kind one of the first to be listed again after the API server was restored from an older
	// backup.
	First bool
	// Last allows the kind to be listed later than the others after a restore, within four times their delay.
	Last bool
}

// Handler receives the objects of a kind. Its methods are called one at a time, except Failed.
type Handler[V any] interface {
	// Upsert reports a new or changed object.
	Upsert(types.NamespacedName, V)
	// Delete reports that an object, which Upsert reported before, was deleted.
	Delete(types.NamespacedName)
	// Complete reports that the handler now knows all existing objects and no others. It may be called again.
	Complete()
	// Failed reports why the kind cannot be listed or watched, or nil once it works again. It may run concurrently
	// with the other methods. The objects remain. A RestoredError means that the API server went back to an earlier
	// state or belongs to another cluster; Follow then lists the kind again.
	Failed(error)
}

// backoff is the delay between two attempts for one kind. All nodes lose a server at the same moment; the jitter
// keeps them from reconnecting at the same moment.
var backoff = wait.Backoff{
	Duration: 800 * time.Millisecond, Factor: 2, Jitter: 1, Cap: 10 * time.Second, Steps: math.MaxInt32,
}

// Follow reports every object of a kind to h, streamed if the server supports it, and then every change, until ctx is
// done; it then returns nil. After a gap, Follow lists everything again and reports the differences to h. It does the
// same when the server was restored from an older backup, which the client detects while its Run runs.
//
// If a kind cannot be listed, because the API is unreachable or forbids it, Follow retries for ever. The failure is
// logged when it starts, changes or ends.
func Follow[V any](ctx context.Context, c *Client, k Kind[V], h Handler[V], l *slog.Logger) error {
	lw := cache.NewFilteredListWatchFromClient(k.Client, k.Resource, k.Namespace, func(o *metav1.ListOptions) {
		if o.FieldSelector == "" { // otherwise find reads a single object
			o.FieldSelector = k.Fields
		}
		o.LabelSelector = k.Labels
	})
	explained := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := lw.ListWithContext(ctx, o)
			return list, c.refused(err)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := lw.WatchWithContext(ctx, o)
			return w, c.refused(err)
		},
	}
	return follow(ctx, c.monitor, explained, k, h, l)
}

func follow[V any](
	ctx context.Context, m *monitor, lw *cache.ListWatch, k Kind[V], h Handler[V], l *slog.Logger,
) error {
	s := &store[V]{kind: k, handler: h, log: l.With("kind", k.Resource), names: map[types.NamespacedName]struct{}{}}
	s.follower = &follower{kind: k.Resource, first: k.First, last: k.Last, restored: s.restored, find: find(lw, k.Fields)}
	m.follow(s.follower)
	defer s.follower.leave()
	for ctx.Err() == nil {
		round, end := context.WithCancel(ctx)
		var ended sync.WaitGroup
		ended.Go(func() {
			select {
			case <-s.follower.relist:
				end()
			case <-round.Done():
			}
		})
		s.follow(round, lw)
		end()
		ended.Wait()
	}
	return nil
}

// find returns a function that reads an object's revision from the store; 0 means that the object does not exist.
func find(lw *cache.ListWatch, fields string) func(context.Context, types.NamespacedName) (uint64, error) {
	return func(ctx context.Context, name types.NamespacedName) (uint64, error) {
		selector := "metadata.name=" + name.Name
		if name.Namespace != "" {
			selector += ",metadata.namespace=" + name.Namespace
		}
		if fields != "" {
			selector += "," + fields
		}
		list, err := lw.ListWithContext(ctx, metav1.ListOptions{FieldSelector: selector})
		if err != nil {
			return 0, err
		}
		var revision uint64
		err = meta.EachListItem(list, func(o runtime.Object) error {
			m, err := meta.Accessor(o)
			if err == nil && m.GetName() == name.Name && m.GetNamespace() == name.Namespace {
				revision, err = strconv.ParseUint(m.GetResourceVersion(), 10, 64)
			}
			return err
		})
		return revision, err
	}
}

// follow lists the kind and watches it until ctx is done.
func (s *store[V]) follow(ctx context.Context, lw *cache.ListWatch) {
	s.follower.begin()
	s.ends(time.Time{})
	noted := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if o.ResourceVersion == "0" {
				o.ResourceVersion = "" // a stale cache would delete objects that it lacks
			}
			s.broken()
			list, err := lw.ListWithContext(ctx, o)
			if err != nil { // on success, more pages may follow
				s.note(ctx, "list", err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			s.broken()
			begin := time.Now()
			w, err := lw.WatchWithContext(ctx, o)
			// A server that supports initial events accepts the watch before it sends the first of them. A server
			// without this feature rejects the request, and the kind is listed.
			if o.SendInitialEvents == nil || err != nil && !apierrors.IsInvalid(err) {
				s.note(ctx, "watch", err)
			}
			if err == nil && o.TimeoutSeconds != nil {
				s.ends(begin.Add(time.Duration(*o.TimeoutSeconds) * time.Second))
			}
			return w, err
		},
	}
	// note already logs what the reflector would log.
	quiet := logr.Discard()
	cache.NewReflectorWithOptions(noted, s.kind.Type, s, cache.ReflectorOptions{
		Logger: &quiet, Name: s.kind.Resource, Backoff: &backoff, Clock: endingClock{clock.RealClock{}, ctx},
	}).RunWithContext(klog.NewContext(ctx, quiet))
}

// endingClock ends the reflector's delays when ctx ends, because some ignore it (client-go 0.36,
// Reflector.watchList).
type endingClock struct {
	clock.RealClock
	ctx context.Context
}

// After implements clock.Clock.
func (c endingClock) After(d time.Duration) <-chan time.Time {
	ended, cancel := context.WithTimeout(c.ctx, d)
	fired := make(chan time.Time, 1)
	context.AfterFunc(ended, func() {
		cancel()
		fired <- time.Now()
	})
	return fired
}

// watchSlack is how much earlier than requested a server may end a watch without this being a failure.
const watchSlack = 5 * time.Second

// store implements cache.ReflectorStore. It keeps only the names of objects.
type store[V any] struct {
	kind     Kind[V]
	handler  Handler[V]
	follower *follower
	log      *slog.Logger
	names    map[types.NamespacedName]struct{} // used only by the reflector's goroutine

	mu      sync.Mutex
	until   time.Time      // guarded by mu; the scheduled end of the watch
	failure error          // guarded by mu; why the kind cannot be listed or watched
	stale   *RestoredError // guarded by mu; why it has to be listed again
	told    string         // guarded by mu; the last failure reported to the handler
}

// broken is called before each request. It requests a check if the last watch ended early.
func (s *store[V]) broken() {
	if time.Now().Before(s.ends(time.Time{}).Add(-watchSlack)) {
		s.follower.monitor.disturbed()
	}
}

// ends records the scheduled end of a watch and returns the previous value.
func (s *store[V]) ends(until time.Time) (before time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, s.until = s.until, until
	return before
}

// note logs and reports a failure when it starts, changes or ends.
func (s *store[V]) note(ctx context.Context, verb string, err error) {
	if ctx.Err() != nil {
		return
	}
	s.follower.fails(err != nil)
	if err != nil {
		err = fmt.Errorf("%s %s: %w", verb, s.kind.Resource, err)
		s.follower.monitor.disturbed()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if text(err) == text(s.failure) {
		return
	}
	s.failure = err
	if err != nil {
		s.log.Warn("a kind of the Kubernetes API cannot be listed or watched", log.Err(err))
	} else {
		s.log.Info("a kind of the Kubernetes API can be listed and watched again")
	}
	s.tell()
}

// restored reports to the handler that the kind must be listed again, or with nil, that it was.
func (s *store[V]) restored(why *RestoredError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = why
	s.tell()
}

// tell reports the current failure to the handler if it has changed. Called with mu held.
func (s *store[V]) tell() {
	err := s.failure
	if s.stale != nil {
		err = s.stale.because(s.failure)
	}
	if text(err) != s.told {
		s.told = text(err)
		s.handler.Failed(err)
	}
}

// repeat reports the current failure once more: the handler takes Complete as its end.
func (s *store[V]) repeat() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.told != "" {
		s.told = ""
		s.tell()
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (s *store[V]) name(object any) (types.NamespacedName, runtime.Object, error) {
	if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = gone.Obj
	}
	m, err := meta.Accessor(object)
	if err != nil {
		return types.NamespacedName{}, nil, err
	}
	return types.NamespacedName{Namespace: m.GetNamespace(), Name: m.GetName()}, object.(runtime.Object), nil
}

// Add implements cache.ReflectorStore.
func (s *store[V]) Add(object any) error {
	name, o, err := s.name(object)
	if err != nil {
		return err
	}
	s.names[name] = struct{}{}
	s.handler.Upsert(name, s.kind.Trim(o))
	s.follower.witnesses(name, o, false)
	return nil
}

// Update implements cache.ReflectorStore.
func (s *store[V]) Update(object any) error { return s.Add(object) }

// Delete implements cache.ReflectorStore.
func (s *store[V]) Delete(object any) error {
	name, o, err := s.name(object)
	if err != nil {
		return err
	}
	delete(s.names, name)
	s.handler.Delete(name)
	s.follower.witnesses(name, o, true)
	return nil
}

// Replace implements cache.ReflectorStore: objects is the complete list.
func (s *store[V]) Replace(objects []any, revision string) error {
	before := s.names
	s.names = make(map[types.NamespacedName]struct{}, len(objects))
	for _, object := range objects {
		if err := s.Add(object); err != nil {
			return err
		}
	}
	for name := range before {
		if _, ok := s.names[name]; !ok {
			s.handler.Delete(name)
		}
	}
	s.note(context.Background(), "list", nil)
	s.handler.Complete()
	s.follower.sees(revision)
	s.follower.listed()
	s.repeat()
	return nil
}

// UpdateResourceVersion implements cache.ResourceVersionUpdater. The reflector calls it for every event.
func (s *store[V]) UpdateResourceVersion(revision string) { s.follower.sees(revision) }

// Resync implements cache.ReflectorStore.
func (s *store[V]) Resync() error { return nil }
