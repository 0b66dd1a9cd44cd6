// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
)

func ranges(all ...string) (out []netip.Prefix) {
	for _, p := range all {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// assigned returns an assignment of ranges to a node.
func assigned(node string, all ...string) AssignmentKey {
	return AssignmentKey{Node: node, Assignment: Assignment{Ranges: ranges(all...)}}
}

// lies are ranges that a node claims in addition to its own.
var lies = map[string][]string{
	"everything":               {"0.0.0.0/0", "::/0"},
	"a range around others":    {"10.0.0.0/16", "fd00::/48"},
	"the range of a node":      {"10.0.2.0/24", "fd00:0:0:2::/64"},
	"a part of it":             {"10.0.2.0/25", "fd00:0:0:2:1::/80"},
	"a range of no node yet":   {"10.0.3.0/24", "fd00:0:0:3::/64"},
	"a range of no Node":       {"192.168.0.0/24", "fd01::/64"},
	"half of all addresses":    {"0.0.0.0/1", "8000::/1"},
	"an address of the uplink": {"192.0.2.1/32", "2001:db8::1/128"},
}

// TestNodeHasOnlyThePodCIDRsOfItsNode: other ranges that a node claims, in slots or in its record like earlier
// versions, belong to no node, and other nodes still get the ranges of their own Nodes. A new process decides in the
// same way.
func TestNodeHasOnlyThePodCIDRsOfItsNode(t *testing.T) {
	for what, lie := range lies {
		for _, slots := range []bool{false, true} {
			for _, late := range []bool{false, true} { // whether the assignments arrive after the claims
				t.Run(fmt.Sprint(what, " in slots ", slots, " before the assignments ", late), func(t *testing.T) {
					own := []string{"10.0.1.0/24", "fd00:0:0:1::/64"}
					liar, good := node("liar", 5, slices.Concat(own, lie)...), node("good", 6, "10.0.2.0/24", "fd00:0:0:2::/64")
					liar.Revision, good.Revision = 5, 6
					u := Update{
						Complete: true, Revision: 8, IPAM: &IPAMKey{Settings: IPAM{Mode: IPAMKubernetes}, Revision: 5},
						Nodes: []NodeKey{liar, good}, Assigned: true, Assignments: []AssignmentKey{
							assigned("liar", own...), assigned("good", "10.0.2.0/24", "fd00:0:0:2::/64"),
							assigned("late", "10.0.3.0/24", "fd00:0:0:3::/64"),
						},
					}
					if slots {
						u.Claims = slices.Concat(claimed("liar", own[0], 5, own[1], 5, lie[0], 5, lie[1], 5),
							claimed("good", "10.0.2.0/24", 6, "fd00:0:0:2::/64", 6))
					}
					r, _ := newRegistry(t, time.Hour)
					if late {
						first := u
						first.Assigned, first.Assignments, first.Revision = false, nil, 7
						r.Observe(first)
						r.Observe(Update{Revision: 8, Assigned: true, Assignments: u.Assignments})
					} else {
						r.Observe(u)
					}
					is := func(when string, r *Registry, want map[string]string) {
						t.Helper()
						got := r.holders()
						for p, node := range got {
							if want[p] != node {
								t.Errorf("%s %s is a range of %q", when, p, node)
							}
						}
						if len(got) != len(want) {
							t.Errorf("%s the ranges are %v, want %v", when, got, want)
						}
					}
					want := map[string]string{
						own[0]: "liar", own[1]: "liar", "10.0.2.0/24": "good", "fd00:0:0:2::/64": "good",
					}
					is("at first", r, want)
					if got := r.refusedOf("liar"); len(got) != len(lie) {
						t.Errorf("of liar %v are refused", got)
					}
					// The claim of another node for its own range is the younger one.
					for _, p := range ranges("10.0.3.0/24", "fd00:0:0:3::/64") {
						if holder, held := r.view.heldByOther(p, "late"); holder != "" {
							t.Errorf("%s cannot be claimed: %s of %s overlaps it", p, held, holder)
						}
					}
					joined := node("late", 9)
					claims := claimed("late", "10.0.3.0/24", 9, "fd00:0:0:3::/64", 9)
					r.Observe(Update{Revision: 9, Nodes: []NodeKey{joined}, Claims: claims})
					want["10.0.3.0/24"], want["fd00:0:0:3::/64"] = "late", "late"
					is("when another node joined", r, want)
					fresh, _ := newRegistry(t, time.Hour)
					u.Revision, u.Nodes, u.Claims = 9, append(u.Nodes, joined), append(u.Claims, claims...)
					fresh.Observe(u)
					is("for a process that begins now", fresh, want)
				})
			}
		}
	}
}

// TestClaimsFromBeforeTheSettingsAreComparedWithPodCIDRs: in a rebuilt store or a new cluster, a node may write its
// claims before any node has registered the mode.
func TestClaimsFromBeforeTheSettingsAreComparedWithPodCIDRs(t *testing.T) {
	for _, mode := range []IPAMMode{IPAMKubernetes, IPAMStatic} {
		r, _ := newRegistry(t, time.Hour)
		r.Observe(Update{
			Complete: true, Revision: 8, IPAM: &IPAMKey{Settings: IPAM{Mode: mode}, Revision: 5},
			Nodes:       []NodeKey{node("a", 2), node("b", 6)},
			Claims:      slices.Concat(claimed("a", "10.0.1.0/24", 3, "192.168.0.0/16", 3), claimed("b", "10.0.2.0/24", 6)),
			Assigned:    mode == IPAMKubernetes,
			Assignments: []AssignmentKey{assigned("a", "10.0.1.0/24"), assigned("b", "10.0.2.0/24")},
		})
		if got := r.holders(); len(got) != 2 || got["10.0.1.0/24"] != "a" || got["10.0.2.0/24"] != "b" {
			t.Errorf("in mode %s the ranges are %v", mode, got)
		}
	}
}

// TestNodeWithoutAssignmentHasNoRange: once etcd has the podCIDRs of all Nodes, a node without a Node object has no
// range. The node itself does not report its range as refused, because its Node object may have a podCIDR that is not
// in etcd yet.
func TestNodeWithoutAssignmentHasNoRange(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	own, ghost := node("own", 6), node("ghost", 7)
	r.Observe(Update{
		Complete: true, Revision: 8, IPAM: &IPAMKey{Settings: IPAM{Mode: IPAMKubernetes}, Revision: 5},
		Nodes:  []NodeKey{own, ghost},
		Claims: slices.Concat(claimed("own", "10.0.1.0/24", 6), claimed("ghost", "10.0.2.0/24", 7)),
	})
	if got := r.holders(); len(got) != 2 || r.Status().Unassigned == nil {
		t.Errorf("before etcd has assignments the ranges are %v; reported is %v", got, r.Status().Unassigned)
	}
	r.Observe(Update{Revision: 9, Assigned: true})
	s := r.Status()
	if got := r.holders(); len(got) != 0 || len(s.Ranges) != 0 || len(s.Overlaps) != 1 || s.Unassigned != nil {
		t.Errorf("the ranges are %v; reported is %+v", got, s)
	}
	r.Observe(Update{Revision: 10, Assignments: []AssignmentKey{assigned("own", "10.0.1.0/24")}})
	if got := r.holders(); len(got) != 1 || got["10.0.1.0/24"] != "own" {
		t.Errorf("with an assignment the ranges are %v", got)
	}
	r.Observe(Update{Revision: 11, Removed: []Removal{{Node: "own", Assignment: true}}})
	if got := r.holders(); len(got) != 0 {
		t.Errorf("after it was removed the ranges are %v", got)
	}
	r.Observe(Update{Revision: 12, Unassigned: true})
	if got := r.holders(); len(got) != 2 || r.Status().Unassigned == nil {
		t.Errorf("after an administrator removed all of them the ranges are %v", got)
	}
}

// TestAssignmentsStayWhileTheStoreHasNone: a rebuilt store, or a store from which the keys were deleted, has no
// assignments. The known assignments stay in effect until the assignments of all Nodes were written again; from then on
// only the written assignments are valid.
func TestAssignmentsStayWhileTheStoreHasNone(t *testing.T) {
	settings := &IPAMKey{Settings: IPAM{Mode: IPAMKubernetes}, Revision: 5}
	r, _ := newRegistry(t, time.Hour)
	r.Observe(Update{
		Complete: true, Cluster: 1, Revision: 100, IPAM: settings, Nodes: []NodeKey{node("good", 6)},
		Claims: claimed("good", "10.0.2.0/24", 6), Assigned: true,
		Assignments: []AssignmentKey{assigned("good", "10.0.2.0/24"), assigned("late", "10.0.3.0/24")},
	})
	for _, settings := range []*IPAMKey{nil, {Settings: IPAM{Mode: IPAMKubernetes}, Revision: 2}} {
		r.Observe(Update{
			Complete: true, Cluster: 2, Revision: 5, IPAM: settings, Nodes: []NodeKey{node("liar", 3), node("good", 4)},
			Claims: slices.Concat(claimed("liar", "0.0.0.0/0", 3, "10.0.3.0/24", 3), claimed("good", "10.0.2.0/24", 4)),
		})
		if got := r.holders(); len(got) != 1 || got["10.0.2.0/24"] != "good" {
			t.Errorf("in a store that was rebuilt the ranges are %v", got)
		}
	}
	r.Observe(Update{
		Cluster: 2, Revision: 6, Assigned: true, Assignments: []AssignmentKey{assigned("good", "10.0.2.0/24")},
	})
	if n := len(r.view.assigned.of); n != 2 {
		t.Errorf("after a change there are %d assignments", n)
	}
	r.Observe(Update{
		Complete: true, Cluster: 2, Revision: 6, IPAM: settings, Nodes: []NodeKey{node("good", 4)},
		Claims: claimed("good", "10.0.2.0/24", 4), Assigned: true,
		Assignments: []AssignmentKey{assigned("good", "10.0.2.0/24")},
	})
	if n := len(r.view.assigned.of); n != 1 {
		t.Errorf("after a listing there are %d assignments", n)
	}
}

// TestPodCIDROfANodeIsItsOwnAfterTheStoreWasRebuilt: a range of a former node belongs to the node whose Node has it
// now, and the former node keeps no part of it.
func TestPodCIDROfANodeIsItsOwnAfterTheStoreWasRebuilt(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	settings := IPAM{Mode: IPAMKubernetes}
	r.Observe(Update{
		Complete: true, Cluster: 1, Revision: 100, IPAM: &IPAMKey{Settings: settings, Revision: 5},
		Nodes: []NodeKey{node("before", 6)}, Claims: claimed("before", "10.0.2.0/24", 6), Assigned: true,
		Assignments: []AssignmentKey{assigned("before", "10.0.2.0/24")},
	})
	r.Observe(Update{
		Complete: true, Cluster: 2, Revision: 9, IPAM: &IPAMKey{Settings: settings, Revision: 2},
		Nodes:  []NodeKey{node("before", 3), node("now", 4)},
		Claims: slices.Concat(claimed("before", "10.0.2.0/24", 3), claimed("now", "10.0.2.0/24", 4)), Assigned: true,
		Assignments: []AssignmentKey{assigned("before", "10.0.7.0/24"), assigned("now", "10.0.2.0/24")},
	})
	if got := r.holders()["10.0.2.0/24"]; got != "now" {
		t.Errorf("the range belongs to %q", got)
	}
	if holder, _ := r.view.heldByOther(netip.MustParsePrefix("10.0.2.0/24"), "now"); holder != "" {
		t.Errorf("%q keeps the range from its node", holder)
	}
}

// TestFormerPodCIDRsStayUntilAnotherNodeHasThem: if the Node of a node was deleted and created again, the node's
// endpoints keep their addresses.
func TestFormerPodCIDRsStayUntilAnotherNodeHasThem(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	r.Observe(Update{
		Complete: true, Revision: 8, IPAM: &IPAMKey{Settings: IPAM{Mode: IPAMKubernetes}, Revision: 5},
		Nodes:  []NodeKey{node("a", 6), node("b", 7)},
		Claims: slices.Concat(claimed("a", "10.0.1.0/24", 6, "10.0.8.0/24", 6), claimed("b", "10.0.8.0/24", 7)),
	})
	revision := int64(8)
	publish := func(nodes map[string][]netip.Prefix) (put, drop int) {
		p, d := r.view.assignments(nodes)
		revision++
		u := Update{Revision: revision, Assigned: true, Assignments: p}
		for _, node := range d {
			u.Removed = append(u.Removed, Removal{Node: node, Assignment: true})
		}
		r.Observe(u)
		return len(p), len(d)
	}
	is := func(when string, want map[string]string) {
		t.Helper()
		if got := r.holders(); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s the ranges are %v, want %v", when, got, want)
		}
	}
	publish(map[string][]netip.Prefix{"a": ranges("10.0.1.0/24"), "b": nil})
	is("at first", map[string]string{"10.0.1.0/24": "a"})
	again := map[string][]netip.Prefix{"a": ranges("10.0.8.0/24"), "b": nil}
	if put, drop := publish(again); put != 1 || drop != 0 {
		t.Errorf("a Node that changed writes %d keys and removes %d", put, drop)
	}
	is("after a has another range", map[string]string{"10.0.1.0/24": "a", "10.0.8.0/24": "a"})
	if put, drop := publish(again); put+drop != 0 {
		t.Errorf("the same Nodes again write %d keys and remove %d", put, drop)
	}
	publish(map[string][]netip.Prefix{"a": ranges("10.0.9.0/24"), "b": ranges("10.0.8.0/24")})
	is("after b has it", map[string]string{"10.0.1.0/24": "a", "10.0.8.0/24": "b"})
	publish(map[string][]netip.Prefix{"b": ranges("10.0.8.0/24")})
	is("after the Node of a is deleted", map[string]string{"10.0.1.0/24": "a", "10.0.8.0/24": "b"})
	publish(map[string][]netip.Prefix{"b": ranges("10.0.8.0/24"), "c": ranges("10.0.1.0/24")})
	is("after another Node has the range of a", map[string]string{"10.0.8.0/24": "b"})
	r.Observe(Update{Revision: 20, Removed: []Removal{{Node: "a"}}})
	revision = 20
	if _, drop := publish(map[string][]netip.Prefix{"b": ranges("10.0.8.0/24")}); drop != 2 {
		t.Errorf("of nodes that are forgotten %d assignments are removed", drop)
	}
}

// TestPodCIDRThatOverlapsAnotherNodesIsNotAssigned: a kubelet that creates its own Node may set any podCIDRs, even one
// that overlaps another node's. If a range moves to another Node, it is assigned to that Node.
func TestPodCIDRThatOverlapsAnotherNodesIsNotAssigned(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	r.Observe(Update{
		Complete: true, Revision: 8, IPAM: &IPAMKey{Settings: IPAM{Mode: IPAMKubernetes}, Revision: 5}, Assigned: true,
		Assignments: []AssignmentKey{assigned("a", "10.0.1.0/24"), assigned("b", "10.0.2.0/24", "fd00:0:0:2::/64")},
	})
	for what, c := range map[string]struct {
		nodes map[string][]netip.Prefix
		want  []AssignmentKey
	}{
		"another Node has chosen": {
			nodes: map[string][]netip.Prefix{
				"a": ranges("10.0.1.0/24"), "b": ranges("10.0.2.0/24", "fd00:0:0:2::/64"),
				"evil": ranges("0.0.0.0/0", "fd00:0:0:2::/65"),
			},
			want: []AssignmentKey{assigned("evil")},
		},
		"two Nodes have exchanged their ranges": {
			nodes: map[string][]netip.Prefix{"b": ranges("10.0.1.0/24"), "a": ranges("10.0.2.0/24", "fd00:0:0:2::/64")},
			want:  []AssignmentKey{assigned("a", "10.0.2.0/24", "fd00:0:0:2::/64"), assigned("b", "10.0.1.0/24")},
		},
		"a range of one Node is given to another": {
			nodes: map[string][]netip.Prefix{
				"a": ranges("10.0.1.0/24"), "b": ranges("10.0.2.0/24"), "c": ranges("fd00:0:0:2::/64"),
			},
			want: []AssignmentKey{assigned("b", "10.0.2.0/24"), assigned("c", "fd00:0:0:2::/64")},
		},
	} {
		if put, drop := r.view.assignments(c.nodes); fmt.Sprint(put) != fmt.Sprint(c.want) || len(drop) != 0 {
			t.Errorf("%s: written is %v, removed %v; want %v", what, put, drop, c.want)
		}
	}
}

// TestRangesInTheModeStaticAreLimited: without prefixes in etcd, the size of each range is limited. With prefixes,
// ranges must also be inside them, and their number per node is limited. A node does not get a range that is assigned
// to another node.
func TestRangesInTheModeStaticAreLimited(t *testing.T) {
	within := IPAM{
		Mode: IPAMStatic, Pool: ranges("10.0.0.0/16", "fd00::/48"), IPv4Block: 24, IPv6Block: 64, MaxBlocks: 2,
	}
	for what, c := range map[string]struct {
		settings IPAM
		claims   []any
		want     []string
		assigned []AssignmentKey
	}{
		"no prefixes": {
			settings: IPAM{Mode: IPAMStatic},
			claims: []any{
				"0.0.0.0/0", 9, "10.0.0.0/15", 9, "10.9.0.0/16", 9, "192.168.0.0/24", 9, "::/0", 9, "fd00::/47", 9,
				"fd01::/48", 9, "fd02::/64", 9,
			},
			want: []string{"10.9.0.0/16", "192.168.0.0/24", "fd01::/48", "fd02::/64"},
		},
		"prefixes": {
			settings: within,
			claims: []any{
				"10.0.1.0/24", 9, "10.0.4.0/25", 9, "10.0.2.0/24", 9, "fd00:0:0:1::/64", 9, "fd01::/64", 9,
			},
			want: []string{"10.0.1.0/24", "10.0.4.0/25", "fd00:0:0:1::/64"},
		},
		"all of the prefixes": {
			settings: within, claims: []any{"10.0.0.0/16", 9, "0.0.0.0/0", 9, "fd00::/48", 9},
		},
		"outside of the prefixes": {
			settings: within, claims: []any{"10.1.0.0/24", 9, "fd01::/64", 9},
		},
		"a range of another node": {
			settings: within, claims: []any{"10.0.1.0/24", 9, "10.0.2.0/25", 9},
			assigned: []AssignmentKey{assigned("good", "10.0.2.0/24")}, want: []string{"10.0.1.0/24"},
		},
		"other ranges than the assigned one": {
			settings: within, claims: []any{"10.0.1.0/24", 9, "172.16.0.0/12", 9},
			assigned: []AssignmentKey{assigned("a", "172.16.0.0/12")}, want: []string{"172.16.0.0/12"},
		},
	} {
		t.Run(what, func(t *testing.T) {
			r, _ := newRegistry(t, time.Hour)
			r.Observe(Update{
				Complete: true, Revision: 10, IPAM: &IPAMKey{Settings: c.settings, Revision: 5},
				Nodes: []NodeKey{node("a", 6)}, Claims: claimed("a", c.claims...), Assignments: c.assigned,
			})
			want := map[string]string{}
			for _, p := range c.want {
				want[p] = "a"
			}
			if got := r.holders(); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("the ranges are %v, want %v", got, want)
			}
			if got, all := len(r.refusedOf("a")), len(c.claims)/2; got != all-len(c.want) {
				t.Errorf("%d of %d ranges are refused", got, all)
			}
		})
	}
}

