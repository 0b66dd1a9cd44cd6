// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontendstream

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
)

func TestStepsUpToABarrierAreOneTransaction(t *testing.T) {
	w := newWorld(t).start(nil)
	s := w.next()
	if s.sub != (Subscription{Name: "datapath"}) {
		t.Errorf("subscribed with %+v", s.sub)
	}
	w.send(s, up(1, 1), up(2, 2))
	w.send(s, up(3, 3), end(5, snapshot))
	w.hears(s, ack{5, 0}, ack{5, 5})
	w.has(1, 2, 3)
	w.send(s, down(1), up(4, 4), up(4, 5), down(2), up(2, 9), end(6), up(7, 7))
	w.hears(s, ack{6, 5}, ack{6, 6})
	w.has(2, 3, 4)
	want := [][]string{
		{"10.96.0.1:1/tcp true", "10.96.0.1:2/tcp true", "10.96.0.1:3/tcp true"},
		{"10.96.0.1:1/tcp false", "10.96.0.1:2/tcp true", "10.96.0.1:4/tcp true"},
	}
	if got := w.kernel.calls; !reflect.DeepEqual(got, want) {
		t.Errorf("transactions %v, want %v", got, want)
	}
	if st := w.f.Status(); !st.Connected || !st.Complete || st.Revision != 106 || st.Ended != 106 || st.Err != nil {
		t.Errorf("status %+v", st)
	}
}

func TestEndedIsAcknowledgedWhenSocketsHaveEnded(t *testing.T) {
	e := &ender{began: make(chan struct{}), let: make(chan error)}
	w := newWorld(t).start(e)
	s := w.next()
	w.send(s, up(1, 1), end(1, snapshot))
	w.hears(s, ack{1, 0})
	<-e.began
	// later changes are enforced at once, and one wait covers all of them
	w.send(s, up(1, 2), end(2))
	w.send(s, up(1, 3), end(3))
	w.hears(s, ack{2, 0}, ack{3, 0})
	e.let <- nil
	w.hears(s, ack{3, 1})
	<-e.began
	w.send(s, end(4)) // no changes
	w.hears(s, ack{4, 1})
	e.let <- nil
	w.hears(s, ack{4, 3}, ack{4, 4})
	w.send(s, end(5))
	w.hears(s, ack{5, 5})
	if w.kernel.graces != 2 {
		t.Errorf("%d grace periods, want 2", w.kernel.graces)
	}
}

func TestEndingThatFailsIsTriedAgain(t *testing.T) {
	e := &ender{began: make(chan struct{}), let: make(chan error)}
	w := newWorld(t).start(e)
	s := w.next()
	w.send(s, up(1, 1), end(1, snapshot))
	w.hears(s, ack{1, 0})
	<-e.began
	e.let <- errors.New("no netlink")
	<-e.began
	e.let <- nil
	w.hears(s, ack{1, 1})
}

func TestSnapshotRemovesWhatItDoesNotName(t *testing.T) {
	w := newWorld(t)
	w.memory.state = "s"
	w.kernel.have[key(8)], w.kernel.have[key(9)] = up(8, 1).Upsert, up(9, 1).Upsert
	w.start(nil)
	s := w.next()
	// the kernel's frontends belong to this state: missing ones are removed
	w.send(s, up(9, 1), end(1, snapshot, incomplete))
	w.hears(s, ack{1, 0}, ack{1, 1})
	w.has(9)
}

