// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var at = func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, port) }

func payload(k kind, size int) []byte {
	return packet{kind: k, size: size, run: 1, sequence: 2, nonce: nonce{3}}.append(nil)
}

// TestOnlyProbesOfRegisteredPeersAreAnswered: answers have the size of the probe, and other packets are counted by
// reason.
func TestOnlyProbesOfRegisteredPeersAreAnswered(t *testing.T) {
	wrong := func(at int, value byte) []byte {
		b := payload(question, 100)
		b[at] = value
		return b
	}
	second, multicast := netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("ff02::1")
	for name, c := range map[string]struct {
		b    []byte
		from netip.AddrPort
		to   netip.Addr // addrA if not valid
		why  Drop
		ok   bool
	}{
		"a question":             {b: payload(question, 100), from: at(addrB), ok: true},
		"of the least size":      {b: payload(question, headerSize), from: at(addrB), ok: true},
		"of the largest size":    {b: payload(question, maxPayload), from: at(addrB), ok: true},
		"from another address":   {b: payload(question, 100), from: at(second), ok: true},
		"IPv4 in IPv6":           {b: payload(question, 100), from: at(netip.AddrFrom16(addrB.As16())), ok: true},
		"from a stranger":        {b: payload(question, 100), from: at(addrC), why: Unregistered},
		"empty, from a stranger": {from: at(addrC), why: Unregistered},
		"from another port":      {b: payload(question, 100), from: netip.AddrPortFrom(addrB, port+1), why: WrongPort},
		"nothing":                {from: at(addrB), why: Malformed},
		"too short":              {b: payload(question, 100)[:headerSize-1], from: at(addrB), why: Malformed},
		"cut off":                {b: payload(question, 100)[:99], from: at(addrB), why: Malformed},
		"too long":               {b: append(payload(question, 100), 0), from: at(addrB), why: Malformed},
		"another magic":          {b: wrong(0, 0), from: at(addrB), why: Malformed},
		"another version":        {b: wrong(4, 2), from: at(addrB), why: OtherVersion},
		"another kind":           {b: wrong(5, 3), from: at(addrB), why: Malformed},
		"sent to many":           {b: payload(question, 100), from: at(addrB), to: multicast, why: Malformed},
		"an answer to nothing":   {b: payload(answer, 100), from: at(addrB), why: Unasked},
		"an answer from nowhere": {b: payload(answer, 100), from: at(addrC), why: Unregistered},
	} {
		p := New(Options{Port: port})
		if err := p.SetPeers([]Peer{{"b", []netip.Addr{addrB, second}, 1500}}); err != nil {
			t.Fatal(err)
		}
		to := c.to
		if !to.IsValid() {
			to = addrA
		}
		out, ok := p.receive(c.b, c.from, to, time.Now())
		if ok != c.ok {
			t.Errorf("%s: answered %t, want %t", name, ok, c.ok)
			continue
		}
		want := [drops]uint64{}
		if !c.ok {
			want[c.why] = 1
		}
		if got := p.State().Counts.Dropped; got != want {
			t.Errorf("%s: dropped %v, want %v", name, got, want)
		}
		if !ok {
			continue
		}
		c.b[5] = byte(answer)
		if got := out.append(nil); !bytes.Equal(got, c.b) || out.to != c.from || out.from != to {
			t.Errorf("%s: answer of %d bytes from %v to %v, want %d from %v to %v, the question", name, len(got), out.from,
				out.to, len(c.b), to, c.from)
		}
	}
}

