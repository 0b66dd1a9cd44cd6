// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/store"
)

// count writes n in one commit, together with records that make the commit touch many pages.
func count(s *store.Store, n int) error {
	return s.Update(func(tx *store.Tx) error {
		tx.Put(records, []byte("count"), binary.BigEndian.AppendUint32(nil, uint32(n)))
		for i := range 20 {
			tx.Put(records, fmt.Appendf(nil, "%04d", (n*7919+i*613)%2000), make([]byte, 20+n%200))
		}
		return nil
	})
}

func counted(s *store.Store) (n int, err error) {
	err = s.View(func(tx *store.Tx) error {
		if b := tx.Get(records, []byte("count")); b != nil {
			n = int(binary.BigEndian.Uint32(b))
		}
		return nil
	})
	return n, err
}

// TestPowerCutLosesNothingThatWasAnswered proves the disk-related half of INV-10 and INV-60.
func TestPowerCutLosesNothingThatWasAnswered(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "state")
	disk := disktest.New(t, root)
	written := 0
	disk.Run(t, func() {
		for range 5 { // restarts
			s, done, err := open(t, dir, options())
			if err != nil {
				t.Error(err)
				return
			}
			for range 12 {
				written++
				if err := count(s, written); err != nil {
					t.Error(err)
				}
				disk.Mark(written)
			}
			done()
		}
	})
	random := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // deterministic cuts
	ops := len(disk.Ops())
	var cuts []int
	for range 100 {
		cuts = append(cuts, random.IntN(ops+1))
	}
	for n, o := range disk.Ops() {
		if o.Kind == disktest.SyncDir { // the creation of the file is complete
			cuts = append(cuts, slices.Repeat([]int{n}, 20)...)
		}
	}
	for _, n := range cuts {
		after := t.TempDir()
		marked := disk.Cut(t, n, random, after)
		s, done, err := open(t, filepath.Join(after, "state"), options())
		if err != nil {
			t.Fatalf("a loss of power after %d of %d operations: %v", n, ops, err)
		}
		if got, err := counted(s); err != nil || got < marked || got > marked+1 {
			t.Fatalf("a loss of power after %d of %d operations: commit %d, %v; answered was %d", n, ops, got, err, marked)
		}
		done()
	}
}

// TestEachCommitIsSynced guards against bbolt options that omit syncs.
func TestEachCommitIsSynced(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		s, _, err := open(t, filepath.Join(root, "state"), options())
		if err != nil {
			t.Error(err)
			return
		}
		for n := range 5 {
			before := disk.Count(disktest.Sync)
			if err := count(s, n); err != nil {
				t.Error(err)
			}
			if ops := disk.Ops(); disk.Count(disktest.Sync) < before+2 || ops[len(ops)-1].Kind != disktest.Sync {
				t.Errorf("commit %d: %d syncs, and a %s at its end; want two, and a sync", n, disk.Count(disktest.Sync)-before, ops[len(ops)-1].Kind)
			}
		}
	})
}

// TestCommitOfAKilledProcessIsSyncedBeforeItIsRead reads a commit that the previous process was
// killed before syncing.
func TestCommitOfAKilledProcessIsSyncedBeforeItIsRead(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "state")
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		s, done, err := open(t, dir, options())
		if err != nil {
			t.Error(err)
			return
		}
		syncs := 0
		disk.Fail(func(o disktest.Op) error {
			if o.Kind == disktest.Sync {
				if syncs++; syncs == 2 { // the header has been written
					return unix.EINTR
				}
			}
			return nil
		})
		if err := count(s, 1); !errors.Is(err, store.ErrLost) {
			t.Errorf("%v, want ErrLost", err)
		}
		done()
		disk.Fail(nil)
		s, done, err = open(t, dir, options())
		if err != nil {
			t.Error(err)
			return
		}
		n, err := counted(s)
		if err != nil || n != 1 {
			t.Errorf("%d, %v", n, err)
		}
		disk.Mark(n)
		done()
	})
	random := rand.New(rand.NewPCG(5, 6)) //nolint:gosec // deterministic cuts
	for range 30 {
		after := t.TempDir()
		disk.Cut(t, len(disk.Ops()), random, after)
		s, done, err := open(t, filepath.Join(after, "state"), options())
		if err != nil {
			t.Fatal(err)
		}
		if n, err := counted(s); err != nil || n != 1 {
			t.Fatalf("what the second process read is lost: %d, %v", n, err)
		}
		done()
	}
}

