// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package stream tracks, for one subscriber, the frontends that must still be sent and the acknowledgements.
//
// A frontend is always sent as a whole, so the pending changes of a subscriber are a set of keys. A key that changes
// several times while it waits is sent once, with its latest value. The set contains at most the existing and the
// removed frontends.
//
// Keys are sent in batches. Each batch has a fixed set of keys and ends with a barrier. So a subscriber receives
// barriers even if keys change continuously. A Subscriber is not safe for concurrent use.
package stream

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// Limits of one message.
const (
	MaxSteps = 1000
	MaxBytes = 1 << 20
)

const (
	// maxKeys is the maximum number of keys that wait to be sent or acknowledged. There can never be so many
	// frontends. The limit is exceeded only if frontends are added and removed continuously while the subscriber
	// receives nothing.
	maxKeys = 4 << 16
	// maxBarriers is the maximum number of barriers whose revisions are kept. The acknowledgement of any other
	// barrier counts for the last kept barrier before it.
	maxBarriers = 1024
	// MaxRefusals is the maximum number of refusals that are kept.
	MaxRefusals = 4096
)

// Errors that callers branch on.
var (
	// ErrOverflow means that too many changed keys wait. The stream must restart with all frontends.
	ErrOverflow = errors.New("subscriber fell too far behind: too many frontends changed without being taken")
)

// Source provides the frontends for a subscriber.
type Source interface {
	// Frontend returns the current frontend of a key, or nil.
	Frontend(frontend.Key) *frontend.Frontend
	// Keys returns the keys of all frontends.
	Keys() []frontend.Key
	// Revision returns the revision of the frontends, and whether every source has been listed.
	Revision() (revision uint64, complete bool)
	// NextSeq returns the number for a new barrier.
	NextSeq() uint64
}

// Refusal is the refusal of a frontend by a subscriber.
type Refusal struct {
	Service service.Name
	Reason  string
	// until is set if the frontend was sent again before the refusal arrived. When the subscriber acknowledges the
	// barrier until, it enforces the new version.
	until uint64
	old   bool // the refusal belongs to an earlier version: the subscriber has since acknowledged an earlier barrier
}

// Subscriber is a subscriber, which need not be connected.
type Subscriber struct {
	Name     string
	Enforces bool
	// Session is the number of the connection; 0: not connected.
	Session uint64
	// Until is the time at which a disconnected subscriber is dropped.
	Until time.Time
	// Wake receives a token when Next may return steps.
	Wake chan struct{}

	dirty    map[frontend.Key]struct{} // changed keys that are not in a batch
	batch    []frontend.Key            // keys of the current batch that are not sent yet
	open     bool                      // a batch is in progress
	seq      uint64                    // number of the barrier that will end the batch
	revision uint64                    // revision at the start of the batch
	complete bool                      // whether every source was listed at the start of the batch
	snapshot bool                      // the batch contains every frontend
	due      bool                      // a barrier must be sent, even if no key is dirty

	sent     map[frontend.Key]uint64 // unacknowledged keys, each with the barrier that follows it
	barriers []frontend.Barrier      // barriers that were sent, and not acknowledged as ended
	floor    uint64                  // lowest barrier after which the stream can resume
	last     uint64                  // number of the last barrier sent

	enforced, ended                 uint64 // barriers
	enforcedRevision, endedRevision uint64
	refusals                        map[frontend.Key]Refusal
	refused                         map[service.Name]int // number of refusals by service
	omitted                         int
}

// New returns a subscriber that has never been connected.
func New(name string) *Subscriber {
	return &Subscriber{
		Name: name, Wake: make(chan struct{}, 1), dirty: make(map[frontend.Key]struct{}), sent: make(map[frontend.Key]uint64),
		refusals: make(map[frontend.Key]Refusal), refused: make(map[service.Name]int), floor: ^uint64(0),
	}
}

func (s *Subscriber) wake() {
	select {
	case s.Wake <- struct{}{}:
	default:
	}
}

