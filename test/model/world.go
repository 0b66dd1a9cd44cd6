// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package model predicts the result of connections in a cluster: which server answers with which source address, or
// that policies deny the connection. It evaluates labels, rules and Services for every question and keeps no tables.
// It also generates policies, Services and questions from a seed.
//
// Tests compare a cluster with these predictions. Therefore the package must not import other packages of Sluice;
// scripts/check enforces this.
package model

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Pair is an IPv4 address and an IPv6 one.
type Pair [2]netip.Addr

// Family is an index of a Pair.
type Family int

// Families.
const (
	IPv4 Family = iota
	IPv6
)

func (f Family) String() string { return [...]string{"IPv4", "IPv6"}[f] }

func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Node is a node of the cluster.
type Node struct {
	Name string
	// Addresses are the addresses of the uplink, Inside the node's addresses in its pod CIDRs.
	Addresses, Inside Pair
	// Range are the pod CIDRs by family.
	Range [2]netip.Prefix
}

// NamedPort is a container port with a name.
type NamedPort struct {
	Name     string
	Protocol corev1.Protocol
	Port     uint16
}

// HostPort forwards a port of the node to a container port, for TCP and UDP.
type HostPort struct {
	Host, Container uint16
}

// Pod is a pod of the cluster.
type Pod struct {
	Name, Namespace string
	Labels          map[string]string
	Node            *Node
	Addresses       Pair
	Ports           []NamedPort
	HostPorts       []HostPort
	// Audited is set in audit mode: connections that the pod's own policies deny pass and are reported.
	Audited bool
}

func (p *Pod) subject() Subject {
	return Subject{Namespace: p.Namespace, Labels: p.Labels, Ports: p.Ports}
}

// Outsider is a machine outside of the cluster, on the same link as the nodes.
type Outsider struct {
	Name      string
	Addresses []Pair
}

// Service has the same port for TCP, UDP and SCTP.
type Service struct {
	Name string
	// Number determines the addresses and the node port.
	Number               int
	Families             []Family
	Port, Target         uint16
	Local                bool     // externalTrafficPolicy
	SourceRanges         []string // loadBalancerSourceRanges
	Backends, NotServing []*Pod
}

// ClusterIPs are spec.clusterIPs.
func (s *Service) ClusterIPs() Pair { return s.at("10.96.9.%d", "fd00:96:9::%d") }

// Externals are spec.externalIPs.
func (s *Service) Externals() Pair { return s.at("203.0.113.%d", "2001:db8:8::%d") }

// Balancers are the addresses in status.loadBalancer.
func (s *Service) Balancers() Pair { return s.at("198.51.100.%d", "2001:db8:7::%d") }

// NodePort is the node port for all protocols.
func (s *Service) NodePort() uint16 { return uint16(firstNodePort + s.Number) }

// Node ports begin behind firstNodePort. Service numbers are 1 to maxServices.
const (
	firstNodePort = 30100
	maxServices   = 12
)

func (s *Service) at(pattern4, pattern6 string) Pair {
	return Pair{
		netip.MustParseAddr(fmt.Sprintf(pattern4, s.Number)), netip.MustParseAddr(fmt.Sprintf(pattern6, s.Number)),
	}
}

// accepts reports whether the source ranges allow a client.
func (s *Service) accepts(a netip.Addr) bool {
	return len(s.SourceRanges) == 0 ||
		slices.ContainsFunc(s.SourceRanges, func(cidr string) bool { return inCIDR(cidr, nil, a) })
}

// World is the state of the cluster.
type World struct {
	// Native is set for native routing, without a tunnel.
	Native bool
	// Masquerade is set if connections of pods to the outside get the address of the node.
	Masquerade bool
	Nodes      []*Node
	Pods       []*Pod
	Outsider   Outsider
	// Gone is a pod of a deleted node, or nil.
	Gone *Pod

	Policies Policies
	Services []*Service
}

// Protocols of echo requests. For policies, their port is the ICMP type.
const (
	ICMP   corev1.Protocol = "ICMP"
	ICMPv6 corev1.Protocol = "ICMPv6"
)

// ICMP types of echo requests.
const (
	EchoRequest   = 8
	EchoRequestV6 = 128
)

// IsEcho reports whether the protocol is ICMP or ICMPv6.
func IsEcho(p corev1.Protocol) bool { return p == ICMP || p == ICMPv6 }

