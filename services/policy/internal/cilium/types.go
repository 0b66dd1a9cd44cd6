// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cilium defines CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy and CiliumCIDRGroup of cilium.io/v2: the
// types, their validation, and their conversion to rules.
//
// Validation rejects every manifest that the published schema or Cilium's agent rejects. Valid manifests have the same
// meaning as in Cilium, including unusual corner cases, which are documented in the code that handles them.
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

// Rule is a subject and its rules.
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

// DefaultDeny overrides whether a policy switches its subjects to default deny. By default it does so in the
// directions that have rules.
type DefaultDeny struct {
	Ingress *bool `json:"ingress"`
	Egress  *bool `json:"egress"`
}

// Label is a label of the rule itself. It has no effect.
type Label struct {
	Key    *string `json:"key"`
	Value  string  `json:"value"`
	Source string  `json:"source"`
}

// Log is a text that Cilium adds to its flow logs.
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

// IngressRule allows connections.
type IngressRule struct {
	IngressPeers
	ToPorts        []PortRule      `json:"toPorts"`
	ICMPs          []ICMPRule      `json:"icmps"`
	Authentication *Authentication `json:"authentication"`
}

// IngressDenyRule denies connections.
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

// EgressRule allows connections.
type EgressRule struct {
	EgressPeers
	ToFQDNs        []FQDN          `json:"toFQDNs"`
	ToPorts        []PortRule      `json:"toPorts"`
	ICMPs          []ICMPRule      `json:"icmps"`
	Authentication *Authentication `json:"authentication"`
}

// EgressDenyRule denies connections.
type EgressDenyRule struct {
	EgressPeers
	ToPorts []PortDenyRule `json:"toPorts"`
	ICMPs   []ICMPRule     `json:"icmps"`
}

// CIDRRule is a prefix, or the prefixes of groups, with exceptions.
type CIDRRule struct {
	CIDR              string                       `json:"cidr"`
	CIDRGroupRef      string                       `json:"cidrGroupRef"`
	CIDRGroupSelector *networkpolicy.LabelSelector `json:"cidrGroupSelector"`
	Except            []string                     `json:"except"`
}

// Service selects the endpoints of a Service, which is not supported: see Notes.
type Service struct {
	K8sService         *ServiceName     `json:"k8sService"`
	K8sServiceSelector *ServiceSelector `json:"k8sServiceSelector"`
}

// ServiceName refers to a Service by name.
type ServiceName struct {
	Namespace   string `json:"namespace"`
	ServiceName string `json:"serviceName"`
}

// ServiceSelector selects Services by label.
type ServiceSelector struct {
	Namespace string                       `json:"namespace"`
	Selector  *networkpolicy.LabelSelector `json:"selector"`
}

// Authentication requires mutual authentication, which is not supported: see Notes.
type Authentication struct {
	Mode string `json:"mode"`
}

// FQDN is a DNS name or pattern.
type FQDN struct {
	MatchName    *string `json:"matchName"`
	MatchPattern *string `json:"matchPattern"`
}

// PortRule is a set of ports with optional layer-7 rules.
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

// PortProtocol is a port, a range or a named port.
type PortProtocol struct {
	Port     string  `json:"port"`
	EndPort  int64   `json:"endPort"`
	Protocol *string `json:"protocol"`
}

// TLS names the secrets with which a proxy terminates or originates TLS.
type TLS struct {
	Secret      *Secret `json:"secret"`
	TrustedCA   string  `json:"trustedCA"`
	Certificate string  `json:"certificate"`
	PrivateKey  string  `json:"privateKey"`
}

// Secret refers to a Kubernetes secret.
type Secret struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Listener refers to a proxy that the user has configured.
type Listener struct {
	EnvoyConfig EnvoyConfig `json:"envoyConfig"`
	Name        string      `json:"name"`
	Priority    *int64      `json:"priority"`
}

// EnvoyConfig refers to the proxy's configuration.
type EnvoyConfig struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// L7Rules lists the allowed requests.
type L7Rules struct {
	HTTP []HTTPRule `json:"http"`
	DNS  []FQDN     `json:"dns"`
}

// HTTPRule matches HTTP requests.
type HTTPRule struct {
	Path          string        `json:"path"`
	Method        string        `json:"method"`
	Host          string        `json:"host"`
	Headers       []string      `json:"headers"`
	HeaderMatches []HeaderMatch `json:"headerMatches"`
}

// HeaderMatch requires that a header has a value, and defines the action if it differs.
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

// CIDRGroupSpec is the spec of a CIDRGroup.
type CIDRGroupSpec struct {
	ExternalCIDRs []string `json:"externalCIDRs"`
}
