// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package stream delivers the engine's steps to subscribers, in one order, with numbers by which a subscriber can
// resume after a disconnection.
//
// A Log has one writer, the owner of the engine, and a Session per connected subscriber. There is no queue per session:
// a session is a position in the log. A subscriber is disconnected if it falls so far behind that the log no longer
// contains its position. It is also disconnected if for too long it reads no message or acknowledges none, even while
// the service is blocked in sending a message to it. Each subscriber has its own numbers, because they also count the
// messages of its snapshots. Within a run of the service, numbers never decrease.
package stream

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// Reasons for the end of a session.
var (
	// ErrSlow means that the subscriber did not read or acknowledge for too long.
	ErrSlow = errors.New("the subscriber is too far behind and was disconnected; subscribe again")
	errGone = errors.New("the subscriber has disconnected")
)

// Incarnation identifies a run of the service.
type Incarnation [16]byte

// Barrier is a point at which the tables agree with certain revisions.
type Barrier struct {
	Policy, Identity, Address uint64
	State                     *PolicyState
	IdentityService           peer.Revision
}

// Message is a numbered sequence of steps.
type Message struct {
	Seq      uint64
	Steps    []policytable.Step
	Revision uint64   // policy revision of the bindings in it
	Complete bool     // the last of a snapshot
	Barrier  *Barrier // valid after the steps; nil if further messages of the change follow
}

// Limits limit the amount of data that the log keeps. Weights are approximate sizes of messages in bytes.
type Limits struct {
	Message int // maximum weight of a message
	Resume  int // weight kept for subscribers that may reconnect
	Behind  int // weight by which a connected subscriber may be behind
	Unacked int // number of unacknowledged barriers
	// Stall is the maximum time for which a connected subscriber may leave messages unread, or barriers
	// unacknowledged. 0 means 30 s.
	Stall time.Duration
}

// Defaults returns the limits of the service: a message is much smaller than 4 MiB, and the data that is kept for a
// subscriber is small compared with the tables.
func Defaults() Limits {
	return Limits{Message: 1 << 20, Resume: 4 << 20, Behind: 64 << 20, Unacked: 1 << 16, Stall: 30 * time.Second}
}

type entry struct {
	Message
	weight int
	change uint64 // entries of one change have the same number
}

// Log is the sequence of all steps.
type Log struct {
	limits      Limits
	incarnation Incarnation

	mu       sync.Mutex
	first    uint64  // position of entries[0]; guarded by mu, as are all following fields
	entries  []entry //
	weight   int
	change   uint64
	high     uint64 // highest number sent to any subscriber
	sessions map[string]*Session
	away     map[string]position // subscribers that may resume
	last     Barrier
	changed  chan struct{} // closed and replaced at each change
	cut      uint64        // number of sessions that ended because the subscriber was slow
}

// position maps a subscriber's numbers to the log.
type position struct {
	offset uint64 // number minus position
	floor  uint64 // lowest number from which it may resume
	sent   uint64
	acked  uint64
	at     Barrier // last acknowledged barrier
	marks  []mark
	refused
}

// mark is a barrier that was sent and is not acknowledged yet.
type mark struct {
	seq     uint64
	barrier Barrier
}

// reach records that the subscriber enforces everything up to a number.
func (p *position) reach(seq uint64) {
	p.acked = max(p.acked, seq)
	n := 0
	for n < len(p.marks) && p.marks[n].seq <= seq {
		p.at = p.marks[n].barrier
		n++
	}
	p.marks = slices.Delete(p.marks, 0, n)
}

// refused contains the tables that a subscriber has refused.
type refused map[Refused]Refusal

// Hold is the reason why a subscriber still enforces an earlier state.
type Hold struct {
	Revision uint64 // the enforced revision
	Reason   string
}

// Refused identifies a refused table: a direction of a subject.
type Refused struct {
	Subject   identity.Numeric
	Direction policytable.Direction
}

// Refusal is the reason for which a table is not enforced.
type Refusal struct {
	Table    policytable.ID
	Revision uint64 // policy revision of the binding
	Reason   string
	Policy   string // the policy with the largest share of the table
}

// String returns one line.
func (r Refused) String() string { return fmt.Sprintf("%s of identity %d", r.Direction, r.Subject) }

// NewLog returns the empty log of a new run.
func NewLog(limits Limits) *Log {
	limits.Stall = cmp.Or(limits.Stall, Defaults().Stall)
	l := &Log{limits: limits, first: 1, sessions: make(map[string]*Session), away: make(map[string]position), changed: make(chan struct{})}
	rand.Read(l.incarnation[:]) //nolint:errcheck // never fails
	return l
}

