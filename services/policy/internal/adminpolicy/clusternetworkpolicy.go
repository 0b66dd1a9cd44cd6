// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package adminpolicy defines the cluster-wide policies of policy.networking.k8s.io: ClusterNetworkPolicy (v1beta1,
// v1alpha2) and its two predecessors, AdminNetworkPolicy and BaselineAdminNetworkPolicy (v1alpha1).
//
// Their rules are evaluated in the order in which they are written. The first matching rule accepts, denies, or
// passes the decision to the next tier.
package adminpolicy

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"

	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Policy is a ClusterNetworkPolicy.
type Policy struct {
	networkpolicy.Meta
	Spec Spec `json:"spec"`
}

// Spec is the spec of a ClusterNetworkPolicy.
type Spec struct {
	Tier     string        `json:"tier"`
	Priority *int64        `json:"priority"`
	Subject  Subject       `json:"subject"`
	Ingress  []IngressRule `json:"ingress"`
	Egress   []EgressRule  `json:"egress"`
}

// Subject selects pods.
type Subject struct {
	Namespaces *networkpolicy.LabelSelector `json:"namespaces"`
	Pods       *NamespacedPod               `json:"pods"`
}

// NamespacedPod selects pods in selected namespaces.
type NamespacedPod struct {
	NamespaceSelector *networkpolicy.LabelSelector `json:"namespaceSelector"`
	PodSelector       *networkpolicy.LabelSelector `json:"podSelector"`
}

// IngressRule is a rule for incoming connections.
type IngressRule struct {
	Name      string        `json:"name"`
	Action    string        `json:"action"`
	From      []IngressPeer `json:"from"`
	Protocols []Protocol    `json:"protocols"`
}

// EgressRule is a rule for outgoing connections.
type EgressRule struct {
	Name      string       `json:"name"`
	Action    string       `json:"action"`
	To        []EgressPeer `json:"to"`
	Protocols []Protocol   `json:"protocols"`
}

// IngressPeer is a peer; either namespaces or pods is set.
type IngressPeer struct {
	Namespaces *networkpolicy.LabelSelector `json:"namespaces"`
	Pods       *NamespacedPod               `json:"pods"`
}

// EgressPeer is a peer; exactly one field is set.
type EgressPeer struct {
	Namespaces  *networkpolicy.LabelSelector `json:"namespaces"`
	Pods        *NamespacedPod               `json:"pods"`
	Nodes       *networkpolicy.LabelSelector `json:"nodes"`
	Networks    []string                     `json:"networks"`
	DomainNames []string                     `json:"domainNames"`
}

// Protocol is a protocol with optional ports; exactly one field is set.
type Protocol struct {
	TCP                  *Transport `json:"tcp"`
	UDP                  *Transport `json:"udp"`
	SCTP                 *Transport `json:"sctp"`
	DestinationNamedPort string     `json:"destinationNamedPort"`
}

// Transport limits a rule for a protocol to ports.
type Transport struct {
	DestinationPort *Port `json:"destinationPort"`
}

// Port is a port or a range.
type Port struct {
	Number *int64 `json:"number"`
	Range  *Range `json:"range"`
}

// Range is a range of ports.
type Range struct {
	Start int64 `json:"start"`
	End   int64 `json:"end"`
}

const (
	maxRules    = 25
	maxPeers    = 25
	maxPriority = 1000
	maxName     = 100
)

