// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"bytes"
	"encoding/json"
)

// Place says how a policy stands in the limits. A policy that is in force as written and was
// not replaced since its creation has the zero value.
type Place struct {
	// Created is when the policy was first accepted, in seconds since 1970; 0: at its
	// last update.
	Created int64 `json:"created,omitempty"`
	// Exceeds is why the policy isolates what it selects instead of being enforced.
	Exceeds string `json:"exceeds,omitempty"`
	// Size and Sum, a SHA-256, describe the whole manifest, if the record has less.
	Size int    `json:"size,omitempty"`
	Sum  []byte `json:"sum,omitempty"`
	// Held is the manifest of the last form that was in force as written, if this one is
	// not.
	Held []byte `json:"held,omitempty"`
	// Revision says for which revision of the policy the place was written.
	Revision uint64 `json:"revision,omitempty"`
}

// zero reports whether nothing needs to be written.
func (p *Place) zero() bool {
	return p.Created == 0 && p.Exceeds == "" && p.Size == 0 && len(p.Held) == 0
}

// placePrefix begins the key of a place in the bucket of the state. Earlier versions read
// their own keys of that bucket and leave others alone, and refuse a record of a policy
// with a field that they do not know. So a place has a key of its own.
const placePrefix = "place\x00"

// encodePlace returns the record of the place of a policy; nil: there is nothing to write.
func encodePlace(p *Policy) []byte {
	if p.Place.zero() {
		return nil
	}
	place := p.Place
	place.Revision = p.Revision
	return encode(place)
}

// decodePlace returns the place of a stored policy. A place that belongs to a change which was
// not committed, or that cannot be read, is left out, but for the time of creation.
func decodePlace(text []byte, p *Policy) Place {
	var place Place
	if text == nil || json.NewDecoder(bytes.NewReader(text)).Decode(&place) != nil {
		return Place{}
	}
	if place.Revision != p.Revision {
		return Place{Created: place.Created}
	}
	return place
}
