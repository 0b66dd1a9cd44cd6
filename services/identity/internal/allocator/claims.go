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
	byLabels keymutex.Mutexes[string] // one claim of a label set at a time, by their text
}

// maxAttempts bounds how many candidates one call tries. Candidates are free according to the mirror, so an attempt
// fails only if another node gave the same number to another label set first, or if the number is in quarantine.
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
		// A set that has, or had, a number keeps it if it can.
		candidate, used, done := known, 0, func() {}
		var beyond *QuotaError
		if known == 0 {
			// Without a free number the set may have one nonetheless: another
			// node may have given it one that we have not seen yet.
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
			// Other calls of this node are about to take the last ones, or not.
			return Claim{}, fmt.Errorf("%w: the last free numbers are being given to other label sets", ErrContended)
		case errors.Is(err, ErrOccupied) && candidate == 0:
			return Claim{}, &QuotaError{Kind: ErrExhausted, Used: used, Limit: identity.ClusterSize, Keys: s.view.topKeys()}
		case errors.Is(err, ErrOccupied):
			s.index.mu.Lock(opHold)
			s.index.candidates.occupy(candidate, time.Now().Add(s.cfg.Reconcile))
			s.index.mu.Unlock()
			known = 0
		case errors.Is(err, ErrSessionLost):
			// The store changed nothing. Run joins again and restores the holds; then this claim is tried again. Run
			// is woken last, so that it acts on the state noted here.
			s.conn.disconnected(err)
			s.conn.fail(err)
			if err := s.conn.await(bounded); err != nil {
				return Claim{}, s.conn.unavailable(ctx, labels, err)
			}
		case errors.Is(err, ErrNoSpace):
			s.conn.noSpace(err)
			return Claim{}, s.conn.unavailable(ctx, labels, err)
		case errors.Is(err, ErrUnavailable):
			s.conn.fail(err)
			return Claim{}, s.conn.unavailable(ctx, labels, err)
		default:
			return Claim{}, err
		}
	}
	return Claim{}, fmt.Errorf("%w: %d candidates for %s", ErrContended, maxAttempts, clip(labels.Text(), 200))
}

// candidate picks a number for a label set that has none, and keeps other calls of this node from picking it until
// done is called. It is the first free number from a start that depends on the set's hash. So two nodes rarely choose
// the same number for different sets, and a set that was collected usually gets its former number again. n is 0, and
// used is the number of taken ones, if none is free.
func (s *claims) candidate(labels label.Canonical) (n identity.Numeric, used int, done func()) {
	sum := labels.Hash()
	start := int(binary.BigEndian.Uint32(sum[:4]) % uint32(identity.ClusterSize))
	s.index.mu.Lock(opChoose)
	defer s.index.mu.Unlock()
	n, used = s.index.candidates.pick(start, time.Now(), func(n identity.Numeric) bool {
		_, known := s.index.mirror.known[n]
		return known || s.index.held.has(n)
	})
	return n, used, func() {
		s.index.mu.Lock(opChoose)
		defer s.index.mu.Unlock()
		s.index.candidates.drop(n)
	}
}
