// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package networkpolicy

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// NetworkPolicy is a networking.k8s.io/v1 NetworkPolicy.
type NetworkPolicy struct {
	Meta
	Spec NetworkPolicySpec `json:"spec"`
}

// NetworkPolicySpec is the spec of a NetworkPolicy.
type NetworkPolicySpec struct {
	PodSelector *LabelSelector       `json:"podSelector"`
	PolicyTypes []string             `json:"policyTypes"`
	Ingress     []NetworkIngressRule `json:"ingress"`
	Egress      []NetworkEgressRule  `json:"egress"`
}

// NetworkIngressRule allows traffic from peers.
type NetworkIngressRule struct {
	From  []NetworkPeer `json:"from"`
	Ports []NetworkPort `json:"ports"`
}

// NetworkEgressRule allows traffic to peers.
type NetworkEgressRule struct {
	To    []NetworkPeer `json:"to"`
	Ports []NetworkPort `json:"ports"`
}

// NetworkPeer selects pods, or a prefix.
type NetworkPeer struct {
	PodSelector       *LabelSelector `json:"podSelector"`
	NamespaceSelector *LabelSelector `json:"namespaceSelector"`
	IPBlock           *IPBlock       `json:"ipBlock"`
}

// IPBlock is a prefix with exceptions.
type IPBlock struct {
	CIDR   string   `json:"cidr"`
	Except []string `json:"except"`
}

// NetworkPort is a port, a range, or all ports of a protocol.
type NetworkPort struct {
	Protocol *string          `json:"protocol"`
	Port     *manifest.Number `json:"port"`
	EndPort  *int64           `json:"endPort"`
}

// Validate performs the checks of an API server.
func (p *NetworkPolicy) Validate() manifest.Problems {
	var ps manifest.Problems
	p.Metadata.Validate(true, &ps)
	p.Spec.PodSelector.Validate("spec.podSelector", false, &ps)
	if len(p.Spec.PolicyTypes) > 2 {
		ps.Add("spec.policyTypes", "has more than two entries")
	}
	for i, t := range p.Spec.PolicyTypes {
		if t != "Ingress" && t != "Egress" {
			ps.Add("spec.policyTypes["+strconv.Itoa(i)+"]", "%q is neither Ingress nor Egress", t)
		}
	}
	for i := range p.Spec.Ingress {
		path := "spec.ingress[" + strconv.Itoa(i) + "]"
		validatePeers(path+".from", p.Spec.Ingress[i].From, &ps)
		validatePorts(path+".ports", p.Spec.Ingress[i].Ports, &ps)
	}
	for i := range p.Spec.Egress {
		path := "spec.egress[" + strconv.Itoa(i) + "]"
		validatePeers(path+".to", p.Spec.Egress[i].To, &ps)
		validatePorts(path+".ports", p.Spec.Egress[i].Ports, &ps)
	}
	return ps
}

func validatePeers(path string, peers []NetworkPeer, ps *manifest.Problems) {
	for i, peer := range peers {
		path := path + "[" + strconv.Itoa(i) + "]"
		switch {
		case peer.IPBlock == nil && peer.PodSelector == nil && peer.NamespaceSelector == nil:
			ps.Add(path, "names no peer")
		case peer.IPBlock != nil && (peer.PodSelector != nil || peer.NamespaceSelector != nil):
			ps.Add(path, "has both an ipBlock and a selector")
		}
		peer.PodSelector.Validate(path+".podSelector", false, ps)
		peer.NamespaceSelector.Validate(path+".namespaceSelector", false, ps)
		if peer.IPBlock == nil {
			continue
		}
		block, ok := strictPrefix(path+".ipBlock.cidr", peer.IPBlock.CIDR, ps)
		for j, e := range peer.IPBlock.Except {
			path := path + ".ipBlock.except[" + strconv.Itoa(j) + "]"
			except, good := strictPrefix(path, e, ps)
			if ok && good && (!block.Contains(except.Addr()) || except.Bits() <= block.Bits()) {
				ps.Add(path, "%q is not strictly inside %s", e, block)
			}
		}
	}
}

