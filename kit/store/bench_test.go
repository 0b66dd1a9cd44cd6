// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/kit/store"
)

// BenchmarkCommit measures synced commits of one record, and of eight records that share a commit
// as concurrent calls do, in a file with 10,000 records. For comparison it measures appending the
// same bytes to a file with a sync, the cost of a journal. The directory must be on a disk; set
// TMPDIR to select it.
func BenchmarkCommit(b *testing.B) {
	value := bytes.Repeat([]byte("x"), 60)
	for _, n := range []int{1, 8} {
		b.Run(fmt.Sprintf("store/%d", n), func(b *testing.B) {
			d, err := store.OpenDir(filepath.Join(b.TempDir(), "state"), 0o700)
			if err != nil {
				b.Fatal(err)
			}
			defer d.Close()
			s, err := d.Open(store.Options{
				Name: "state.db", Layout: store.Layout{Format: "bench", Version: 1, Buckets: []string{"records"}},
				Init: func(t *store.Tx) error {
					for i := range 10_000 {
						t.Put("records", benchKey(i), value)
					}
					return nil
				},
			})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			i := 0
			for b.Loop() {
				if err := s.Update(func(t *store.Tx) error {
					for range n {
						t.Put("records", benchKey(i*7919%20_000), value)
						i++
					}
					return nil
				}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("journal/%d", n), func(b *testing.B) {
			f, err := os.Create(filepath.Join(b.TempDir(), "journal"))
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			line := bytes.Repeat([]byte("x"), n*200)
			for b.Loop() {
				if _, err := f.Write(line); err != nil {
					b.Fatal(err)
				}
				if err := f.Sync(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func benchKey(i int) []byte {
	return append(bytes.Repeat([]byte("k"), 64), binary.BigEndian.AppendUint32(nil, uint32(i))...)
}
