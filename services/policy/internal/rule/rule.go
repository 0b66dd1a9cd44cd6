// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rule holds policy in one normal form, whatever kind it was written
// in.
//
// Every policy object becomes a list of rules. A rule belongs to one direction
// and one tier, has a place in the order, an action, peers and ports. The
// first rule in the order that matches a peer and a port decides; what the
// order means is documented at Compare. The package knows neither manifests nor
// tables.
package rule

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Reach is the set of scopes that an address peer applies to.
type Reach uint8

// The reaches. Kubernetes prefixes match whoever owns the address,
// Cilium's only peers outside the cluster.
const (
	ReachCluster Reach = 1 << iota
	ReachNode
	ReachOutside
	ReachEveryone = ReachCluster | ReachNode | ReachOutside
)

// Network is a prefix without the prefixes that are excepted.
type Network struct {
	Prefix netip.Prefix // masked
	Except []netip.Prefix
	Reach  Reach
}

// GroupPeer selects address groups by their labels: the labels of all groups
// that cover an address are taken together, and an address in no group has no
// labels (and still satisfies negative requirements).
type GroupPeer struct {
	Selector selector.Selector
	Except   []netip.Prefix
	// NodesToo extends the reach from outside to nodes, except where nothing
	// narrower than the whole address space matched.
	NodesToo bool
}

// NamePeer selects the addresses learned for DNS names.
type NamePeer struct {
	Pattern dnsname.Pattern
	Reach   Reach
}

// Peers says which other ends a rule matches: the union of its parts. All
// empty means that it matches nobody.
type Peers struct {
	Any       bool // everybody, known or not
	ExceptOwn bool // with Any: all peers except the subject's local node
	Selectors []selector.Selector
	Networks  []Network
	Groups    []GroupPeer
	Names     []NamePeer
}

// Nobody reports whether the peers match nothing.
func (p Peers) Nobody() bool {
	return !p.Any && len(p.Selectors) == 0 && len(p.Networks) == 0 && len(p.Groups) == 0 && len(p.Names) == 0
}

// Port is one interval on the protocol and port line, or a named port that is
// resolved with the ports of the pod that receives the connection.
type Port struct {
	Range port.Range // when Name is empty

	Name     string
	Protocol port.Protocol // of a named port; 0 means TCP, UDP and SCTP
	FoldCase bool          // names are compared without case
}

// Names reports whether the named port covers a container port of that name
// and protocol.
func (p Port) Names(name string, proto port.Protocol) bool {
	if p.Protocol != 0 && p.Protocol != proto {
		return false
	}
	if p.FoldCase {
		return strings.EqualFold(p.Name, name)
	}
	return p.Name == name
}

// Rule is one line of policy. It is immutable once built.
type Rule struct {
	Source    policytable.Source
	Direction policytable.Direction
	Tier      policytable.Tier
	Priority  int32 // lower is asked first, within the tier
	Index     int32 // place in its policy where that matters, else 0
	Action    policytable.Action
	Proxy     policytable.Proxy // for Redirect
	Peers     Peers
	// Ports the rule covers. AllPorts means every protocol; without it an
	// empty list covers nothing.
	AllPorts bool
	Ports    []Port

	digest Digest
}

// Digest stands for the content of something: equal digests, equal content.
type Digest [sha256.Size]byte

// Seal computes the digest of the rule.
func (r *Rule) Seal() *Rule { return r.SealWith(r.Peers.Digest()) }

// SealWith is Seal for a rule whose peers have this digest. Rules that share a
// long list of peers then do not read it once each.
func (r *Rule) SealWith(peers Digest) *Rule {
	r.digest = sha256.Sum256([]byte(r.head() + string(peers[:]) + r.ports()))
	return r
}

// Digest is what Seal computed.
func (r *Rule) Digest() Digest { return r.digest }

// Content is the canonical text of the rule: everything that decides packets,
// nothing that says where it came from.
func (r *Rule) Content() string { return r.head() + r.Peers.Content() + ";" + r.ports() }

func (r *Rule) head() string { return fmt.Sprintf("%s %s %s;", r.Direction, r.Action, r.Proxy) }

// Digest stands for Content.
func (p Peers) Digest() Digest { return sha256.Sum256([]byte(p.Content())) }

