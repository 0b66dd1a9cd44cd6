// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package source

import "testing"

func TestSourcesHaveOneRowEach(t *testing.T) {
	seen := make(map[string]bool)
	for _, s := range All() {
		if s.Name == "" || seen[s.Name] {
			t.Errorf("the name %q is empty or not unique", s.Name)
		}
		seen[s.Name] = true
		if Of(s.Name) != s {
			t.Errorf("%s: got %+v, want %+v", s.Name, Of(s.Name), s)
		}
	}
}

// TestPropertiesOfASourceAgree: package owner supports only some combinations of properties; every source has one of
// these.
func TestPropertiesOfASourceAgree(t *testing.T) {
	for _, s := range All() {
		switch {
		case !s.Policies && s != (Source{Name: s.Name}):
			t.Errorf("%s has no policies, but has properties of policies: %+v", s.Name, s)
		case s.Calls && s.Files:
			t.Errorf("%s: calls have no files", s.Name)
		case s.Folds && !s.Redelivers:
			t.Errorf("%s: folded policies are not kept, so the source must redeliver them", s.Name)
		case s.Shared && !s.Stamped:
			t.Errorf("%s: nodes admit policies in one order, which requires a creation time", s.Name)
		}
	}
}

func TestAnUnknownSourceHasNoProperty(t *testing.T) {
	if got, want := Of("of-a-later-version"), (Source{Name: "of-a-later-version"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
