// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes is a source of policies. It watches the objects of a Kubernetes API server whose kind is a policy,
// or to which policies refer.
//
// Each kind is listed and watched separately, in the most preferred version that the server has. Kinds may appear and
// disappear while the source runs. Objects are passed on as text; the source keeps none.
//
// The text that the source passes on includes unknown fields. The source never requests a list that may be older than
// a state that any API server has reported. A policy that is missing in such a list would count as deleted.
package kubernetes

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/source"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Sink receives the objects.
type Sink interface {
	watch.Sink[policy.Key, policy.Written]
	// Held returns the policies of the source, including policies from earlier runs.
	Held(ctx context.Context) ([]policy.Key, error)
}

// Source watches an API server.
type Source struct {
	api  *kube.Client
	sink Sink
	log  *slog.Logger
	// Records means that the source adds a Record to each object. It must be set before Run.
	Records bool
	// Kinds delivers the kinds that another process has found by frequent queries, on behalf of all processes. If it
	// is nil, this process queries the API server itself. It must be set before Run.
	Kinds Kinds

	mu    sync.Mutex
	again map[string]struct{} // guarded by mu; kinds to list again
	wake  chan struct{}       // contains a token when there is work
}

// Kinds delivers the kinds that the API server has, as group/version/resource.
type Kinds interface {
	// Watch calls told with the published kinds, and again after every change, until ctx ends. published is false
	// while the kinds are unknown.
	Watch(ctx context.Context, told func(kinds []string, published bool))
}

// New returns a source. It reads objects as JSON.
func New(api *kube.Client, sink Sink, l *slog.Logger) *Source {
	return &Source{
		api: api, sink: sink, log: l, again: make(map[string]struct{}), wake: make(chan struct{}, 1),
	}
}

// relistIn is the maximum delay before a kind is listed again on request. The delay is random, because all nodes may
// need the listing at the same time.
const relistIn = 30 * time.Second

// Again lists the objects of a kind again, at a random moment within 30 s, so that the sink receives the objects whose
// text it has not kept. It does not block.
func (s *Source) Again(kind string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.again[kind]; ok {
		return
	}
	s.again[kind] = struct{}{}
	time.AfterFunc(rand.N(relistIn), s.trigger)
}

// trigger wakes the finder.
func (s *Source) trigger() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// takeAgain returns the kinds to list again, and clears them.
func (s *Source) takeAgain() map[string]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	kinds := s.again
	s.again = make(map[string]struct{})
	return kinds
}

// Run watches until ctx ends. It then returns nil.
func (s *Source) Run(ctx context.Context) error {
	held, err := s.sink.Held(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	client, err := rest.HTTPClientFor(s.api.Config)
	if err != nil {
		return err
	}
	joint := source.New(s.sink, resources(), source.Options{
		RetryMin: 50 * time.Millisecond, RetryMax: 5 * time.Second, Refresh: 30 * time.Second,
		Log: s.log.With("source", "kubernetes"),
	})
	f := &finder{source: s, client: client, wake: s.wake, events: make(chan struct{}, 1)}
	if f.discovery, err = newDiscovery(s.api, client); err != nil {
		return err
	}
	for _, kind := range policy.Kinds() {
		k := &watched{
			kind: kind, group: groupVersion(policy.Versions(kind)[0]).Group, resource: Resource(kind),
			records: s.Records, joint: joint, missing: s.trigger, log: s.log, keys: make(map[policy.Key]struct{}),
		}
		for _, key := range held {
			if key.Kind == kind {
				k.keys[key] = struct{}{}
			}
		}
		f.kinds = append(f.kinds, k)
	}
	var parts sync.WaitGroup
	parts.Go(func() { f.run(ctx) })
	err = joint.Run(ctx)
	parts.Wait()
	return err
}

// Resource returns the name of a kind in the paths of an API server.
func Resource(kind string) string {
	name := strings.ToLower(kind)
	if base, ok := strings.CutSuffix(name, "y"); ok {
		return base + "ies"
	}
	return name + "s"
}

// resources returns the resources of all kinds.
func resources() (out []string) {
	for _, kind := range policy.Kinds() {
		out = append(out, Resource(kind))
	}
	return out
}
