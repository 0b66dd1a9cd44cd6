// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// stored returns the number of subjects and locations that a stopped owner has stored for a subscriber.
func stored(t *testing.T, dir, name string) (subjects, locations int) {
	t.Helper()
	j, _, _, err := record.Open(dir, record.Contents{
		Name:     func(string) error { return nil },
		Policy:   func(record.Policy) error { return nil },
		Identity: func(record.Identity) error { return nil },
		DNSName:  func(record.Name) error { return nil },
		Subscriber: func(s record.Subscriber) error {
			if s.Name == name {
				subjects, locations = len(s.Subjects), len(s.Locations)
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	return subjects, locations
}

func TestInterestsAreStoredTogether(t *testing.T) {
	dir := t.TempDir()
	c := &clock{now: time.Now()}
	o, stop := run(t, dir, func(cfg *Config) { cfg.Now = c.Now })
	session, err := o.Subscribers().Subscribe(t.Context(), Subscription{Name: "datapath", Role: RoleEnforces})
	if err != nil {
		t.Fatal(err)
	}
	waits := func() bool {
		is, err := loop.Ask(t.Context(), o.loop, opOther, func() (bool, error) { return !o.interests.all["datapath"].saveAt.IsZero(), nil })
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	const n = 300
	for i := range n {
		add := Interest{
			Subjects: []identity.Numeric{identity.Numeric(256 + i)},
			Locations: []engine.Location{{
				Addr:     netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}),
				Identity: identity.Numeric(256 + i),
			}},
		}
		if err := o.Subscribers().Change(t.Context(), "datapath", session, add, Interest{}); err != nil {
			t.Fatal(err)
		}
	}
	if !waits() {
		t.Error("each change was stored separately")
	}
	c.add(savePause)
	for waits() {
		runtime.Gosched() // lets the owner sweep between two calls
	}
	if err := o.Subscribers().Change(t.Context(), "datapath", session, Interest{},
		Interest{Subjects: []identity.Numeric{256}}); err != nil {
		t.Fatal(err)
	}
	if !waits() {
		t.Error("the change was stored separately")
	}
	stop()
	if subjects, locations := stored(t, dir, "datapath"); subjects != n-1 || locations != n {
		t.Errorf("%d subjects and %d locations are stored, want %d and %d", subjects, locations, n-1, n)
	}
}

func TestSizeAfterIsThatOfTheChangedMap(t *testing.T) {
	for range 2000 {
		some := func() (ks []int) {
			for range rand.IntN(6) {
				ks = append(ks, rand.IntN(8))
			}
			return ks
		}
		m := map[int]bool{}
		for _, k := range some() {
			m[k] = true
		}
		remove, add := some(), some()
		want := maps.Clone(m)
		for _, k := range remove {
			delete(want, k)
		}
		for _, k := range add {
			want[k] = true
		}
		if got := sizeAfter(m, remove, add); got != len(want) {
			t.Fatalf("%v without %v and with %v has %d, want %d", m, remove, add, got, len(want))
		}
	}
}
