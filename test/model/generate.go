// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Namespaces of pods, and their labels with the possible values.
var (
	Namespaces = []string{"test", "other"}
	values     = map[string][]string{"app": {"a", "b", "c"}, "tier": {"x", "y"}}
	keys       = slices.Sorted(maps.Keys(values))
)

// Ports on which every pod, every host and the outsider serve, and the names that pods give to some of them.
var (
	Ports     = []uint16{8080, 8081, 9090}
	portNames = []string{"web", "dns", "data"}
)

// Generator generates the objects and questions of one round. Its results depend on the seed, the round and the
// sequence of calls, but not on addresses.
type Generator struct {
	*rand.Rand
	asked int
}

// NewGenerator returns the generator of a round.
func NewGenerator(seed, round uint64) *Generator {
	return &Generator{Rand: rand.New(rand.NewPCG(seed, round))} //nolint:gosec // repeatable on purpose
}

// often is true with a probability in percent.
func (g *Generator) often(percent int) bool { return g.IntN(100) < percent }

func pick[T any](g *Generator, from []T) T { return from[g.IntN(len(from))] }

// some picks n different elements of a list.
func some[T any](g *Generator, from []T, n int) []T {
	from = slices.Clone(from)
	g.Shuffle(len(from), func(i, k int) { from[i], from[k] = from[k], from[i] })
	return from[:min(n, len(from))]
}

// Labels generates labels of a pod.
func (g *Generator) Labels() map[string]string {
	labels := map[string]string{}
	for _, k := range keys {
		labels[k] = pick(g, values[k])
	}
	return labels
}

// protocol is SCTP less often than TCP or UDP.
func (g *Generator) protocol() corev1.Protocol {
	return pick(g, []corev1.Protocol{
		corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolUDP, corev1.ProtocolSCTP,
	})
}

// NamedPorts generates named ports of a pod. A pod may lack a name, and a name may have several ports.
func (g *Generator) NamedPorts() (all []NamedPort) {
	for _, name := range portNames {
		for range g.IntN(4) {
			if p := (NamedPort{name, g.protocol(), pick(g, Ports)}); !slices.Contains(all, p) {
				all = append(all, p)
			}
		}
	}
	return all
}

// Relabel changes one label of a pod and returns it.
func (g *Generator) Relabel(p *Pod) (key, value string) {
	key = pick(g, keys)
	value = pick(g, values[key])
	labels := maps.Clone(p.Labels)
	labels[key] = value
	p.Labels = labels
	return key, value
}

func (g *Generator) selector() metav1.LabelSelector {
	var s metav1.LabelSelector
	if g.often(25) {
		return s
	}
	for _, k := range some(g, keys, 1+g.IntN(2)) {
		if g.often(60) {
			if s.MatchLabels == nil {
				s.MatchLabels = map[string]string{}
			}
			s.MatchLabels[k] = pick(g, values[k])
			continue
		}
		r := metav1.LabelSelectorRequirement{Key: k}
		switch g.IntN(6) {
		case 0, 1:
			r.Operator, r.Values = metav1.LabelSelectorOpIn, some(g, values[k], 1+g.IntN(2))
		case 2, 3:
			r.Operator, r.Values = metav1.LabelSelectorOpNotIn, some(g, values[k], 1)
		case 4:
			r.Operator = metav1.LabelSelectorOpExists
		default:
			r.Key, r.Operator = pick(g, []string{k, "absent"}), metav1.LabelSelectorOpDoesNotExist
		}
		s.MatchExpressions = append(s.MatchExpressions, r)
	}
	return s
}

// block generates a CIDR with exceptions.
func (g *Generator) block(w *World) (cidr string, except []string) {
	f := Family(g.IntN(2))
	bits := [...]int{32, 128}[f]
	one := func(a netip.Addr) string { return netip.PrefixFrom(a, bits).String() }
	outsider, p := pick(g, w.Outsider.Addresses)[f], pick(g, w.Pods)
	node := pick(g, w.Nodes)
	network := netip.PrefixFrom(node.Addresses[f], [...]int{24, 64}[f]).Masked()
	all := netip.PrefixFrom([...]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[f], 0).String()
	switch g.IntN(9) {
	case 0, 1:
		return one(outsider), nil
	case 2:
		return network.String(), nil
	case 3:
		return network.String(), []string{one(outsider)}
	case 4:
		return all, nil
	case 5:
		return all, []string{network.String()}
	case 6:
		return p.Node.Range[f].String(), []string{one(p.Addresses[f])}
	case 7:
		return one(p.Addresses[f]), nil
	default:
		return all, []string{one(outsider), p.Node.Range[f].String()}
	}
}

