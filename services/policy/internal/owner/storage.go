// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// retryStorage is how long the owner waits before it tries the disk again.
const retryStorage = time.Second

// partStorage is the part of a problem that is the disk's.
const partStorage = "storage"

// storage is the state on the disk: it notes how each write went, and when the next one is
// due. It belongs to the loop, but for the journal's own methods that stage a change.
type storage struct {
	journal  *record.Journal
	problems *problems
	now      func() time.Time
	retryAt  time.Time // when to write again; zero if all is written
	lost     error     // the journal cannot be relied upon any more; nil: it can
}

func newStorage(j *record.Journal, p *problems, now func() time.Time) *storage {
	return &storage{journal: j, problems: p, now: now}
}

// save writes a change that no caller waits for. What cannot be written now is
// written as soon as that works.
func (s *storage) save(ctx context.Context, c record.Cache) {
	s.stored(s.journal.Note(ctx, c.Records()))
}

// commit makes a staged change count, which has to be so on the disk before it
// is answered.
func (s *storage) commit(ctx context.Context, staged *record.Staged) error {
	err := staged.Commit(ctx)
	s.stored(err)
	if err != nil {
		return fmt.Errorf("%w: %w", failure.ErrStorage, err)
	}
	return nil
}

// stored notes how a write of the state went, and whether another one still has
// to be tried again.
func (s *storage) stored(err error) {
	if p := s.journal.Problem(); p != nil {
		err = p
	}
	s.retryAt = time.Time{}
	if err != nil {
		s.retryAt = s.now().Add(retryStorage)
	}
	s.problems.note(partStorage, err)
	if errors.Is(err, journal.ErrLost) {
		s.lost = err
	}
}

// retry writes what is due.
func (s *storage) retry(now time.Time) {
	if !s.retryAt.IsZero() && !s.retryAt.After(now) {
		s.stored(s.journal.Flush())
	}
}

// failure returns why the state cannot be stored; empty: it can.
func (s *storage) failure() string { return s.problems.texts[partStorage] }
