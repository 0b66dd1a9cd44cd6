// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package probe asks other nodes whether they answer, how fast, and which size of
// packet passes between them in both directions.
//
// The datapath of each node sends UDP packets that may not be fragmented to that of
// each other, and answers theirs with packets of the same size. A small question
// tells whether a node is reachable. One of full size tells whether the path loses
// without a word what is as large as it should carry; then the largest size that
// passes is searched for. The kernel's own idea of the path MTU is left out: it is
// what may be wrong.
//
// Anybody who can reach the port may send anything to it. Only registered addresses
// of peers, at the port itself, are answered, each a bounded number of times per
// second and never with more than they sent. An answer counts once, from the address
// that was asked, and with the number that only the asked one was sent.
//
// An answer says how long ago its node heard from the store. That is the only finding
// that has an effect on packets: a node that is cut off from the store doubts the mappings
// of nodes that are not (package belief). The package itself changes nothing in the kernel.
package probe

import (
	"container/heap"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Family of addresses.
type Family uint8

// The families.
const (
	IPv4 Family = iota
	IPv6
	families = 2
)

// String is a label of metrics.
func (f Family) String() string { return [...]string{"ipv4", "ipv6"}[f] }

func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Bounds of what a node sends.
const (
	// Rate is how many questions per second are sent at most, over all peers.
	Rate = 50
	// usualRate is how many the interval is chosen for: the rest is for repetitions.
	usualRate = 40
	// burst is how many questions may follow each other at once.
	burst = 10

	// AnswerRate is how many questions of one peer are answered per second at most,
	// and as many at once.
	AnswerRate = 20

	// MaxPeers bounds what is kept.
	MaxPeers = 1 << 14
)

// Peer is another node.
type Peer struct {
	Name string
	// Addresses are all by which it may send, no IPv4 within IPv6. The first of a
	// family is asked.
	Addresses []netip.Addr
	// MTU is the size in bytes of IP packets that the underlay should carry between
	// this node and the peer; below MinMTU: not known, and no packets of full size are
	// sent.
	MTU int
}

// Conn is a socket of one family, on the port that all nodes have. What is sent by
// it is never fragmented, and no path MTU that the kernel has learnt applies.
type Conn interface {
	// Read waits for a packet. It returns its sender and the local address that it was
	// sent to, if that is one of this node alone; net.ErrClosed after Close.
	Read(b []byte) (n int, from netip.AddrPort, to netip.Addr, err error)
	// Write sends a packet from a local address; invalid: from that of the route.
	Write(b []byte, to netip.AddrPort, from netip.Addr) error
	Close() error
}

// Options of a Prober. Port and Listen are needed.
type Options struct {
	// Port of this node and of all others.
	Port uint16
	// Listen opens the socket of a family.
	Listen func(Family) (Conn, error)
	// Silence returns how long ago this node heard from the store, for answers; known is
	// false if it does not know. Nil: it never knows. It must not call the Prober.
	Silence func() (d time.Duration, known bool)
	// Log; nothing is logged if nil.
	Log *slog.Logger
}

// Prober asks and answers.
type Prober struct {
	o      Options
	timing timing
	run    uint64
	kick   chan struct{} // the earliest due question may be another

	mu       sync.Mutex
	peers    map[string]*peer     // guarded by mu
	byAddr   map[netip.Addr]*peer // guarded by mu; whose a sender's address is
	queue    queue                // guarded by mu; paths without a question under way
	asked    map[nonce]*asked     // guarded by mu; questions under way
	order    []*asked             // guarded by mu; as they were sent, some of them answered
	sequence uint64               // guarded by mu
	pace     pace                 // guarded by mu; of questions
	counts   Counts               // guarded by mu
	local    [families]netip.Addr // guarded by mu; where questions come from; invalid: by the route
	conns    [families]Conn       // guarded by mu; nil: not open
	errs     [families]error      // guarded by mu; why not; nil: not needed
	reopen   [families]time.Time  // guarded by mu; when it is tried again
	used     [families]int        // guarded by mu; paths of the family
}

// peer is another node as the prober has it.
type peer struct {
	Peer
	paths [families]*path // nil: no address of the family
	pace  pace            // of answers
}

// New prepares a prober. It does nothing before Run.
func New(o Options) *Prober {
	if o.Log == nil {
		o.Log = log.Discard()
	}
	p := &Prober{
		o: o, timing: usual(), kick: make(chan struct{}, 1), peers: map[string]*peer{}, byAddr: map[netip.Addr]*peer{},
		asked: map[nonce]*asked{}, pace: pace{gap: time.Second / Rate, burst: burst},
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	p.run = binary.BigEndian.Uint64(b[:])
	return p
}

// SetLocal says by which addresses this node is registered: questions come from the
// first of each family, because others answer to no other. Without one the route
// decides.
func (p *Prober) SetLocal(addrs []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.local = firsts(addrs)
}

// firsts are the first addresses of each family; invalid: none.
func firsts(addrs []netip.Addr) (first [families]netip.Addr) {
	for _, a := range addrs {
		if f := familyOf(a); a.IsValid() && !first[f].IsValid() {
			first[f] = a
		}
	}
	return first
}

// SetPeers says which other nodes there are, all of them. A new one, or one that is
// asked at another address, is asked at once. What is known of the others stays. It
// may be called before Run. More than MaxPeers are an error; those beyond are left out.
func (p *Prober) SetPeers(peers []Peer) error {
	var err error
	if len(peers) > MaxPeers {
		err = fmt.Errorf("%d nodes to probe, at most %d", len(peers), MaxPeers)
		peers = peers[:MaxPeers]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	listed := make(map[string]struct{}, len(peers))
	for _, n := range peers {
		listed[n.Name] = struct{}{}
		p.set(n, now)
	}
	for name, n := range p.peers {
		if _, ok := listed[name]; !ok {
			p.drop(n.paths[IPv4])
			p.drop(n.paths[IPv6])
			delete(p.peers, name)
		}
	}
	clear(p.byAddr)
	for _, n := range peers {
		for _, a := range n.Addresses {
			// Two nodes with one address share what is answered.
			p.byAddr[a] = p.peers[n.Name]
		}
	}
	// Fewer peers are asked more often: nobody waits for a turn of the many.
	for _, way := range p.queue {
		way.due = earlier(way.due, now.Add(p.interval()))
	}
	heap.Init(&p.queue)
	p.wake()
	return err
}

// wake has the loop look at what is due.
func (p *Prober) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// set makes a peer what it shall be. mu is held.
func (p *Prober) set(want Peer, now time.Time) {
	n := p.peers[want.Name]
	if n == nil {
		n = &peer{pace: pace{gap: time.Second / AnswerRate, burst: AnswerRate}}
		p.peers[want.Name] = n
	}
	if n.MTU == want.MTU && slices.Equal(n.Addresses, want.Addresses) {
		return
	}
	was := n.Peer
	n.Peer = Peer{want.Name, slices.Clone(want.Addresses), want.MTU}
	for f, addr := range firsts(n.Addresses) {
		switch old := n.paths[f]; {
		case old != nil && old.addr == addr && was.MTU == n.MTU:
		case old != nil && old.addr == addr:
			old.sizes.reset(newPath("", addr, n.MTU, now).sizes.expected)
			old.suspect = 0
		default:
			p.drop(old)
			n.paths[f] = nil
			if addr.IsValid() {
				n.paths[f] = newPath(n.Name, addr, n.MTU, now)
				p.used[f]++
				heap.Push(&p.queue, n.paths[f])
			}
		}
	}
}

// drop ends a path; nil is none. mu is held.
func (p *Prober) drop(way *path) {
	if way == nil {
		return
	}
	p.used[way.family]--
	if way.asked != nil {
		delete(p.asked, way.asked.nonce)
		way.asked = nil
	} else {
		heap.Remove(&p.queue, way.index)
	}
}

// interval between two rounds of one path, with jitter, so that nodes that begin
// together do not stay together. mu is held.
func (p *Prober) interval() time.Duration {
	d := p.pause()
	return d - d/10 + mathrand.N(d/5)
}

// pause is the interval without jitter. mu is held.
func (p *Prober) pause() time.Duration {
	return max(p.timing.interval, time.Duration(p.used[IPv4]+p.used[IPv6])*time.Second/usualRate)
}

// outgoing is a packet to send.
type outgoing struct {
	packet
	asked *asked // the question; nil: it is an answer
	conn  Conn   // nil: the socket is not open
	to    netip.AddrPort
	from  netip.Addr
}

// Run asks and answers until ctx ends. The socket of a family is open from the first
// peer with an address of it on.
func (p *Prober) Run(ctx context.Context) error {
	var readers sync.WaitGroup
	defer readers.Wait()
	defer p.close()
	wake := time.NewTimer(0)
	defer wake.Stop()
	var buf []byte
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wake.C:
		case <-p.kick:
		}
		now := time.Now()
		again := p.open(&readers, now)
		out, next := p.step(now)
		for _, o := range out {
			buf = p.send(o, buf)
		}
		wake.Reset(time.Until(earlier(again, next)))
	}
}

// reopening is the pause before a socket is tried again that could not be opened.
const reopening = 10 * time.Second

// open opens the sockets that are needed and not open. It returns when it should be
// called again.
func (p *Prober) open(readers *sync.WaitGroup, now time.Time) (again time.Time) {
	again = now.Add(idle)
	for f := range Family(families) {
		p.mu.Lock()
		needed, was, due := p.used[f] > 0 && p.conns[f] == nil, p.errs[f], p.reopen[f]
		p.mu.Unlock()
		if needed && now.Before(due) {
			again = earlier(again, due)
		}
		if !needed || now.Before(due) {
			continue
		}
		conn, err := p.o.Listen(f)
		p.mu.Lock()
		if p.errs[f] = err; err == nil {
			p.conns[f] = conn
		} else {
			p.reopen[f] = now.Add(reopening)
			again = earlier(again, p.reopen[f])
		}
		p.mu.Unlock()
		switch {
		case err == nil:
			readers.Go(func() { p.read(conn) })
		case was == nil:
			p.o.Log.Warn("socket for probes not open, trying again", "family", f.String(), log.Err(err))
		}
	}
	return again
}

func (p *Prober) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for f, conn := range p.conns {
		if conn != nil {
			_ = conn.Close()
			p.conns[f] = nil
		}
	}
}

