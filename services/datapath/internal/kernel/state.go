// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"net/netip"
	"strings"
)

type state struct {
	fromPod, toPod Program
}

var errUnready = errors.New("kernel support is being written")

func open(context.Context, Options) (*Kernel, error)             { return nil, errUnready }
func (s *state) close() error                                    { return errUnready }
func (s *state) audit(ProgramID, Program) (Audit, error)         { return Audit{}, errUnready }
func (s *state) publish(context.Context, Endpoint) (Slot, error) { return NoSlot, errUnready }
func (s *state) setPolicy(Slot, Table, Table) (uint32, error)    { return 0, errUnready }
func (s *state) setIdentity(Slot, Identity) error                { return errUnready }
func (s *state) cut(Slot) error                                  { return errUnready }
func (s *state) unpublish(Slot) error                            { return errUnready }
func (s *state) barrier(context.Context) error                   { return errUnready }
func (s *state) endpoints() ([]Endpoint, error)                  { return nil, errUnready }
func (s *state) lookup(Slot) (Endpoint, error)                   { return Endpoint{}, errUnready }
func (s *state) syncHostAddrs([]netip.Addr) error                { return errUnready }
func (s *state) hostAddrs() ([]netip.Addr, error)                { return nil, errUnready }
func (s *state) upsertIP(netip.Prefix, IPInfo) error             { return errUnready }
func (s *state) deleteIP(netip.Prefix) error                     { return errUnready }
func (s *state) ipcache() ([]IPEntry, error)                     { return nil, errUnready }
func (s *state) metrics() ([]Counter, error)                     { return nil, errUnready }
func (s *state) events() (*EventReader, error)                   { return nil, errUnready }
func (s *state) maps() ([]MapInfo, error)                        { return nil, errUnready }

// EventReader reads drop events in the order in which they were sent.
type EventReader struct{}

// Read returns the next event. It ends with ctx's error, or with ErrClosed
// after Close. One goroutine reads.
func (r *EventReader) Read(ctx context.Context) (Event, error) { return Event{}, errUnready }

// Close ends a Read that waits.
func (r *EventReader) Close() error { return errUnready }

// String is the stable name of the reason.
func (r Reason) String() string { return "" }

// Dropped says whether the packet ended here.
func (r Reason) Dropped() bool { return false }

// Quiet reasons are counted but send no event: every device causes them as a
// matter of course.
func (r Reason) Quiet() bool { return false }

// String is "egress" or "ingress".
func (d Direction) String() string { return "" }

func probe(context.Context) Report { return Report{} }

func (r Report) err() error {
	var b strings.Builder
	for _, q := range r.Requirements {
		if q.Missing != nil {
			b.WriteString(q.Name)
		}
	}
	if b.Len() == 0 {
		return nil
	}
	return errors.New(b.String())
}
