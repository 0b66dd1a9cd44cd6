// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rule defines the common form to which policies of all kinds are converted.
//
// Every policy object becomes a list of rules. A rule belongs to one direction and one tier, and has a position in
// the order, an action, peers and ports. The first rule that matches a peer and a port decides; Compare documents the
// order of rules. The package does not depend on manifests or tables.
package rule

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Reach is the set of scopes to which an address peer applies.
type Reach uint8

// The reaches. A prefix in a Kubernetes policy matches an address of any peer. A prefix in a Cilium policy
// matches only addresses outside of the cluster.
const (
	ReachCluster Reach = 1 << iota
	ReachNode
	ReachOutside
	ReachEveryone = ReachCluster | ReachNode | ReachOutside
)

// Network is a prefix without its exceptions.
type Network struct {
	Prefix netip.Prefix // masked
	Except []netip.Prefix
	Reach  Reach
}

// GroupPeer selects address groups by label. An address has the labels of all groups that contain it. An address in no
// group has no labels, so it can satisfy only negative requirements.
type GroupPeer struct {
	Selector selector.Selector
	Except   []netip.Prefix
	// NodesToo extends the reach from addresses outside of the cluster to nodes. It does not apply to an address that
	// only the prefixes 0.0.0.0/0 or ::/0 match.
	NodesToo bool
}

// NamePeer selects the learned addresses of DNS names.
type NamePeer struct {
	Pattern dnsname.Pattern
	Reach   Reach
}

// Peers is the union of the peers that a rule matches. If all fields are empty, it matches no peer.
type Peers struct {
	Any       bool // all peers, including peers with an unknown identity
	ExceptOwn bool // with Any: all peers except the subject's local node
	Selectors []selector.Selector
	Networks  []Network
	Groups    []GroupPeer
	Names     []NamePeer
}

// Nobody reports whether the peers are empty, so that the rule matches no peer.
func (p Peers) Nobody() bool {
	return !p.Any && len(p.Selectors) == 0 && len(p.Networks) == 0 && len(p.Groups) == 0 && len(p.Names) == 0
}

// Port is a range of points, or a named port that is resolved with the ports of the pod that receives the connection.
type Port struct {
	Range port.Range // if Name is empty

	Name     string
	Protocol port.Protocol // protocol of a named port; 0 means TCP, UDP and SCTP
	FoldCase bool          // ignore the case of names
}

// Names reports whether the named port includes a container port with a name and protocol.
func (p Port) Names(name string, proto port.Protocol) bool {
	if p.Protocol != 0 && p.Protocol != proto {
		return false
	}
	if p.FoldCase {
		return strings.EqualFold(p.Name, name)
	}
	return p.Name == name
}

// Rule is a single rule. It is immutable once built.
type Rule struct {
	Source    policytable.Source
	Direction policytable.Direction
	Tier      policytable.Tier
	Priority  int32 // within the tier; lower is evaluated first
	Index     int32 // position in its policy if the order matters, otherwise 0
	Action    policytable.Action
	Proxy     policytable.Proxy // for Redirect
	// Layer7 lists what a Redirect rule allows within a connection; nil: it allows nothing.
	Layer7 *layer7.Rules
	Peers  Peers
	// Ports are the ports of the rule. AllPorts means every protocol and port. An empty list without AllPorts means
	// that the rule matches no port.
	AllPorts bool
	Ports    []Port
	// Queries is a rule that redirects the DNS queries which an Allow rule allows at port 53 to the DNS proxy, with
	// every name allowed. It is nil if the Allow rule allows no queries, or if dns.implicit is off. Only tables of
	// subjects that have DNS names and no DNS rule contain it.
	Queries *Rule

	digest Digest
	set    *layer7.Set // for Redirect
}

// Digest is a hash of content: equal digests mean equal content.
type Digest [sha256.Size]byte

// Seal computes the digest of the rule.
func (r *Rule) Seal() *Rule { return r.SealWith(r.Peers.Digest()) }

// SealWith is like Seal, with a digest of the peers that the caller has computed, so that a long list which several
// rules share is hashed only once.
func (r *Rule) SealWith(peers Digest) *Rule {
	r.digest = sha256.Sum256([]byte(r.head() + string(peers[:]) + r.ports()))
	if r.Action == policytable.Redirect {
		r.set = layer7.Union(r.Proxy, false, r.Layer7)
	}
	return r
}

