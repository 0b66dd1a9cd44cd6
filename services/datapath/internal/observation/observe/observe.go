// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observe remembers the recent events of the programs, and repairs of
// their attachments, and hands them to any number of readers.
//
// There is one ring. A reader has nothing but a position in it, so a slow one
// costs no memory and holds nobody up: it is told how many events it missed,
// at the place where they are missing.
package observe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Type is what an event is about.
type Type uint8

// The types. An event without a type tells of a loss and nothing else.
const (
	// Drop is a packet that ended here.
	Drop Type = iota + 1
	// PolicyVerdict is a connection that was evaluated.
	PolicyVerdict
	// Closed is a connection that has ended.
	Closed
	// Repair is a program that somebody had taken off an endpoint's device.
	Repair
)

// Verdict is what became of a packet.
type Verdict uint8

// The verdicts.
const (
	Forwarded Verdict = iota + 1
	Dropped
	Audited
	Redirected
)

// Side is what one side's policy said. By is 0 if it was not evaluated.
type Side struct {
	By      uint8 // the programs' number of what decided, which is the API's too
	Verdict Verdict
	Rule    uint16
	Table   uint16
	Epoch   uint32
	// Slot of the endpoint whose policy it is.
	Slot uint16
	// Revision of the policy, Sources of the rule and its Proxy when the event was
	// read; zero if they were not known. Whoever remembers policies forgets them
	// before the ring forgets the event.
	Revision uint64
	Sources  []string
	Proxy    uint16
}

// End is an endpoint of this node at one end of a packet; zero if the end is none.
type End struct {
	Slot  uint16
	Owner workload.Owner        // zero if the endpoint was removed
	Pod   workload.PodReference // zero without Kubernetes
}

// Event is what happened to one packet, or a repair.
type Event struct {
	Type                Type
	Time                time.Time
	Reason              uint32 // the programs' number, which is the API's too
	Egress              bool   // seen from the endpoint
	Verdict             Verdict
	ID                  [16]byte // a UUID, given by Ring.Add
	From, To            End
	Ifindex             uint32 // of the device where it was seen
	Source, Destination netip.AddrPort
	// Original is the destination that the packet had before it was led to a backend
	// of a service; invalid: it was not.
	Original netip.AddrPort
	// Service had the original destination when the packet was seen: "shop/web:http";
	// empty if that is not known.
	Service                             string
	Protocol                            uint8
	TCPFlags                            uint8
	SourceIdentity, DestinationIdentity uint32
	Length                              uint32
	SourceMAC                           [6]byte
	// Node is the number of the other node that one end is on, 0 without one.
	Node      uint16
	EtherType uint16
	// Sender and Receiver are the sides of the connection's first packet; with
	// Reply the packet goes the other way.
	Sender, Receiver Side
	Reply            bool
	// Repair is set for that type alone; From and SourceIdentity are then the
	// endpoint's.
	Repair RepairDetails
	// KernelLost is how many events the kernel left out before this one.
	KernelLost uint32
}

// RepairDetails say what was wrong with an attachment.
type RepairDetails struct {
	Subject string // "filter" or "qdisc"
	Device  string
	Want    string
	Have    string
	// Err is why it could not be put right; empty if it was.
	Err string
}

// Size is how many events are remembered.
const Size = 4096

// Ring holds the last Size events.
type Ring struct {
	mu      sync.Mutex
	events  []Event       // guarded by mu
	next    uint64        // guarded by mu; number of the next event, from 0
	arrived chan struct{} // guarded by mu; closed and replaced at each event
	lost    uint64        // guarded by mu; by the kernel
	run     [8]byte       // random: numbers of events are unique with it
}

// NewRing returns an empty ring.
func NewRing() *Ring {
	r := &Ring{events: make([]Event, 0, Size), arrived: make(chan struct{})}
	rand.Read(r.run[:]) // never fails
	return r
}

// id is a UUID of version 8 (RFC 9562): which ring, and the number of the event.
func (r *Ring) id(number uint64) (id [16]byte) {
	copy(id[:], r.run[:])
	id[6] = 0x80 | id[6]&0x0f
	binary.BigEndian.PutUint64(id[8:], 1<<63|number)
	return id
}

// Add appends an event and gives it an id. It never waits.
func (r *Ring) Add(e Event) {
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

// AddRepair appends that a program was put back, or why it could not be.
func (r *Ring) AddRepair(e endpoint.Endpoint, d endpoint.Difference, err error) {
	o := Event{
		Type: Repair, Time: time.Now(), SourceIdentity: e.Identity.Number,
		From:   End{Slot: e.Slot, Owner: e.Spec.Owner, Pod: e.Spec.Pod},
		Repair: RepairDetails{Subject: d.Subject, Device: d.Key, Want: d.Want, Have: d.Have},
	}
	if err != nil {
		o.Repair.Err = err.Error()
	}
	r.Add(o)
}

// Next is the number of the next event.
func (r *Ring) Next() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next
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

// After returns a reader that begins with the event after the one with an id. known is
// false if that is no event of this ring: the reader begins with the oldest then.
func (r *Ring) After(id [16]byte) (rd *Reader, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := binary.BigEndian.Uint64(id[8:]) &^ (1 << 63)
	// A number can be of this ring only if the id is what the ring makes of it.
	if n >= r.next || r.id(n) != id {
		return &Reader{ring: r, next: r.oldest()}, false
	}
	return &Reader{ring: r, next: n + 1}, true
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

// Before says whether the reader has not come to the event with a number.
func (rd *Reader) Before(number uint64) bool { return rd.next < number }

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
		news := rd.ring.arrived
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
