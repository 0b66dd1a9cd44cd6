// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// When a process gives memory back by itself. The runtime does so too, but keeps
// what the largest heap of the last minutes needed, and collects only every two
// minutes when nothing happens.
const (
	memoryInterval = 10 * time.Second // between two looks
	// A process that allocates less than this between two looks is idle.
	idleBytes = 2 << 20
	// What was allocated since memory was given back last must be worth a
	// collection, which costs as much CPU time as an ADD or two.
	busyBytes = 16 << 20
)

// giveBack decides when memory is given back to the kernel.
type giveBack struct {
	last  uint64 // allocated, at the last look
	given uint64 // allocated, when memory was given back last
}

// due takes how many bytes were ever allocated and says whether it is time: a
// burst is over.
func (g *giveBack) due(allocated uint64) bool {
	idle := allocated-g.last < idleBytes
	g.last = allocated
	if !idle || allocated-g.given < busyBytes {
		return false
	}
	g.given = allocated
	return true
}

// giveBackMemory gives back what only the start needed, and then, whenever a
// burst of work is over, what that needed, until ctx ends.
func giveBackMemory(ctx context.Context, looks <-chan time.Time, release func()) {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	allocated := func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}
	release()
	g := giveBack{last: allocated()}
	g.given = g.last
	for {
		select {
		case <-ctx.Done():
			return
		case <-looks:
		}
		if g.due(allocated()) {
			release()
		}
	}
}

// watchMemory is giveBackMemory of a service.
func (p *Process) watchMemory() {
	looks := time.NewTicker(memoryInterval)
	defer looks.Stop()
	giveBackMemory(p.work, looks.C, p.GiveBackMemory)
}

// GiveBackMemory collects garbage and gives to the kernel what is free then, with the
// pages of the program that were mapped. A process that is Ready does so by itself some
// ten seconds after a burst of work; call it when one is known to be over. It takes as
// long as a collection.
func (p *Process) GiveBackMemory() {
	debug.FreeOSMemory()
	if err := unmapProgram(); err != nil {
		p.Log.Debug("pages of the program stay mapped", log.Err(err))
	}
}
