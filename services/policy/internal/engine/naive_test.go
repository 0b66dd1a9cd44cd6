// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/policy/internal/identity"
	"github.com/sluice-net/sluice/services/policy/internal/label"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// naive judges by reading the rules one after the other. It shares the rule
// types, their order and the matching of selectors with the engine, and
// nothing else.
type naive struct {
	config Config
	state  *state
}

// question is one side of a connection.
type question struct {
	subject   identity.Numeric
	direction rule.Direction
	peer      identity.Numeric // need not be known
	addr      netip.Addr
	point     port.Point
}

// answer is the verdict and the rule that decided, if one did.
type answer struct {
	action rule.Action
	proxy  rule.Proxy
	rule   *rule.Rule
}

func (n *naive) judge(q question) answer {
	subject := n.state.identities[q.subject]
	if n.config.Enforcement == EnforceNever {
		return answer{action: rule.Allow}
	}
	always := n.config.Enforcement == EnforceAlways || subject.Number == identity.Init
	selected, deny := false, always
	n.specs(subject, q.direction, func(spec rule.Spec) {
		selected = true
		deny = deny || spec.DefaultDeny[q.direction]
	})
	rules := n.rules(subject, q.direction)
	if !selected && !always {
		return answer{action: rule.Allow}
	}
	slices.SortFunc(rules, rule.Compare)
	var decided [4]*rule.Rule
	for _, r := range rules {
		if decided[r.Tier] == nil && n.matches(r, subject, q) {
			decided[r.Tier] = r
		}
	}
	for _, r := range decided {
		if r != nil && r.Action != rule.Pass {
			return answer{action: r.Action, proxy: r.Proxy, rule: r}
		}
	}
	peer, known := n.state.identities[q.peer]
	host := known && peer.Kind == identity.KindHost
	if !deny || host && n.config.AllowHost && selected && q.direction == rule.Ingress && subject.Kind != identity.KindHost {
		return answer{action: rule.Allow}
	}
	return answer{action: rule.Deny}
}

// specs calls f for what selects the subject.
func (n *naive) specs(subject identity.Identity, d rule.Direction, f func(rule.Spec)) {
	for _, o := range n.state.objects {
		for _, spec := range o.Specs {
			if !spec.Selects[d] || spec.Host != (subject.Kind == identity.KindHost) || !spec.Subject.Matches(subject.Labels) {
				continue
			}
			if ns, _ := subject.Labels.Value(label.SourceKubernetes, label.KeyNamespace); spec.Namespace != "" && ns != spec.Namespace {
				continue
			}
			f(spec)
		}
	}
}

func (n *naive) rules(subject identity.Identity, d rule.Direction) (rules []*rule.Rule) {
	n.specs(subject, d, func(spec rule.Spec) {
		for _, r := range spec.Rules {
			if r.Direction == d {
				rules = append(rules, r)
			}
		}
	})
	return rules
}

func (n *naive) matches(r *rule.Rule, subject identity.Identity, q question) bool {
	peer, known := n.state.identities[q.peer]
	if n.byIdentity(r, peer, known) {
		owner := peer.Ports
		if q.direction == rule.Ingress {
			owner = subject.Ports
		}
		if n.covers(r, q, owner, !known && q.direction == rule.Egress) {
			return true
		}
	}
	if n.byAddress(r, peer, known, q.addr) {
		owner := subject.Ports
		if q.direction == rule.Egress {
			owner = n.state.identities[n.state.located[q.addr]].Ports
		}
		return n.covers(r, q, owner, false)
	}
	return false
}

func (n *naive) covers(r *rule.Rule, q question, owner []identity.NamedPort, pessimistic bool) bool {
	if r.AllPorts {
		return true
	}
	for _, p := range r.Ports {
		if p.Name == "" {
			if p.Range.Contains(q.point) {
				return true
			}
			continue
		}
		if pessimistic {
			proto := port.Protocol(q.point >> 16)
			if r.Action == rule.Deny && q.point>>16 < 256 && proto.HasPorts() && (p.Protocol == 0 || p.Protocol == proto) {
				return true
			}
			continue
		}
		for _, np := range owner {
			if p.Names(np.Name, np.Protocol) && port.At(np.Protocol, np.Port) == q.point {
				return true
			}
		}
	}
	return false
}

func (n *naive) byIdentity(r *rule.Rule, peer identity.Identity, known bool) bool {
	if r.Peers.Any && !(r.Peers.ExceptOwn && known && peer.Kind == identity.KindHost) {
		return true
	}
	if !known {
		return r.Action == rule.Deny && len(r.Peers.Selectors) > 0
	}
	for _, s := range r.Peers.Selectors {
		if s.Matches(peer.Labels) {
			return true
		}
	}
	return false
}

func (n *naive) byAddress(r *rule.Rule, peer identity.Identity, known bool, a netip.Addr) bool {
	scope := identity.ScopeCluster
	if known {
		scope = peer.Scope
	}
	reaches := func(reach rule.Reach) bool { return reach&(1<<scope) != 0 }
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, w := range r.Peers.Networks {
		if reaches(w.Reach) && w.Prefix.Contains(a) && !in(w.Except) {
			return true
		}
	}
	for _, g := range r.Peers.Groups {
		var ls []label.Label
		covered := false
		for _, o := range n.state.objects {
			if o.Group != nil && in(o.Group.Prefixes) {
				covered = true
				ls = append(ls, o.Group.Labels.All()...)
			}
		}
		reach := rule.ReachOutside
		if g.NodesToo && covered {
			reach |= rule.ReachNode
		}
		if reaches(reach) && g.Selector.Matches(label.NewSet(ls...)) && !in(g.Except) {
			return true
		}
	}
	for _, p := range r.Peers.Names {
		for name, addrs := range n.state.names {
			if reaches(p.Reach) && p.Pattern.Matches(name) && slices.Contains(addrs, a) {
				return true
			}
		}
	}
	return false
}
