// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observe keeps the recent events of the programs and the repairs of their attachments, and passes them to any
// number of readers.
//
// There is one ring. A reader only has a position in it, so a slow reader uses no memory and blocks no other reader: it
// gets the number of events that it missed, at the position where they are missing.
package observe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Size is the number of events in the ring.
const Size = 4096

// Ring holds the last Size events.
type Ring struct {
	mu      sync.Mutex
	events  []flow.Event  // guarded by mu
	next    uint64        // guarded by mu; sequence number of the next event, from 0
	arrived chan struct{} // guarded by mu; closed and replaced at each event
	lost    uint64        // guarded by mu; dropped by the kernel
	run     [8]byte       // random; makes event IDs unique across runs
}

// NewRing returns an empty ring.
func NewRing() *Ring {
	r := &Ring{events: make([]flow.Event, 0, Size), arrived: make(chan struct{})}
	rand.Read(r.run[:]) // never fails
	return r
}

// id returns a UUID of version 8 (RFC 9562), made of the run and the event's sequence number.
func (r *Ring) id(number uint64) (id [16]byte) {
	copy(id[:], r.run[:])
	id[6] = 0x80 | id[6]&0x0f
	binary.BigEndian.PutUint64(id[8:], 1<<63|number)
	return id
}

// Add appends an event and assigns its ID. It does not block.
func (r *Ring) Add(e flow.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.ID = r.id(r.next)
	if len(r.events) < Size {
		r.events = append(r.events, e)
	} else {
		r.events[r.next%Size] = e
	}
	r.next++
	r.lost += uint64(e.KernelLost)
	close(r.arrived)
	r.arrived = make(chan struct{})
}

// AddRepair appends an event about the repair of a program, or about its failure.
func (r *Ring) AddRepair(e endpoint.Endpoint, d endpoint.Difference, err error) {
	o := flow.Event{
		Type: flow.Repair, Time: time.Now(), SourceIdentity: e.Identity.Number,
		From:   flow.End{Slot: e.Slot, Owner: e.Spec.Owner, Pod: e.Spec.Pod},
		Repair: flow.RepairDetails{Subject: d.Subject, Device: d.Key, Want: d.Want, Have: d.Have},
	}
	if err != nil {
		o.Repair.Err = err.Error()
	}
	r.Add(o)
}

// Next returns the sequence number of the next event.
func (r *Ring) Next() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next
}

// Lost returns the number of events that the kernel dropped.
func (r *Ring) Lost() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// Reader is a position in the ring. It must not be used concurrently.
type Reader struct {
	ring *Ring
	next uint64
}

// Read returns a reader that starts with the first stored event that is not older than since; with the oldest if since
// is zero.
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

// After returns a reader that starts after the event with an ID. known is false if the ring never had that event; then
// the reader starts with the oldest.
func (r *Ring) After(id [16]byte) (rd *Reader, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := binary.BigEndian.Uint64(id[8:]) &^ (1 << 63)
	// The sequence number belongs to this ring only if the ring generates the same ID for it.
	if n >= r.next || r.id(n) != id {
		return &Reader{ring: r, next: r.oldest()}, false
	}
	return &Reader{ring: r, next: n + 1}, true
}

// Tail returns a reader that starts with the next event.
func (r *Ring) Tail() *Reader {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Reader{ring: r, next: r.next}
}

// oldest returns the sequence number of the oldest stored event. Called with mu held.
func (r *Ring) oldest() uint64 {
	if r.next > Size {
		return r.next - Size
	}
	return 0
}

// Before reports whether the reader has not reached the event with a sequence number.
func (rd *Reader) Before(number uint64) bool { return rd.next < number }

// Next returns the next event, and the number of events missed right before it. Without a new event, it returns ok
// false, or with wait, blocks until an event arrives or ctx ends.
func (rd *Reader) Next(ctx context.Context, wait bool) (e flow.Event, missed uint64, ok bool, err error) {
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
		news := rd.ring.arrived
		rd.ring.mu.Unlock()
		if !wait {
			return flow.Event{}, missed, false, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return flow.Event{}, missed, false, ctx.Err()
		}
	}
}
