// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/journal"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

func TestStorageIsTriedAgainUntilAWriteWorks(t *testing.T) {
	j, _, _, err := record.Open(t.TempDir(), record.Contents{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	now := time.Unix(1000, 0)
	s := newStorage(j, problem.New(func(string, error) {}), func() time.Time { return now })
	s.stored(errors.New("disk full"))
	if got := s.failure(); got != "disk full" || !s.retryAt.Equal(now.Add(retryStorage)) || s.lost != nil {
		t.Fatalf("after a failed write: %q, next at %v, lost %v", got, s.retryAt, s.lost)
	}
	s.retry(now)
	if s.failure() == "" {
		t.Error("the disk was tried before its time")
	}
	s.retry(now.Add(retryStorage))
	if got := s.failure(); got != "" || !s.retryAt.IsZero() {
		t.Errorf("after a successful write: %q, next at %v", got, s.retryAt)
	}
	s.save(record.Cache{Names: []record.Name{{Name: "example.com"}}})
	if got := s.failure(); got != "" {
		t.Errorf("a write without a waiting caller: %q", got)
	}
	s.stored(fmt.Errorf("write: %w", journal.ErrLost))
	if !errors.Is(s.lost, journal.ErrLost) {
		t.Errorf("the journal is lost, but storage has %v", s.lost)
	}
}
