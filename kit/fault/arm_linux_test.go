// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fault

import "testing"

func TestOnlyRootAndTheUserOfTheProcessMayArm(t *testing.T) {
	for _, c := range []struct {
		controller uint32
		uid, euid  int
		want       bool
	}{
		{0, 0, 0, true},
		{0, 65702, 65702, true},
		{65702, 65702, 65702, true},
		{65701, 65702, 65702, false},
		{1000, 0, 0, false},
		{1000, 1000, 0, false}, // a set-uid program, armed by the user who started it
		{0, 1000, 0, false},
	} {
		if err := mayArm(c.controller, c.uid, c.euid); (err == nil) != c.want {
			t.Errorf("controller %d, process %d as %d: %v, want allowed: %v", c.controller, c.uid, c.euid, err, c.want)
		}
	}
}
