// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observe remembers the recent events of the programs and hands them
// to any number of readers.
//
// There is one ring. A reader has nothing but a position in it, so a slow one
// costs no memory and holds nobody up: it is told how many events it missed,
// at the place where they are missing.
package observe

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// Event is what happened to one packet.
type Event struct {
	Time                                time.Time
	Reason                              string
	Egress                              bool // seen from the endpoint
	Dropped                             bool
	Slot                                uint16 // of the endpoint at whose device it was seen; 0 if unknown
	Owner                               string // of that endpoint, "container/interface"; empty if it is gone
	OtherOwner                          string // of the endpoint at the other side, if local
	ContainerID, InterfaceName          string
	Source, Destination                 netip.AddrPort
	Protocol                            uint8
	SourceIdentity, DestinationIdentity uint32
	Length                              uint32
	SourceMAC                           [6]byte
	EtherType                           uint16
	// KernelLost is how many events the kernel left out before this one.
	KernelLost uint32
}

// Size is how many events are remembered.
const Size = 4096

// Ring holds the last Size events.
type Ring struct {
	mu     sync.Mutex
	events []Event       // guarded by mu
	next   uint64        // guarded by mu; number of the next event, from 0
	news   chan struct{} // guarded by mu; closed and replaced at each event
	lost   uint64        // guarded by mu; by the kernel
}

// NewRing returns an empty ring.
func NewRing() *Ring { return &Ring{events: make([]Event, 0, Size), news: make(chan struct{})} }

// Add appends an event. It never waits.
func (r *Ring) Add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) < Size {
		r.events = append(r.events, e)
	} else {
		r.events[r.next%Size] = e
	}
	r.next++
	r.lost += uint64(e.KernelLost)
	close(r.news)
	r.news = make(chan struct{})
}

// Lost is how many events the kernel left out.
func (r *Ring) Lost() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// Reader is a position in the ring. It belongs to one goroutine.
type Reader struct {
	ring *Ring
	next uint64
}

// Read returns a reader that begins with the first remembered event that is
// not older than since; with the oldest if since is zero.
func (r *Ring) Read(since time.Time) *Reader {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.oldest()
	for ; n < r.next; n++ {
		if !r.events[n%Size].Time.Before(since) {
			break
		}
	}
	return &Reader{ring: r, next: n}
}

// Tail returns a reader that begins with the next event.
func (r *Ring) Tail() *Reader {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Reader{ring: r, next: r.next}
}

// oldest runs with mu held.
func (r *Ring) oldest() uint64 {
	if r.next > Size {
		return r.next - Size
	}
	return 0
}

// Next returns the next event, and how many were missed right before it. ok is
// false if there is none yet and wait is false; with wait it waits until ctx
// ends.
func (rd *Reader) Next(ctx context.Context, wait bool) (e Event, missed uint64, ok bool, err error) {
	for {
		rd.ring.mu.Lock()
		if first := rd.ring.oldest(); rd.next < first {
			missed = first - rd.next
			rd.next = first
		}
		if rd.next < rd.ring.next {
			e = rd.ring.events[rd.next%Size]
			rd.next++
			rd.ring.mu.Unlock()
			return e, missed, true, nil
		}
		news := rd.ring.news
		rd.ring.mu.Unlock()
		if !wait {
			return Event{}, missed, false, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return Event{}, missed, false, ctx.Err()
		}
	}
}

// Filter says which events a reader wants. Criteria of different kinds must
// all hold, of one kind one; an empty kind always holds.
type Filter struct {
	Owners     map[string]bool
	Identities map[uint32]bool
	Prefixes   []netip.Prefix
	Reasons    map[string]bool
	Egress     *bool
	Protocols  map[uint8]bool
	Ports      map[uint16]bool
}

// Match says whether e passes.
func (f Filter) Match(e Event) bool {
	either := func(n int, a, b bool) bool { return n == 0 || a || b }
	inAny := func(a netip.Addr) bool {
		for _, p := range f.Prefixes {
			if p.Contains(a) {
				return true
			}
		}
		return false
	}
	return either(len(f.Owners), f.Owners[e.Owner], f.Owners[e.OtherOwner]) &&
		either(len(f.Identities), f.Identities[e.SourceIdentity], f.Identities[e.DestinationIdentity]) &&
		either(len(f.Prefixes), inAny(e.Source.Addr()), inAny(e.Destination.Addr())) &&
		either(len(f.Reasons), f.Reasons[e.Reason], false) &&
		(f.Egress == nil || *f.Egress == e.Egress) &&
		either(len(f.Protocols), f.Protocols[e.Protocol], false) &&
		either(len(f.Ports), f.Ports[e.Source.Port()], f.Ports[e.Destination.Port()])
}
