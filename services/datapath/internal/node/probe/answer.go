// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/kit/log"
)

// Limits on reading from one socket, so that a flood costs the node no more than that. Packets that exceed the socket's
// buffer during a pause are lost.
const (
	maxReads  = 10000 // packets per second
	readPause = 10 * time.Millisecond
)

// read handles the packets of a socket until it is closed.
func (p *Prober) read(conn Conn) {
	var buf []byte
	b := make([]byte, 1<<16)
	budget := pace{gap: time.Second / maxReads, burst: int(maxReads * readPause / time.Second)}
	for {
		n, from, to, err := conn.Read(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		now := time.Now()
		if now.Before(budget.take(now)) {
			time.Sleep(readPause) // enforces the rate limit
		}
		if err != nil {
			p.o.Log.Debug("read a probe", log.Err(err))
			continue
		}
		if o, ok := p.receive(b[:n], from, to, now); ok {
			o.conn = conn
			buf = p.send(o, buf)
		}
	}
}

// receive handles a payload. If ok, out is the answer to it. Packets to multicast addresses are not answered.
func (p *Prober) receive(b []byte, from netip.AddrPort, to netip.Addr, now time.Time) (out outgoing, ok bool) {
	got, err := parse(b)
	p.mu.Lock()
	defer p.mu.Unlock()
	addr := from.Addr().Unmap().WithZone("")
	n := p.byAddr[addr]
	drop := func(why Drop) (outgoing, bool) {
		p.counts.Dropped[why]++
		return outgoing{}, false
	}
	switch {
	case n == nil:
		return drop(Unregistered)
	case from.Port() != p.o.Port:
		return drop(WrongPort)
	case errors.Is(err, errVersion):
		return drop(OtherVersion)
	case err != nil || !to.IsValid() || to.IsMulticast():
		return drop(Malformed)
	case got.kind == question && now.Before(n.pace.take(now)):
		return drop(TooMany)
	case got.kind == question:
		got.kind = answer
		if p.o.Silence != nil {
			got.silence = silenceOf(p.o.Silence())
		}
		return outgoing{packet: got, to: from, from: to}, true
	}
	q := p.asked[got.nonce]
	switch {
	case q == nil:
		return drop(Unasked)
	case q.path.addr != addr || got.run != p.run || got.sequence != q.sequence ||
		got.size != q.size-overhead[q.path.family]:
		return drop(Forged)
	}
	q.path.silence = got.silence
	p.accept(q, now)
	return outgoing{}, false
}

// accept handles the answer to a probe. Called with mu held.
func (p *Prober) accept(q *asked, now time.Time) {
	way := q.path
	delete(p.asked, q.nonce)
	p.counts.Answered[sizeOf(q)]++
	p.counts.Latency[way.family].add(now.Sub(q.sent))
	was, limited := way.state, way.sizes.limited()
	due := now.Add(p.timing.followUp)
	if !way.answered(q, now) {
		due = now.Add(p.interval())
	}
	p.requeue(way, due)
	p.wake()
	l := p.o.Log.With("node", way.node, "address", way.addr, "expected", way.sizes.expected, "mtu", way.sizes.mtu())
	switch {
	case was == Unreachable:
		l.Info("node answers again")
	case way.sizes.limited() && !limited:
		l.Warn("path MTU below the expected MTU")
	case limited && way.sizes.good == way.sizes.expected:
		l.Info("path MTU as expected again")
	}
}
