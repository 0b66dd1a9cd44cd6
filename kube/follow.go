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

// Kind is what Follow lists and watches.
type Kind[V any] struct {
	Client    cache.Getter // of the group and version
	Resource  string       // "pods"
	Namespace string       // "": all
	Fields    string       // field selector; "": all
	Labels    string       // label selector; "": all
	Type      runtime.Object
	// Trim returns what is kept of an object of Type. Nothing else keeps it.
	Trim func(runtime.Object) V
	// First says that the kind is listed before the others when the API server was
	// restored from an older backup.
	First bool
	// Last says that the kind may be listed later than the others then, within four times
	// their time.
	Last bool
}

// Handler gets the objects of a kind. Its methods are called one after the other.
type Handler[V any] interface {
	// Upsert says that an object exists, and what it is now.
	Upsert(types.NamespacedName, V)
	// Delete says that an object that was told of does not exist any more.
	Delete(types.NamespacedName)
	// Complete says that every object that exists was told of, and that no other
	// does. It may be called again.
	Complete()
	// Failed says why the kind cannot be listed or watched, and with nil that it
	// can again. It may run concurrently with the other methods. Objects stay. A
	// RestoredError says that the API server has an earlier state or belongs to another
	// cluster; Follow lists the kind again.
	Failed(error)
}

// backoff is between two attempts, for each kind by itself. All nodes lose a
// server at the same time, and must not come back so.
var backoff = wait.Backoff{
	Duration: 800 * time.Millisecond, Factor: 2, Jitter: 1, Cap: 10 * time.Second, Steps: math.MaxInt32,
}

// Follow tells h of every object of a kind, as a stream where the server has
// that, and then of every change, until ctx is done; it then returns nil. After a
// gap everything is listed again and h gets what differs, also when the server was
// restored from an older backup, which the client notices while its Run runs.
//
// A kind that cannot be listed, because the API is away or forbids it, is tried
// again for ever. Its failure is logged when it begins, changes or ends.
func Follow[V any](ctx context.Context, c *Client, k Kind[V], h Handler[V], l *slog.Logger) error {
	lw := cache.NewFilteredListWatchFromClient(k.Client, k.Resource, k.Namespace, func(o *metav1.ListOptions) {
		if o.FieldSelector == "" { // else it is the question for one object
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

// find returns a function that reads the revision of one object from the store; 0: the kind
// does not have it.
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

// follow lists the kind, and watches it until ctx is done.
func (s *store[V]) follow(ctx context.Context, lw *cache.ListWatch) {
	s.follower.begin()
	s.ends(time.Time{})
	noted := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if o.ResourceVersion == "0" {
				o.ResourceVersion = "" // not any state that a server remembers: what an old one lacks would be deleted
			}
			s.broken()
			list, err := lw.ListWithContext(ctx, o)
			if err != nil { // else more of the list may follow
				s.note(ctx, "list", err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			s.broken()
			begin := time.Now()
			w, err := lw.WatchWithContext(ctx, o)
			// The answer to a watch with initial events begins before there are any; a server without
			// them refuses it, and the kind is listed.
			if o.SendInitialEvents == nil || err != nil && !apierrors.IsInvalid(err) {
				s.note(ctx, "watch", err)
			}
			if err == nil && o.TimeoutSeconds != nil {
				s.ends(begin.Add(time.Duration(*o.TimeoutSeconds) * time.Second))
			}
			return w, err
		},
	}
	// What the reflector would log is noted above.
	quiet := logr.Discard()
	cache.NewReflectorWithOptions(noted, s.kind.Type, s, cache.ReflectorOptions{
		Logger: &quiet, Name: s.kind.Resource, Backoff: &backoff, Clock: endingClock{clock.RealClock{}, ctx},
	}).RunWithContext(klog.NewContext(ctx, quiet))
}

// endingClock ends the reflector's pauses with ctx: some do not look at it
// (client-go 0.36, Reflector.watchList).
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

// watchSlack is how much earlier than asked for a server may end a watch in order.
const watchSlack = 5 * time.Second

// store implements cache.ReflectorStore. It keeps the names alone.
type store[V any] struct {
	kind     Kind[V]
	handler  Handler[V]
	follower *follower
	log      *slog.Logger
	names    map[types.NamespacedName]struct{} // the reflector's goroutine's

	mu      sync.Mutex
	until   time.Time      // guarded by mu; when the watch ends in order
	failure error          // guarded by mu; why the kind cannot be listed or watched
	stale   *RestoredError // guarded by mu; why it has to be listed again
	told    string         // guarded by mu; what the handler was told last
}

// broken is called before a request: a watch that should still run has ended.
func (s *store[V]) broken() {
	if time.Now().Before(s.ends(time.Time{}).Add(-watchSlack)) {
		s.follower.monitor.disturbed()
	}
}

// ends notes when a watch ends in order, and returns when the one before did.
func (s *store[V]) ends(until time.Time) (before time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, s.until = s.until, until
	return before
}

// note tells of a failure when it begins, changes or ends.
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
		s.log.Warn("the Kubernetes API does not give a kind", log.Err(err))
	} else {
		s.log.Info("the Kubernetes API gives a kind again")
	}
	s.tell()
}

// restored tells the handler that the kind has to be listed again; with nil, that
// it was.
func (s *store[V]) restored(why *RestoredError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = why
	s.tell()
}

// tell tells the handler what is wrong now. Called with mu held.
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

// repeat tells the handler again what is wrong: it takes Complete for the end of it.
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

// Replace implements cache.ReflectorStore: objects are everything that exists.
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

// UpdateResourceVersion implements cache.ResourceVersionUpdater: every event has one.
func (s *store[V]) UpdateResourceVersion(revision string) { s.follower.sees(revision) }

// Resync implements cache.ReflectorStore.
func (s *store[V]) Resync() error { return nil }
