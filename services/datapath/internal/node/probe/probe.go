// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package probe measures the paths to other nodes: reachability, latency, and the largest packet size that passes in
// both directions.
//
// The datapath of each node sends UDP packets with the DF bit (probes) to the datapath of every other node, and
// answers their probes with packets of the same size. A small probe tests reachability. A full-size probe
// detects a path that silently drops large packets; then the largest size that passes is searched for. The kernel's own
// path MTU is ignored, because it may be wrong.
//
// Any host that can reach the port may send anything to it. Probes are answered only if they come from a registered
// address and the probe port of a peer, at a limited rate per peer, and answers are never larger than the probe. An
// answer is accepted once, from the probed address, with the random number that was sent only to that address.
//
// An answer also reports how long ago its node heard from the store. Only this result affects packets: a node that is
// cut off from the store stops trusting the mappings of nodes that are not cut off (package belief). The package itself
// does not change the kernel.
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

// Family is an address family.
type Family uint8

const (
	IPv4 Family = iota
	IPv6
	families = 2
)

// String returns the value of the metric label.
func (f Family) String() string { return [...]string{"ipv4", "ipv6"}[f] }

func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Limits on what a node sends.
const (
	// Rate is the maximum number of probes per second, over all peers.
	Rate = 50
	// usualRate is the rate that the interval is chosen for; the rest is for repeated probes.
	usualRate = 40
	// burst is the maximum number of probes sent at once.
	burst = 10

	// AnswerRate is the maximum number of answers per second to one peer, and the maximum burst.
	AnswerRate = 20

	// MaxPeers limits the number of peers.
	MaxPeers = 1 << 14
)

// Peer is another node.
type Peer struct {
	Name string
	// Addresses are all addresses from which the peer may send; no IPv4-mapped IPv6. The first address of each family is
	// probed.
	Addresses []netip.Addr
	// MTU is the size in bytes of IP packets that the underlay should carry between this node and the peer. Below MinMTU
	// it counts as unknown, and no full-size probes are sent.
	MTU int
}

// Conn is a socket of one family, on the port that all nodes use. Its packets are never fragmented, and ignore the path
// MTU that the kernel has learnt.
type Conn interface {
	// Read waits for a packet. It returns its sender and, if it is a unicast address of this node, its destination. It
	// returns net.ErrClosed after Close.
	Read(b []byte) (n int, from netip.AddrPort, to netip.Addr, err error)
	// Write sends a packet from a local address; invalid: the address that the route selects.
	Write(b []byte, to netip.AddrPort, from netip.Addr) error
	Close() error
}

// Options of a Prober. Port and Listen are required.
type Options struct {
	// Port is the UDP port of this and all other nodes.
	Port uint16
	// Listen opens the socket of a family.
	Listen func(Family) (Conn, error)
	// Silence returns how long ago this node heard from the store, for answers; known is false if that is unknown. Nil:
	// never known. It must not call the Prober.
	Silence func() (d time.Duration, known bool)
	// Log may be nil.
	Log *slog.Logger
}

// Prober sends probes and answers.
type Prober struct {
	o      Options
	timing timing
	run    uint64
	kick   chan struct{} // signals that the earliest due probe may have changed

	mu       sync.Mutex
	peers    map[string]*peer     // guarded by mu
	byAddr   map[netip.Addr]*peer // guarded by mu; peer by sender address
	queue    queue                // guarded by mu; paths without a pending probe
	asked    map[nonce]*asked     // guarded by mu; pending probes
	order    []*asked             // guarded by mu; in the order of sending; some may be answered
	sequence uint64               // guarded by mu
	pace     pace                 // guarded by mu; rate limit of probes
	counts   Counts               // guarded by mu
	local    [families]netip.Addr // guarded by mu; source of probes; invalid: selected by the route
	conns    [families]Conn       // guarded by mu; nil: not open
	errs     [families]error      // guarded by mu; why the socket is not open; nil: not needed
	reopen   [families]time.Time  // guarded by mu; time of the next attempt
	used     [families]int        // guarded by mu; paths of the family
}

// peer is the prober's state of another node.
type peer struct {
	Peer
	paths [families]*path // nil: no address of the family
	pace  pace            // rate limit of answers
}

