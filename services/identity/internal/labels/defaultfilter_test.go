// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package labels

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/label"
)

// TestDefaultFilterIsTheOneThatPolicyIsTestedWith: the test vectors of the policy service create identities as this
// service does. Services do not import each other, so the tests of both read one file.
func TestDefaultFilterIsTheOneThatPolicyIsTestedWith(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("testdata/default-filter.json")
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Include, Exclude []string
		Kept             map[string]bool
	}
	if err := json.Unmarshal(data, &want); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(defaultInclude, want.Include) || !slices.Equal(defaultExclude, want.Exclude) {
		t.Errorf("rules %q and %q, in the file %q and %q", defaultInclude, defaultExclude, want.Include, want.Exclude)
	}
	f, err := NewFilter(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(want.Kept) == 0 {
		t.Fatal("the file has no labels")
	}
	for key, kept := range want.Kept {
		if got := f.Keeps(label.Label{Source: "k8s", Key: key}); got != kept {
			t.Errorf("%s is kept: %t, in the file %t", key, got, kept)
		}
	}
}