func (g *Generator) networkPeers(w *World) (peers []networkingv1.NetworkPolicyPeer) {
	if g.often(12) {
		return nil
	}
	for range 1 + g.IntN(3) {
		var p networkingv1.NetworkPolicyPeer
		if g.often(40) {
			cidr, except := g.block(w)
			p.IPBlock = &networkingv1.IPBlock{CIDR: cidr, Except: except}
			peers = append(peers, p)
			continue
		}
		s := g.selector()
		switch g.IntN(3) {
		case 0:
			p.PodSelector = &s
		case 1:
			p.PodSelector = &s
			p.NamespaceSelector = g.namespaceSelector()
		default:
			p.NamespaceSelector = g.namespaceSelector()
		}
		peers = append(peers, p)
	}
	return peers
}

func (g *Generator) namespaceSelector() *metav1.LabelSelector {
	if g.often(30) {
		return &metav1.LabelSelector{}
	}
	return &metav1.LabelSelector{MatchLabels: map[string]string{namespaceLabel: pick(g, Namespaces)}}
}

// portRange generates a port or a range of ports.
func (g *Generator) portRange() (first, last int32) {
	switch g.IntN(8) {
	case 0:
		return 8080, 8081
	case 1:
		return 8081, 10000
	case 2:
		return 1, 65535
	case 3:
		return 30000, 32767 // node ports
	default:
		p := int32(pick(g, Ports))
		return p, p
	}
}

func (g *Generator) networkPorts() (ports []networkingv1.NetworkPolicyPort) {
	if g.often(35) {
		return nil
	}
	for range 1 + g.IntN(3) {
		proto := g.protocol()
		p := networkingv1.NetworkPolicyPort{Protocol: &proto}
		if g.often(10) {
			p.Protocol = nil
		}
		if g.often(35) {
			port := intstr.FromString(pick(g, portNames))
			p.Port = &port
		} else if !g.often(15) {
			first, last := g.portRange()
			port := intstr.FromInt32(first)
			p.Port = &port
			if last != first {
				p.EndPort = &last
			}
		}
		ports = append(ports, p)
	}
	return ports
}

