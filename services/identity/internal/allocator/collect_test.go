// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
)

func TestGraceIsOneUninterruptedTimeWithoutReferences(t *testing.T) {
	const grace = time.Minute
	ids := func(numbers ...identity.Numeric) (out []identity.Identity) {
		for _, n := range numbers {
			out = append(out, identity.Identity{Number: n})
		}
		return out
	}
	c := collector{since: map[identity.Numeric]unusedSince{}}
	now := time.Unix(1_000_000, 0)
	for _, step := range []struct {
		name   string
		after  time.Duration
		unused []identity.Identity
		due    []identity.Numeric
	}{
		{"both seen for the first time", 0, ids(300, 301), nil},
		{"not long enough", grace - 1, ids(300, 301), nil},
		{"the second is used", 0, ids(300), nil},
		{"the second is unused again", 0, ids(300, 301), nil},
		{"the first is due", 1, ids(300, 301), []identity.Numeric{300}},
		{"the first is used, the second waits", grace - 2, ids(301), nil},
		{"the first is unused again, the second is due", 1, ids(300, 301), []identity.Numeric{301}},
		{"what could not be collected stays due, longest first", grace, ids(300, 301), []identity.Numeric{301, 300}},
	} {
		now = now.Add(step.after)
		fresh, due := c.plan(step.unused, now, grace)
		for _, id := range fresh {
			c.since[id.Number] = unusedSince{at: now}
		}
		var got []identity.Numeric
		for _, c := range due {
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
