// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package snapshot

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/store"
	"github.com/sluice-net/sluice/kit/store/storetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// TestDamageIsReported corrupts each file in every way. Corrupt holds are refused. A corrupt cache or incarnation is
// renamed, and the service reports it.
func TestDamageIsReported(t *testing.T) {
	t.Parallel()
	path, _ := saved(t)
	storetest.Sweep(t, storetest.State{
		Dir:         path,
		Replaceable: []string{KnownFile, IncarnationFile},
		PutAside:    map[string]string{KnownFile: DamagedFile, IncarnationFile: DamagedIncarnationFile},
		Open: func(dir string) (string, error) {
			d, l, err := opened(t, dir, "n1")
			if err := errors.Join(err, l.Damaged, l.DamagedIncarnation, d.Close()); err != nil {
				return "", err
			}
			return fmt.Sprintf("%+v", l), nil
		},
	})
}

// TestDamagedIncarnationKeepsHolds, with and without a file of holds. Without this file, the damaged file might have
// recorded that holds were written in this boot.
func TestDamagedIncarnationKeepsHolds(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(path, holds string) error
		refused bool
		holders int
	}{
		{"holds of this boot", func(string, string) error { return nil }, false, 3},
		{"holds of an earlier boot", func(path, holds string) error {
			return os.Rename(holds, filepath.Join(path, HoldsFile(otherBoot)))
		}, false, 0},
		{"no holds", func(_, holds string) error { return os.Remove(holds) }, true, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			path, want := saved(t)
			file := filepath.Join(path, IncarnationFile)
			if err := errors.Join(
				c.change(path, filepath.Join(path, HoldsFile(boot(t)))),
				os.WriteFile(file, []byte("junk"), 0o600),
			); err != nil {
				t.Fatal(err)
			}
			if c.refused {
				for range 2 { // also the next time
					if got, err := load(t, path, "n1"); !errors.Is(err, durable.ErrCorrupt) || !strings.Contains(err.Error(), "mv "+file+" ") {
						t.Errorf("loaded %+v, %v, want a refusal that names %s and the way out", got, err, file)
					}
				}
				if err := os.Rename(file, file+".refused"); err != nil { // the way out
					t.Fatal(err)
				}
			}
			got, err := load(t, path, "n1")
			if err != nil || len(got.Holds.Holders) != c.holders || got.Incarnation == want.Incarnation || !reflect.DeepEqual(got.Known, want.Known) {
				t.Errorf("loaded %+v, %v, want %d holders, another incarnation and the cache", got, err, c.holders)
			}
			if damaged := fmt.Sprint(got.DamagedIncarnation); !c.refused && !strings.Contains(damaged, file) {
				t.Errorf("%s does not name %s", damaged, file)
			}
			again, err := load(t, path, "n1")
			if err != nil || again.DamagedIncarnation != nil || again.Incarnation != got.Incarnation {
				t.Errorf("the next start: %+v, %v, want the same incarnation", again, err)
			}
		})
	}
}

// failing lets n operations that change the disk succeed. Then all operations fail with the errno, or only the next
// one.
func failing(n int, errno syscall.Errno, all bool) (fail func(disktest.Op) error, failed func() bool) {
	seen := 0
	fail = func(disktest.Op) error {
		seen++
		if seen == n+1 || all && seen > n {
			return errno
		}
		return nil
	}
	return fail, func() bool { return seen > n }
}

