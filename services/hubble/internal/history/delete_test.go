// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package history

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
)

// holds reports whether any file of the history contains a text. It decompresses segments.
func holds(t *testing.T, dir, text string) bool {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if suffix := filepath.Ext(e.Name()); suffix == segmentSuffix {
			all, err := decode(content, suffix)
			if err != nil {
				t.Fatal(err)
			}
			content = nil
			for _, r := range all {
				content = append(content, r.Data...)
			}
		}
		if bytes.Contains(content, []byte(text)) {
			return true
		}
	}
	return false
}

// TestDeletedRecordsAreGone: exactly the selected records are deleted, in compressed segments, in journals and in
// memory, also after a restart. The number of the latest record is not used again.
func TestDeletedRecordsAreGone(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	const count = 3 * Recent // so many that only a part is in memory
	var left []uint64
	cut := start.Add(count / 2 * time.Millisecond)
	for i := range count {
		part := []string{"shop", "data"}[i%2]
		h.Append(entry(part, i, 400))
		if e := entry(part, i, 0); part != "shop" || !e.Time.Before(cut) {
			left = append(left, uint64(i+1))
		}
	}
	shop := Deletion{
		Before: cut, Selects: func(f Facts) bool { return slices.Contains(f.Namespaces, "shop") },
		Skip: func(x Index) bool { _, ok := x.Namespaces["shop"]; return !ok },
		Rest: func([]byte) []byte { return []byte("rest of it") },
	}
	check := shop
	check.ValidateOnly = true
	if n, err := h.Delete(t.Context(), check); err != nil || n != count/4 {
		t.Errorf("%d records would be deleted, want %d, %v", n, count/4, err)
	}
	want(t, "after a check", forward(t, h, 0, Query{}), upTo(1, count))
	if n, err := h.Delete(t.Context(), shop); err != nil || n != count/4 {
		t.Errorf("%d records were deleted, want %d, %v", n, count/4, err)
	}
	want(t, "after a deletion by time", forward(t, h, 0, Query{}), left)
	shop.Before = time.Time{}
	if n, err := h.Delete(t.Context(), shop); err != nil || n != count/4 {
		t.Errorf("%d records were deleted then, want %d, %v", n, count/4, err)
	}
	left = nil
	for i := range uint64(count) {
		if i%2 == 1 {
			left = append(left, i+1)
		}
	}
	for range 2 {
		want(t, "after all deletions", forward(t, h, 0, Query{}), left)
		if holds(t, dir, "shop ") || !holds(t, dir, "data ") {
			t.Error("a file has a deleted record, or none of the others")
		}
		if s := h.Status(); s.Records != count/2 || s.Problem != nil {
			t.Errorf("the status is %+v", s)
		}
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		h = open(t, dir, 64<<20, start)
	}
	h.Append(entry("shop", count, 400))
	want(t, "after a new record", forward(t, h, count, Query{}), []uint64{count, count + 1})
}

// TestRecordThatArrivesDuringADeletionIsNotCountedAndKept: a record that a deletion has counted is in no file
// afterwards. A record arrives while the deletion writes earlier records. It is either deleted from the files or not
// counted.
func TestRecordThatArrivesDuringADeletionIsNotCountedAndKept(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	h.Append(entry("shop", 0, 100))
	h.o.Now = sync.OnceValue(func() time.Time { // the next batch calls Now while it is written
		h.Append(entry("shop", 1, 100))
		return start
	})
	n, err := h.Delete(t.Context(), Deletion{
		Selects: func(f Facts) bool { return slices.Contains(f.Namespaces, "shop") },
		Rest:    func([]byte) []byte { return []byte("rest of it") },
	})
	if err != nil || n == 0 {
		t.Fatalf("%d records were deleted, %v", n, err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	kept := uint64(0)
	for i := range 2 {
		if holds(t, dir, fmt.Sprintf("shop %d ", i)) {
			kept++
		}
	}
	if n+kept != 2 {
		t.Errorf("of 2 records, %d are counted as deleted, and %d are in files", n, kept)
	}
}

// TestEachDeletedRecordIsCountedOnce: the rest of a deleted latest record is not counted as deleted again, neither in
// memory nor by a second deletion.
func TestEachDeletedRecordIsCountedOnce(t *testing.T) {
	h := open(t, t.TempDir(), 64<<20, start)
	for i := range 3 {
		h.Append(entry("shop", i, 100))
	}
	everything := Deletion{
		Selects: func(Facts) bool { return true }, Rest: func([]byte) []byte { return []byte("rest of it") },
	}
	for i, want := range []uint64{3, 0} {
		if n, err := h.Delete(t.Context(), everything); err != nil || n != want {
			t.Errorf("deletion %d: %d records, want %d, %v", i, n, want, err)
		}
	}
}

// TestReaderPassesOverDeletedRecords: a reader that follows skips deleted records. Of the latest record, it gets the
// rest.
func TestReaderPassesOverDeletedRecords(t *testing.T) {
	dir := t.TempDir()
	h := open(t, dir, 64<<20, start)
	for i, part := range []string{"data", "shop", "shop", "data", "shop"} {
		h.Append(entry(part, i, 100))
	}
	_, err := h.Delete(t.Context(), Deletion{
		Selects: func(f Facts) bool { return slices.Contains(f.Namespaces, "shop") },
		Rest:    func(data []byte) []byte { return append([]byte("rest "), data[5:6]...) },
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		var got []string
		for r := range h.Forward(t.Context(), Query{}) {
			got = append(got, string(r.Data[:6]))
		}
		if !slices.Equal(got, []string{"data 0", "data 3", "rest 4"}) {
			t.Errorf("the records are %q", got)
		}
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		h = open(t, dir, 64<<20, start)
	}
	h = open(t, t.TempDir(), 64<<20, start)
	for i, part := range []string{"data", "shop", "shop", "data"} {
		h.Append(entry(part, i, 100))
	}
	if _, err := h.Delete(t.Context(), Deletion{
		Selects: func(f Facts) bool { return slices.Contains(f.Namespaces, "shop") },
		Rest:    func([]byte) []byte { return nil },
	}); err != nil {
		t.Fatal(err)
	}
	if r, missed, err := h.Next(t.Context(), 1); err != nil || r.Number != 4 || missed != 0 {
		t.Errorf("the next record is %d, %d are missed, %v", r.Number, missed, err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := h.Next(over, 4); err == nil {
		t.Error("there is a record after the last")
	}
}
