// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"encoding/json"
	"fmt"
)

// Place records whether a policy was admitted to the limits, and related data that an isolating policy needs. It is
// zero for a policy that is enforced as written and was never replaced.
type Place struct {
	// Created is the time at which the policy was first accepted, in seconds since 1970; 0: at its last update.
	Created int64 `json:"created,omitempty"`
	// Exceeds describes the limit that the policy exceeds, so that it isolates the pods that it selects; empty if
	// it is enforced.
	Exceeds string `json:"exceeds,omitempty"`
	// Size and Sum, a SHA-256, describe the whole manifest if the record contains a reduced manifest.
	Size int    `json:"size,omitempty"`
	Sum  []byte `json:"sum,omitempty"`
	// Held is the manifest of the last version that was enforced as written, if the current version is not.
	Held []byte `json:"held,omitempty"`
	// Known is set if the version of the service that accepted the policy of a call knew all its fields. If the field
	// is unknown to this version, it comes from a later version.
	Known bool `json:"known,omitempty"`
	// Dropped lists the fields of the policy that the last version did not know and that the caller allowed to be
	// dropped. If neither Known nor Dropped is set, an earlier version, which knew neither field, wrote the place.
	Dropped []string `json:"dropped,omitempty"`
	// Revision is the revision of the policy for which the place was written.
	Revision uint64 `json:"revision,omitempty"`
}

// zero reports whether the place need not be written.
func (p *Place) zero() bool {
	return p.Created == 0 && p.Exceeds == "" && p.Size == 0 && len(p.Held) == 0 && !p.Known && len(p.Dropped) == 0
}

// placePrefix is the prefix of the key of a place in the bucket of the state. Earlier versions ignore unknown keys in
// this bucket, but reject a policy record with an unknown field. A place therefore has its own key.
const placePrefix = "place\x00"

// encodePlace returns the record of a policy's place; nil if there is nothing to write.
func encodePlace(p *Policy) []byte {
	if p.Place.zero() {
		return nil
	}
	place := p.Place
	place.Revision = p.Revision
	return encode(place)
}

// decodePlace returns the place of a stored policy. If the place belongs to an uncommitted change, only its time of
// creation is used. A corrupt place is an error like a corrupt policy, because a policy without its place could allow
// more.
func decodePlace(text []byte, p *Policy) (Place, error) {
	if text == nil {
		return Place{}, nil
	}
	var place Place
	if err := json.Unmarshal(text, &place); err != nil {
		return Place{}, fmt.Errorf("the place of the policy: %w", err)
	}
	if place.Revision != p.Revision {
		return Place{Created: place.Created}, nil
	}
	return place, nil
}
