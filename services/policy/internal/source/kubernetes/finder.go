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

// absences is how many looks in a row have to miss a kind of which there are
// policies, until it is gone with them: an API server that starts does not name
// all its kinds at once.
const absences = 3

// Times of a finder. Between two looks at kinds that may appear are at least
const (
	again     = 5 * time.Second  // after a failure, or when a kind is missing
	rescan    = 30 * time.Second // as long as no process looks for all, and longer in clusters of more than 300 nodes
	published = 20 * time.Minute // otherwise
	// announcements is the shortest time between two changes that others published.
	announcements = time.Second
)

// finder looks which kinds the API server has, until each is watched in its best
// version, and whenever one is not found any more.
type finder struct {
	source    *Source
	client    *http.Client
	discovery *Discovery
	kinds     []*watched
	wake      chan struct{} // has a token when a kind is missing or has to be listed again

	looked time.Time
	jitter float64 // of the pause after the last look

	events chan struct{} // has a token when announced has changed
	mu     sync.Mutex
	// announced are the kinds that were published last; known is false as long as no
	// process has published.
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
			due = time.After(time.Until(f.looked.Add(wait))) // what others publish does not delay it
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

// again looks, and watches what there is. It reports whether something could not be
// looked at.
func (f *finder) again(ctx context.Context) (failing bool) {
	served, failed := f.discovery.resources(ctx)
	f.looked, f.jitter = time.Now(), rand.Float64()
	if ctx.Err() != nil {
		return false
	}
	relist := f.source.takeAgain()
	for _, k := range f.kinds {
		if _, ok := relist[k.kind]; ok && k.version != "" {
			k.end() // settle watches it again, which begins with a list
		}
		if err := failed[k.group]; err == nil {
			f.watchBest(ctx, k, served[k.resource])
		} else if k.absent = 0; k.version == "" {
			k.joint.Failed(k.resource, plain(err))
		}
	}
	return len(failed) > 0
}

// told takes what was published last.
func (f *finder) told(kinds []string, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.announced, f.known = kinds, known
	select {
	case f.events <- struct{}{}:
	default:
	}
}

// adopt watches kinds that were published in a better version than the watched one. A
// kind that was not published may exist nevertheless: only the API server takes it away.
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

// pause is how long to wait for the next look; zero: until a kind is missing.
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

// rescan is the pause between two looks at kinds that may appear.
func (f *finder) rescan() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known {
		return published
	}
	return max(rescan, time.Duration(f.source.api.Nodes())*time.Second/10)
}

// watchBest watches the kind in the best version that is served.
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
		k.joint.Failed(k.resource, fmt.Errorf("the API server has it in %s, of which none is known here: "+
			"nothing of it is enforced but what was before", strings.Join(served, ", ")))
		return
	}
	// What was never here is not waited for: nothing is deleted for it.
	if k.absent++; k.absent >= absences || k.version == "" && len(k.keys) == 0 {
		k.absent = absences
		if n := k.gone(); n > 0 {
			f.source.log.Warn("the API server has a kind of policy no more; its policies are deleted",
				"resource", k.resource, "policies", n)
		}
	}
}
