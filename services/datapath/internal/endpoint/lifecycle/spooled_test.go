// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// entry is an entry of the spool.
type entry struct {
	there atomic.Bool
	done  func() error // nil: succeeds
}

func (e *entry) spooled() endpoint.Spooled {
	return endpoint.Spooled{
		Waits: func() (bool, error) { return e.there.Load(), nil },
		Done: func() error {
			e.there.Store(false)
			if e.done != nil {
				return e.done()
			}
			return nil
		},
	}
}

// TestSpooledDeletionIsCarriedOut: the effect of an entry does not depend on clocks: an endpoint with a later timestamp
// may have been created before a clock was set back.
func TestSpooledDeletionIsCarriedOut(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	var e entry
	e.there.Store(true)
	e.done = func() error {
		// The entry is removed while the mutex is held: an entry spooled later is another deletion.
		if leave, ok := c.locks.LockWithin(t.Context(), s.Owner, time.Millisecond); ok {
			leave()
			t.Error("the entry is removed after the mutex is free, when another call may have created an endpoint")
		}
		return nil
	}
	if existed, err := c.DeleteSpooled(t.Context(), s.Owner, e.spooled()); !existed || err != nil {
		t.Errorf("deleted %v, %v", existed, err)
	}
	if e.there.Load() {
		t.Error("the entry is still there")
	}
	settle(t, c)
	m.holds(t, c, 0)

	// Without an endpoint, the entry is removed, too.
	e.there.Store(true)
	if existed, err := c.DeleteSpooled(t.Context(), s.Owner, e.spooled()); existed || err != nil || e.there.Load() {
		t.Errorf("owner without endpoint: %v, %v; the entry still exists: %v", existed, err, e.there.Load())
	}
}

// TestDeletionThatWasTakenBackLeavesTheNewEndpoint: the plugin removes an entry before it creates an endpoint of the
// same owner. A reader that has seen the entry must not delete the new endpoint.
func TestDeletionThatWasTakenBackLeavesTheNewEndpoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		c := m.start(t)
		s := m.wanted("a", 2)
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
		leave, err := c.locks.Lock(t.Context(), s.Owner) // as the creation does
		if err != nil {
			t.Fatal(err)
		}
		var e entry
		e.there.Store(true)
		ended := make(chan error, 1)
		go func() {
			existed, err := c.DeleteSpooled(t.Context(), s.Owner, e.spooled())
			if existed {
				err = errors.New("an endpoint was deleted")
			}
			ended <- err
		}()
		synctest.Wait() // the deletion waits for the creation
		e.there.Store(false)
		leave()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		m.holds(t, c, 1)
	})
}

func TestFailedSpooledDeletionKeepsItsEntry(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	for _, op := range deleteOps {
		var e entry
		e.there.Store(true)
		m.setFail(op, errTest)
		if _, err := c.DeleteSpooled(t.Context(), s.Owner, e.spooled()); !errors.Is(err, errTest) || !e.there.Load() {
			t.Errorf("%s: %v; the entry still exists: %v", op, err, e.there.Load())
		}
		m.setFail(op, nil)
	}
}
