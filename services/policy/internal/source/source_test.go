// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package source

import "testing"

func TestSourcesHaveOneRowEach(t *testing.T) {
	seen := make(map[string]bool)
	for _, s := range All() {
		if s.Name == "" || seen[s.Name] {
			t.Errorf("the name %q is empty or another row's", s.Name)
		}
		seen[s.Name] = true
		if Of(s.Name) != s {
			t.Errorf("%s: got %+v, want %+v", s.Name, Of(s.Name), s)
		}
	}
}

// TestPropertiesOfASourceAgree: combinations that package owner does not support.
func TestPropertiesOfASourceAgree(t *testing.T) {
	for _, s := range All() {
		switch {
		case !s.Policies && s != (Source{Name: s.Name}):
			t.Errorf("%s brings no policies and has properties of them: %+v", s.Name, s)
		case s.Calls && s.Files:
			t.Errorf("%s: calls bring no files", s.Name)
		case s.Folds && !s.Redelivers:
			t.Errorf("%s: nothing is kept of a folded policy, so its source has to deliver it again", s.Name)
		case s.Shared && !s.Stamped:
			t.Errorf("%s: nodes give places in one order, which objects without a time of creation have not", s.Name)
		}
	}
}

func TestAnUnknownSourceHasNoProperty(t *testing.T) {
	if got, want := Of("of-a-later-version"), (Source{Name: "of-a-later-version"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
