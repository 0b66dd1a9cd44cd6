// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// LabelSource looks up identities that no endpoint of this node has.
type LabelSource interface {
	// Labels returns the labels of an identity, or endpoint.ErrNotFound for an unassigned one.
	Labels(ctx context.Context, identity uint32) ([]label.Label, error)
}

// Labels caches the labels of identities, so that a reader of events does not call another service for each event. It
// may be incomplete: if labels are unknown and cannot be looked up at once, it reports them as unknown.
type Labels struct {
	// Local looks up the endpoints of this node.
	Local func(identity uint32) ([]label.Label, bool)
	// Source looks up other identities; nil: none.
	Source LabelSource
	// Now defaults to time.Now.
	Now func() time.Time

	mu    sync.Mutex
	known map[uint32]labelEntry // guarded by mu, at most labelEntries
	quiet time.Time             // guarded by mu; the source is not called before
}

type labelEntry struct {
	labels []label.Label
	found  bool
	until  time.Time
}

// Size and times of the cache, and the timeout of a lookup. Identities are not reused quickly, so found labels stay
// valid for long.
const (
	labelEntries  = 4096
	labelsFound   = 5 * time.Minute
	labelsMissing = 10 * time.Second
	labelsTimeout = time.Second
	// A failing source is called again after this pause, so that a thousand events do not wait a thousand times.
	labelsPause = 5 * time.Second
)

// Of returns the labels of an identity. ok is false if they are unknown.
func (l *Labels) Of(ctx context.Context, identity uint32) (labels []label.Label, ok bool) {
	if identity == 0 {
		return nil, false
	}
	now := time.Now
	if l.Now != nil {
		now = l.Now
	}
	l.mu.Lock()
	e, remembered := l.known[identity]
	quiet := now().Before(l.quiet)
	l.mu.Unlock()
	if remembered && now().Before(e.until) {
		return e.labels, e.found
	}
	if l.Local != nil {
		if labels, ok := l.Local(identity); ok {
			l.remember(identity, labelEntry{labels, true, now().Add(labelsFound)})
			return labels, true
		}
	}
	if l.Source == nil || quiet {
		return e.labels, e.found // outdated, if known at all
	}
	ctx, cancel := context.WithTimeout(ctx, labelsTimeout)
	defer cancel()
	labels, err := l.Source.Labels(ctx, identity)
	switch {
	case err == nil:
		l.remember(identity, labelEntry{labels, true, now().Add(labelsFound)})
		return labels, true
	case errors.Is(err, endpoint.ErrNotFound):
		l.remember(identity, labelEntry{until: now().Add(labelsMissing)})
		return nil, false
	case errors.Is(err, context.Canceled):
		return e.labels, e.found // the reader ended
	}
	l.mu.Lock()
	l.quiet = now().Add(labelsPause)
	l.mu.Unlock()
	return e.labels, e.found
}

func (l *Labels) remember(identity uint32, e labelEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// The cache is cleared instead of evicting single entries: identities in use are then looked up again.
	if l.known == nil || len(l.known) >= labelEntries {
		l.known = map[uint32]labelEntry{}
	}
	l.known[identity] = e
}
