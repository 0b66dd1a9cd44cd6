// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package desiredtest contains the tests that every service with a stream of desired state must pass. The tests define
// the contract of such a stream.
//
// The contract follows incremental xDS. A stream begins with a snapshot of all objects. Numbered changes follow. A
// subscriber acknowledges numbers, refuses objects, or holds, which means that it has received a state but still
// enforces an earlier one. After a disconnect, the stream resumes after the number that the subscriber sends. If the
// service no longer knows what changed since that number, the stream begins with a snapshot.
package desiredtest

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// Service is a service under test. Subscribers have unique names. Objects are identified by numbers, and each has an
// integer value. The suite calls a Service from one goroutine.
type Service interface {
	// Change sets or removes objects as one revision, and returns the revision.
	Change(steps ...Step) (revision uint64)
	// Subscribe connects a subscriber after a position. resumed is false if the stream begins with a snapshot.
	Subscribe(name string, behind Position) (s Session, resumed bool)
	// Incarnation returns the name of this run of the service.
	Incarnation() string
	// Restart ends all sessions and begins another run with the same objects.
	Restart()
	// State returns what the service knows about a subscriber, connected or not.
	State(name string) State
	// Retained returns how many changes the service keeps for a subscriber; Overflow returns a number that exceeds
	// its limit.
	Retained(name string) int
	// Overflow returns a number of changes that exceeds the changes that the service keeps for one subscriber, if
	// each is of another object.
	Overflow() int
}

// Session is one connection of a subscriber.
type Session interface {
	// Next returns the next message. ok is false if no message waits. An error ends the
	// session.
	Next() (m Message, ok bool, err error)
	// Ack acknowledges that the subscriber enforces everything up to a number.
	Ack(seq uint64) error
	// Refuse reports that the subscriber does not enforce an object.
	Refuse(object int) error
	// Close disconnects the subscriber.
	Close()
}

// Holder is a Session that supports Hold.
type Holder interface {
	// Hold reports that the subscriber has received everything up to a number, but does not enforce it yet.
	Hold(seq uint64) error
}

// Step sets or removes an object.
type Step struct {
	Object int
	Value  int // 0 removes the object
}

// Message is one message of a stream.
type Message struct {
	Steps []Step
	// Seq is the number of the message; 0 if only messages with a barrier have numbers.
	Seq uint64
	// Barrier means that the steps sent so far add up to the state of Revision.
	Barrier  bool
	Revision uint64
	// SnapshotComplete means that the steps sent so far contain every object. Only a message with Barrier has it.
	SnapshotComplete bool
}

// Position is the last barrier that a subscriber has applied. The zero Position means that the
// subscriber has no state.
type Position struct {
	Incarnation string
	Seq         uint64
}

// State describes a subscriber as the service sees it.
type State struct {
	// Enforced is the revision of the last acknowledged barrier; 0: none.
	Enforced uint64
	Refused  []int // objects in ascending order
	Held     bool
}

// Run runs the suite. open returns a service without objects and subscribers.
func Run(t *testing.T, open func(t *testing.T) Service) {
	for name, test := range map[string]func(t *testing.T, w *world){
		"StreamBeginsWithSnapshot":                  beginsWithSnapshot,
		"SnapshotOfNoObjectsIsComplete":             emptySnapshot,
		"NumbersAndRevisionsIncrease":               numbersIncrease,
		"AcknowledgedRevisionIsEnforced":            acknowledged,
		"AcknowledgementOfUnsentMessageIsAnError":   unsent,
		"RefusalEndsWithNextChangeOfObject":         refusal,
		"RefusalsEndWithSnapshot":                   refusalSnapshot,
		"HoldEndsWithAcknowledgement":               hold,
		"StreamResumesBehindAcknowledgement":        resumes,
		"ResumptionAcknowledges":                    resumptionAcknowledges,
		"InterruptedChangeIsSentAgain":              interruptedChange,
		"UnknownPositionBeginsWithSnapshot":         unknownPosition,
		"UnfinishedSnapshotIsNotResumed":            unfinishedSnapshot,
		"NewIncarnationBeginsWithSnapshot":          newIncarnation,
		"OverflowOfConnectedSubscriberLosesNothing": overflowConnected,
		"OverflowOfAbsentSubscriberLosesNothing":    overflowAbsent,
		"AnyHistoryConverges":                       anyHistory,
	} {
		t.Run(name, func(t *testing.T) { test(t, &world{Service: open(t), objects: make(map[int]int)}) })
	}
}

