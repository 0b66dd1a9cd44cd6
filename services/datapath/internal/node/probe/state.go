// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"cmp"
	"slices"
	"time"
)

// Size is a label of probes. Most are small; large ones have the expected MTU of the path, or a size of the search
// for the path MTU.
type Size uint8

const (
	Small Size = iota
	Large
	sizeCount = 2
)

// String returns the value of the metric label.
func (s Size) String() string { return [...]string{"small", "large"}[s] }

func sizeOf(q *asked) Size {
	if q.size == q.path.sizes.least {
		return Small
	}
	return Large
}

// Drop is the reason why a received packet was ignored.
type Drop uint8

const (
	Malformed    Drop = iota // not a probe
	OtherVersion             // from a datapath of another version
	Unregistered             // from an address that no peer has
	WrongPort                // from another port than the probe port
	TooMany                  // more probes of one peer than the limit
	Unasked                  // an answer to no pending probe, or too late
	Forged                   // an answer from another address, or with the wrong content
	Unsent                   // a probe whose answer could not be sent
	drops        = int(Unsent) + 1
)

// String returns the value of the metric label.
func (d Drop) String() string {
	return [drops]string{"malformed", "version", "unregistered", "port", "rate", "unasked", "forged", "unsent"}[d]
}

// Counts are counters since the start.
type Counts struct {
	Asked, Answered, Lost [sizeCount]uint64 // probes by Size
	Answers               uint64            // answers sent
	Dropped               [drops]uint64     // by Drop
	Latency               [families]Histogram
}

// latencyBounds are the upper bounds of the buckets of a Histogram.
var latencyBounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond,
	5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond,
	250 * time.Millisecond, time.Second,
}

// Histogram is a histogram of round-trip times.
type Histogram struct {
	buckets [len(latencyBounds)]uint64
	count   uint64
	sum     time.Duration
}

func (h *Histogram) add(d time.Duration) {
	h.count++
	h.sum += d
	if i, _ := slices.BinarySearch(latencyBounds[:], d); i < len(h.buckets) {
		h.buckets[i]++
	}
}

// Cumulative returns the content in Prometheus form: the number of round trips, their sum in seconds, and for each
// bound in seconds how many did not exceed it.
func (h *Histogram) Cumulative() (count uint64, sum float64, buckets map[float64]uint64) {
	buckets = make(map[float64]uint64, len(h.buckets))
	var below uint64
	for i, n := range h.buckets {
		below += n
		buckets[latencyBounds[i].Seconds()] = below
	}
	return h.count, h.sum.Seconds(), buckets
}

// State is the state of a prober.
type State struct {
	Paths []Path // by node and family
	// Nodes is the number of probed nodes, Answering the number of nodes that answer at each of their probed addresses.
	Nodes, Answering int
	// Slowest is the largest smoothed latency of a path to a reachable node.
	Slowest time.Duration
	Counts  Counts
}

// Silence is the report of a node about itself in its last answer.
type Silence struct {
	For time.Duration // how long ago it had heard from the store
	// Valid is true if the answer came within the last minute or, if nodes are probed less often, within two rounds.
	Valid bool
	Said  bool // the node has answered this process
}

// Silences returns the last report of each peer, by name.
func (p *Prober) Silences() map[string]Silence {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	valid := max(time.Minute, 2*p.pause())
	out := make(map[string]Silence, len(p.peers))
	for name, n := range p.peers {
		var last *path
		for _, way := range n.paths {
			if way != nil && !way.seen.IsZero() && (last == nil || way.seen.After(last.seen)) {
				last = way
			}
		}
		if last == nil || last.silence == 0 {
			out[name] = Silence{Said: last != nil}
			continue
		}
		out[name] = Silence{
			For: time.Duration(last.silence-1) * time.Second, Valid: now.Sub(last.seen) <= valid, Said: true,
		}
	}
	return out
}

// State returns the current state, with the paths sorted by node and family.
func (p *Prober) State() State {
	s := p.unsortedState()
	slices.SortFunc(s.Paths, func(a, b Path) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Family, b.Family))
	})
	return s
}

// unsortedState is like State, but with the paths in any order.
func (p *Prober) unsortedState() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := State{Counts: p.counts, Paths: make([]Path, 0, p.used[IPv4]+p.used[IPv6])}
	for _, n := range p.peers {
		asked, answers := false, true
		for f, way := range n.paths {
			if way == nil {
				continue
			}
			asked = true
			answers = answers && way.state == Reachable
			if way.state == Reachable {
				s.Slowest = max(s.Slowest, way.smooth)
			}
			s.Paths = append(s.Paths, way.view(p.errs[f]))
		}
		if asked {
			s.Nodes++
		}
		if asked && answers {
			s.Answering++
		}
	}
	return s
}
