// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ruleset

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
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
	if err := f.Write([]Change{change(1, set(1)), change(2, set(2)), change(3, set(3))}); err != nil {
		t.Fatal(err)
	}
	if err := f.Write([]Change{change(2, nil)}); err != nil {
		t.Fatal(err)
	}
	want := map[policytable.RuleSet]layer7.Digest{1: set(1).Digest(), 3: set(3).Digest()}
	if _, got := reopened(t, dir); !maps.Equal(got, want) {
		t.Errorf("numbers %v, want %v", got, want)
	}
}

func TestFailedWriteIsRepeated(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "absent")
	f, _ := reopened(t, dir)
	if f.Write([]Change{{Number: 1, Digest: set(3).Digest(), Set: set(3)}}) == nil {
		t.Fatal("a file in an absent directory was written")
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.Write(nil); err != nil {
		t.Fatal(err)
	}
	if _, got := reopened(t, dir); got[1] != set(3).Digest() {
		t.Errorf("numbers %v, want 1", got)
	}
}

func TestFilesOfOtherBootsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, fileName+".another-boot"), make([]byte, fileSize), 0o600); err != nil {
		t.Fatal(err)
	}
	f, got := reopened(t, dir)
	if left, _ := os.ReadDir(dir); len(got)+len(left) != 0 || f.Corrupt != nil {
		t.Errorf("left: %v and numbers %v, %v", left, got, f.Corrupt)
	}
}

// TestCorruptFileIsSeen: no number of a corrupt file is used. The file stays until numbers are stored again.
func TestCorruptFileIsSeen(t *testing.T) {
	dir := t.TempDir()
	f, _ := reopened(t, dir)
	var changes []Change
	for i := range 5 {
		n := policytable.RuleSet(i + 1) //nolint:gosec // a few
		changes = append(changes, Change{Number: n, Digest: set(i).Digest(), Set: set(i)})
	}
	if err := f.Write(changes); err != nil {
		t.Fatal(err)
	}
	if err := f.Write([]Change{{Number: 2}}); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(f.path)
	if err != nil {
		t.Fatal(err)
	}
	changed := func(change func(b []byte) []byte) []byte { return change(bytes.Clone(good)) }
	for what, bad := range map[string][]byte{
		"empty":      {},
		"cut":        good[:fileSize-1],
		"short":      good[:3*slotSize],
		"longer":     append(bytes.Clone(good), 0),
		"zeros":      make([]byte, fileSize),
		"a version":  changed(func(b []byte) []byte { b[26] = '1'; return b }),
		"a flip":     changed(func(b []byte) []byte { b[3*slotSize+9] ^= 1; return b }),
		"a checksum": changed(func(b []byte) []byte { b[3*slotSize+len(layer7.Digest{})] ^= 1; return b }),
		"a hole":     changed(func(b []byte) []byte { clear(b[slotSize : 3*slotSize]); return b }),
		"a swap": changed(func(b []byte) []byte {
			copy(b[slotSize:], good[3*slotSize:4*slotSize])
			copy(b[3*slotSize:], good[slotSize:2*slotSize])
			return b
		}),
	} {
		if err := os.WriteFile(f.path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		again, got := reopened(t, dir)
		if again.Corrupt == nil || len(got) > 0 {
			t.Errorf("%s: numbers %v, %v", what, got, again.Corrupt)
		}
		if left, err := os.ReadFile(f.path); err != nil || !bytes.Equal(left, bad) {
			t.Errorf("%s: the file has changed, %v", what, err)
		}
	}
	again, _ := reopened(t, dir)
	if err := again.Write(changes[:1]); err != nil {
		t.Fatal(err)
	}
	if last, got := reopened(t, dir); last.Corrupt != nil || len(got) != 1 || got[1] != set(0).Digest() {
		t.Errorf("after a write: numbers %v, %v", got, last.Corrupt)
	}
}