// world is a service with the objects that it should have.
type world struct {
	Service
	objects  map[int]int
	revision uint64
}

func (w *world) change(steps ...Step) {
	for _, s := range steps {
		if s.Value == 0 {
			delete(w.objects, s.Object)
		} else {
			w.objects[s.Object] = s.Value
		}
	}
	w.revision = w.Change(steps...)
}

// subscriber keeps its applied state across sessions, as a kernel does.
type subscriber struct {
	w       *world
	name    string
	session Session
	has     map[int]int // as of the last barrier
	at      Position    // of the last barrier
	// State of the current session.
	pending  map[int]int // steps since the last barrier, applied to has
	snapshot bool        // it began with a snapshot that is not complete
	last     uint64      // number of the last message
	revision uint64      // of the last barrier
	upserts  int
	removes  int
}

func (w *world) subscriber(name string) *subscriber {
	return &subscriber{w: w, name: name, has: map[int]int{}}
}

// connect subscribes after the last applied barrier.
func (s *subscriber) connect() (resumed bool) {
	s.session, resumed = s.w.Subscribe(s.name, s.at)
	s.pending, s.snapshot, s.last = maps.Clone(s.has), !resumed, s.at.Seq
	if !resumed {
		s.pending, s.last, s.revision = map[int]int{}, 0, 0
	}
	s.upserts, s.removes = 0, 0
	return resumed
}

func (s *subscriber) close() {
	s.session.Close()
	s.session = nil
}

// next receives one message and checks it against the previous messages.
func (s *subscriber) next(t *testing.T) (m Message, ok bool, err error) {
	t.Helper()
	m, ok, err = s.session.Next()
	if !ok || err != nil {
		return m, false, err
	}
	if m.Barrier && m.Seq == 0 || m.Seq != 0 && m.Seq <= s.last {
		t.Fatalf("%s: message %d (barrier %t) follows message %d", s.name, m.Seq, m.Barrier, s.last)
	}
	s.last = max(s.last, m.Seq)
	for _, x := range m.Steps {
		if x.Value == 0 {
			delete(s.pending, x.Object)
			s.removes++
		} else {
			s.pending[x.Object] = x.Value
			s.upserts++
		}
	}
	if m.SnapshotComplete != (s.snapshot && m.Barrier) {
		t.Fatalf("%s: message %d: snapshot_complete %t, want %t (barrier %t, in a snapshot %t)",
			s.name, m.Seq, m.SnapshotComplete, s.snapshot && m.Barrier, m.Barrier, s.snapshot)
	}
	if m.Barrier {
		if m.Revision < s.revision || m.Revision > s.w.revision {
			t.Fatalf("%s: the barrier has revision %d, want %d (the previous barrier) to %d (the service)",
				s.name, m.Revision, s.revision, s.w.revision)
		}
		s.snapshot, s.revision = false, m.Revision
		s.has, s.at = maps.Clone(s.pending), Position{s.w.Incarnation(), m.Seq}
	}
	return m, true, nil
}

// drain receives messages until none is waiting, and checks that the subscriber has every object.
func (s *subscriber) drain(t *testing.T) {
	t.Helper()
	for {
		_, ok, err := s.next(t)
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if !ok {
			break
		}
	}
	s.converged(t)
}

func (s *subscriber) converged(t *testing.T) {
	t.Helper()
	if s.snapshot || !maps.Equal(s.has, s.w.objects) {
		t.Fatalf("%s: no message waits, the snapshot is incomplete %t; it has %d objects, want %d: %v, want %v",
			s.name, s.snapshot, len(s.has), len(s.w.objects), few(s.has), few(s.w.objects))
	}
}

// few returns at most 20 objects for a message.
func few(objects map[int]int) []Step {
	var out []Step
	for _, x := range slices.Sorted(maps.Keys(objects)) {
		if len(out) == 20 {
			break
		}
		out = append(out, Step{x, objects[x]})
	}
	return out
}

