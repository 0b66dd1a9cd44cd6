// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
)

func TestStrayReferenceIsDueWhenItIsSeenAgainUnchanged(t *testing.T) {
	held := func(n identity.Numeric) bool { return n == 300 }
	store := []Reference{{Number: 302, Revision: 7}, {Number: 301, Revision: 5}, {Number: 300, Revision: 3}}
	due := func(r *releases, want ...Reference) {
		t.Helper()
		got := r.list()
		slices.SortFunc(got, func(x, y Reference) int { return int(x.Number) - int(y.Number) })
		if !slices.Equal(got, want) {
			t.Errorf("due %v, want %v", got, want)
		}
	}
	r := newReleases()
	r.compare(store, false, held)
	due(&r)
	store[0].Revision = 8 // a claim wrote it
	r.compare(store, false, held)
	due(&r, Reference{Number: 301, Revision: 5})
	r.compare(nil, false, held)
	r.compare(store, false, held) // 302 was absent: it is seen once again
	due(&r, Reference{Number: 301, Revision: 5})

	strict := newReleases()
	strict.compare(store, true, held)
	due(&strict, Reference{Number: 301, Revision: 5}, Reference{Number: 302, Revision: 8})
	sent := strict.list()
	strict.due[302] = 9 // released again meanwhile
	strict.done(sent)
	due(&strict, Reference{Number: 302, Revision: 9})
}
