// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package journal

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// open returns the journal and the revisions of the changes in it.
func open(t *testing.T, dir string) (*Journal, []uint64, int64, error) {
	t.Helper()
	var got []uint64
	j, cut, err := Open(dir, func(c Change) error { got = append(got, c.Revision); return nil })
	if j != nil {
		t.Cleanup(func() { j.Close() })
	}
	return j, got, cut, err
}

func write(t *testing.T, j *Journal, revisions ...uint64) {
	t.Helper()
	for _, r := range revisions {
		if err := j.Append(t.Context(), Change{Revision: r, Policies: []Policy{{Key: Key{Kind: "K", Name: "n"}, Manifest: []byte("text\n")}}}, true); err != nil {
			t.Fatal(err)
		}
	}
}

func three(t *testing.T) (dir string, content []byte) {
	t.Helper()
	dir = t.TempDir()
	j, _, _, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	write(t, j, 1, 2, 3)
	j.Close()
	content, err = os.ReadFile(filepath.Join(dir, File))
	if err != nil {
		t.Fatal(err)
	}
	return dir, content
}

func TestEveryUnfinishedEndIsCutOff(t *testing.T) {
	dir, content := three(t)
	lines := bytes.SplitAfter(content, []byte("\n"))
	whole := len(lines[0]) + len(lines[1])
	for end := whole; end < len(content); end += 7 {
		if err := os.WriteFile(filepath.Join(dir, File), content[:end], 0o600); err != nil {
			t.Fatal(err)
		}
		j, got, cut, err := open(t, dir)
		if err != nil || fmt.Sprint(got) != "[1 2]" || cut != int64(end-whole) {
			t.Fatalf("%d bytes: %v, cut %d, %v", end, got, cut, err)
		}
		write(t, j, 9)
		j.Close()
		j, got, cut, err = open(t, dir)
		if err != nil || fmt.Sprint(got) != "[1 2 9]" || cut != 0 {
			t.Fatalf("%d bytes, then written to: %v, cut %d, %v", end, got, cut, err)
		}
		j.Close()
	}
}

func TestDamageIsRefusedAndTouchesNothing(t *testing.T) {
	dir, content := three(t)
	path := filepath.Join(dir, File)
	for _, damage := range []func(byte) byte{
		func(b byte) byte { return b ^ 1 },
		func(byte) byte { return 0 },
		func(byte) byte { return '\n' },
	} {
		for at := range content {
			bad := bytes.Clone(content)
			if bad[at] = damage(bad[at]); bad[at] == content[at] {
				continue
			}
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			_, _, _, err := open(t, dir)
			if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "restore it") {
				t.Fatalf("byte %d, %q instead of %q: %v", at, bad[at], content[at], err)
			}
			if now, _ := os.ReadFile(path); !bytes.Equal(now, bad) {
				t.Fatalf("byte %d: the file was changed", at)
			}
		}
	}
}

func TestChangeThatCouldNotBeReadAgainIsNotWritten(t *testing.T) {
	dir, _ := three(t)
	j, _, _, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	old := maxLine
	maxLine = 4096
	t.Cleanup(func() { maxLine = old })
	long := Change{Revision: 4, Policies: []Policy{{Manifest: bytes.Repeat([]byte("x"), 4096)}}}
	if err := j.Append(t.Context(), long, true); err == nil || !strings.Contains(err.Error(), "4096") {
		t.Errorf("appended: %v", err)
	}
	if err := j.Rewrite(t.Context(), []Change{{Revision: 3}, long}); err == nil || !strings.Contains(err.Error(), "4096") {
		t.Errorf("written anew: %v", err)
	}
	write(t, j, 5)
	j.Close()
	if _, got, _, err := open(t, dir); err != nil || fmt.Sprint(got) != "[1 2 3 5]" {
		t.Errorf("%v, %v", got, err)
	}
}

func TestBlocksOfALostPowerAreAnUnfinishedChange(t *testing.T) {
	dir, content := three(t)
	whole := len(content)
	j, _, _, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Append(t.Context(), Change{Revision: 4, Policies: []Policy{{Manifest: bytes.Repeat([]byte("x"), 6000)}}}, true); err != nil {
		t.Fatal(err)
	}
	j.Close()
	if content, err = os.ReadFile(filepath.Join(dir, File)); err != nil {
		t.Fatal(err)
	}
	for what, lost := range map[string][2]int{
		"the block in the middle": {4096, 8192}, "all but the first block": {4096, len(content)}, "the first part": {whole, 4096},
	} {
		bad := bytes.Clone(content)
		clear(bad[lost[0]:min(lost[1], len(bad))])
		if err := os.WriteFile(filepath.Join(dir, File), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		j, got, cut, err := open(t, dir)
		if err != nil || fmt.Sprint(got) != "[1 2 3]" || cut != int64(len(content)-whole) {
			t.Fatalf("%s: %v, cut %d, %v", what, got, cut, err)
		}
		j.Close()
	}
}

func TestZerosOfALostPowerAreAnUnfinishedChange(t *testing.T) {
	dir, content := three(t)
	if err := os.WriteFile(filepath.Join(dir, File), append(content, make([]byte, 4096)...), 0o600); err != nil {
		t.Fatal(err)
	}
	_, got, cut, err := open(t, dir)
	if err != nil || fmt.Sprint(got) != "[1 2 3]" || cut != 4096 {
		t.Errorf("%v, cut %d, %v", got, cut, err)
	}
}

func TestRewriteReplacesEverything(t *testing.T) {
	dir, _ := three(t)
	j, _, _, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Rewrite(context.Background(), []Change{{Revision: 7}}); err != nil {
		t.Fatal(err)
	}
	write(t, j, 8)
	j.Close()
	_, got, _, err := open(t, dir)
	if err != nil || fmt.Sprint(got) != "[7 8]" {
		t.Errorf("%v, %v", got, err)
	}
}

func TestDirectoryIsOfOneProcess(t *testing.T) {
	dir, _ := three(t)
	if _, _, _, err := open(t, dir); err != nil {
		t.Fatal(err)
	}
	old := lockWait
	lockWait = 0
	t.Cleanup(func() { lockWait = old })
	if _, _, _, err := open(t, dir); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Errorf("a second one: %v", err)
	}
}
