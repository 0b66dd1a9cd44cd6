// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// absences is the number of consecutive queries without a kind after which its policies are deleted. A single query
// is not enough, because an API server that is starting does not list all its kinds at once.
const absences = 3

// Minimum intervals between two queries of a finder.
const (
	again = 5 * time.Second // after a failure, or when a kind is missing
	// The interval while no other process queries for all processes. It is longer in clusters of more than 300 nodes.
	rescan    = 30 * time.Second
	published = 20 * time.Minute // while another process queries for all processes
	// announcements is the minimum interval between handling two changes that another process has published.
	announcements = time.Second
)

// finder queries which kinds the API server has. It repeats the query until each kind is watched in its preferred
// version, and whenever the API server no longer knows a watched kind.
type finder struct {
	source    *Source
	client    *http.Client
	discovery *Discovery
	kinds     []*watched
	wake      chan struct{} // contains a token when a kind is missing or must be listed again

	looked time.Time
	jitter float64 // random factor of the delay after the last query

	events chan struct{} // contains a token after announced has changed
	mu     sync.Mutex
	// announced contains the last published kinds; known is false until a process has published kinds.
	announced []string // guarded by mu
	known     bool     // guarded by mu
}

func (f *finder) run(ctx context.Context) {
	defer func() {
		for _, k := range f.kinds {
			k.end()
		}
	}()
	if kinds := f.source.Kinds; kinds != nil {
		var watching sync.WaitGroup
		defer watching.Wait()
		watching.Go(func() { kinds.Watch(ctx, f.told) })
	}
	failing := f.again(ctx)
	var quiet <-chan time.Time
	for ctx.Err() == nil {
		var due <-chan time.Time
		wake, news := f.wake, f.events
		if quiet != nil {
			news = nil
		}
		if wait := f.pause(failing); wait > 0 {
			wait += time.Duration(f.jitter * float64(wait/2))
			// A change of the published kinds must not delay the query.
			due = time.After(time.Until(f.looked.Add(wait)))
			if wait < again*2 {
				wake = nil
			}
		}
		select {
		case <-due:
			failing = f.again(ctx)
		case <-wake:
			failing = f.again(ctx)
		case <-news:
			f.adopt(ctx)
			quiet = time.After(announcements)
		case <-quiet:
			quiet = nil
		case <-ctx.Done():
		}
	}
}

// again queries the kinds, and watches the kinds that exist. It reports whether a query failed.
func (f *finder) again(ctx context.Context) (failing bool) {
	served, failed := f.discovery.resources(ctx)
	f.looked, f.jitter = time.Now(), rand.Float64()
	if ctx.Err() != nil {
		return false
	}
	relist := f.source.takeAgain()
	for _, k := range f.kinds {
		if _, ok := relist[k.kind]; ok && k.version != "" {
			k.end() // settle watches the kind again, starting with a list
		}
		if err := failed[k.group]; err == nil {
			f.watchBest(ctx, k, served[k.resource])
		} else if k.absent = 0; k.version == "" {
			k.joint.Failed(k.resource, plain(err))
		}
	}
	return len(failed) > 0
}

// told stores the last published kinds.
func (f *finder) told(kinds []string, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.announced, f.known = kinds, known
	select {
	case f.events <- struct{}{}:
	default:
	}
}

// adopt switches the watch of a kind to a more preferred version that was published. It ends no watch because a kind
// was not published: only a query of the API server can show that the kind does not exist.
func (f *finder) adopt(ctx context.Context) {
	f.mu.Lock()
	announced := f.announced
	f.mu.Unlock()
	for _, k := range f.kinds {
		for _, version := range policy.Versions(k.kind) {
			if version == k.version {
				break
			}
			if slices.Contains(announced, version+"/"+k.resource) {
				f.source.log.Info("a kind of policy was published", "resource", k.resource, "version", version)
				f.watchBest(ctx, k, []string{version})
				break
			}
		}
	}
}

// pause returns the time until the next query. Zero means that the next query is needed only when a kind is missing.
func (f *finder) pause(failed bool) time.Duration {
	wait := time.Duration(0)
	for _, k := range f.kinds {
		switch {
		case failed, k.absent > 0 && k.absent < absences:
			return again
		case k.version != policy.Versions(k.kind)[0]:
			wait = f.rescan()
		}
	}
	return wait
}

// rescan returns the delay between two queries for kinds that may appear.
func (f *finder) rescan() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known {
		return published
	}
	return max(rescan, time.Duration(f.source.api.Nodes())*time.Second/10)
}

// watchBest watches the kind in the most preferred version that is served.
func (f *finder) watchBest(ctx context.Context, k *watched, served []string) {
	for _, version := range policy.Versions(k.kind) {
		if !slices.Contains(served, version) {
			continue
		}
		k.absent = 0
		if k.version == version {
			return
		}
		f.source.log.Info("policies are watched", "resource", k.resource, "version", version)
		if err := k.watch(ctx, f.source.api, f.client, version); err != nil {
			k.joint.Failed(k.resource, err)
		}
		return
	}
	if len(served) > 0 {
		k.end()
		k.absent = 0
		k.joint.Failed(k.resource, fmt.Errorf("the API server has it only in %s, which Sluice does not support: "+
			"only the policies that were read before are enforced", strings.Join(served, ", ")))
		return
	}
	// A kind that was never watched has no policies to delete, so a single query is enough.
	if k.absent++; k.absent >= absences || k.version == "" && len(k.keys) == 0 {
		k.absent = absences
		if n := k.gone(); n > 0 {
			f.source.log.Warn("the API server no longer has a kind of policy; its policies are deleted",
				"resource", k.resource, "policies", n)
		}
	}
}
