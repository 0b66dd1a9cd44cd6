// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import "sync"

// maxEnded limits how many connections are remembered between two collections of translations; it exceeds the
// capacity of the translation maps.
const maxEnded = 1 << 17

// Ended are connections to services whose entries the collector has removed because they had ended or were
// idle. It does not contain evicted entries.
type Ended map[Tuple]struct{}

// Has reports whether a connection is among them, whichever end began it.
func (e Ended) Has(t Tuple) bool {
	_, ok := e[t]
	return ok
}

type ended struct {
	mu  sync.Mutex
	all Ended // guarded by mu
}

// note remembers a connection if it was opened to a service.
func (e *ended) note(c *Connection) {
	if c.Value.Front == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.all == nil {
		e.all = Ended{}
	}
	if len(e.all) < maxEnded {
		e.all[c.Tuple] = struct{}{}
	}
}

// TakeEnded returns the connections to services that have ended since the last call.
func (ct *Connections) TakeEnded() Ended {
	ct.ended.mu.Lock()
	defer ct.ended.mu.Unlock()
	all := ct.ended.all
	ct.ended.all = nil
	return all
}