// NewPolicies generates policies of both kinds.
func (g *Generator) NewPolicies(w *World) (p Policies) {
	for i := range g.IntN(7) {
		n := networkingv1.NetworkPolicy{
			TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("np-%d", i), Namespace: pick(g, Namespaces)},
			Spec:       networkingv1.NetworkPolicySpec{PodSelector: g.selector()},
		}
		if g.often(75) {
			n.Spec.PolicyTypes = append(n.Spec.PolicyTypes, networkingv1.PolicyTypeIngress)
			for range g.IntN(4) {
				n.Spec.Ingress = append(n.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{
					From: g.networkPeers(w), Ports: g.networkPorts(),
				})
			}
		}
		if g.often(35) || len(n.Spec.PolicyTypes) == 0 {
			n.Spec.PolicyTypes = append(n.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
			for range g.IntN(4) {
				n.Spec.Egress = append(n.Spec.Egress, networkingv1.NetworkPolicyEgressRule{
					To: g.networkPeers(w), Ports: g.networkPorts(),
				})
			}
		}
		p.Network = append(p.Network, n)
	}
	for i := range g.IntN(7) {
		c := CiliumNetworkPolicy{
			TypeMeta:   metav1.TypeMeta{APIVersion: "cilium.io/v2", Kind: "CiliumNetworkPolicy"},
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("cnp-%d", i), Namespace: pick(g, Namespaces)},
			Spec:       CiliumSpec{EndpointSelector: g.selector()},
		}
		if g.often(70) {
			c.Spec.Ingress = g.ciliumRules(w, Ingress, 1+g.IntN(3))
		}
		if g.often(40) {
			c.Spec.IngressDeny = g.ciliumRules(w, Ingress, 1)
		}
		if g.often(35) {
			c.Spec.Egress = g.ciliumRules(w, Egress, 1+g.IntN(3))
		}
		if g.often(25) || len(c.Spec.Ingress)+len(c.Spec.IngressDeny)+len(c.Spec.Egress) == 0 {
			c.Spec.EgressDeny = g.ciliumRules(w, Egress, 1)
		}
		// Without an allow rule for the same pods, default deny hides what a deny rule does.
		if everything := []string{entityAll}; g.often(60) {
			if len(c.Spec.IngressDeny) > 0 {
				c.Spec.Ingress = append(c.Spec.Ingress, CiliumRule{FromEntities: everything})
			}
			if len(c.Spec.EgressDeny) > 0 {
				c.Spec.Egress = append(c.Spec.Egress, CiliumRule{ToEntities: everything})
			}
		}
		if g.often(25) {
			c.Spec.EnableDefaultDeny = &DefaultDeny{}
			if g.often(60) {
				on := g.often(40)
				c.Spec.EnableDefaultDeny.Ingress = &on
			}
			if g.often(40) {
				on := g.often(40)
				c.Spec.EnableDefaultDeny.Egress = &on
			}
		}
		p.Cilium = append(p.Cilium, c)
	}
	return p
}

func (g *Generator) ciliumRules(w *World, d Direction, n int) (rules []CiliumRule) {
	for range n {
		var r CiliumRule
		endpoints, entities, cidrs, sets := &r.FromEndpoints, &r.FromEntities, &r.FromCIDR, &r.FromCIDRSet
		if d == Egress {
			endpoints, entities, cidrs, sets = &r.ToEndpoints, &r.ToEntities, &r.ToCIDR, &r.ToCIDRSet
		}
		wildcard := false
		switch g.IntN(10) {
		case 0, 1, 2, 3:
			for range 1 + g.IntN(2) {
				s := g.selector()
				if g.often(35) {
					s.MatchLabels = maps.Clone(s.MatchLabels)
					if s.MatchLabels == nil {
						s.MatchLabels = map[string]string{}
					}
					s.MatchLabels[podNamespace] = pick(g, Namespaces)
				}
				*endpoints = append(*endpoints, s)
			}
		case 4, 5:
			*entities = some(g, []string{
				entityAll, entityWorld, entityWorld, entityCluster, entityHost, entityRemoteNode, entityUnmanaged, entityHealth,
			}, 1+g.IntN(2))
		case 6:
			cidr, _ := g.block(w)
			*cidrs = []string{cidr}
		case 7, 8:
			for range 1 + g.IntN(2) {
				cidr, except := g.block(w)
				for except == nil && g.often(70) {
					cidr, except = g.block(w)
				}
				*sets = append(*sets, CIDRRule{CIDR: cidr, Except: except})
			}
		default:
			wildcard = true
		}
		if g.often(20) {
			r.ICMPs = []ICMPRule{{Fields: g.typesOfICMP()}}
		} else if wildcard || g.often(55) {
			var ports []PortProtocol
			for range 1 + g.IntN(3) {
				p := PortProtocol{Port: "0", Protocol: pick(g, []string{string(g.protocol()), "ANY"})}
				if g.often(35) {
					p.Port = pick(g, portNames)
				} else if !g.often(15) {
					first, last := g.portRange()
					p.Port = fmt.Sprint(first)
					if last != first {
						p.EndPort = last
					}
				}
				ports = append(ports, p)
			}
			r.ToPorts = []PortRule{{Ports: ports}}
		}
		rules = append(rules, r)
	}
	return rules
}