// TestStartOnADiskThatTakesNoWrites loses nothing. If the start fails, the error contains the file, and the next start
// succeeds once the disk accepts writes.
func TestStartOnADiskThatTakesNoWrites(t *testing.T) {
	for _, c := range []struct {
		errno      syscall.Errno
		all, there bool
	}{
		{syscall.ENOSPC, true, false},
		{syscall.ENOSPC, true, true},
		{syscall.EROFS, true, true},
		{syscall.EIO, false, false},
		{syscall.EIO, false, true},
	} {
		for n := 0; ; n++ {
			path, want := stateDir(t), Loaded{}
			if c.there {
				path, want = saved(t)
			} else if err := os.Mkdir(path, 0o750); err != nil {
				t.Fatal(err)
			}
			disk := disktest.New(t, filepath.Dir(path))
			fail, failed := failing(n, c.errno, c.all)
			disk.Fail(fail)
			var first Loaded
			var err error
			disk.Run(t, func() { first, err = load(t, path, "n1") })
			disk.Fail(nil)
			what := fmt.Sprintf("%v after %d operations, all of them: %v, state there: %v", c.errno, n, c.all, c.there)
			if damaged := errors.Join(first.Damaged, first.DamagedIncarnation); damaged != nil || err != nil && (!strings.Contains(err.Error(), c.errno.Error()) || !strings.Contains(err.Error(), path)) {
				t.Errorf("%s: %v, corrupt: %v; want the error of the disk with the file", what, err, damaged)
			}
			got, err := load(t, path, "n1")
			if !c.there {
				want.Incarnation = got.Incarnation
			}
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Fatalf("%s: the next start loaded %+v, %v\nwant %+v", what, got, err, want)
			}
			if !failed() {
				break // fewer operations than that
			}
		}
	}
}

