// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frontendstream

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/frontend"
)

// unreadable returns an update of a frontend that the datapath cannot decode.
func unreadable(port uint16) frontend.Step {
	return frontend.Step{Refuse: &frontend.Refusal{Key: key(port), Err: errors.New("malformed")}}
}

// leads reports whether the kernel has a frontend, and whether it has a backend.
func (w *world) leads(port uint16) (there, leads bool) {
	w.kernel.mu.Lock()
	defer w.kernel.mu.Unlock()
	f := w.kernel.have[key(port)]
	return f != nil, f != nil && len(f.Inside.Backends) > 0
}

// TestUnreadableFrontendIsClosed: some of its backends may have been removed. In a snapshot it is kept, not removed as
// missing. A new one is not created.
func TestUnreadableFrontendIsClosed(t *testing.T) {
	w := newWorld(t)
	w.memory.state = "s"
	for _, port := range []uint16{1, 2, 3} {
		w.kernel.have[key(port)] = up(port, 1).Upsert
	}
	w.start(nil)
	s := w.next()
	w.send(s, up(1, 1), unreadable(2), unreadable(8), end(1, snapshot))
	w.hears(s, refusal{key(2), "malformed"}, refusal{key(8), "malformed"}, ack{1, 0}, ack{1, 1})
	w.has(1, 2)
	if there, leads := w.leads(2); !there || leads {
		t.Errorf("in a snapshot: it is there: %t, with a backend: %t", there, leads)
	}
	w.send(s, unreadable(1), up(2, 2), end(2))
	w.hears(s, refusal{key(1), "malformed"}, ack{2, 1}, ack{2, 2})
	if there, leads := w.leads(1); !there || leads {
		t.Errorf("later: it is there: %t, with a backend: %t", there, leads)
	}
	if there, leads := w.leads(2); !there || !leads {
		t.Errorf("sent again: it is there: %t, with a backend: %t", there, leads)
	}
}

// TestRemovedFrontendIsNoRefusal: a removed frontend is not reported as refused, even if it was invalid earlier in the
// same batch.
func TestRemovedFrontendIsNoRefusal(t *testing.T) {
	w := newWorld(t).start(nil)
	s := w.next()
	w.send(s, up(1, 1), unreadable(2), down(2), end(1, snapshot))
	w.hears(s, ack{1, 0}, ack{1, 1})
	if got := w.f.Status().Refused(); len(got) != 0 {
		t.Errorf("refused %q", got)
	}
}

// TestFrontendThatASnapshotDoesNotNameIsNotWrittenLater: a frontend that did not fit in the previous stream, and is
// missing in the snapshot, is not written later.
func TestFrontendThatASnapshotDoesNotNameIsNotWrittenLater(t *testing.T) {
	w := newWorld(t)
	w.kernel.room = 1
	w.start(nil)
	s := w.next()
	w.send(s, up(1, 1), up(2, 2), end(1, snapshot))
	w.hears(s, refusal{key(2), "map sl_fe4: 1 elements needed, 0 free, at most 0 for one list"}, ack{1, 0}, ack{1, 1})
	close(s.down)
	s = w.next()
	w.send(s, up(1, 1), end(5, snapshot, run("b"))) // another run: frontend 2 was deleted meanwhile
	w.hears(s, ack{5, 5})
	w.send(s, down(1), end(6, run("b")))
	w.hears(s, ack{6, 5}, ack{6, 6})
	w.send(s, end(7, run("b")))
	w.hears(s, ack{7, 7})
	w.has()
}

// TestBarrierOfTheResumedSequenceIsRefused: the first barrier of a resumed stream must have a higher number than the
// last acknowledged barrier.
func TestBarrierOfTheResumedSequenceIsRefused(t *testing.T) {
	w := newWorld(t).start(nil)
	s := w.next()
	w.send(s, up(1, 1), end(2, snapshot))
	w.hears(s, ack{2, 0}, ack{2, 2})
	close(s.down)
	s = w.next()
	w.send(s, down(1), end(2))
	if s = w.next(); s.sub.Incarnation != "" {
		t.Errorf("subscribed with %+v", s.sub)
	}
	w.has(1)
}

