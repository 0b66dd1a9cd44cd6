// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// MostAssigned is the largest number of ranges in an assignment, and the largest number of former ranges.
const MostAssigned = 8

// Assignment contains the ranges that are assigned to a node from outside. In mode kubernetes, they are the podCIDRs of
// its Node; in mode static, an administrator writes them. The node cannot change them.
type Assignment struct {
	Ranges []netip.Prefix `json:"ranges,omitempty"` // sorted
	// Former are ranges that the Node had before and no other Node has, the latest first. Endpoints of the node may
	// have addresses in them.
	Former []netip.Prefix `json:"former,omitempty"`
}

func (a Assignment) equal(b Assignment) bool {
	return slices.Equal(a.Ranges, b.Ranges) && slices.Equal(a.Former, b.Former)
}

// AssignmentKey is the assignment of a node in the store.
type AssignmentKey struct {
	Node       string
	Assignment Assignment
}

// assignments holds the assignments of all nodes.
type assignments struct {
	of     map[string]Assignment
	nodes  map[netip.Prefix]map[string]struct{} // range → nodes to which it is assigned
	around map[netip.Prefix]int                 // prefixes that contain assigned ranges → how many
	// complete is set once the store has had the assignments of all nodes.
	complete bool
}

func newAssignments() assignments {
	return assignments{
		of: map[string]Assignment{}, nodes: map[netip.Prefix]map[string]struct{}{}, around: map[netip.Prefix]int{},
	}
}

// set replaces the assignment of a node; nil removes it.
func (a *assignments) set(node string, next *Assignment) {
	for _, p := range a.of[node].Ranges {
		if delete(a.nodes[p], node); len(a.nodes[p]) == 0 {
			delete(a.nodes, p)
		}
		for around := range wider(p) {
			if a.around[around]--; a.around[around] == 0 {
				delete(a.around, around)
			}
		}
	}
	if next == nil {
		delete(a.of, node)
		return
	}
	node = strings.Clone(node)
	a.of[node] = *next
	for _, p := range next.Ranges {
		if a.nodes[p] == nil {
			a.nodes[p] = map[string]struct{}{}
		}
		a.nodes[p][node] = struct{}{}
		for around := range wider(p) {
			a.around[around]++
		}
	}
}

// other returns another node with an assigned range that overlaps p, and that range; the node is "" if no range
// overlaps.
func (a *assignments) other(p netip.Prefix, node string) (holder string, held netip.Prefix) {
	first := func(q netip.Prefix) bool {
		for name := range a.nodes[q] {
			if name != node && (holder == "" || name < holder) {
				holder, held = name, q
			}
		}
		return holder != ""
	}
	if first(p) {
		return holder, held
	}
	for around := range wider(p) {
		if first(around) {
			return holder, held
		}
	}
	if a.around[p] == 0 {
		return "", netip.Prefix{}
	}
	for q := range a.nodes {
		if p.Overlaps(q) && first(q) {
			return holder, held
		}
	}
	return "", netip.Prefix{}
}

// assign applies the assignments of an update, and adds to changed the nodes whose claims may have become valid or
// invalid. Assignments that the store no longer has stay, unless they were removed or the store has the assignments of
// all nodes.
func (v *view) assign(u Update, changed map[*nodeView]struct{}) {
	next := map[string]*Assignment{}
	if u.Complete && u.Assigned {
		for node := range v.assigned.of {
			next[node] = nil
		}
	}
	for _, k := range u.Removed {
		if k.Assignment {
			next[k.Node] = nil
		}
	}
	for _, k := range u.Assignments {
		next[k.Node] = &k.Assignment
	}
	if complete := u.Assigned || v.assigned.complete && !u.Unassigned; complete != v.assigned.complete {
		v.assigned.complete = complete
		for _, n := range v.nodes {
			changed[n] = struct{}{} // the other node may have no assignment
		}
	}
	var moved []netip.Prefix
	for node, a := range next {
		was, had := v.assigned.of[node]
		if a == nil && !had || a != nil && had && was.equal(*a) {
			continue
		}
		moved = append(moved, was.Ranges...)
		if a != nil {
			moved = append(moved, a.Ranges...)
		}
		v.assigned.set(node, a)
		if n := v.nodes[node]; n != nil {
			changed[n] = struct{}{}
		}
	}
	if len(moved) == 0 {
		return
	}
	slices.SortFunc(moved, netip.Prefix.Compare)
	for _, n := range v.nodes {
		overlap := func(p netip.Prefix) bool { return overlapsAny(moved, p) }
		if slices.ContainsFunc(n.record.Ranges, overlap) {
			changed[n] = struct{}{}
			continue
		}
		for _, k := range n.slots {
			if overlap(k.Claim.Range) {
				changed[n] = struct{}{}
				break
			}
		}
	}
}