// TestRunOnADiskThatTakesNoWrites repeats each change that was not confirmed.
func TestRunOnADiskThatTakesNoWrites(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EROFS} {
		path, want := saved(t)
		disk := disktest.New(t, path)
		disk.Run(t, func() {
			d, _, err := opened(t, path, "n1")
			if err != nil {
				t.Error(err)
				return
			}
			for n := range 12 {
				number := identity.MinCluster + identity.Numeric(n)
				r := allocator.HolderRecord{Holder: allocator.EndpointHolder(fmt.Sprint("new", n), "eth0"), Identity: id(t, number, fmt.Sprint("app", n))}
				save := func() error {
					return d.SaveHolds(allocator.HoldsChange{Put: []allocator.HolderRecord{r}, NextNodeLocal: want.Holds.NextNodeLocal, Session: want.Holds.Session})
				}
				fail, _ := failing(n, errno, true)
				disk.Fail(fail)
				err := save()
				disk.Fail(nil)
				if err != nil && (!errors.Is(err, errno) || !strings.Contains(err.Error(), HoldsFile(boot(t)))) {
					t.Errorf("%v after %d operations: %v, want the error of the disk with the file", errno, n, err)
				}
				if err != nil {
					if err := save(); err != nil {
						t.Errorf("with space again: %v", err)
					}
				}
				want.Holds.Holders = append(want.Holds.Holders, r)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		slices.SortFunc(want.Holds.Holders, func(x, y allocator.HolderRecord) int { return strings.Compare(string(x.Holder), string(y.Holder)) })
		if got, err := load(t, path, "n1"); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("the next start loaded %+v, %v\nwant %+v", got, err, want)
		}
	}
}

// TestDiskErrorEndsTheProcess: after an I/O error the content of the disk is unknown, so the process ends and the next
// process reads the files again.
func TestDiskErrorEndsTheProcess(t *testing.T) {
	path, want := saved(t)
	disk := disktest.New(t, path)
	disk.Run(t, func() {
		d, _, err := opened(t, path, "n1")
		if err != nil {
			t.Error(err)
			return
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := d.Watch(ended); err != nil {
			t.Errorf("with a disk that works: %v", err)
		}
		fail, _ := failing(0, syscall.EIO, false)
		disk.Fail(fail)
		err = d.SaveHolds(allocator.HoldsChange{
			Put:           []allocator.HolderRecord{{Holder: allocator.EndpointHolder("new", "eth0"), Identity: id(t, identity.MinCluster, "app")}},
			NextNodeLocal: want.Holds.NextNodeLocal, Session: want.Holds.Session,
		})
		disk.Fail(nil)
		if !errors.Is(err, store.ErrLost) {
			t.Errorf("save: %v, want %v", err, store.ErrLost)
		}
		if err := d.Watch(t.Context()); !errors.Is(err, store.ErrLost) {
			t.Errorf("watch: %v, want %v", err, store.ErrLost)
		}
		if err := d.Close(); err != nil && !errors.Is(err, store.ErrLost) {
			t.Error(err)
		}
	})
	if _, err := load(t, path, "n1"); err != nil {
		t.Errorf("the next start: %v", err)
	}
}

// TestPowerCutKeepsIncarnationAndCache cuts the power at 100 moments. Holders do not survive the following boot. The
// incarnation of the directory and the identities passed to SaveKnown do.
func TestPowerCutKeepsIncarnationAndCache(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "state")
	if err := os.Mkdir(path, 0o750); err != nil {
		t.Fatal(err)
	}
	disk := disktest.New(t, root)
	incarnation, saves := "", 0
	disk.Run(t, func() {
		for range 4 { // restarts
			d, l, err := opened(t, path, "n1")
			if err != nil {
				t.Error(err)
				return
			}
			incarnation = l.Incarnation
			disk.Mark(saves + 1)
			for range 8 {
				number := identity.MinCluster + identity.Numeric(saves)
				what := id(t, number, fmt.Sprint("app", saves))
				if err := errors.Join(
					d.NoteKnown(allocator.KnownChange{Put: []identity.Identity{what}}),
					d.SaveHolds(allocator.HoldsChange{Put: []allocator.HolderRecord{{Holder: allocator.ReferenceHolder(fmt.Sprint(saves)), Identity: what}}}),
					saveKnown(d, allocator.KnownChange{Put: []identity.Identity{what}, Heard: heardAt(saves)}),
				); err != nil {
					t.Error(err)
				}
				saves++
				disk.Mark(saves + 1)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	random := rand.New(rand.NewPCG(9, 10)) //nolint:gosec // the same cuts in each run
	ops := len(disk.Ops())
	cuts := make([]int, 0, 140)
	for range 100 {
		cuts = append(cuts, random.IntN(ops+1))
	}
	for n := range 40 { // the creation
		cuts = append(cuts, n)
	}
	for _, n := range cuts {
		after := t.TempDir()
		marked := disk.Cut(t, n, random, after)
		state := filepath.Join(after, "state")
		if err := os.MkdirAll(state, 0o750); err != nil {
			t.Fatal(err)
		}
		reboot(t, state)
		got, err := load(t, state, "n1")
		if damaged := errors.Join(got.Damaged, got.DamagedIncarnation); err != nil || damaged != nil {
			t.Fatalf("a loss of power after %d of %d operations: %v, corrupt: %v", n, ops, err, damaged)
		}
		if len(got.Holds.Holders) != 0 {
			t.Errorf("a loss of power after %d of %d operations: holders of the previous boot: %+v", n, ops, got.Holds)
		}
		if marked == 0 {
			continue // nothing was answered
		}
		if known := len(got.Known.Identities); got.Incarnation != incarnation || known < marked-1 || known > marked {
			t.Errorf("a loss of power after %d of %d operations: incarnation %s and %d identities, answered were %s and %d", n, ops, got.Incarnation, known, incarnation, marked-1)
		} else if known > 0 && !got.Known.Heard.Equal(heardAt(known-1)) {
			t.Errorf("a loss of power after %d of %d operations: heard at %v with %d identities", n, ops, got.Known.Heard, known)
		}
	}
}

func heardAt(n int) time.Time { return time.UnixMilli(1_700_000_000_000 + int64(n)) }

// reboot gives the files of this boot to another one.
func reboot(t *testing.T, state string) {
	t.Helper()
	file := filepath.Join(state, HoldsFile(boot(t)))
	for _, suffix := range []string{"", ".new"} {
		if err := os.Rename(file+suffix, filepath.Join(state, HoldsFile(otherBoot)+suffix)); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	path := filepath.Join(state, IncarnationFile)
	var rec incarnationRecord
	err := durable.Load(path, 4096, incarnationSchema, &rec)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if rec.Boot != "" {
		rec.Boot = otherBoot
	}
	if err := errors.Join(err, durable.Save(path, incarnationSchema, rec, durable.SyncNone)); err != nil {
		t.Fatal(err)
	}
}