// Validate checks the policy against the rules of the published schema.
func (p *Policy) Validate(o rule.Options) manifest.Problems {
	v := validator{options: o}
	p.Metadata.Validate(false, &v.Problems)
	if p.Spec.Tier != "Admin" && p.Spec.Tier != "Baseline" {
		v.Add("spec.tier", "%q is neither Admin nor Baseline", p.Spec.Tier)
	}
	v.priority(p.Spec.Priority)
	v.subject(p.Spec.Subject)
	v.count("spec.ingress", len(p.Spec.Ingress), maxRules)
	v.count("spec.egress", len(p.Spec.Egress), maxRules)
	for i, r := range p.Spec.Ingress {
		path := "spec.ingress[" + strconv.Itoa(i) + "]"
		v.head(path, r.Name, r.Action, "Accept", "Deny", "Pass")
		v.some(path+".from", len(r.From), maxPeers)
		for j, peer := range r.From {
			v.peer(path+".from["+strconv.Itoa(j)+"]", EgressPeer{Namespaces: peer.Namespaces, Pods: peer.Pods}, r.Action)
		}
		v.protocols(path+".protocols", r.Protocols)
	}
	for i, r := range p.Spec.Egress {
		path := "spec.egress[" + strconv.Itoa(i) + "]"
		v.head(path, r.Name, r.Action, "Accept", "Deny", "Pass")
		v.some(path+".to", len(r.To), maxPeers)
		for j, peer := range r.To {
			v.peer(path+".to["+strconv.Itoa(j)+"]", peer, r.Action)
		}
		v.protocols(path+".protocols", r.Protocols)
		v.namedPorts(path, r.To, slices.ContainsFunc(r.Protocols, func(p Protocol) bool { return p.DestinationNamedPort != "" }))
	}
	return v.Problems
}

// namedPorts reports named ports as a problem in a rule whose peers are not pods.
func (v *validator) namedPorts(path string, peers []EgressPeer, named bool) {
	if named && slices.ContainsFunc(peers, func(p EgressPeer) bool { return p.Networks != nil || p.Nodes != nil || p.DomainNames != nil }) {
		v.Add(path, "combines a named port with networks, nodes or domainNames, which have no named ports")
	}
}

type validator struct {
	manifest.Problems
	options rule.Options
}

func (v *validator) count(path string, n, limit int) {
	if n > limit {
		v.Add(path, "has %d entries, more than %d", n, limit)
	}
}

// some reports a list that is empty or too long as a problem. An empty list of peers would otherwise match all peers.
func (v *validator) some(path string, n, limit int) {
	if n == 0 {
		v.Add(path, "needs at least one peer")
	}
	v.count(path, n, limit)
}

func (v *validator) priority(p *int64) {
	switch {
	case p == nil:
		v.Add("spec.priority", "is required")
	case *p < 0 || *p > maxPriority:
		v.Add("spec.priority", "%d is not from 0 to %d", *p, maxPriority)
	}
}

// one reports a problem unless exactly one of the fields is set.
func (v *validator) one(path string, fields ...bool) {
	n := 0
	for _, f := range fields {
		if f {
			n++
		}
	}
	if n != 1 {
		v.Add(path, "needs exactly one of its fields, has %d", n)
	}
}

func (v *validator) subject(s Subject) {
	v.one("spec.subject", s.Namespaces != nil, s.Pods != nil)
	s.Namespaces.Validate("spec.subject.namespaces", false, &v.Problems)
	v.pods("spec.subject.pods", s.Pods)
}

func (v *validator) pods(path string, p *NamespacedPod) {
	if p == nil {
		return
	}
	if p.PodSelector == nil {
		v.Add(path+".podSelector", "is required; {} selects all pods")
	}
	p.NamespaceSelector.Validate(path+".namespaceSelector", false, &v.Problems)
	p.PodSelector.Validate(path+".podSelector", false, &v.Problems)
}

func (v *validator) head(path, name, action string, actions ...string) {
	if len(name) > maxName {
		v.Add(path+".name", "is longer than %d characters", maxName)
	}
	if !slices.Contains(actions, action) {
		v.Add(path+".action", "%q is not one of %s", action, strings.Join(actions, ", "))
	}
}

func (v *validator) peer(path string, p EgressPeer, action string) {
	v.one(path, p.Namespaces != nil, p.Pods != nil, p.Nodes != nil, p.Networks != nil, p.DomainNames != nil)
	p.Namespaces.Validate(path+".namespaces", false, &v.Problems)
	v.pods(path+".pods", p.Pods)
	p.Nodes.Validate(path+".nodes", false, &v.Problems)
	if p.Nodes != nil && !v.options.NodeLabels {
		v.Add(path+".nodes", "needs the setting cluster.nodeLabels")
	}
	if p.Networks != nil {
		if len(p.Networks) == 0 {
			v.Add(path+".networks", "is empty")
		}
		v.count(path+".networks", len(p.Networks), maxPeers)
		for i, s := range p.Networks {
			path := path + ".networks[" + strconv.Itoa(i) + "]"
			block, err := netip.ParsePrefix(s)
			switch {
			case err != nil:
				v.Add(path, "%q is not a prefix such as 10.9.8.0/24 or 2001:db8::/64", s)
			case block.Addr().Is4In6():
				v.Add(path, "%q is an IPv4-mapped IPv6 prefix", s)
			}
		}
	}
	if p.DomainNames != nil {
		if len(p.DomainNames) == 0 {
			v.Add(path+".domainNames", "is empty")
		}
		v.count(path+".domainNames", len(p.DomainNames), maxPeers)
		if action != "Accept" && action != "Allow" {
			v.Add(path+".domainNames", "is only supported with action Accept")
		}
		for i, s := range p.DomainNames {
			if !domainName(s) {
				v.Add(path+".domainNames["+strconv.Itoa(i)+"]", "%q is not a DNS name, nor \"*.\" and a DNS name", s)
			}
		}
	}
}

