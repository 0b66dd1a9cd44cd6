// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/kit/disktest"
)

// TestPowerCutLosesNoPolicy (INV-60): a power failure may happen at any moment, and may lose any unsynced data.
// Afterwards, every change that was acknowledged is present.
func TestPowerCutLosesNoPolicy(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "policy")
	disk := disktest.New(t, root)
	revision := 0
	disk.Run(t, func() {
		for range 3 {
			j, _, _, err := open(t, dir)
			if err != nil {
				t.Error(err)
				return
			}
			for range 15 {
				revision++
				commit(t, j, Change{Revision: uint64(revision), Puts: []Policy{policy(fmt.Sprint(revision%20), uint64(revision))}})
				disk.Mark(revision)
				var ids []Identity
				for i := range 100 {
					ids = append(ids, Identity{Number: uint32(1000 + revision*7%30*100 + i), Labels: [][3]string{{"k8s", "app", fmt.Sprint("app ", i)}}})
				}
				note(t, j, Cache{Identities: ids})
				note(t, j, Cache{Names: []Name{{Name: fmt.Sprint(revision%7, ".example")}}})
			}
			closed(t, j)
		}
	})
	random := rand.New(rand.NewPCG(9, 10)) //nolint:gosec // the same failures in each run
	ops := len(disk.Ops())
	for range 100 {
		n := random.IntN(ops + 1)
		after := t.TempDir()
		marked := disk.Cut(t, n, random, after)
		dir := filepath.Join(after, "policy")
		anotherBoot(t, dir)
		j, got, cached, err := open(t, dir)
		if err != nil {
			t.Fatalf("a loss of power after %d of %d operations: %v", n, ops, err)
		}
		closed(t, j)
		var last int
		if text, ok := got["revision"]; ok {
			if _, err := fmt.Sscan(text, &last); err != nil {
				t.Fatal(err)
			}
		}
		if cached || last < marked || last > marked+1 || len(got) != min(last, 20)+min(last, 1) {
			t.Fatalf("a loss of power after %d of %d operations: answered was %d, cached %v, got\n%s", n, ops, marked, cached, describe(got))
		}
	}
}

// anotherBoot simulates the boot after a power failure.
func anotherBoot(t *testing.T, dir string) {
	t.Helper()
	caches, err := filepath.Glob(filepath.Join(dir, "cache.*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range caches {
		if err := os.Rename(c, filepath.Join(dir, "cache.1b4e28ba-2fa1-11d2-883f-0016d3cca427.db")); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOnlyPoliciesAreSynced(t *testing.T) {
	root := t.TempDir()
	disk := disktest.New(t, root)
	disk.Run(t, func() {
		j, _, _, err := open(t, filepath.Join(root, "policy"))
		if err != nil {
			t.Error(err)
			return
		}
		defer closed(t, j)
		before := disk.Count(disktest.Sync)
		note(t, j, Cache{Identities: []Identity{{Number: 300}}})
		if got := disk.Count(disktest.Sync) - before; got != 0 {
			t.Errorf("an identity causes %d syncs", got)
		}
		commit(t, j, Change{Revision: 1, Puts: []Policy{policy("a", 1)}})
		if ops := disk.Ops(); ops[len(ops)-1].Kind != disktest.Sync {
			t.Errorf("the commit of a policy ends in a %s, want a sync", ops[len(ops)-1].Kind)
		}
	})
}
