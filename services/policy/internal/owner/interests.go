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

// Limits for one subscriber.
const (
	maxSubjects    = 4096
	maxLocations   = 16384
	maxSubscribers = 16
)

// datapathName is the subscriber name of the datapath. A subscriber of this name that sends no role is a datapath of an
// earlier version.
const datapathName = "datapath"

// Interest lists the subjects whose tables a subscriber needs, and the identities of addresses that it reports.
type Interest struct {
	Subjects  []identity.Numeric
	Locations []engine.Location
}

// Role states what a subscriber does with the tables.
type Role uint8

// The roles.
const (
	RoleUnknown Role = iota // no role was sent; the name decides
	RoleEnforces
	RoleWatches
)

// Subscription contains the parameters with which a subscriber connects.
type Subscription struct {
	Name string
	Role Role
	// Incarnation and number of the last message that the subscriber has applied; zero: none.
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

// subscriber is a subscriber that is connected, or was connected recently.
type subscriber struct {
	subjects  map[identity.Numeric]struct{}
	locations map[netip.Addr]identity.Numeric
	enforces  bool            // the subscriber enforces the tables; if false, it only watches them
	session   *stream.Session // nil while disconnected
	until     time.Time       // when it is removed, if disconnected
	saveAt    time.Time       // when to store its interests; zero: they are already stored
}

// interests contains the subscribers that are connected or were recently, and their interests. Its methods change no
// other state: Subscribers passes their results to the engine. It belongs to the loop.
type interests struct {
	linger time.Duration // how long an enforcing subscriber is kept after it has disconnected
	now    func() time.Time
	all    map[string]*subscriber
}

func newInterests(linger time.Duration, now func() time.Time) *interests {
	return &interests{linger: linger, now: now, all: make(map[string]*subscriber)}
}

// connecting returns the record of a subscriber that connects. If a new subscriber never completes its connection,
// the record is removed later.
func (s *interests) connecting(want *Subscription) (*subscriber, error) {
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
			return nil, fmt.Errorf("%w: %d subscribers that enforce are known, some of them possibly disconnected; "+
				"a disconnected one is removed after %s", failure.ErrLimit, same, s.linger)
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

// restore adds a stored subscriber. It returns nil if the subscriber is no longer needed.
func (s *interests) restore(r record.Subscriber) (*subscriber, error) {
	if !r.Enforces && r.Name != datapathName {
		return nil, nil //nolint:nilnil // stored by a version that also kept watching subscribers
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

// next returns the next batch of subjects to remove or to add on the way to want. It returns additions only when
// there is nothing left to remove, so that capacity is freed first.
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

// rest returns the subjects and locations of a subscriber that want does not contain, so that they must be removed.
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

// fits returns ErrLimit if a subscriber would exceed the limit of interests after a change.
func (one *subscriber) fits(add, remove Interest) error {
	if sizeAfter(one.subjects, remove.Subjects, add.Subjects) > maxSubjects ||
		sizeAfter(one.locations, remove.addrs(), add.addrs()) > maxLocations {
		return fmt.Errorf("%w: a subscriber may have %d subjects and %d locations",
			failure.ErrLimit, maxSubjects, maxLocations)
	}
	return nil
}

// addrs returns the addresses of the locations.
func (i *Interest) addrs() (as []netip.Addr) {
	for _, l := range i.Locations {
		as = append(as, l.Addr)
	}
	return as
}

// sizeAfter returns the number of keys of m after removing and then adding keys.
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

// change changes the interests of a subscriber. It returns the resulting change of the union of all subscribers'
// interests, without added subjects, whose identities may not be known yet.
func (s *interests) change(
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

// want reports whether any subscriber is interested in the subject.
func (s *interests) want(x identity.Numeric) bool {
	for _, one := range s.all {
		if one.wants(x) {
			return true
		}
	}
	return false
}

// located returns the identity that any subscriber has reported for an address.
func (s *interests) located(a netip.Addr) (identity.Numeric, bool) {
	for _, one := range s.all {
		if x, ok := one.locations[a]; ok {
			return x, true
		}
	}
	return 0, false
}

// awaited reports, for each enforcing subscriber, whether a change of the given subjects must wait for it. A change
// without subjects waits for all of them.
func (s *interests) awaited(subjects []identity.Numeric) map[string]bool {
	who := make(map[string]bool)
	for name, one := range s.all {
		if one.enforces {
			who[name] = len(subjects) == 0 || slices.ContainsFunc(subjects, one.wants)
		}
	}
	return who
}

// enforced reports whether there are subscribers that enforce, and all known ones are connected.
func (s *interests) enforced() bool {
	found := false
	for _, one := range s.all {
		if one.enforces && one.session == nil {
			return false
		}
		found = found || one.enforces
	}
	return found
}

// left records that a subscriber has disconnected, and reports whether the caller should remove it immediately. It
// should remove a subscriber that only watches, unless the subscriber has more than subjectsAtOnce subjects.
func (s *interests) left(one *subscriber) (forget bool) {
	one.session, one.until = nil, s.now()
	if one.enforces {
		one.until = one.until.Add(s.linger)
		return false
	}
	return len(one.subjects) <= subjectsAtOnce
}