// Set returns what a redirect rule allows within a connection; nil for other rules. Seal computes the set once, and
// all programs with the rule share it.
func (r *Rule) Set() *layer7.Set { return r.set }

// Digest returns the digest that Seal computed.
func (r *Rule) Digest() Digest { return r.digest }

// Content returns the canonical text of the rule: everything that affects verdicts, without the source location.
func (r *Rule) Content() string { return r.head() + r.Peers.Content() + ";" + r.ports() }

func (r *Rule) head() string {
	head := fmt.Sprintf("%s %s %s;", r.Direction, r.Action, r.Proxy)
	if r.Layer7 != nil {
		head += fmt.Sprintf("%q;", r.Layer7.Content())
	}
	return head
}

// Digest returns the digest of Content.
func (p Peers) Digest() Digest { return sha256.Sum256([]byte(p.Content())) }

// Content returns the canonical text of the peers.
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

// Weight returns the number of peers and ports that the rule lists.
func (r *Rule) Weight() int {
	n := 1 + len(r.Ports) + len(r.Peers.Selectors) + len(r.Peers.Names)
	if r.Layer7 != nil {
		n += len(r.Layer7.DNS) + len(r.Layer7.HTTP) + len(r.Layer7.ServerNames)
	}
	for _, x := range r.Peers.Networks {
		n += 1 + len(x.Except)
	}
	for _, x := range r.Peers.Groups {
		n += 1 + len(x.Except)
	}
	return n
}

// Compare is the order of evaluation: tier, priority, position in the policy, action (deny, redirect, allow, pass),
// preferred proxy, content, and source. The content precedes the source, so that the names of policies do not affect
// the order. The source affects no verdict.
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

// Isolate returns a rule that denies all peers; on ingress it exempts the subject's local node.
func Isolate(source policytable.Source, d policytable.Direction, tier policytable.Tier, priority int32) *Rule {
	source.Path = "isolation"
	r := &Rule{
		Source: source, Direction: d, Tier: tier, Priority: priority, Action: policytable.Deny,
		Peers: Peers{Any: true, ExceptOwn: d == policytable.Ingress}, AllPorts: true,
	}
	return r.Seal()
}

// Options are the properties of the cluster that determine the meaning of a manifest.
type Options struct {
	// Cluster is the name of this cluster.
	Cluster string
	// LocalClusterOnly means that peers for which the manifest names no cluster must be in this cluster.
	LocalClusterOnly bool
	// CIDRSelectsNodes extends Cilium's address rules to nodes.
	CIDRSelectsNodes bool
	// NodeLabels is set if the identities of nodes include the labels of the nodes.
	NodeLabels bool
	// HostRules is set if rules for nodes are enforced. Otherwise rules for nodes are rejected: an accepted policy
	// without effect would mislead its author.
	HostRules bool
	// WithoutDNSProxy is set if no proxy inspects DNS queries. A list of DNS rules that allows every name then
	// simply allows its ports, and other lists allow nothing.
	WithoutDNSProxy bool
	// HTTPProxy is set if a proxy evaluates the HTTP requests and TLS server names of pods.
	HTTPProxy bool
	// ImplicitDNS makes the DNS proxy learn addresses from the queries that plain rules allow at port 53. It applies
	// to subjects with DNS names and without a DNS rule.
	ImplicitDNS bool
}

// Spec is a subject and the rules that apply to it. A policy object consists of specs.
type Spec struct {
	// Subject selects the endpoints by label.
	Subject selector.Selector
	// Namespace is the only namespace that the subject can select; empty if there is no such limit. It repeats a
	// requirement of Subject, for indexing.
	Namespace string
	// Host is set if the subject is the node itself, and not a pod.
	Host bool
	// Selects is set if the policy applies to the direction, with or without rules.
	Selects [2]bool
	// DefaultDeny is set if the direction denies connections that no rule matches.
	DefaultDeny [2]bool
	Rules       []*Rule
	// Names is the path of the first toFQDNs of an egress rule; empty without one.
	Names string
	// HasDNSRule is set if a rule redirects DNS queries to the DNS proxy, which learns addresses from the answers.
	// With ImplicitDNS, a rule with Queries counts, too.
	HasDNSRule bool
}
