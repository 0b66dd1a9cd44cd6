// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"errors"
	"fmt"
	"testing"
)

func TestRefusedNodeStaysRefusedUntilASessionIsUp(t *testing.T) {
	v := newAvailability()
	taken, away := fmt.Errorf("node a: %w", ErrNameTaken), errors.New("away")
	v.loaded()
	for i, step := range []struct {
		err     error
		isNew   bool
		problem error
	}{
		{away, true, away},
		{away, false, away},
		{taken, true, taken},
		{taken, false, taken},
		{away, false, taken},
		{taken, false, taken},
	} {
		if isNew := v.down(step.err); isNew != step.isNew {
			t.Errorf("step %d: new %t, want %t", i, isNew, step.isNew)
		}
		if got := v.problem(nil); got != step.problem.Error() {
			t.Errorf("step %d: problem %q, want %q", i, got, step.problem)
		}
	}
	if v.answers() || !v.refusedNow {
		t.Errorf("a refused node answers: %+v", v)
	}
	v.up()
	if !v.answers() || !v.numbers() || v.problem(nil) != "" {
		t.Errorf("a session is up: %+v", v)
	}
	if !v.down(away) {
		t.Error("the end of a session is no news")
	}
}

func TestWaitersWakeWhenWhatIsAvailableChanges(t *testing.T) {
	v := newAvailability()
	failed := errors.New("disk full")
	for i, step := range []struct {
		f       func()
		wakes   bool
		numbers bool
	}{
		{func() { v.loaded() }, true, false},
		{func() { v.loaded() }, false, false},
		{v.up, true, true},
		{v.up, false, true},
		{func() { v.space(ErrNoSpace) }, true, false},
		{func() { v.space(ErrNoSpace) }, false, false},
		{func() { v.space(nil) }, true, true},
		{func() { v.space(nil) }, false, true},
		{func() { v.disk(failed) }, true, false},
		{func() { v.disk(failed) }, false, false},
		{func() { v.disk(nil) }, true, true},
		{func() { v.down(ErrUnavailable) }, true, false},
	} {
		before := v.changed
		step.f()
		wakes := false
		select {
		case <-before:
			wakes = true
		default:
		}
		if wakes != step.wakes || v.numbers() != step.numbers {
			t.Errorf("step %d: wakes %t, numbers %t; want %t, %t", i, wakes, v.numbers(), step.wakes, step.numbers)
		}
	}
}
