// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package spool

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/model/deletion"
)

// whole checks that the entry of the owner is as Put writes it.
func whole(path string, want deletion.Entry) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	got, err := deletion.Parse(filepath.Base(path), b)
	if err != nil {
		return fmt.Errorf("%s: %w: %q", path, err, b)
	}
	if got != want {
		return fmt.Errorf("%s: %+v, want %+v", path, got, want)
	}
	return nil
}

func entry(container string) deletion.Entry {
	return deletion.Entry{Owner: owner(container), Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
}

// TestDamagedEntryIsWrittenAgain: a repeated DEL repairs the entry of its owner. Entries of other owners stay for the
// datapath, which reports them.
func TestDamagedEntryIsWrittenAgain(t *testing.T) {
	state := t.TempDir()
	dir := prepare(t, state)
	mine := entry("a")
	path, others := filepath.Join(dir, owner("a").Key()), filepath.Join(dir, owner("b").Key())
	if err := Put(t.Context(), state, mine); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damaged := [][]byte{[]byte("hello\n"), make([]byte, len(good)), []byte(strings.Replace(string(good), `"version":1`, `"version":99`, 1)), []byte(strings.Replace(string(good), `"a"`, `"c"`, 1))}
	for n := range good {
		damaged = append(damaged, good[:n])
	}
	for _, content := range damaged {
		if err := errors.Join(os.WriteFile(path, content, 0o600), os.WriteFile(others, content, 0o600)); err != nil {
			t.Fatal(err)
		}
		if waits, err := Has(dir, owner("a")); err != nil || !waits {
			t.Errorf("%q: waits %v, %v; a corrupt entry is one", content, waits, err)
		}
		if err := errors.Join(Put(t.Context(), state, mine), whole(path, mine)); err != nil {
			t.Errorf("%q: %v", content, err)
		}
		if now, err := os.ReadFile(others); err != nil || string(now) != string(content) {
			t.Errorf("the entry of another owner was changed: %q, %v; was %q", now, err, content)
		}
	}
}

// TestPutOnADiskThatTakesNoWrites fails the operations of Put in turn: either Put returns the error of the disk with
// the spool's name, or the entry is stored.
func TestPutOnADiskThatTakesNoWrites(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EIO} {
		for _, there := range []bool{false, true} {
			for n := 0; ; n++ {
				state := t.TempDir()
				dir := prepare(t, state)
				before := entry("before")
				if err := Put(t.Context(), state, before); err != nil {
					t.Fatal(err)
				}
				e := entry("a")
				if there {
					e = before
				}
				disk := disktest.New(t, dir)
				seen := 0
				disk.Fail(func(disktest.Op) error {
					if seen++; seen > n {
						return errno
					}
					return nil
				})
				var err error
				disk.Run(t, func() { err = Put(t.Context(), state, e) })
				path := filepath.Join(dir, e.Owner.Key())
				if err != nil && (!errors.Is(err, errno) || !strings.Contains(err.Error(), dir)) {
					t.Errorf("%v after %d operations: %v, want the error of the disk with %s", errno, n, err, dir)
				}
				if err := whole(path, e); err != nil && (seen <= n || there || !errors.Is(err, os.ErrNotExist)) {
					t.Errorf("%v after %d operations: %v", errno, n, err)
				}
				if err := whole(filepath.Join(dir, owner("before").Key()), before); err != nil {
					t.Errorf("%v after %d operations: the entry that was there: %v", errno, n, err)
				}
				// The runtime repeats a DEL that was not answered.
				if err := errors.Join(Put(t.Context(), state, e), whole(path, e)); err != nil {
					t.Errorf("with space again: %v", err)
				}
				if seen <= n {
					if err != nil {
						t.Errorf("no operation failed, and Put did: %v", err)
					}
					break
				}
			}
		}
	}
}

// TestPowerCutKeepsAnsweredDeletions cuts the power at 100 moments.
func TestPowerCutKeepsAnsweredDeletions(t *testing.T) {
	state := t.TempDir()
	dir := prepare(t, state)
	disk := disktest.New(t, dir)
	const puts = 20
	disk.Run(t, func() {
		for n := range puts {
			if err := Put(t.Context(), state, entry(fmt.Sprint("c", n))); err != nil {
				t.Error(err)
			}
			disk.Mark(n + 1)
		}
	})
	random := rand.New(rand.NewPCG(1, 7)) //nolint:gosec // the same cuts in each run
	ops := len(disk.Ops())
	for range 100 {
		n := random.IntN(ops + 1)
		after := t.TempDir()
		marked := disk.Cut(t, n, random, after)
		for k := range puts {
			e := entry(fmt.Sprint("c", k))
			err := whole(filepath.Join(after, e.Owner.Key()), e)
			if err != nil && (k < marked || !errors.Is(err, os.ErrNotExist)) {
				t.Errorf("a loss of power after %d of %d operations, %d answered: %v", n, ops, marked, err)
			}
		}
	}
}
