// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"bytes"
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
)

// lossInterval is the minimum time between two messages about losses while flows are followed.
const lossInterval = time.Second

// Limits of one turn in which a call reads the history. Between two turns, other calls have their turns, and the call
// sends what it has found. So a client that does not read its answers delays no other client.
const (
	turnBytes = 256 << 10
	turnTime  = 100 * time.Millisecond
)

// reading is one call that reads events, with functions for the API that the client uses.
type reading struct {
	*Server
	number       uint64 // number of events to send; 0: all
	newest       bool   // send the latest events, not the first
	following    bool
	since, until time.Time
	// skip reports whether no record of a segment of the history can be selected; nil skips no segment.
	skip func(history.Index) bool
	// pick returns a function that sends the event of a record; nil if the request does not select the event.
	pick     func(history.Record) (send func() error, err error)
	sendLoss func(*flow.LostEvent) error
	// concerns reports whether the client may learn that records of a part are missing; nil: of every part. Losses of
	// other tenants would reveal how many flows these tenants have.
	concerns func(part string) bool

	found   uint64          // stored events that the request selects
	corrupt map[uint64]bool // corrupt files that were reported
	lost    *flow.LostEvent // loss that is not sent yet; nil if there is none
	toldT   time.Time       // when the last loss was sent
}

// stored sends the stored events from a record number. It returns the number of the last record that it has examined.
func (a *reading) stored(ctx context.Context, next uint64) (last uint64, err error) {
	if last = a.o.History.Last(); last == 0 {
		return 0, nil
	}
	// If the requested time begins before the oldest records, tell the client from which time the answer is complete.
	if !a.since.IsZero() {
		if until := a.o.History.Incomplete(a.since, a.concerns); !until.IsZero() {
			a.missing(0, a.since, until)
		}
	}
	if a.newest {
		if next, err = a.find(ctx, last); err != nil {
			return 0, err
		}
	}
	return last, a.sendRange(ctx, next, last)
}

// sendRange sends the events of the records from next to last.
func (a *reading) sendRange(ctx context.Context, next, last uint64) (err error) {
	for next <= last {
		var batch []message
		if next, batch, err = a.collect(ctx, next, last); err != nil {
			return err
		}
		for _, m := range batch {
			if err := a.sendStored(m); err != nil {
				return err
			}
		}
	}
	return nil
}

// query selects the records from first to last.
func (a *reading) query(first, last uint64) history.Query {
	return history.Query{First: first, Last: last, From: a.since, To: a.until, Skip: a.skip}
}

// turn waits for a turn to read the history. The caller must end the turn by done. over reports whether the turn has
// lasted too long.
func (a *reading) turn(ctx context.Context) (over func() bool, done func(), err error) {
	select {
	case a.scans <- struct{}{}:
		began := time.Now()
		return func() bool { return time.Since(began) > turnTime }, func() { <-a.scans }, nil
	case <-ctx.Done():
		return nil, nil, status.FromContextError(ctx.Err()).Err()
	}
}

// find returns the number of the first record to send, so that the answer has the requested number of latest flows.
func (a *reading) find(ctx context.Context, last uint64) (first uint64, err error) {
	first, found := last+1, uint64(0)
	for next := last; next > 0 && found < a.number; {
		if next, err = a.findSome(ctx, next, &first, &found); err != nil {
			return 0, err
		}
	}
	return first, nil
}

// findSome examines records backwards from last during one turn. It returns the number of the next record to examine.
func (a *reading) findSome(ctx context.Context, last uint64, first, found *uint64) (next uint64, err error) {
	over, done, err := a.turn(ctx)
	if err != nil {
		return 0, err
	}
	defer done()
	for r := range a.o.History.Backward(ctx, a.query(0, last)) {
		if send, err := a.selected(r); err == nil && send != nil {
			*first = r.Number
			*found++
		}
		if *found == a.number || over() {
			return r.Number - 1, nil
		}
	}
	return 0, contextError(ctx)
}

// message is a stored record to send, or a loss.
type message struct {
	record history.Record
	lost   *flow.LostEvent
}

// collect returns the messages for the records from first to last. It stops at the end of its turn, and returns the
// number of the next record to examine.
func (a *reading) collect(ctx context.Context, first, last uint64) (next uint64, batch []message, err error) {
	over, done, err := a.turn(ctx)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	q := a.query(first, last)
	q.Corrupt = func(file uint64, part string, records int, from, to time.Time) {
		if !a.corrupt[file] && (a.concerns == nil || a.concerns(part)) {
			a.corrupt[file] = true
			a.missing(uint64(records), from, to)
		}
	}
	size, enough := 0, a.number
	if a.newest || a.following {
		enough = 0
	}
	for r := range a.o.History.Forward(ctx, q) {
		if enough > 0 && a.found >= enough {
			return last + 1, batch, nil
		}
		send, err := a.selected(r)
		switch {
		case err != nil:
			a.unreadable(r)
		case r.Loss:
			a.addLoss(r)
		case send != nil:
			if a.lost != nil && !a.following { // report a loss at the position where flows are missing
				batch = append(batch, message{lost: a.lost})
				a.lost = nil
			}
			a.found++
			r.Data = bytes.Clone(r.Data) // Data is part of a whole file, which would stay in memory
			batch = append(batch, message{record: r})
			size += len(r.Data)
		}
		if size >= turnBytes || over() {
			return r.Number + 1, batch, nil
		}
	}
	return last + 1, batch, contextError(ctx)
}

