// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/desired/subscription"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// Run keeps a subscription open and applies its messages, until ctx ends.
func (a *Applier) Run(ctx context.Context) error {
	if a.cfg.Memory != nil {
		var saver sync.WaitGroup
		saver.Go(func() { a.past.Save(ctx) })
		defer saver.Wait()
	}
	heard := false
	open := func(ctx context.Context) (err error) {
		heard, err = a.subscribe(ctx)
		return err
	}
	return subscription.Keep(ctx, open, func(err error) {
		if a.session.Set(false, err) || heard {
			a.log.Warn("policy subscription ended", log.Err(err))
		}
	})
}

// Synced is closed once the service has sent a complete state.
func (a *Applier) Synced() <-chan struct{} { return a.synced }

// subscription returns the first message of the next stream.
func (a *Applier) subscription() (policystream.Subscription, policystream.Told) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next.drop()
	if a.refused != "" {
		a.refused = ""
		a.setHeld("")
	}
	subjects, locations := a.endpoints.wanted()
	s := policystream.Subscription{
		Name: a.cfg.Name, Incarnation: a.incarnation, Seq: a.seq,
		Subjects: slices.Sorted(maps.Keys(subjects)), Locations: maps.Clone(locations),
		Enforced: a.past.Before(),
	}
	return s, policystream.Told{Subjects: subjects, Locations: locations}
}

// subscribe runs one stream. heard reports whether any message arrived.
func (a *Applier) subscribe(ctx context.Context) (heard bool, err error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	sub, told := a.subscription()
	stream, err := a.cfg.Service.Subscribe(ctx, sub)
	if err != nil {
		cancel()
		return false, fmt.Errorf("%w: %w", subscription.ErrAbsent, err)
	}
	messages, received := subscription.Receive(ctx, stream.Recv)
	grace := gracePeriods{wait: a.barrier}
	defer func() {
		cancel()
		<-received
		if grace.end() {
			a.draining() // for the next stream
		}
	}()
	// A stream that continues an earlier one may have no message to send.
	settled := time.NewTimer(time.Second)
	defer settled.Stop()
	tick := time.NewTicker(min(a.cfg.Retry, a.cfg.Linger))
	defer tick.Stop()
	s := &session{a: a, stream: stream, sub: sub}
	for {
		err := error(nil)
		select {
		case <-outer.Done():
			return s.heard, ctx.Err()
		case <-settled.C:
			a.opened()
		case r := <-messages:
			if err = r.Err; err == nil {
				err = s.take(ctx, r.Message)
			}
		case <-a.endpoints.wake:
			err = told.Tell(stream, a.interest)
		case <-tick.C:
			if err = told.Tell(stream, a.interest); err == nil {
				err = errors.Join(a.again(ctx), s.sayUnsaid())
			}
		case <-a.drain:
			grace.begin(ctx)
		case failed := <-grace.under:
			grace.passed(ctx)
			if failed != nil && ctx.Err() == nil {
				a.log.Error("grace period failed; retired tables are not freed yet", log.Err(failed))
				continue
			}
			err = a.again(ctx)
		}
		if err != nil {
			return s.heard, err
		}
	}
}

// opened records that a subscription is open.
func (a *Applier) opened() {
	if a.session.Set(true, nil) {
		a.log.Info("policy subscription open")
	}
}

// gracePeriods runs one grace period after the other, concurrently with all other work.
type gracePeriods struct {
	wait  func(context.Context) <-chan error
	under <-chan error // in progress; nil: none
	due   bool         // tables were retired meanwhile, so another grace period is needed
}

func (g *gracePeriods) begin(ctx context.Context) {
	if g.under != nil {
		g.due = true
		return
	}
	g.under = g.wait(ctx)
}

// passed starts the next grace period, if one is due.
func (g *gracePeriods) passed(ctx context.Context) {
	g.under = nil
	if g.due {
		g.due, g.under = false, g.wait(ctx)
	}
}

// end waits for the grace period in progress, and reports whether another is due.
func (g *gracePeriods) end() (due bool) {
	if g.under != nil {
		<-g.under
	}
	return g.due
}

// session is the state of one stream.
type session struct {
	a      *Applier
	stream policystream.Stream
	sub    policystream.Subscription
	heard  bool
	last   policytable.Message // without its steps
}

// take applies a message and replies to it.
func (s *session) take(ctx context.Context, m policytable.Message) error {
	if !s.heard {
		s.a.begin(s.sub, m)
		s.heard = true
		s.a.opened()
	} else if m.Incarnation != s.last.Incarnation || m.Seq != s.last.Seq+1 {
		s.a.reset()
		return policytable.Invalid("seq %d of %x follows %d of %x", m.Seq, m.Incarnation, s.last.Seq, s.last.Incarnation)
	}
	s.last = policytable.Message{Incarnation: m.Incarnation, Seq: m.Seq}
	nacks, err := s.a.apply(ctx, m)
	if err != nil {
		return err
	}
	for _, n := range nacks {
		if err := s.stream.Nack(n); err != nil {
			return err
		}
	}
	if s.a.refusing() {
		return nil
	}
	if revision, why := s.a.holding(); why != "" {
		return s.stream.Hold(policystream.Hold{Seq: m.Seq, Revision: revision, Reason: why})
	}
	if s.a.collecting() {
		return nil // nothing of it is in the kernel yet
	}
	if err := faultAck.Hit(ctx); err != nil {
		return err
	}
	return s.stream.Ack(m.Seq)
}

// sayUnsaid sends the Nacks since the last message.
func (s *session) sayUnsaid() error {
	s.a.mu.Lock()
	unsaid := s.a.unsaid
	s.a.unsaid = nil
	s.a.mu.Unlock()
	for _, n := range unsaid {
		if err := s.stream.Nack(n); err != nil {
			return err
		}
	}
	return nil
}

// barrier waits for a grace period in the background.
func (a *Applier) barrier(ctx context.Context) <-chan error {
	ch := make(chan error, 1)
	go func() { ch <- a.cfg.Kernel.Barrier(ctx) }()
	return ch
}

// begin starts a snapshot, unless the stream continues where the last one ended.
func (a *Applier) begin(sub policystream.Subscription, first policytable.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.model != nil && sub.Incarnation != "" && first.Incarnation == sub.Incarnation && first.Seq == sub.Seq+1 {
		return
	}
	a.next.begin()
}

// collecting reports whether a snapshot has begun and is not adopted.
func (a *Applier) collecting() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.next.collecting()
}

// reset makes the next stream begin with a snapshot.
func (a *Applier) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forgetStream()
}

// again retries what exceeded the capacity.
func (a *Applier) again(ctx context.Context) error {
	w := newWork(ctx)
	a.mu.Lock()
	a.History.Forget(a.cfg.Now())
	recovered, err := a.retry(w)
	a.mu.Unlock()
	if len(w.flips) > 0 && a.cfg.Changed != nil {
		a.cfg.Changed(w.flips)
	}
	switch {
	case err != nil:
		a.reset()
		return err
	case recovered:
		a.reset()
		return fmt.Errorf("tables that exceeded the capacity now fit: %w", subscription.ErrAnew)
	}
	return nil
}

// interest returns the current subscription.
func (a *Applier) interest() (subjects map[uint32]struct{}, locations map[netip.Addr]uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.endpoints.wanted()
}
