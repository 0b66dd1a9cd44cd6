// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package model

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// hairpin is the source address of packets that a Service translates from a pod back to the same pod.
var hairpin = Pair{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fd73:6c75:6963:6500::1")}

// rulePort returns the value that port rules compare: the destination port, or the ICMP type.
func (q *Question) rulePort(port uint16) uint16 {
	switch q.Proto {
	case ICMP:
		return EchoRequest
	case ICMPv6:
		return EchoRequestV6
	}
	return port
}

// outcome is the result of a question for one possible server.
type outcome struct {
	server Server
	denied string // the side that denies; empty: it passes
	absent bool   // this sender cannot reach the server through the Service
}

// Expect returns the right answer to a question.
func (w *World) Expect(q *Question) Expectation {
	e := Expectation{NoAnswer: q.Way.Spoofed.IsValid()}
	var all []outcome
	var why string
	switch {
	case q.From.Pod != nil:
		all, why = w.ofPod(q)
	case q.From.Host != nil:
		all, why = w.ofHost(q)
	default:
		all, why = w.ofOutsider(q)
	}
	for _, o := range all {
		if o.denied == "" {
			e.Servers = append(e.Servers, o.server)
		} else {
			why = o.denied
		}
	}
	switch e.Why = why; {
	case len(e.Servers) == 0:
		e.MustDeny = true
	case len(e.Servers) == len(all):
		e.MustPass = true
	default:
		e.Why = "the answer depends on the chosen backend; " + why
	}
	if q.fromElsewhere(w) && !e.MustDeny {
		e.MustPass, e.Why = false, "the node's routes choose the address that answers"
	}
	if g := w.Gone; g != nil && !e.MustDeny && slices.Contains(g.Addresses[:], q.Way.Spoofed) {
		e.MustPass, e.Why = false, "the source is an address that a deleted node had"
	}
	return e
}

// sender is the source of a connection as a destination pod sees it.
type sender struct {
	peer   func(at *Pod) Peer
	source netip.Addr
	// translated is set if a node has changed the source port.
	translated bool
}

func (w *World) podSender(p *Pod, f Family) sender {
	return sender{source: p.Addresses[f], peer: func(*Pod) Peer { return podPeer(p, f) }}
}

func podPeer(p *Pod, f Family) Peer {
	return Peer{
		Kind: PodPeer, Namespace: p.Namespace, NamespaceLabels: map[string]string{namespaceLabel: p.Namespace},
		Labels: p.Labels, Ports: p.Ports, Address: p.Addresses[f],
	}
}

func worldSender(a netip.Addr) sender {
	return sender{source: a, peer: func(*Pod) Peer { return Peer{Kind: Outside, Address: a} }}
}

// nodeSender is the host of a node with one of its addresses.
func nodeSender(n *Node, a netip.Addr) sender {
	return sender{source: a, peer: func(at *Pod) Peer {
		if at.Node == n {
			return Peer{Kind: HostPeer, Address: a}
		}
		return Peer{Kind: RemoteNode, Address: a}
	}}
}

// toOtherNodes is the source address of a node's own packets to pods on other nodes.
func (w *World) toOtherNodes(n *Node, f Family) netip.Addr {
	if w.Native {
		return n.Addresses[f]
	}
	return n.Inside[f]
}

// masquerades reports whether packets of pods to this address of another node get the address of the pod's node.
// Pod CIDRs are excluded, and in native routing so are node addresses.
func (w *World) masquerades(n *Node, a netip.Addr) bool {
	return w.Masquerade && !w.Native && slices.Contains(n.Addresses[:], a)
}

// behind is the sender that a backend on another node sees if node n has translated the connection. The source is an
// address of n. In a tunnel, n marks the packet as coming from outside of the cluster.
func (w *World) behind(n *Node, f Family) sender {
	a := w.toOtherNodes(n, f)
	s := worldSender(a)
	if w.Native {
		s = nodeSender(n, a)
	}
	s.translated = true
	return s
}

// reach applies the ingress policies of a pod. The arguments audited and denied are the result of the egress side.
func (w *World) reach(q *Question, from sender, to *Pod, port uint16, audited []Report, denied string) outcome {
	o := outcome{denied: denied, server: Server{
		Name: to.Name, Sources: []netip.Addr{from.source}, Audited: slices.Clone(audited),
	}}
	if denied != "" || w.Policies.Allows(Ingress, to.subject(), from.peer(to), q.Proto, q.rulePort(port)) {
		return o
	}
	if !to.Audited {
		o.denied = "ingress of " + to.Name
		return o
	}
	r := Report{Pod: to, To: netip.AddrPortFrom(to.Addresses[familyOf(q.To.Addr())], port)}
	if !from.translated && !IsEcho(q.Proto) {
		r.From = netip.AddrPortFrom(from.source, q.Source.Port())
	}
	o.server.Audited = append(o.server.Audited, r)
	return o
}

// fromElsewhere reports whether an unbound UDP socket of a host may answer from another address. In native routing the
// host's routes choose the source of the answer to a pod on another node. If the pod has asked the node's address in
// the pod CIDR, the answer has the address of the uplink. Connected sockets and isolated pods drop this answer.
func (q *Question) fromElsewhere(w *World) bool {
	return w.Native && q.Kind == ToHost && q.Proto == corev1.ProtocolUDP && q.From.Pod != nil &&
		q.From.Pod.Node != q.Node && slices.Contains(q.Node.Inside[:], q.To.Addr())
}

// send applies the egress policies of the pod that asks.
func (w *World) send(q *Question, to Peer, port uint16) (audited []Report, denied string) {
	p := q.From.Pod
	if w.Policies.Allows(Egress, p.subject(), to, q.Proto, q.rulePort(port)) {
		return nil, ""
	}
	if p.Audited {
		r := Report{Pod: p, From: q.Source, To: netip.AddrPortFrom(to.Address, port)}
		if IsEcho(q.Proto) { // events do not identify a single echo
			r.From = netip.AddrPort{}
		}
		return []Report{r}, ""
	}
	return nil, "egress of " + p.Name
}

// podToPod is a connection between pods, direct or by a Service that the client's node translates.
func (w *World) podToPod(q *Question, to *Pod, port uint16) outcome {
	f := familyOf(q.To.Addr())
	from := w.podSender(q.From.Pod, f)
	if to == q.From.Pod { // policies do not apply
		if q.Kind != ToPod && (q.Way.Frames || q.Proto == corev1.ProtocolSCTP) { // translated by packets
			from.source = hairpin[f]
		}
		return outcome{server: Server{Name: to.Name, Sources: []netip.Addr{from.source}}}
	}
	server := podPeer(to, f)
	server.Elsewhere = to.Node != q.From.Pod.Node
	audited, denied := w.send(q, server, port)
	return w.reach(q, from, to, port, audited, denied)
}

func (w *World) ofPod(q *Question) (all []outcome, why string) {
	f, p := familyOf(q.To.Addr()), q.From.Pod
	if q.Way.Spoofed.IsValid() {
		return nil, "a pod has one source"
	}
	switch q.Kind {
	case ToPod:
		return []outcome{w.podToPod(q, q.Pod, q.To.Port())}, ""
	case ToHost:
		kind := RemoteNode
		if q.Node == p.Node {
			kind = HostPeer
		}
		audited, denied := w.send(q, Peer{Kind: kind, Address: q.To.Addr()}, q.To.Port())
		source := p.Addresses[f]
		if q.Node != p.Node && w.masquerades(q.Node, q.To.Addr()) {
			source = p.Node.Addresses[f]
		}
		o := outcome{denied: denied, server: Server{
			Name: q.Node.Name, Sources: []netip.Addr{source}, Audited: audited,
		}}
		if q.fromElsewhere(w) {
			o.server.Answers = []netip.Addr{q.Node.Addresses[f], q.Node.Inside[f]}
		}
		return []outcome{o}, ""
	case ToOutsider:
		audited, denied := w.send(q, Peer{Kind: Outside, Address: q.To.Addr()}, q.To.Port())
		source := p.Addresses[f]
		if w.Masquerade {
			source = p.Node.Addresses[f]
		}
		return []outcome{{denied: denied, server: Server{
			Name: w.Outsider.Name, Sources: []netip.Addr{source}, Audited: audited,
		}}}, ""
	case ToHostPort:
		port := containerPort(q.Pod, q.To.Port())
		if q.Node == p.Node {
			if q.Pod.Node != q.Node {
				return nil, "the host port belongs to a pod on another node"
			}
			return []outcome{w.podToPod(q, q.Pod, port)}, ""
		}
		return w.overTheWire(q)
	case ToNodePort:
		if q.Node != p.Node {
			return w.overTheWire(q)
		}
	case ToBalancer:
		if !q.Service.accepts(p.Addresses[f]) {
			return nil, "source ranges"
		}
	case ToCluster, ToExternal:
	}
	return w.backends(q, func(b *Pod) outcome { return w.podToPod(q, b, q.Service.Target) })
}

// containerPort returns the container port of a host port, 0 if the pod has no such host port.
func containerPort(p *Pod, host uint16) uint16 {
	for _, h := range p.HostPorts {
		if h.Host == host {
			return h.Container
		}
	}
	return 0
}

// backends returns the outcome for each ready backend.
func (w *World) backends(q *Question, ask func(*Pod) outcome) (all []outcome, why string) {
	if !slices.Contains(q.Service.Families, familyOf(q.To.Addr())) {
		return nil, "the Service is of the other family"
	}
	if q.Proto == corev1.ProtocolSCTP && q.To.Port() != q.Service.Target {
		return nil, "SCTP to a backend with another port"
	}
	for _, b := range q.Service.Backends {
		if o := ask(b); !o.absent {
			all = append(all, o)
		}
	}
	return all, "no backend"
}

// overTheWire is a connection of a pod to a node port or host port of another node, which translates it.
func (w *World) overTheWire(q *Question) (all []outcome, why string) {
	f, p := familyOf(q.To.Addr()), q.From.Pod
	audited, denied := w.send(q, Peer{Kind: RemoteNode, Address: q.To.Addr()}, q.To.Port())
	from := w.podSender(p, f)
	if w.masquerades(q.Node, q.To.Addr()) {
		from = nodeSender(p.Node, p.Node.Addresses[f])
		from.translated = true
	}
	all, why = w.atNode(q, from)
	for i := range all {
		all[i].server.Audited = append(slices.Clone(audited), all[i].server.Audited...)
		if denied != "" {
			all[i].denied = denied
		}
	}
	return all, why
}

// atNode is a connection that arrives at a node's uplink for a node port, a host port or a Service address.
func (w *World) atNode(q *Question, from sender) (all []outcome, why string) {
	f := familyOf(q.To.Addr())
	if q.Kind == ToHostPort {
		if q.Pod.Node != q.Node {
			return nil, "the host port belongs to a pod on another node"
		}
		return []outcome{w.reach(q, from, q.Pod, containerPort(q.Pod, q.To.Port()), nil, "")}, ""
	}
	return w.backends(q, func(b *Pod) outcome {
		switch {
		case b.Node == q.Node:
			return w.reach(q, from, b, q.Service.Target, nil, "")
		case q.Service.Local:
			return outcome{absent: true}
		}
		return w.reach(q, w.behind(q.Node, f), b, q.Service.Target, nil, "")
	})
}

func (w *World) ofHost(q *Question) (all []outcome, why string) {
	f, n := familyOf(q.To.Addr()), q.From.Host
	toPod := func(b *Pod, port uint16) outcome {
		a := w.toOtherNodes(n, f)
		o := w.reach(q, nodeSender(n, a), b, port, nil, "")
		if b.Node == n { // the source may be any address of the node
			o.server.Sources = []netip.Addr{n.Addresses[f], n.Inside[f]}
			for i := range o.server.Audited {
				o.server.Audited[i].From = netip.AddrPort{}
			}
		}
		return o
	}
	switch q.Kind {
	case ToPod:
		return []outcome{toPod(q.Pod, q.To.Port())}, ""
	case ToHost:
		return []outcome{{server: Server{Name: q.Node.Name, Sources: []netip.Addr{n.Addresses[f], n.Inside[f]}}}}, ""
	case ToOutsider:
		return []outcome{{server: Server{Name: w.Outsider.Name, Sources: []netip.Addr{n.Addresses[f]}}}}, ""
	case ToHostPort, ToNodePort:
		if q.Node != n {
			return w.atNode(q, nodeSender(n, n.Addresses[f]))
		}
		if q.Kind == ToHostPort {
			if q.Pod.Node != n {
				return nil, "the host port belongs to a pod on another node"
			}
			return []outcome{toPod(q.Pod, containerPort(q.Pod, q.To.Port()))}, ""
		}
	case ToBalancer:
		everything := [...]string{"0.0.0.0/0", "::/0"}[f]
		if len(q.Service.SourceRanges) > 0 && !slices.Contains(q.Service.SourceRanges, everything) {
			return nil, "source ranges"
		}
	case ToCluster, ToExternal:
	}
	return w.backends(q, func(b *Pod) outcome { return toPod(b, q.Service.Target) })
}

func (w *World) ofOutsider(q *Question) (all []outcome, why string) {
	a := q.Source.Addr()
	if q.Way.Spoofed.IsValid() {
		a = q.Way.Spoofed
	}
	from := worldSender(a)
	for _, n := range w.Nodes {
		if !n.Range[familyOf(a)].Contains(a) {
			continue
		}
		i := slices.IndexFunc(w.Pods, func(p *Pod) bool { return slices.Contains(p.Addresses[:], a) })
		if !w.Native || n == q.Node || i < 0 {
			return nil, "the source is a pod address of " + n.Name + " outside of the tunnel, or unassigned"
		}
		// With native routing, a machine on the link can use addresses of pods on other nodes.
		from = w.podSender(w.Pods[i], familyOf(a))
	}
	switch q.Kind {
	case ToPod:
		return []outcome{w.reach(q, from, q.Pod, q.To.Port(), nil, "")}, ""
	case ToHost:
		return []outcome{{server: Server{Name: q.Node.Name, Sources: []netip.Addr{a}}}}, ""
	case ToCluster:
		return nil, "a cluster IP is for the inside"
	case ToBalancer:
		if !q.Service.accepts(a) {
			return nil, "source ranges"
		}
	case ToNodePort, ToHostPort, ToExternal, ToOutsider:
	}
	return w.atNode(q, from)
}