func (g *Generator) typesOfICMP() (fields []ICMPField) {
	for range 1 + g.IntN(2) {
		f := ICMPField{Family: pick(g, []string{"", "IPv4", "IPv6", "IPv6"})}
		request := intstr.FromInt32(EchoRequest)
		if f.Family == "IPv6" {
			request = intstr.FromInt32(EchoRequestV6)
		}
		kind := pick(g, []intstr.IntOrString{
			request, request, intstr.FromString("EchoRequest"), intstr.FromInt32(0), intstr.FromInt32(3),
		})
		f.Type = &kind
		fields = append(fields, f)
	}
	return fields
}

// NewServices generates Services with pods as backends.
func (g *Generator) NewServices(w *World) (all []*Service) {
	numbers := make([]int, maxServices)
	for i := range numbers {
		numbers[i] = i + 1
	}
	for _, n := range some(g, numbers, 6) {
		s := &Service{
			Name: fmt.Sprintf("s%d", n), Number: n, Port: pick(g, []uint16{80, 53, 9090}), Target: pick(g, Ports),
			Families: pick(g, [][]Family{{IPv4}, {IPv6}, {IPv4, IPv6}, {IPv4, IPv6}}), Local: g.often(30),
		}
		if g.often(25) {
			a := pick(g, w.Outsider.Addresses)
			s.SourceRanges = pick(g, [][]string{
				{a[IPv4].String() + "/32", a[IPv6].String() + "/128"},
				{"203.0.113.0/24", "2001:db8:1::/64"},
				{"0.0.0.0/0", "::/0"},
				{"0.0.0.0/1", "::/1"},
				{netip.PrefixFrom(a[IPv4], 24).Masked().String()},
			})
		}
		g.MoveEndpoints(w, s)
		all = append(all, s)
	}
	return all
}

// MoveEndpoints replaces the backends of a Service.
func (g *Generator) MoveEndpoints(w *World, s *Service) {
	pods := some(g, w.Pods, len(w.Pods))
	n := pick(g, []int{0, 1, 1, 1, 1, 1, 2, 3})
	s.Backends, s.NotServing = pods[:n], nil
	if g.often(20) {
		s.NotServing = pods[n : n+1]
	}
}

// NewQuestion generates a question.
func (g *Generator) NewQuestion(w *World) *Question {
	for {
		if q := g.question(w); q != nil {
			g.asked++
			q.ID = fmt.Sprintf("%08x-%d", g.Uint32(), g.asked)
			return q
		}
	}
}

// Source ports are above the node ports.
const (
	firstSourcePort = 33000
	sourcePorts     = 65000 - firstSourcePort
)

