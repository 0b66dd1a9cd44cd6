// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
)

// proven counts proven TCP connections from outside, whose responder has continued after the handshake. A part of the
// maps is reserved for them: see bpf/include/sluice/ring.h.
type proven struct {
	ct     *Connections
	counts *count.Counts
	before []uint32 // the counters at the beginning of the pass: what programs add during the pass stays counted
	found  map[uint32]uint32
	keep   [2]int // maximum for each family
	// crowded holds the connections of a family by bucket, if the capacity is almost used up.
	crowded [2]map[uint32][]Connection
}

func (c *Collector) beginProven(capacity [2]int) *proven {
	p := &proven{ct: c.ct, counts: c.counts, found: map[uint32]uint32{}, before: make([]uint32, count.Cells)}
	for i := range p.before {
		p.before[i] = p.counts.Get(uint32(i))
	}
	for f := range p.keep {
		part := capacity[f] / 4
		p.keep[f] = part - part/16
		if int(p.before[count.ProvenOf(f)]) > p.keep[f] {
			p.crowded[f] = map[uint32][]Connection{}
		}
	}
	return p
}

// add counts a connection that is charged to Outside.
func (p *proven) add(c *Connection) {
	if c.Protocol != unix.IPPROTO_TCP || c.Flags&Established == 0 || c.Flags&InRing != 0 {
		return
	}
	f := c.family()
	all, bucket := p.counts.Proven(f, c.Initiator.Addr())
	p.found[all]++
	p.found[bucket]++
	if p.crowded[f] != nil {
		p.crowded[f][bucket] = append(p.crowded[f][bucket], *c)
	}
}

// finish removes surplus connections and corrects the counters; now is in seconds.
func (p *proven) finish(pass *Pass, now uint32) error {
	for f, held := range p.crowded {
		idle := func(c Connection) (uint32, bool) { return now - c.LastSeen, true }
		for _, c := range count.Surplus(held, p.keep[f], idle) {
			deleted, err := p.ct.Remove(c)
			if err != nil {
				return err
			}
			if deleted != 0 {
				all, bucket := p.counts.Proven(f, c.Initiator.Addr())
				p.found[all]--
				p.found[bucket]--
				pass.Live[f]--
				pass.Ended++
			}
		}
	}
	for i := range p.before {
		if at := uint32(i); count.IsOfProven(at) && p.found[at] != p.before[i] {
			p.counts.Add(at, p.found[at]-p.before[i])
		}
	}
	return nil
}