func (s *subscriber) ack(t *testing.T) {
	t.Helper()
	if err := s.session.Ack(s.at.Seq); err != nil {
		t.Fatalf("%s: acknowledge %d: %v", s.name, s.at.Seq, err)
	}
}

func (s *subscriber) enforces(t *testing.T, revision uint64) {
	t.Helper()
	if got := s.w.State(s.name).Enforced; got != revision {
		t.Errorf("%s enforces revision %d, want %d", s.name, got, revision)
	}
}

func (s *subscriber) refuses(t *testing.T, want ...int) {
	t.Helper()
	if got := s.w.State(s.name).Refused; !slices.Equal(got, want) {
		t.Errorf("%s refuses %v, want %v", s.name, got, want)
	}
}

// synced returns a connected subscriber that has acknowledged three objects.
func synced(t *testing.T, w *world) *subscriber {
	t.Helper()
	w.change(Step{1, 1}, Step{2, 1}, Step{3, 1})
	s := w.subscriber("a")
	s.connect()
	s.drain(t)
	s.ack(t)
	return s
}

func beginsWithSnapshot(t *testing.T, w *world) {
	w.change(Step{1, 1}, Step{2, 1})
	w.change(Step{2, 2}, Step{3, 1})
	w.change(Step{1, 0})
	s := w.subscriber("a")
	if s.connect() {
		t.Fatal("a stream without a position resumes")
	}
	s.drain(t)
	if s.upserts != 2 || s.removes != 0 {
		t.Errorf("the snapshot sets %d objects and removes %d, want 2 and 0", s.upserts, s.removes)
	}
	w.change(Step{2, 3}, Step{4, 1})
	w.change(Step{3, 0})
	s.drain(t)
}

func emptySnapshot(t *testing.T, w *world) {
	s := w.subscriber("a")
	s.connect()
	s.drain(t)
	if s.at.Seq == 0 {
		t.Error("a snapshot without objects has no barrier")
	}
	s.ack(t)
}

func numbersIncrease(t *testing.T, w *world) {
	s := synced(t, w)
	for i := range 20 {
		w.change(Step{i % 4, i + 1}) // next compares numbers and revisions
		if i%3 == 0 {
			s.drain(t)
			s.ack(t)
		}
	}
	s.drain(t)
	if s.revision != w.revision {
		t.Errorf("the last barrier has revision %d, want the service's revision %d", s.revision, w.revision)
	}
}

func acknowledged(t *testing.T, w *world) {
	w.change(Step{1, 1})
	s := w.subscriber("a")
	s.connect()
	s.drain(t)
	s.enforces(t, 0)
	s.ack(t)
	first, revision := s.at.Seq, s.revision
	s.enforces(t, revision)
	w.change(Step{1, 2})
	s.drain(t)
	s.enforces(t, revision)
	s.ack(t)
	s.enforces(t, s.revision)
	if err := s.session.Ack(first); err != nil {
		t.Errorf("acknowledge %d again: %v", first, err)
	}
	s.enforces(t, s.revision)
}

func unsent(t *testing.T, w *world) {
	w.change(Step{1, 1})
	s := w.subscriber("a")
	s.connect()
	s.drain(t)
	if err := s.session.Ack(s.last + 1); err == nil {
		t.Error("a number that was not sent is acknowledged")
	}
	s.enforces(t, 0)
}

func refusal(t *testing.T, w *world) {
	s := synced(t, w)
	w.change(Step{1, 2})
	s.drain(t)
	if err := s.session.Refuse(1); err != nil {
		t.Fatal(err)
	}
	s.ack(t)
	s.refuses(t, 1)
	s.enforces(t, s.revision)
	w.change(Step{2, 2})
	s.drain(t)
	s.ack(t)
	s.refuses(t, 1) // another object has changed
	s.close()
	s.connect()
	s.drain(t)
	s.refuses(t, 1) // the session is a new one
	w.change(Step{1, 3})
	s.drain(t)
	s.ack(t)
	s.refuses(t)
	if err := s.session.Refuse(1); err != nil {
		t.Fatal(err)
	}
	w.change(Step{1, 0})
	s.drain(t)
	s.ack(t)
	s.refuses(t)
}

