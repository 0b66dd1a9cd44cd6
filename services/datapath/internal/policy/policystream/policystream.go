// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policystream defines the stream of the policy service as the datapath's core uses it: the
// subscription, the messages, and the replies.
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

// Subscription is the first message of a stream.
type Subscription struct {
	Name        string
	Incarnation string // of the last applied message; empty: none
	Seq         uint64
	Subjects    []uint32
	Locations   map[netip.Addr]uint32
	Enforced    *Enforced // the state of the service must not be older than this; nil: it may be
}

// Hold reports that all messages up to Seq have arrived, but are not enforced.
type Hold struct {
	Seq      uint64
	Revision uint64 // the revision that stays enforced
	Reason   string
}

// Nack reports that a table exceeds the capacity: the kernel enforces a part of it, or isolates the subject in its
// direction. Without a subject, Nack rejects the whole message.
type Nack struct {
	Seq     uint64
	Subject uint32
	Table   policytable.ID
	Reason  string
}

// Stream is one subscription to the service. One goroutine calls Recv, another the other methods.
type Stream interface {
	Recv() (policytable.Message, error)
	Subjects(add, remove []uint32) error
	Locate(add map[netip.Addr]uint32, remove []netip.Addr) error
	Ack(seq uint64) error
	Hold(h Hold) error
	Nack(n Nack) error
}

// Service is the source of tables. A stream ends with its ctx.
type Service interface {
	Subscribe(ctx context.Context, s Subscription) (Stream, error)
}

// Enforced is a policy state that the kernel enforces. A service with an older state has lost policies.
type Enforced struct {
	State    string   // name of the state; empty: nothing was enforced
	Revision uint64   // of the policies
	Sources  []string // sources that had policies
}

// Equal reports whether both are the same state.
func (e Enforced) Equal(o Enforced) bool {
	return e.State == o.State && e.Revision == o.Revision && slices.Equal(e.Sources, o.Sources)
}

// Memory saves the last enforced state, across restarts and reboots.
type Memory interface {
	// Load returns a zero Enforced if nothing was saved. After an error, the enforced state is
	// unknown.
	Load() (Enforced, error)
	// Save returns when the state is on stable storage.
	Save(e Enforced) error
}

// Health is the connection state of a subscription.
type Health struct {
	mu        sync.Mutex
	connected bool  // guarded by mu
	err       error // guarded by mu; why it is not connected
}

// State reports whether a subscription is open, and if not, why.
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

// Set updates the state and reports whether connected changed. A nil err keeps the last error.
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

// ErrWaits: the service sends no tables before it has received all policies once.
var ErrWaits = errors.New("no policy tables are sent until all policies are known")

// Told records the subjects and locations that one subscription has announced to the service.
type Told struct {
	Subjects  map[uint32]struct{}
	Locations map[netip.Addr]uint32
}

// maxTold bounds the changes in one message.
const maxTold = 4096

// Tell sends the changes of subjects and locations since the last call.
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
	// Send locations first, so that a table that needs them is complete at once.
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