// TestDiskThatTakesNoWrites fails each write of a commit in turn.
func TestDiskThatTakesNoWrites(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EROFS} {
		root := t.TempDir()
		dir := filepath.Join(root, "state")
		disk := disktest.New(t, root)
		disk.Run(t, func() {
			s, done, err := open(t, dir, options())
			if err != nil {
				t.Error(err)
				return
			}
			n := 1
			if err := count(s, n); err != nil {
				t.Error(err)
			}
			for bad := range 12 {
				writes := 0
				disk.Fail(func(o disktest.Op) error {
					if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
						if writes++; writes > bad {
							return errno
						}
					}
					return nil
				})
				err := count(s, n+1)
				disk.Fail(nil)
				if err == nil {
					n++
					continue // the commit has fewer writes
				}
				if !errors.Is(err, store.ErrFull) || errors.Is(err, store.ErrLost) || !errors.Is(err, errno) || !strings.Contains(err.Error(), s.Path()) {
					t.Errorf("%v after %d writes: %v, want ErrFull", errno, bad, err)
				}
				if !errors.Is(s.Problem(), store.ErrFull) {
					t.Errorf("problem %v", s.Problem())
				}
				if got, err := counted(s); err != nil || got != n {
					t.Errorf("%v after %d writes: %d, %v; want %d", errno, bad, got, err, n)
				}
				n++
				if err := count(s, n); err != nil || s.Problem() != nil {
					t.Errorf("with space again: %v, problem %v", err, s.Problem())
				}
			}
			done()
			if s, _, err = open(t, dir, options()); err != nil {
				t.Error(err)
				return
			}
			if got, err := counted(s); err != nil || got != n {
				t.Errorf("the next start: %d, %v; want %d", got, err, n)
			}
		})
	}
}

func TestSyncThatFailsLosesTheStore(t *testing.T) {
	for bad := 1; bad <= 2; bad++ {
		root := t.TempDir()
		disk := disktest.New(t, root)
		disk.Run(t, func() {
			s, _, err := open(t, filepath.Join(root, "state"), options())
			if err != nil {
				t.Error(err)
				return
			}
			syncs := 0
			disk.Fail(func(o disktest.Op) error {
				if o.Kind == disktest.Sync {
					if syncs++; syncs == bad {
						return unix.ENOSPC // for a block that was already allocated
					}
				}
				return nil
			})
			for range 2 {
				if err := count(s, 1); !errors.Is(err, store.ErrLost) || errors.Is(err, store.ErrFull) {
					t.Errorf("sync %d: %v, want ErrLost", bad, err)
				}
			}
		})
	}
}

// TestReadOnlyOrFullDiskAtTheStart checks that the error names what cannot be written.
func TestReadOnlyOrFullDiskAtTheStart(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EROFS} {
		for _, there := range []bool{false, true} {
			root := t.TempDir()
			dir := filepath.Join(root, "state")
			if there {
				_, done := mustOpen(t, dir)
				done()
				if err := os.Remove(filepath.Join(dir, store.MarkerName)); err != nil {
					t.Fatal(err)
				}
			}
			disk := disktest.New(t, root)
			disk.Fail(func(o disktest.Op) error {
				if o.Kind == disktest.Write {
					return errno
				}
				return nil
			})
			disk.Run(t, func() {
				if _, _, err := open(t, dir, options()); !errors.Is(err, errno) || !strings.Contains(err.Error(), dir) {
					t.Errorf("%v, state there %v: %v", errno, there, err)
				}
			})
			s, done := mustOpen(t, dir)
			if got := contents(t, s); got != "" {
				t.Errorf("%q", got)
			}
			done()
		}
	}
}