// Kind is the kind of a destination.
type Kind string

// Kinds of destinations.
const (
	ToPod      Kind = "pod"
	ToHost     Kind = "host"
	ToOutsider Kind = "outsider"
	ToCluster  Kind = "cluster IP"
	ToExternal Kind = "external IP"
	ToBalancer Kind = "load balancer"
	ToNodePort Kind = "node port"
	ToHostPort Kind = "host port"
)

// End is the client: a pod, the host of a node, or if both are unset the outsider.
type End struct {
	Pod  *Pod
	Host *Node
}

func (e End) String() string {
	switch {
	case e.Pod != nil:
		return e.Pod.Name
	case e.Host != nil:
		return e.Host.Name
	default:
		return "outsider"
	}
}

// Way is the form in which the client sends a question.
type Way struct {
	// Frames sends UDP packets through the device instead of a socket.
	Frames bool
	// Fragments is the number of IP fragments, if more than one.
	Fragments int
	// NoChecksum omits the UDP checksum (IPv4).
	NoChecksum bool
	// Spoofed is a forged source address; unset for the client's own.
	Spoofed netip.Addr
	// Connected uses a connected UDP socket, Mapped an IPv6 socket with an IPv4-mapped destination.
	Connected, Mapped bool
	// Size is the length of the payload in bytes; 0 for a small one.
	Size int
}

func (w Way) String() string {
	var words []string
	add := func(on bool, format string, args ...any) {
		if on {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	add(w.Frames, "by frames")
	add(!w.Frames, "by a socket")
	add(w.Fragments > 1, "in %d fragments", w.Fragments)
	add(w.NoChecksum, "without checksum")
	add(w.Spoofed.IsValid(), "with the source %s", w.Spoofed)
	add(w.Connected, "connected")
	add(w.Mapped, "mapped")
	add(w.Size > 0, "%d bytes", w.Size)
	return strings.Join(words, ", ")
}

// Question is one TCP connection, one UDP exchange, one ICMP echo, or one SCTP INIT with its INIT ACK.
type Question struct {
	ID    string
	From  End
	Kind  Kind
	Proto corev1.Protocol
	// Source is the client's address and port. Hosts choose their address. For an echo the port is the identifier,
	// and To has no port.
	Source netip.AddrPort
	To     netip.AddrPort
	// Pod, Service or Node is the destination. For frames of the outsider, Node is the next hop.
	Pod     *Pod
	Service *Service
	Node    *Node
	Way     Way
}

func (q *Question) String() string {
	to := q.To.String()
	switch {
	case q.Service != nil:
		to += " of " + q.Service.Name
	case q.Pod != nil:
		to += " of " + q.Pod.Name
	}
	if q.Node != nil {
		to += " at " + q.Node.Name
	}
	return fmt.Sprintf("%s (%s) asks %s %s by %s, %s", q.From, q.Source, q.Kind, to, q.Proto, q.Way)
}

// Server is a possible server of a question.
type Server struct {
	Name string
	// Sources are the valid source addresses as the server sees them.
	Sources []netip.Addr
	// Answers are other valid source addresses of a UDP answer.
	Answers []netip.Addr
	// Audited are the expected events of audit mode.
	Audited []Report
}

// Report is an event: the policies of the pod deny the connection, and audit mode lets it pass. From is unset if the
// source is not known in advance.
type Report struct {
	Pod      *Pod
	From, To netip.AddrPort
}

// Expectation is the prediction for a question. If both MustPass and MustDeny are false, both results are valid, and
// Why contains the reason.
type Expectation struct {
	MustPass, MustDeny bool
	Servers            []Server
	Why                string
	// NoAnswer is set if the client cannot receive the answer, because it has forged the source.
	NoAnswer bool
}

func (e Expectation) String() string {
	var names []string
	for _, s := range e.Servers {
		name := fmt.Sprintf("%s, which sees %v", s.Name, s.Sources)
		for _, r := range s.Audited {
			name += ", audited at " + r.Pod.Name
		}
		names = append(names, name)
	}
	at := strings.Join(names, "; or ")
	switch {
	case e.MustPass:
		return "must reach " + at
	case e.MustDeny:
		return "must be denied: " + e.Why
	default:
		return "may reach " + at + ", or be denied: " + e.Why
	}
}
