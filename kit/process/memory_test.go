// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/burst"
)

func TestMemoryIsGivenBackWhenABurstIsOver(t *testing.T) {
	const mib = 1 << 20
	g := giveBack{last: 100 * mib, given: 100 * mib}
	for i, step := range []struct {
		more uint64 // MiB allocated since the last check
		want bool
	}{
		{0, false}, // nothing to give back
		{1, false},
		{200, false}, // busy
		{20, false},  // still busy
		{1, true},    // the burst has ended
		{0, false},
		{1, false},
		{3, false}, // never idle
		{3, false},
		{3, false},
		{1, false}, // too little to justify a collection
		{3, false},
		{1, false},
		{1, true},
		{10, false}, // the next burst
		{10, false},
		{0, true},
	} {
		if got := g.due(g.last + step.more*mib); got != step.want {
			t.Errorf("step %d, %d MiB more: %v, want %v", i, step.more, got, step.want)
		}
	}
}

// TestMemoryOfABurstIsGivenBackThoughItEndedBefore: a burst that ends while the process is busy is followed by a return
// of memory once the process is idle, however little it allocated since the start.
func TestMemoryOfABurstIsGivenBackThoughItEndedBefore(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(50))
	burst.Begin()
	defer burst.End()
	g, now := giveBack{}, time.Now()
	if g.look(now.Add(2*burst.Calm), 2*idleBytes) || burst.Active() {
		t.Fatal("want a busy process and the end of the burst")
	}
	if !g.look(now, 2*idleBytes) {
		t.Error("no memory is returned after the burst")
	}
	if g.look(now, 2*idleBytes) {
		t.Error("memory is returned twice")
	}
}

// hold prevents the compiler from removing an allocation.
var hold [][]byte

func TestGivenBackMemoryIsTheKernels(t *testing.T) {
	free := func() uint64 { // kept for a later check
		s := []metrics.Sample{{Name: "/memory/classes/heap/free:bytes"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	looks, released, ended := make(chan time.Time), make(chan uint64), make(chan struct{})
	go func() {
		defer close(ended)
		giveBackMemory(ctx, looks, func() {
			debug.FreeOSMemory()
			released <- free()
		})
	}()
	<-released // after start-up
	for range 64 {
		hold = append(hold, make([]byte, 1<<20))
	}
	looks <- time.Now() // busy
	hold = nil
	looks <- time.Now()
	if kept := <-released; kept > 16<<20 {
		t.Errorf("%d bytes are kept after the burst", kept)
	}
	cancel()
	<-ended
}