// Incarnation identifies this run.
func (l *Log) Incarnation() Incarnation { return l.incarnation }

func (l *Log) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// split divides steps into messages, of which the last one contains the barrier.
func (l *Log) split(steps []policytable.Step, revision uint64, b Barrier) []entry {
	var out []entry
	begin, weight := 0, 0
	flush := func(end int) {
		out = append(out, entry{Message: Message{Steps: steps[begin:end:end], Revision: revision}, weight: 64 + weight})
		begin, weight = end, 0
	}
	for i, ev := range steps {
		w := Weight(ev)
		if i > begin && weight+w > l.limits.Message {
			flush(i)
		}
		weight += w
	}
	flush(len(steps))
	out[len(out)-1].Barrier = &b
	return out
}

// Append adds the steps of one change, followed by the barrier. The log owns the steps from then on.
func (l *Log) Append(steps []policytable.Step, b Barrier) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = b
	if len(l.sessions) == 0 && len(l.away) == 0 {
		// No subscriber can resume from an earlier position.
		l.first += uint64(len(l.entries)) + 1
		l.entries, l.weight = nil, 0
		l.wake()
		return
	}
	for _, s := range l.sessions {
		if !s.works() {
			s.moved = time.Now() // the session had no messages until now
		}
	}
	l.change++
	for _, e := range l.split(steps, b.Policy, b) {
		e.change = l.change
		l.entries = append(l.entries, e)
		l.weight += e.weight
	}
	for _, ev := range steps {
		switch x := ev.(type) {
		case policytable.BindSubject:
			l.unrefuse(Refused{x.Subject, x.Direction})
		case policytable.RemoveSubject:
			l.unrefuse(Refused{x.Subject, policytable.Ingress})
			l.unrefuse(Refused{x.Subject, policytable.Egress})
		}
	}
	l.trim()
	l.wake()
}

func (l *Log) unrefuse(r Refused) {
	for _, s := range l.sessions {
		delete(s.pos.refused, r)
	}
	for _, p := range l.away {
		delete(p.refused, r)
	}
}

// trim drops the oldest entries while the log exceeds its limits, and disconnects subscribers that still need them. It
// always keeps the newest change, whatever its size.
func (l *Log) trim() {
	needed := l.first + uint64(len(l.entries))
	for _, s := range l.sessions {
		needed = min(needed, s.next)
	}
	n := 0
	for n < len(l.entries) && l.entries[n].change != l.change {
		over := l.limits.Resume
		if l.first+uint64(n) >= needed {
			over = l.limits.Behind
		}
		if l.weight <= over {
			break
		}
		l.weight -= l.entries[n].weight
		n++
	}
	if n > 0 {
		l.entries = slices.Delete(l.entries, 0, n)
		l.first += uint64(n)
	}
	for _, s := range l.sessions {
		if s.next < l.first {
			l.disconnect(s, ErrSlow)
		}
	}
}

// disconnect ends a session that is too slow.
func (l *Log) disconnect(s *Session, why error) {
	if s.err == nil {
		l.cut++
	}
	l.end(s, why)
}

// Session is a connected subscriber.
type Session struct {
	log      *Log
	name     string
	watches  bool
	snapshot []Message // messages still to be sent
	next     uint64    // position in the log
	pos      position
	busy     bool      // the last message is still being sent, because Next was not called since
	moved    time.Time // when the subscriber took the last message, or when a first message became available
	heard    time.Time // when the subscriber last acknowledged, or when the first barrier after that was sent
	hold     *Hold     // nil if it does not hold
	released uint64    // lowest number for which Hold has an effect, see Release
	err      error     // why the session ended
	ended    chan struct{}
}

// works reports whether there are messages that the subscriber has not read.
func (s *Session) works() bool {
	return s.busy || len(s.snapshot) > 0 || s.next < s.log.first+uint64(len(s.log.entries))
}

// Ended is closed when the session has ended, even while its last message is being sent. Err returns the reason.
func (s *Session) Ended() <-chan struct{} { return s.ended }

// Err returns why the session has ended; nil while it is connected.
func (s *Session) Err() error {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	return s.err
}

