// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import "github.com/sluice-net/sluice/model/identity"

// localNumbers assigns node-local numbers to label sets. No two label sets have the same number. A released number is
// assigned again as late as the range allows. The caller must hold the lock.
type localNumbers struct {
	byText map[string]identity.Numeric // by canonical text
	taken  map[identity.Numeric]bool   // the numbers in byText
	next   identity.Numeric            // where the search for a free number begins
}

// newLocalNumbers returns an empty localNumbers whose search begins at next, or at the
// first node-local number if next is not node-local.
func newLocalNumbers(next identity.Numeric) localNumbers {
	if next.Scope() != identity.ScopeNodeLocal {
		next = identity.MinNodeLocal
	}
	return localNumbers{byText: map[string]identity.Numeric{}, taken: map[identity.Numeric]bool{}, next: next}
}

// restore records a number that an earlier process assigned.
func (l *localNumbers) restore(text string, n identity.Numeric) {
	l.byText[text] = n
	l.taken[n] = true
}

// number returns the number of a label set, and assigns one if it has none. ok is false
// if every number is taken.
func (l *localNumbers) number(text string) (n identity.Numeric, ok bool) {
	if n, ok := l.byText[text]; ok {
		return n, true
	}
	for range identity.NodeLocalSize {
		n = l.next
		l.next = identity.MinNodeLocal + (n-identity.MinNodeLocal+1)%identity.Numeric(identity.NodeLocalSize)
		if !l.taken[n] {
			l.restore(text, n)
			return n, true
		}
	}
	return 0, false
}

// release frees the number of a label set.
func (l *localNumbers) release(text string, n identity.Numeric) {
	delete(l.taken, n)
	if l.byText[text] == n {
		delete(l.byText, text)
	}
}
