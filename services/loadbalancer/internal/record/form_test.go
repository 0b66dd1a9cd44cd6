// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/store"
)

// dump returns the records of the state file in a closed directory, one per line, except for the
// name of the state, which is random.
func dump(t *testing.T, dir string) string {
	t.Helper()
	d, err := store.OpenDir(dir, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Open(store.Options{
		Name:   "services.db",
		Layout: store.Layout{Format: "sluice-loadbalancer", Version: 1, Buckets: []string{"objects", "state"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	err = s.View(func(tx *store.Tx) error {
		for _, bucket := range []string{"objects", "state"} {
			if err := tx.ForEach(bucket, func(k, v []byte) error {
				if string(k) == "name" {
					v = fmt.Append(nil, len(v), " bytes")
				}
				fmt.Fprintf(&b, "%s %q: %q\n", bucket, k, v)
				return nil
			}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := errors.Join(err, s.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestFormOfTheFileStays compares the records with the records that version b7deab4c wrote for the same changes. That
// version must still be able to read the records after a downgrade.
func TestFormOfTheFileStays(t *testing.T) {
	dir := t.TempDir()
	j, _, _ := open(t, dir)
	gone := records()[0]
	gone.Key.Name.Name = "gone"
	zone := "east"
	for _, c := range []Change{
		{Revision: 8, Puts: append(records(), gone), State: StateRecords([]string{"file"}, nil)},
		{Revision: 9, Deletes: []string{Key(gone.Key)}, State: StateRecords([]string{"kubernetes"}, &zone)},
	} {
		if err := j.Commit(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/form.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got := dump(t, dir); got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
