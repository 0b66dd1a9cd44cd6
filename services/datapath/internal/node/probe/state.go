// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"cmp"
	"slices"
	"time"
)

// Size is a label of questions: most are small, others as large as the path should
// carry, or as the search for what it carries has it.
type Size uint8

// The sizes.
const (
	Small Size = iota
	Large
	sizeCount = 2
)

// String is a label of metrics.
func (s Size) String() string { return [...]string{"small", "large"}[s] }

func sizeOf(q *asked) Size {
	if q.size == q.path.sizes.least {
		return Small
	}
	return Large
}

// Drop is why a packet that came in counts for nothing.
type Drop uint8

// The reasons.
const (
	Malformed    Drop = iota // no probe
	OtherVersion             // of a datapath of another version
	Unregistered             // from no address of a peer
	WrongPort                // from another port than that of probes
	TooMany                  // more questions of one peer than are answered
	Unasked                  // an answer to nothing, or too late
	Forged                   // an answer that is not from whom was asked, or not what was asked for
	Unsent                   // a question whose answer could not be sent
	drops        = int(Unsent) + 1
)

// String is a label of metrics.
func (d Drop) String() string {
	return [drops]string{"malformed", "version", "unregistered", "port", "rate", "unasked", "forged", "unsent"}[d]
}

// Counts are since the start.
type Counts struct {
	Asked, Answered, Lost [sizeCount]uint64 // questions by Size
	Answers               uint64            // that were sent
	Dropped               [drops]uint64     // by Drop
	Latency               [families]Histogram
}

// latencyBounds are the upper ends of the buckets of a Histogram.
var latencyBounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond,
	5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond,
	250 * time.Millisecond, time.Second,
}

// Histogram counts round trips.
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

// Cumulative is the content as Prometheus has it: how many round trips there were,
// their sum in seconds, and by each bound in seconds how many were not above it.
func (h *Histogram) Cumulative() (count uint64, sum float64, buckets map[float64]uint64) {
	buckets = make(map[float64]uint64, len(h.buckets))
	var below uint64
	for i, n := range h.buckets {
		below += n
		buckets[latencyBounds[i].Seconds()] = below
	}
	return h.count, h.sum.Seconds(), buckets
}

// State is what a prober knows.
type State struct {
	Paths []Path // by node and family
	// Nodes that are asked, and those of them that answer at each of their addresses
	// that are asked.
	Nodes, Answering int
	// Slowest is the largest smoothed latency of a path whose node answers.
	Slowest time.Duration
	Counts  Counts
}

// Silence is what a node said of itself in its last answer.
type Silence struct {
	For time.Duration // how long ago it had heard from the store
	// Valid says that the answer came within a minute or, where nodes are asked less often,
	// within two rounds.
	Valid bool
	Said  bool // it has answered this process, and said it
}

// Silences returns what each peer said last.
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

// State of everything.
func (p *Prober) State() State {
	s := p.unsortedState()
	slices.SortFunc(s.Paths, func(a, b Path) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Family, b.Family))
	})
	return s
}

// unsortedState is State without an order of the paths.
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