// TestCapacityIsInEachSubscription: each subscription contains the capacity, because the service divides it.
func TestCapacityIsInEachSubscription(t *testing.T) {
	w := newWorld(t)
	c := frontend.Capacity{Frontends: 1, Backends: 2, Members: 3, BackendsPerList: 4}
	w.follow(Options{Capacity: c})
	for range 2 {
		s := w.next()
		if s.sub.Capacity != c {
			t.Errorf("subscribed with %+v", s.sub)
		}
		close(s.down)
	}
}

// follow starts a follower of the world with other options.
func (w *world) follow(o Options) {
	ctx, cancel := context.WithCancel(w.t.Context())
	o.Name, o.Service, o.Kernel, o.Log = "datapath", w.svc, w.kernel, log.Discard()
	w.f = New(o)
	var work sync.WaitGroup
	work.Go(func() { _ = w.f.Run(ctx) })
	w.t.Cleanup(func() { cancel(); work.Wait() })
}

// forgetful is a memory that cannot save at first.
type forgetful struct {
	memory
	fails int
}

func (m *forgetful) Save(state string) error {
	if m.fails > 0 {
		m.fails--
		return errors.New("the disk is full")
	}
	return m.memory.Save(state)
}

// TestStateThatCannotBeSavedIsSavedLater: until then the next process would not know which state the kernel's frontends
// belong to.
func TestStateThatCannotBeSavedIsSavedLater(t *testing.T) {
	w := newWorld(t)
	m := &forgetful{fails: 2}
	w.follow(Options{Memory: m})
	s := w.next()
	w.send(s, up(1, 1), end(1, snapshot))
	w.hears(s, ack{1, 0}, ack{1, 1})
	if st := w.f.Status(); st.Unsaved == "" {
		t.Error("the status does not say that the name of the state is not saved")
	}
	for seq := range uint64(2) {
		w.send(s, end(2+seq))
		w.hears(s, ack{2 + seq, 2 + seq})
	}
	if saved, err := m.Load(); saved != "s" || err != nil || w.f.Status().Unsaved != "" {
		t.Errorf("saved %q, %v; Unsaved is %q", saved, err, w.f.Status().Unsaved)
	}
}

// away is a service that is unreachable for some calls.
type away struct {
	*service
	fails int
}

func (a *away) Subscribe(ctx context.Context, sub Subscription) (Stream, error) {
	if a.fails > 0 {
		a.fails--
		return nil, errors.New("connection refused")
	}
	return a.service.Subscribe(ctx, sub)
}

// TestRecoveredFrontendsAreSentAtOnce: frontends are requested again at once after a recovery, however long the
// previous pauses were.
func TestRecoveredFrontendsAreSentAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		ctx, cancel := context.WithCancel(t.Context())
		w.f = New(Options{
			Name: "datapath", Service: &away{w.svc, 10}, Kernel: w.kernel, Freed: w.freed, Log: log.Discard(),
		})
		var work sync.WaitGroup
		work.Go(func() { _ = w.f.Run(ctx) })
		defer func() { cancel(); work.Wait() }()
		<-w.svc.subscribed
		began := time.Now()
		w.signal(w.freed)
		<-w.svc.subscribed
		if took := time.Since(began); took > subscription.First {
			t.Errorf("the next subscription after %v", took)
		}
	})
}

// model is the desired state of the service, and how it is sent.
type model struct {
	want    map[uint16]byte   // backend of each frontend; 0: cannot be decoded
	changed map[uint16]uint64 // barrier after the last change of each
	seq     uint64
}

func (m *model) step(port uint16) frontend.Step {
	switch b, ok := m.want[port]; {
	case !ok:
		return down(port)
	case b == 0:
		return unreadable(port)
	default:
		return up(port, b)
	}
}

