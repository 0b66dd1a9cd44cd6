// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// fakeHost lacks what is in missing until it is repaired; differences in stuck cannot be repaired.
type fakeHost struct {
	missing, stuck []endpoint.Difference
	repairs        int
}

func (h *fakeHost) Check() ([]endpoint.Difference, error) {
	return slices.Concat(h.missing, h.stuck), nil
}

func (h *fakeHost) Repair() error {
	h.missing = nil
	h.repairs++
	if len(h.stuck) > 0 {
		return errors.New("stuck")
	}
	return nil
}

func TestChangedHostIsRepairedAndCounted(t *testing.T) {
	m := newMachine()
	h := &fakeHost{missing: []endpoint.Difference{{Subject: "rule", Key: "10.0.0.0/24"}}}
	cfg := m.config()
	cfg.Host = h
	c := newNode(cfg)
	restore(t, c)
	if n := c.Counts(); h.repairs != 1 || n.NodeRepairs != 0 {
		t.Errorf("after the start: %d repairs, %d counted, want 1 and 0", h.repairs, n.NodeRepairs)
	}
	h.missing = []endpoint.Difference{{Subject: "rule", Key: "10.0.0.0/24"}}
	h.stuck = []endpoint.Difference{{Subject: "sysctl", Key: "net/ipv4/ip_forward", Want: "1", Have: "0"}}
	var found []endpoint.Finding
	for range 3 * mostVain {
		emit := func(f endpoint.Finding) error { found = append(found, f); return nil }
		if _, err := c.NodeState.Changed(emit); err != nil {
			t.Fatal(err)
		}
	}
	n := c.Counts()
	if h.repairs != 1+mostVain || n.NodeRepairs != 1 || len(found) != 1+mostVain || !found[0].Repaired || found[1].Repaired || found[1].Err == nil {
		t.Errorf("events: %d repairs, %d counted, findings %+v", h.repairs-1, n.NodeRepairs, found)
	}
	if want := []string{"node: sysctl net/ipv4/ip_forward: expected 1, found 0"}; !slices.Equal(n.Unrepaired, want) {
		t.Errorf("unrepaired %q, want %q", n.Unrepaired, want)
	}
}