// TestClaimsAreJudgedByTheSettingsOfTheirTime: claims that were refused under former settings stay refused while etcd
// has no settings, when it has other settings, and in a new process. Valid claims stay valid.
func TestClaimsAreJudgedByTheSettingsOfTheirTime(t *testing.T) {
	pool := IPAM{Mode: IPAMPool, Pool: ranges("10.0.0.0/16"), IPv4Block: 24, MaxBlocks: 2}
	other := IPAM{Mode: IPAMPool, Pool: ranges("10.1.0.0/16"), IPv4Block: 24, MaxBlocks: 2}
	claims := claimed("a", "10.0.1.0/24", 6, "10.1.2.0/24", 6, "10.0.0.0/16", 6, "10.1.0.0/16", 6)
	u := Update{
		Complete: true, Cluster: 1, Revision: 10, IPAM: &IPAMKey{Settings: pool, Revision: 5},
		Nodes: []NodeKey{node("a", 6)}, Claims: claims,
	}
	r, _ := newRegistry(t, time.Hour)
	is := func(when string, r *Registry) {
		t.Helper()
		if got := r.holders(); len(got) != 1 || got["10.0.1.0/24"] != "a" {
			t.Errorf("%s the ranges are %v", when, got)
		}
	}
	r.Observe(u)
	is("at first", r)
	r.Observe(Update{Cluster: 1, Revision: 11, IPAM: &IPAMKey{}})
	is("while etcd has no settings", r)
	other.Former = (knownRanges{r}).Settings()
	r.Observe(Update{Cluster: 1, Revision: 12, IPAM: &IPAMKey{Settings: other, Revision: 12}})
	is("with other settings", r)
	fresh, _ := newRegistry(t, time.Hour)
	u.Revision, u.IPAM = 12, &IPAMKey{Settings: other, Revision: 12}
	fresh.Observe(u)
	is("for a process that begins now", fresh)
	third := pool
	third.Former = (knownRanges{fresh}).Settings()
	if len(third.Former) != 2 || third.Former[0].Since != 12 || third.Former[1].Since != 5 {
		t.Errorf("former settings are %+v", third.Former)
	}
	// Revisions of another store prove nothing, because they started again.
	u.Cluster, u.IPAM = 2, &IPAMKey{Settings: third, Revision: 12}
	elsewhere, _ := newRegistry(t, time.Hour)
	elsewhere.Observe(u)
	if len(elsewhere.view.formerSettings) != 0 {
		t.Errorf("former settings of another store are %+v", elsewhere.view.formerSettings)
	}
}
