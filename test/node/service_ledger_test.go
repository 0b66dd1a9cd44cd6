// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"sync"
	"sync/atomic"
	"testing"
)

// members is a set of backend numbers.
type members uint32

func (m members) has(backend int) bool { return m&(1<<backend) != 0 }

// ledger records which backends a service may and must use. It counts rounds: one begins before each change of the
// backends, and one when the removals are acknowledged as ended. A client that notes the round before a step, and
// queries all rounds since, includes the round in which the step took place.
type ledger struct {
	round atomic.Int64
	mu    sync.RWMutex
	may   []members // by round: backends that the service uses at some time in it
	must  []members // by round: backends that it uses throughout the round
}

func newLedger(first members) *ledger {
	return &ledger{may: []members{first}, must: []members{first}}
}

// now returns the current round.
func (l *ledger) now() int64 { return l.round.Load() }

// begin begins the round in which the backends change.
func (l *ledger) begin(next members) {
	old := l.current()
	l.enter(old|next, old&next)
}

// end begins the round in which the service uses only these backends.
func (l *ledger) end(next members) { l.enter(next, next) }

func (l *ledger) enter(may, must members) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.may, l.must = append(l.may, may), append(l.must, must)
	l.round.Store(int64(len(l.may) - 1))
}

// current returns the backends of the current round, between two changes.
func (l *ledger) current() members {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.must[len(l.must)-1]
}

// allowed reports whether a socket may have been connected to the backend at any time since the round began.
func (l *ledger) allowed(since int64, backend int) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, m := range l.may[since:] {
		if m.has(backend) {
			return true
		}
	}
	return false
}

// stayed reports whether the service has always used the backend since the round began, so that no socket to it may
// have been ended.
func (l *ledger) stayed(since int64, backend int) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, m := range l.must[since:] {
		if !m.has(backend) {
			return false
		}
	}
	return true
}

func TestLedgerKnowsWhereSocketsMayLead(t *testing.T) {
	t.Parallel()
	l := newLedger(0b01)
	l.begin(0b10)
	for _, b := range []int{0, 1} {
		if !l.allowed(l.now(), b) || l.stayed(0, b) {
			t.Errorf("during the change backend %d is not allowed, or has stayed", b)
		}
	}
	l.end(0b10)
	if now := l.now(); l.allowed(now, 0) || !l.allowed(now-1, 0) || !l.allowed(now, 1) || !l.stayed(now, 1) {
		t.Errorf("after the change: %+v", l.may)
	}
}
