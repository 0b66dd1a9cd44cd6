// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

func pickSome(rng *rand.Rand, n int) (out []identity.Numeric) {
	for x := range n {
		if rng.IntN(3) == 0 {
			out = append(out, identity.Numeric(300+x))
		}
	}
	return out
}

// TestChangesOfInterestsAddUpToTheUnion: after any changes, the engine has the union of all subscribers' subjects and
// locations.
func TestChangesOfInterestsAddUpToTheUnion(t *testing.T) {
	const names, subjects, addresses, changes = 4, 6, 5, 2000
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	s := newInterests(time.Hour, time.Now)
	has, at := make(map[identity.Numeric]bool), make(map[netip.Addr]identity.Numeric)
	for i := range changes {
		one, err := s.connecting(&Subscription{Name: fmt.Sprint(rng.IntN(names)), Role: RoleEnforces})
		if err != nil {
			t.Fatal(err)
		}
		add, remove := pickSome(rng, subjects), pickSome(rng, subjects)
		var locate []engine.Location
		var vacate []netip.Addr
		for n := range addresses {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
			switch rng.IntN(4) {
			case 0:
				// An address has the same identity for every subscriber.
				locate = append(locate, engine.Location{Addr: a, Identity: identity.Numeric(300 + n)})
			case 1:
				vacate = append(vacate, a)
			}
		}
		c := s.change(one, add, remove, locate, vacate)
		for _, x := range c.RemoveSubjects {
			delete(has, x)
		}
		for _, x := range add {
			has[x] = true
		}
		for _, a := range c.Vacate {
			delete(at, a)
		}
		for _, l := range c.Locate {
			at[l.Addr] = l.Identity
		}
		for x := identity.Numeric(300); x < 300+subjects; x++ {
			if has[x] != s.want(x) {
				t.Fatalf("seed %d, change %d: the engine has subject %d: %v, a subscriber wants it: %v", seed, i, x, has[x], s.want(x))
			}
		}
		for n := range addresses {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
			if x, ok := s.located(a); at[a] != x || ok != (at[a] != 0) {
				t.Fatalf("seed %d, change %d: the engine has %v as %d, a subscriber as %d", seed, i, a, at[a], x)
			}
		}
	}
}

func TestSubscriberComesToItsSubjectsInSteps(t *testing.T) {
	const many = 5*subjectsAtOnce + 3
	s := newInterests(time.Hour, time.Now)
	one, err := s.connecting(&Subscription{Name: "datapath"})
	if err != nil {
		t.Fatal(err)
	}
	old, want := make([]identity.Numeric, many), make(map[identity.Numeric]struct{})
	for n := range many {
		old[n] = identity.Numeric(1000 + n)
		want[identity.Numeric(2000+n)] = struct{}{}
	}
	s.change(one, old, nil, nil, nil)
	added := false
	for {
		add, remove := one.next(want)
		switch {
		case len(add)+len(remove) == 0:
			if len(one.subjects) != many || !one.wants(2000) || one.wants(1000) {
				t.Errorf("it ends with %d subjects, want %d different ones", len(one.subjects), many)
			}
			return
		case len(add) > subjectsAtOnce || len(remove) > subjectsAtOnce:
			t.Fatalf("%d subjects are added and %d removed in one step", len(add), len(remove))
		case len(remove) > 0 && (added || len(add) > 0):
			t.Fatal("a subject is added before all others are removed")
		}
		added = added || len(add) > 0
		s.change(one, add, remove, nil, nil)
	}
}

func TestSubscribersAreForgottenByWhatTheyDo(t *testing.T) {
	now := time.Unix(1000, 0)
	s := newInterests(time.Hour, func() time.Time { return now })
	enforces, err := s.connecting(&Subscription{Name: "datapath"})
	if err != nil {
		t.Fatal(err)
	}
	watches, err := s.connecting(&Subscription{Name: "viewer", Role: RoleWatches})
	if err != nil {
		t.Fatal(err)
	}
	if s.left(enforces) || !enforces.until.Equal(now.Add(time.Hour)) {
		t.Errorf("an enforcing subscriber stays until %v, want an hour", enforces.until)
	}
	if !s.left(watches) {
		t.Error("a watching subscriber stays")
	}
	if who := s.awaited(nil); len(who) != 1 || !who["datapath"] {
		t.Errorf("a change waits for %v, want the enforcing subscriber", who)
	}
	if who := s.awaited([]identity.Numeric{300}); who["datapath"] {
		t.Error("a change waits for a subscriber without the subject")
	}
	for n := range maxSubscribers - 1 {
		if _, err := s.connecting(&Subscription{Name: fmt.Sprint(n), Role: RoleEnforces}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.connecting(&Subscription{Name: "more", Role: RoleEnforces}); !errors.Is(err, failure.ErrLimit) {
		t.Errorf("another enforcing subscriber: %v, want ErrLimit", err)
	}
	if _, err := s.connecting(&Subscription{Name: "other", Role: RoleWatches}); err != nil {
		t.Errorf("enforcing subscribers use up the limit of watching ones: %v", err)
	}
}

func TestStoredSubscriberIsTheSame(t *testing.T) {
	s := newInterests(time.Hour, time.Now)
	a := netip.MustParseAddr("10.0.0.1")
	one, err := s.connecting(&Subscription{Name: "datapath"})
	if err != nil {
		t.Fatal(err)
	}
	s.change(one, []identity.Numeric{300, 301}, nil, []engine.Location{{Addr: a, Identity: 300}}, nil)
	got, err := newInterests(time.Hour, time.Now).restore(subscriberRecord("datapath", one))
	if err != nil || len(got.subjects) != 2 || !got.wants(301) || got.locations[a] != 300 || !got.enforces {
		t.Errorf("restored %+v, %v", got, err)
	}
	if got, err := s.restore(record.Subscriber{Name: "viewer"}); got != nil || err != nil || s.all["viewer"] != nil {
		t.Errorf("a watching subscriber of an earlier version is kept: %+v, %v", got, err)
	}
	bad := record.Subscriber{Name: "datapath", Locations: []record.Location{{Address: "10.0.0", Identity: 300}}}
	if _, err := s.restore(bad); err == nil {
		t.Error("a location without an address is accepted")
	}
}