func contextError(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	return nil
}

// sendStored sends a message of the history.
func (a *reading) sendStored(m message) error {
	if m.lost != nil {
		return a.tell(m.lost)
	}
	send, err := a.pick(m.record)
	if err != nil || send == nil {
		return err
	}
	return send()
}

// follow sends new flows until the client ends the call, or until the requested time.
func (a *reading) follow(ctx context.Context, last uint64) error {
	bounded := ctx
	if !a.until.IsZero() {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, a.until.Sub(a.o.Now()))
		defer cancel()
	}
	for {
		r, missed, err := a.next(bounded, last)
		switch {
		case errors.Is(err, errQuiet):
			if err := a.sendLost(); err != nil {
				return err
			}
			continue
		case err != nil && ctx.Err() == nil: // until has passed
			return a.sendLost()
		case err != nil:
			return status.FromContextError(err).Err()
		}
		if missed > 0 && a.concerns != nil { // only the files tell which of the missed records the client may see
			now := a.o.History.Last()
			if err := a.sendRange(ctx, last+1, now); err != nil {
				return err
			}
			last = now
			continue
		}
		if missed > 0 {
			a.missing(missed, r.Time, r.Time)
		}
		last = r.Number
		send, err := a.selected(r)
		switch {
		case err != nil:
			a.unreadable(r)
		case r.Loss:
			a.addLoss(r)
		case send != nil:
			if err := send(); err != nil {
				return err
			}
		}
		if a.lost != nil && a.o.Now().Sub(a.toldT) >= lossInterval {
			if err := a.sendLost(); err != nil {
				return err
			}
		}
	}
}

// errQuiet is returned if no record arrives before a loss must be reported.
var errQuiet = errors.New("a loss is due")

// next waits for the next record. It sends a pending loss even if no further record arrives.
func (a *reading) next(ctx context.Context, last uint64) (r history.Record, missed uint64, err error) {
	if a.lost == nil {
		return a.o.History.Next(ctx, last)
	}
	due, cancel := context.WithTimeoutCause(ctx, lossInterval-a.o.Now().Sub(a.toldT), errQuiet)
	defer cancel()
	r, missed, err = a.o.History.Next(due, last)
	if err != nil && errors.Is(context.Cause(due), errQuiet) {
		err = errQuiet
	}
	return r, missed, err
}

// missing reports that flows of a time span are missing; count is 0 if their number is unknown.
func (a *reading) missing(count uint64, from, to time.Time) {
	a.loss(&flow.LostEvent{
		Source: flow.LostEventSource_HUBBLE_RING_BUFFER, NumEventsLost: count,
		First: timestamppb.New(from), Last: timestamppb.New(to),
	})
}

// unreadable reports that a record cannot be decoded.
func (a *reading) unreadable(r history.Record) {
	if a.concerns == nil || a.concerns(r.Part) {
		a.missing(1, r.Time, r.Time)
	}
}

// addLoss reports the loss in a record, unless it is older than the requested time.
func (a *reading) addLoss(r history.Record) {
	l := &flow.LostEvent{}
	if err := proto.Unmarshal(r.Data, l); err != nil {
		a.missing(1, r.Time, r.Time)
		return
	}
	if a.since.IsZero() || !l.GetLast().AsTime().Before(a.since) {
		a.loss(l)
	}
}

// loss merges a loss with the pending loss, because clients print one line for each message.
func (a *reading) loss(l *flow.LostEvent) {
	if a.lost == nil {
		a.lost = l
		return
	}
	if a.lost.GetSource() != l.GetSource() {
		a.lost.Source = flow.LostEventSource_UNKNOWN_LOST_EVENT_SOURCE
	}
	a.lost.NumEventsLost += l.GetNumEventsLost()
	if l.GetFirst().AsTime().Before(a.lost.GetFirst().AsTime()) {
		a.lost.First = l.GetFirst()
	}
	if l.GetLast().AsTime().After(a.lost.GetLast().AsTime()) {
		a.lost.Last = l.GetLast()
	}
}

// sendLost sends the losses since the last message about losses.
func (a *reading) sendLost() error {
	if a.lost == nil {
		return nil
	}
	l := a.lost
	a.lost = nil
	return a.tell(l)
}

// tell sends a loss.
func (a *reading) tell(l *flow.LostEvent) error {
	a.toldT = a.o.Now()
	return a.sendLoss(l)
}

// selected returns a function that sends the event of a record; nil if the request does not select the event.
func (a *reading) selected(r history.Record) (send func() error, err error) {
	if r.Loss || !a.since.IsZero() && r.Time.Before(a.since) || !a.until.IsZero() && r.Time.After(a.until) {
		return nil, nil
	}
	return a.pick(r)
}
