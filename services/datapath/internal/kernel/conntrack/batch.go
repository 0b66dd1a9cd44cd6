// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"sync"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// batch holds the buffers for one batch of connections.
type batch[K any] struct {
	keys        []K
	values      []bpf.MapsSlCt
	connections []Connection // length 0
}

// borrowBatch takes a batch from a pool; done returns it. The collector reads all connections every few
// seconds. Without the pool, batches would be a fifth of the allocations of an idle process.
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
