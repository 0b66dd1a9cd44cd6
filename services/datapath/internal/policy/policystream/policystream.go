// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policystream is the stream of the policy service as the core of the
// datapath sees it: what a subscription says, what comes, and how it is answered.
package policystream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/sluice-net/sluice/model/policytable"
)

// Subscription is how a stream begins.
type Subscription struct {
	Name        string
	Incarnation string // of the last message that was carried out; empty: none
	Seq         uint64
	Subjects    []uint32
	Locations   map[netip.Addr]uint32
	Enforced    *Enforced // that the service must not be behind; nil: nothing
}

// Hold says that everything up to a message has come and is not enforced.
type Hold struct {
	Seq      uint64
	Revision uint64 // that stays enforced
	Reason   string
}

// Nack says that a subject is closed in the direction of a table that has no room;
// without a subject, that the message is refused as a whole.
type Nack struct {
	Seq     uint64
	Subject uint32
	Table   policytable.ID
	Reason  string
}

// Stream is one subscription to the service. Recv is called by one goroutine,
// the rest by another.
type Stream interface {
	Recv() (policytable.Message, error)
	Subjects(add, remove []uint32) error
	Locate(add map[netip.Addr]uint32, remove []netip.Addr) error
	Ack(seq uint64) error
	Hold(h Hold) error
	Nack(n Nack) error
}

// Service is where the tables come from. The stream ends with ctx.
type Service interface {
	Subscribe(ctx context.Context, s Subscription) (Stream, error)
}

// Enforced is a policy state that the kernel enforces: what the service may not
// fall behind without a reason.
type Enforced struct {
	State    string   // its name; empty: nothing was enforced
	Revision uint64   // of the policies
	Sources  []string // that had policies
}

// Equal says whether they are the same.
func (e Enforced) Equal(o Enforced) bool {
	return e.State == o.State && e.Revision == o.Revision && slices.Equal(e.Sources, o.Sources)
}

// Memory keeps the state that was enforced last, over restarts and boots.
type Memory interface {
	// Load returns a zero Enforced if nothing was saved. After an error it
	// is not known what was enforced.
	Load() (Enforced, error)
	// Save returns when the state is on stable storage.
	Save(e Enforced) error
}

// Health is whether a subscription is open.
type Health struct {
	mu        sync.Mutex
	connected bool  // guarded by mu
	err       error // guarded by mu; why not
}

// State says whether one is open, and why not.
func (h *Health) State() (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.connected {
		return true, nil
	}
	if h.err == nil {
		return false, errors.New("policy: not connected yet")
	}
	return false, h.err
}

// Set notes it.
func (h *Health) Set(connected bool, err error) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed = h.connected != connected
	h.connected = connected
	if err != nil {
		h.err = err
	}
	return changed
}

// ErrWaits: the service sends no tables before it has every policy once.
var ErrWaits = errors.New("no endpoint gets its policies yet")

// Told is what the service has been told in one subscription.
type Told struct {
	Subjects  map[uint32]struct{}
	Locations map[netip.Addr]uint32
}

// maxTold is how many changes one message may have.
const maxTold = 4096

// Tell says what has changed of subjects and locations since.
func (t *Told) Tell(stream Stream, wanted func() (subjects map[uint32]struct{}, locations map[netip.Addr]uint32)) error {
	subjects, locations := wanted()
	var add, remove []uint32
	for id := range subjects {
		if _, ok := t.Subjects[id]; !ok {
			add = append(add, id)
		}
	}
	for id := range t.Subjects {
		if _, ok := subjects[id]; !ok {
			remove = append(remove, id)
		}
	}
	here, gone := map[netip.Addr]uint32{}, []netip.Addr(nil)
	for addr, id := range locations {
		if old, ok := t.Locations[addr]; !ok || old != id {
			here[addr] = id
		}
	}
	for addr := range t.Locations {
		if _, ok := locations[addr]; !ok {
			gone = append(gone, addr)
		}
	}
	// Locations first: a table that needs them is complete at once.
	if err := locate(stream, here, gone); err != nil {
		return err
	}
	slices.Sort(add)
	slices.Sort(remove)
	for len(add)+len(remove) > 0 {
		a, r := min(len(add), maxTold), min(len(remove), maxTold)
		if err := stream.Subjects(add[:a], remove[:r]); err != nil {
			return fmt.Errorf("change of subjects: %w", err)
		}
		add, remove = add[a:], remove[r:]
	}
	t.Subjects, t.Locations = subjects, locations
	return nil
}

func locate(stream Stream, here map[netip.Addr]uint32, gone []netip.Addr) error {
	addrs := slices.SortedFunc(maps.Keys(here), netip.Addr.Compare)
	slices.SortFunc(gone, netip.Addr.Compare)
	for len(addrs)+len(gone) > 0 {
		n, g := min(len(addrs), maxTold), min(len(gone), maxTold)
		part := make(map[netip.Addr]uint32, n)
		for _, addr := range addrs[:n] {
			part[addr] = here[addr]
		}
		if err := stream.Locate(part, gone[:g]); err != nil {
			return fmt.Errorf("change of locations: %w", err)
		}
		addrs, gone = addrs[n:], gone[g:]
	}
	return nil
}
