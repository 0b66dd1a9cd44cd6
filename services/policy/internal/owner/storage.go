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
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// retryStorage is the delay between two attempts to write to the disk.
const retryStorage = time.Second

// storage is the state on disk. It records the result of each write, and when the next write is due. It belongs to the
// loop; only the journal's methods that stage a change may be called from other goroutines.
type storage struct {
	ctx      context.Context // of Run
	journal  *record.Journal
	problems *problem.Set
	now      func() time.Time
	retryAt  time.Time // time of the next attempt; zero if everything is written
	lost     error     // why the journal can no longer be used; nil: it can
}

func newStorage(j *record.Journal, p *problem.Set, now func() time.Time) *storage {
	return &storage{ctx: context.Background(), journal: j, problems: p, now: now}
}

// save writes a change that no caller waits for. If it cannot be written now, it is retried.
func (s *storage) save(c record.Cache) {
	s.stored(s.journal.Note(s.ctx, c.Records()))
}

// commit makes a staged change effective on disk. It is called before the caller receives the answer.
func (s *storage) commit(ctx context.Context, staged *record.Staged) error {
	err := staged.Commit(ctx)
	s.stored(err)
	if err != nil {
		return fmt.Errorf("%w: %w", failure.ErrStorage, err)
	}
	return nil
}

// stored records the result of a write. After a failure, it schedules a retry.
func (s *storage) stored(err error) {
	if p := s.journal.Problem(); p != nil {
		err = p
	}
	s.retryAt = time.Time{}
	if err != nil {
		s.retryAt = s.now().Add(retryStorage)
	}
	s.problems.Note(problem.Storage, err)
	if errors.Is(err, journal.ErrLost) {
		s.lost = err
	}
}

// retry writes pending changes that are due.
func (s *storage) retry(now time.Time) {
	if !s.retryAt.IsZero() && !s.retryAt.After(now) {
		s.stored(s.journal.Flush())
	}
}

// failure returns why the state cannot be stored; empty if it can.
func (s *storage) failure() string {
	if err := s.problems.Of(problem.Storage); err != nil {
		return err.Error()
	}
	return ""
}
