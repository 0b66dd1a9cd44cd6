// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/sluice-net/sluice/kit/burst"
	"github.com/sluice-net/sluice/kit/log"
)

// Constants that decide when a process returns memory to the kernel. The Go runtime returns memory, too, but it keeps
// as much as the largest heap of the last minutes, and it collects garbage of an idle process only every two minutes.
const (
	memoryInterval = 10 * time.Second // between two checks
	// A process that allocates less than this between two checks is idle.
	idleBytes = 2 << 20
	// If a process has allocated at least this much since memory was last returned, a collection is worth its cost:
	// as much CPU time as one or two CNI ADDs.
	busyBytes = 16 << 20
)

// giveBack decides when to return memory to the kernel.
type giveBack struct {
	last  uint64 // total allocation at the last check
	given uint64 // total allocation when memory was last returned
	// burst is true after a burst of package burst whose memory was not returned yet.
	burst bool
}

// due takes the total number of allocated bytes and reports whether a burst of work has ended, so
// that memory should be returned.
func (g *giveBack) due(allocated uint64) bool {
	idle := allocated-g.last < idleBytes
	g.last = allocated
	if !idle || allocated-g.given < busyBytes && !g.burst {
		return false
	}
	g.given, g.burst = allocated, false
	return true
}

// look ends a burst of package burst if it is over, and then does the same as due. If the process is still busy when
// the burst ends, the memory of the burst is due once the process is idle.
func (g *giveBack) look(now time.Time, allocated uint64) bool {
	g.burst = g.burst || burst.Active()
	burst.EndCalm(now)
	return g.due(allocated)
}

// giveBackMemory returns memory to the kernel once after the start-up and then after each burst of work, until ctx
// ends. If a burst of package burst began during the start-up, its end counts as the end of the start-up.
func giveBackMemory(ctx context.Context, looks <-chan time.Time, release func()) {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	allocated := func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	g := giveBack{last: allocated()}
	g.given = g.last
	if !burst.Active() { // otherwise the start-up has not ended
		release()
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
		}
		if g.look(time.Now(), allocated()) {
			release()
		}
	}
}

// watchMemory runs giveBackMemory for a service.
func (p *Process) watchMemory() {
	looks := time.NewTicker(memoryInterval)
	defer looks.Stop()
	giveBackMemory(p.work, looks.C, p.GiveBackMemory)
}

// GiveBackMemory collects garbage, returns free memory to the kernel, and unmaps the mapped pages
// of the program file. A process that is Ready does so by itself about ten seconds after a burst of
// work; call GiveBackMemory at the known end of a burst. It takes as long as a garbage collection, and ends a burst of
// package burst.
func (p *Process) GiveBackMemory() {
	burst.End()
	debug.FreeOSMemory()
	if err := unmapProgram(); err != nil {
		p.Log.Debug("pages of the program stay mapped", log.Err(err))
	}
}