// overlapsAny reports whether p overlaps one of the sorted prefixes.
func overlapsAny(sorted []netip.Prefix, p netip.Prefix) bool {
	at, found := slices.BinarySearchFunc(sorted, p, netip.Prefix.Compare)
	if found || at < len(sorted) && p.Overlaps(sorted[at]) {
		return true
	}
	for around := range wider(p) {
		if _, found := slices.BinarySearchFunc(sorted, around, netip.Prefix.Compare); found {
			return true
		}
	}
	return false
}

// assignmentProblem returns why claims are not compared with the podCIDRs of Nodes in mode
// kubernetes. Called with mu held.
func (r *Registry) assignmentProblem() error {
	switch {
	case r.view.ipam.Settings.Mode != IPAMKubernetes:
		return nil
	case r.assigning != nil:
		return r.assigning
	case !r.view.assigned.complete:
		return errNoAssignments
	}
	return nil
}

// Assign writes the podCIDRs of Nodes that differ from the store. A former range of a Node stays assigned to it until
// another Node has it; the assignment of a deleted Node stays until its node is forgotten. In modes other than
// kubernetes, Assign writes nothing. It may be repeated. It returns cluster.ErrUnavailable and the errors of Store.
func (r *Registry) Assign(ctx context.Context, nodes map[string][]netip.Prefix) error {
	r.mu.Lock()
	listed, settings := r.view.listed, r.view.ipam
	put, drop := r.view.assignments(nodes)
	complete := r.view.assigned.complete
	r.mu.Unlock()
	switch {
	case !listed:
		return fmt.Errorf("write the podCIDRs of Nodes: %w", ErrNotListed)
	case settings.Revision == 0:
		return fmt.Errorf("write the podCIDRs of Nodes: %w", errNoSettings)
	case settings.Settings.Mode != IPAMKubernetes, complete && len(put)+len(drop) == 0:
		return nil
	}
	err := r.store.Assign(ctx, put, drop)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.assigning = err
	return err
}

// assignments returns the changes that write the podCIDRs of all Nodes to the store.
func (v *view) assignments(nodes map[string][]netip.Prefix) (put []AssignmentKey, drop []string) {
	now := v.assignable(nodes)
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		next := Assignment{Ranges: now.of[node].Ranges}
		was, had := v.assigned.of[node]
		next.Former = formerRanges(was, next.Ranges, node, &now)
		if !had || !was.equal(next) {
			put = append(put, AssignmentKey{Node: node, Assignment: next})
		}
	}
	for _, node := range slices.Sorted(maps.Keys(v.assigned.of)) {
		if _, ok := nodes[node]; ok {
			continue
		}
		if n := v.nodes[node]; n == nil || !n.registered {
			drop = append(drop, node)
			continue
		}
		was := v.assigned.of[node]
		next := Assignment{Former: formerRanges(was, nil, node, &now)}
		if !was.equal(next) {
			put = append(put, AssignmentKey{Node: node, Assignment: next})
		}
	}
	return put, drop
}

