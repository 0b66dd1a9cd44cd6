// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cilium

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/kit/nearest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/selector"
)

// Entities that policies may refer to.
const (
	EntityAll           = "all"
	EntityWorld         = "world"
	EntityWorldIPv4     = "world-ipv4"
	EntityWorldIPv6     = "world-ipv6"
	EntityCluster       = "cluster"
	EntityClusterMesh   = "cluster-mesh"
	EntityHost          = "host"
	EntityInit          = "init"
	EntityIngress       = "ingress"
	EntityUnmanaged     = "unmanaged"
	EntityRemoteNode    = "remote-node"
	EntityHealth        = "health"
	EntityNone          = "none"
	EntityKubeAPIServer = "kube-apiserver"
)

// entities lists the valid entities.
var entities = []string{
	EntityAll, EntityWorld, EntityWorldIPv4, EntityWorldIPv6, EntityCluster, EntityClusterMesh, EntityHost, EntityInit,
	EntityIngress, EntityUnmanaged, EntityRemoteNode, EntityHealth, EntityNone, EntityKubeAPIServer,
}

func knownEntity(e string) bool { return slices.Contains(entities, e) }

// entityHint returns the entity that a misspelt one probably means, or else the list of all valid ones.
func entityHint(e string) string {
	if hint := nearest.Hint(e, entities); hint != "" {
		return hint
	}
	named := slices.DeleteFunc(slices.Clone(entities), func(e string) bool {
		return e == EntityWorldIPv4 || e == EntityWorldIPv6
	})
	return "; the entities are " + strings.Join(named, ", ")
}

func reserved(name string) selector.Selector {
	return selector.New(selector.Requirement{Source: label.SourceReserved, Key: name, Op: selector.Exists})
}

// entity adds the peers of an entity.
func entity(out *rule.Peers, e string, o rule.Options) {
	add := func(names ...string) {
		for _, n := range names {
			out.Selectors = append(out.Selectors, reserved(n))
		}
	}
	switch e {
	case EntityAll:
		out.Any = true
	case EntityWorld:
		add(identity.NameWorld, identity.NameWorldIPv4, identity.NameWorldIPv6)
	case EntityCluster, EntityClusterMesh:
		add(identity.NameHost, identity.NameRemoteNode, identity.NameInit, identity.NameIngress,
			identity.NameHealth, identity.NameUnmanaged, identity.NameKubeAPIServer)
		pods := networkpolicy.InCluster(o.Cluster)
		if e == EntityClusterMesh { // this is true in every cluster
			pods = selector.Requirement{Source: label.SourceKubernetes, Key: label.KeyCluster, Op: selector.Exists}
		}
		out.Selectors = append(out.Selectors, selector.New(pods))
	default:
		add(e)
	}
}

// Rules converts a valid policy. A namespaced policy selects and matches pods of its own namespace by default.
func (p *NetworkPolicy) Rules(namespaced bool, o rule.Options) []rule.Spec {
	c := p.converter(namespaced)
	c.options = o
	var specs []rule.Spec
	if p.Spec != nil {
		specs = append(specs, c.rule("spec", p.Spec))
	}
	for i := range p.Specs {
		specs = append(specs, c.rule("specs["+strconv.Itoa(i)+"]", &p.Specs[i]))
	}
	return specs
}

type converter struct {
	options   rule.Options
	source    policytable.Source
	namespace string // empty for a cluster-wide policy
	// init is set if the selector of the subject refers to the label reserved:init, which pods have while their
	// labels are unknown. Peers then need not be in a namespace.
	init bool
}

func (p *NetworkPolicy) converter(namespaced bool) converter {
	c := converter{source: policytable.Source{Kind: "CiliumClusterwideNetworkPolicy", Name: p.Metadata.Name}}
	if namespaced {
		c.source.Kind = "CiliumNetworkPolicy"
		c.source.Namespace = p.Metadata.Namespace
		c.namespace = p.Metadata.Namespace
	}
	return c
}

