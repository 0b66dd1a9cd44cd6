// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-net/sluice/kit/deadline"
	"github.com/sluice-net/sluice/kit/keymutex"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// claims gets numbers for label sets from the store.
type claims struct {
	index    *index
	view     *View
	conn     *connection
	store    Store
	cfg      *Config
	byLabels keymutex.Mutexes[string] // serialises the claims of one label set, by the set's text
}

// maxAttempts is the maximum number of candidates that one call tries. A candidate is free according to the mirror. An
// attempt fails only if another node has just assigned the same number to another label set, or if the number is in
// quarantine.
const maxAttempts = 64

// claim gets the number of a label set from the store.
func (s *claims) claim(ctx context.Context, labels label.Canonical, known identity.Numeric) (Claim, error) {
	ctx, answer := deadline.Answerable(ctx)
	defer answer()
	bounded, cancel := context.WithTimeout(ctx, s.cfg.StoreTimeout)
	defer cancel()
	if err := s.conn.await(bounded); err != nil {
		return Claim{}, s.conn.unavailable(ctx, labels, err)
	}
	for range maxAttempts {
		// A label set that has or had a number keeps it if possible.
		candidate, used, done := known, 0, func() {}
		var beyond *QuotaError
		if known == 0 {
			// If no number is free, the label set may still have one: another node may just have assigned it.
			s.index.mu.Lock(opChoose)
			beyond = s.index.tenants.admit(&s.index.mirror, labels, time.Now())
			s.index.mu.Unlock()
			if beyond == nil {
				candidate, used, done = s.candidate(labels)
			}
		}
		c, err := s.store.Claim(bounded, labels, known, candidate)
		done()
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, ErrOccupied) && beyond != nil:
			beyond.Keys = s.view.topKeys()
			return Claim{}, beyond
		case errors.Is(err, ErrOccupied) && candidate == 0 && used < identity.ClusterSize:
			// Other calls of this node are about to take the last free numbers, but may fail.
			return Claim{}, fmt.Errorf("%w: the last free numbers are being allocated to other label sets", ErrContended)
		case errors.Is(err, ErrOccupied) && candidate == 0:
			return Claim{}, &QuotaError{Kind: ErrExhausted, Used: used, Limit: identity.ClusterSize, Keys: s.view.topKeys()}
		case errors.Is(err, ErrZone): // another zone is in use now, as the store's response tells
			known = 0
		case errors.Is(err, ErrOccupied):
			s.index.mu.Lock(opHold)
			s.index.candidates.occupy(candidate, time.Now().Add(s.cfg.Reconcile))
			s.index.mu.Unlock()
			known = 0
		case errors.Is(err, ErrSessionLost):
			// The store has changed nothing. Run joins again and restores the references, and then this
			// claim is tried again. Run is woken last, so that it sees the state recorded here.
			s.conn.disconnected(err)
			s.conn.fail(err)
			if err := s.conn.await(bounded); err != nil {
				return Claim{}, s.conn.unavailable(ctx, labels, err)
			}
		case errors.Is(err, ErrNoSpace):
			s.conn.noSpace(err)
			return Claim{}, s.conn.unavailable(ctx, labels, err)
		case errors.Is(err, ErrWaits): // the connection works
			return Claim{}, err
		case errors.Is(err, ErrUnavailable):
			s.conn.fail(err)
			return Claim{}, s.conn.unavailable(ctx, labels, err)
		default:
			return Claim{}, err
		}
	}
	return Claim{}, fmt.Errorf("%w: %d candidates for %s", ErrContended, maxAttempts, clip(labels.Text(), 200))
}

// candidate chooses a number for a label set that has none; no other call of this node chooses it until done is called.
// The search for a free number starts at an offset in the zone that depends on the hash of the label set. Therefore two
// nodes rarely choose the same number for different sets, and a collected set usually gets its former number again. If
// no number is free, n is 0, and used is the number of numbers in use.
func (s *claims) candidate(labels label.Canonical) (n identity.Numeric, used int, done func()) {
	sum, zone := labels.Hash(), s.store.Zone()
	start := zone.at(binary.BigEndian.Uint32(sum[:4]))
	s.index.mu.Lock(opChoose)
	defer s.index.mu.Unlock()
	n, used = s.index.candidates.pick(start, zone, time.Now(), func(n identity.Numeric) bool {
		_, known := s.index.mirror.known[n]
		return known || s.index.held.has(n)
	})
	return n, used, func() {
		s.index.mu.Lock(opChoose)
		defer s.index.mu.Unlock()
		s.index.candidates.drop(n)
	}
}