// assignable returns the podCIDRs of Nodes, except those that overlap a range assigned to another Node: a kubelet may
// choose the podCIDRs of a Node that it creates.
func (v *view) assignable(nodes map[string][]netip.Prefix) assignments {
	now := newAssignments()
	for node, ranges := range nodes {
		var kept []netip.Prefix
		for _, p := range v.assigned.of[node].Ranges {
			if slices.Contains(ranges, p) {
				kept = append(kept, p)
			}
		}
		now.set(node, &Assignment{Ranges: kept})
	}
	added := map[string][]netip.Prefix{}
	for node, ranges := range nodes {
		for _, p := range ranges {
			if other, _ := now.other(p, node); other == "" {
				added[node] = append(added[node], p)
			}
		}
	}
	for node, ranges := range added {
		slices.SortFunc(ranges, netip.Prefix.Compare)
		now.set(node, &Assignment{Ranges: slices.Compact(ranges)})
	}
	return now
}

// formerRanges returns the ranges that a Node had before and no Node has now, the latest first.
func formerRanges(was Assignment, ranges []netip.Prefix, node string, now *assignments) (former []netip.Prefix) {
	for _, p := range slices.Concat(was.Ranges, was.Former) {
		if other, _ := now.other(p, node); other == "" && !slices.ContainsFunc(ranges, p.Overlaps) &&
			len(former) < MostAssigned {
			former = append(former, p)
		}
	}
	return former
}

// CheckAssignment returns an error if an assignment is malformed.
func CheckAssignment(a Assignment) error {
	for _, list := range [][]netip.Prefix{a.Ranges, a.Former} {
		if len(list) > MostAssigned {
			return fmt.Errorf("%d ranges, at most %d", len(list), MostAssigned)
		}
		for _, p := range list {
			if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
				return fmt.Errorf("%s is not a range", p)
			}
		}
	}
	return nil
}

// FormerIPAM contains settings of ipam that were in effect from a revision of the store on.
type FormerIPAM struct {
	Cluster  uint64 `json:"cluster,string"`
	Since    int64  `json:"since"`
	Settings IPAM   `json:"settings"`
}

// mostFormer is the largest number of former settings in the store.
const mostFormer = 8

// setSettings sets the settings of ipam in the store. Former settings still decide about older claims. While the store
// has none, the last known settings apply: unknown settings allow nothing.
func (v *view) setSettings(k IPAMKey) {
	if k.Revision == 0 || k.Revision == v.ipam.Revision {
		return
	}
	all := slices.Clone(v.formerSettings)
	if v.ipam.Revision != 0 {
		all = append(all, v.ipam)
	}
	for _, f := range k.Settings.Former {
		if f.Cluster == v.at.Cluster {
			all = append(all, IPAMKey{Settings: f.Settings, Revision: f.Since})
		}
	}
	k.Settings.Former = nil
	v.ipam = k
	all = slices.DeleteFunc(all, func(f IPAMKey) bool { return f.Revision <= 0 || f.Revision >= k.Revision })
	slices.SortStableFunc(all, func(a, b IPAMKey) int { return cmp.Compare(b.Revision, a.Revision) })
	all = slices.CompactFunc(all, func(a, b IPAMKey) bool { return a.Revision == b.Revision })
	v.formerSettings = all[:min(len(all), mostFormer)]
}

// settingsAt returns the settings that were in effect at a revision; ok is false if they are not known.
func (v *view) settingsAt(revision int64) (s IPAM, ok bool) {
	if v.ipam.Revision != 0 && revision >= v.ipam.Revision {
		return v.ipam.Settings, true
	}
	for _, f := range v.formerSettings {
		if revision >= f.Revision {
			return f.Settings, true
		}
	}
	return IPAM{}, false
}

// settingsUntilNow returns the current and the former settings in this store, newest first.
func (v *view) settingsUntilNow() (all []FormerIPAM) {
	for _, k := range slices.Concat([]IPAMKey{v.ipam}, v.formerSettings) {
		if k.Revision != 0 && len(all) < mostFormer {
			all = append(all, FormerIPAM{Cluster: v.at.Cluster, Since: k.Revision, Settings: k.Settings})
		}
	}
	return all
}