// Isolate returns the rules for a policy that cannot be converted: the pods that it selects get no traffic in the
// directions that have rules. bad reports whether a path has a problem. If the selector has one, all pods of the
// namespace are selected, or all pods for a cluster-wide policy. No other policy can allow the traffic that these rules
// deny.
func (p *NetworkPolicy) Isolate(namespaced bool, bad func(path string) bool) []rule.Spec {
	c := p.converter(namespaced)
	var specs []rule.Spec
	one := func(path string, r *Rule) {
		if r.NodeSelector != nil && r.EndpointSelector == nil && !bad(path+".endpointSelector") {
			return // the policy selects nodes, and no pods
		}
		spec := rule.Spec{Namespace: c.namespace}
		var selected *networkpolicy.LabelSelector
		if r.EndpointSelector.Usable(path+".endpointSelector", true, bad) {
			selected = r.EndpointSelector
		}
		spec.Subject = c.subject(selected)
		tier := policytable.Isolation
		denies := len(r.IngressDeny)+len(r.EgressDeny) > 0
		if denies || bad(path+".ingressDeny") || bad(path+".egressDeny") {
			tier = policytable.Normal
		}
		in := len(r.Ingress)+len(r.IngressDeny) > 0 || bad(path+".ingress") || bad(path+".ingressDeny")
		out := len(r.Egress)+len(r.EgressDeny) > 0 || bad(path+".egress") || bad(path+".egressDeny")
		for i, has := range [2]bool{policytable.Ingress: in, policytable.Egress: out} {
			d := policytable.Direction(i)
			if has || !in && !out {
				spec.Selects[d], spec.DefaultDeny[d] = true, true
				spec.Rules = append(spec.Rules, rule.Isolate(c.source, d, tier, 0))
			}
		}
		specs = append(specs, spec)
	}
	if p.Spec != nil || bad("spec") && p.Specs == nil {
		spec := p.Spec
		if spec == nil {
			spec = &Rule{}
		}
		one("spec", spec)
	}
	for i := range p.Specs {
		one("specs["+strconv.Itoa(i)+"]", &p.Specs[i])
	}
	if p.Specs == nil && bad("specs") {
		one("specs", &Rule{})
	}
	return specs
}

// place returns the source and the key of a key in a selector. A key without a source matches labels of every source.
func place(key string) (string, string) { return networkpolicy.SplitSource(key) }

// subject selects endpoints, in the namespace of the policy if it has one.
func (c *converter) subject(s *networkpolicy.LabelSelector) selector.Selector {
	if c.namespace == "" {
		return selector.New(s.Convert(place)...)
	}
	// The policy's own namespace replaces a namespace in matchLabels. A namespace in matchExpressions is an
	// additional requirement: if it differs, the selector matches no pods.
	reqs := s.Without(label.SourceKubernetes + ":" + label.KeyNamespace).Convert(place)
	return selector.New(append(reqs, networkpolicy.InNamespace(c.namespace))...)
}

func (c *converter) rule(path string, r *Rule) rule.Spec {
	spec := rule.Spec{Host: r.NodeSelector != nil}
	if spec.Host {
		reqs := r.NodeSelector.Convert(place)
		reqs = append(reqs, selector.Requirement{Source: label.SourceReserved, Key: identity.NameHost, Op: selector.Exists})
		spec.Subject = selector.New(reqs...)
	} else {
		spec.Namespace, spec.Subject = c.namespace, c.subject(r.EndpointSelector)
	}
	c.init = r.EndpointSelector.Names(label.SourceReserved + ":" + identity.NameInit)

	for i := range r.Ingress {
		in := &r.Ingress[i]
		p := path + ".ingress[" + strconv.Itoa(i) + "]"
		if in.Authentication.asked() {
			continue // an unauthenticated peer must not be allowed
		}
		c.rules(&spec, policytable.Ingress, false, p, c.ingressPeers(&in.IngressPeers, false), in.ToPorts, in.ICMPs)
	}
	for i := range r.IngressDeny {
		in := &r.IngressDeny[i]
		p := path + ".ingressDeny[" + strconv.Itoa(i) + "]"
		c.rules(&spec, policytable.Ingress, true, p, c.ingressPeers(&in.IngressPeers, true).widen(len(in.FromGroups) > 0), denyPorts(in.ToPorts), in.ICMPs)
	}
	for i := range r.Egress {
		eg := &r.Egress[i]
		p := path + ".egress[" + strconv.Itoa(i) + "]"
		if eg.Authentication.asked() {
			continue
		}
		if spec.Names == "" && len(eg.ToFQDNs) > 0 {
			spec.Names = p + ".toFQDNs"
		}
		spec.HasDNSRule = spec.HasDNSRule || slices.ContainsFunc(eg.ToPorts, func(r PortRule) bool {
			return r.Rules != nil && len(r.Rules.DNS) > 0
		})
		c.rules(&spec, policytable.Egress, false, p, c.egressPeers(&eg.EgressPeers, eg.ToFQDNs, false), eg.ToPorts, eg.ICMPs)
	}
	for i := range r.EgressDeny {
		eg := &r.EgressDeny[i]
		p := path + ".egressDeny[" + strconv.Itoa(i) + "]"
		c.rules(&spec, policytable.Egress, true, p, c.egressPeers(&eg.EgressPeers, nil, true).widen(len(eg.ToServices)+len(eg.ToGroups) > 0), denyPorts(eg.ToPorts), eg.ICMPs)
	}
	spec.Selects[policytable.Ingress] = len(r.Ingress)+len(r.IngressDeny) > 0
	spec.Selects[policytable.Egress] = len(r.Egress)+len(r.EgressDeny) > 0
	spec.DefaultDeny = spec.Selects
	if b := r.EnableDefaultDeny.Ingress; b != nil {
		spec.DefaultDeny[policytable.Ingress] = *b
	}
	if b := r.EnableDefaultDeny.Egress; b != nil {
		spec.DefaultDeny[policytable.Egress] = *b
	}
	return spec
}