func refusalSnapshot(t *testing.T, w *world) {
	s := synced(t, w)
	if err := s.session.Refuse(2); err != nil {
		t.Fatal(err)
	}
	s.refuses(t, 2)
	s.close()
	s.at = Position{}
	s.connect()
	s.refuses(t)
	s.enforces(t, 0)
	s.drain(t)
}

func hold(t *testing.T, w *world) {
	s := synced(t, w)
	h, ok := s.session.(Holder)
	if !ok {
		return // subscribers of this service cannot hold
	}
	before := s.revision
	w.change(Step{1, 2})
	s.drain(t)
	if err := h.Hold(s.at.Seq); err != nil {
		t.Fatal(err)
	}
	if !w.State(s.name).Held {
		t.Error("the subscriber holds, and the service does not know")
	}
	s.enforces(t, before)
	if err := h.Hold(s.last + 1); err == nil {
		t.Error("a number that was not sent is held")
	}
	s.ack(t)
	if w.State(s.name).Held {
		t.Error("the subscriber holds what it has acknowledged")
	}
	s.enforces(t, s.revision)
}

func resumes(t *testing.T, w *world) {
	s := synced(t, w)
	at, has, revision := s.at, s.has, s.revision
	w.change(Step{1, 2})
	s.drain(t)           // received, but not acknowledged before the connection was lost
	w.change(Step{2, 2}) // not sent
	s.close()
	s.enforces(t, revision)
	w.change(Step{3, 0}, Step{4, 1}) // while the subscriber is disconnected
	s.at, s.has = at, has
	if !s.connect() {
		t.Fatal("the stream does not resume behind what was acknowledged last")
	}
	s.enforces(t, revision)
	s.drain(t)
	if s.upserts != 3 || s.removes != 1 {
		t.Errorf("%d objects are set and %d removed, want 3 and 1", s.upserts, s.removes)
	}
	s.ack(t)
	s.enforces(t, w.revision)
}

func resumptionAcknowledges(t *testing.T, w *world) {
	s := synced(t, w)
	w.change(Step{1, 2})
	s.drain(t)
	revision := s.revision
	s.close() // the subscriber has applied everything and could not acknowledge it
	if !s.connect() {
		t.Fatal("the stream does not resume behind the last applied barrier")
	}
	s.enforces(t, revision)
	s.drain(t)
	if s.upserts != 0 {
		t.Errorf("%d objects are sent again", s.upserts)
	}
}

func interruptedChange(t *testing.T, w *world) {
	s := synced(t, w)
	var all []Step
	for i := range 3000 {
		all = append(all, Step{i, 2})
	}
	w.change(all...)
	if m, ok, err := s.next(t); !ok || err != nil || m.Barrier {
		t.Fatalf("the first of 3,000 changes: %t, %v, barrier %t", ok, err, m.Barrier)
	}
	s.close()
	s.connect() // resumes after the barrier before the change
	s.drain(t)
	s.ack(t)
	s.enforces(t, w.revision)
}

func unknownPosition(t *testing.T, w *world) {
	s := synced(t, w)
	s.close()
	s.at.Seq += 1000
	if s.connect() {
		t.Fatal("the stream resumes behind a number that was not sent")
	}
	s.drain(t)
	// The service does not know this subscriber name.
	other := w.subscriber("b")
	other.at = s.at
	if other.connect() {
		t.Fatal("a subscriber resumes the stream of another one")
	}
	other.drain(t)
}

func unfinishedSnapshot(t *testing.T, w *world) {
	var all []Step
	for i := range 3000 {
		all = append(all, Step{i, 1})
	}
	w.change(all...)
	s := w.subscriber("a")
	s.connect()
	m, ok, err := s.next(t)
	if !ok || err != nil || m.Barrier {
		t.Fatalf("the first of 3,000 objects: %t, %v, barrier %t", ok, err, m.Barrier)
	}
	s.close()
	w.change(Step{0, 0})
	s.at = Position{w.Incarnation(), m.Seq}
	if s.connect() {
		t.Fatal("the stream resumes in the middle of a snapshot")
	}
	s.drain(t)
	// A subscriber with a position restarts without state and disconnects in the middle of its
	// snapshot. Then the first instance reconnects with its old position.
	s.ack(t)
	s.close()
	again := w.subscriber("a")
	again.connect()
	if m, _, err := again.next(t); err != nil || m.Barrier {
		t.Fatalf("the first of 2,999 objects: %v, barrier %t", err, m.Barrier)
	}
	// An acknowledgement from the previous stream arrives late.
	if err := again.session.Ack(s.at.Seq); err != nil {
		t.Fatal(err)
	}
	again.close()
	w.change(Step{1, 0})
	if s.connect() {
		t.Fatal("the stream resumes behind a barrier before an unfinished snapshot")
	}
	s.drain(t)
}

