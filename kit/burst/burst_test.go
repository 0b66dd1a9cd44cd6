// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package burst

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// present returns the percentage that applies now.
func present() int {
	n := debug.SetGCPercent(-1)
	debug.SetGCPercent(n)
	return n
}

// collections returns how many collections n bytes of garbage cause.
func collections(n int) int {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range n / (64 << 10) {
		garbage = make([]byte, 64<<10)
	}
	garbage = nil
	runtime.ReadMemStats(&after)
	return int(after.NumGC - before.NumGC)
}

var garbage []byte

// TestBurstCollectsSeldom: a burst collects after Headroom, whatever the size of the heap, and its end restores the
// percentage that was configured before.
func TestBurstCollectsSeldom(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(50))
	usual := collections(2 * Headroom)
	Begin()
	if !Active() {
		t.Error("no burst has begun")
	}
	Begin() // once is enough
	few := collections(2 * Headroom)
	if few > 4 || usual < 3*few {
		t.Errorf("%d collections in a burst and %d otherwise", few, usual)
	}
	kept := make([]byte, 100<<20)
	for i := range kept[:100] {
		kept[i*1<<20]++
	}
	runtime.GC()
	runtime.GC() // the finalizer of the first one has run, or runs now
	for n := 0; present() > 50+2*100*Headroom/len(kept) && n < 1000; n++ {
		runtime.Gosched()
		runtime.GC()
	}
	if n := present(); n < 50+50*Headroom/len(kept) || n > 50+2*100*Headroom/len(kept) {
		t.Errorf("the heap may grow by %d%% with %d MiB in use", n, len(kept)>>20)
	}
	runtime.KeepAlive(kept)
	End()
	End()
	if n := present(); n != 50 || Active() {
		t.Errorf("after the burst the percentage is %d, want 50", n)
	}
}

// TestBurstEndsThoughTheProcessIsBusy: only further large changes continue a burst.
func TestBurstEndsThoughTheProcessIsBusy(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(50))
	Begin()
	defer End()
	EndCalm(time.Now().Add(Calm / 2))
	if !Active() {
		t.Fatal("the burst ended early")
	}
	EndCalm(time.Now().Add(2 * Calm))
	if n := present(); n != 50 || Active() {
		t.Errorf("the burst goes on, with %d%%", n)
	}
}

// TestBurstLeavesCollectionsOff: GOGC=off still applies.
func TestBurstLeavesCollectionsOff(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	Begin()
	defer End()
	if n := present(); n != -1 || Active() {
		t.Errorf("the percentage is %d", n)
	}
}
