// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cilium holds CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy and
// CiliumCIDRGroup of cilium.io/v2: the types, their validation and what they
// mean as rules.
//
// Validation refuses what the published schema refuses and what Cilium's agent
// refuses. Existing manifests keep their meaning, odd corners included; each
// corner is named where it is handled.
package cilium

import (
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
)

// NetworkPolicy is a CiliumNetworkPolicy or, without a namespace, a
// CiliumClusterwideNetworkPolicy.
type NetworkPolicy struct {
	networkpolicy.Meta
	Spec  *Rule  `json:"spec"`
	Specs []Rule `json:"specs"`
}

// Rule is one subject with its rules.
type Rule struct {
	EndpointSelector  *networkpolicy.LabelSelector `json:"endpointSelector"`
	NodeSelector      *networkpolicy.LabelSelector `json:"nodeSelector"`
	Ingress           []IngressRule                `json:"ingress"`
	IngressDeny       []IngressDenyRule            `json:"ingressDeny"`
	Egress            []EgressRule                 `json:"egress"`
	EgressDeny        []EgressDenyRule             `json:"egressDeny"`
	Labels            []Label                      `json:"labels"`
	EnableDefaultDeny DefaultDeny                  `json:"enableDefaultDeny"`
	Description       string                       `json:"description"`
	Log               Log                          `json:"log"`
}

// DefaultDeny overrides whether a policy switches its subjects to default
// deny; the default is: in the directions it has rules for.
type DefaultDeny struct {
	Ingress *bool `json:"ingress"`
	Egress  *bool `json:"egress"`
}

// Label is a label of the rule itself, which decides nothing.
type Label struct {
	Key    *string `json:"key"`
	Value  string  `json:"value"`
	Source string  `json:"source"`
}

// Log is a text for flow logs.
type Log struct {
	Value string `json:"value"`
}

// IngressPeers are the sources of a rule.
type IngressPeers struct {
	FromEndpoints []networkpolicy.LabelSelector `json:"fromEndpoints"`
	FromCIDR      []string                      `json:"fromCIDR"`
	FromCIDRSet   []CIDRRule                    `json:"fromCIDRSet"`
	FromEntities  []string                      `json:"fromEntities"`
	FromGroups    []any                         `json:"fromGroups"`
	FromNodes     []networkpolicy.LabelSelector `json:"fromNodes"`
	FromRequires  []any                         `json:"fromRequires"` // must be empty
}

// IngressRule allows.
type IngressRule struct {
	IngressPeers
	ToPorts        []PortRule      `json:"toPorts"`
	ICMPs          []ICMPRule      `json:"icmps"`
	Authentication *Authentication `json:"authentication"`
}

// IngressDenyRule denies.
type IngressDenyRule struct {
	IngressPeers
	ToPorts []PortDenyRule `json:"toPorts"`
	ICMPs   []ICMPRule     `json:"icmps"`
}

// EgressPeers are the destinations of a rule.
type EgressPeers struct {
	ToEndpoints []networkpolicy.LabelSelector `json:"toEndpoints"`
	ToCIDR      []string                      `json:"toCIDR"`
	ToCIDRSet   []CIDRRule                    `json:"toCIDRSet"`
	ToEntities  []string                      `json:"toEntities"`
	ToServices  []Service                     `json:"toServices"`
	ToGroups    []any                         `json:"toGroups"`
	ToNodes     []networkpolicy.LabelSelector `json:"toNodes"`
	ToRequires  []any                         `json:"toRequires"` // must be empty
}

// EgressRule allows.
type EgressRule struct {
	EgressPeers
	ToFQDNs        []FQDN          `json:"toFQDNs"`
	ToPorts        []PortRule      `json:"toPorts"`
	ICMPs          []ICMPRule      `json:"icmps"`
	Authentication *Authentication `json:"authentication"`
}

// EgressDenyRule denies.
type EgressDenyRule struct {
	EgressPeers
	ToPorts []PortDenyRule `json:"toPorts"`
	ICMPs   []ICMPRule     `json:"icmps"`
}