// Check disconnects the subscriber if, for Limits.Stall, it has left messages unread or barriers unacknowledged. It
// returns the time until the next check.
func (s *Session) Check() time.Duration {
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	now, again := time.Now(), l.limits.Stall
	if s.works() {
		left := l.limits.Stall - now.Sub(s.moved)
		if left <= 0 {
			l.disconnect(s, fmt.Errorf("%w: it took no message for %v", ErrSlow, l.limits.Stall))
		}
		again = min(again, left)
	}
	if len(s.pos.marks) > 0 && s.hold == nil {
		left := l.limits.Stall - now.Sub(s.heard)
		if left <= 0 {
			l.disconnect(s, fmt.Errorf("%w: it acknowledged nothing for %v", ErrSlow, l.limits.Stall))
		}
		again = min(again, left)
	}
	return max(again, 0)
}

// Subscriber contains the parameters with which a subscriber connects.
type Subscriber struct {
	Name    string
	Watches bool // it only watches, and acknowledges nothing
	// Incarnation and number of the last message that it has applied.
	Incarnation Incarnation
	Seq         uint64
}

// Subscribe connects a subscriber. If the log still contains the messages after the subscriber's number, the
// subscriber resumes. Otherwise Subscribe calls snapshot to get the whole state. The caller must be the log's writer,
// so that no entry is added meanwhile. An existing session with the same name ends.
func (l *Log) Subscribe(who Subscriber, b Barrier, snapshot func() []policytable.Step) (s *Session, resumed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	name, in, seq := who.Name, who.Incarnation, who.Seq
	if old := l.sessions[name]; old != nil {
		l.end(old, failure.ErrReplaced)
	}
	l.last = b
	s = &Session{log: l, name: name, watches: who.Watches, moved: time.Now(), ended: make(chan struct{})}
	p, known := l.away[name]
	delete(l.away, name)
	if known && in == l.incarnation && seq >= p.floor && seq <= p.sent && seq-p.offset+1 >= l.first {
		s.pos, s.next = p, seq-p.offset+1
		s.pos.reach(seq) // cannot fail: the subscriber has reported this number itself
		s.pos.sent, s.pos.marks = seq, nil
		resumed = true
	} else {
		s.next = l.first + uint64(len(l.entries))
		s.pos.refused = make(refused)
		l.high++ // leave a gap, so that the snapshot cannot be mistaken for a continuation
		for _, e := range l.split(snapshot(), b.Policy, b) {
			l.high++
			e.Seq = l.high
			s.snapshot = append(s.snapshot, e.Message)
		}
		s.snapshot[len(s.snapshot)-1].Complete = true
		s.pos.floor = l.high
		s.pos.offset = l.high + 1 - s.next
	}
	l.sessions[name] = s
	l.wake()
	return s, resumed
}

// end ends a session and keeps the position of its subscriber.
func (l *Log) end(s *Session, why error) {
	if s.err != nil {
		return
	}
	s.err = why
	close(s.ended)
	s.snapshot = nil
	if l.sessions[s.name] == s {
		delete(l.sessions, s.name)
		l.away[s.name] = s.pos
	}
	l.wake()
}

// Close ends the session; its subscriber may reconnect.
func (s *Session) Close() {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.log.end(s, errGone)
}

// Forget removes the data of a disconnected subscriber.
func (l *Log) Forget(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.away, name)
}

// Next waits for the next message.
func (s *Session) Next(ctx context.Context) (Message, error) {
	l := s.log
	for {
		l.mu.Lock()
		m, ok, err := s.take()
		changed := l.changed
		l.mu.Unlock()
		if ok || err != nil {
			return m, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Message{}, ctx.Err()
		}
	}
}

func (s *Session) take() (m Message, ok bool, err error) {
	l := s.log
	s.busy, s.moved = false, time.Now()
	switch {
	case s.err != nil:
		return m, false, s.err
	case len(s.snapshot) > 0:
		m, s.snapshot = s.snapshot[0], s.snapshot[1:]
	case s.next < l.first || len(s.pos.marks) >= l.limits.Unacked:
		l.disconnect(s, ErrSlow)
		return m, false, s.err
	case s.next < l.first+uint64(len(l.entries)):
		m = l.entries[s.next-l.first].Message
		m.Seq = s.next + s.pos.offset
		s.next++
		l.high = max(l.high, m.Seq)
	default:
		return m, false, nil
	}
	s.busy, s.pos.sent = true, m.Seq
	switch {
	case s.watches:
		s.pos.acked = m.Seq
	case m.Barrier != nil:
		if len(s.pos.marks) == 0 {
			s.heard = time.Now()
		}
		s.pos.marks = append(s.pos.marks, mark{m.Seq, *m.Barrier})
	}
	return m, true, nil
}

