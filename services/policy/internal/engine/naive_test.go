// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// naive evaluates by reading the rules one after the other. With the engine it shares only the rule types, their
// order and the matching of selectors.
type naive struct {
	config Config
	state  *scenario.State
}

// answer is the verdict and the deciding rule, if any.
type answer struct {
	action policytable.Action
	proxy  policytable.Proxy
	rule   *rule.Rule
	// members are the rules at the position of a redirect rule that redirect or allow the connection.
	members []member7
}

// member7 is a rule whose layer 7 rules are part of a union.
type member7 struct {
	*rule.Rule
	byIdentity, byAddress bool
}

func (n *naive) evaluate(q scenario.Question) answer {
	subject := n.state.Identities[q.Subject]
	if n.config.Enforcement == EnforceNever {
		return answer{action: policytable.Allow}
	}
	always := n.config.Enforcement == EnforceAlways || subject.Number == identity.Init
	selected, deny := false, always
	n.specs(subject, q.Direction, func(spec rule.Spec) {
		selected = true
		deny = deny || spec.DefaultDeny[q.Direction]
	})
	rules := n.rules(subject, q.Direction)
	if !selected && !always {
		return answer{action: policytable.Allow}
	}
	slices.SortFunc(rules, rule.Compare)
	var decided [4]*rule.Rule
	for _, r := range rules {
		if decided[r.Tier] == nil && n.matches(r, subject, q) {
			decided[r.Tier] = r
		}
	}
	for _, r := range decided {
		if r != nil && r.Action != policytable.Pass {
			return answer{action: r.Action, proxy: r.Proxy, rule: r, members: n.members(r, rules, subject, q)}
		}
	}
	peer, known := n.peer(q)
	host := known && peer.Kind == identity.KindHost
	if !deny || host && n.config.AllowHost && selected && q.Direction == policytable.Ingress && subject.Kind != identity.KindHost {
		return answer{action: policytable.Allow}
	}
	return answer{action: policytable.Deny}
}

// members returns the rules whose layer 7 rules are combined with the rules of a redirect rule.
func (n *naive) members(
	decides *rule.Rule, rules []*rule.Rule, subject peer.Identity, q scenario.Question,
) (out []member7) {
	if decides.Action != policytable.Redirect {
		return nil
	}
	for _, r := range rules {
		if r.Tier != decides.Tier || r.Priority != decides.Priority || r.Index != decides.Index ||
			r.Action != policytable.Redirect && r.Action != policytable.Allow {
			continue
		}
		m := member7{r, n.matchesByIdentity(r, subject, q), n.matchesByAddress(r, subject, q)}
		if m.byIdentity || m.byAddress {
			m.byAddress = m.byAddress || n.everywhere(r, q)
			out = append(out, m)
		}
	}
	return out
}

// everywhere reports whether a rule matches all peers of the scope to which the query's peer belongs.
func (n *naive) everywhere(r *rule.Rule, q scenario.Question) bool {
	named := slices.ContainsFunc(r.Ports, func(p rule.Port) bool { return p.Name != "" })
	if named && q.Direction == policytable.Egress {
		return false
	}
	if r.Peers.Any {
		return true
	}
	peer, known := n.peer(q)
	kinds := []string{identity.NameWorld, identity.NameWorldIPv4, identity.NameWorldIPv6}
	switch {
	case !known || peer.Scope == identity.PeerScopeCluster:
		return false
	case peer.Scope == identity.PeerScopeNode:
		kinds = []string{identity.NameHost, identity.NameRemoteNode}
	}
	for _, kind := range kinds {
		if !slices.ContainsFunc(r.Peers.Selectors, func(s selector.Selector) bool {
			more := label.NewSet(
				label.Reserved(kind), label.Kubernetes("app", "other"), label.Reserved(identity.NameKubeAPIServer))
			positive := !slices.ContainsFunc(s.Requirements(), func(r selector.Requirement) bool {
				return r.Op == selector.NotIn || r.Op == selector.DoesNotExist
			})
			return positive && s.Matches(label.NewSet(label.Reserved(kind))) && s.Matches(more)
		}) {
			return false
		}
	}
	return true
}

// specs calls f for each spec that selects the subject.
func (n *naive) specs(subject peer.Identity, d policytable.Direction, f func(rule.Spec)) {
	for _, o := range n.state.Objects {
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

func (n *naive) rules(subject peer.Identity, d policytable.Direction) (rules []*rule.Rule) {
	n.specs(subject, d, func(spec rule.Spec) {
		for _, r := range spec.Rules {
			if r.Direction == d {
				rules = append(rules, r)
			}
		}
	})
	return rules
}

// peer returns the peer of a query. It returns false for a number that does not exist, and for the reserved number of
// pods without a known identity.
func (n *naive) peer(q scenario.Question) (peer.Identity, bool) {
	peer, ok := n.state.Identities[q.Peer]
	return peer, ok && peer.Kind != identity.KindUnknown
}

func (n *naive) matches(r *rule.Rule, subject peer.Identity, q scenario.Question) bool {
	return n.matchesByIdentity(r, subject, q) || n.matchesByAddress(r, subject, q)
}

func (n *naive) matchesByIdentity(r *rule.Rule, subject peer.Identity, q scenario.Question) bool {
	peer, known := n.peer(q)
	if !n.byIdentity(r, peer, known) {
		return false
	}
	owner := peer.Ports
	if q.Direction == policytable.Ingress {
		owner = subject.Ports
	}
	return n.covers(r, q, owner, !known && q.Direction == policytable.Egress)
}

func (n *naive) matchesByAddress(r *rule.Rule, subject peer.Identity, q scenario.Question) bool {
	peer, known := n.peer(q)
	if !n.byAddress(r, peer, known, q.Addr) {
		return false
	}
	owner := subject.Ports
	if q.Direction == policytable.Egress {
		owner = n.state.Identities[n.state.Located[q.Addr]].Ports
	}
	return n.covers(r, q, owner, false)
}

func (n *naive) covers(r *rule.Rule, q scenario.Question, owner []workload.NamedPort, pessimistic bool) bool {
	if r.AllPorts {
		return true
	}
	for _, p := range r.Ports {
		if p.Name == "" {
			if p.Range.Contains(q.Point) {
				return true
			}
			continue
		}
		if pessimistic {
			proto := port.Protocol(q.Point >> 16)
			if r.Action == policytable.Deny && q.Point>>16 < 256 && proto.HasPorts() && (p.Protocol == 0 || p.Protocol == proto) {
				return true
			}
			continue
		}
		for _, np := range owner {
			if p.Names(np.Name, port.Protocol(np.Protocol)) && port.At(port.Protocol(np.Protocol), np.Port) == q.Point {
				return true
			}
		}
	}
	return false
}

func (n *naive) byIdentity(r *rule.Rule, peer peer.Identity, known bool) bool {
	if r.Peers.Any && !(r.Peers.ExceptOwn && known && peer.Kind == identity.KindHost) {
		return true
	}
	if !known {
		return r.Action == policytable.Deny && len(r.Peers.Selectors) > 0
	}
	for _, s := range r.Peers.Selectors {
		if s.Matches(peer.Labels) {
			return true
		}
	}
	return false
}

func (n *naive) byAddress(r *rule.Rule, peer peer.Identity, known bool, a netip.Addr) bool {
	scope := identity.PeerScopeCluster
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
		for _, o := range n.state.Objects {
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
		for name, addrs := range n.state.Names {
			if reaches(p.Reach) && p.Pattern.Matches(name) && slices.Contains(addrs, a) {
				return true
			}
		}
	}
	return false
}
