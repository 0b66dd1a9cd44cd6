// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import "testing"

// TestMemoryIsFreedOnceAfterABurstOfChanges: memory is freed once, after several sweeps without a change.
func TestMemoryIsFreedOnceAfterABurstOfChanges(t *testing.T) {
	g := newGarbage()
	due := func() bool {
		select {
		case <-g.due:
			return true
		default:
			return false
		}
	}
	for range 3 * quiet { // without a change
		g.sweep()
	}
	if due() {
		t.Error("a token without a change")
	}
	for range 3 { // a burst
		g.add()
		for range quiet - 1 {
			g.sweep()
		}
	}
	if due() {
		t.Error("a token during the burst")
	}
	g.sweep()
	if !due() {
		t.Error("no token after the burst")
	}
	for range 3 * quiet {
		g.sweep()
	}
	if due() {
		t.Error("a second token for one burst")
	}
}
