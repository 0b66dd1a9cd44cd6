// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"fmt"
	"sync"
)

// saver batches writes of the holders: callers that arrive during a write share the next one.
type saver struct {
	save func() error // writes the state at the time of the call
	told func(error)  // called with the result of each write

	mu      sync.Mutex
	changed uint64       // guarded by mu; number of the last change
	saved   uint64       // guarded by mu; the last change that was written
	running *savingRound // guarded by mu; nil when nothing is written
}

type savingRound struct {
	done chan struct{}
	upTo uint64
	err  error // set before done is closed
}

func (s *saver) init(save func() error, told func(error)) { s.save, s.told = save, told }

// dirty records a change. Call it before unlocking the mutex that guards the changed state.
func (s *saver) dirty() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed++
}

// wait returns when all changes up to now have been written. If it returns an error, ErrRecords or the context's, the
// changes stay in memory, and the next call writes them.
func (s *saver) wait(ctx context.Context) error {
	s.mu.Lock()
	want := s.changed
	for s.saved < want {
		r := s.running
		if r == nil {
			r = &savingRound{done: make(chan struct{}), upTo: s.changed}
			s.running = r
			// Write in a new goroutine, because the caller may stop waiting before the write ends.
			go s.round(r)
		}
		s.mu.Unlock()
		select {
		case <-r.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		s.mu.Lock()
		if r.err != nil && r.upTo >= want {
			s.mu.Unlock()
			return fmt.Errorf("%w: %w", ErrRecords, r.err)
		}
	}
	s.mu.Unlock()
	return nil
}

func (s *saver) round(r *savingRound) {
	r.err = s.save()
	s.told(r.err)
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.err == nil {
		s.saved = max(s.saved, r.upTo)
	}
	s.running = nil
	close(r.done)
}