// peers contains the peers of a list, and whether the manifest has the list. A missing list matches every peer; an
// empty list matches none.
type peers struct {
	rule.Peers
	present bool
}

// widen returns the peers to which a rule applies if some peers are of an unsupported kind. A deny rule then applies to
// all peers, because it cannot be limited to the unsupported ones. In an allow rule, unsupported peers match nothing.
func (p peers) widen(unknown bool) peers {
	if unknown {
		return peers{Peers: rule.Peers{Any: true}, present: true}
	}
	return p
}

func (c *converter) ingressPeers(p *IngressPeers, deny bool) peers {
	var out peers
	c.endpoints(&out, p.FromEndpoints)
	c.cidrs(&out, p.FromCIDR)
	c.cidrSet(&out, p.FromCIDRSet)
	c.entities(&out, p.FromEntities)
	c.nodes(&out, p.FromNodes, deny)
	out.present = out.present || p.FromGroups != nil
	return out
}

func (c *converter) egressPeers(p *EgressPeers, fqdns []FQDN, deny bool) peers {
	var out peers
	c.endpoints(&out, p.ToEndpoints)
	c.cidrs(&out, p.ToCIDR)
	c.cidrSet(&out, p.ToCIDRSet)
	c.entities(&out, p.ToEntities)
	c.nodes(&out, p.ToNodes, deny)
	out.present = out.present || p.ToGroups != nil || p.ToServices != nil || fqdns != nil
	for _, f := range fqdns {
		out.Names = append(out.Names, c.names(f)...)
	}
	return out
}

func (c *converter) names(f FQDN) []rule.NamePeer {
	var out []rule.NamePeer
	for _, p := range patterns(f) {
		out = append(out, rule.NamePeer{Pattern: p, Reach: c.reach(128)})
	}
	return out
}

// endpoints adds selectors of endpoints. To each it adds the requirements that the manifest implies: that the peer is
// in the policy's namespace (in any namespace for a cluster-wide policy), and in this cluster. A requirement is omitted
// if the selector itself refers to its label. Both are omitted if the selector contains a reserved label.
func (c *converter) endpoints(out *peers, list []networkpolicy.LabelSelector) {
	out.present = out.present || list != nil
	for i := range list {
		reqs := list[i].Convert(place)
		names := func(match func(source, key string) bool) bool {
			return slices.ContainsFunc(reqs, func(q selector.Requirement) bool { return match(q.Source, q.Key) })
		}
		if !names(func(source, _ string) bool { return source == label.SourceReserved }) {
			own := func(source, key, want string) bool {
				return key == want && (source == "" || source == label.SourceKubernetes)
			}
			if !names(func(s, k string) bool { return own(s, k, label.KeyNamespace) }) {
				byLabels := names(func(s, k string) bool {
					return len(k) >= len(label.KeyNamespaceLabels) && own(s, k[:len(label.KeyNamespaceLabels)], label.KeyNamespaceLabels)
				})
				switch {
				case c.namespace == "" && !c.init:
					reqs = append(reqs, networkpolicy.InSomeNamespace())
				case c.namespace != "" && !byLabels:
					reqs = append(reqs, networkpolicy.InNamespace(c.namespace))
				}
			}
			if c.options.LocalClusterOnly && !names(func(s, k string) bool { return own(s, k, label.KeyCluster) }) {
				reqs = append(reqs, networkpolicy.InCluster(c.options.Cluster))
			}
		}
		if len(reqs) == 0 {
			out.Any = true
			continue
		}
		out.Selectors = append(out.Selectors, selector.New(reqs...))
	}
}

