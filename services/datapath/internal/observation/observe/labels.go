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

// LabelSource knows the labels of identities that no endpoint of this node has.
type LabelSource interface {
	// Labels of an identity. endpoint.ErrNotFound: the number is nobody's.
	Labels(ctx context.Context, identity uint32) ([]label.Label, error)
}

// Labels remembers labels of identities, so that a reader of events does not
// ask another service about each. It is never sure: what it does not know, and
// cannot learn at once, has no labels here.
type Labels struct {
	// Local knows the endpoints of this node.
	Local func(identity uint32) ([]label.Label, bool)
	// Source is asked about the others; nil: nobody is.
	Source LabelSource
	// Now is time.Now if nil.
	Now func() time.Time

	mu    sync.Mutex
	known map[uint32]labelEntry // guarded by mu, at most labelEntries
	quiet time.Time             // guarded by mu; the source is left alone until then
}

type labelEntry struct {
	labels []label.Label
	found  bool
	until  time.Time
}

// What is remembered, how long, and how long an answer may take. Numbers are
// not reused quickly, so that what was found stays true for long.
const (
	labelEntries  = 4096
	labelsFound   = 5 * time.Minute
	labelsMissing = 10 * time.Second
	labelsTimeout = time.Second
	// A source that fails is asked again after this time: a thousand events
	// must not wait a thousand times.
	labelsPause = 5 * time.Second
)

// Of gives the labels of an identity. ok is false if they are not known.
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
		return e.labels, e.found // old, if anything
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
		return e.labels, e.found // the reader went
	}
	l.mu.Lock()
	l.quiet = now().Add(labelsPause)
	l.mu.Unlock()
	return e.labels, e.found
}

func (l *Labels) remember(identity uint32, e labelEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// forgetting everything is as good as choosing: what is in use comes back
	if l.known == nil || len(l.known) >= labelEntries {
		l.known = map[uint32]labelEntry{}
	}
	l.known[identity] = e
}