// Connect begins a stream. The stream resumes after barrier seq if that barrier belongs to this run and all later
// changes are still known. Otherwise it begins with all frontends.
func (s *Subscriber) Connect(session, seq uint64, src Source) (resumed bool) {
	s.Session, s.Until, s.due = session, time.Time{}, true
	s.Wake = make(chan struct{}, 1)
	defer s.wake()
	for _, k := range s.batch {
		s.dirty[k] = struct{}{}
	}
	unfinished := s.open
	s.batch, s.open = nil, false
	if seq == 0 || seq < s.floor || seq > s.last || s.snapshot && unfinished {
		clear(s.dirty)
		clear(s.sent)
		clear(s.refusals)
		clear(s.refused)
		s.omitted, s.barriers = 0, nil
		s.snapshot, s.floor = true, ^uint64(0)
		s.enforced, s.ended, s.enforcedRevision, s.endedRevision = 0, 0, 0, 0
		for _, k := range src.Keys() {
			s.dirty[k] = struct{}{}
		}
		return false
	}
	for k, at := range s.sent {
		if at > seq {
			s.dirty[k] = struct{}{}
			delete(s.sent, k)
		}
	}
	s.acknowledge(seq)
	return true
}

// Disconnect records that the subscriber is not connected. It may resume until the given time.
func (s *Subscriber) Disconnect(until time.Time) {
	s.Session, s.Until = 0, until
}

// Mark marks frontends as changed. Without keys, it only requests a barrier.
func (s *Subscriber) Mark(keys []frontend.Key) error {
	s.due = true
	if s.Session == 0 && s.floor == ^uint64(0) {
		return nil // the stream will begin with all frontends
	}
	for _, k := range keys {
		s.dirty[k] = struct{}{}
	}
	defer s.wake()
	if len(s.dirty) <= maxKeys {
		return nil
	}
	clear(s.dirty)
	clear(s.sent)
	s.batch, s.open, s.floor = nil, false, ^uint64(0)
	if s.Session == 0 {
		return nil
	}
	return ErrOverflow
}

// Next returns the steps of the next message; none if there is nothing to send.
func (s *Subscriber) Next(src Source) []frontend.Step {
	if !s.open && !s.begin(src) {
		return nil
	}
	var steps []frontend.Step
	size := 0
	for len(s.batch) > 0 && len(steps) < MaxSteps-1 { // leave one step for the barrier
		k := s.batch[0]
		f := src.Frontend(k)
		weight := Weight(f)
		if len(steps) > 0 && size+weight > MaxBytes {
			break
		}
		size += weight
		s.batch = s.batch[1:]
		delete(s.dirty, k) // the latest value is being sent
		s.accept(k)
		if f == nil && s.snapshot {
			continue // the frontend was never sent
		}
		s.sent[k] = s.seq
		if f == nil {
			steps = append(steps, frontend.Step{Remove: &k})
		} else {
			steps = append(steps, frontend.Step{Upsert: f})
		}
	}
	if len(s.batch) == 0 {
		steps = append(steps, frontend.Step{Barrier: s.end(src)})
	}
	if len(s.sent) > maxKeys {
		clear(s.sent)
		s.floor = s.seq
	}
	if s.open || s.due || len(s.dirty) > 0 {
		s.wake()
	}
	return steps
}

// begin starts a batch that contains the waiting keys.
func (s *Subscriber) begin(src Source) bool {
	if len(s.dirty) == 0 && !s.due {
		return false
	}
	s.batch = slices.SortedFunc(maps.Keys(s.dirty), compile.CompareKeys)
	s.dirty = make(map[frontend.Key]struct{}) // free a large map
	s.open, s.due, s.seq = true, false, src.NextSeq()
	s.revision, s.complete = src.Revision()
	return true
}

// end returns the barrier that ends the batch.
func (s *Subscriber) end(src Source) *frontend.Barrier {
	if len(s.dirty) == 0 { // the batch contains all changes made while it was sent
		s.revision, s.complete = src.Revision()
		s.due = false
	}
	b := frontend.Barrier{Seq: s.seq, Revision: s.revision, SnapshotComplete: s.snapshot, SourcesComplete: s.complete}
	if s.snapshot {
		s.snapshot, s.floor = false, s.seq
	}
	s.open, s.batch, s.last = false, nil, s.seq
	if len(s.barriers) == maxBarriers { // drop every second barrier of the older half
		kept := s.barriers[:0]
		for i, x := range s.barriers {
			if i >= maxBarriers/2 || i%2 == 1 {
				kept = append(kept, x)
			}
		}
		s.barriers = kept
	}
	s.barriers = append(s.barriers, b)
	return &b
}