// New returns a prober. It does nothing before Run.
func New(o Options) *Prober {
	if o.Log == nil {
		o.Log = log.Discard()
	}
	p := &Prober{
		o: o, timing: usual(), kick: make(chan struct{}, 1), peers: map[string]*peer{}, byAddr: map[netip.Addr]*peer{},
		asked: map[nonce]*asked{}, pace: pace{gap: time.Second / Rate, burst: burst},
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	p.run = binary.BigEndian.Uint64(b[:])
	return p
}

// SetLocal sets the addresses that this node is registered with. Probes are sent from the first of each family,
// because other nodes only answer registered addresses. Without one, the route selects the source.
func (p *Prober) SetLocal(addrs []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.local = firsts(addrs)
}

// firsts returns the first address of each family; invalid: none.
func firsts(addrs []netip.Addr) (first [families]netip.Addr) {
	for _, a := range addrs {
		if f := familyOf(a); a.IsValid() && !first[f].IsValid() {
			first[f] = a
		}
	}
	return first
}

// SetPeers sets the complete list of other nodes. A new peer, or one with another address, is probed at once; the state
// of the others is kept. It may be called before Run. With more than MaxPeers it returns an error and ignores the rest.
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
			// Two nodes with the same address share the answers.
			p.byAddr[a] = p.peers[n.Name]
		}
	}
	// With fewer peers, each is probed more often: shorten the waiting time of paths that were scheduled with more.
	for _, way := range p.queue {
		way.due = earlier(way.due, now.Add(p.interval()))
	}
	heap.Init(&p.queue)
	p.wake()
	return err
}

// wake triggers the loop to check what is due.
func (p *Prober) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// set updates a peer. Called with mu held.
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

// drop removes a path; nil is ignored. Called with mu held.
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

// interval returns the time between two rounds of one path, with jitter, so that nodes that start together do not stay
// synchronised. Called with mu held.
func (p *Prober) interval() time.Duration {
	d := p.pause()
	return d - d/10 + mathrand.N(d/5)
}

// pause returns the interval without jitter. Called with mu held.
func (p *Prober) pause() time.Duration {
	return max(p.timing.interval, time.Duration(p.used[IPv4]+p.used[IPv6])*time.Second/usualRate)
}

type outgoing struct {
	packet
	asked *asked // the probe; nil: an answer
	conn  Conn   // nil: the socket is not open
	to    netip.AddrPort
	from  netip.Addr
}

// Run sends probes and answers until ctx ends. The socket of a family is opened when the first peer has an address
// of it.
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

// reopening is the pause before opening a socket is retried.
const reopening = 10 * time.Second

// open opens missing sockets. It returns when it should be called again.
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
			p.o.Log.Warn("cannot open the probe socket; retrying", "family", f.String(), log.Err(err))
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

// idle is the longest time that the loop sleeps, if no probe is due.
const idle = time.Hour

// step handles lost probes and returns the next ones to send. next is the time of the next step.
func (p *Prober) step(now time.Time) (out []outgoing, next time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next = now.Add(idle)
	for len(p.order) > 0 {
		q := p.order[0]
		if p.asked[q.nonce] != q { // answered, or its peer was removed
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

// ask creates a probe. Called with mu held.
func (p *Prober) ask(way *path, now time.Time) outgoing {
	p.sequence++
	q := &asked{path: way, sequence: p.sequence, size: way.choose(now, p.timing.full), sent: now}
	_, _ = rand.Read(q.nonce[:]) // never fails
	way.asked, p.asked[q.nonce], p.order = q, q, append(p.order, q)
	p.counts.Asked[sizeOf(q)]++
	return outgoing{
		packet: packet{
			kind: question, size: q.size - overhead[way.family], run: p.run, sequence: q.sequence, nonce: q.nonce,
		},
		asked: q, conn: p.conns[way.family], to: netip.AddrPortFrom(way.addr, p.o.Port), from: p.local[way.family],
	}
}

// lost handles a probe without an answer. Called with mu held.
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

// requeue schedules the next probe of a path. Called with mu held.
func (p *Prober) requeue(way *path, due time.Time) {
	way.asked, way.due = nil, due
	heap.Push(&p.queue, way)
}

// send sends a packet. A failed packet counts as lost; for a probe, the reason is kept.
func (p *Prober) send(o outgoing, buf []byte) []byte {
	err := errNotOpen
	if o.conn != nil {
		buf = o.append(buf[:0])
		if o.asked != nil {
			p.mu.Lock()
			o.asked.sent = time.Now() // sending earlier packets of this step took time
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
	case o.asked.size == o.asked.path.sizes.least: // a large packet may exceed the device's MTU
		o.asked.path.failure = err.Error()
	}
	return buf
}

var errNotOpen = errors.New("the socket for probes is not open")