func newIncarnation(t *testing.T, w *world) {
	s := synced(t, w)
	w.change(Step{1, 2})
	s.drain(t)
	old := w.Incarnation()
	w.Restart()
	if w.Incarnation() == old {
		t.Fatalf("two incarnations are %s", old)
	}
	at, has := s.at, s.has
	if s.connect() {
		t.Fatal("the stream of another incarnation resumes")
	}
	s.drain(t)
	for range 5 { // numbers of both incarnations overlap
		w.change(Step{2, 5})
		s.drain(t)
		s.ack(t)
	}
	s.close()
	s.at, s.has = at, has
	if s.connect() {
		t.Fatal("the stream resumes behind a number of another incarnation")
	}
	s.drain(t)
}

// flood changes more objects than the service retains for a subscriber. The objects are created and
// immediately removed.
func flood(t *testing.T, w *world, names ...string) {
	t.Helper()
	n := w.Overflow()
	for i := range n {
		w.change(Step{1000 + i, 1})
		w.change(Step{1000 + i, 0})
	}
	for _, name := range names {
		if got := w.Retained(name); got > n {
			t.Errorf("the service retains %d units for %s, want <= %d", got, name, n)
		}
	}
	w.change(Step{1, 7}, Step{2, 0})
}

func overflowConnected(t *testing.T, w *world) {
	s := synced(t, w)
	flood(t, w, s.name)
	if _, _, err := s.session.Next(); err == nil {
		t.Error("a session that has lost changes continues")
	}
	s.close()
	if s.connect() {
		t.Fatal("the stream resumes, and changes are lost")
	}
	s.drain(t)
	w.change(Step{3, 2})
	s.drain(t)
	s.ack(t)
	s.enforces(t, w.revision)
}

func overflowAbsent(t *testing.T, w *world) {
	s := synced(t, w)
	s.close()
	flood(t, w, s.name)
	if s.connect() {
		t.Fatal("the stream resumes, and changes are lost")
	}
	s.drain(t)
	s.ack(t)
	s.enforces(t, w.revision)
}

// anyHistory mixes changes, messages, acknowledgements and disconnects at random. A subscriber that
// has received everything must have every object.
func anyHistory(t *testing.T, w *world) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	all := []*subscriber{w.subscriber("a"), w.subscriber("b"), w.subscriber("c")}
	resumed, anew := 0, 0
	for range 20_000 {
		s := all[r.IntN(len(all))]
		switch op := r.IntN(8); {
		case op < 2:
			var steps []Step
			for range 1 + r.IntN(4) {
				steps = append(steps, Step{r.IntN(30), r.IntN(3) * r.IntN(1000)})
			}
			w.change(steps...)
		case op == 2 && s.session == nil:
			if r.IntN(10) == 0 {
				s.at, s.has = Position{}, map[int]int{} // another run of the subscriber
			}
			if s.connect() {
				resumed++
			} else {
				anew++
			}
		case s.session == nil:
		case op == 3 && r.IntN(4) == 0:
			s.close()
		case op == 4 && s.at.Incarnation != "" && !s.snapshot:
			if err := s.session.Ack(s.at.Seq); err != nil {
				s.close() // the session ended; the next one starts again
			}
		default:
			for range r.IntN(6) {
				_, ok, err := s.next(t)
				if err != nil {
					s.close()
					break
				}
				if !ok {
					s.converged(t)
					break
				}
			}
		}
		if s.session != nil && w.State(s.name).Enforced > w.revision {
			t.Fatalf("%s enforces revision %d, want the service's revision %d", s.name, w.State(s.name).Enforced, w.revision)
		}
	}
	if resumed == 0 || anew == 0 {
		t.Errorf("%d streams resumed, %d began with a snapshot", resumed, anew)
	}
}
