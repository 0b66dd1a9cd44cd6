// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// IdentityOf returns the record of an identity.
func IdentityOf(id peer.Identity) Identity {
	r := Identity{Number: uint32(id.Number), Labels: make([][3]string, 0, id.Labels.Len())}
	for _, l := range id.Labels.All() {
		r.Labels = append(r.Labels, [3]string{l.Source, l.Key, l.Value})
	}
	return r
}

// Peer returns the identity of a record. Its labels share their texts through the interner.
func (x Identity) Peer(texts *peer.Interner) (peer.Identity, error) {
	labels := make([]label.Label, 0, len(x.Labels))
	for _, l := range x.Labels {
		labels = append(labels, texts.Label(label.Label{Source: l[0], Key: l[1], Value: l[2]}))
	}
	return peer.New(identity.Numeric(x.Number), label.NewSet(labels...))
}
