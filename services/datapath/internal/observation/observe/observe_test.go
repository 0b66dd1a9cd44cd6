// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/flow"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func add(r *Ring, from, to int) {
	for i := from; i < to; i++ {
		r.Add(flow.Event{Length: uint32(i), Time: time.Unix(int64(i), 0)})
	}
}

func TestReaderSeesEveryEventInOrder(t *testing.T) {
	r := NewRing()
	rd := r.Tail()
	add(r, 0, 100)
	for i := range uint32(100) {
		if e, missed, ok, err := rd.Next(t.Context(), false); !ok || err != nil || missed != 0 || e.Length != i {
			t.Fatalf("event %d: %+v, missed %d, %v, %v", i, e, missed, ok, err)
		}
	}
	if _, _, ok, err := rd.Next(t.Context(), false); ok || err != nil {
		t.Errorf("at the end: %v, %v", ok, err)
	}
}

func TestSlowReaderIsToldHowMuchItMissedAndWhere(t *testing.T) {
	r := NewRing()
	rd := r.Tail()
	add(r, 0, Size+10)
	e, missed, ok, err := rd.Next(t.Context(), false)
	if !ok || err != nil || missed != 10 || e.Length != 10 {
		t.Errorf("got %d after %d missed (%v, %v), want 10 after 10", e.Length, missed, ok, err)
	}
	if e, missed, _, _ := rd.Next(t.Context(), false); missed != 0 || e.Length != 11 {
		t.Errorf("then %d after %d missed", e.Length, missed)
	}
}

func TestReaderBeginsWhereItAsked(t *testing.T) {
	r := NewRing()
	add(r, 0, Size+100)
	for since, want := range map[int64]uint32{0: 100, 50: 100, 200: 200, Size + 99: Size + 99} {
		e, missed, ok, _ := r.Read(time.Unix(since, 0)).Next(t.Context(), false)
		if !ok || missed != 0 || e.Length != want {
			t.Errorf("since %d: event %d after %d missed, want %d", since, e.Length, missed, want)
		}
	}
}

func TestWaitingReaderIsWokenAndCanGiveUp(t *testing.T) {
	r := NewRing()
	rd := r.Tail()
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 2)
	go func() {
		e, _, ok, err := rd.Next(ctx, true)
		if err == nil && (!ok || e.Length != 7) {
			err = errors.New("woken without the event")
		}
		got <- err
		_, _, _, err = rd.Next(ctx, true)
		got <- err
	}()
	add(r, 7, 8)
	if err := <-got; err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

func TestEventsHaveIdsOfTheirOwn(t *testing.T) {
	seen := map[[16]byte]bool{}
	for range 2 { // two runs of the process
		ring := NewRing()
		for range Size + 10 {
			ring.Add(flow.Event{Type: flow.Drop})
		}
		for reader := ring.Read(time.Time{}); ; {
			e, _, ok, err := reader.Next(t.Context(), false)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if e.ID[6]>>4 != 8 || e.ID[8]>>6 != 2 {
				t.Fatalf("%x is not a UUID of version 8", e.ID)
			}
			if seen[e.ID] {
				t.Fatalf("two events have the id %x", e.ID)
			}
			seen[e.ID] = true
		}
	}
	if len(seen) != 2*Size {
		t.Errorf("%d ids, want %d", len(seen), 2*Size)
	}
}

func TestReaderGoesOnAfterAnEvent(t *testing.T) {
	r := NewRing()
	add(r, 0, 10)
	var ids [][16]byte
	for rd := r.Read(time.Time{}); len(ids) < 10; {
		e, _, _, err := rd.Next(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, e.ID)
	}
	rd, known := r.After(ids[4])
	if e, _, ok, _ := rd.Next(t.Context(), false); !known || !ok || e.Length != 5 {
		t.Errorf("known %v, then event %d, want 5", known, e.Length)
	}
	if rd, known = r.After(ids[9]); !known {
		t.Error("the last event is not known")
	}
	if _, _, ok, _ := rd.Next(t.Context(), false); ok {
		t.Error("an event after the last")
	}
	// Events that were overwritten meanwhile are counted as missed.
	rd, _ = r.After(ids[9])
	add(r, 10, Size+20)
	if e, missed, _, _ := rd.Next(t.Context(), false); missed != 10 || e.Length != 20 {
		t.Errorf("event %d after %d missed, want 20 after 10", e.Length, missed)
	}
	// Events of another run, and unassigned IDs, are not in this ring.
	other := NewRing()
	add(other, 100, 103)
	future := ids[3]
	binary.BigEndian.PutUint64(future[8:], 1<<63|1<<40)
	for name, id := range map[string][16]byte{"another run": ids[2], "the future": future, "nothing": {}} {
		rd, known := other.After(id)
		if e, _, _, _ := rd.Next(t.Context(), false); known || e.Length != 100 {
			t.Errorf("%s: known %v, begins with event %d, want the oldest, 100", name, known, e.Length)
		}
	}
}
