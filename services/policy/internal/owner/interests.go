// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// What one subscriber may ask for.
const (
	maxSubjects    = 4096
	maxLocations   = 16384
	maxSubscribers = 16
)

// datapathName is what the datapath calls itself. Versions that do not say what
// they do with the tables are told from other subscribers by it.
const datapathName = "datapath"

// Interest is what a subscriber wants tables for.
type Interest struct {
	Subjects  []identity.Numeric
	Locations []engine.Location
}

// Role is what a subscriber does with the tables.
type Role uint8

// The roles.
const (
	RoleUnknown Role = iota // it does not say; its name tells
	RoleEnforces
	RoleWatches
)

// Subscription is how a subscriber connects.
type Subscription struct {
	Name string
	Role Role
	// The last message that it carried out; zero: none.
	Incarnation stream.Incarnation
	Seq         uint64
	Interest
}

func (s *Subscription) enforces() bool {
	return s.Role == RoleEnforces || s.Role == RoleUnknown && s.Name == datapathName
}

func newSubscriber() *subscriber {
	return &subscriber{subjects: make(map[identity.Numeric]struct{}), locations: make(map[netip.Addr]identity.Numeric)}
}

func (one *subscriber) wants(x identity.Numeric) bool { _, ok := one.subjects[x]; return ok }

// subscriber is one that is connected, or was lately.
type subscriber struct {
	subjects  map[identity.Numeric]struct{}
	locations map[netip.Addr]identity.Numeric
	enforces  bool            // else it watches
	session   *stream.Session // nil while it is away
	until     time.Time       // when it is forgotten; while it is away
	saveAt    time.Time       // when its interests are stored; zero: they are
}

// subscribers are those that are connected, or were lately, with what they want tables for.
// Their methods change nothing else: the owner takes what they return to the engine. They
// belong to the loop.
type subscribers struct {
	linger time.Duration // how long one that enforces is known after it has gone
	now    func() time.Time
	all    map[string]*subscriber
}

func newSubscribers(linger time.Duration, now func() time.Time) *subscribers {
	return &subscribers{linger: linger, now: now, all: make(map[string]*subscriber)}
}

// connecting returns the subscriber that connects. A new one is forgotten at its time, unless
// it does.
func (s *subscribers) connecting(want *Subscription) (*subscriber, error) {
	one := s.all[want.Name]
	if one == nil {
		same := 0
		for _, other := range s.all {
			if other.enforces == want.enforces() {
				same++
			}
		}
		switch {
		case same < maxSubscribers:
		case want.enforces():
			return nil, fmt.Errorf("%w: %d subscribers that enforce are known, of which some may be gone; "+
				"one is forgotten %s after it went", failure.ErrLimit, same, s.linger)
		default:
			return nil, fmt.Errorf("%w: %d subscribers that watch are connected", failure.ErrLimit, same)
		}
		one = newSubscriber()
		one.until = s.now().Add(s.linger)
		s.all[want.Name] = one
	}
	one.enforces = want.enforces()
	return one, nil
}

// restore takes over a stored subscriber. It returns nil if it need not be known any more.
func (s *subscribers) restore(r record.Subscriber) (*subscriber, error) {
	if !r.Enforces && r.Name != datapathName {
		return nil, nil //nolint:nilnil // it came and went under a version that kept those that watch
	}
	one := newSubscriber()
	one.enforces, one.until = true, s.now().Add(s.linger)
	for _, x := range r.Subjects {
		one.subjects[identity.Numeric(x)] = struct{}{}
	}
	for _, l := range r.Locations {
		addr, err := netip.ParseAddr(l.Address)
		if err != nil {
			return nil, fmt.Errorf("stored location of %s: %w", r.Name, err)
		}
		one.locations[addr] = identity.Numeric(l.Identity)
	}
	s.all[r.Name] = one
	return one, nil
}

func subscriberRecord(name string, s *subscriber) record.Subscriber {
	r := record.Subscriber{Name: name, Enforces: true}
	for x := range s.subjects {
		r.Subjects = append(r.Subjects, uint32(x))
	}
	slices.Sort(r.Subjects)
	for a, x := range s.locations {
		r.Locations = append(r.Locations, record.Location{Address: a.String(), Identity: uint32(x)})
	}
	return r
}

// next are some of the subjects that a subscriber gains and loses to have those that it
// wants. While some have to go, none comes: room first.
func (one *subscriber) next(want map[identity.Numeric]struct{}) (add, remove []identity.Numeric) {
	for x := range one.subjects {
		if _, ok := want[x]; !ok && len(remove) < subjectsAtOnce {
			remove = append(remove, x)
		}
	}
	if len(remove) > 0 {
		return nil, remove
	}
	for x := range want {
		if _, ok := one.subjects[x]; !ok && len(add) < subjectsAtOnce {
			add = append(add, x)
		}
	}
	return add, nil
}

