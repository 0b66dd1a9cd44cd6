// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package stream has what one subscriber of frontends still has to get, and how
// far it says it is.
//
// A frontend is sent whole, so what a subscriber has not taken is a set of keys:
// a key that changes again while it waits is sent once, with its latest value. The
// set has no more keys than there are frontends, and those that are gone.
//
// Keys are sent in batches. Each ends with a barrier, so that a subscriber gets
// barriers however fast keys change. A Subscriber belongs to one goroutine.
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

// Bounds of one message.
const (
	MaxSteps = 1000
	MaxBytes = 1 << 20
)

const (
	// maxKeys is how many keys may wait for a subscriber, or for its
	// acknowledgement. There are never so many frontends; only keys that come and go
	// without end, while it takes nothing, reach it.
	maxKeys = 4 << 16
	// maxBarriers is of how many barriers the revisions are known. What an
	// acknowledgement of another one says is that of the last known before it.
	maxBarriers = 1024
	// MaxRefusals is how many refusals are kept.
	MaxRefusals = 4096
)

// Sentinels.
var (
	// ErrOverflow: more keys changed than may wait; the stream begins again with
	// every frontend.
	ErrOverflow = errors.New("too many frontends came and went without being taken")
)

// Source is what a subscriber takes frontends from.
type Source interface {
	// Frontend is the present one of a key; nil: there is none.
	Frontend(frontend.Key) *frontend.Frontend
	// Keys are those of all frontends.
	Keys() []frontend.Key
	// Revision of the frontends, and whether every source was listed.
	Revision() (revision uint64, complete bool)
	// NextSeq is the number of a new barrier.
	NextSeq() uint64
}

// Refusal is a frontend that a subscriber did not take.
type Refusal struct {
	Service service.Name
	Reason  string
	// The frontend was sent again before the subscriber said so; with the barrier
	// that ended that.
	until uint64
	old   bool // the subscriber acknowledged an earlier barrier since
}

// Subscriber is one subscriber, connected or not.
type Subscriber struct {
	Name     string
	Enforces bool
	// Session counts connections; 0: it is not connected.
	Session uint64
	// Until is when it is forgotten, while it is not connected.
	Until time.Time
	// Wake has a token when Next may have something.
	Wake chan struct{}

	dirty    map[frontend.Key]struct{} // not in a batch
	batch    []frontend.Key            // still to be sent
	open     bool                      // a batch is being sent
	seq      uint64                    // of the barrier that will end the batch
	revision uint64                    // when the batch began
	complete bool                      // likewise
	snapshot bool                      // the batch has every frontend
	due      bool                      // a barrier is, even if no key is dirty

	sent     map[frontend.Key]uint64 // that are not acknowledged, with the barrier behind them
	barriers []frontend.Barrier      // that were sent and are not acknowledged as ended
	floor    uint64                  // the lowest barrier that the stream can resume behind
	last     uint64                  // barrier that was sent

	enforced, ended                 uint64 // barriers
	enforcedRevision, endedRevision uint64
	refusals                        map[frontend.Key]Refusal
	refused                         map[service.Name]int // refusals by service
	omitted                         int
}

// New returns a subscriber that was never connected.
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

// Connect begins a stream: behind the barrier seq, if it is one of this run that
// the stream can resume behind; else with every frontend.
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

// Disconnect notes that the subscriber is gone.
func (s *Subscriber) Disconnect(until time.Time) {
	s.Session, s.Until = 0, until
}

// Mark says that frontends have changed, or what a barrier says.
func (s *Subscriber) Mark(keys []frontend.Key) error {
	s.due = true
	if s.Session == 0 && s.floor == ^uint64(0) {
		return nil // it begins with every frontend
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
	for len(s.batch) > 0 && len(steps) < MaxSteps-1 { // one is left for the barrier
		k := s.batch[0]
		f := src.Frontend(k)
		weight := Weight(f)
		if len(steps) > 0 && size+weight > MaxBytes {
			break
		}
		size += weight
		s.batch = s.batch[1:]
		delete(s.dirty, k) // what is sent is the latest
		s.accept(k)
		if f == nil && s.snapshot {
			continue // it was never sent
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

// begin makes a batch of what waits.
func (s *Subscriber) begin(src Source) bool {
	if len(s.dirty) == 0 && !s.due {
		return false
	}
	s.batch = slices.SortedFunc(maps.Keys(s.dirty), compile.CompareKeys)
	s.dirty = make(map[frontend.Key]struct{}) // a large one is given back
	s.open, s.due, s.seq = true, false, src.NextSeq()
	s.revision, s.complete = src.Revision()
	return true
}

// end is the barrier of the batch.
func (s *Subscriber) end(src Source) *frontend.Barrier {
	if len(s.dirty) == 0 { // all that changed while it was sent is in it
		s.revision, s.complete = src.Revision()
		s.due = false
	}
	b := frontend.Barrier{Seq: s.seq, Revision: s.revision, SnapshotComplete: s.snapshot, SourcesComplete: s.complete}
	if s.snapshot {
		s.snapshot, s.floor = false, s.seq
	}
	s.open, s.batch, s.last = false, nil, s.seq
	if len(s.barriers) == maxBarriers { // every second one of the older half goes
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

// Ack notes how far the subscriber is.
func (s *Subscriber) Ack(enforced, ended uint64) error {
	switch {
	case enforced > s.last || ended > s.last:
		return fmt.Errorf("%w: %d and %d are acknowledged, the last one is %d", failure.ErrAck, enforced, ended, s.last)
	case ended > max(enforced, s.enforced):
		return fmt.Errorf("%w: %d has ended before it is enforced", failure.ErrAck, ended)
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
		case r.old: // it was said of the frontend before, and of this one it was not
			s.accept(k)
		default:
			r.until = 0
			s.refusals[k] = r
		}
	}
}

// revisionAt is the revision of the last barrier up to seq that is known.
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

// prune forgets barriers that nothing is asked about any more.
func (s *Subscriber) prune() {
	s.barriers = slices.DeleteFunc(s.barriers, func(b frontend.Barrier) bool { return b.Seq <= s.ended })
}

// Refuse notes that the subscriber did not take a frontend, which is one of the
// service.
func (s *Subscriber) Refuse(k frontend.Key, of service.Name, reason string) {
	if _, known := s.refusals[k]; !known && len(s.refusals) >= MaxRefusals {
		s.omitted++
		return
	}
	r := Refusal{Service: of, Reason: reason}
	// The subscriber works on the first barrier that it has not acknowledged. What
	// was sent behind that one it may not have seen.
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

// accept forgets a refusal, if there is one.
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

// Refuses reports whether the subscriber did not take a frontend of a service.
func (s *Subscriber) Refuses(of service.Name) bool { return s.refused[of] > 0 }

// Progress is how far a subscriber is.
type Progress struct {
	Enforced, Ended uint64 // revisions
	Refusals        map[frontend.Key]Refusal
	Omitted         int // refusals
}

// Progress is how far the subscriber is. The map is its own.
func (s *Subscriber) Progress() Progress {
	return Progress{s.enforcedRevision, s.endedRevision, s.refusals, s.omitted}
}

// Waiting is how many keys have changed and are not sent.
func (s *Subscriber) Waiting() int { return len(s.dirty) + len(s.batch) }

// Weight is at least the size of a frontend in a message.
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
