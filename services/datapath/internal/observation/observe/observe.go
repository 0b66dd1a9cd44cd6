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
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// Type is the type of an event.
type Type uint8

// Types of events. An event without a type only reports a loss.
const (
	// Drop is a dropped packet.
	Drop Type = iota + 1
	// PolicyVerdict is the evaluation of a connection.
	PolicyVerdict
	// Closed is the end of a connection.
	Closed
	// Repair is the repair of a program that was detached from an endpoint's device.
	Repair
)

// Verdict is the verdict on a packet.
type Verdict uint8

const (
	Forwarded Verdict = iota + 1
	Dropped
	Audited
	Redirected
)

// Side is the verdict of one side's policy. By is 0 if it was not evaluated.
type Side struct {
	By      uint8 // origin of the verdict, with the number that programs and API use
	Verdict Verdict
	Rule    uint16
	Table   uint16
	Epoch   uint32
	// Slot is the endpoint ID of the policy's endpoint.
	Slot uint16
	// Revision of the policy, Sources of the rule and its Proxy, resolved when the event was read; zero if they were
	// unknown. They cannot be resolved later, because policies are forgotten earlier than events.
	Revision uint64
	Sources  []string
	Proxy    uint16
}

// End is an endpoint of this node at one end of a packet; zero if that end is not local.
type End struct {
	Slot  uint16
	Owner workload.Owner        // zero if the endpoint was removed
	Pod   workload.PodReference // zero without Kubernetes
}

// Event is a report about one packet, or a repair.
type Event struct {
	Type                Type
	Time                time.Time
	Reason              uint32 // the number that programs and API use
	Egress              bool   // direction seen from the endpoint
	Verdict             Verdict
	ID                  [16]byte // UUID, assigned by Ring.Add
	From, To            End
	Ifindex             uint32 // device where the packet was seen
	Source, Destination netip.AddrPort
	// Original is the destination before the translation to a backend of a service; invalid if the packet was not
	// translated.
	Original netip.AddrPort
	// Service is the service of the original destination when the packet was seen, as "shop/web:http"; empty if unknown.
	Service                             string
	Protocol                            uint8
	TCPFlags                            uint8
	SourceIdentity, DestinationIdentity uint32
	Length                              uint32
	SourceMAC                           [6]byte
	// Node is the node ID of the other node at one end; 0: none.
	Node      uint16
	EtherType uint16
	// Sender and Receiver are the sides of the connection's first packet. With Reply, the packet travels in the opposite
	// direction.
	Sender, Receiver Side
	Reply            bool
	// Repair is only set for that type; From and SourceIdentity then describe the endpoint.
	Repair RepairDetails
	// KernelLost is the number of events that the kernel dropped before this one.
	KernelLost uint32
}

// RepairDetails describe the difference of an attachment.
type RepairDetails struct {
	Subject string // "filter" or "qdisc"
	Device  string
	Want    string
	Have    string
	// Err is the error of the repair; empty if it succeeded.
	Err string
}

// Size is the number of events in the ring.
const Size = 4096

// Ring holds the last Size events.
type Ring struct {
	mu      sync.Mutex
	events  []Event       // guarded by mu
	next    uint64        // guarded by mu; sequence number of the next event, from 0
	arrived chan struct{} // guarded by mu; closed and replaced at each event
	lost    uint64        // guarded by mu; dropped by the kernel
	run     [8]byte       // random; makes event IDs unique across runs
}

// NewRing returns an empty ring.
func NewRing() *Ring {
	r := &Ring{events: make([]Event, 0, Size), arrived: make(chan struct{})}
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

// AddRepair appends an event about the repair of a program, or about its failure.
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
