// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package adminpolicy

import (
	"slices"
	"strconv"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// OldPolicy is an AdminNetworkPolicy or a BaselineAdminNetworkPolicy.
type OldPolicy struct {
	networkpolicy.Meta
	Spec OldSpec `json:"spec"`
}

// OldSpec is the spec of an OldPolicy. Only AdminNetworkPolicy has a priority.
type OldSpec struct {
	Priority *int64           `json:"priority"`
	Subject  Subject          `json:"subject"`
	Ingress  []OldIngressRule `json:"ingress"`
	Egress   []OldEgressRule  `json:"egress"`
}

// OldIngressRule is a rule for incoming connections.
type OldIngressRule struct {
	Name   string    `json:"name"`
	Action string    `json:"action"`
	From   []OldPeer `json:"from"`
	Ports  []OldPort `json:"ports"`
}

// OldEgressRule is a rule for outgoing connections.
type OldEgressRule struct {
	Name   string    `json:"name"`
	Action string    `json:"action"`
	To     []OldPeer `json:"to"`
	Ports  []OldPort `json:"ports"`
}

// OldPeer is a peer; exactly one field is set. Only egress peers may have nodes, networks and domainNames; domainNames
// are only allowed in an AdminNetworkPolicy.
type OldPeer struct {
	Namespaces  *OldNamespaces               `json:"namespaces"`
	Pods        *OldPods                     `json:"pods"`
	Nodes       *networkpolicy.LabelSelector `json:"nodes"`
	Networks    []string                     `json:"networks"`
	DomainNames []string                     `json:"domainNames"`
}

// OldNamespaces is a label selector or, in version 0.1.0 of the API, an object that contains one.
type OldNamespaces struct {
	networkpolicy.LabelSelector
	NamespaceSelector *networkpolicy.LabelSelector `json:"namespaceSelector"`
}

func (n *OldNamespaces) selector() *networkpolicy.LabelSelector {
	if n == nil {
		return nil
	}
	if n.NamespaceSelector != nil {
		return n.NamespaceSelector
	}
	return &n.LabelSelector
}

// OldPods selects pods. Either field may contain the namespace selector.
type OldPods struct {
	NamespaceSelector *networkpolicy.LabelSelector `json:"namespaceSelector"`
	Namespaces        *OldNamespaces               `json:"namespaces"`
	PodSelector       *networkpolicy.LabelSelector `json:"podSelector"`
}

// OldPort is a port or a range; exactly one field is set.
type OldPort struct {
	PortNumber *OldPortNumber `json:"portNumber"`
	PortRange  *OldPortRange  `json:"portRange"`
	NamedPort  *string        `json:"namedPort"`
}

// OldPortNumber is a single port.
type OldPortNumber struct {
	Protocol string `json:"protocol"`
	Port     int64  `json:"port"`
}

// OldPortRange is a range of ports.
type OldPortRange struct {
	Protocol string `json:"protocol"`
	Start    int64  `json:"start"`
	End      int64  `json:"end"`
}

func (p *OldPeer) peer() EgressPeer {
	out := EgressPeer{Namespaces: p.Namespaces.selector(), Nodes: p.Nodes, Networks: p.Networks, DomainNames: p.DomainNames}
	if p.Pods != nil {
		out.Pods = &NamespacedPod{NamespaceSelector: p.Pods.NamespaceSelector, PodSelector: p.Pods.PodSelector}
		if s := p.Pods.Namespaces.selector(); s != nil {
			out.Pods.NamespaceSelector = s
		}
	}
	return out
}

// Validate checks the policy against the rules of the published schema of its kind.
func (p *OldPolicy) Validate(baseline bool, o rule.Options) manifest.Problems {
	v := validator{options: o}
	p.Metadata.Validate(false, &v.Problems)
	actions := []string{"Allow", "Deny", "Pass"}
	if baseline {
		actions = actions[:2]
		if p.Metadata.Name != "" && p.Metadata.Name != "default" {
			v.Add("metadata.name", "must be \"default\": there is one BaselineAdminNetworkPolicy")
		}
		if p.Spec.Priority != nil {
			v.Add("spec.priority", "a BaselineAdminNetworkPolicy has no such field")
		}
	} else {
		v.priority(p.Spec.Priority)
	}
	v.subject(p.Spec.Subject)
	v.count("spec.ingress", len(p.Spec.Ingress), 100)
	v.count("spec.egress", len(p.Spec.Egress), 100)
	for i, r := range p.Spec.Ingress {
		path := "spec.ingress[" + strconv.Itoa(i) + "]"
		v.head(path, r.Name, r.Action, actions...)
		v.oldPeers(path+".from", r.From, r.Action)
		for j, peer := range r.From {
			if peer.Nodes != nil || peer.Networks != nil || peer.DomainNames != nil {
				v.Add(path+".from["+strconv.Itoa(j)+"]", "nodes, networks and domainNames are for egress")
			}
		}
		v.oldPorts(path+".ports", r.Ports)
	}
	for i, r := range p.Spec.Egress {
		path := "spec.egress[" + strconv.Itoa(i) + "]"
		v.head(path, r.Name, r.Action, actions...)
		v.oldPeers(path+".to", r.To, r.Action)
		v.oldPorts(path+".ports", r.Ports)
		peers := make([]EgressPeer, len(r.To))
		for j := range r.To {
			peers[j] = r.To[j].peer()
			if baseline && peers[j].DomainNames != nil {
				v.Add(path+".to["+strconv.Itoa(j)+"].domainNames", "a BaselineAdminNetworkPolicy has no such field")
			}
		}
		v.namedPorts(path, peers, slices.ContainsFunc(r.Ports, func(p OldPort) bool { return p.NamedPort != nil }))
	}
	return v.Problems
}

func (v *validator) oldPeers(path string, list []OldPeer, action string) {
	v.some(path, len(list), 100)
	for i := range list {
		v.peer(path+"["+strconv.Itoa(i)+"]", list[i].peer(), action)
	}
}

func (v *validator) oldPorts(path string, list []OldPort) {
	if list != nil && len(list) == 0 {
		v.Add(path, "is empty; leave it out for all ports")
	}
	v.count(path, len(list), 100)
	protocol := func(path, name string) {
		if name != "" && name != "TCP" && name != "UDP" && name != "SCTP" {
			v.Add(path+".protocol", "%q is not TCP, UDP or SCTP", name)
		}
	}
	for i, p := range list {
		path := path + "[" + strconv.Itoa(i) + "]"
		v.one(path, p.PortNumber != nil, p.PortRange != nil, p.NamedPort != nil)
		if n := p.PortNumber; n != nil {
			protocol(path+".portNumber", n.Protocol)
			v.number(path+".portNumber.port", n.Port)
		}
		if r := p.PortRange; r != nil {
			protocol(path+".portRange", r.Protocol)
			v.number(path+".portRange.start", r.Start)
			v.number(path+".portRange.end", r.End)
			if r.End < r.Start {
				v.Add(path+".portRange", "end %d is below start %d", r.End, r.Start)
			}
		}
		if p.NamedPort != nil && *p.NamedPort == "" {
			v.Add(path+".namedPort", "is empty")
		}
	}
}

// Rules converts a valid policy.
func (p *OldPolicy) Rules(baseline bool, o rule.Options) rule.Spec {
	c := converter{
		options: o, tier: policytable.Admin,
		source: policytable.Source{Kind: "AdminNetworkPolicy", Name: p.Metadata.Name},
		spec:   rule.Spec{Subject: p.Spec.Subject.selector()},
	}
	if baseline {
		c.tier, c.source.Kind = policytable.Baseline, "BaselineAdminNetworkPolicy"
	} else if p.Spec.Priority != nil {
		c.priority = int32(*p.Spec.Priority)
	}
	convert := func(d policytable.Direction, i int, action string, list []OldPeer, ports []OldPort) {
		var peers []EgressPeer
		for j := range list {
			peers = append(peers, list[j].peer())
		}
		c.add(d, i, action, peers, oldPorts(ports))
	}
	for i, r := range p.Spec.Ingress {
		convert(policytable.Ingress, i, r.Action, r.From, r.Ports)
	}
	for i, r := range p.Spec.Egress {
		convert(policytable.Egress, i, r.Action, r.To, r.Ports)
	}
	return c.spec
}

func oldPorts(list []OldPort) []rule.Port {
	protocol := func(name string) port.Protocol {
		if p, ok := port.ParseProtocol(name); ok {
			return p
		}
		return port.TCP
	}
	var out []rule.Port
	for _, p := range list {
		switch {
		case p.PortNumber != nil:
			n := uint16(p.PortNumber.Port)
			out = append(out, rule.Port{Range: port.Ports(protocol(p.PortNumber.Protocol), n, n)})
		case p.PortRange != nil:
			out = append(out, rule.Port{Range: port.Ports(protocol(p.PortRange.Protocol), uint16(p.PortRange.Start), uint16(p.PortRange.End))})
		default:
			out = append(out, rule.Port{Name: *p.NamedPort})
		}
	}
	return out
}