// strictPrefix parses a prefix. For new objects, Kubernetes requires its canonical spelling.
func strictPrefix(path, s string, ps *manifest.Problems) (netip.Prefix, bool) {
	canonical, ok := heldPrefix(s)
	p, err := netip.ParsePrefix(s)
	switch {
	case !ok:
		ps.Add(path, "%q is not a prefix such as 10.9.8.0/24 or 2001:db8::/64", s)
	case err != nil:
		ps.AddHeld(path, "%q has leading zeros; it means %s", s, canonical)
	case p.Addr().Is4In6():
		ps.AddHeld(path, "%q is an IPv4-mapped IPv6 prefix; it means %s", s, canonical)
	case p != canonical:
		ps.AddHeld(path, "%q has bits beyond its prefix length; it means %s", s, canonical)
	}
	return canonical, ok
}

// heldPrefix parses a prefix in a spelling that new objects may not use, but that older objects in an API server may
// contain: with bits beyond the prefix length, with leading zeros, or with an IPv4 address in IPv6 notation.
func heldPrefix(s string) (netip.Prefix, bool) {
	addr, bits, ok := strings.Cut(s, "/")
	if !ok {
		return netip.Prefix{}, false
	}
	// Parse the embedded IPv4 address at the end, if there is one.
	front := ""
	if i := strings.LastIndexByte(addr, ':'); i >= 0 {
		front, addr = addr[:i+1], addr[i+1:]
	}
	if octets := strings.Split(addr, "."); len(octets) == 4 {
		for i, o := range octets {
			octets[i] = withoutZeros(o)
		}
		addr = strings.Join(octets, ".")
	}
	p, err := netip.ParsePrefix(front + addr + "/" + withoutZeros(bits))
	if err != nil {
		return netip.Prefix{}, false
	}
	return Unmap(p).Masked(), true
}

func withoutZeros(s string) string {
	for len(s) > 1 && s[0] == '0' {
		s = s[1:]
	}
	return s
}

func validatePorts(path string, ports []NetworkPort, ps *manifest.Problems) {
	for i, np := range ports {
		path := path + "[" + strconv.Itoa(i) + "]"
		if np.Protocol != nil && *np.Protocol != "TCP" && *np.Protocol != "UDP" && *np.Protocol != "SCTP" {
			ps.Add(path+".protocol", "%q is not TCP, UDP or SCTP", *np.Protocol)
		}
		if np.Port != nil {
			switch {
			case np.Port.IsString:
				if !IsPortName(np.Port.String) || strings.ToLower(np.Port.String) != np.Port.String {
					ps.Add(path+".port", "%q is not a port name: at most 15 lower-case letters, digits and single hyphens, with a letter", np.Port.String)
				}
			case np.Port.Int < 1 || np.Port.Int > 65535:
				ps.Add(path+".port", "%d is not from 1 to 65535", np.Port.Int)
			}
		}
		if np.EndPort != nil {
			switch {
			case np.Port == nil:
				ps.Add(path+".endPort", "needs a port")
			case np.Port.IsString:
				ps.Add(path+".endPort", "cannot follow a named port")
			case *np.EndPort < np.Port.Int:
				ps.Add(path+".endPort", "%d is below port %d", *np.EndPort, np.Port.Int)
			}
			if *np.EndPort < 1 || *np.EndPort > 65535 {
				ps.Add(path+".endPort", "%d is not from 1 to 65535", *np.EndPort)
			}
		}
	}
}

func (p *NetworkPolicy) source() policytable.Source {
	return policytable.Source{Kind: "NetworkPolicy", Namespace: p.Metadata.Namespace, Name: p.Metadata.Name}
}

// types returns the policy types, including those that the spec implies.
func (p *NetworkPolicy) types(egress bool) []string {
	switch {
	case len(p.Spec.PolicyTypes) > 0:
		return p.Spec.PolicyTypes
	case egress:
		return []string{"Ingress", "Egress"}
	}
	return []string{"Ingress"}
}

// Notes returns the notes on a valid policy. An empty spec is valid, but probably a mistake.
func (p *NetworkPolicy) Notes() (ns manifest.Notes) {
	s := p.Spec
	if s.PodSelector == nil && len(s.PolicyTypes) == 0 && len(s.Ingress) == 0 && len(s.Egress) == 0 {
		ns.Add(manifest.NoteCanonical, "spec", "is empty; it means podSelector: {} and policyTypes: [Ingress], so "+
			"that no pod of namespace %s receives anything", p.Metadata.Namespace)
	}
	return ns
}