// TestForgedAnswersCountForNothing: while a node is silent, answers that do not match a probe are ignored, from another
// peer, from a stranger and from the node itself.
func TestForgedAnswersCountForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		var last []byte
		p := New(Options{Port: port, Listen: func(f Family) (Conn, error) {
			if f == IPv6 {
				return nil, errNoIPv6
			}
			return &tapped{n.listen(addrA), func(b []byte) { last = append(last[:0], b...) }}, nil
		}})
		peers := []Peer{{"b", []netip.Addr{addrB}, 1500}, {"c", []netip.Addr{addrC}, 0}}
		if err := p.SetPeers(peers[:1]); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		defer func() { cancel(); <-done }()
		synctest.Wait()
		if len(last) == 0 {
			t.Fatal("nothing was asked")
		}
		forged := func(at int) []byte {
			b := bytes.Clone(last)
			b[5] = byte(answer)
			if at >= 0 {
				b[at] ^= 1
			}
			return b
		}
		larger := append(forged(-1), 0)
		binary.BigEndian.PutUint16(larger[6:], uint16(len(larger)))
		if err := p.SetPeers(peers); err != nil { // c is a peer, but this probe was not sent to it
			t.Fatal(err)
		}
		echo := bytes.Clone(last)
		for what, c := range map[string]struct {
			b    []byte
			from netip.AddrPort
			why  Drop
		}{
			"of a stranger":       {forged(-1), at(netip.MustParseAddr("192.0.2.9")), Unregistered},
			"of another node":     {forged(-1), at(addrC), Forged},
			"of another port":     {forged(-1), netip.AddrPortFrom(addrB, 5), WrongPort},
			"with another nonce":  {forged(39), at(addrB), Unasked},
			"to another run":      {forged(8), at(addrB), Forged},
			"to another question": {forged(23), at(addrB), Forged},
			"of another size":     {larger, at(addrB), Forged},
		} {
			before := p.State().Counts.Dropped
			if err := n.send(c.b, c.from, addrA); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Millisecond)
			after := p.State().Counts.Dropped
			if after[c.why] != before[c.why]+1 {
				t.Errorf("%s: dropped %v, was %v, want one more of %s", what, after, before, c.why)
			}
			if w := p.State().Paths[0]; w.State != Unknown {
				t.Fatalf("%s: %+v", what, w)
			}
		}
		// A reflected probe is a probe, not an answer.
		if err := n.send(echo, at(addrB), addrA); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Millisecond)
		if s := p.State(); s.Paths[0].State != Unknown || s.Counts.Answers != 1 {
			t.Errorf("after the reflected question: %+v", s)
		}
		// The real answer counts, once.
		for range 2 {
			if err := n.send(forged(-1), at(addrB), addrA); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(2 * time.Millisecond)
		if s := p.State(); s.Paths[0].State != Reachable || s.Counts.Answered != [sizeCount]uint64{1, 0} {
			t.Errorf("state %+v", s)
		}
	})
}

// tapped reveals the sent packets.
type tapped struct {
	*fakeConn
	sees func(b []byte)
}

func (c *tapped) Write(b []byte, to netip.AddrPort, from netip.Addr) error {
	if to.Addr() == addrB && kind(b[5]) == question {
		c.sees(b)
	}
	return c.fakeConn.Write(b, to, from)
}

// TestFloodIsAnsweredWithinBounds sends, for 20 seconds, 5,000 full-size probes per second with the address of a
// peer, and as much garbage.
func TestFloodIsAnsweredWithinBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		p := n.node(t, addrA, Peer{"b", []netip.Addr{addrB}, 0}, Peer{"c", []netip.Addr{addrC}, 0})
		n.node(t, addrC, Peer{"a", []netip.Addr{addrA}, 0})
		const seconds = 20
		asked, rubbish := payload(question, 1472), bytes.Repeat([]byte{7}, 1472)
		for range seconds * 500 {
			for range 10 {
				_ = n.send(asked, at(addrB), addrA)
				_ = n.send(rubbish, at(addrC), addrA)
			}
			time.Sleep(time.Second / 500)
		}
		s := p.State()
		if got := s.Counts.Answers; got > AnswerRate*(seconds+2)+200 || got < AnswerRate*seconds/2 {
			t.Errorf("%d answers in %d seconds, want about %d a second", got, seconds, AnswerRate)
		}
		if sent, came := n.total(addrA), n.total(addrB); sent >= came {
			t.Errorf("sent %d bytes for %d", sent, came)
		}
		if s.Counts.Dropped[TooMany] == 0 || s.Counts.Dropped[Malformed] == 0 {
			t.Errorf("dropped %v", s.Counts.Dropped)
		}
		// The remaining capacity of the socket suffices for other nodes.
		time.Sleep(10 * time.Second)
		if w := p.State().Paths[1]; w.Node != "c" || w.State != Reachable {
			t.Errorf("another node: %+v", w)
		}
	})
}

