// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"os"
	"path/filepath"
	"testing"
)

func TestStateOfFrontendsOutlivesItsProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "frontends.json")
	f := OpenFrontends(path)
	if state, err := f.Load(); state != "" || err != nil {
		t.Errorf("before anything was saved: %q, %v", state, err)
	}
	for _, want := range []string{"\x00\xff3456789abcdef", "another"} {
		if err := f.Save(want); err != nil {
			t.Fatal(err)
		}
		if got, err := OpenFrontends(path).Load(); got != want || err != nil {
			t.Errorf("loaded %q, %v, want %q", got, err, want)
		}
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, whole[:len(whole)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	if state, err := f.Load(); err == nil {
		t.Errorf("half of the file loads as %q", state)
	}
	for range 2 {
		if err := f.Forget(); err != nil {
			t.Fatal(err)
		}
	}
	if state, err := f.Load(); state != "" || err != nil {
		t.Errorf("after Forget: %q, %v", state, err)
	}
}