// steps returns the steps of a stream that starts after a barrier; 0: with everything.
func (m *model) steps(behind uint64) (steps []frontend.Step) {
	for port := range uint16(10) {
		_, wanted := m.want[port]
		if behind == 0 && wanted || behind > 0 && m.changed[port] > behind {
			steps = append(steps, m.step(port))
		}
	}
	return steps
}

// TestKernelHasWhatTheServiceSaysAfterAnyFailure ends streams, makes the kernel fail or run out of space, and sends
// invalid frontends, in random order. When everything has settled, the kernel has exactly the desired frontends that
// fit.
func TestKernelHasWhatTheServiceSaysAfterAnyFailure(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 60 {
		synctest.Test(t, func(t *testing.T) { play(t, r) })
	}
}

// play runs one service with its failures.
func play(t *testing.T, r *rand.Rand) {
	w := newWorld(t)
	w.kernel.room = 4
	w.memory.state = "s"
	for range r.IntN(4) {
		port := uint16(r.IntN(10))
		w.kernel.have[key(port)] = up(port, byte(1+r.IntN(3))).Upsert
	}
	w.start(nil)
	defer w.stop()
	m := &model{want: make(map[uint16]byte), changed: make(map[uint16]uint64)}
	var s *stream
	// settle waits until everything has happened, and answers each subscription, until none is left.
	settle := func() {
		for {
			synctest.Wait()
			if s != nil {
				for len(s.up) > 0 {
					<-s.up
				}
			}
			select {
			case next := <-w.svc.subscribed:
				s = next
				m.seq++
				behind := s.sub.Seq
				last := end(m.seq)
				if behind == 0 {
					last = end(m.seq, snapshot)
				}
				s.down <- append(m.steps(behind), last)
			case <-time.After(5 * time.Second):
				return
			}
		}
	}
	settle()
	for range 30 {
		switch r.IntN(6) {
		case 0:
			close(s.down)
		case 1:
			w.kernel.mu.Lock()
			w.kernel.fail = errors.New("no memory")
			w.kernel.mu.Unlock()
		case 2:
			w.kernel.mu.Lock()
			w.kernel.room = 1 + r.IntN(8)
			w.kernel.mu.Unlock()
		default:
			m.seq++
			behind := m.seq - 1
			for range 1 + r.IntN(4) {
				port := uint16(r.IntN(10))
				switch r.IntN(5) {
				case 0, 1:
					delete(m.want, port)
				case 2:
					m.want[port] = 0
				default:
					m.want[port] = byte(1 + r.IntN(3))
				}
				m.changed[port] = m.seq
			}
			s.down <- append(m.steps(behind), end(m.seq))
		}
		settle()
	}
	// The last failure, and a change after it.
	w.kernel.mu.Lock()
	w.kernel.fail = nil
	w.kernel.mu.Unlock()
	m.seq++
	s.down <- []frontend.Step{end(m.seq)}
	settle()
	refused := w.f.Status().Refusals
	for port := range uint16(10) {
		there, leads := w.leads(port)
		b, wanted := m.want[port]
		_, says := refused[key(port)]
		switch {
		case !wanted && there:
			t.Errorf("the kernel has %d, which the service does not want", port)
		case !wanted && says:
			t.Errorf("%d is refused, and the service does not want it", port)
		case wanted && b == 0 && (leads || !says):
			t.Errorf("%d cannot be decoded: it has backends: %t, it is refused: %t", port, leads, says)
		case wanted && b != 0 && !says && !leads:
			t.Errorf("%d is neither in the kernel nor refused", port)
		case wanted && b != 0 && says && there:
			t.Errorf("%d is in the kernel and refused: %s", port, refused[key(port)])
		}
		w.kernel.mu.Lock()
		if f := w.kernel.have[key(port)]; wanted && b != 0 && f != nil &&
			f.Inside.Backends[0] != up(port, b).Upsert.Inside.Backends[0] {
			t.Errorf("%d has backends %v, want backend %d", port, f.Inside.Backends, b)
		}
		w.kernel.mu.Unlock()
	}
}
