// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ruleset

import (
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/layer7"
)

// reopened returns the numbers in the file of a directory.
func reopened(t *testing.T, dir string) (*File, map[policytable.RuleSet]layer7.Digest) {
	t.Helper()
	got := make(map[policytable.RuleSet]layer7.Digest)
	f, err := OpenFile(dir, func(n policytable.RuleSet, d layer7.Digest) { got[n] = d })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, got
}

func TestNumbersAreReadAfterARestart(t *testing.T) {
	dir := t.TempDir()
	f, got := reopened(t, dir)
	if left, _ := os.ReadDir(dir); len(got)+len(left) != 0 {
		t.Fatalf("a new directory has %v and numbers %v", left, got)
	}
	change := func(n policytable.RuleSet, s *layer7.Set) Change {
		return Change{Number: n, Digest: set(int(n)).Digest(), Set: s}
	}
	if err := f.Write([]Change{change(1, set(1)), change(Size, set(Size)), change(7, set(7))}); err != nil {
		t.Fatal(err)
	}
	if err := f.Write([]Change{change(7, nil)}); err != nil {
		t.Fatal(err)
	}
	want := map[policytable.RuleSet]layer7.Digest{1: set(1).Digest(), Size: set(Size).Digest()}
	if _, got := reopened(t, dir); !maps.Equal(got, want) {
		t.Errorf("numbers %v, want %v", got, want)
	}
}

func TestFailedWriteIsRepeated(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "absent")
	f, _ := reopened(t, dir)
	if f.Write([]Change{{Number: 3, Digest: set(3).Digest(), Set: set(3)}}) == nil {
		t.Fatal("a file in an absent directory was written")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.Write(nil); err != nil {
		t.Fatal(err)
	}
	if _, got := reopened(t, dir); got[3] != set(3).Digest() {
		t.Errorf("numbers %v, want 3", got)
	}
}

func TestFilesOfOtherBootsAndVersionsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	f, _ := reopened(t, dir)
	for _, path := range []string{f.path, filepath.Join(dir, fileName+".another-boot")} {
		if err := os.WriteFile(path, make([]byte, 100*len(header)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, got := reopened(t, dir)
	if left, _ := os.ReadDir(dir); len(got)+len(left) != 0 {
		t.Errorf("left: %v and numbers %v", left, got)
	}
}
