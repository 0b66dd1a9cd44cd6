// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// TestSurplusOfOpenConnections: of the sender with most open connections the longest idle
// ones are chosen, and no more than are too many.
func TestSurplusOfOpenConnections(t *testing.T) {
	const now = 100_000
	open := map[uint32][]claim{}
	for i := range uint32(openPorts) {
		open[1] = append(open[1], claim{connection: conntrack.Connection{LastSeen: now - i}})
	}
	if got := surplus(open, now); len(got) != 0 {
		t.Fatalf("%d connections are too many of %d", len(got), openPorts)
	}
	const more = 100
	for range more {
		open[2] = append(open[2], claim{connection: conntrack.Connection{LastSeen: 0}})
	}
	got := surplus(open, now)
	if len(got) != more {
		t.Fatalf("%d connections chosen, want %d", len(got), more)
	}
	for i, c := range got {
		if want := uint32(now - openPorts + 1 + i); c.connection.LastSeen != want {
			t.Fatalf("connection %d was last seen at %d, want %d", i, c.connection.LastSeen, want)
		}
	}
}
