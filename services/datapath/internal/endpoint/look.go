// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"net/netip"

	"github.com/sluice-net/sluice/model/label"
)

// HolderOf gives the endpoint that has an address.
func (c *Core) HolderOf(a netip.Addr) (Endpoint, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, ok := c.holders[a]
	if !ok {
		return Endpoint{}, false
	}
	r, ok := c.records[o]
	if !ok || r.Phase == PhaseDeleted {
		return Endpoint{}, false
	}
	return c.endpoint(r, c.states[o]), true
}

// LabelsOf gives the labels of an identity that an endpoint of this node has.
func (c *Core) LabelsOf(identity uint32) ([]label.Label, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.records {
		if r.Phase != PhaseDeleted && r.Identity.Number == identity && identity != 0 {
			return r.Identity.Labels, true
		}
	}
	return nil, false
}