// nodes selects nodes by the labels of their Node objects.
func (c *converter) nodes(out *peers, list []networkpolicy.LabelSelector, deny bool) {
	out.present = out.present || list != nil
	for i := range list {
		reqs := list[i].Convert(func(key string) (string, string) {
			if source, rest := networkpolicy.SplitSource(key); source != "" {
				return source, rest
			}
			return label.SourceNode, key
		})
		action := policytable.Allow
		if deny {
			action = policytable.Deny
		}
		out.Selectors = append(out.Selectors, rule.Nodes(identity.NameRemoteNode, reqs, action)...)
	}
}

// reach returns the reach of a prefix with that many bits: the world and, depending on an option, nodes. The prefixes
// 0.0.0.0/0 and ::/0 never match nodes.
func (c *converter) reach(bits int) rule.Reach {
	if c.options.CIDRSelectsNodes && bits > 0 {
		return rule.ReachOutside | rule.ReachNode
	}
	return rule.ReachOutside
}

func (c *converter) cidrs(out *peers, list []string) {
	out.present = out.present || list != nil
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			a, err := netip.ParseAddr(s)
			if err != nil {
				continue // Validate has rejected it
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		p = networkpolicy.Unmap(p).Masked()
		out.Networks = append(out.Networks, rule.Network{Prefix: p, Reach: c.reach(p.Bits())})
	}
}

func (c *converter) cidrSet(out *peers, list []CIDRRule) {
	out.present = out.present || list != nil
	for _, r := range list {
		var except []netip.Prefix
		for _, e := range r.Except {
			except = append(except, networkpolicy.Unmap(netip.MustParsePrefix(e)).Masked())
		}
		switch {
		case r.CIDRGroupRef != "":
			out.Groups = append(out.Groups, rule.GroupPeer{
				Selector: selector.New(selector.Requirement{
					Source: label.SourceCIDRGroup, Key: label.KeyCIDRGroupName + r.CIDRGroupRef, Op: selector.Exists,
				}),
				Except: except, NodesToo: c.options.CIDRSelectsNodes,
			})
		case r.CIDRGroupSelector != nil:
			out.Groups = append(out.Groups, rule.GroupPeer{
				Selector: selector.New(r.CIDRGroupSelector.Requirements(label.SourceCIDRGroup, "")...),
				Except:   except, NodesToo: c.options.CIDRSelectsNodes,
			})
		default:
			p := networkpolicy.Unmap(netip.MustParsePrefix(r.CIDR)).Masked()
			out.Networks = append(out.Networks, rule.Network{Prefix: p, Except: except, Reach: c.reach(p.Bits())})
		}
	}
}

func (c *converter) entities(out *peers, list []string) {
	out.present = out.present || list != nil
	seen := make(map[string]bool) // a manifest may list several entities with the same selector
	for _, e := range list {
		if !seen[e] {
			seen[e] = true
			entity(&out.Peers, e, c.options)
		}
	}
}

// rules converts one rule of the manifest to rules with one effect each: its port entries may have different effects.
// An empty rule, and a rule whose lists select nothing, adds no rules and only switches its direction to default deny.
func (c *converter) rules(spec *rule.Spec, d policytable.Direction, deny bool, path string, p peers, ports []PortRule, icmps []ICMPRule) {
	if !p.present {
		if len(ports) == 0 && len(icmps) == 0 {
			return // {} allows nothing and denies nothing
		}
		p.Any = true
	}
	if p.Nobody() {
		return
	}
	digest := p.Digest()
	add := func(path string, in *PortRule, list []rule.Port, all bool) {
		if !all && len(list) == 0 {
			return
		}
		r := &rule.Rule{
			Source: c.source, Direction: d, Tier: policytable.Normal, Action: policytable.Allow,
			Peers: p.Peers, Ports: list, AllPorts: all,
		}
		switch {
		case deny:
			r.Action = policytable.Deny
		case in != nil:
			r.Action, r.Proxy = layer7Action(in, c.options)
			if r.Action == policytable.Redirect {
				r.Layer7 = layer7Rules(in)
			}
		}
		r.Source.Path = path
		spec.Rules = append(spec.Rules, r.SealWith(digest))
	}
	switch {
	case len(icmps) > 0:
		for i, r := range icmps {
			var list []rule.Port
			for _, f := range r.Fields {
				list = append(list, icmpPorts(f)...)
			}
			add(path+".icmps["+strconv.Itoa(i)+"]", nil, list, false)
		}
	case len(ports) == 0:
		add(path, nil, nil, true)
	default:
		for i := range ports {
			var list []rule.Port
			for _, pp := range ports[i].Ports {
				list = append(list, convertPort(pp)...)
			}
			add(path+".toPorts["+strconv.Itoa(i)+"]", &ports[i], list, false)
		}
	}
}

