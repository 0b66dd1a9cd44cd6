// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestWaitGoesByAcknowledgements(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	o.apply(web)
	out, err := o.Subscribers().Wait(t.Context(), 1, nil, false)
	if err != nil || len(out.Enforcing) != 0 || out.Revision != 1 {
		t.Errorf("without a subscriber: %+v, %v", out, err)
	}
	if _, err := o.Subscribers().Wait(t.Context(), 2, nil, false); !errors.Is(err, failure.ErrRevision) {
		t.Errorf("of no such revision: %v", err)
	}
	x := o.subscribe("datapath", [16]byte{}, 0)
	x.until(1)
	waits := func(ended bool) chan Waited {
		out := make(chan Waited, 1)
		go func() {
			w, err := o.Subscribers().Wait(t.Context(), 1, nil, ended)
			if err != nil {
				t.Error(err)
			}
			out <- w
		}()
		return out
	}
	enforced, ended := waits(false), waits(true)
	if err := x.Ack(t.Context(), x.barrier.Seq+1, 0); !errors.Is(err, failure.ErrAck) {
		t.Errorf("an acknowledgement of a barrier that was not sent: %v", err)
	}
	select {
	case <-enforced:
		t.Error("it is enforced before the acknowledgement")
	default:
	}
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	if w := <-enforced; !slices.Equal(w.Enforcing, []string{"datapath"}) || w.Revision != 1 {
		t.Errorf("%+v", w)
	}
	select {
	case <-ended:
		t.Error("it has ended before the acknowledgement")
	default:
	}
	if l, _, err := o.Reader().Get(t.Context(), named("web")); err != nil || !l.Enforced {
		t.Errorf("%+v, %v", l, err)
	}
	if err := x.Ack(t.Context(), 0, x.barrier.Seq); err != nil {
		t.Fatal(err)
	}
	<-ended
	// If a frontend is refused, calls that wait for its service fail.
	o.apply(end)
	x.until(2)
	k := frontend.Key{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: frontend.TCP}
	if err := x.Refuse(t.Context(), k, "no capacity for 1 member"); err != nil {
		t.Fatal(err)
	}
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	for _, of := range [][]service.Name{nil, {named("web")}} {
		if _, err := o.Subscribers().Wait(t.Context(), 2, of, false); !errors.Is(err, failure.ErrRefused) ||
			!strings.Contains(err.Error(), "no capacity for 1 member") {
			t.Errorf("of %v: %v", of, err)
		}
	}
	if _, err := o.Subscribers().Wait(t.Context(), 2, []service.Name{named("other")}, false); err != nil {
		t.Errorf("of another service: %v", err)
	}
	if l, _, err := o.Reader().Get(t.Context(), named("web")); err != nil || l.Enforced || len(l.Notes) != 1 {
		t.Errorf("%+v, %v", l, err)
	}
	o.apply(strings.Replace(end, "10.0.0.1", "10.0.0.2", 1))
	x.until(3)
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); err != nil {
		t.Fatal(err)
	}
	if w, err := o.Subscribers().Wait(t.Context(), 3, nil, false); err != nil || w.Revision != 3 {
		t.Errorf("after the frontend was sent again: %+v, %v", w, err)
	}
	x.Close()
	w, err := o.Subscribers().Wait(t.Context(), 3, nil, false)
	if err != nil || !slices.Equal(w.Disconnected, []string{"datapath"}) {
		t.Errorf("without the subscriber: %+v, %v", w, err)
	}
}

func TestNewerConnectionReplacesASubscriber(t *testing.T) {
	o := start(t, testConfig(&clock{now: time.Unix(1e9, 0)}), t.TempDir())
	o.apply(web)
	x := o.subscribe("datapath", [16]byte{}, 0)
	x.until(1)
	y := o.subscribe("datapath", o.Incarnation(), x.barrier.Seq)
	<-x.Ended()
	if err := x.Err(); !errors.Is(err, failure.ErrReplaced) {
		t.Errorf("%v", err)
	}
	if _, err := x.Next(t.Context()); !errors.Is(err, failure.ErrReplaced) {
		t.Errorf("%v", err)
	}
	if err := x.Ack(t.Context(), x.barrier.Seq, 0); !errors.Is(err, failure.ErrReplaced) {
		t.Errorf("%v", err)
	}
	x.Close() // this must not end the other session
	y.has = x.has
	o.apply(end)
	y.until(2)
	if y.barrier.SnapshotComplete || show(y.has) != "10.96.0.1:80/tcp of default/web inside 10.0.0.1:8080" {
		t.Errorf("resumed at %+v with %s", y.barrier, show(y.has))
	}
}