// Content is the canonical text of the peers.
func (p Peers) Content() string {
	var parts []string
	if p.Any {
		parts = append(parts, fmt.Sprintf("any %t", p.ExceptOwn))
	}
	for _, s := range p.Selectors {
		parts = append(parts, "sel "+s.String())
	}
	for _, n := range p.Networks {
		parts = append(parts, fmt.Sprintf("net %s %v %d", n.Prefix, n.Except, n.Reach))
	}
	for _, g := range p.Groups {
		parts = append(parts, fmt.Sprintf("group %s %v %t", g.Selector, g.Except, g.NodesToo))
	}
	for _, n := range p.Names {
		parts = append(parts, fmt.Sprintf("name %s %d", n.Pattern, n.Reach))
	}
	slices.Sort(parts)
	return strings.Join(slices.Compact(parts), "|")
}

func (r *Rule) ports() string {
	if r.AllPorts {
		return "all"
	}
	var parts []string
	for _, p := range r.Ports {
		if p.Name != "" {
			parts = append(parts, fmt.Sprintf("%q/%d/%t", p.Name, p.Protocol, p.FoldCase))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", p.Range.Lo, p.Range.Hi))
		}
	}
	slices.Sort(parts)
	return strings.Join(slices.Compact(parts), ",")
}

// Weight is how many peers and ports the rule lists.
func (r *Rule) Weight() int {
	n := 1 + len(r.Ports) + len(r.Peers.Selectors) + len(r.Peers.Names)
	for _, x := range r.Peers.Networks {
		n += 1 + len(x.Except)
	}
	for _, x := range r.Peers.Groups {
		n += 1 + len(x.Except)
	}
	return n
}

// Compare is the order in which rules are asked: tier, priority, place in the
// policy, deny before redirect before allow before pass, the preferred proxy,
// then the content, so that the order does not depend on names, and at last
// the source, which decides nothing.
func Compare(a, b *Rule) int {
	return cmp.Or(
		cmp.Compare(a.Tier, b.Tier),
		cmp.Compare(a.Priority, b.Priority),
		cmp.Compare(a.Index, b.Index),
		cmp.Compare(a.Action, b.Action),
		cmp.Compare(a.Proxy, b.Proxy),
		bytes.Compare(a.digest[:], b.digest[:]),
		cmp.Compare(a.Source.Kind, b.Source.Kind),
		cmp.Compare(a.Source.Namespace, b.Source.Namespace),
		cmp.Compare(a.Source.Name, b.Source.Name),
		cmp.Compare(a.Source.Path, b.Source.Path),
	)
}

// Isolate is the rule that denies all peers but, for what they send, the subject's
// local node.
func Isolate(source policytable.Source, d policytable.Direction, tier policytable.Tier, priority int32) *Rule {
	source.Path = "isolation"
	r := &Rule{
		Source: source, Direction: d, Tier: tier, Priority: priority, Action: policytable.Deny,
		Peers: Peers{Any: true, ExceptOwn: d == policytable.Ingress}, AllPorts: true,
	}
	return r.Seal()
}

// Options are the properties of the cluster that decide what a manifest means.
type Options struct {
	// Cluster is this cluster's name.
	Cluster string
	// LocalClusterOnly limits peers that name no cluster to this one.
	LocalClusterOnly bool
	// CIDRSelectsNodes extends Cilium's address rules to nodes.
	CIDRSelectsNodes bool
	// NodeLabels says that identities of nodes carry the labels of the nodes.
	NodeLabels bool
	// HostRules says that rules for nodes are enforced. Without it they are
	// refused: a policy that is accepted and does nothing would mislead.
	HostRules bool
	// WithoutDNSProxy says that nothing looks at DNS questions: a list of DNS rules
	// that allows every name is a plain allow of its ports, and others are closed.
	WithoutDNSProxy bool
}

// Spec is one subject with the rules that apply to it: what a policy object
// consists of.
type Spec struct {
	// Subject selects the endpoints by their labels.
	Subject selector.Selector
	// Namespace that the subject is tied to; empty when it is not tied to one.
	// It repeats what Subject requires, for indexing.
	Namespace string
	// Host says that the subject is the node itself and not a pod.
	Host bool
	// Selects says that the policy applies to the direction, with or without
	// rules in it.
	Selects [2]bool
	// DefaultDeny says that what no rule decides is denied in the direction.
	DefaultDeny [2]bool
	Rules       []*Rule
}
