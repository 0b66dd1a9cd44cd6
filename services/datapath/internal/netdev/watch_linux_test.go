// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"slices"
	"testing"
)

func TestQueueOfChangesMergesAndHasABound(t *testing.T) {
	q := &queue{news: make(chan struct{}, 1), pending: map[Change]bool{}}
	a, b := Change{Ifindex: 1}, Change{Addresses: true}
	for _, c := range []Change{a, b, a} {
		q.put(c)
	}
	if got := q.take(); !slices.Equal(got, []Change{a, b}) {
		t.Errorf("took %v, want each once, in order", got)
	}
	for i := range uint32(3 * maxChanges) {
		q.put(Change{Ifindex: i + 1})
	}
	if got := q.take(); !slices.Equal(got, []Change{{Everything: true}}) {
		t.Errorf("took %d changes, want one that stands for all", len(got))
	}
	q.put(a)
	if got := q.take(); !slices.Equal(got, []Change{a}) {
		t.Errorf("afterwards took %v, want %v", got, a)
	}
}
