// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package scenario generates random states of a cluster: policies of every tier and action, identities of every kind,
// subjects, learned names, locations. It is for tests that compare two ways to evaluate a connection.
//
// There are only few namespaces, apps, prefixes and ports, so that random rules often match random peers. The results
// depend only on the seed.
package scenario

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// State is the complete input of an engine, as a value that can be compared, changed and passed to a new engine.
type State struct {
	Objects    map[policy.Key]policy.Object
	Identities map[identity.Numeric]peer.Identity
	Subjects   map[identity.Numeric]bool
	Names      map[string][]netip.Addr
	Located    map[netip.Addr]identity.Numeric
}

// NewState returns a state without policies and identities.
func NewState() *State {
	return &State{
		Objects: make(map[policy.Key]policy.Object), Identities: make(map[identity.Numeric]peer.Identity),
		Subjects: make(map[identity.Numeric]bool), Names: make(map[string][]netip.Addr), Located: make(map[netip.Addr]identity.Numeric),
	}
}

// Clone returns a copy that may be changed; the policies are shared.
func (s *State) Clone() *State {
	c := &State{
		Objects: maps.Clone(s.Objects), Identities: maps.Clone(s.Identities), Subjects: maps.Clone(s.Subjects),
		Names: make(map[string][]netip.Addr), Located: maps.Clone(s.Located),
	}
	for n, a := range s.Names {
		c.Names[n] = slices.Clone(a)
	}
	return c
}

// SortedKeys returns the keys of a map in order.
func SortedKeys[K interface{ ~uint32 | ~string }, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}

// SortedObjects returns the keys of policies in order.
func SortedObjects(m map[policy.Key]policy.Object) []policy.Key {
	return slices.SortedFunc(maps.Keys(m), func(a, b policy.Key) int { return strings.Compare(a.String(), b.String()) })
}

// Delta is the difference between two states, in a fixed order.
type Delta struct {
	DeletePolicies   []policy.Key
	UpsertPolicies   []policy.Object
	RemoveIdentities []identity.Numeric
	AddIdentities    []peer.Identity
	RemoveSubjects   []identity.Numeric
	AddSubjects      []identity.Numeric
	Forget, Learn    []Name
	Vacate           []netip.Addr
	Locate           []Location
}

// Name is a DNS name with addresses.
type Name struct {
	Name  string
	Addrs []netip.Addr
}

// Location maps an address to its identity.
type Location struct {
	Addr     netip.Addr
	Identity identity.Numeric
}

// Diff returns the difference between two states.
func Diff(have, want *State) Delta {
	var d Delta
	for _, k := range SortedObjects(have.Objects) {
		if _, ok := want.Objects[k]; !ok {
			d.DeletePolicies = append(d.DeletePolicies, k)
		}
	}
	for _, k := range SortedObjects(want.Objects) {
		if old, ok := have.Objects[k]; !ok || !same(old, want.Objects[k]) {
			d.UpsertPolicies = append(d.UpsertPolicies, want.Objects[k])
		}
	}
	for _, n := range SortedKeys(have.Identities) {
		if _, ok := want.Identities[n]; !ok {
			d.RemoveIdentities = append(d.RemoveIdentities, n)
		}
	}
	for _, n := range SortedKeys(want.Identities) {
		id := want.Identities[n]
		if old, ok := have.Identities[n]; !ok || old.Labels.String() != id.Labels.String() {
			d.AddIdentities = append(d.AddIdentities, id)
		}
	}
	for _, n := range SortedKeys(have.Subjects) {
		if !want.Subjects[n] {
			d.RemoveSubjects = append(d.RemoveSubjects, n)
		}
	}
	for _, n := range SortedKeys(want.Subjects) {
		if !have.Subjects[n] {
			d.AddSubjects = append(d.AddSubjects, n)
		}
	}
	for _, n := range SortedKeys(have.Names) {
		if !slices.Equal(have.Names[n], want.Names[n]) {
			d.Forget = append(d.Forget, Name{n, have.Names[n]})
		}
	}
	for _, n := range SortedKeys(want.Names) {
		if !slices.Equal(have.Names[n], want.Names[n]) {
			d.Learn = append(d.Learn, Name{n, want.Names[n]})
		}
	}
	for _, a := range sortedAddrs(have.Located) {
		if _, ok := want.Located[a]; !ok {
			d.Vacate = append(d.Vacate, a)
		}
	}
	for _, a := range sortedAddrs(want.Located) {
		n := want.Located[a]
		if m, ok := have.Located[a]; !ok || m != n {
			d.Locate = append(d.Locate, Location{a, n})
		}
	}
	return d
}

// same reports whether a and b are copies of one object, which share their rules.
func same(a, b policy.Object) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

func sortedAddrs(m map[netip.Addr]identity.Numeric) []netip.Addr {
	return slices.SortedFunc(maps.Keys(m), netip.Addr.Compare)
}

// String describes the state for failure messages.
func (s *State) String() string {
	var b strings.Builder
	for _, k := range SortedObjects(s.Objects) {
		o := s.Objects[k]
		fmt.Fprintf(&b, "%s group %+v\n", k, o.Group)
		for _, spec := range o.Specs {
			fmt.Fprintf(&b, "  subject {%s} ns %q host %t selects %v deny %v\n", spec.Subject, spec.Namespace, spec.Host, spec.Selects, spec.DefaultDeny)
			for _, r := range spec.Rules {
				fmt.Fprintf(&b, "    %s prio %d.%d %s\n", r.Tier, r.Priority, r.Index, r.Content())
			}
		}
	}
	for _, n := range SortedKeys(s.Identities) {
		fmt.Fprintf(&b, "identity %d subject %t %s\n", n, s.Subjects[n], s.Identities[n].Labels)
	}
	fmt.Fprintf(&b, "names %v\n", s.Names)
	return b.String()
}
