// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import "github.com/sluice-net/sluice/model/identity"

// Free returns how many numbers have no label set and are assigned first.
func (a *Allocator) Free() (n int) {
	for i := range identity.ClusterSize {
		if a.IsFree(identity.MinCluster + identity.Numeric(i)) {
			n++
		}
	}
	return n
}

// FreeLast returns how many are assigned last.
func (a *Allocator) FreeLast() (n int) {
	a.index.mu.Lock(opRead)
	defer a.index.mu.Unlock()
	for i := range identity.ClusterSize {
		number := identity.MinCluster + identity.Numeric(i)
		if _, known := a.index.mirror.known[number]; !known && a.index.candidates.short.has(number) {
			n++
		}
	}
	return n
}

// IsFree reports whether a number has no label set and is assigned first.
func (a *Allocator) IsFree(n identity.Numeric) bool {
	a.index.mu.Lock(opRead)
	defer a.index.mu.Unlock()
	_, known := a.index.mirror.known[n]
	return !known && !a.index.candidates.short.has(n)
}
