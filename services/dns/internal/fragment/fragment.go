// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fragment collects the fragments of answers until their packet is complete.
//
// The process reads the reassembled packet, and forwards the original fragments. The receiver must reassemble them to
// the same packet. Therefore a packet whose fragments overlap or contradict each other is dropped.
package fragment

import (
	"bytes"
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/proxy/fair"
	"github.com/sluice-net/sluice/services/dns/internal/frame"
)

// Time is how long the fragments of a packet wait for the missing ones.
const Time = time.Second

// Limits of the fragments that wait, in bytes. overhead is added for each packet and for each fragment.
const (
	MaxBytes       = 4 << 20
	MaxBytesPerPod = 512 << 10

	overhead = 256
)

// Result says what Add has done with a fragment.
type Result uint8

// The results.
const (
	Stored    Result = iota + 1
	Completed        // the packet is complete
	Repeated         // an equal fragment has arrived before; this one is ignored
	Conflict         // the packet is dropped, because fragments overlap or contradict each other
	NoSpace          // the limits do not allow the pod to store this fragment
)

// key identifies a packet. Fragments of different pods are never combined.
type key struct {
	endpoint            uint16
	source, destination netip.Addr
	id                  uint32
	protocol            uint8
}

// packet is a packet of which some fragments have arrived.
type packet struct {
	key
	pieces  []piece // by offset, without overlap
	end     int     // end of the data; 0: the last fragment has not arrived
	bytes   int     // length of the data that has arrived
	items   []*fair.Item
	until   time.Time
	place   *list.Element
	refused bool // all its fragments are dropped
}

type piece struct {
	offset int
	data   []byte // part of frame
	frame  []byte
}

// Packets holds incomplete packets. It is safe for concurrent use.
type Packets struct {
	mu      sync.Mutex
	limit   *fair.Limit     // guarded by mu
	packets map[key]*packet // guarded by mu
	order   list.List       // guarded by mu; the packets, oldest first
	expired uint64          // guarded by mu
	evicted uint64          // guarded by mu
}

// New returns an empty Packets.
func New() *Packets {
	return &Packets{limit: fair.New(MaxBytes, MaxBytesPerPod), packets: make(map[key]*packet)}
}

// Add adds a fragment that f has read from b. The caller may reuse f and b afterwards. If the packet is complete, Add
// returns its frames, in the order of their data, and the reassembled data.
func (p *Packets) Add(f *frame.Frame, b []byte, now time.Time) (frames [][]byte, data []byte, result Result) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(now)
	k := key{f.Endpoint, f.Source.Addr(), f.Destination.Addr(), f.Fragment.ID, f.Fragment.Protocol}
	at := p.packets[k]
	if at == nil {
		at = &packet{key: k, until: now.Add(Time)}
		at.place = p.order.PushBack(at)
		p.packets[k] = at
	}
	switch result = at.add(f.Fragment, b); {
	case result == Conflict && len(at.items) > 0:
		// The packet stays until its time is over, so that later fragments cannot complete it.
		at.refused, at.pieces = true, nil
		p.free(at.items[1:])
		at.items = at.items[:1]
		return nil, nil, Conflict
	case result != Stored:
		return nil, nil, result
	}
	item := p.limit.Add(f.Endpoint, len(b)+overhead, func() {
		p.evicted++
		p.remove(at)
	})
	if item == nil || p.packets[k] != at { // the limit removed the packet itself
		if item != nil {
			p.limit.Remove(item)
		}
		p.remove(at)
		return nil, nil, NoSpace
	}
	at.items = append(at.items, item)
	if at.end == 0 || at.bytes != at.end {
		return nil, nil, Stored
	}
	p.remove(at)
	frames, data = at.whole()
	return frames, data, Completed
}

// add adds a fragment to a packet.
func (at *packet) add(f frame.Fragment, b []byte) Result {
	if at.refused {
		return Conflict
	}
	begin, end := f.Offset, f.Offset+len(f.Data)
	i, same := slices.BinarySearchFunc(at.pieces, begin, func(x piece, begin int) int { return x.offset - begin })
	if same && bytes.Equal(at.pieces[i].data, f.Data) && f.More == (at.end != end) {
		return Repeated
	}
	last := 0
	if n := len(at.pieces); n > 0 {
		last = at.pieces[n-1].offset + len(at.pieces[n-1].data)
	}
	switch {
	case i < len(at.pieces) && at.pieces[i].offset < end,
		i > 0 && at.pieces[i-1].offset+len(at.pieces[i-1].data) > begin,
		at.end != 0 && (end > at.end || !f.More), // data after the end, or another end
		!f.More && last > end:
		return Conflict
	}
	x := piece{offset: begin, frame: bytes.Clone(b)}
	// The data is at the end of the frame, before any padding.
	begins := cap(b) - cap(f.Data)
	x.data = x.frame[begins : begins+len(f.Data)]
	at.pieces = slices.Insert(at.pieces, i, x)
	at.bytes += len(f.Data)
	if !f.More {
		at.end = end
	}
	return Stored
}

// whole returns the frames and the data of a complete packet.
func (at *packet) whole() (frames [][]byte, data []byte) {
	data = make([]byte, 0, at.end)
	for _, x := range at.pieces {
		frames = append(frames, x.frame)
		data = append(data, x.data...)
	}
	return frames, data
}

func (p *Packets) free(items []*fair.Item) {
	for _, item := range items {
		p.limit.Remove(item)
	}
}

// remove removes a packet, unless it was removed before.
func (p *Packets) remove(at *packet) {
	if p.packets[at.key] != at {
		return
	}
	delete(p.packets, at.key)
	p.order.Remove(at.place)
	p.free(at.items)
	at.items = nil
}

// expire removes the packets whose waiting time is over.
func (p *Packets) expire(now time.Time) {
	for e := p.order.Front(); e != nil; e = p.order.Front() {
		at := e.Value.(*packet) //nolint:forcetypeassert // only packets are in the list
		if now.Before(at.until) {
			return
		}
		if !at.refused {
			p.expired++
		}
		p.remove(at)
	}
}

// Expire removes the packets whose waiting time is over. It returns how many incomplete packets were removed since
// the start because of their time, and because of the limits.
func (p *Packets) Expire(now time.Time) (expired, evicted uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expire(now)
	return p.expired, p.evicted
}
