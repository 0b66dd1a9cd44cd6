// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netns

import (
	"os"
	"path/filepath"
	"testing"
)

// TestOnlyWhatTheDatapathCannotReachIsNamed: a runtime may keep network namespaces in a directory that only root can
// enter.
func TestOnlyWhatTheDatapathCannotReachIsNamed(t *testing.T) {
	dir, err := os.MkdirTemp("", "netns") // t.TempDir's parent is closed to others
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for _, name := range []string{"open", "closed", filepath.Join("closed", "inside"), ""} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(path, "ns"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if name == "closed" {
			continue
		}
		if err := os.Chmod(path, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(dir, "closed", "ns"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{
		filepath.Join(dir, "ns"): false, filepath.Join(dir, "open", "ns"): false,
		filepath.Join(dir, "closed", "ns"): true, filepath.Join(dir, "closed", "inside", "ns"): true, filepath.Join(dir, "link"): true,
		filepath.Join(dir, "missing"): false, "/proc/1/ns/net": true,
	} {
		if got := NeedsName(path); got != want {
			t.Errorf("NeedsName(%s) = %v, want %v", path, got, want)
		}
	}
}