// TestFiveThousandPeersAreAskedWithinBounds probes peers of both families, first while none answers, then while all do.
func TestFiveThousandPeersAreAskedWithinBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes = 5000
		n := newNetwork()
		var answers atomic.Bool
		own := [families]netip.Addr{addrA, netip.MustParseAddr("2001:db8::1")}
		p := New(Options{Port: port, Listen: func(f Family) (Conn, error) {
			c := n.listen(own[f])
			return &crowd{c, answers.Load}, nil
		}})
		var peers []Peer
		for i := range nodes {
			peers = append(peers, Peer{fmt.Sprintf("node-%d", i), []netip.Addr{
				netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}),
				netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: byte(i >> 8), 15: byte(i)}),
			}, 1500})
		}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		goroutines := runtime.NumGoroutine()
		if err := p.SetPeers(peers); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		defer func() { cancel(); <-done }()
		sent := func() uint64 { c := p.State().Counts; return c.Asked[Small] + c.Asked[Large] }
		for _, phase := range []struct {
			answers bool
			want    Reach
		}{{false, Unreachable}, {true, Reachable}, {false, Unreachable}} {
			answers.Store(phase.answers)
			for begin, last := time.Now(), sent(); ; {
				time.Sleep(time.Minute)
				if got := sent() - last; got > 60*Rate+burst {
					t.Fatalf("%d questions in a minute, at most %d", got, 60*Rate+burst)
				}
				last = sent()
				all := true
				for _, w := range p.State().Paths {
					all = all && w.State == phase.want && (w.MTU == 1500 || !phase.answers)
				}
				if all {
					t.Logf("all %s after %s", phase.want, time.Since(begin))
					break
				}
				if time.Since(begin) > time.Hour {
					t.Fatalf("not all are %s after an hour", phase.want)
				}
			}
		}
		if got := runtime.NumGoroutine() - goroutines; got > 3 {
			t.Errorf("%d goroutines", got)
		}
		p.mu.Lock()
		if len(p.asked) > 2*Rate || len(p.order) > 2*Rate {
			t.Errorf("%d questions under way, %d kept", len(p.asked), len(p.order))
		}
		p.mu.Unlock()
		runtime.GC()
		runtime.ReadMemStats(&after)
		if got := int64(after.HeapAlloc) - int64(before.HeapAlloc); got > 16<<20 {
			t.Errorf("%d bytes for %d nodes", got, nodes)
		} else {
			t.Logf("%d KiB for %d nodes", got>>10, nodes)
		}
	})
}

// crowd answers for all peers, or for none.
type crowd struct {
	*fakeConn
	answers func() bool
}

func (c *crowd) Write(b []byte, to netip.AddrPort, _ netip.Addr) error {
	if !c.answers() {
		return nil
	}
	d := datagram{bytes.Clone(b), to, c.addr}
	d.b[5] = byte(answer)
	select {
	case c.in <- d:
		return nil
	default:
		return errors.New("full")
	}
}

func FuzzPacket(f *testing.F) {
	for _, k := range []kind{question, answer} {
		f.Add(payload(k, headerSize))
		f.Add(payload(k, 200))
	}
	f.Add([]byte("slpb\x01\x01\x00\x28"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parse(b)
		if err != nil {
			return
		}
		if got.size != len(b) {
			t.Fatalf("%x: size %d of %d", b, got.size, len(b))
		}
		// The copy has the same header and is not longer.
		if back := got.append(nil); len(back) != len(b) || !bytes.Equal(back[:headerSize], b[:headerSize]) {
			t.Fatalf("%x was answered with %x", b, back)
		}
	})
}
