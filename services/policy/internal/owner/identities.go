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

// identities contains the identities that the identity service has sent. It belongs to the loop.
type identities struct {
	all        map[identity.Numeric]peer.Identity
	cluster    string
	nodeLabels bool
}

// complete returns an identity in the form for the engine.
func (s *identities) complete(id peer.Identity) peer.Identity {
	return id.Complete(s.cluster).Node(s.nodeLabels)
}

// take applies changes, and returns the change for the engine and the records to store. An identity with the same
// labels is not a change.
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

// others returns the identities that are not listed, sorted.
func (s *identities) others(listed map[identity.Numeric]struct{}) (gone []identity.Numeric) {
	for x := range s.all {
		if _, ok := listed[x]; !ok {
			gone = append(gone, x)
		}
	}
	slices.Sort(gone)
	return gone
}
