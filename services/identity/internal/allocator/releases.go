// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import "github.com/sluice-net/sluice/model/identity"

// releases lists the references of this node that must be removed from the store. due contains the revision of each
// reference; if the reference was written again since, it stays. strays contains references without a holder that were
// found in the last comparison; a claim for them may be in progress. The caller must hold the lock.
type releases struct {
	due    map[identity.Numeric]int64
	strays map[identity.Numeric]int64
}

func newReleases() releases { return releases{due: map[identity.Numeric]int64{}} }

// compare compares the held numbers with this node's references in the store. A reference without a holder is due if
// strict is set, or if the last comparison found it unchanged.
func (r *releases) compare(refs []Reference, strict bool, held func(identity.Numeric) bool) {
	strays := map[identity.Numeric]int64{}
	for _, ref := range refs {
		switch {
		case held(ref.Number):
		case strict || r.strays[ref.Number] == ref.Revision:
			r.due[ref.Number] = ref.Revision
		default:
			strays[ref.Number] = ref.Revision
		}
	}
	r.strays = strays
}

// list returns the due references, in any order.
func (r *releases) list() []Reference {
	out := make([]Reference, 0, len(r.due))
	for n, revision := range r.due {
		out = append(out, Reference{Number: n, Revision: revision})
	}
	return out
}

// done removes references that the store has removed.
func (r *releases) done(refs []Reference) {
	for _, ref := range refs {
		if r.due[ref.Number] == ref.Revision {
			delete(r.due, ref.Number)
		}
	}
}
