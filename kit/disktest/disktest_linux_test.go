// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package disktest_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func kinds(ops []disktest.Op) (list []disktest.Kind) {
	for _, o := range ops {
		list = append(list, o.Kind)
	}
	return list
}

func TestDiskSeesWhatReachesIt(t *testing.T) {
	dir := t.TempDir()
	d := disktest.New(t, dir)
	path := filepath.Join(dir, "file")
	d.Run(t, func() {
		f, err := os.Create(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		parent, err := os.Open(dir)
		if err != nil {
			t.Error(err)
			return
		}
		defer parent.Close()
		_, err1 := f.WriteString("hello, world")
		_, err2 := f.WriteAt([]byte("H"), 0)
		if err := errors.Join(err1, err2, f.Sync(), f.Truncate(5), os.Rename(path, path+"2"), parent.Sync(), os.Remove(path+"2")); err != nil {
			t.Error(err)
		}
	})
	want := []disktest.Kind{
		disktest.Create, disktest.Write, disktest.Write, disktest.Sync, disktest.Truncate, disktest.Rename, disktest.SyncDir, disktest.Remove,
	}
	if got := kinds(d.Ops()); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if _, err := os.Stat(path + "2"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the operations were not executed: %v", err)
	}
}

func TestPowerCutKeepsWhatWasSynced(t *testing.T) {
	dir := t.TempDir()
	d := disktest.New(t, dir)
	path := filepath.Join(dir, "file")
	first, second := bytes.Repeat([]byte("1"), 3*4096), bytes.Repeat([]byte("2"), 3*4096)
	d.Run(t, func() {
		f, err := os.Create(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		parent, err := os.Open(dir)
		if err != nil {
			t.Error(err)
			return
		}
		defer parent.Close()
		_, err1 := f.WriteAt(first, 0)
		if err := errors.Join(err1, f.Sync(), parent.Sync()); err != nil {
			t.Error(err)
		}
		d.Mark(1)
		if _, err := f.WriteAt(second, 0); err != nil {
			t.Error(err)
		}
	})
	random := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // deterministic cuts
	mixed := false
	for n := range len(d.Ops()) + 1 {
		for range 20 {
			after := t.TempDir()
			marked := d.Cut(t, n, random, after)
			got, err := os.ReadFile(filepath.Join(after, "file"))
			switch {
			case marked == 0:
			case err != nil || len(got) != len(first):
				t.Fatalf("after %d operations: %d bytes, %v", n, len(got), err)
			case !bytes.Equal(got, first) && !bytes.Equal(got, second):
				mixed = true
			}
		}
	}
	if !mixed {
		t.Error("no cut left a part of the unsynced writes")
	}
}

func TestDiskAnswersWithErrors(t *testing.T) {
	dir := t.TempDir()
	d := disktest.New(t, dir)
	d.Fail(func(o disktest.Op) error {
		switch o.Kind {
		case disktest.Write:
			return unix.ENOSPC
		case disktest.Sync:
			return unix.EIO
		default:
			return nil
		}
	})
	d.Run(t, func() {
		f, err := os.Create(filepath.Join(dir, "file"))
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		if _, err := f.WriteString("hello"); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("write: %v", err)
		}
		if err := f.Sync(); !errors.Is(err, unix.EIO) {
			t.Errorf("sync: %v", err)
		}
	})
}
