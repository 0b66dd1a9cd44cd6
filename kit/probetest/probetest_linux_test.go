// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probetest

import (
	"errors"
	"os"
	"testing"
	"time"
)

// TestWaitingEndsByTheClockOfTheProcess: deadlines that expire while the process is not scheduled do not count.
func TestWaitingEndsByTheClockOfTheProcess(t *testing.T) {
	late := errors.New("it came late")
	for name, end := range map[string]struct {
		after int   // tries
		err   error // result of the try after them
		want  error
	}{
		"an answer":          {want: nil},
		"an answer, late":    {after: 3, want: nil},
		"an error, late":     {after: 3, err: late, want: late},
		"no answer in time":  {after: 5, err: os.ErrDeadlineExceeded, want: os.ErrDeadlineExceeded},
		"no answer, at once": {err: os.ErrDeadlineExceeded, want: os.ErrDeadlineExceeded},
	} {
		c, tries := &clock{}, 0
		var deadline time.Time
		err := c.within(time.Second, func(d time.Time) error { deadline = d; return nil }, func() error {
			if deadline.IsZero() {
				t.Fatalf("%s: no deadline", name)
			}
			if tries++; tries <= end.after {
				return os.ErrDeadlineExceeded
			}
			c.ticks.Store(int64(time.Second / tick))
			return end.err
		})
		if !errors.Is(err, end.want) {
			t.Errorf("%s: %v, want %v", name, err, end.want)
		}
		if most := end.after + 2; tries > most {
			t.Errorf("%s: %d tries, want <= %d", name, tries, most)
		}
	}
}
