// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"reflect"
	"testing"
)

// TestPlaceIsKeptBesideThePolicy stores the place of a policy next to the record of the policy. The place is removed
// with the policy, and is valid only for the policy revision in it.
func TestPlaceIsKeptBesideThePolicy(t *testing.T) {
	dir := t.TempDir()
	open := func() (*Journal, map[string]Place) {
		t.Helper()
		places := make(map[string]Place)
		j, _, _, err := Open(dir, Contents{Policy: func(p Policy) error { places[p.Key.Name] = p.Place; return nil }})
		if err != nil {
			t.Fatal(err)
		}
		return j, places
	}
	put := func(j *Journal, name string, revision uint64, p Place) {
		t.Helper()
		policy := Policy{
			Key: Key{Kind: "K", Name: name}, Source: "grpc", Manifest: []byte("x"), Revision: revision, Updated: 7, Place: p,
		}
		if err := j.Commit(t.Context(), Change{Revision: revision, Puts: []Policy{policy}}); err != nil {
			t.Fatal(err)
		}
	}
	j, _ := open()
	full := Place{Created: 3, Exceeds: "why", Size: 9, Sum: []byte{1, 2}, Held: []byte("y")}
	put(j, "a", 1, full)
	put(j, "b", 2, Place{Created: 4})
	put(j, "c", 3, full)
	put(j, "c", 4, Place{})
	put(j, "d", 5, full)
	if err := j.Commit(t.Context(), Change{Revision: 6, Deletes: []string{Key{Kind: "K", Name: "d"}.Encode()}}); err != nil {
		t.Fatal(err)
	}
	put(j, "d", 7, Place{})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j, got := open()
	full.Revision = 1
	want := map[string]Place{"a": full, "b": {Created: 4, Revision: 2}, "c": {}, "d": {}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("places %+v, want %+v", got, want)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestCorruptPlaceIsNoPlace: if the place of a policy is corrupt, the service does not start. Without its place, a
// policy may allow more, for example if it exceeds a limit.
func TestCorruptPlaceIsNoPlace(t *testing.T) {
	p := Policy{Key: Key{Kind: "K", Name: "a"}, Source: "grpc", Manifest: []byte("x"), Revision: 3}
	p.Place = Place{Exceeds: "why", Held: []byte("y")}
	stored := encodePlace(&p)
	got, err := codec.Decode(p.Key.Encode(), encodePolicy(p), stored)
	if err != nil || got.Place.Exceeds != "why" {
		t.Fatalf("%+v, %v", got, err)
	}
	for what, text := range map[string][]byte{
		"cut": stored[:len(stored)-2], "empty": {}, "another type": []byte(`{"exceeds":1,"revision":3}`), "zeroes": make([]byte, 40),
	} {
		if got, err := codec.Decode(p.Key.Encode(), encodePolicy(p), text); err == nil {
			t.Errorf("%s: %+v", what, got.Place)
		}
	}
}