// rest is what a subscriber has to give up to have no more than it wants.
func (one *subscriber) rest(want Interest) (remove []identity.Numeric, vacate []netip.Addr) {
	subjects := make(map[identity.Numeric]struct{}, len(want.Subjects))
	for _, x := range want.Subjects {
		subjects[x] = struct{}{}
	}
	places := make(map[netip.Addr]struct{}, len(want.Locations))
	for _, l := range want.Locations {
		places[l.Addr] = struct{}{}
	}
	for x := range one.subjects {
		if _, ok := subjects[x]; !ok {
			remove = append(remove, x)
		}
	}
	for a := range one.locations {
		if _, ok := places[a]; !ok {
			vacate = append(vacate, a)
		}
	}
	return remove, vacate
}

// fits returns ErrLimit if a subscriber would want too much after a change.
func (one *subscriber) fits(add, remove Interest) error {
	if sizeAfter(one.subjects, remove.Subjects, add.Subjects) > maxSubjects ||
		sizeAfter(one.locations, remove.addrs(), add.addrs()) > maxLocations {
		return fmt.Errorf("%w: a subscriber may have %d subjects and %d locations",
			failure.ErrLimit, maxSubjects, maxLocations)
	}
	return nil
}

// addrs are the addresses of the locations.
func (i *Interest) addrs() (as []netip.Addr) {
	for _, l := range i.Locations {
		as = append(as, l.Addr)
	}
	return as
}

// sizeAfter is the number of keys of m once some were removed and then some added.
func sizeAfter[K comparable, V any](m map[K]V, remove, add []K) int {
	there := make(map[K]bool, len(remove)+len(add))
	for _, k := range remove {
		there[k] = false
	}
	for _, k := range add {
		there[k] = true
	}
	n := len(m)
	for k, is := range there {
		switch _, was := m[k]; {
		case was && !is:
			n--
		case is && !was:
			n++
		}
	}
	return n
}

// change changes what a subscriber wants. It returns what that means for all of them together;
// subjects that are added come separately, because their identity may not be known.
func (s *subscribers) change(
	one *subscriber, add, remove []identity.Numeric, locate []engine.Location, vacate []netip.Addr,
) (c engine.Change) {
	for _, x := range remove {
		delete(one.subjects, x)
	}
	for _, x := range add {
		one.subjects[x] = struct{}{}
	}
	for _, x := range remove {
		if !s.want(x) {
			c.RemoveSubjects = append(c.RemoveSubjects, x)
		}
	}
	for _, a := range vacate {
		if _, ok := one.locations[a]; !ok {
			continue
		}
		delete(one.locations, a)
		if other, ok := s.located(a); ok {
			c.Locate = append(c.Locate, engine.Location{Addr: a, Identity: other})
		} else {
			c.Vacate = append(c.Vacate, a)
		}
	}
	for _, l := range locate {
		if old, ok := one.locations[l.Addr]; !ok || old != l.Identity {
			one.locations[l.Addr] = l.Identity
			c.Locate = append(c.Locate, l)
		}
	}
	return c
}

// want reports whether any subscriber has the subject.
func (s *subscribers) want(x identity.Numeric) bool {
	for _, one := range s.all {
		if one.wants(x) {
			return true
		}
	}
	return false
}

// located finds an address among all subscribers.
func (s *subscribers) located(a netip.Addr) (identity.Numeric, bool) {
	for _, one := range s.all {
		if x, ok := one.locations[a]; ok {
			return x, true
		}
	}
	return 0, false
}

// awaited says of each subscriber that enforces whether a change of some subjects waits for
// it; without subjects it waits for all.
func (s *subscribers) awaited(subjects []identity.Numeric) map[string]bool {
	who := make(map[string]bool)
	for name, one := range s.all {
		if one.enforces {
			who[name] = len(subjects) == 0 || slices.ContainsFunc(subjects, one.wants)
		}
	}
	return who
}

// left notes that a subscriber is not connected any more, and reports whether it is forgotten
// at once: one that watches is, unless that takes many turns.
func (s *subscribers) left(one *subscriber) (forget bool) {
	one.session, one.until = nil, s.now()
	if one.enforces {
		one.until = one.until.Add(s.linger)
		return false
	}
	return len(one.subjects) <= subjectsAtOnce
}
