// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Policies are the policy objects of the cluster.
type Policies struct {
	Network []networkingv1.NetworkPolicy
	Cilium  []CiliumNetworkPolicy
}

// Direction of a connection, from the point of view of the subject.
type Direction int

// Directions.
const (
	Ingress Direction = iota
	Egress
)

func (d Direction) String() string {
	if d == Ingress {
		return "ingress"
	}
	return "egress"
}

// PeerKind classifies the other end of a connection for policies.
type PeerKind int

// Kinds of peers.
const (
	PodPeer    PeerKind = iota
	HostPeer            // the subject's node
	RemoteNode          // another node
	Outside             // of the cluster
)

// Peer is the other end of a connection, from the point of view of the subject.
type Peer struct {
	Kind PeerKind
	// The pod's namespace with its labels, labels and named ports; unset for other kinds.
	Namespace       string
	NamespaceLabels map[string]string
	Labels          map[string]string
	Ports           []NamedPort
	Address         netip.Addr
	// Elsewhere: the pod is on another node than the subject.
	Elsewhere bool
}

// Subject is the pod that policies select.
type Subject struct {
	Namespace string
	Labels    map[string]string
	Ports     []NamedPort
}

// names returns the named ports of the server, which is the subject for ingress and the peer for egress.
func names(d Direction, s Subject, peer Peer) []NamedPort {
	if d == Ingress {
		return s.Ports
	}
	return peer.Ports
}

// isNamed reports whether a server has a named port with this name, protocol and number.
func isNamed(ports []NamedPort, name string, proto corev1.Protocol, port uint16) bool {
	return slices.Contains(ports, NamedPort{Name: name, Protocol: proto, Port: port})
}

// namespaceLabel is the label that the API server sets to the name of the namespace.
const namespaceLabel = "kubernetes.io/metadata.name"

// verdicts combines the policies that select a pod.
type verdicts struct {
	denied, allowed, isolated bool
}

// Allows reports whether the policies of the subject allow a connection with the peer. The port is the
// destination port, or the ICMP type.
//
// A deny rule has precedence over every allow rule, and an allow rule over isolation. The node of an
// isolated pod can reach the pod unless a rule denies the node.
func (p *Policies) Allows(d Direction, s Subject, peer Peer, proto corev1.Protocol, port uint16) bool {
	var v verdicts
	for i := range p.Network {
		v.network(&p.Network[i], d, s, peer, proto, port)
	}
	for i := range p.Cilium {
		v.cilium(&p.Cilium[i], d, s, peer, proto, port)
	}
	switch {
	case v.denied:
		return false
	case v.allowed, !v.isolated:
		return true
	default:
		return d == Ingress && peer.Kind == HostPeer
	}
}

func (v *verdicts) network(
	p *networkingv1.NetworkPolicy, d Direction, s Subject, peer Peer, proto corev1.Protocol, port uint16,
) {
	if p.Namespace != s.Namespace || !selects(&p.Spec.PodSelector, s.Labels) {
		return
	}
	kind := networkingv1.PolicyTypeIngress
	if d == Egress {
		kind = networkingv1.PolicyTypeEgress
	}
	if !slices.Contains(typesOf(p), kind) {
		return
	}
	v.isolated = true
	if d == Ingress {
		for _, r := range p.Spec.Ingress {
			v.allowed = v.allowed || anyPeer(r.From, p.Namespace, peer) && anyPort(r.Ports, names(d, s, peer), proto, port)
		}
		return
	}
	for _, r := range p.Spec.Egress {
		v.allowed = v.allowed || anyPeer(r.To, p.Namespace, peer) &&
			anyPort(r.Ports, namesTo(r.To, p.Namespace, s, peer), proto, port)
	}
}

// namesTo returns the named ports of a peer that an egress rule can use. A node knows the addresses of its own pods
// only. Next to an ipBlock, a name matches no port of a pod on another node (docs/missing.md).
func namesTo(to []networkingv1.NetworkPolicyPeer, namespace string, s Subject, peer Peer) []NamedPort {
	isBlock := func(p networkingv1.NetworkPolicyPeer) bool { return p.IPBlock != nil }
	selectors := slices.DeleteFunc(slices.Clone(to), isBlock)
	if peer.Elsewhere && len(to) > 0 && (len(selectors) == 0 || !anyPeer(selectors, namespace, peer)) {
		return nil
	}
	return names(Egress, s, peer)
}

// typesOf returns policyTypes or their default: Ingress, and Egress if the policy has egress rules.
func typesOf(p *networkingv1.NetworkPolicy) []networkingv1.PolicyType {
	if len(p.Spec.PolicyTypes) > 0 {
		return p.Spec.PolicyTypes
	}
	types := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	if len(p.Spec.Egress) > 0 {
		types = append(types, networkingv1.PolicyTypeEgress)
	}
	return types
}

func anyPeer(peers []networkingv1.NetworkPolicyPeer, namespace string, peer Peer) bool {
	return len(peers) == 0 || slices.ContainsFunc(peers, func(p networkingv1.NetworkPolicyPeer) bool {
		if b := p.IPBlock; b != nil { // matches every peer with the address
			return inCIDR(b.CIDR, b.Except, peer.Address)
		}
		if peer.Kind != PodPeer {
			return false
		}
		if p.NamespaceSelector == nil {
			if peer.Namespace != namespace {
				return false
			}
		} else if !selects(p.NamespaceSelector, peer.NamespaceLabels) {
			return false
		}
		return p.PodSelector == nil || selects(p.PodSelector, peer.Labels)
	})
}

func anyPort(
	ports []networkingv1.NetworkPolicyPort, named []NamedPort, proto corev1.Protocol, port uint16,
) bool {
	return len(ports) == 0 || slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool {
		want := corev1.ProtocolTCP
		if p.Protocol != nil {
			want = *p.Protocol
		}
		if want != proto {
			return false
		}
		if p.Port == nil {
			return true
		}
		if p.Port.Type == intstr.String {
			return isNamed(named, p.Port.StrVal, proto, port)
		}
		first := p.Port.IntVal
		last := first
		if p.EndPort != nil {
			last = *p.EndPort
		}
		return first <= int32(port) && int32(port) <= last
	})
}

// inCIDR reports whether the prefix contains the address and no exception does.
func inCIDR(cidr string, except []string, a netip.Addr) bool {
	in := func(text string) bool {
		if one, err := netip.ParseAddr(text); err == nil {
			return one == a
		}
		p, err := netip.ParsePrefix(text)
		return err == nil && p.Contains(a)
	}
	return in(cidr) && !slices.ContainsFunc(except, in)
}

// selects reports whether labels meet all requirements of a selector.
func selects(s *metav1.LabelSelector, labels map[string]string) bool {
	for key, value := range s.MatchLabels {
		if got, ok := labels[key]; !ok || got != value {
			return false
		}
	}
	for _, r := range s.MatchExpressions {
		value, has := labels[r.Key]
		var ok bool
		switch r.Operator {
		case metav1.LabelSelectorOpIn:
			ok = has && slices.Contains(r.Values, value)
		case metav1.LabelSelectorOpNotIn:
			ok = !has || !slices.Contains(r.Values, value)
		case metav1.LabelSelectorOpExists:
			ok = has
		case metav1.LabelSelectorOpDoesNotExist:
			ok = !has
		}
		if !ok {
			return false
		}
	}
	return true
}
