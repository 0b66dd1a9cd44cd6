// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
)

// registry refuses the first registration.
type registry struct{ calls int }

func (r *registry) Register(context.Context, Underlay) error {
	if r.calls++; r.calls == 1 {
		return errors.New("etcd is unavailable")
	}
	return nil
}

// TestRegistrarWarnsOfFailuresOnly: at every start, the datapath first waits for sluice-ipam, which is no failure.
func TestRegistrarWarnsOfFailuresOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		known := false
		look := func() (Underlay, error) {
			if !known {
				return Underlay{}, fmt.Errorf("%w: no range is announced", ErrIncomplete)
			}
			return Underlay{Overlay: []netip.Addr{netip.MustParseAddr("10.244.0.1")}}, nil
		}
		r := NewRegistrar(&registry{}, look, NewChanges(), slog.New(slog.NewTextHandler(&out, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- r.Run(ctx) }()
		synctest.Wait()
		if got := out.String(); strings.Contains(got, "WARN") || !strings.Contains(got, "no range is announced") ||
			!errors.Is(r.Err(), ErrIncomplete) {
			t.Errorf("before the ranges are announced: %v, log %s", r.Err(), got)
		}
		known = true
		r.Changed()
		synctest.Wait()
		if got := out.String(); !strings.Contains(got, "WARN") || !strings.Contains(got, "etcd is unavailable") {
			t.Errorf("after a failure: log %s", got)
		}
		r.Changed()
		synctest.Wait()
		if got := out.String(); r.Err() != nil || !strings.Contains(got, "node registered") {
			t.Errorf("at last: %v, log %s", r.Err(), got)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the end: %v", err)
		}
	})
}
