// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package poolevents

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/podrange"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// server is an API that records Events.
type server struct {
	made  []string // reasons and notes
	names map[string]bool
	times []time.Time
	away  atomic.Bool
}

func (s *server) RecordOnNode(_ context.Context, e Event) error {
	if s.away.Load() {
		return errors.New("away")
	}
	if !s.names[e.Name] { // an API server keeps an existing Event
		s.names[e.Name] = true
		s.made = append(s.made, e.Node+" "+e.Reason+": "+e.Note)
		s.times = append(s.times, time.Now())
	}
	return nil
}

// always is the Leadership of the only candidate.
type always struct{}

func (always) While(ctx context.Context, lead func(context.Context)) { lead(ctx) }

func note(s podrange.State, since time.Time, message string) string {
	return podrange.Note{State: s, Since: since, Message: message}.String()
}

// led runs steps while nodes lead. pass advances the clock of the test.
func led(t *testing.T, s *server, steps func(n *Nodes, pass func(time.Duration))) {
	t.Helper()
	n := New(s, always{}, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := n.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	steps(n, func(d time.Duration) { time.Sleep(d); synctest.Wait() })
	cancel()
	<-done
}

func TestEachChangeOfANodeIsOneEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{names: map[string]bool{}}
		began := time.Now()
		full := note(podrange.Exhausted, began, "full")
		led(t, s, func(n *Nodes, pass func(time.Duration)) {
			n.Upsert("b", "u2", "")
			for range 5 { // as each heartbeat of kubelet does
				n.Upsert("a", "u1", full)
				pass(time.Hour)
			}
			n.Upsert("a", "u1", note(podrange.Available, time.Now(), "free"))
			pass(time.Minute)
			n.Upsert("a", "u1", note(podrange.Exhausted, time.Now(), "full again"))
			pass(time.Minute)
			n.Upsert("c", "u3", `{"state":"full"}`)
			n.Upsert("d", "u4", note(podrange.Available, time.Now().Add(-2*time.Hour), "long ago"))
			pass(time.Minute)
		})
		want := []string{"a PodRangeExhausted: full", "a PodRangeAvailable: free", "a PodRangeExhausted: full again"}
		if !slices.Equal(s.made, want) {
			t.Errorf("Events %q, want %q", s.made, want)
		}
		// The next leader does not know which Events exist, and creates them again.
		led(t, s, func(n *Nodes, pass func(time.Duration)) {
			n.Upsert("a", "u1", full)
			pass(time.Minute)
			n.Upsert("a", "u5", full) // another Node of the same name
			pass(time.Minute)
		})
		if want = append(want, "a PodRangeExhausted: full"); !slices.Equal(s.made, want) {
			t.Errorf("Events %q, want %q", s.made, want)
		}
	})
}

func TestAnnotationThatChangesAllTheTimeMakesFewEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{names: map[string]bool{}}
		led(t, s, func(n *Nodes, pass func(time.Duration)) {
			for i := range 600 {
				state := podrange.Exhausted
				if i%2 == 1 {
					state = podrange.Available
				}
				n.Upsert("a", "u1", note(state, time.Now(), "text"))
				pass(time.Second)
			}
		})
		if len(s.made) < 15 || len(s.made) > 21 { // one every 30 s
			t.Errorf("%d Events in ten minutes", len(s.made))
		}
	})
}

func TestEventIsMadeOnceTheServerTakesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{names: map[string]bool{}}
		s.away.Store(true)
		led(t, s, func(n *Nodes, pass func(time.Duration)) {
			n.Upsert("a", "u1", note(podrange.Exhausted, time.Now(), "full"))
			n.Upsert("gone", "u2", note(podrange.Exhausted, time.Now(), "full"))
			pass(time.Hour)
			if st := n.Status(); st.Pending != 2 || st.Failed == 0 || st.Problem != "away" {
				t.Errorf("the status is %+v", st)
			}
			n.Delete("gone")
			s.away.Store(false)
			pass(time.Minute)
			if st := n.Status(); st.Pending != 0 || st.Done != 1 || st.Problem != "" {
				t.Errorf("the status is %+v", st)
			}
		})
		if want := []string{"a PodRangeExhausted: full"}; !slices.Equal(s.made, want) {
			t.Errorf("Events %q, want %q", s.made, want)
		}
	})
}

func TestEventFitsTheLimitsOfTheServer(t *testing.T) {
	x := &node{uid: "u", note: podrange.Note{
		State: podrange.Exhausted, Since: time.Now(), Message: strings.Repeat("ä", 2000),
	}}
	e := event(strings.Repeat("a-b.", 63), x)
	if len(e.Name) > 253 || len(e.Note) > 1024 || !strings.HasSuffix(e.Note, "…") {
		t.Errorf("a name of %d bytes and a note of %d", len(e.Name), len(e.Note))
	}
	x.note.Message = ""
	if event("a", x).Note == "" {
		t.Error("a note that the server refuses: it is empty")
	}
}

// TestDiskThatTakesNoWritesIsOneEvent: each failure of a disk leads to one Event, and its end to another, even if
// another process is elected in between.
func TestDiskThatTakesNoWritesIsOneEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{names: map[string]bool{}}
		full := map[string]string{"a": "since 10:00: the disk is full", "unknown": "since 10:00: the disk is full"}
		const failed = "a StorageFailed: since 10:00: the disk is full: " +
			"changes are not stored, and what cannot be stored is closed"
		led(t, s, func(n *Nodes, pass func(time.Duration)) {
			n.Upsert("a", "u1", "")
			n.Upsert("b", "u2", "")
			n.SetStorage(nil)
			pass(time.Minute)
			n.SetStorage(full)
			pass(time.Minute)
			n.SetStorage(full) // reported again
			pass(time.Hour)
		})
		led(t, s, func(n *Nodes, pass func(time.Duration)) { // another process leads now
			n.Upsert("a", "u1", "")
			n.SetStorage(full)
			pass(time.Minute)
			n.SetStorage(nil)
			pass(time.Minute)
			n.SetStorage(nil)
			pass(time.Minute)
			n.SetStorage(map[string]string{"a": "since 12:00: the disk is full"})
			pass(time.Minute)
			n.Delete("a")
			pass(time.Minute)
		})
		want := []string{
			failed, "a StorageAvailable: the disk can be written again", strings.Replace(failed, "10:00", "12:00", 1),
		}
		if !slices.Equal(s.made, want) {
			t.Errorf("Events %q, want %q", s.made, want)
		}
	})
}