// CIDRRule is a prefix, or the prefixes of groups, with holes.
type CIDRRule struct {
	CIDR              string                       `json:"cidr"`
	CIDRGroupRef      string                       `json:"cidrGroupRef"`
	CIDRGroupSelector *networkpolicy.LabelSelector `json:"cidrGroupSelector"`
	Except            []string                     `json:"except"`
}

// Service selects the endpoints of a service, which are not known here: see
// Notes.
type Service struct {
	K8sService         *ServiceName     `json:"k8sService"`
	K8sServiceSelector *ServiceSelector `json:"k8sServiceSelector"`
}

// ServiceName names a service.
type ServiceName struct {
	Namespace   string `json:"namespace"`
	ServiceName string `json:"serviceName"`
}

// ServiceSelector selects services by their labels.
type ServiceSelector struct {
	Namespace string                       `json:"namespace"`
	Selector  *networkpolicy.LabelSelector `json:"selector"`
}

// Authentication asks for mutual authentication, which is not offered: see Notes.
type Authentication struct {
	Mode string `json:"mode"`
}

// FQDN is a DNS name or pattern.
type FQDN struct {
	MatchName    *string `json:"matchName"`
	MatchPattern *string `json:"matchPattern"`
}

// PortRule is a set of ports, and what is allowed on layer 7.
type PortRule struct {
	Ports          []PortProtocol `json:"ports"`
	TerminatingTLS *TLS           `json:"terminatingTLS"`
	OriginatingTLS *TLS           `json:"originatingTLS"`
	ServerNames    []string       `json:"serverNames"`
	Listener       *Listener      `json:"listener"`
	Rules          *L7Rules       `json:"rules"`
}

// PortDenyRule is a set of ports.
type PortDenyRule struct {
	Ports []PortProtocol `json:"ports"`
}

// PortProtocol is a port, a range or a name.
type PortProtocol struct {
	Port     string  `json:"port"`
	EndPort  int64   `json:"endPort"`
	Protocol *string `json:"protocol"`
}

// TLS is the material for a proxy to end or begin TLS with.
type TLS struct {
	Secret      *Secret `json:"secret"`
	TrustedCA   string  `json:"trustedCA"`
	Certificate string  `json:"certificate"`
	PrivateKey  string  `json:"privateKey"`
}

// Secret names a Kubernetes secret.
type Secret struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Listener is a proxy of the user's own.
type Listener struct {
	EnvoyConfig EnvoyConfig `json:"envoyConfig"`
	Name        string      `json:"name"`
	Priority    *int64      `json:"priority"`
}

// EnvoyConfig names the proxy's configuration.
type EnvoyConfig struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// L7Rules are the requests that are allowed.
type L7Rules struct {
	HTTP []HTTPRule `json:"http"`
	DNS  []FQDN     `json:"dns"`
}

// HTTPRule is one kind of HTTP request.
type HTTPRule struct {
	Path          string        `json:"path"`
	Method        string        `json:"method"`
	Host          string        `json:"host"`
	Headers       []string      `json:"headers"`
	HeaderMatches []HeaderMatch `json:"headerMatches"`
}

// HeaderMatch is a header with a value, and what to do when it differs.
type HeaderMatch struct {
	Mismatch string  `json:"mismatch"`
	Name     string  `json:"name"`
	Secret   *Secret `json:"secret"`
	Value    string  `json:"value"`
}

// ICMPRule is a list of ICMP types.
type ICMPRule struct {
	Fields []ICMPField `json:"fields"`
}

// ICMPField is one ICMP type, by number or name.
type ICMPField struct {
	Family *string          `json:"family"`
	Type   *manifest.Number `json:"type"`
}

// CIDRGroup is a CiliumCIDRGroup: prefixes with labels.
type CIDRGroup struct {
	networkpolicy.Meta
	Spec CIDRGroupSpec `json:"spec"`
}

// CIDRGroupSpec is its content.
type CIDRGroupSpec struct {
	ExternalCIDRs []string `json:"externalCIDRs"`
}
