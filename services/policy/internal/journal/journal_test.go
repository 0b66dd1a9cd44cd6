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
	// Not the newline at the end: without it the change is an unfinished one.
	for at := 0; at < len(content)-1; at += 3 {
		if content[at] == '\n' {
			continue
		}
		bad := bytes.Clone(content)
		bad[at] ^= 1
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, _, err := open(t, dir)
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "restore it") {
			t.Fatalf("byte %d (%q): %v", at, content[at], err)
		}
		if now, _ := os.ReadFile(path); !bytes.Equal(now, bad) {
			t.Fatalf("byte %d: the file was changed", at)
		}
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
