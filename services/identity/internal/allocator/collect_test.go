// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/identity/internal/identity"
)

func TestGraceIsOneUninterruptedTimeWithoutReferences(t *testing.T) {
	const grace = time.Minute
	unused := func(fences ...int64) []Candidate {
		var out []Candidate
		for i, f := range fences {
			if f != 0 {
				out = append(out, Candidate{Identity: identity.Identity{Number: identity.Numeric(300 + i)}, Fence: f})
			}
		}
		return out
	}
	gc := collector{since: map[identity.Numeric]unusedSince{}}
	now := time.Unix(1_000_000, 0)
	for _, step := range []struct {
		name   string
		after  time.Duration
		unused []Candidate
		due    []identity.Numeric
	}{
		{"both seen for the first time", 0, unused(1, 1), nil},
		{"not long enough", grace - 1, unused(1, 1), nil},
		{"the second was touched meanwhile", 1, unused(1, 2), []identity.Numeric{300}},
		{"the first is used, the second waits anew", grace - 1, unused(0, 2), nil},
		{"the first is unused again, the second is due", 1, unused(1, 2), []identity.Numeric{301}},
		{"what could not be collected stays due", grace, unused(1, 2), []identity.Numeric{300, 301}},
	} {
		now = now.Add(step.after)
		var got []identity.Numeric
		for _, c := range gc.due(step.unused, now, grace) {
			got = append(got, c.Identity.Number)
		}
		if len(got) != len(step.due) {
			t.Errorf("%s: due %v, want %v", step.name, got, step.due)
			continue
		}
		for i := range got {
			if got[i] != step.due[i] {
				t.Errorf("%s: due %v, want %v", step.name, got, step.due)
			}
		}
	}
}