func TestFrontendsOfAnotherStateStayUntilSourcesAreComplete(t *testing.T) {
	for name, m := range map[string]*memory{
		"another state": {state: "before"}, "nothing is known": {}, "unreadable": {err: errors.New("corrupt")},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.memory = m
			for _, port := range []uint16{6, 7, 8, 9} {
				w.kernel.have[key(port)] = up(port, 1).Upsert
			}
			was := m.state
			w.start(nil)
			s := w.next()
			w.send(s, up(1, 1), up(2, 2), up(9, 2), end(1, snapshot, incomplete))
			w.hears(s, ack{1, 0}, ack{1, 1})
			w.has(1, 2, 6, 7, 8, 9)
			if st := w.f.Status(); st.Earlier != 3 {
				t.Errorf("%d frontends of an earlier state, want 3", st.Earlier)
			}
			// frontends that the new state sent or removed belong to it
			w.send(s, down(2), down(8), end(2, incomplete))
			w.hears(s, ack{2, 1}, ack{2, 2})
			w.has(1, 6, 7, 9)
			// also in another snapshot of it
			close(s.down)
			s = w.next()
			w.send(s, up(9, 2), end(9, snapshot, incomplete, run("b")))
			w.hears(s, ack{9, 0}, ack{9, 9})
			w.has(6, 7, 9)
			if m.state != was {
				t.Errorf("the saved state is %q", m.state)
			}
			// but not in a process without this state
			w.stop()
			w.start(nil)
			s = w.next()
			w.send(s, up(9, 2), end(10, snapshot, incomplete, run("b")))
			w.hears(s, ack{10, 0}, ack{10, 10})
			w.has(6, 7, 9)
			w.send(s, up(7, 1), end(11, run("b")))
			w.hears(s, ack{11, 10}, ack{11, 11})
			w.has(7, 9)
			if m.state != "s" || w.f.Status().Earlier != 0 {
				t.Errorf("the saved state is %q, and %d frontends are of an earlier one", m.state, w.f.Status().Earlier)
			}
		})
	}
}

func TestStreamGoesOnBehindTheLastBarrier(t *testing.T) {
	w := newWorld(t).start(nil)
	s := w.next()
	w.send(s, up(1, 1), end(1, snapshot))
	w.hears(s, ack{1, 0}, ack{1, 1})
	w.send(s, up(2, 2)) // without its barrier
	close(s.down)
	s = w.next()
	if want := (Subscription{Name: "datapath", Incarnation: "a", Seq: 1}); s.sub != want {
		t.Errorf("subscribed with %+v, want %+v", s.sub, want)
	}
	if st := w.f.Status(); st.Connected || !errors.Is(st.Err, errCut) {
		t.Errorf("status %+v, want the reason", st)
	}
	w.send(s, up(3, 3), end(2))
	w.hears(s, ack{2, 0}, ack{2, 2})
	w.has(1, 3)
}

// TestStreamBeginsAnewAfterAnUnacknowledgedEnding: a resumed stream might bring no barrier with which the end of
// sockets could be acknowledged.
func TestStreamBeginsAnewAfterAnUnacknowledgedEnding(t *testing.T) {
	e := &ender{began: make(chan struct{}), let: make(chan error)}
	w := newWorld(t).start(e)
	s := w.next()
	w.send(s, up(1, 1), end(1, snapshot))
	w.hears(s, ack{1, 0})
	<-e.began
	close(s.down)
	s = w.next()
	if s.sub.Incarnation != "" {
		t.Errorf("subscribed with %+v", s.sub)
	}
	w.send(s, up(1, 1), end(1, snapshot))
	w.hears(s, ack{1, 0})
	<-e.began
	e.let <- nil
	w.hears(s, ack{1, 1})
}

func TestBarrierThatCannotBeBeginsAnew(t *testing.T) {
	for name, bad := range map[string]frontend.Step{
		"an earlier one":    end(1),
		"the same":          end(2),
		"another run":       end(3, run("b")),
		"another state":     end(3, state("z")),
		"a second snapshot": end(3, snapshot),
		"without a state":   end(3, state("")),
		"without a run":     end(3, run("")),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t).start(nil)
			s := w.next()
			w.send(s, up(1, 1), end(2, snapshot))
			w.hears(s, ack{2, 0}, ack{2, 2})
			w.send(s, down(1), bad)
			again := w.next()
			if again.sub.Incarnation != "" {
				t.Errorf("subscribed with %+v", again.sub)
			}
			w.has(1)
			if st := w.f.Status(); !errors.Is(st.Err, errProtocol) {
				t.Errorf("status %+v", st)
			}
		})
	}
	t.Run("of a stream that goes on elsewhere", func(t *testing.T) {
		w := newWorld(t).start(nil)
		s := w.next()
		w.send(s, up(1, 1), end(2, snapshot))
		w.hears(s, ack{2, 0}, ack{2, 2})
		close(s.down)
		s = w.next()
		w.send(s, down(1), end(3, run("b")))
		if s = w.next(); s.sub.Incarnation != "" {
			t.Errorf("subscribed with %+v", s.sub)
		}
		w.has(1)
	})
}

