// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"fmt"
	"slices"
)

// part adds the information in the maps of one subject to an explanation. The order of parts follows from what they
// read and set.
type part interface {
	explain(q *query, x *Explanation) error
	// reads returns what other parts must have set before explain.
	reads() facts
	// sets returns what explain sets.
	sets() facts
}

// facts are the things that a part tells later parts, in a query and an Explanation.
type facts uint8

const (
	ends       facts = 1 << iota // Source and Destination as the maps know them
	verdict                      // the reason, the identities that the program looked up, and the sides
	nextPacket                   // query.next
)

// ordered orders parts so that each one comes after those that set what it reads. Parts that do not depend on each
// other stay in the given order. It panics if no part, or more than one, sets what a part reads.
func ordered(parts ...part) (done []part) {
	var known facts
	for len(parts) > 0 {
		i := slices.IndexFunc(parts, func(p part) bool { return p.reads()&^known == 0 })
		if i < 0 {
			panic(fmt.Sprintf("explain: no other part sets what %T reads", parts[0]))
		}
		p := parts[i]
		if p.sets()&known != 0 {
			panic(fmt.Sprintf("explain: %T sets what another part has set", p))
		}
		known |= p.sets()
		done, parts = append(done, p), slices.Delete(slices.Clone(parts), i, i+1)
	}
	return done
}
