// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package looptime

import (
	"sync"
	"testing"
	"time"
)

func TestFiguresHaveEachOperationInItsBucket(t *testing.T) {
	var times Times
	for _, d := range []time.Duration{0, 100 * time.Microsecond, 101 * time.Microsecond, 100 * time.Millisecond, time.Hour} {
		times.Add("write", d)
	}
	times.Add("read", time.Millisecond)
	all := times.All()
	if len(all) != 2 || all[0].Operation != "read" || all[1].Operation != "write" {
		t.Fatalf("got %+v, want read and write", all)
	}
	w := all[1]
	if want := 201*time.Microsecond + 100*time.Millisecond + time.Hour; w.Count != 5 || w.Sum != want || w.Longest != time.Hour {
		t.Errorf("got %+v, want 5 of %s together and an hour the longest", w, want)
	}
	got := w.Cumulative()
	for bound, want := range map[float64]uint64{.0001: 2, .00025: 3, .05: 3, .1: 4, 2.5: 4} {
		if got[bound] != want {
			t.Errorf("up to %v s there are %d, want %d", bound, got[bound], want)
		}
	}
}

func TestMutexCountsEveryHold(t *testing.T) {
	const callers, calls = 4, 250
	var m Mutex
	var wg sync.WaitGroup
	held := 0
	for range callers {
		wg.Go(func() {
			for range calls {
				m.Lock("hold")
				held++
				m.Unlock()
			}
		})
	}
	wg.Wait()
	all := m.Times()
	if held != callers*calls || len(all) != 1 || all[0].Count != callers*calls || all[0].Longest > all[0].Sum {
		t.Errorf("held %d times, counted %+v, want %d", held, all, callers*calls)
	}
}