// Shortest prefix lengths of a range in the modes without a pool, unless the settings or an assignment of the node
// allow more.
const (
	ShortestIPv4 = 16
	ShortestIPv6 = 48
)

var (
	errTooLarge = fmt.Errorf("a range has at most the size of a /%d or, for IPv6, a /%d unless etcd has the "+
		"prefixes of all ranges or the ranges of the node", ShortestIPv4, ShortestIPv6)
	errNotOfPool     = errors.New("it is not a block of the cluster's pool")
	errNotInPrefix   = errors.New("it is not within the prefixes of the cluster's ranges, or larger than a range may be")
	errNotAssigned   = errors.New("it is not one of the ranges assigned to the node")
	errNoAssignments = errors.New("etcd has no podCIDRs of Nodes yet: the elected " +
		"sluice-controller writes them")
	errNoSettings = fmt.Errorf("%w: no sluice-ipam of the cluster has registered its mode with etcd yet",
		cluster.ErrUnavailable)
	errNotPublished = errors.New("the ranges that are assigned to the node are not in etcd yet")
)

// CheckSize returns an error if a range is larger than an unassigned range may be.
func CheckSize(p netip.Prefix) error {
	if shortest := map[bool]int{false: ShortestIPv4, true: ShortestIPv6}[p.Addr().Is6()]; p.Bits() < shortest {
		return errTooLarge
	}
	return nil
}

// excess returns an error if a claim is not valid, even if no other node claims the range. The settings at the time of
// the claim decide. With a pool, a node has only blocks of it, and no more than the settings allow. In the other modes,
// it has the ranges assigned to it. If no ranges are assigned, it has ranges within the prefixes of the settings and of
// a limited size.
//
// A claim is beyond the limit because of its slot, not because of the number of the node's claims. It does not become
// valid when the node gives up an earlier claim: another node may have the block by then, and its claim would be newer.
func (v *view) excess(c claim) error {
	if c.slot >= MostRanges {
		return fmt.Errorf("a node has at most %d ranges of a family", MostRanges)
	}
	s, known := v.settingsAt(c.age)
	mode := s.Mode
	if !known {
		mode = v.ipam.Settings.Mode // the claim may be older than the first registered settings
	}
	if assigns(mode) || assigns(v.ipam.Settings.Mode) {
		own, has := v.assigned.of[c.node.name]
		if slices.Contains(own.Ranges, c.prefix) {
			return nil
		}
		if node, held := v.assigned.other(c.prefix, c.node.name); node != "" {
			return fmt.Errorf("%s is assigned to node %s", held, node)
		}
		switch {
		case slices.Contains(own.Former, c.prefix):
			return nil
		case has && assigns(mode):
			return errNotAssigned
		case mode == IPAMKubernetes && v.assigned.complete:
			return errNotPublished
		}
	}
	switch {
	case !known || s.Mode != IPAMPool && len(s.Pool) == 0:
		return CheckSize(c.prefix)
	case s.Mode == IPAMPool && !s.Has(c.prefix.Addr().Is6(), c.prefix):
		return errNotOfPool
	case !s.Within(c.prefix):
		return errNotInPrefix
	case c.slot >= s.MaxBlocks:
		return fmt.Errorf("a node has at most %d blocks of a family", s.MaxBlocks)
	}
	return nil
}

// assigns reports whether ranges may be assigned to nodes in a mode.
func assigns(m IPAMMode) bool { return m == IPAMStatic || m == IPAMKubernetes }

// pinEnds reports whether a range that a node had before the store was rebuilt is now assigned to another node.
func (v *view) pinEnds(p netip.Prefix, node string) bool {
	if !assigns(v.ipam.Settings.Mode) || slices.Contains(v.assigned.of[node].Ranges, p) {
		return false
	}
	other, _ := v.assigned.other(p, node)
	return other != ""
}

// rebuiltSettings keeps the last settings and assignments in effect for a rebuilt store, whose revisions are new.
func (v *view) rebuiltSettings() {
	v.formerSettings = nil
	if v.ipam.Revision != 0 {
		v.ipam.Revision = 1
	}
}