// domainName reports whether s is two or more labels of letters, digits, '-' and '_', with an optional "*." prefix.
func domainName(s string) bool {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "*."), ".")
	alnum := func(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' }
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || part[0] == '-' || !alnum(part[len(part)-1]) && len(part) > 1 {
			return false
		}
		for i := range len(part) {
			if c := part[i]; !alnum(c) && c != '-' && c != '_' {
				return false
			}
		}
	}
	return strings.Contains(s, ".") && len(s) <= 253
}

func (v *validator) protocols(path string, list []Protocol) {
	if list != nil && len(list) == 0 {
		v.Add(path, "is empty; leave it out for all protocols")
	}
	v.count(path, len(list), maxPeers)
	for i, p := range list {
		path := path + "[" + strconv.Itoa(i) + "]"
		v.one(path, p.TCP != nil, p.UDP != nil, p.SCTP != nil, p.DestinationNamedPort != "")
		for _, t := range []struct {
			name string
			t    *Transport
		}{{"tcp", p.TCP}, {"udp", p.UDP}, {"sctp", p.SCTP}} {
			if t.t == nil {
				continue
			}
			path := path + "." + t.name
			if t.t.DestinationPort == nil {
				v.AddSchema(path, "needs a destinationPort")
				continue
			}
			v.port(path+".destinationPort", *t.t.DestinationPort)
		}
	}
}

func (v *validator) port(path string, p Port) {
	v.one(path, p.Number != nil, p.Range != nil)
	if p.Number != nil {
		v.number(path+".number", *p.Number)
	}
	if p.Range != nil {
		v.number(path+".range.start", p.Range.Start)
		v.number(path+".range.end", p.Range.End)
		if p.Range.Start >= p.Range.End {
			v.Add(path+".range", "start %d is not below end %d", p.Range.Start, p.Range.End)
		}
	}
}

func (v *validator) number(path string, n int64) {
	if n < 1 || n > 65535 {
		v.Add(path, "%d is not from 1 to 65535", n)
	}
}

// Rules converts a valid policy.
func (p *Policy) Rules(o rule.Options) rule.Spec {
	c := converter{
		options: o, tier: policytable.Admin,
		source: policytable.Source{Kind: "ClusterNetworkPolicy", Name: p.Metadata.Name},
		spec:   rule.Spec{Subject: p.Spec.Subject.selector()},
	}
	if p.Spec.Tier == "Baseline" {
		c.tier = policytable.Baseline
	}
	if p.Spec.Priority != nil {
		c.priority = int32(*p.Spec.Priority)
	}
	for i, r := range p.Spec.Ingress {
		var peers []EgressPeer
		for _, f := range r.From {
			peers = append(peers, EgressPeer{Namespaces: f.Namespaces, Pods: f.Pods})
		}
		c.add(policytable.Ingress, i, r.Action, peers, ports(r.Protocols))
	}
	for i, r := range p.Spec.Egress {
		c.add(policytable.Egress, i, r.Action, r.To, ports(r.Protocols))
	}
	return c.spec
}

// Isolate returns the rules for a policy that cannot be converted. In the policy's tier, they deny all traffic of the
// selected pods in the directions that have rules. bad reports whether a path has a problem. If the subject has one,
// every pod is selected.
func (p *Policy) Isolate(bad func(path string) bool) []rule.Spec {
	tier := policytable.Admin
	if p.Spec.Tier == "Baseline" && !bad("spec.tier") {
		tier = policytable.Baseline
	}
	source := policytable.Source{Kind: "ClusterNetworkPolicy", Name: p.Metadata.Name}
	return isolate(source, tier, p.Spec.Priority, p.Spec.Subject, len(p.Spec.Ingress), len(p.Spec.Egress), bad)
}

