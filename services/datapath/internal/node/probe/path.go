// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"fmt"
	"math/bits"
	"net/netip"
	"time"
)

// Reach is the reachability of a node.
type Reach uint8

// Values of Reach. Unknown: the path has not been probed often enough yet.
const (
	Unknown Reach = iota
	Reachable
	Unreachable
)

// String returns the value of the metric label.
func (r Reach) String() string {
	return [...]string{"unknown", "reachable", "unreachable"}[r]
}

// lossesToLose is the number of consecutive lost small probes after which a node is unreachable.
const lossesToLose = 3

// timing defines when a path is probed.
type timing struct {
	answer   time.Duration // timeout of a probe
	interval time.Duration // minimum time between two rounds
	full     time.Duration // between two full-size probes on a path with a known MTU
	followUp time.Duration // between an answer and an urgent probe
}

func usual() timing {
	return timing{
		answer: time.Second, interval: 5 * time.Second, full: 20 * time.Second, followUp: 100 * time.Millisecond,
	}
}

// overhead is the size of the IP and UDP headers, by family.
var overhead = [families]int{IPv4: 20 + 8, IPv6: 40 + 8}

// path is one address of a peer, with the state of the path to it and back.
type path struct {
	node   string
	addr   netip.Addr
	family Family

	due   time.Time // of the next probe
	index int       // in the queue; -1 while a probe is pending
	asked *asked    // nil: no pending probe

	state        Reach
	since        time.Time // of the state
	seen         time.Time // last answer
	last, smooth time.Duration
	losses       int    // consecutive lost small probes
	history      uint64 // result of the last small probes, the newest in bit 0; 1: lost
	rounds       int    // number of results in history, at most 64
	failure      string // why the last probe could not be sent; "": it was sent
	silence      uint32 // of the last answer, encoded as in a packet

	sizes   sizes
	suspect int // size of a lost probe that counts once a small probe is answered; 0: none
}

// asked is a pending probe.
type asked struct {
	path     *path
	nonce    nonce
	sequence uint64
	size     int // of the IP packet
	sent     time.Time
}

func newPath(node string, addr netip.Addr, mtu int, now time.Time) *path {
	p := &path{node: node, addr: addr, family: familyOf(addr), due: now, since: now, index: -1}
	p.sizes.least = headerSize + overhead[p.family]
	p.sizes.reset(min(mtu, maxPayload+overhead[IPv4]))
	return p
}

// choose returns the size of the next probe. After a loss it is a small one: only that distinguishes an unreachable
// node from a path that drops large packets.
func (p *path) choose(now time.Time, full time.Duration) int {
	if p.state == Reachable && p.losses == 0 && p.suspect == 0 && p.sizes.wants(now, full) {
		p.sizes.last = now
		return p.sizes.next()
	}
	return p.sizes.least
}

// answered records the answer to q. urgent: the next probe is sent without waiting for the interval.
func (p *path) answered(q *asked, now time.Time) (urgent bool) {
	trip := now.Sub(q.sent)
	if p.last, p.seen = trip, now; p.state != Reachable || p.smooth == 0 {
		p.smooth = trip
	} else {
		p.smooth += (trip - p.smooth) / 8
	}
	p.become(Reachable, now)
	p.losses, p.failure = 0, ""
	if q.size == p.sizes.least {
		p.note(0)
	} else {
		p.sizes.carried(q.size)
	}
	if p.suspect != 0 {
		p.sizes.missed(p.suspect, p.history != 0)
		p.suspect = 0
	}
	return p.sizes.urgent()
}

// lost records that q was not answered. urgent: the next probe is sent without waiting for the interval.
func (p *path) lost(q *asked, now time.Time) (urgent bool) {
	if q.size != p.sizes.least {
		p.suspect = q.size
		return true
	}
	p.suspect = 0
	p.losses++
	p.note(1)
	if p.losses < lossesToLose {
		return true
	}
	if p.state != Unreachable {
		p.become(Unreachable, now)
		p.sizes.reset(p.sizes.expected) // the node may become reachable through another path
	}
	return false
}

// note records whether a small probe was lost.
func (p *path) note(lost uint64) {
	p.history = p.history<<1 | lost
	p.rounds = min(p.rounds+1, 64)
}

func (p *path) become(r Reach, now time.Time) {
	if p.state != r {
		p.state, p.since = r, now
	}
}

// Path is the state of the path to one address of a node and back.
type Path struct {
	Node    string
	Address netip.Addr
	Family  Family
	State   Reach
	Since   time.Time // of the state
	// LastAnswer is zero if no probe was answered.
	LastAnswer time.Time
	// Latency is the round-trip time of the last answered probe, Smoothed a moving average with weight 1/8 for the last
	// value. Both include scheduling delays of the two processes.
	Latency, Smoothed time.Duration
	// MTU is the size of the largest IP packet that passes in both directions; 0: unknown, because no full-size probe has
	// been answered yet or the node is unreachable. While Searching, it is a lower bound.
	MTU       int
	Searching bool
	// ExpectedMTU is the MTU of the peer; 0: unknown, and no full-size probes are sent.
	ExpectedMTU int
	// Losses is the number of unanswered small probes since the last answer.
	Losses int
	// Lost is the number of unanswered probes among the last Asked small probes, which are at most 64.
	Lost, Asked int
	// Trouble describes the problem of the path; "": none, or not probed often enough yet.
	Trouble string
}

// view converts the path for State.
func (p *path) view(err error) Path {
	v := Path{
		Node: p.node, Address: p.addr, Family: p.family, State: p.state, Since: p.since, LastAnswer: p.seen,
		Latency: p.last, Smoothed: p.smooth, MTU: p.sizes.mtu(), ExpectedMTU: p.sizes.expected,
		Searching: p.sizes.searching(), Losses: p.losses, Lost: bits.OnesCount64(p.history), Asked: p.rounds,
	}
	switch {
	case err != nil:
		v.Trouble = err.Error()
	case p.state == Unreachable && p.failure != "":
		v.Trouble = p.failure
	case p.state == Unreachable:
		v.Trouble = fmt.Sprintf("no answer to %d probes", p.losses)
	case v.Searching:
		v.Trouble = fmt.Sprintf("packets of %d bytes are lost, packets of %d bytes are not; the path MTU is being searched",
			p.sizes.bad, v.MTU)
	case p.sizes.limited():
		v.Trouble = fmt.Sprintf("path MTU %d < %d expected", v.MTU, v.ExpectedMTU)
	}
	return v
}