// Ack records the subscriber's progress.
func (s *Subscriber) Ack(enforced, ended uint64) error {
	switch {
	case enforced > s.last || ended > s.last:
		return fmt.Errorf("%w: barriers %d and %d are acknowledged, the last is %d", failure.ErrAck, enforced, ended, s.last)
	case ended > max(enforced, s.enforced):
		return fmt.Errorf("%w: barrier %d is acknowledged as ended before it is enforced", failure.ErrAck, ended)
	}
	s.acknowledge(enforced)
	if ended > s.ended {
		s.ended = ended
		s.endedRevision = max(s.endedRevision, s.revisionAt(ended))
		s.prune()
	}
	return nil
}

func (s *Subscriber) acknowledge(enforced uint64) {
	if enforced <= s.enforced {
		return
	}
	s.enforced = enforced
	s.floor = max(s.floor, enforced)
	if s.floor == ^uint64(0) {
		s.floor = enforced
	}
	s.enforcedRevision = max(s.enforcedRevision, s.revisionAt(enforced))
	for k, at := range s.sent {
		if at <= enforced {
			delete(s.sent, k)
		}
	}
	for k, r := range s.refusals {
		switch {
		case r.until == 0:
		case enforced < r.until:
			r.old = true
			s.refusals[k] = r
		case r.old: // the subscriber refused an earlier version, and not this one
			s.accept(k)
		default:
			r.until = 0
			s.refusals[k] = r
		}
	}
}

// revisionAt returns the revision of the last kept barrier up to seq.
func (s *Subscriber) revisionAt(seq uint64) uint64 {
	at, found := slices.BinarySearchFunc(s.barriers, seq, func(b frontend.Barrier, seq uint64) int {
		switch {
		case b.Seq < seq:
			return -1
		case b.Seq > seq:
			return 1
		}
		return 0
	})
	if !found {
		at--
	}
	if at < 0 {
		return 0
	}
	return s.barriers[at].Revision
}

// prune drops barriers that are no longer needed.
func (s *Subscriber) prune() {
	s.barriers = slices.DeleteFunc(s.barriers, func(b frontend.Barrier) bool { return b.Seq <= s.ended })
}

// Refuse records that the subscriber rejected a frontend of the service.
func (s *Subscriber) Refuse(k frontend.Key, of service.Name, reason string) {
	if _, known := s.refusals[k]; !known && len(s.refusals) >= MaxRefusals {
		s.omitted++
		return
	}
	r := Refusal{Service: of, Reason: reason}
	// The subscriber is still processing messages before the first unacknowledged barrier. So it may not have seen
	// frontends that were sent after that barrier.
	first := s.seq
	for _, b := range s.barriers {
		if b.Seq > s.enforced {
			first = b.Seq
			break
		}
	}
	if at := s.sent[k]; at > first {
		r.until = at
	}
	s.accept(k)
	s.refusals[k] = r
	s.refused[of]++
}

// accept removes the refusal of a frontend, if there is one.
func (s *Subscriber) accept(k frontend.Key) {
	r, ok := s.refusals[k]
	if !ok {
		return
	}
	delete(s.refusals, k)
	if s.refused[r.Service]--; s.refused[r.Service] == 0 {
		delete(s.refused, r.Service)
	}
}

// Refuses reports whether the subscriber rejected a frontend of a service.
func (s *Subscriber) Refuses(of service.Name) bool { return s.refused[of] > 0 }

// Progress is the progress of a subscriber.
type Progress struct {
	Enforced, Ended uint64 // revisions
	Refusals        map[frontend.Key]Refusal
	Omitted         int // number of refusals that are not in the map
}

// Progress returns the progress. The map belongs to the subscriber; the caller must not change it.
func (s *Subscriber) Progress() Progress {
	return Progress{s.enforcedRevision, s.endedRevision, s.refusals, s.omitted}
}

// Waiting returns the number of keys that have changed and have not been sent.
func (s *Subscriber) Waiting() int { return len(s.dirty) + len(s.batch) }

// Weight returns an upper bound for the size of a frontend in a message.
func Weight(f *frontend.Frontend) int {
	if f == nil {
		return 80
	}
	w := 160 + len(f.Service) + 50*len(f.SourceRanges)
	each := 15 + 12 // the address as text, port, state, and their tags
	if f.Key.Addr.Is6() {
		each = 39 + 12
	}
	for _, l := range []*frontend.List{f.Inside, f.Outside} {
		if l != nil {
			w += 16 + each*(len(l.Backends)+len(l.Draining))
		}
	}
	return w
}