// Ack records that the subscriber enforces everything up to the number.
func (s *Session) Ack(seq uint64) error {
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if seq > s.pos.sent {
		return fmt.Errorf("%w: %d, the last was %d", failure.ErrAck, seq, s.pos.sent)
	}
	if seq <= s.pos.acked || s.watches {
		return nil
	}
	s.pos.reach(seq)
	s.heard, s.hold = time.Now(), nil
	l.wake()
	return nil
}

// Hold records that the subscriber has received everything up to the number, but does not enforce it.
func (s *Session) Hold(seq uint64, h Hold) error {
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case s.err != nil:
		return s.err
	case seq > s.pos.sent:
		return fmt.Errorf("%w: %d, the last was %d", failure.ErrAck, seq, s.pos.sent)
	case s.watches:
		return nil
	}
	// An acknowledgement covers all earlier barriers, so only the last one is needed.
	n := 0
	for n+1 < len(s.pos.marks) && s.pos.marks[n+1].seq <= seq {
		n++
	}
	s.pos.marks = slices.Delete(s.pos.marks, 0, n)
	if s.heard = time.Now(); seq >= s.released {
		s.hold = &h
	}
	l.wake()
	return nil
}

// RefuseMessage records that the message contains a step that the subscriber does not know. The subscriber continues
// to enforce the last acknowledged state. As after Hold, callers do not wait for the subscriber.
func (s *Session) RefuseMessage(seq uint64, reason string) error {
	s.log.mu.Lock()
	enforced := s.pos.at.Policy
	s.log.mu.Unlock()
	return s.Hold(seq, Hold{Revision: enforced, Reason: reason})
}

// Release clears all holds, because the next entry makes the subscribers enforce the current state. If a subscriber
// then reports a hold for an earlier entry, the report is ignored.
func (l *Log) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.sessions {
		s.hold, s.released = nil, l.first+uint64(len(l.entries))+s.pos.offset
	}
	l.wake()
}

// Refuse records that the subscriber has refused a table, because it cannot enforce the whole table.
func (s *Session) Refuse(r Refused, why Refusal) {
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.err == nil {
		s.pos.refused[r] = why
		l.wake()
	}
}

// State is the state of one subscriber.
type State struct {
	Name      string
	Connected bool
	Enforced  Barrier
	Behind    uint64 // number of messages that it has not acknowledged
	Refusals  map[Refused]Refusal
	Hold      *Hold // nil: it does not hold an earlier state
}

// States returns the states of all subscribers, sorted by name, and a channel that is closed when they change.
func (l *Log) States() ([]State, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]State, 0, len(l.sessions)+len(l.away))
	add := func(name string, p position, connected bool, behind uint64) {
		st := State{Name: name, Connected: connected, Enforced: p.at, Behind: behind, Refusals: make(map[Refused]Refusal, len(p.refused))}
		maps.Copy(st.Refusals, p.refused)
		out = append(out, st)
	}
	for name, s := range l.sessions {
		behind := s.pos.sent - min(s.pos.acked, s.pos.sent) + uint64(len(s.snapshot))
		if end := l.first + uint64(len(l.entries)); end > s.next {
			behind += end - s.next
		}
		add(name, s.pos, true, behind)
		out[len(out)-1].Hold = s.hold
	}
	for name, p := range l.away {
		add(name, p, false, 0)
	}
	slices.SortFunc(out, func(a, b State) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return out, l.changed
}

// Figures of the log.
type Figures struct {
	Messages int
	Weight   int
	Cut      uint64
}

// Figures returns the amount of kept data.
func (l *Log) Figures() Figures {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Figures{Messages: len(l.entries), Weight: l.weight, Cut: l.cut}
}

// Weight returns the approximate size of a step in a message.
func Weight(ev policytable.Step) int {
	switch x := ev.(type) {
	case policytable.DefineTable:
		t := x.Content
		return 128 + classes(t.Classes) + 8*len(t.Rules) + 10*len(x.Peers) + 64*len(t.Prefixes)
	case policytable.GrowTable:
		return 16 + classes(x.Classes)
	case policytable.BindSubject:
		w := 32
		for _, sources := range x.Rules {
			w += 4
			for _, s := range sources {
				w += 12 + len(s.Kind) + len(s.Namespace) + len(s.Name) + len(s.Path)
			}
		}
		return w
	}
	return 48
}

// classes returns the approximate size of peer classes in a message.
func classes(list []policytable.Ranges) int {
	w := 4 * len(list)
	for _, ranges := range list {
		w += 24 * len(ranges)
	}
	return w
}