// Isolate returns the rules for a policy that cannot be converted: the pods that it selects get no traffic in the
// directions of the policy. bad reports whether a path has a problem. If the selector has one, every pod of the
// namespace is selected.
func (p *NetworkPolicy) Isolate(bad func(path string) bool) []rule.Spec {
	spec := rule.Spec{Namespace: p.Metadata.Namespace}
	reqs := []selector.Requirement{InNamespace(p.Metadata.Namespace)}
	if p.Spec.PodSelector.Usable("spec.podSelector", false, bad) {
		reqs = append(reqs, p.Spec.PodSelector.Pods()...)
	}
	spec.Subject = selector.New(reqs...)
	types := p.types(len(p.Spec.Egress) > 0 || bad("spec.egress"))
	known := !bad("spec.policyTypes") && !slices.ContainsFunc(types, func(t string) bool { return t != "Ingress" && t != "Egress" })
	for i, t := range [2]string{policytable.Ingress: "Ingress", policytable.Egress: "Egress"} {
		d := policytable.Direction(i)
		if !known || slices.Contains(types, t) {
			spec.Selects[d], spec.DefaultDeny[d] = true, true
			spec.Rules = append(spec.Rules, rule.Isolate(p.source(), d, policytable.Isolation, 0))
		}
	}
	return []rule.Spec{spec}
}

// Rules converts a valid policy.
func (p *NetworkPolicy) Rules(o rule.Options) rule.Spec {
	ns := p.Metadata.Namespace
	spec := rule.Spec{
		Subject:   selector.New(append(p.Spec.PodSelector.Pods(), InNamespace(ns))...),
		Namespace: ns,
	}
	types := p.types(len(p.Spec.Egress) > 0)
	source := p.source()
	convert := func(d policytable.Direction, path string, peers []NetworkPeer, ports []NetworkPort) {
		r := &rule.Rule{Source: source, Direction: d, Tier: policytable.Normal, Action: policytable.Allow}
		r.Source.Path = path
		r.Peers = networkPeers(ns, o, peers)
		r.Ports, r.AllPorts = networkPorts(ports)
		spec.Rules = append(spec.Rules, r.Seal())
	}
	isolate := func(d policytable.Direction) {
		spec.Selects[d], spec.DefaultDeny[d] = true, true
		spec.Rules = append(spec.Rules, rule.Isolate(source, d, policytable.Isolation, 0))
	}
	if slices.Contains(types, "Ingress") {
		for i, in := range p.Spec.Ingress {
			convert(policytable.Ingress, "spec.ingress["+strconv.Itoa(i)+"]", in.From, in.Ports)
		}
		isolate(policytable.Ingress)
	}
	if slices.Contains(types, "Egress") {
		for i, eg := range p.Spec.Egress {
			convert(policytable.Egress, "spec.egress["+strconv.Itoa(i)+"]", eg.To, eg.Ports)
		}
		isolate(policytable.Egress)
	}
	return spec
}

func networkPeers(ns string, o rule.Options, peers []NetworkPeer) rule.Peers {
	if len(peers) == 0 {
		return rule.Peers{Any: true}
	}
	var out rule.Peers
	for _, p := range peers {
		if p.IPBlock != nil {
			n := rule.Network{Reach: rule.ReachEveryone}
			n.Prefix, _ = heldPrefix(p.IPBlock.CIDR)
			for _, e := range p.IPBlock.Except {
				except, _ := heldPrefix(e)
				n.Except = append(n.Except, except)
			}
			out.Networks = append(out.Networks, n)
			continue
		}
		reqs := p.PodSelector.Pods()
		if p.NamespaceSelector != nil {
			reqs = append(reqs, p.NamespaceSelector.Namespaces()...)
		} else {
			reqs = append(reqs, InNamespace(ns))
		}
		if o.LocalClusterOnly && !p.PodSelector.Names(label.KeyCluster) {
			reqs = append(reqs, InCluster(o.Cluster))
		}
		out.Selectors = append(out.Selectors, selector.New(reqs...))
	}
	return out
}

func networkPorts(ports []NetworkPort) (out []rule.Port, all bool) {
	if len(ports) == 0 {
		return nil, true
	}
	for _, np := range ports {
		proto := port.TCP
		if np.Protocol != nil {
			proto, _ = port.ParseProtocol(*np.Protocol)
		}
		switch {
		case np.Port == nil:
			out = append(out, rule.Port{Range: port.Whole(proto)})
		case np.Port.IsString:
			out = append(out, rule.Port{Name: np.Port.String, Protocol: proto})
		default:
			hi := np.Port.Int
			if np.EndPort != nil {
				hi = *np.EndPort
			}
			out = append(out, rule.Port{Range: port.Ports(proto, uint16(np.Port.Int), uint16(hi))})
		}
	}
	return out, false
}