func TestWhatTheKernelDoesNotTakeIsSentAgain(t *testing.T) {
	w := newWorld(t).start(nil)
	s := w.next()
	w.kernel.mu.Lock()
	w.kernel.fail = errors.New("no map")
	w.kernel.mu.Unlock()
	w.send(s, up(1, 1), end(2, snapshot))
	s = w.next()
	if s.sub.Incarnation != "" {
		t.Errorf("subscribed with %+v", s.sub)
	}
	w.send(s, up(1, 1), end(2, snapshot))
	w.hears(s, ack{2, 0}, ack{2, 2})
	w.has(1)
}

func TestRefusedFrontendsAreReportedUntilTheyAreSentAgain(t *testing.T) {
	w := newWorld(t)
	w.kernel.room = 2
	w.start(nil)
	s := w.next()
	bad := key(5)
	w.send(s, up(1, 1), up(2, 2), up(3, 3),
		frontend.Step{Refuse: &frontend.Refusal{Key: bad, Err: errors.New("malformed")}}, end(1, snapshot))
	const room = "map sl_fe4: 1 elements needed, 0 free, at most 0 for one list"
	w.hears(s, refusal{key(3), room}, refusal{bad, "malformed"}, ack{1, 0}, ack{1, 1})
	want := []string{"10.96.0.1:3/tcp: " + room, "10.96.0.1:5/tcp: malformed"}
	if got := w.f.Status().Refused(); !reflect.DeepEqual(got, want) {
		t.Errorf("refused %q, want %q", got, want)
	}
	w.send(s, down(3), up(5, 5), up(5, 1), down(1), end(2))
	w.hears(s, refusal{key(5), room}, ack{2, 1})
	// the removal freed space: the service learns that from a new subscription
	again := w.next()
	w.has(2, 5)
	w.send(again, up(2, 2), up(5, 1), end(2, snapshot))
	w.hears(again, ack{2, 0}, ack{2, 2})
	if got := w.f.Status().Refused(); len(got) != 0 {
		t.Errorf("refused %q", got)
	}
}

func TestSyncedIsAfterTheFirstSnapshot(t *testing.T) {
	w := newWorld(t).start(nil)
	s := w.next()
	w.send(s, up(1, 1))
	select {
	case <-w.f.Synced():
		t.Fatal("synced before the snapshot was complete")
	default:
	}
	if st := w.f.Status(); st.Complete {
		t.Errorf("status %+v", st)
	}
	w.send(s, end(1, snapshot))
	select {
	case <-w.f.Synced():
	case <-time.After(patience):
		t.Fatal("not synced")
	}
	w.hears(s, ack{1, 0}, ack{1, 1})
}

// TestFreedFrontendsAreSentAgain: a frontend that the kernel refused because the key was in use is sent again by a new
// subscription, which tells the service that it is enforced.
func TestFreedFrontendsAreSentAgain(t *testing.T) {
	w := newWorld(t)
	w.kernel.room = 1
	w.start(nil)
	s := w.next()
	w.send(s, up(1, 1), up(2, 2), end(7, snapshot))
	w.hears(s, refusal{key(2), "map sl_fe4: 1 elements needed, 0 free, at most 0 for one list"})
	w.signal(w.freed)
	again := w.next()
	if again.sub != (Subscription{Name: "datapath"}) {
		t.Errorf("subscribed with %+v, want everything from the beginning", again.sub)
	}
}

// TestFrontendsWithoutRoomAreTriedWhenNumbersAreFree: after the kernel refused a frontend, no Service changes, and IDs
// of removed frontends become free later.
func TestFrontendsWithoutRoomAreTriedWhenNumbersAreFree(t *testing.T) {
	w := newWorld(t)
	w.kernel.room = 1
	w.start(nil)
	s := w.next()
	w.send(s, up(1, 1), up(2, 2), end(7, snapshot))
	w.hears(s, refusal{key(2), "map sl_fe4: 1 elements needed, 0 free, at most 0 for one list"}, ack{7, 0}, ack{7, 7})
	w.transactions(2) // of the snapshot, and an attempt after the sockets have ended
	w.signal(w.room)
	w.transactions(3)
	w.has(1) // still no space
	w.kernel.mu.Lock()
	w.kernel.room = 2
	w.kernel.mu.Unlock()
	w.signal(w.room)
	w.next() // reports the frontend to the service
	w.has(1, 2)
}
