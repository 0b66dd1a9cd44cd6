// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package durable

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/kit/disktest"
)

// TestPowerCutLeavesWhatWasPromised cuts the power after each operation while files are written
// repeatedly and removed.
func TestPowerCutLeavesWhatWasPromised(t *testing.T) {
	content := func(n int) []byte { return bytes.Repeat([]byte{byte('0' + n)}, 3*4096) }
	for _, c := range []struct {
		name string
		sync Sync
	}{{"SyncFile", SyncFile}, {"SyncAll", SyncAll}} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			path := filepath.Join(root, "file")
			disk := disktest.New(t, root)
			disk.Run(t, func() {
				for n := 1; n <= 4; n++ {
					if err := WriteFile(path, content(n), 0o600, c.sync); err != nil {
						t.Error(err)
					}
					disk.Mark(n)
				}
				if _, err := Remove(path, c.sync); err != nil {
					t.Error(err)
				}
				disk.Mark(5)
			})
			random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // deterministic cuts
			for n := range len(disk.Ops()) + 1 {
				for range 8 {
					dir := t.TempDir()
					marked := disk.Cut(t, n, random, dir)
					got, err := os.ReadFile(filepath.Join(dir, "file"))
					found := 0
					for k := 1; k <= 4; k++ {
						if bytes.Equal(got, content(k)) {
							found = k
						}
					}
					absent := errors.Is(err, os.ErrNotExist)
					switch {
					case found == 0 && !absent:
						t.Fatalf("after %d operations: %d bytes that were never written, %v", n, len(got), err)
					case c.sync == SyncAll && marked == 5 && !absent:
						t.Fatalf("after %d operations: the removed file is back", n)
					case c.sync == SyncAll && marked > 0 && marked < 4 && found < marked:
						t.Fatalf("after %d operations: content %d, want >= %d", n, found, marked)
					}
				}
			}
		})
	}
}
