// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// world is a set of subjects, which is all that the steps of this test contain.
type world map[identity.Numeric]bool

func (w world) apply(ev policytable.Step) {
	switch x := ev.(type) {
	case policytable.BindSubject:
		w[x.Subject] = true
	case policytable.RemoveSubject:
		delete(w, x.Subject)
	}
}

func (w world) snapshot() []policytable.Step {
	var all []policytable.Step
	for n := range w {
		all = append(all, policytable.BindSubject{Subject: n})
	}
	return all
}

// reader is a subscriber that is sometimes disconnected.
type reader struct {
	name    string
	session *Session
	mine    world
	fresh   world // from an incomplete snapshot
	seq     uint64
	in      Incarnation
}

func TestReadersThatComeAndGoSeeTheSame(t *testing.T) {
	seed := [2]uint64{rand.Uint64(), rand.Uint64()}
	r := rand.New(rand.NewPCG(seed[0], seed[1]))
	t.Logf("seed %v", seed)
	// These limits are so small that every seed disconnects about 50 subscribers or more. A session of this test
	// lasts only a few changes, so larger limits would rarely disconnect one.
	limits := Limits{Message: 150, Resume: 1500, Behind: 2000, Unacked: 5}
	l := NewLog(limits)
	truth, revision := world{}, uint64(0)
	readers := []*reader{{name: "a"}, {name: "b"}, {name: "c"}}
	cut, resumed, anew := 0, 0, 0
	nothing, cancel := context.WithCancel(t.Context())
	cancel() // Next returns pending messages
	for step := range 20_000 {
		who := readers[r.IntN(len(readers))]
		switch r.IntN(6) {
		case 0, 1: // a change
			var events []policytable.Step
			for range r.IntN(5) {
				var ev policytable.Step = policytable.RemoveSubject{Subject: identity.Numeric(r.IntN(20))}
				if r.IntN(2) == 0 {
					ev = policytable.BindSubject{Subject: identity.Numeric(r.IntN(20))}
				}
				truth.apply(ev)
				events = append(events, ev)
			}
			revision++
			l.Append(events, Barrier{Policy: revision})
		case 2: // connects
			if who.session != nil {
				continue
			}
			s, ok := l.Subscribe(Subscriber{Name: who.name, Incarnation: who.in, Seq: who.seq}, Barrier{Policy: revision}, truth.snapshot)
			who.session = s
			if ok {
				resumed++
			} else {
				anew++
				who.fresh = world{}
			}
		case 3: // the reader disconnects, or is removed
			if who.session == nil {
				continue
			}
			who.session.Close()
			who.session, who.fresh = nil, nil
			if r.IntN(4) == 0 {
				who.in, who.seq = Incarnation{}, 0
			}
		default: // the reader reads, and acknowledges most of the time
			if who.session == nil {
				continue
			}
			for range r.IntN(8) {
				m, err := who.session.Next(nothing)
				if errors.Is(err, context.Canceled) {
					if who.fresh == nil && who.mine != nil && !maps.Equal(who.mine, truth) {
						t.Fatalf("step %d: %s has read everything but has %v, want %v", step, who.name, who.mine, truth)
					}
					break
				}
				if err != nil {
					if !errors.Is(err, ErrSlow) {
						t.Fatal(err)
					}
					cut++
					who.session.Close()
					who.session, who.fresh = nil, nil
					break
				}
				if m.Seq <= who.seq || who.fresh == nil && m.Seq != who.seq+1 {
					t.Fatalf("step %d: %s had message %d but gets %d", step, who.name, who.seq, m.Seq)
				}
				target := who.mine
				if who.fresh != nil {
					target = who.fresh
				}
				for _, ev := range m.Steps {
					target.apply(ev)
				}
				if m.Complete {
					who.mine, who.fresh = who.fresh, nil
				}
				if who.fresh == nil {
					who.in, who.seq = l.Incarnation(), m.Seq
				}
				if r.IntN(5) > 0 {
					if err := who.session.Ack(m.Seq); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		if f := l.Figures(); f.Weight > limits.Behind+5*limits.Message {
			t.Fatalf("step %d: the log keeps %d", step, f.Weight)
		}
	}
	if cut == 0 || resumed == 0 || anew == 0 {
		t.Errorf("%d were disconnected, %d resumed, %d started again", cut, resumed, anew)
	}
}

func TestAcknowledgementIsOfWhatWasSent(t *testing.T) {
	l := NewLog(Defaults())
	s, _ := l.Subscribe(Subscriber{Name: "a"}, Barrier{}, world{}.snapshot)
	if err := s.Ack(1); !errors.Is(err, failure.ErrAck) {
		t.Errorf("nothing was sent: %v", err)
	}
	m, err := s.Next(t.Context())
	if err != nil || !m.Complete || m.Barrier == nil {
		t.Fatalf("an empty snapshot: %+v, %v", m, err)
	}
	if err := s.Ack(m.Seq); err != nil {
		t.Error(err)
	}
	if err := s.Ack(m.Seq - 1); err != nil {
		t.Errorf("an old one: %v", err)
	}
}

func TestBarrierOfAResumedSubscriberCounts(t *testing.T) {
	l := NewLog(Defaults())
	s, _ := l.Subscribe(Subscriber{Name: "a"}, Barrier{Policy: 7}, world{}.snapshot)
	m, err := s.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.Close() // before it could acknowledge everything
	if _, ok := l.Subscribe(Subscriber{Name: "a", Incarnation: l.Incarnation(), Seq: m.Seq}, Barrier{Policy: 7}, nil); !ok {
		t.Fatal("not resumed")
	}
	states, _ := l.States()
	if fmt.Sprint(states[0].Enforced.Policy, states[0].Behind) != "7 0" {
		t.Errorf("state: %+v", states[0])
	}
}

// bound returns a step with the weight of n sources.
func bound(n int) []policytable.Step {
	return []policytable.Step{policytable.BindSubject{Subject: 300, Rules: make([][]policytable.Source, n)}}
}

func ended(s *Session) error {
	select {
	case <-s.Ended():
		return s.Err()
	default:
		return nil
	}
}

// TestSubscriberThatIsTooFarBehindIsDisconnectedWhileItIsSentAMessage: a subscriber does not read, so the service is
// blocked in Send and does not call Next. The subscriber is disconnected nevertheless.
func TestSubscriberThatIsTooFarBehindIsDisconnectedWhileItIsSentAMessage(t *testing.T) {
	l := NewLog(Limits{Message: 1000, Resume: 1000, Behind: 5000, Unacked: 100})
	s, _ := l.Subscribe(Subscriber{Name: "a"}, Barrier{}, world{}.snapshot)
	other, _ := l.Subscribe(Subscriber{Name: "b"}, Barrier{}, world{}.snapshot)
	for _, x := range []*Session{s, other} {
		if _, err := x.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 4 {
		l.Append(bound(500), Barrier{Policy: uint64(i + 1)})
		if m, err := other.Next(t.Context()); err != nil || other.Ack(m.Seq) != nil {
			t.Fatal(err)
		}
	}
	if err := ended(s); !errors.Is(err, ErrSlow) {
		t.Errorf("a has 8,000 to take, the limit is 5,000: ended with %v, want %v", err, ErrSlow)
	}
	states, _ := l.States()
	if states[0].Connected || !states[1].Connected || l.Figures().Cut != 1 {
		t.Errorf("a is connected: %t, b: %t, %d were disconnected", states[0].Connected, states[1].Connected, l.Figures().Cut)
	}
	if _, err := s.Next(t.Context()); !errors.Is(err, ErrSlow) {
		t.Errorf("the next message: %v, want %v", err, ErrSlow)
	}
}

func TestSubscriberThatStallsIsDisconnectedInTime(t *testing.T) {
	const stall = time.Minute
	take := func(t *testing.T, s *Session) uint64 {
		t.Helper()
		m, err := s.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return m.Seq
	}
	for what, test := range map[string]struct {
		do   func(t *testing.T, l *Log, s *Session)
		want string // the error, exactly one stall after do; empty: no error
	}{
		"takes nothing": {func(*testing.T, *Log, *Session) {}, "it took no message for 1m0s"},
		"does not take a change that comes late": {func(t *testing.T, l *Log, s *Session) {
			s.Ack(take(t, s)) //nolint:errcheck // cannot fail: the number was sent
			s.take()          //nolint:errcheck // nothing
			time.Sleep(10 * stall)
			l.Append(bound(1), Barrier{Policy: 1})
		}, "it took no message for 1m0s"},
		"is in one send": {func(t *testing.T, _ *Log, s *Session) {
			s.Ack(take(t, s)) //nolint:errcheck // cannot fail: the number was sent
		}, "it took no message for 1m0s"},
		"reads and does not acknowledge": {func(t *testing.T, _ *Log, s *Session) {
			take(t, s)
			s.take() //nolint:errcheck // nothing
		}, "it acknowledged nothing for 1m0s"},
		"acknowledged everything": {func(t *testing.T, _ *Log, s *Session) {
			s.Ack(take(t, s)) //nolint:errcheck // cannot fail: the number was sent
			s.take()          //nolint:errcheck // nothing
		}, ""},
		"is slow and goes on": {func(t *testing.T, l *Log, s *Session) {
			for i := range 5 {
				l.Append(bound(1), Barrier{Policy: uint64(i + 1)})
			}
			for range 6 {
				seq := take(t, s)
				time.Sleep(stall - 1)
				s.Check()
				s.Ack(seq) //nolint:errcheck // Err returns the error
			}
			s.take() //nolint:errcheck // nothing
		}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limits := Defaults()
				limits.Stall = stall
				l := NewLog(limits)
				s, _ := l.Subscribe(Subscriber{Name: "a"}, Barrier{}, world{}.snapshot)
				test.do(t, l, s)
				if err := ended(s); err != nil {
					t.Fatalf("ended early with %v", err)
				}
				time.Sleep(s.Check() - time.Nanosecond)
				s.Check()
				if err := ended(s); err != nil {
					t.Errorf("ended with %v, a nanosecond early", err)
				}
				time.Sleep(time.Nanosecond)
				s.Check()
				switch err := ended(s); {
				case test.want == "" && err != nil:
					t.Errorf("ended with %v, want it to stay connected", err)
				case test.want != "" && (!errors.Is(err, ErrSlow) || !strings.Contains(err.Error(), test.want)):
					t.Errorf("ended with %v, want %q", err, test.want)
				}
			})
		})
	}
}

// TestSubscriberOfAnotherRunBeginsAnew: a subscriber reports a number of an earlier run, which is also valid in this
// run. It gets a snapshot.
func TestSubscriberOfAnotherRunBeginsAnew(t *testing.T) {
	for what, in := range map[string]func(*Log) Incarnation{
		"of this run": (*Log).Incarnation, "of another run": func(*Log) Incarnation { return Incarnation{9} }, "of none": func(*Log) Incarnation { return Incarnation{} },
	} {
		l := NewLog(Defaults())
		s, _ := l.Subscribe(Subscriber{Name: "a"}, Barrier{}, world{}.snapshot)
		m, err := s.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		again, resumed := l.Subscribe(Subscriber{Name: "a", Incarnation: in(l), Seq: m.Seq}, Barrier{}, world{300: true}.snapshot)
		if want := what == "of this run"; resumed != want {
			t.Errorf("number %d %s: resumed %t, want %t", m.Seq, what, resumed, want)
			continue
		}
		if resumed {
			continue
		}
		if got, err := again.Next(t.Context()); err != nil || !got.Complete || len(got.Steps) != 1 || got.Seq <= m.Seq+1 {
			t.Errorf("number %d %s: starts with %+v, %v; want everything, with a number that does not follow", m.Seq, what, got,
				err)
		}
	}
}