// idle is how long the loop sleeps if nothing is due.
const idle = time.Hour

// step ends the questions that are lost and gives the next ones. next is when
// there is more to do.
func (p *Prober) step(now time.Time) (out []outgoing, next time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next = now.Add(idle)
	for len(p.order) > 0 {
		q := p.order[0]
		if p.asked[q.nonce] != q { // answered, or its peer has gone
			p.order = p.order[1:]
			continue
		}
		if lost := q.sent.Add(p.timing.answer); now.Before(lost) {
			next = lost
			break
		}
		p.order = p.order[1:]
		p.lost(q, now)
	}
	for len(p.queue) > 0 {
		way := p.queue[0]
		if now.Before(way.due) {
			next = earlier(next, way.due)
			break
		}
		if free := p.pace.take(now); now.Before(free) {
			next = earlier(next, free)
			break
		}
		heap.Pop(&p.queue)
		out = append(out, p.ask(way, now))
		next = earlier(next, now.Add(p.timing.answer))
	}
	return out, next
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// ask makes a question. mu is held.
func (p *Prober) ask(way *path, now time.Time) outgoing {
	p.sequence++
	q := &asked{path: way, sequence: p.sequence, size: way.choose(now, p.timing.full), sent: now}
	_, _ = rand.Read(q.nonce[:]) // it never fails
	way.asked, p.asked[q.nonce], p.order = q, q, append(p.order, q)
	p.counts.Asked[sizeOf(q)]++
	return outgoing{
		packet: packet{
			kind: question, size: q.size - overhead[way.family], run: p.run, sequence: q.sequence, nonce: q.nonce,
		},
		asked: q, conn: p.conns[way.family], to: netip.AddrPortFrom(way.addr, p.o.Port), from: p.local[way.family],
	}
}

// lost ends a question without an answer. mu is held.
func (p *Prober) lost(q *asked, now time.Time) {
	p.counts.Lost[sizeOf(q)]++
	delete(p.asked, q.nonce)
	was := q.path.state
	due := now
	if !q.path.lost(q, now) {
		due = now.Add(p.interval())
	}
	p.requeue(q.path, due)
	if q.path.state != was {
		p.o.Log.Warn("node does not answer", "node", q.path.node, "address", q.path.addr, "last", q.path.seen)
	}
}

// requeue has a path wait for its next question. mu is held.
func (p *Prober) requeue(way *path, due time.Time) {
	way.asked, way.due = nil, due
	heap.Push(&p.queue, way)
}

// send sends a packet. What cannot be sent is lost; a question keeps why.
func (p *Prober) send(o outgoing, buf []byte) []byte {
	err := errNotOpen
	if o.conn != nil {
		buf = o.append(buf[:0])
		if o.asked != nil {
			p.mu.Lock()
			o.asked.sent = time.Now() // others of this step took their time
			p.mu.Unlock()
		}
		err = o.conn.Write(buf, o.to, o.from)
	}
	if err == nil && o.asked != nil {
		return buf
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		p.counts.Answers++
	case o.asked == nil:
		p.counts.Dropped[Unsent]++
	case o.asked.size == o.asked.path.sizes.least: // a large one may be larger than the device takes
		o.asked.path.failure = err.Error()
	}
	return buf
}

var errNotOpen = errors.New("the socket for probes is not open")