func (g *Generator) question(w *World) *Question {
	f := Family(g.IntN(2))
	q := &Question{Proto: pick(g, []corev1.Protocol{
		corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolTCP,
		corev1.ProtocolUDP, corev1.ProtocolUDP, corev1.ProtocolUDP, corev1.ProtocolUDP,
		corev1.ProtocolSCTP, [...]corev1.Protocol{ICMP, ICMPv6}[f],
		[...]corev1.Protocol{ICMP, ICMPv6}[f],
	})}
	var own Pair
	switch n := g.IntN(10); {
	case n < 5:
		q.From.Pod = pick(g, w.Pods)
		own = q.From.Pod.Addresses
	case n < 8:
		own = pick(g, w.Outsider.Addresses)
	default:
		q.From.Host = pick(g, w.Nodes)
	}
	q.Source = netip.AddrPortFrom(own[f], uint16(firstSourcePort+g.IntN(sourcePorts)))
	q.Node = pick(g, w.Nodes)
	q.Kind = pick(g, []Kind{
		ToPod, ToPod, ToPod, ToHost, ToOutsider, ToCluster, ToCluster, ToExternal, ToBalancer, ToNodePort, ToNodePort,
		ToHostPort,
	})
	q.Service = pick(g, w.Services)
	q.Pod = pick(g, w.Pods)
	port := pick(g, Ports)
	if IsEcho(q.Proto) {
		q.Kind, port = pick(g, []Kind{ToPod, ToPod, ToPod, ToHost, ToOutsider}), 0
	}
	// Questions to a node go to its uplink address, or from pods also to its address in the pod CIDR.
	at := q.Node.Addresses[f]
	if q.From.Pod != nil && g.often(20) {
		at = q.Node.Inside[f]
	}
	outsider := pick(g, w.Outsider.Addresses)[f]
	switch q.Kind {
	case ToPod:
		q.To, q.Service, q.Node = netip.AddrPortFrom(q.Pod.Addresses[f], port), nil, nil
		if q.From == (End{}) {
			q.Node = q.Pod.Node // the next hop
		}
	case ToHost:
		q.To, q.Service, q.Pod = netip.AddrPortFrom(at, port), nil, nil
	case ToOutsider:
		q.To, q.Service, q.Pod, q.Node = netip.AddrPortFrom(outsider, port), nil, nil, nil
		if q.From == (End{}) {
			return nil
		}
	case ToCluster:
		q.To, q.Pod = netip.AddrPortFrom(q.Service.ClusterIPs()[f], q.Service.Port), nil
	case ToExternal:
		q.To, q.Pod = netip.AddrPortFrom(q.Service.Externals()[f], q.Service.Port), nil
	case ToBalancer:
		q.To, q.Pod = netip.AddrPortFrom(q.Service.Balancers()[f], q.Service.Port), nil
	case ToNodePort:
		q.To, q.Pod = netip.AddrPortFrom(at, q.Service.NodePort()), nil
	case ToHostPort:
		if len(q.Pod.HostPorts) == 0 {
			return nil
		}
		q.To, q.Service = netip.AddrPortFrom(at, pick(g, q.Pod.HostPorts).Host), nil
	}
	if q.Service != nil && !slices.Contains(q.Service.Families, f) && !g.often(20) {
		return nil // a missing frontend; ask for it sometimes
	}
	if q.Proto == corev1.ProtocolSCTP {
		// SCTP of a host reaches no Service, and host ports are TCP and UDP.
		if q.Kind == ToHostPort || q.Service != nil && q.From.Host != nil {
			return nil
		}
	}
	g.way(w, q, f)
	if q.From == (End{}) && !q.Way.Frames && (q.Kind == ToCluster || q.Kind == ToExternal || q.Kind == ToBalancer) {
		q.Node = w.Nodes[0] // the next hop of the outsider's routes
	}
	if q.From != (End{}) && (q.Kind == ToCluster || q.Kind == ToExternal || q.Kind == ToBalancer) {
		q.Node = nil
	}
	return q
}

// way chooses how the client sends the question.
func (g *Generator) way(w *World, q *Question, f Family) {
	own := q.From.Pod != nil && q.From.Pod == q.Pod && q.Kind == ToPod // delivered by the pod's own stack
	if q.Proto == corev1.ProtocolUDP && q.From.Host == nil && !own && g.often(65) {
		q.Way.Frames = true
		if g.often(35) {
			q.Way.Fragments = 2 + g.IntN(2)
		}
		q.Way.NoChecksum = f == IPv4 && g.often(20)
		if g.often(15) {
			g.spoof(w, q, f)
		}
		return
	}
	if q.Proto == corev1.ProtocolTCP || q.Proto == corev1.ProtocolUDP {
		q.Way.Connected = g.often(50)
		q.Way.Mapped = f == IPv4 && g.often(25)
	}
	if q.Proto != corev1.ProtocolTCP && g.often(20) {
		q.Way.Size = pick(g, []int{1000, 3000, 6000}) // the latter two in fragments
	}
}

// spoof sets a source address that the sender does not have.
func (g *Generator) spoof(w *World, q *Question, f Family) {
	other := pick(g, w.Pods)
	var choices []netip.Addr
	add := func(a netip.Addr) {
		if a.IsValid() && a != q.Source.Addr() {
			choices = append(choices, a)
		}
	}
	if q.Kind == ToHost || q.Pod == other {
		return
	}
	add(other.Addresses[f])
	stranger := pick(g, []Pair{
		{netip.MustParseAddr("192.0.2.77"), netip.MustParseAddr("2001:db8:77::77")},
		{netip.MustParseAddr("198.18.0.9"), netip.MustParseAddr("2001:db8:9::9")},
	})
	add(stranger[f])
	if w.Gone != nil {
		add(w.Gone.Addresses[f])
		add(w.Gone.Addresses[f])
	}
	q.Way.Spoofed = pick(g, choices)
}
