// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package journal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/store"
)

// change returns the change of a revision: from 2 on it replaces a third of the objects of the
// previous revision, removes a third, and adds some.
func change(revision, objects int) Change[object] {
	c := Change[object]{Revision: uint64(revision)}
	for i := range objects {
		switch name := fmt.Sprint("p", i); (i + revision) % 3 {
		case 0:
			c.Deletes = append(c.Deletes, name)
		case 1:
			c.Puts = append(c.Puts, named(name, uint64(revision)))
		}
	}
	c.Puts = append(c.Puts, named(fmt.Sprint("only ", revision), uint64(revision)))
	return c
}

// after returns the objects after all changes up to a revision, as text.
func after(revision, objects int) string {
	all := make(map[string]string)
	for r := 1; r <= revision; r++ {
		c := change(r, objects)
		for _, k := range c.Deletes {
			delete(all, "object "+k)
		}
		for _, p := range c.Puts {
			all["object "+p.Name] = description(p)
		}
		all["revision"] = fmt.Sprint(r)
	}
	return describe(all)
}

func stage(t testing.TB, j *Journal[object], c Change[object]) *Staged[object] {
	t.Helper()
	s, err := j.Stage(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// records counts the records of a bucket.
func records(t testing.TB, j *Journal[object], bucket string) int {
	t.Helper()
	n := 0
	if err := j.file.View(func(tx *store.Tx) error {
		return tx.ForEach(bucket, func(_, _ []byte) error { n++; return nil })
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// withoutCache removes the cache, as the next start after a loss of power does.
func withoutCache(t *testing.T, dir string) {
	t.Helper()
	caches, err := filepath.Glob(filepath.Join(dir, "cache.*"))
	for _, path := range caches {
		err = errors.Join(err, os.Remove(path))
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestStagedChangeCountsWhenItIsCommitted(t *testing.T) {
	const objects = 4 * partRecords
	dir := filepath.Join(t.TempDir(), "state")
	j, _ := mustOpen(t, dir)
	commit(t, j, change(1, objects))
	before := records(t, j, "objects")

	s := stage(t, j, change(2, objects))
	if s.Small() || records(t, j, "objects") == before {
		t.Fatal("nothing was staged: the test is not effective")
	}
	closed(t, j) // leaves the files as after a kill
	j, got := mustOpen(t, dir)
	if describe(got) != after(1, objects) || records(t, j, "objects") != before {
		t.Errorf("after a change that was not committed: %d records, want %d", records(t, j, "objects"), before)
	}

	if err := stage(t, j, change(2, objects)).Discard(); err != nil || records(t, j, "objects") != before {
		t.Errorf("after a change that was discarded: %d records, %v, want %d", records(t, j, "objects"), err, before)
	}

	if err := stage(t, j, change(2, objects)).Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	closed(t, j)
	j, got = mustOpen(t, dir)
	if describe(got) != after(2, objects) || records(t, j, "objects") != len(got)-1 {
		t.Errorf("after a change that was committed: %d records of %d objects", records(t, j, "objects"), len(got)-1)
	}
	commit(t, j, change(3, objects))
	closed(t, j)
	j, got = mustOpen(t, dir)
	defer closed(t, j)
	if describe(got) != after(3, objects) || records(t, j, "objects") != len(got)-1 {
		t.Errorf("after another change: %d records of %d objects", records(t, j, "objects"), len(got)-1)
	}
}

// TestPowerCutLosesNoLargeChange proves INV-60 for staged changes: after a loss of power at any
// moment, a change is there completely or not at all, and every confirmed change is there.
func TestPowerCutLosesNoLargeChange(t *testing.T) {
	const objects, changes = 3 * partRecords, 5
	root := t.TempDir()
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		j, _, err := open(t, filepath.Join(root, "state"))
		if err != nil {
			t.Error(err)
			return
		}
		defer closed(t, j)
		for revision := 1; revision <= changes; revision++ {
			s, err := j.Stage(t.Context(), change(revision, objects))
			if err == nil && revision == 3 {
				if err = s.Discard(); err == nil {
					s, err = j.Stage(t.Context(), change(revision, objects))
				}
			}
			if err == nil {
				err = s.Commit(t.Context())
			}
			disk.Mark(revision)
			if err := errors.Join(err, j.Tidy(t.Context())); err != nil {
				t.Error(err)
				return
			}
		}
	})
	want := map[string]int{"": 0}
	for r := range changes {
		want[after(r+1, objects)] = r + 1
	}
	random := rand.New(rand.NewPCG(11, 12)) //nolint:gosec // the same cuts in each run
	ops, seen := len(disk.Ops()), make(map[string]bool)
	for range 100 {
		n := random.IntN(ops + 1)
		place := t.TempDir()
		marked := disk.Cut(t, n, random, place)
		withoutCache(t, filepath.Join(place, "state"))
		j, got, err := open(t, filepath.Join(place, "state"))
		if err != nil {
			t.Fatalf("a loss of power after %d of %d operations: %v", n, ops, err)
		}
		revision, whole := want[describe(got)]
		if !whole || revision < marked || revision > marked+1 {
			t.Fatalf("a loss of power after %d of %d operations: answered was %d, got revision %s with %d objects, "+
				"which is a whole change: %v", n, ops, marked, got["revision"], len(got)-1, whole)
		}
		if left := records(t, j, "objects"); left != max(0, len(got)-1) {
			t.Fatalf("a loss of power after %d of %d operations: %d records of %d objects", n, ops, left, len(got)-1)
		}
		seen[describe(got)] = true
		closed(t, j)
		if err := os.RemoveAll(place); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) < changes {
		t.Errorf("only %d states were seen: the test is not effective", len(seen))
	}
}

// TestCommitOfALargeChangeWritesLittle: all other calls of the service wait while Commit writes.
func TestCommitOfALargeChangeWritesLittle(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		j, _, err := open(t, filepath.Join(root, "state"))
		if err != nil {
			t.Error(err)
			return
		}
		defer closed(t, j)
		written := func(f func() error) (bytes, syncs int) {
			first := len(disk.Ops())
			if err := f(); err != nil {
				t.Error(err)
			}
			for _, o := range disk.Ops()[first:] {
				switch o.Kind {
				case disktest.Write:
					bytes += o.Len
				case disktest.Sync:
					syncs++
				}
			}
			return bytes, syncs
		}
		for _, revision := range []uint64{1, 2} { // into an empty file, then over existing objects
			c := many(3200)
			c.Revision = revision
			var s *Staged[object]
			all, _ := written(func() (err error) { s, err = j.Stage(t.Context(), c); return err })
			last, syncs := written(func() error { return s.Commit(t.Context()) })
			if all < 32_000_000 || last > 4*partBytes || syncs > 3 { // leaf pages of its records, and branch pages above them
				t.Errorf("revision %d: %d bytes staged; the commit writes %d bytes with %d syncs", revision, all, last, syncs)
			}
			if err := j.Tidy(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestLeftoverOfAFullDiskNeverCounts: the next change gets the same number as the failed one, whose remains must not be
// part of it.
func TestLeftoverOfAFullDiskNeverCounts(t *testing.T) {
	const objects = 3 * partRecords
	full := func(after int) func(disktest.Op) error {
		writes := 0
		return func(o disktest.Op) error {
			if o.Kind == disktest.Write || o.Kind == disktest.Truncate {
				if writes++; writes > after {
					return unix.ENOSPC
				}
			}
			return nil
		}
	}
	for writes := 0; ; writes += 3 {
		root := t.TempDir()
		dir := filepath.Join(root, "state")
		disk := disktest.New(t, root)
		fits := false
		disk.Run(t, func() {
			j, _, err := open(t, dir)
			if err != nil {
				t.Error(err)
				return
			}
			commit(t, j, change(1, objects))
			disk.Fail(full(writes))
			s, err := j.Stage(t.Context(), change(2, objects))
			if err == nil {
				if err = s.Commit(t.Context()); err != nil {
					err = errors.Join(err, s.Discard())
				}
			}
			if fits = err == nil; !fits && !errors.Is(err, store.ErrFull) {
				t.Errorf("%d writes: %v, want ErrFull", writes, err)
			}
			if !fits {
				nine := Change[object]{Revision: 9, Puts: []object{named("nine", 9)}}
				if err := j.Commit(t.Context(), nine); !errors.Is(err, store.ErrFull) {
					t.Errorf("%d writes: a change on a full disk: %v", writes, err)
				}
				disk.Fail(nil)
				commit(t, j, Change[object]{Revision: 2, Puts: []object{named("next", 2)}})
			}
			disk.Fail(nil)
			closed(t, j)
		})
		if fits {
			return
		}
		j, got := mustOpen(t, dir)
		if _, there := got["object next"]; !there || got["revision"] != "2" {
			t.Errorf("%d writes: the next change is not there", writes)
		}
		delete(got, "object next")
		got["revision"] = "1"
		if describe(got) != after(1, objects) || records(t, j, "objects") != len(got) {
			t.Errorf("%d writes: %d records of %d objects", writes, records(t, j, "objects"), len(got))
		}
		closed(t, j)
		if t.Failed() {
			return
		}
	}
}

func TestStagingEndsWithItsContext(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	j, _ := mustOpen(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := j.Stage(ctx, change(1, 3*partRecords)); !errors.Is(err, context.Canceled) ||
		records(t, j, "objects") != 0 {
		t.Errorf("%v and %d records, want an end without any", err, records(t, j, "objects"))
	}
	closed(t, j)
	if _, err := j.Stage(t.Context(), change(1, 3*partRecords)); err == nil {
		t.Error("a closed journal takes changes")
	}
}

func TestPartsAreBounded(t *testing.T) {
	large := named("large", 1)
	large.Text = make([]byte, 3*partBytes)
	for name, c := range map[string]Change[object]{
		"nothing": {}, "one": {Puts: []object{named("a", 1)}}, "large": {Puts: []object{large, named("a", 1), large}},
		"many": change(1, 3000), "many of 3 KB": many(3200),
	} {
		parts := (&Journal[object]{options: optionsOf(true)}).divide(c)
		var got []string
		for i, p := range parts {
			size := 0
			for _, r := range p.records {
				size += len(r)
			}
			if len(p.records) != len(p.keys) || len(p.records) > partRecords ||
				len(p.records) > 1 && size > partBytes || len(p.records) == 0 && len(parts) > 1 {
				t.Errorf("%s: part %d has %d records and %d bytes", name, i, len(p.records), size)
			}
			got = append(got, p.keys...)
		}
		want := make(map[string]bool)
		for _, p := range c.Puts {
			want[p.Name] = true
		}
		for _, k := range c.Deletes {
			want[k] = true
		}
		distinct := slices.Compact(slices.Sorted(slices.Values(got)))
		if len(got) != len(c.Puts)+len(c.Deletes) || !slices.Equal(distinct, slices.Sorted(maps.Keys(want))) {
			t.Errorf("%s: %d keys in %d parts, want %d", name, len(got), len(parts), len(want))
		}
	}
}
