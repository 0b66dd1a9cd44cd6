// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// CiliumNetworkPolicy has the fields that the model implements.
type CiliumNetworkPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              CiliumSpec `json:"spec"`
}

// CiliumSpec is a spec with rules. EndpointSelector selects pods of the policy's namespace.
type CiliumSpec struct {
	EndpointSelector  metav1.LabelSelector `json:"endpointSelector"`
	EnableDefaultDeny *DefaultDeny         `json:"enableDefaultDeny,omitempty"`
	Ingress           []CiliumRule         `json:"ingress,omitempty"`
	IngressDeny       []CiliumRule         `json:"ingressDeny,omitempty"`
	Egress            []CiliumRule         `json:"egress,omitempty"`
	EgressDeny        []CiliumRule         `json:"egressDeny,omitempty"`
}

// DefaultDeny switches default deny on or off. It has no effect in a direction without rules. The default is on.
type DefaultDeny struct {
	Ingress *bool `json:"ingress,omitempty"`
	Egress  *bool `json:"egress,omitempty"`
}

// CiliumRule is an ingress or egress rule. Ingress rules use the From fields, egress rules the To fields.
// A nil list is an absent field; an empty list selects no peer.
type CiliumRule struct {
	FromEndpoints []metav1.LabelSelector `json:"fromEndpoints,omitempty"`
	FromEntities  []string               `json:"fromEntities,omitempty"`
	FromCIDR      []string               `json:"fromCIDR,omitempty"`
	FromCIDRSet   []CIDRRule             `json:"fromCIDRSet,omitempty"`
	ToEndpoints   []metav1.LabelSelector `json:"toEndpoints,omitempty"`
	ToEntities    []string               `json:"toEntities,omitempty"`
	ToCIDR        []string               `json:"toCIDR,omitempty"`
	ToCIDRSet     []CIDRRule             `json:"toCIDRSet,omitempty"`
	ToPorts       []PortRule             `json:"toPorts,omitempty"`
	ICMPs         []ICMPRule             `json:"icmps,omitempty"`
}

// CIDRRule is a prefix with exceptions.
type CIDRRule struct {
	CIDR   string   `json:"cidr"`
	Except []string `json:"except,omitempty"`
}

// PortRule is a list of ports.
type PortRule struct {
	Ports []PortProtocol `json:"ports"`
}

// ICMPRule is a list of ICMP types.
type ICMPRule struct {
	Fields []ICMPField `json:"fields"`
}

// ICMPField is an ICMP type, by number or name; 0 matches every type. The default family is IPv4.
type ICMPField struct {
	Family string              `json:"family,omitempty"`
	Type   *intstr.IntOrString `json:"type"`
}

// typesOfICMP maps family and name to the ICMP type.
var typesOfICMP = map[string]map[string]int32{
	"IPv4": {"EchoReply": 0, "EchoRequest": EchoRequest}, "IPv6": {"EchoReply": 129, "EchoRequest": EchoRequestV6},
}

// PortProtocol is a port number, a port name or a range. Port "0" matches every port. ANY is TCP, UDP and SCTP.
type PortProtocol struct {
	Port     string `json:"port"`
	EndPort  int32  `json:"endPort,omitempty"`
	Protocol string `json:"protocol,omitempty"`
}

// Entities that the model implements.
const (
	entityAll        = "all"
	entityWorld      = "world"
	entityCluster    = "cluster"
	entityHost       = "host"
	entityRemoteNode = "remote-node"
	entityUnmanaged  = "unmanaged" // pods without an endpoint: none here
	entityHealth     = "health"    // none here
)

// podNamespace is the label key that selects the namespace of a pod.
const podNamespace = "k8s:io.kubernetes.pod.namespace"

func (v *verdicts) cilium(
	p *CiliumNetworkPolicy, d Direction, s Subject, peer Peer, proto corev1.Protocol, port uint16,
) {
	if p.Namespace != s.Namespace || !selects(&p.Spec.EndpointSelector, s.Labels) {
		return
	}
	allow, deny := p.Spec.Ingress, p.Spec.IngressDeny
	if d == Egress {
		allow, deny = p.Spec.Egress, p.Spec.EgressDeny
	}
	isolates := len(allow) > 0 || len(deny) > 0 // default deny needs a rule in this direction
	if e := p.Spec.EnableDefaultDeny; e != nil {
		set := e.Ingress
		if d == Egress {
			set = e.Egress
		}
		isolates = isolates && (set == nil || *set)
	}
	v.isolated = v.isolated || isolates
	matches := func(r CiliumRule) bool {
		return r.matchesPeer(d, p.Namespace, peer) && r.matchesPort(names(d, s, peer), proto, port)
	}
	v.allowed = v.allowed || slices.ContainsFunc(allow, matches)
	v.denied = v.denied || slices.ContainsFunc(deny, matches)
}

