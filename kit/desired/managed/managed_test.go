// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package managed

import (
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/desired/failure"
)

// objects returns objects of several sources: "file" is configured, "kubernetes" is not.
func objects() *Objects[string] {
	all := map[string]By{
		"mine":  {Source: SourceGRPC, Manager: "m"},
		"also":  {Source: SourceGRPC, Manager: "m"},
		"other": {Source: SourceGRPC, Manager: "n"},
		"plain": {Source: SourceGRPC},
		"file":  {Source: SourceFile, Origin: "a.yaml"},
		"left":  {Source: SourceKubernetes, Origin: "x"},
	}
	return &Objects[string]{
		By:         func(k string) (By, bool) { by, ok := all[k]; return by, ok },
		All:        maps.All(all),
		Configured: func(source string) bool { return source == SourceFile },
		Compare:    strings.Compare,
	}
}

func TestManagersChangeTheirOwnObjectsAlone(t *testing.T) {
	o := objects()
	for _, c := range []struct {
		manager, key string
		who          string // owner in the error; empty if the change is allowed
	}{
		{"m", "mine", ""},
		{"m", "new", ""},
		{"m", "other", `the manager "n"`},
		{"m", "plain", "calls without a manager"},
		{"", "plain", ""},
		{"", "mine", `the manager "m"`},
		{"m", "file", "file a.yaml"},
		{"", "file", "file a.yaml"},
		{"m", "left", ""}, // its source is no longer configured
	} {
		caller := Caller{Manager: c.manager}
		exists, err := o.Put(&caller, c.key)
		if exists != (c.key != "new") {
			t.Errorf("%s: exists %v", c.key, exists)
		}
		gone, derr := o.Delete(&caller, []string{c.key})
		if c.who == "" {
			want := []string{c.key}
			if !exists {
				want = nil
			}
			if err != nil || derr != nil || !slices.Equal(gone, want) {
				t.Errorf("manager %q, %s: %v, %v, deleted %v", c.manager, c.key, err, derr, gone)
			}
			continue
		}
		if !errors.Is(err, failure.ErrOwned) || !errors.Is(derr, failure.ErrForeign) || gone != nil ||
			!strings.HasSuffix(err.Error(), c.key+" belongs to "+c.who) ||
			!strings.HasSuffix(derr.Error(), c.key+" belongs to "+c.who) {
			t.Errorf("manager %q, %s: %v and %v, want it to belong to %s", c.manager, c.key, err, derr, c.who)
		}
	}
}

func TestDeletionsNameEachKey(t *testing.T) {
	keys := []string{"mine", "new", "mine", "also"}
	gone, err := objects().Delete(&Caller{Manager: "m"}, keys)
	if err != nil || !slices.Equal(gone, []string{"mine", "also"}) {
		t.Fatalf("got %v, %v", gone, err)
	}
	var got []ChangeType
	for i, c := range Deletions[string, int](keys, gone) {
		if c.Key != keys[i] {
			t.Errorf("change %d is of %s, want %s", i, c.Key, keys[i])
		}
		got = append(got, c.Type)
	}
	if want := []ChangeType{Deleted, Absent, Absent, Deleted}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestPruneDeletesWhatDoesNotStay(t *testing.T) {
	none, mine := func(string) bool { return false }, func(k string) bool { return k == "mine" }
	for name, c := range map[string]struct {
		caller Caller
		added  int
		stays  func(string) bool
		want   []string
		err    error
	}{
		"one stays":              {Caller{Manager: "m"}, 0, mine, []string{"also"}, nil},
		"others are named":       {Caller{Manager: "m"}, 1, none, []string{"also", "mine"}, nil},
		"none stays":             {Caller{Manager: "m"}, 0, none, nil, failure.ErrEmpty},
		"none stays, confirmed":  {Caller{Manager: "m", AllowEmpty: true}, 0, none, []string{"also", "mine"}, nil},
		"nothing is there":       {Caller{Manager: "unknown"}, 0, none, nil, nil},
		"calls without manager":  {Caller{AllowEmpty: true}, 0, none, []string{"plain"}, nil},
		"calls lose their last ": {Caller{}, 0, none, nil, failure.ErrEmpty},
	} {
		got, err := objects().Prune(&c.caller, c.added, c.stays)
		if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v; want %v, %v", name, got, err, c.want, c.err)
		}
	}
}

func TestConditionsOfCallers(t *testing.T) {
	seven := uint64(7)
	c := Caller{IfRevision: &seven}
	if err := c.Check(7); err != nil {
		t.Errorf("the revision that is expected: %v", err)
	}
	if err := c.Check(8); !errors.Is(err, failure.ErrChanged) {
		t.Errorf("another revision: %v, want ErrChanged", err)
	}
	if err := (&Caller{}).Check(8); err != nil {
		t.Errorf("without a condition: %v", err)
	}
	if err := c.CheckRun([16]byte{1}, [16]byte{1}); err != nil {
		t.Errorf("the same run: %v", err)
	}
	if err := c.CheckRun([16]byte{1}, [16]byte{2}); !errors.Is(err, failure.ErrChanged) {
		t.Errorf("another run: %v, want ErrChanged", err)
	}
}
