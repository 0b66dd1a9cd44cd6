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

// change is the one of a revision: from 2 on it replaces a third of the policies
// of the one before, removes a third, and adds some.
func change(revision, policies int) Change {
	c := Change{Revision: uint64(revision)}
	for i := range policies {
		switch name := fmt.Sprint("p", i); (i + revision) % 3 {
		case 0:
			c.GonePolicies = append(c.GonePolicies, policy(name, 0).Key)
		case 1:
			c.Policies = append(c.Policies, policy(name, uint64(revision)))
		}
	}
	c.Policies = append(c.Policies, policy(fmt.Sprint("only ", revision), uint64(revision)))
	return c
}

// after is what the changes up to a revision come to.
func after(revision, policies int) string {
	all := make(map[string]string)
	for r := 1; r <= revision; r++ {
		c := change(r, policies)
		for _, k := range c.GonePolicies {
			delete(all, "K/ns/"+k.Name)
		}
		for _, p := range c.Policies {
			all["K/ns/"+p.Key.Name] = fmt.Sprintf("%s %s %s %q %d %d", p.Source, p.Origin, p.Manager, p.Manifest, p.Revision, p.Updated)
		}
		all["revision"] = fmt.Sprint(r)
	}
	return describe(all)
}

func stage(t testing.TB, j *Journal, c Change) *Staged {
	t.Helper()
	s, err := j.Stage(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// records counts those of policies, of whatever change.
func records(t testing.TB, j *Journal) int {
	t.Helper()
	n := 0
	if err := j.policies.View(func(tx *store.Tx) error {
		return tx.ForEach(bucketPolicies, func(_, _ []byte) error { n++; return nil })
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestStagedChangeCountsWhenItIsCommitted(t *testing.T) {
	const policies = 4 * partRecords
	dir := filepath.Join(t.TempDir(), "policy")
	j, _, _ := mustOpen(t, dir)
	commit(t, j, change(1, policies))
	before := records(t, j)

	s := stage(t, j, change(2, policies))
	if s.Small() || records(t, j) == before {
		t.Fatal("nothing was staged: the test does not ask what it should")
	}
	closed(t, j) // as a kill does it
	j, got, _ := mustOpen(t, dir)
	if describe(got) != after(1, policies) || records(t, j) != before {
		t.Errorf("after a change that was not committed: %d records, want %d", records(t, j), before)
	}

	if err := stage(t, j, change(2, policies)).Discard(); err != nil || records(t, j) != before {
		t.Errorf("after a change that was discarded: %d records, %v, want %d", records(t, j), err, before)
	}

	if err := stage(t, j, change(2, policies)).Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	closed(t, j)
	j, got, _ = mustOpen(t, dir)
	if describe(got) != after(2, policies) || records(t, j) != len(got)-1 {
		t.Errorf("after a change that was committed: %d records of %d policies", records(t, j), len(got)-1)
	}
	commit(t, j, change(3, policies))
	closed(t, j)
	j, got, _ = mustOpen(t, dir)
	defer closed(t, j)
	if describe(got) != after(3, policies) || records(t, j) != len(got)-1 {
		t.Errorf("after another change: %d records of %d policies", records(t, j), len(got)-1)
	}
}

// TestPowerCutLosesNoLargeChange proves INV-60 for changes that are staged: after
// a loss of power at any moment, all of a change is there or nothing, and what was
// answered is.
func TestPowerCutLosesNoLargeChange(t *testing.T) {
	const policies, changes = 3 * partRecords, 5
	root := t.TempDir()
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		j, _, _, err := open(t, filepath.Join(root, "policy"))
		if err != nil {
			t.Error(err)
			return
		}
		defer closed(t, j)
		for revision := 1; revision <= changes; revision++ {
			s, err := j.Stage(t.Context(), change(revision, policies))
			if err == nil && revision == 3 {
				if err = s.Discard(); err == nil {
					s, err = j.Stage(t.Context(), change(revision, policies))
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
		want[after(r+1, policies)] = r + 1
	}
	random := rand.New(rand.NewPCG(11, 12)) //nolint:gosec // the same cuts in each run
	ops, seen := len(disk.Ops()), make(map[string]bool)
	for range 100 {
		n := random.IntN(ops + 1)
		place := t.TempDir()
		marked := disk.Cut(t, n, random, place)
		anotherBoot(t, filepath.Join(place, "policy"))
		j, got, _, err := open(t, filepath.Join(place, "policy"))
		if err != nil {
			t.Fatalf("a loss of power after %d of %d operations: %v", n, ops, err)
		}
		revision, whole := want[describe(got)]
		if !whole || revision < marked || revision > marked+1 {
			t.Fatalf("a loss of power after %d of %d operations: answered was %d, got revision %s with %d policies, which is a whole change: %v", n, ops, marked, got["revision"], len(got)-1, whole)
		}
		if left := records(t, j); left != max(0, len(got)-1) {
			t.Fatalf("a loss of power after %d of %d operations: %d records of %d policies", n, ops, left, len(got)-1)
		}
		seen[describe(got)] = true
		closed(t, j)
		if err := os.RemoveAll(place); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) < changes {
		t.Errorf("only %d states were seen: the test does not ask what it should", len(seen))
	}
}

// What Commit writes is what every other call of the service waits for.
func TestCommitOfALargeChangeWritesLittle(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		j, _, _, err := open(t, filepath.Join(root, "policy"))
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
		for _, revision := range []uint64{1, 2} { // into an empty file, and in the place of others
			c := many(3200)
			c.Revision = revision
			var s *Staged
			all, _ := written(func() (err error) { s, err = j.Stage(t.Context(), c); return err })
			last, syncs := written(func() error { return s.Commit(t.Context()) })
			if all < 32_000_000 || last > 4*partBytes || syncs > 3 { // pages of its records, and those that lead to them
				t.Errorf("revision %d: %d bytes staged; the commit writes %d bytes with %d syncs", revision, all, last, syncs)
			}
			if err := j.Tidy(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestLeftoverOfAFullDiskNeverCounts: the next change has the same number.
func TestLeftoverOfAFullDiskNeverCounts(t *testing.T) {
	const policies = 3 * partRecords
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
		dir := filepath.Join(root, "policy")
		disk := disktest.New(t, root)
		fits := false
		disk.Run(t, func() {
			j, _, _, err := open(t, dir)
			if err != nil {
				t.Error(err)
				return
			}
			commit(t, j, change(1, policies))
			disk.Fail(full(writes))
			s, err := j.Stage(t.Context(), change(2, policies))
			if err == nil {
				if err = s.Commit(t.Context()); err != nil {
					err = errors.Join(err, s.Discard())
				}
			}
			if fits = err == nil; !fits && !errors.Is(err, store.ErrFull) {
				t.Errorf("%d writes: %v, want ErrFull", writes, err)
			}
			if !fits {
				if err := j.Commit(t.Context(), Change{Revision: 9, Policies: []Policy{policy("nine", 9)}}); !errors.Is(err, store.ErrFull) {
					t.Errorf("%d writes: a change on a full disk: %v", writes, err)
				}
				disk.Fail(nil)
				commit(t, j, Change{Revision: 2, Policies: []Policy{policy("next", 2)}})
			}
			disk.Fail(nil)
			closed(t, j)
		})
		if fits {
			return
		}
		j, got, _ := mustOpen(t, dir)
		if _, there := got["K/ns/next"]; !there || got["revision"] != "2" {
			t.Errorf("%d writes: the next change is not there", writes)
		}
		delete(got, "K/ns/next")
		got["revision"] = "1"
		if describe(got) != after(1, policies) || records(t, j) != len(got) {
			t.Errorf("%d writes: %d records of %d policies", writes, records(t, j), len(got))
		}
		closed(t, j)
		if t.Failed() {
			return
		}
	}
}

func TestStagingEndsWithItsContext(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "policy")
	j, _, _ := mustOpen(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := j.Stage(ctx, change(1, 3*partRecords)); !errors.Is(err, context.Canceled) || records(t, j) != 0 {
		t.Errorf("%v and %d records, want an end without any", err, records(t, j))
	}
	closed(t, j)
	if _, err := j.Stage(t.Context(), change(1, 3*partRecords)); err == nil {
		t.Error("a closed journal takes changes")
	}
}

func TestPartsAreBounded(t *testing.T) {
	large := policy("large", 1)
	large.Manifest = make([]byte, 3*partBytes)
	for name, c := range map[string]Change{
		"nothing": {}, "one": {Policies: []Policy{policy("a", 1)}}, "large": {Policies: []Policy{large, policy("a", 1), large}},
		"many": change(1, 3000), "many of 3 KB": many(3200),
	} {
		parts := divide(c)
		var got []string
		for i, p := range parts {
			size := 0
			for _, r := range p.records {
				size += len(r)
			}
			if len(p.records) != len(p.policies) || len(p.records) > partRecords || len(p.records) > 1 && size > partBytes || len(p.records) == 0 && len(parts) > 1 {
				t.Errorf("%s: part %d has %d records and %d bytes", name, i, len(p.records), size)
			}
			got = append(got, p.policies...)
		}
		want := make(map[string]bool)
		for _, p := range c.Policies {
			want[policyKey(p.Key)] = true
		}
		for _, k := range c.GonePolicies {
			want[policyKey(k)] = true
		}
		if len(got) != len(c.Policies)+len(c.GonePolicies) || !slices.Equal(slices.Compact(slices.Sorted(slices.Values(got))), slices.Sorted(maps.Keys(want))) {
			t.Errorf("%s: %d keys in %d parts, want %d", name, len(got), len(parts), len(want))
		}
	}
}