// convertPort converts an entry to port ranges. Port 0 means all ports of the protocol, and endPort is then ignored. It
// is also ignored if it is lower than the port, or if the port is a name.
func convertPort(pp PortProtocol) []rule.Port {
	name := ""
	if pp.Protocol != nil {
		name = *pp.Protocol
	}
	protos := protocols(name)
	number, named, _ := parsePort(pp.Port)
	if named {
		p := rule.Port{Name: pp.Port, FoldCase: true}
		if len(protos) == 1 {
			p.Protocol = protos[0]
		}
		return []rule.Port{p}
	}
	var out []rule.Port
	for _, proto := range protos {
		switch {
		case number == 0 || !proto.HasPorts():
			out = append(out, rule.Port{Range: port.Whole(proto)})
		case pp.EndPort > int64(number):
			out = append(out, rule.Port{Range: port.Ports(proto, number, uint16(min(pp.EndPort, 65535)))})
		default:
			out = append(out, rule.Port{Range: port.Ports(proto, number, number)})
		}
	}
	return out
}

var icmpNames = map[string]map[string]uint8{
	"IPv4": {
		"EchoReply": 0, "DestinationUnreachable": 3, "Redirect": 5, "Echo": 8, "EchoRequest": 8, "RouterAdvertisement": 9,
		"RouterSelection": 10, "TimeExceeded": 11, "ParameterProblem": 12, "Timestamp": 13, "TimestampReply": 14, "Photuris": 40,
		"ExtendedEchoRequest": 42, "ExtendedEcho Request": 42, "ExtendedEchoReply": 43, "ExtendedEcho Reply": 43,
	},
	"IPv6": {
		"DestinationUnreachable": 1, "PacketTooBig": 2, "TimeExceeded": 3, "ParameterProblem": 4, "EchoRequest": 128, "EchoReply": 129,
		"MulticastListenerQuery": 130, "MulticastListenerReport": 131, "MulticastListenerDone": 132, "RouterSolicitation": 133,
		"RouterAdvertisement": 134, "NeighborSolicitation": 135, "NeighborAdvertisement": 136, "RedirectMessage": 137,
		"RouterRenumbering": 138, "ICMPNodeInformationQuery": 139, "ICMPNodeInformationResponse": 140,
		"InverseNeighborDiscoverySolicitation": 141, "InverseNeighborDiscoveryAdvertisement": 142,
		"HomeAgentAddressDiscoveryRequest": 144, "HomeAgentAddressDiscoveryReply": 145, "MobilePrefixSolicitation": 146,
		"MobilePrefixAdvertisement": 147, "DuplicateAddressRequestCodeSuffix": 157, "DuplicateAddressConfirmationCodeSuffix": 158,
		"ExtendedEchoRequest": 160, "ExtendedEchoReply": 161,
	},
}

func icmpFamily(f ICMPField) string {
	if f.Family == nil {
		return "IPv4"
	}
	return *f.Family
}

// icmpType returns the number of an ICMP type. It returns false if no packet can have the type.
func icmpType(f ICMPField) (uint8, bool) {
	if !f.Type.IsString {
		return uint8(f.Type.Int), 0 <= f.Type.Int && f.Type.Int <= 255
	}
	if n, err := strconv.ParseUint(f.Type.String, 10, 8); err == nil {
		return uint8(n), true
	}
	n, ok := icmpNames[icmpFamily(f)][f.Type.String]
	return n, ok
}

// icmpPorts returns the range of a type. Type 0 means every type, because it is written as port 0, which means every
// port.
func icmpPorts(f ICMPField) []rule.Port {
	proto := port.ICMP
	if icmpFamily(f) == "IPv6" {
		proto = port.ICMPv6
	}
	typ, ok := icmpType(f)
	switch {
	case !ok:
		return nil
	case typ == 0:
		return []rule.Port{{Range: port.Whole(proto)}}
	}
	return []rule.Port{{Range: port.ICMPType(proto, typ)}}
}

// Group returns the address group to which rules refer.
func (g *CIDRGroup) Group() (name string, labels label.Set, prefixes []netip.Prefix) {
	ls := []label.Label{{Source: label.SourceCIDRGroup, Key: label.KeyCIDRGroupName + g.Metadata.Name}}
	for k, v := range g.Metadata.Labels {
		ls = append(ls, label.Label{Source: label.SourceCIDRGroup, Key: k, Value: v})
	}
	for _, s := range g.Spec.ExternalCIDRs {
		prefixes = append(prefixes, networkpolicy.Unmap(netip.MustParsePrefix(s)).Masked())
	}
	return g.Metadata.Name, label.NewSet(ls...), prefixes
}