// Isolate is Policy.Isolate for the older kinds.
func (p *OldPolicy) Isolate(baseline bool, bad func(path string) bool) []rule.Spec {
	tier, source := policytable.Admin, policytable.Source{Kind: "AdminNetworkPolicy", Name: p.Metadata.Name}
	if baseline {
		tier, source.Kind = policytable.Baseline, "BaselineAdminNetworkPolicy"
	}
	return isolate(source, tier, p.Spec.Priority, p.Spec.Subject, len(p.Spec.Ingress), len(p.Spec.Egress), bad)
}

func isolate(source policytable.Source, tier policytable.Tier, priority *int64, subject Subject, ingress, egress int, bad func(path string) bool) []rule.Spec {
	var v validator
	v.subject(subject)
	spec := rule.Spec{Subject: selector.New()}
	if v.Meaningful() && !bad("spec.subject") {
		spec.Subject = subject.selector()
	}
	at := int32(0)
	if priority != nil && *priority >= 0 && *priority <= maxPriority {
		at = int32(*priority)
	}
	in, out := ingress > 0 || bad("spec.ingress"), egress > 0 || bad("spec.egress")
	for i, has := range [2]bool{policytable.Ingress: in, policytable.Egress: out} {
		d := policytable.Direction(i)
		if has || !in && !out {
			spec.Selects[d] = true
			spec.Rules = append(spec.Rules, rule.Isolate(source, d, tier, at))
		}
	}
	return []rule.Spec{spec}
}

func (s Subject) selector() selector.Selector {
	if s.Namespaces != nil {
		return selector.New(s.Namespaces.Namespaces()...)
	}
	return selector.New(s.Pods.requirements()...)
}

func (p *NamespacedPod) requirements() []selector.Requirement {
	if p == nil {
		return nil
	}
	return append(p.NamespaceSelector.Namespaces(), p.PodSelector.Pods()...)
}

// ports converts a list of protocols; nil means all protocols.
func ports(list []Protocol) []rule.Port {
	var out []rule.Port
	for _, p := range list {
		switch {
		case p.TCP != nil:
			out = append(out, transport(port.TCP, p.TCP))
		case p.UDP != nil:
			out = append(out, transport(port.UDP, p.UDP))
		case p.SCTP != nil:
			out = append(out, transport(port.SCTP, p.SCTP))
		default:
			out = append(out, rule.Port{Name: p.DestinationNamedPort})
		}
	}
	return out
}

func transport(proto port.Protocol, t *Transport) rule.Port {
	switch {
	case t.DestinationPort == nil:
		return rule.Port{Range: port.Whole(proto)}
	case t.DestinationPort.Range != nil:
		r := t.DestinationPort.Range
		return rule.Port{Range: port.Ports(proto, uint16(r.Start), uint16(r.End))}
	}
	n := uint16(*t.DestinationPort.Number)
	return rule.Port{Range: port.Ports(proto, n, n)}
}

type converter struct {
	options  rule.Options
	tier     policytable.Tier
	priority int32
	source   policytable.Source
	spec     rule.Spec
	unknown  []selector.Selector // of the current rule: nodes whose labels are unknown
}

func (c *converter) add(d policytable.Direction, index int, action string, peers []EgressPeer, list []rule.Port) {
	c.spec.Selects[d] = true
	r := &rule.Rule{
		Source: c.source, Direction: d, Tier: c.tier, Priority: c.priority, Index: int32(index),
		Ports: list, AllPorts: list == nil,
	}
	r.Source.Path = "spec." + d.String() + "[" + strconv.Itoa(index) + "]"
	switch action {
	case "Deny":
		r.Action = policytable.Deny
	case "Pass":
		r.Action = policytable.Pass
	default:
		r.Action = policytable.Allow
	}
	r.Peers.Any = len(peers) == 0
	for _, p := range peers {
		c.peer(r, p)
	}
	for i, p := range peers {
		if p.DomainNames != nil {
			c.resolver(r, i)
		}
	}
	c.spec.Rules = append(c.spec.Rules, r.Seal())
	if len(c.unknown) == 0 {
		return
	}
	// The rule may or may not apply to a node whose labels are unknown. Neither passing to the next tier nor
	// continuing with the next rule is safe for such a node, so deny its packets.
	deny := &rule.Rule{
		Source: r.Source, Direction: d, Tier: c.tier, Priority: c.priority, Index: int32(index), Action: policytable.Deny,
		Peers: rule.Peers{Selectors: c.unknown}, Ports: list, AllPorts: list == nil,
	}
	c.spec.Rules = append(c.spec.Rules, deny.Seal())
	c.unknown = nil
}

