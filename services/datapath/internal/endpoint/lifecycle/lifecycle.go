// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/reaper"
)

// Lifecycle creates and deletes endpoints.
type Lifecycle struct {
	cfg *Config
	// Reaper removes the devices of deleted endpoints.
	Reaper *reaper.Reaper[endpoint.HostDevice]

	registry    *registry
	resolver    *resolver
	allocations *Allocations
}

// inRange checks that the addresses lie in open ranges. It returns ErrUnavailable if ranges can
// change: sluice-ipam may have leased an address of a range that this process does not know yet.
func (l *Lifecycle) inRange(s endpoint.Spec) error {
	i := slices.IndexFunc(s.Addrs, func(a netip.Addr) bool { return !l.cfg.Ranges.Open(a) })
	if i < 0 {
		return nil
	}
	err := &endpoint.FieldError{
		Field:  "addresses",
		Reason: fmt.Sprintf("%v is not in the node's pod ranges %v", s.Addrs[i], l.cfg.Ranges.All()),
	}
	if l.cfg.Ranges.Changes() {
		return fmt.Errorf("%w: %s; sluice-ipam may still announce its range", endpoint.ErrUnavailable, err.Error())
	}
	return err
}

// CloseRange stops the creation of endpoints in a range. It returns false and changes nothing if an
// endpoint, or a creation in progress, has an address in the range.
func (l *Lifecycle) CloseRange(p netip.Prefix) bool {
	l.registry.mu.Lock()
	defer l.registry.mu.Unlock()
	for a := range l.registry.holders {
		if p.Contains(a) {
			return false
		}
	}
	l.cfg.Ranges.Close(p)
	return true
}
