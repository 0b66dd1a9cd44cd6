// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"fmt"
	"math/bits"
	"net/netip"
	"time"
)

// Reach is whether a node answers.
type Reach uint8

// What a Reach says. Unknown is a path that was not asked often enough yet.
const (
	Unknown Reach = iota
	Reachable
	Unreachable
)

// String is a label of metrics.
func (r Reach) String() string {
	return [...]string{"unknown", "reachable", "unreachable"}[r]
}

// lossesToLose is how many small questions in a row are lost by an unreachable node.
const lossesToLose = 3

// timing is when a path is asked.
type timing struct {
	answer   time.Duration // after which a question is lost
	interval time.Duration // between two rounds, at least
	full     time.Duration // between two questions of full size on a path whose MTU is known
	followUp time.Duration // between an answer and a question that does not wait for its turn
}

func usual() timing {
	return timing{
		answer: time.Second, interval: 5 * time.Second, full: 20 * time.Second, followUp: 100 * time.Millisecond,
	}
}

// overhead is what is around a payload of UDP, by family.
var overhead = [families]int{IPv4: 20 + 8, IPv6: 40 + 8}

// path is one address of a peer, and what is known of the way to it and back.
type path struct {
	node   string
	addr   netip.Addr
	family Family

	due   time.Time // of the next question
	index int       // in the queue; -1 while a question is under way
	asked *asked    // nil: none is under way

	state        Reach
	since        time.Time // of the state
	seen         time.Time // last answer
	last, smooth time.Duration
	losses       int    // small questions in a row
	history      uint64 // of the last small questions, the newest in bit 0; 1: lost
	rounds       int    // in history, at most 64
	failure      string // why the last question could not be sent; "": it was
	silence      uint32 // of the last answer, as in a packet

	sizes   sizes
	suspect int // size of a lost question that counts once a small one is answered; 0: none
}

// asked is a question under way.
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

// choose is the size of the question that is sent now. After a loss it is a small
// one: only that tells a node that is away from a path that loses large packets.
func (p *path) choose(now time.Time, full time.Duration) int {
	if p.state == Reachable && p.losses == 0 && p.suspect == 0 && p.sizes.wants(now, full) {
		p.sizes.last = now
		return p.sizes.next()
	}
	return p.sizes.least
}

// answered notes the answer to q. urgent: the next question waits for no interval.
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

// lost notes that q was not answered. urgent: the next question waits for no
// interval.
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
		p.sizes.reset(p.sizes.expected) // the node may come back by another path
	}
	return false
}

// note keeps whether a small question was lost.
func (p *path) note(lost uint64) {
	p.history = p.history<<1 | lost
	p.rounds = min(p.rounds+1, 64)
}

func (p *path) become(r Reach, now time.Time) {
	if p.state != r {
		p.state, p.since = r, now
	}
}

// Path is what is known of the way to one address of a node and back.
type Path struct {
	Node    string
	Address netip.Addr
	Family  Family
	State   Reach
	Since   time.Time // of the state
	// LastAnswer is zero if there was none.
	LastAnswer time.Time
	// Latency is the round trip of the last question that was answered, Smoothed an
	// average that a new one enters by an eighth. They are from this process to that
	// one, with what it takes to schedule them.
	Latency, Smoothed time.Duration
	// MTU is the size of the largest IP packet that is carried there and back; 0: not
	// known, because none of full size was answered yet or the node is unreachable.
	// While Searching it is a lower bound.
	MTU       int
	Searching bool
	// ExpectedMTU is that of the peer; 0: none, and packets of full size are not sent.
	ExpectedMTU int
	// Losses are the small questions without an answer since the last one.
	Losses int
	// Lost of the last Asked small questions, at most 64, had no answer.
	Lost, Asked int
	// Trouble is why the path is not as it should be; "": it is, or was not asked
	// often enough yet.
	Trouble string
}

// view is the path as State gives it.
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
		v.Trouble = fmt.Sprintf("no answer to %d questions", p.losses)
	case v.Searching:
		v.Trouble = fmt.Sprintf("packets of %d bytes are lost, packets of %d bytes are not; the path MTU is being searched",
			p.sizes.bad, v.MTU)
	case p.sizes.limited():
		v.Trouble = fmt.Sprintf("path MTU %d < %d expected", v.MTU, v.ExpectedMTU)
	}
	return v
}
