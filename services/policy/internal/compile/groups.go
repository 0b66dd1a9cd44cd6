// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package compile

import (
	"cmp"
	"crypto/sha256"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Groups is the set of all address groups, indexed by the keys of their labels, so that a program finds the relevant
// groups without reading the others.
type Groups struct {
	byName map[string]*group
	byKey  map[string]map[*group]struct{}
}

// group is an address group and a digest of its prefixes, which does not depend on their order.
type group struct {
	*policy.Group
	prefixes rule.Digest
}

// NewGroups returns an empty index.
func NewGroups() *Groups {
	return &Groups{byName: make(map[string]*group), byKey: make(map[string]map[*group]struct{})}
}

// Clone returns a copy of the index; the groups themselves are immutable.
func (gs *Groups) Clone() *Groups {
	out := &Groups{byName: maps.Clone(gs.byName), byKey: make(map[string]map[*group]struct{}, len(gs.byKey))}
	for key, groups := range gs.byKey {
		out.byKey[key] = maps.Clone(groups)
	}
	return out
}

// Set adds a group, or replaces the group with the same name.
func (gs *Groups) Set(in *policy.Group) {
	gs.Delete(in.Name)
	list := in.Prefixes
	if !slices.IsSortedFunc(list, netip.Prefix.Compare) {
		list = slices.SortedFunc(slices.Values(list), netip.Prefix.Compare)
	}
	h := sha256.New()
	if in.Closed {
		h.Write([]byte("closed"))
	}
	var buf []byte
	for _, x := range list {
		buf, _ = x.AppendBinary(append(buf[:0], byte(x.Addr().BitLen()))) // never fails
		h.Write(buf)
	}
	g := &group{Group: in, prefixes: rule.Digest(h.Sum(nil))}
	gs.byName[g.Name] = g
	for _, l := range g.Labels.All() {
		if gs.byKey[l.Key] == nil {
			gs.byKey[l.Key] = make(map[*group]struct{})
		}
		gs.byKey[l.Key][g] = struct{}{}
	}
}

// Delete removes a group by name, if it exists.
func (gs *Groups) Delete(name string) {
	g := gs.byName[name]
	if g == nil {
		return
	}
	delete(gs.byName, name)
	for _, l := range g.Labels.All() {
		delete(gs.byKey[l.Key], g)
		if len(gs.byKey[l.Key]) == 0 {
			delete(gs.byKey, l.Key)
		}
	}
}

// concerns reports whether a requirement depends on a label of a group.
func concerns(r selector.Requirement, l label.Label) bool {
	if r.Key != l.Key || l.Source == label.SourceGenerated || r.Source != "" && l.Source != r.Source {
		return false
	}
	switch r.Op {
	case selector.In, selector.NotIn:
		return slices.Contains(r.Values, l.Value)
	}
	return true
}

// anyCounts reports whether a group peer depends on all groups, whatever labels they have. It does if the peer
// matches addresses without labels and also nodes, because it then matches a node only if a group contains the node's
// address.
func anyCounts(p rule.GroupPeer) bool { return p.NodesToo && p.Selector.Matches(label.Set{}) }

// groupPeers calls f for the group peers of all rules.
func (p *Program) groupPeers(f func(rule.GroupPeer)) {
	for i := range p.rules {
		for _, g := range p.rules[i].Peers.Groups {
			f(g)
		}
	}
}

// matter returns the groups on which the program depends. The digest covers their prefixes, and the labels that
// requirements use.
func (p *Program) matter(gs *Groups) ([]*policy.Group, rule.Digest) {
	labels := make(map[*group]map[label.Label]struct{})
	add := func(g *group, ls ...label.Label) {
		if labels[g] == nil {
			labels[g] = make(map[label.Label]struct{})
		}
		for _, l := range ls {
			labels[g][l] = struct{}{}
		}
	}
	seen := make(map[selector.Selector]struct{})
	all := false
	p.groupPeers(func(peer rule.GroupPeer) {
		all = all || anyCounts(peer)
		if _, ok := seen[peer.Selector]; ok {
			return
		}
		seen[peer.Selector] = struct{}{}
		for _, r := range peer.Selector.Requirements() {
			for g := range gs.byKey[r.Key] {
				for l := range g.Labels.Key(r.Key) {
					if concerns(r, l) {
						add(g, l)
					}
				}
			}
		}
	})
	if all {
		for _, g := range gs.byName {
			add(g)
		}
	}
	type part struct {
		*group
		text string
	}
	parts := make([]part, 0, len(labels))
	for g, ls := range labels {
		parts = append(parts, part{g, label.NewSet(slices.Collect(maps.Keys(ls))...).String()})
	}
	slices.SortFunc(parts, func(a, b part) int {
		return cmp.Or(strings.Compare(a.text, b.text), slices.Compare(a.prefixes[:], b.prefixes[:]), strings.Compare(a.Name, b.Name))
	})
	h := sha256.New()
	var out []*policy.Group
	for _, x := range parts {
		text := sha256.Sum256([]byte(x.text))
		h.Write(text[:])
		h.Write(x.prefixes[:])
		out = append(out, x.Group)
	}
	return out, rule.Digest(h.Sum(nil))
}

// UsesGroups reports whether the program depends on address groups.
func (p *Program) UsesGroups() bool { return p.grouped }

// Stale reports whether the current groups would result in a different program. changed lists the groups that were
// added, removed or changed since the program was compiled. If the program depends on none of them, Stale does no
// further work.
func (p *Program) Stale(gs *Groups, changed []*policy.Group) bool {
	concerned := false
	p.groupPeers(func(peer rule.GroupPeer) {
		concerned = concerned || anyCounts(peer) || slices.ContainsFunc(changed, func(g *policy.Group) bool {
			return slices.ContainsFunc(peer.Selector.Requirements(), func(r selector.Requirement) bool {
				for l := range g.Labels.Key(r.Key) {
					if concerns(r, l) {
						return true
					}
				}
				return false
			})
		})
	})
	if !concerned {
		return false
	}
	_, digest := p.matter(gs)
	return digest != p.groupsDigest
}
