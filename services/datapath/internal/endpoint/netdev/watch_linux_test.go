// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"slices"
	"testing"
	"time"
)

func TestQueueOfChangesMergesAndHasABound(t *testing.T) {
	q, now := newQueue(), time.Unix(1000, 0)
	a, b := Change{Ifindex: 1}, Change{Addresses: true}
	for _, c := range []Change{a, b, a} {
		q.put(c)
	}
	if got, _ := q.take(now); !slices.Equal(got, []Change{a, b}) {
		t.Errorf("took %v, want each once, in order", got)
	}
	for i := range uint32(3 * maxChanges) {
		q.put(Change{Ifindex: i + 1})
	}
	if got, _ := q.take(now); !slices.Equal(got, []Change{{Everything: true}}) {
		t.Errorf("took %d changes, want only Everything", len(got))
	}
	q.put(a)
	if got, _ := q.take(now); !slices.Equal(got, []Change{a}) {
		t.Errorf("afterwards took %v, want %v", got, a)
	}
}

// TestQueuePacesTheSameChange: a fight with another program over a device costs a few checks per second and delays
// nothing else.
func TestQueuePacesTheSameChange(t *testing.T) {
	q, now := newQueue(), time.Unix(1000, 0)
	fight, other, all := Change{Ifindex: 1}, Change{Ifindex: 2}, Change{Everything: true}
	handled := func(within time.Duration, c Change) (n int) {
		for end := now.Add(within); now.Before(end); now = now.Add(time.Millisecond) {
			q.put(c)
			ready, wait := q.take(now)
			n += len(ready)
			if len(ready) == 0 && (wait <= 0 || wait > c.limit().every) {
				t.Fatalf("%+v waits %v", c, wait)
			}
		}
		return n
	}
	if n := handled(time.Second, fight); n != 8+9 {
		t.Errorf("a change that comes every millisecond was handled %d times in a second, want 8 at once and one every 100 ms", n)
	}
	q.put(other)
	if got, _ := q.take(now); !slices.Contains(got, other) {
		t.Errorf("another change was not handled at once: %v", got)
	}
	if n := handled(10*time.Second, all); n != 2+4 {
		t.Errorf("everything was handled %d times in ten seconds, want twice at once and every 2 s", n)
	}
	now = now.Add(time.Minute)
	for i := range uint32(3 * maxChanges) {
		q.put(Change{Ifindex: i})
		q.take(now.Add(time.Duration(i) * time.Second))
	}
	if n := len(q.paces); n > maxChanges+1 {
		t.Errorf("%d paces are remembered", n)
	}
}
