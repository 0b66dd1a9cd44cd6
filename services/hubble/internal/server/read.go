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

// lossInterval is the shortest time between two messages about losses while flows are followed.
const lossInterval = time.Second

// Bounds of one turn of a call with the history. Between two turns other calls have theirs, and the call sends what it
// found: a client that does not read delays no other client.
const (
	turnBytes = 256 << 10
	turnTime  = 100 * time.Millisecond
)

// reading is one call that reads events, in the language of one API.
type reading struct {
	*Server
	number       uint64 // of events to send; 0: all
	newest       bool   // the latest ones of them
	following    bool
	since, until time.Time
	// skip reports whether no record of a segment of the history can be selected; nil skips none.
	skip func(history.Index) bool
	// pick returns how to send the event of a record; nil if the request does not select it.
	pick     func(history.Record) (send func() error, err error)
	sendLoss func(*flow.LostEvent) error
	// concerns reports whether the client learns that records of a part are missing; nil: of all parts. The losses of
	// other tenants would tell it how many flows they have.
	concerns func(part string) bool

	found   uint64          // stored events that the request selects
	corrupt map[uint64]bool // corrupt files that are reported
	lost    *flow.LostEvent // not sent yet; nil if there is none
	toldT   time.Time       // when the last loss was sent
}

// stored sends the events of the history from a number on, and returns the number of the last record that it
// considered.
func (a *reading) stored(ctx context.Context, next uint64) (last uint64, err error) {
	if last = a.o.History.Last(); last == 0 {
		return 0, nil
	}
	// A question that reaches back beyond what is left is answered with the time from which on the answer is complete.
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

// turn waits for a turn with the history. The caller ends it with done, and asks over whether it has lasted too long.
func (a *reading) turn(ctx context.Context) (over func() bool, done func(), err error) {
	select {
	case a.scans <- struct{}{}:
		began := time.Now()
		return func() bool { return time.Since(began) > turnTime }, func() { <-a.scans }, nil
	case <-ctx.Done():
		return nil, nil, status.FromContextError(ctx.Err()).Err()
	}
}

// find returns the number of the record with which the requested number of latest flows begins.
func (a *reading) find(ctx context.Context, last uint64) (first uint64, err error) {
	first, found := last+1, uint64(0)
	for next := last; next > 0 && found < a.number; {
		if next, err = a.findSome(ctx, next, &first, &found); err != nil {
			return 0, err
		}
	}
	return first, nil
}

// findSome looks at the records up to last during one turn, and returns the number of the last record that it did not
// look at.
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

// collect returns the messages for the records from first to last, and the number of the first record that it did not
// look at. It ends with its turn.
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
			if a.lost != nil && !a.following { // at the position where flows are missing
				batch = append(batch, message{lost: a.lost})
				a.lost = nil
			}
			a.found++
			r.Data = bytes.Clone(r.Data) // a part of a file, which would stay in memory
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
		if missed > 0 && a.concerns != nil { // which of them are of the client, only the files tell
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

// errQuiet is returned if no record arrives before a loss is due.
var errQuiet = errors.New("a loss is due")

// next waits for the next record. A loss that was not sent yet is sent even if no further record arrives.
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

// missing reports that flows of a time are missing; count is 0 if their number is not known.
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

// addLoss reports the loss of a record, unless it is earlier than the request.
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

// loss adds a loss to the one that is not sent yet. Clients print one line for each message, so losses are merged.
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

// selected returns how to send the event of a record; nil if the request does not select it.
func (a *reading) selected(r history.Record) (send func() error, err error) {
	if r.Loss || !a.since.IsZero() && r.Time.Before(a.since) || !a.until.IsZero() && r.Time.After(a.until) {
		return nil, nil
	}
	return a.pick(r)
}
