// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/store"
)

// dump returns the records of a closed state file, one per line.
func dump(t *testing.T, dir string, o store.Options) string {
	t.Helper()
	d, err := store.OpenDir(dir, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %d\n", o.Layout.Format, o.Layout.Version)
	err = s.View(func(tx *store.Tx) error {
		for _, bucket := range o.Layout.Buckets {
			if err := tx.ForEach(bucket, func(k, v []byte) error {
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

// TestFormOfTheFilesStays compares the records with the records that version b7deab4c wrote for the same changes:
// that version must still be able to read the records after a downgrade.
func TestFormOfTheFilesStays(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "policy")
	j, _, _ := mustOpen(t, dir)
	first := policy("a", 1)
	first.Origin, first.Manager, first.Updated = "a.yaml", "m", 1_795_000_000
	first.Place = Place{Created: 3, Exceeds: "why", Size: 9, Sum: []byte{1, 2}, Held: []byte("y")}
	commit(t, j, Change{State: StateName("name")})
	commit(t, j, Change{Revision: 1, Puts: []Policy{first, policy("b", 1)}})
	commit(t, j, Change{Revision: 2, Puts: []Policy{policy("c", 2)}, Deletes: []string{policy("b", 0).Key.Encode()}})
	large := Change{Revision: 3}
	for i := range 256 {
		large.Deletes = append(large.Deletes, policy(fmt.Sprint("absent", i), 3).Key.Encode())
	}
	large.Puts = []Policy{policy("c", 3)}
	s, err := j.Stage(t.Context(), large)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Commit(t.Context()), j.Tidy(t.Context())); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Stage(t.Context(), Change{Puts: many(3200).Puts[:200]}); err != nil { // never committed
		t.Fatal(err)
	}
	note(t, j, Cache{Identities: []Identity{{Number: 300, Labels: [][3]string{{"k8s", "app", "db"}}}}})
	note(t, j, Cache{Subscribers: []Subscriber{{
		Name: "s", Subjects: []uint32{300}, Locations: []Location{{Address: "10.0.0.1", Identity: 300}}, Enforces: true,
	}}})
	note(t, j, Cache{Names: []Name{{Name: "n.example", Addresses: []Address{{Address: "192.0.2.1", Expires: 7}}}}})
	closed(t, j)
	j, _, _ = mustOpen(t, dir) // reopen, which drops the uncommitted change
	closed(t, j)
	got := dump(t, dir, policiesOptions) + dump(t, dir, cacheOptions)
	want, err := os.ReadFile("testdata/form.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
