// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package logfile

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTurningLosesNoRecordOfConcurrentWriters(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "cni.log")
	const writers, each, limit = 8, 20, 3000
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				f, err := open(path, limit)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := fmt.Fprintf(f, "record %d-%d\n", w, i); err != nil {
					t.Error(err)
				}
				f.Close()
			}
		})
	}
	wg.Wait()
	seen := map[string]int{}
	files, err := filepath.Glob(path + "*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(b) {
			seen[string(line)]++
		}
	}
	if len(seen) != writers*each {
		t.Errorf("%d different records in %v, want %d", len(seen), files, writers*each)
	}
}

func TestOldFilesGo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cni.log")
	for i := range 10 {
		f, err := open(path, 1)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(f, i)
		f.Close()
	}
	files, err := filepath.Glob(path + "*")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != Keep+1 {
		t.Errorf("%v, want the log and %d old ones", files, Keep)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "9\n" {
		t.Errorf("newest record %q, %v", b, err)
	}
}

func TestALinkIsNotFollowed(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "cni.log")); err != nil {
		t.Fatal(err)
	}
	if f, err := Open(filepath.Join(dir, "cni.log")); err == nil {
		f.Close()
		t.Error("the link was opened")
	}
}

func TestAProcessThatIsStuckWhileTurningHoldsNobodyUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cni.log")
	if err := os.WriteFile(path, []byte("old\n"), 0o640); err != nil {
		t.Fatal(err)
	}
	stuck, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer stuck.Close()
	if err := unix.Flock(int(stuck.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	f, err := open(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := fmt.Fprintln(f, "new"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "old\nnew\n" {
		t.Errorf("the log holds %q, %v", b, err)
	}
}
