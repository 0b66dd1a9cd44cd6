// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"context"
	"errors"
	"slices"
	"testing"
)

// TestSlotEventsAreTakenOnce checks that duplicates are merged and that Next blocks until an event
// is added.
func TestSlotEventsAreTakenOnce(t *testing.T) {
	e := NewSlotEvents()
	e.Add([]uint16{7, 3})
	e.Add([]uint16{3})
	e.Add(nil)
	if got, err := e.Next(t.Context()); err != nil || !slices.Equal(got, []uint16{3, 7}) {
		t.Errorf("took %v, %v; want slots 3 and 7", got, err)
	}
	e.Add([]uint16{9})
	if got, err := e.Next(t.Context()); err != nil || !slices.Equal(got, []uint16{9}) {
		t.Errorf("took %v, %v; want slot 9 alone", got, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := e.Next(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("took %v, %v without any slots", got, err)
	}
}