func (r CiliumRule) matchesPeer(d Direction, namespace string, peer Peer) bool {
	endpoints, entities, cidrs, sets := r.FromEndpoints, r.FromEntities, r.FromCIDR, r.FromCIDRSet
	if d == Egress {
		endpoints, entities, cidrs, sets = r.ToEndpoints, r.ToEntities, r.ToCIDR, r.ToCIDRSet
	}
	if endpoints == nil && entities == nil && cidrs == nil && sets == nil {
		// An empty rule selects no peer; a rule with ports alone selects every peer.
		return len(r.ToPorts)+len(r.ICMPs) > 0
	}
	for i := range endpoints {
		if selectsEndpoint(&endpoints[i], namespace, peer) {
			return true
		}
	}
	for _, e := range entities {
		if isEntity(e, peer) {
			return true
		}
	}
	if peer.Kind != Outside { // CIDR rules match peers outside of the cluster only
		return false
	}
	for _, c := range cidrs {
		if inCIDR(c, nil, peer.Address) {
			return true
		}
	}
	return slices.ContainsFunc(sets, func(c CIDRRule) bool { return inCIDR(c.CIDR, c.Except, peer.Address) })
}

// selectsEndpoint matches a pod. A selector without a namespace key selects pods of the policy's namespace.
func selectsEndpoint(s *metav1.LabelSelector, namespace string, peer Peer) bool {
	if peer.Kind != PodPeer {
		return false
	}
	_, names := s.MatchLabels[podNamespace]
	names = names || slices.ContainsFunc(s.MatchExpressions, func(r metav1.LabelSelectorRequirement) bool {
		return r.Key == podNamespace
	})
	labels := maps.Clone(peer.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[podNamespace] = peer.Namespace
	return (names || peer.Namespace == namespace) && selects(s, labels)
}

func isEntity(entity string, peer Peer) bool {
	switch entity {
	case entityAll:
		return true
	case entityWorld:
		return peer.Kind == Outside
	case entityCluster:
		return peer.Kind != Outside
	case entityHost:
		return peer.Kind == HostPeer
	case entityRemoteNode:
		return peer.Kind == RemoteNode
	}
	return false
}

func (r CiliumRule) matchesPort(named []NamedPort, proto corev1.Protocol, port uint16) bool {
	if len(r.ToPorts)+len(r.ICMPs) == 0 {
		return true
	}
	if IsEcho(proto) {
		return slices.ContainsFunc(r.ICMPs, func(rule ICMPRule) bool {
			return slices.ContainsFunc(rule.Fields, func(f ICMPField) bool { return f.matches(proto, port) })
		})
	}
	for _, list := range r.ToPorts {
		for _, p := range list.Ports {
			if p.Protocol != "" && p.Protocol != "ANY" && !strings.EqualFold(p.Protocol, string(proto)) {
				continue
			}
			base := 10
			if strings.HasPrefix(p.Port, "0") {
				base = 8
			}
			first, err := strconv.ParseInt(p.Port, base, 32)
			if err != nil {
				if isNamed(named, strings.ToLower(p.Port), proto, port) {
					return true
				}
				continue
			}
			last := max(int64(p.EndPort), first)
			if first == 0 || first <= int64(port) && int64(port) <= last {
				return true
			}
		}
	}
	return false
}

func (f ICMPField) matches(proto corev1.Protocol, kind uint16) bool {
	family := f.Family
	if family == "" {
		family = "IPv4"
	}
	if (family == "IPv6") != (proto == ICMPv6) {
		return false
	}
	number := f.Type.IntVal
	if f.Type.Type == intstr.String {
		number = typesOfICMP[family][f.Type.StrVal]
	}
	return number == 0 || number == int32(kind)
}
