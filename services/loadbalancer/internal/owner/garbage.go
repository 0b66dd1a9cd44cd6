// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// quiet is the number of sweeps without new garbage before memory may be freed.
const quiet = 2

// garbage decides when the process frees memory: some time after the last change, because changes come in bursts. It
// belongs to the loop.
type garbage struct {
	sweeps int           // sweeps since the last change, counted from 1; 0: no change since the last token
	due    chan struct{} // has a token when memory should be freed
}

func newGarbage() *garbage { return &garbage{due: make(chan struct{}, 1)} }

// add records that a change has left garbage.
func (g *garbage) add() { g.sweeps = 1 }

// sweep counts the sweeps since the last change.
func (g *garbage) sweep() {
	if g.sweeps == 0 {
		return
	}
	if g.sweeps++; g.sweeps <= quiet {
		return
	}
	g.sweeps = 0
	select {
	case g.due <- struct{}{}:
	default:
	}
}
