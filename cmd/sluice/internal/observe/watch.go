// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Bounds of the backoff before a reconnect.
const (
	againFirst = 50 * time.Millisecond
	againMost  = time.Second
)

// Services that have events: the datapath remembers the latest ones, sluice-hubble keeps them in files.
const (
	datapath = "datapath"
	hubble   = "hubble"
)

// keeper returns the service that has the oldest events of this node.
func keeper(inv *invocation.Invocation) string {
	path, err := inv.Socket(hubble)
	if err != nil {
		return datapath // whose Dial returns the error
	}
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return datapath
	}
	return hubble
}

// watch prints the events of a service. With follow it reconnects when the service is unavailable.
type watch struct {
	inv     *invocation.Invocation
	out     Output
	service string

	answered bool      // the service has answered at least once
	last     string    // ID of the last printed event
	begun    time.Time // start of the first stream
}

// name returns the name of the service in messages.
func (w *watch) name() string {
	if w.service == datapath {
		return datapath
	}
	return "sluice-" + w.service
}

// run prints events until the stream or ctx ends. If sluice-hubble does not answer, it asks the datapath.
func (w *watch) run(ctx context.Context, req *datapathv1.ObserveRequest) error {
	err := w.events(ctx, req)
	if w.service != hubble || w.answered {
		return err
	}
	switch status.Code(err) {
	// A killed process leaves its socket, and an earlier version has no events.
	case codes.Unavailable, codes.Unimplemented:
		w.inv.Note("sluice-hubble does not answer: " + reasonOf(err) + "; only the latest events are searched, which the " +
			"datapath remembers")
		w.service = datapath
		return w.events(ctx, req)
	}
	return err
}

// events prints the events of the service until the stream or ctx ends.
func (w *watch) events(ctx context.Context, req *datapathv1.ObserveRequest) error {
	conn, err := w.inv.Dial(w.service)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := datapathv1.NewObserverServiceClient(conn)
	w.begun = time.Now()
	if !req.GetFollow() {
		if w.service == datapath { // the events of days take longer
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, w.inv.Timeout)
			defer cancel()
		}
		_, err := w.stream(ctx, client, req, time.Time{})
		return err
	}
	user := ctx
	if req.GetUntil() != nil {
		// The service ends the stream at --until. The deadline is for the case that the service is
		// unavailable.
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, req.GetUntil().AsTime().Add(againMost))
		defer cancel()
	}
	over := func() bool {
		return user.Err() != nil || req.GetUntil() != nil && !time.Now().Before(req.GetUntil().AsTime())
	}
	var away time.Time // zero: the service is connected
	pause := againFirst
	for {
		there, err := w.stream(ctx, client, w.resume(req, away), away)
		var out *outputError
		switch {
		case errors.As(err, &out):
			return out.err
		case over():
			return nil // --until is reached, or the command was interrupted
		case err == nil:
			err = fmt.Errorf("%s has ended the stream", w.name())
		}
		if !there && away.IsZero() || isFinal(err) {
			return err
		}
		if there {
			away, pause = time.Now(), againFirst
			if err := w.out.Write(noteOf(w.name() + " is unavailable: " + reasonOf(err) + "; waiting for it")); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, againMost)
	}
}

// resume returns the request that continues after the last printed event.
func (w *watch) resume(req *datapathv1.ObserveRequest, away time.Time) *datapathv1.ObserveRequest {
	if away.IsZero() {
		return req
	}
	again := proto.CloneOf(req)
	switch {
	case w.last != "":
		again.AfterUuid, again.Since, again.Last = w.last, nil, 0
	case again.GetSince() == nil && again.GetLast() == 0:
		again.Since = timestamppb.New(w.begun)
	}
	return again
}

// stream prints the events of one stream. there reports whether the service answered.
func (w *watch) stream(ctx context.Context, client datapathv1.ObserverServiceClient, req *datapathv1.ObserveRequest,
	away time.Time,
) (there bool, err error) {
	stream, err := client.Observe(ctx, req)
	if err != nil {
		return false, inFlags(err)
	}
	// If there are no headers, the answer is an error, which Recv returns. A datapath of an earlier version sends
	// the headers with its first event.
	if md, err := stream.Header(); err != nil {
		return false, err
	} else if md != nil && !away.IsZero() {
		there = true
		text := fmt.Sprintf("%s is back after %s", w.name(), time.Since(away).Round(100*time.Millisecond))
		if w.last == "" {
			text += "; events may be missing"
		}
		if err := w.out.Write(noteOf(text)); err != nil {
			return there, &outputError{err}
		}
	} else {
		there = md != nil
	}
	w.answered = w.answered || there
	return there, w.show(stream)
}

// outputError is a failed write of the output.
type outputError struct{ err error }

func (e *outputError) Error() string { return e.err.Error() }

func (w *watch) show(stream grpc.ServerStreamingClient[datapathv1.ObserveResponse]) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return inFlags(err)
		}
		e := Event{ObserveResponse: m}
		if err := w.out.Write(e); err != nil {
			return &outputError{err}
		}
		w.last = cmp.Or(e.uuid(), w.last)
	}
}

// isFinal reports whether a retry would give the same error.
func isFinal(err error) bool {
	var usage *invocation.UsageError
	if errors.As(err, &usage) {
		return true
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.PermissionDenied, codes.Unauthenticated, codes.Unimplemented:
		return true
	}
	return false
}

// reasonOf returns why a stream ended.
func reasonOf(err error) string {
	if st, ok := status.FromError(err); ok && st.Code() == codes.Unavailable {
		return st.Message()
	}
	return err.Error()
}

// noteOf returns an event that is a note about the stream.
func noteOf(text string) Event { return Event{Note: text, Noted: time.Now()} }

// Drops prints the dropped packets of an endpoint until ctx ends.
func Drops(ctx context.Context, inv *invocation.Invocation, owner *workloadv1.Owner) error {
	w := watch{inv: inv, out: newLines(inv), service: datapath}
	return w.run(ctx, &datapathv1.ObserveRequest{
		Follow: true, Owners: []*workloadv1.Owner{owner}, Verdicts: []datapathv1.Verdict{datapathv1.Verdict_VERDICT_DROPPED},
	})
}
