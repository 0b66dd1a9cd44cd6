// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"context"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Numbers are IDs of fronts, and of backends by family: IPv4, IPv6.
type Numbers struct {
	Fronts   map[uint32]struct{}
	Backends [families]map[uint32]struct{}
}

// NoNumbers returns an empty Numbers.
func NoNumbers() Numbers {
	n := Numbers{Fronts: map[uint32]struct{}{}}
	for fam := range families {
		n.Backends[fam] = map[uint32]struct{}{}
	}
	return n
}

// Name adds a front and a backend of a family. The maps must be created by NoNumbers.
func (n *Numbers) Name(front uint32, ipv6 bool, backend uint32) {
	fam := ip4
	if ipv6 {
		fam = ip6
	}
	n.Fronts[front], n.Backends[fam][backend] = struct{}{}, struct{}{}
}

// Users lists the IDs that are referenced outside the maps of services, by objects that rely on them: see socketend.
type Users interface {
	// Named returns all IDs that have been referenced since before the call. No new references are created to IDs that
	// were removed more than callTime ago.
	Named(ctx context.Context) (Numbers, error)
}

// Barrier waits until every program run that may have found removed elements has ended. After that, the elements of
// lists are free; IDs of fronts and backends stay in quarantine: see Collect.
func (m *Maps) Barrier(ctx context.Context) error {
	d, err := m.beginBarrier()
	if d == nil || err != nil {
		return err
	}
	passed := pin.GracePeriod(ctx)
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	m.store.endBarrier(d, passed == nil, m.now())
	return passed
}

// beginBarrier takes the elements removed so far; nil: none.
func (m *Maps) beginBarrier() (*departed, error) {
	if err := m.gate.Lock(); err != nil {
		return nil, err
	}
	defer m.gate.Unlock()
	s := m.store
	d := s.left
	if d.empty() {
		return nil, nil
	}
	s.left = &departed{}
	s.leaving = append(s.leaving, d)
	return d, nil
}

func (s *store) endBarrier(d *departed, passed bool, now time.Time) {
	s.leaving = slices.DeleteFunc(s.leaving, func(o *departed) bool { return o == d })
	if !passed {
		s.left.spans = append(s.left.spans, d.spans...)
		s.left.fronts = append(s.left.fronts, d.fronts...)
		for _, b := range d.backends {
			if b.left == d {
				b.left = s.left
				s.left.backends = append(s.left.backends, b)
			}
		}
		return
	}
	for _, sp := range d.spans {
		for i := range sp.N {
			s.storeMember(sp.Base+i, 0)
		}
		s.members.Give(sp)
	}
	for _, f := range d.fronts {
		s.resting = append(s.resting, &rest{since: now, front: f})
	}
	for _, b := range d.backends {
		if b.left == d {
			s.resting = append(s.resting, &rest{since: now, backend: b, left: d})
		}
	}
}

// callTime is the maximum time for which a call may use a selected backend without appearing in a listing of sockets:
// the program that selects the backend ends before the socket is connected, and only connected sockets are listed. This
// takes microseconds, or longer if the process gets no CPU.
const callTime = 5 * time.Second

// Collect frees the IDs of removed fronts and backends that users do not reference and that have been in quarantine for
// callTime; without users, after Options.Rest. It returns the number of freed IDs.
func (m *Maps) Collect(ctx context.Context, users Users) (int, error) {
	if err := m.Barrier(ctx); err != nil {
		return 0, err
	}
	waiting, err := m.waiting()
	if err != nil || len(waiting) == 0 {
		return 0, err
	}
	began := m.now()
	free := func(r *rest) bool { return began.Sub(r.since) >= m.rest }
	if users != nil {
		named, err := users.Named(ctx)
		if err != nil {
			return 0, err
		}
		free = func(r *rest) bool {
			if began.Sub(r.since) < callTime {
				return false
			}
			if r.front != nil {
				_, ok := named.Fronts[r.front.number]
				return !ok
			}
			_, ok := named.Backends[r.backend.family][r.backend.number]
			return !ok
		}
	}
	if err := m.gate.Lock(); err != nil {
		return 0, err
	}
	defer m.gate.Unlock()
	s, n := m.store, 0
	kept := s.resting[:0]
	for _, r := range s.resting {
		switch {
		case r.backend != nil && r.backend.left != r.left: // in use again, or removed once more
		case waiting[r] && free(r):
			s.free(r)
			n++
		default:
			kept = append(kept, r)
		}
	}
	clear(s.resting[len(kept):])
	s.resting = kept
	if s.short && n > 0 {
		s.short = false
		select {
		case m.freed <- struct{}{}:
		default:
		}
	}
	return n, nil
}

// waiting returns the IDs in quarantine.
func (m *Maps) waiting() (map[*rest]bool, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	waiting := make(map[*rest]bool, len(m.store.resting))
	for _, r := range m.store.resting {
		waiting[r] = true
	}
	return waiting, nil
}

func (s *store) free(r *rest) {
	if f := r.front; f != nil {
		s.clearFront(f.number)
		s.removed[frontKind].add(f.tenant, -1)
		s.fronts[f.number] = nil
		s.frontNumbers.Give(f.number)
		return
	}
	b := r.backend
	s.storeBackend(b.family, b.number, freeBackend(b.gen))
	s.removed[backendKind+b.family].add(b.tenant, -1)
	if s.backends[b.family][b.addr] == b {
		delete(s.backends[b.family], b.addr)
	}
	s.backendNumbers[b.family].Give(b.number)
}