func (c *converter) peer(r *rule.Rule, p EgressPeer) {
	switch {
	case p.Namespaces != nil: // this is true in every cluster
		r.Peers.Selectors = append(r.Peers.Selectors, selector.New(p.Namespaces.Namespaces()...))
	case p.Pods != nil:
		reqs := p.Pods.requirements()
		if c.options.LocalClusterOnly && !p.Pods.PodSelector.Names(label.KeyCluster) {
			reqs = append(reqs, networkpolicy.InCluster(c.options.Cluster))
		}
		r.Peers.Selectors = append(r.Peers.Selectors, selector.New(reqs...))
	case p.Nodes != nil:
		for _, name := range []string{identity.NameHost, identity.NameRemoteNode} {
			reqs := p.Nodes.Requirements(label.SourceNode, "")
			r.Peers.Selectors = append(r.Peers.Selectors, rule.Nodes(name, reqs, r.Action)...)
			if r.Action == policytable.Pass && len(reqs) > 0 {
				c.unknown = append(c.unknown, rule.UnknownNodes(name))
			}
		}
	case p.Networks != nil:
		for _, s := range p.Networks {
			r.Peers.Networks = append(r.Peers.Networks, rule.Network{Prefix: netip.MustParsePrefix(s).Masked(), Reach: rule.ReachEveryone})
		}
	case p.DomainNames != nil:
		for _, s := range p.DomainNames {
			pattern, _ := dnsname.Name(s)
			if strings.HasPrefix(s, "*") { // any depth, unlike Cilium's "*"
				pattern, _ = dnsname.Parse("*" + s)
			}
			r.Peers.Names = append(r.Peers.Names, rule.NamePeer{Pattern: pattern, Reach: rule.ReachOutside})
		}
	}
}

// resolverNamespace is the namespace of the cluster's DNS resolver.
const resolverNamespace = "kube-system"

// resolver allows the subject all queries to the cluster's DNS resolver, through the DNS proxy if there is one.
// Without these queries, the proxy could not learn the addresses of domainNames. domainNames must not restrict
// queries (NPEP-133).
func (c *converter) resolver(r *rule.Rule, i int) {
	// Require the namespace: otherwise every pod with the resolver's label could answer queries, and the proxy would
	// learn addresses from its answers.
	pods := []selector.Requirement{
		networkpolicy.InNamespace(resolverNamespace),
		{Source: label.SourceKubernetes, Key: "k8s-app", Op: selector.In, Values: []string{"kube-dns"}},
	}
	if c.options.LocalClusterOnly {
		pods = append(pods, networkpolicy.InCluster(c.options.Cluster))
	}
	queries := func() *rule.Rule {
		dns := &rule.Rule{
			Source: r.Source, Direction: r.Direction, Tier: r.Tier, Priority: r.Priority, Index: r.Index,
			Action: policytable.Allow, Peers: rule.Peers{Selectors: []selector.Selector{selector.New(pods...)}},
		}
		dns.Source.Path += ".to[" + strconv.Itoa(i) + "].domainNames"
		dns.Ports = []rule.Port{{Name: "dns"}, {Name: "dns-tcp"}}
		return dns
	}
	if c.options.WithoutDNSProxy {
		c.spec.Rules = append(c.spec.Rules, queries().Seal())
		return
	}
	every, _ := dnsname.Parse("*")
	dns := queries()
	dns.Action, dns.Proxy = policytable.Redirect, policytable.ProxyDNS
	dns.Layer7 = &layer7.Rules{DNS: []dnsname.Pattern{every}}
	c.spec.Rules = append(c.spec.Rules, dns.Seal())
}
