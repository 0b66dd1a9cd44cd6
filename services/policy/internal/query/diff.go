// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package query

import (
	"context"
	"net/netip"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Difference is a change of verdicts for a subject and some of its peers.
type Difference struct {
	engine.Difference
	Subject peer.Identity
	Peers   []DifferentPeer
}

// DifferentPeer is a peer with an address of a prefix.
type DifferentPeer struct {
	Identity peer.Identity
	Prefix   netip.Prefix // zero: all other addresses
}

// Comparison compares the present state with the state after a change.
type Comparison struct {
	compared *engine.Comparison
	known    map[identity.Numeric]peer.Identity
}

// Compare compares the present state with the state after the given policies are applied and deleted.
func Compare(d engine.Draft, upsert []policy.Object, remove []policy.Key) (*Comparison, error) {
	compared, err := d.Diff(upsert, remove)
	if err != nil {
		return nil, err
	}
	c := &Comparison{compared, make(map[identity.Numeric]peer.Identity)}
	for _, id := range d.Identities() {
		c.known[id.Number] = id
	}
	return c, nil
}

// Each calls take with each difference.
func (c *Comparison) Each(ctx context.Context, take func(Difference) error) error {
	return c.compared.Each(func(f engine.Difference) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		d := Difference{Difference: f, Subject: c.known[f.Subject]}
		for _, p := range f.Places {
			d.Peers = append(d.Peers, DifferentPeer{c.known[p.Peer], p.Prefix})
		}
		return take(d)
	})
}
