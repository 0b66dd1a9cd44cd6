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

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// health is whether a subscription is open.
type health struct {
	mu        sync.Mutex
	connected bool  // guarded by mu
	err       error // guarded by mu; why not
}

func (h *health) state() (bool, error) {
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

func (h *health) set(connected bool, err error) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed = h.connected != connected
	h.connected = connected
	if err != nil {
		h.err = err
	}
	return changed
}

// Pauses between two subscriptions.
const (
	firstPause = 50 * time.Millisecond
	longPause  = 2 * time.Second
	// awayPause is that while no service can be connected to, which costs one
	// system call to find out: creations wait for the service to be back.
	awayPause = 100 * time.Millisecond
)

// errAway ends a subscription that did not begin, because nothing answers.
var errAway = errors.New("policy service away")

// errRecovered ends a subscription after tables found room that had been
// refused: the service learns it from a new one.
var errRecovered = errors.New("tables found room that had been refused")

// Run keeps a subscription open and does what comes, until ctx ends.
func (a *Applier) Run(ctx context.Context) error {
	if a.cfg.Memory != nil {
		var saver sync.WaitGroup
		saver.Go(func() { a.saver(ctx) })
		defer saver.Wait()
	}
	pause := firstPause
	for {
		began := a.cfg.Now()
		heard, err := a.subscribe(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if a.session.set(false, err) || heard {
			a.log.Warn("policy subscription ended", log.Err(err))
		}
		if a.cfg.Now().Sub(began) > longPause || errors.Is(err, errRecovered) {
			pause = firstPause // else what ends it may end the next one too
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
		pause = min(2*pause, longPause)
		if errors.Is(err, errAway) {
			pause = min(pause, awayPause)
		}
	}
}

// Synced is closed once the service has said everything.
func (a *Applier) Synced() <-chan struct{} { return a.synced }

// told is what the service has been told in one subscription.
type told struct {
	subjects  map[uint32]struct{}
	locations map[netip.Addr]uint32
}

// subscription is how the next stream begins.
func (a *Applier) subscription() (Subscription, told) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.dropNext()
	subjects, locations := a.wanted()
	s := Subscription{
		Name: a.cfg.Name, Incarnation: a.incarnation, Seq: a.seq,
		Subjects: slices.Sorted(maps.Keys(subjects)), Locations: maps.Clone(locations),
		Enforced: a.before(),
	}
	return s, told{subjects, locations}
}

// subscribe is one stream, from beginning to end. heard says whether anything
// came.
func (a *Applier) subscribe(ctx context.Context) (heard bool, err error) {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	sub, told := a.subscription()
	stream, err := a.cfg.Service.Subscribe(ctx, sub)
	if err != nil {
		cancel()
		return false, fmt.Errorf("%w: %w", errAway, err)
	}
	type received struct {
		m   policytable.Message
		err error
	}
	messages := make(chan received)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			m, err := stream.Recv()
			select {
			case messages <- received{m, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	var drained <-chan error // a grace period that is waited for
	var due bool             // another, for what was retired meanwhile
	defer func() {
		cancel()
		<-done
		if drained != nil {
			<-drained
		}
		if due {
			a.draining() // the next stream's
		}
	}()
	// A stream that goes on may have nothing to say.
	settled := time.NewTimer(time.Second)
	defer settled.Stop()
	open := func() {
		if a.session.set(true, nil) {
			a.log.Info("policy subscription open")
		}
	}
	tick := time.NewTicker(min(a.cfg.Retry, a.cfg.Linger))
	defer tick.Stop()
	var last policytable.Message // of this stream
	for {
		select {
		case <-outer.Done():
			return heard, ctx.Err()
		case <-settled.C:
			open()
		case r := <-messages:
			if r.err != nil {
				return heard, r.err
			}
			if !heard {
				a.begin(sub, r.m)
				heard = true
				open()
			} else if r.m.Incarnation != last.Incarnation || r.m.Seq != last.Seq+1 {
				a.reset()
				return heard, policytable.Invalid("seq %d of %x follows %d of %x", r.m.Seq, r.m.Incarnation, last.Seq, last.Incarnation)
			}
			last = policytable.Message{Incarnation: r.m.Incarnation, Seq: r.m.Seq}
			nacks, err := a.apply(ctx, r.m)
			if err != nil {
				return heard, err
			}
			for _, n := range nacks {
				if err := stream.Nack(n); err != nil {
					return heard, err
				}
			}
			if revision, why := a.holding(); why != "" {
				if err := stream.Hold(Hold{Seq: r.m.Seq, Revision: revision, Reason: why}); err != nil {
					return heard, err
				}
				continue
			}
			if a.collecting() {
				continue // nothing of it is in the kernel yet
			}
			if err := faultAck.Hit(ctx); err != nil {
				return heard, err
			}
			if err := stream.Ack(r.m.Seq); err != nil {
				return heard, err
			}
		case <-a.wake:
			if err := a.tell(stream, &told); err != nil {
				return heard, err
			}
		case <-tick.C:
			if err := a.tell(stream, &told); err != nil {
				return heard, err
			}
			if err := a.again(ctx); err != nil {
				return heard, err
			}
		case <-a.drain:
			if drained != nil {
				due = true // one after the other, and no change waits for either
				continue
			}
			drained = a.barrier(ctx)
		case err := <-drained:
			drained = nil
			if due {
				due, drained = false, a.barrier(ctx)
			}
			if err != nil && ctx.Err() == nil {
				a.log.Error("grace period not awaited, what was retired keeps its room", log.Err(err))
				continue
			}
			if err := a.again(ctx); err != nil {
				return heard, err
			}
		}
	}
}

// barrier waits for a grace period beside everything else.
func (a *Applier) barrier(ctx context.Context) <-chan error {
	ch := make(chan error, 1)
	go func() { ch <- a.cfg.Kernel.Barrier(ctx) }()
	return ch
}

// begin decides whether the stream goes on where the last one ended.
func (a *Applier) begin(sub Subscription, first policytable.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.model != nil && sub.Incarnation != "" && first.Incarnation == sub.Incarnation && first.Seq == sub.Seq+1 {
		return
	}
	a.dropNext()
	a.next = newModel()
}

// collecting says whether a snapshot has begun and is not complete.
func (a *Applier) collecting() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.next != nil
}

// reset has the next stream begin with everything.
func (a *Applier) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forgetStream()
}

// again tries what had no room.
func (a *Applier) again(ctx context.Context) error {
	w := newWork(ctx)
	a.mu.Lock()
	a.view.forget(a.cfg.Now())
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
		return errRecovered
	}
	return nil
}

// maxTold is how many changes one message may have.
const maxTold = 4096

// tell says what has changed of subjects and locations.
func (a *Applier) tell(stream Stream, t *told) error {
	a.mu.Lock()
	subjects, locations := a.wanted()
	a.mu.Unlock()
	var add, remove []uint32
	for id := range subjects {
		if _, ok := t.subjects[id]; !ok {
			add = append(add, id)
		}
	}
	for id := range t.subjects {
		if _, ok := subjects[id]; !ok {
			remove = append(remove, id)
		}
	}
	here, gone := map[netip.Addr]uint32{}, []netip.Addr(nil)
	for addr, id := range locations {
		if old, ok := t.locations[addr]; !ok || old != id {
			here[addr] = id
		}
	}
	for addr := range t.locations {
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
	t.subjects, t.locations = subjects, locations
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
