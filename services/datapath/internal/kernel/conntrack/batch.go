// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"sync"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// batch is what a batch of connections is read into.
type batch[K any] struct {
	keys        []K
	values      []bpf.MapsSlCt
	connections []Connection // empty
}

// borrowBatch takes a batch from a pool, which gets it back by done. The collector looks
// at all connections every few seconds: made anew each time, batches would be a fifth of
// what an idle process allocates.
func borrowBatch[K any](pool *sync.Pool) (b *batch[K], done func()) {
	b, ok := pool.Get().(*batch[K])
	if !ok {
		b = &batch[K]{
			keys: make([]K, pin.BatchSize), values: make([]bpf.MapsSlCt, pin.BatchSize),
			connections: make([]Connection, 0, pin.BatchSize),
		}
	}
	return b, func() { pool.Put(b) } // in place: a pool of memory, not a map
}
