// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// identities are those that the identity service has. They belong to the loop.
type identities struct {
	all        map[identity.Numeric]peer.Identity
	cluster    string
	nodeLabels bool
}

// complete is an identity as the engine gets it.
func (s *identities) complete(id peer.Identity) peer.Identity {
	return id.Complete(s.cluster).Node(s.nodeLabels)
}

// take takes over what has changed, and returns what that is to the engine and what has to be
// stored. An identity with the labels that it has does not change.
func (s *identities) take(set []peer.Identity, gone []identity.Numeric) (c engine.Change, rec record.Cache) {
	for _, x := range gone {
		if _, ok := s.all[x]; ok {
			delete(s.all, x)
			c.RemoveIdentities = append(c.RemoveIdentities, x)
			rec.GoneIdentities = append(rec.GoneIdentities, uint32(x))
		}
	}
	for _, id := range set {
		if old, ok := s.all[id.Number]; ok && slices.Equal(old.Labels.All(), id.Labels.All()) {
			continue
		}
		s.all[id.Number] = id
		c.AddIdentities = append(c.AddIdentities, s.complete(id))
		rec.Identities = append(rec.Identities, record.IdentityOf(id))
	}
	return c, rec
}

// others are the identities that are not listed, sorted.
func (s *identities) others(listed map[identity.Numeric]struct{}) (gone []identity.Numeric) {
	for x := range s.all {
		if _, ok := listed[x]; !ok {
			gone = append(gone, x)
		}
	}
	slices.Sort(gone)
	return gone
}
