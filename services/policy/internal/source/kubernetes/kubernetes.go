// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubernetes is a source of policies: the objects of a Kubernetes API
// server, of each kind that is a policy or that policies name.
//
// Each kind that the server has is listed and watched by itself, in the best
// version that is understood here. A kind may come and go while the source runs.
// The objects are handed on as text and none is kept: who takes them keeps what
// it needs.
//
// What an object says is never guessed from less than it says. So the text is
// that of the server, with the fields that nothing here knows, and a listing
// that a server answers from an older state than another has told is not asked
// for: what is missing in it would be a policy that is gone.
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

// Sink takes the objects.
type Sink interface {
	watch.Sink[policy.Key, policy.Written]
	// Held are the policies that the source brought, in earlier runs too.
	Held(ctx context.Context) ([]policy.Key, error)
}

// Source watches an API server.
type Source struct {
	api  *kube.Client
	sink Sink
	log  *slog.Logger
	// Records has each object come with its record. It is set before Run.
	Records bool
	// Kinds says which kinds one process has found for all, which looks often; nil: this one looks alone. It
	// is set before Run.
	Kinds Kinds

	mu    sync.Mutex
	again map[string]struct{} // guarded by mu; kinds to list again
	wake  chan struct{}       // has a token when there is something to look at
}

// Kinds says which kinds the API server has, as group/version/resource.
type Kinds interface {
	// Watch calls told with what was published last, and after every change, until ctx
	// ends. published is false as long as that is not known.
	Watch(ctx context.Context, told func(kinds []string, published bool))
}

// New returns a source. It reads objects as JSON.
func New(api *kube.Client, sink Sink, l *slog.Logger) *Source {
	return &Source{
		api: api, sink: sink, log: l, again: make(map[string]struct{}), wake: make(chan struct{}, 1),
	}
}

// relistIn is the longest time until a kind is listed again on request. All nodes may
// request it at the same time.
const relistIn = 30 * time.Second

// Again lists the objects of a kind again, at a random moment of the next 30 s, so that the
// sink gets those of which it has not kept the text. It does not block.
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

// takeAgain returns the kinds to list again.
func (s *Source) takeAgain() map[string]struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	kinds := s.again
	s.again = make(map[string]struct{})
	return kinds
}

// Run watches until the context ends. It then returns nil.
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
		RetryMin: 50 * time.Millisecond, RetryMax: 5 * time.Second, Refresh: 30 * time.Second, Log: s.log,
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

// Resource is the name of a kind in the paths of an API server.
func Resource(kind string) string {
	name := strings.ToLower(kind)
	if base, ok := strings.CutSuffix(name, "y"); ok {
		return base + "ies"
	}
	return name + "s"
}

// resources are those of all kinds.
func resources() (out []string) {
	for _, kind := range policy.Kinds() {
		out = append(out, Resource(kind))
	}
	return out
}
