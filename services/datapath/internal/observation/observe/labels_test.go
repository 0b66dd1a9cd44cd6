// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// source returns labels for even identities, and counts calls.
type source struct {
	asked int
	err   error
}

func (s *source) Labels(_ context.Context, identity uint32) ([]label.Label, error) {
	s.asked++
	switch {
	case s.err != nil:
		return nil, s.err
	case identity%2 == 1:
		return nil, fmt.Errorf("identity %d: %w", identity, endpoint.ErrNotFound)
	}
	return []label.Label{{Source: "k8s", Key: "id", Value: fmt.Sprint(identity)}}, nil
}

func TestLabelsAreAskedForOnce(t *testing.T) {
	now := time.Unix(1000, 0)
	s := &source{}
	l := &Labels{
		Source: s, Now: func() time.Time { return now },
		Local: func(id uint32) ([]label.Label, bool) {
			return []label.Label{{Key: "local"}}, id == 300
		},
	}
	check := func(id uint32, key string, asked int) {
		t.Helper()
		labels, ok := l.Of(t.Context(), id)
		got := ""
		if len(labels) > 0 {
			got = labels[0].Key
		}
		if ok != (key != "") || got != key || s.asked != asked {
			t.Errorf("identity %d: %v, %v after %d questions, want %q after %d", id, labels, ok, s.asked, key, asked)
		}
	}
	check(0, "", 0)
	check(300, "local", 0)
	check(400, "id", 1)
	check(400, "id", 1)
	check(401, "", 2)
	check(401, "", 2)
	now = now.Add(labelsMissing)
	check(401, "", 3)
	check(400, "id", 3)
	now = now.Add(labelsFound)
	check(400, "id", 4)

	// a failing source is not called again, and known labels are still returned
	now = now.Add(labelsFound)
	s.err = errors.New("away")
	check(400, "id", 5)
	check(402, "", 5)
	check(404, "", 5)
	now = now.Add(labelsPause)
	check(404, "", 6)
	s.err = nil
	now = now.Add(labelsPause)
	check(404, "id", 7)
}

func TestLabelsHaveABound(t *testing.T) {
	l := &Labels{Source: &source{}}
	for id := range uint32(3 * labelEntries) {
		l.Of(t.Context(), id)
	}
	if n := len(l.known); n > labelEntries {
		t.Errorf("%d identities are remembered, at most %d may be", n, labelEntries)
	}
}
