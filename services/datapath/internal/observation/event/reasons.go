// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Code generated from sluice.datapath.v1.Reason by "make generate". DO NOT EDIT.

package event

// Reasons of packets.
const (
	// ForwardedToPod: Forwarded into the namespace of another local pod.
	ForwardedToPod Reason = 1
	// ForwardedToPodDevice: Sent through the host-side device of another local pod.
	ForwardedToPodDevice Reason = 2
	// ForwardedToHost: Passed to the host's stack, for the local host.
	ForwardedToHost Reason = 3
	// ForwardedOutside: Passed to the host's stack, for a destination outside.
	ForwardedOutside Reason = 4
	// ForwardedFromStack: Delivered to the pod from the host's stack.
	ForwardedFromStack Reason = 5
	// AnsweredARP: ARP, answered for the gateway.
	AnsweredARP Reason = 6
	// AnsweredNDP: Neighbour discovery, answered for the gateway.
	AnsweredNDP Reason = 7
	// StackTimeExceeded: TTL or hop limit is used up; passed to the host's stack, which answers.
	StackTimeExceeded Reason = 8
	// StackTooBig: Larger than the receiver's MTU; passed to the host's stack, which answers or fragments.
	StackTooBig Reason = 9
	// ForwardedOverlay: Sent into the tunnel, to another node.
	ForwardedOverlay Reason = 10
	// ForwardedNative: Sent out of an uplink, to another node.
	ForwardedNative Reason = 11
	// ForwardedToStack: From another node; passed to the host's stack, which may have to translate it.
	ForwardedToStack Reason = 12
	// AnsweredTooBig: To a Service, and larger than the MTU of the path to its backend; answered for the Service.
	AnsweredTooBig Reason = 13
	// ForwardedToProxy: Given to a proxy, which evaluates it by layer 7 rules and sends it on.
	ForwardedToProxy Reason = 14
	// NotIP: Neither IPv4, IPv6 nor ARP, or with a VLAN tag.
	NotIP Reason = 16
	// NoEndpoint: The device belongs to no endpoint.
	NoEndpoint Reason = 17
	// Malformed: A header is truncated or inconsistent.
	Malformed Reason = 18
	// SpoofedMAC: The source is not the pod's Ethernet address.
	SpoofedMAC Reason = 19
	// SpoofedIP: The source is not an IP address of the pod.
	SpoofedIP Reason = 20
	// WrongMAC: The destination is not the Ethernet address of the host end of the pod's device.
	WrongMAC Reason = 21
	// SourceRoute: The packet contains a source route.
	SourceRoute Reason = 22
	// ExtensionHeaders: More than six IPv6 extension headers.
	ExtensionHeaders Reason = 23
	// MartianAddress: The destination is an address that must never be on the wire.
	MartianAddress Reason = 24
	// LinkLocal: Link-local traffic to anything but the gateway.
	LinkLocal Reason = 25
	// TunnelPort: To a tunnel port of a node, or of a protocol that tunnels without ports (IPv4, IPv6, GRE, L2TP, MPLS within IP): the packet could forge an identity.
	TunnelPort Reason = 26
	// PolicyDenied: Denied by the policy.
	PolicyDenied Reason = 27
	// PolicyPending: The policy of the endpoint is not known yet.
	PolicyPending Reason = 28
	// PolicyTableUnknown: The table of the endpoint's policy does not exist.
	PolicyTableUnknown Reason = 29
	// NoRoute: To an address of the pod range that no endpoint has.
	NoRoute Reason = 30
	// Hairpin: From the pod to its own address.
	Hairpin Reason = 31
	// WrongAddress: The host's stack sent the packet to a pod without this destination address.
	WrongAddress Reason = 32
	// RewriteFailed: The kernel refused to change the packet.
	RewriteFailed Reason = 33
	// DeliveryUnknown: The map entry of the endpoint has no path to it.
	DeliveryUnknown Reason = 34
	// IdentityUnknown: Denied because the identity of the peer is not known yet.
	IdentityUnknown Reason = 35
	// PolicyTableCorrupt: A policy table refers to an entry that does not exist.
	PolicyTableCorrupt Reason = 36
	// NoProxy: The policy redirects to a proxy, and no such proxy was ever attached on this node, or the rule cannot be redirected: only DNS over UDP and TCP from pods is.
	NoProxy Reason = 37
	// ConnectionInvalid: The packet belongs to no connection and cannot start one.
	ConnectionInvalid Reason = 38
	// ConnectionInsertFailed: The kernel had no capacity for the connection.
	ConnectionInsertFailed Reason = 39
	// ConnectionBudget: The endpoint, or the outside, has opened more connections than its share.
	ConnectionBudget Reason = 40
	// FragmentUnknown: A later fragment of a datagram whose first fragment was not seen.
	FragmentUnknown Reason = 41
	// NoNode: The destination is on an unknown node, or on a node without a path.
	NoNode Reason = 42
	// UnknownNode: Received from the tunnel, from an address that belongs to no node. The event has that address as the source.
	UnknownNode Reason = 43
	// SpoofedNode: The source address belongs to another node than the sender, or the packet bypassed the tunnel.
	SpoofedNode Reason = 44
	// SpoofedIdentity: The tunnel header has an identity that the sender cannot have.
	SpoofedIdentity Reason = 45
	// TunnelKey: The kernel refused the tunnel key of a sent packet, or had none for a received one.
	TunnelKey Reason = 46
	// Transit: To a pod of another node, from neither this node nor its pods.
	Transit Reason = 47
	// ARP: ARP for anything but the gateway.
	ARP Reason = 48
	// NDP: Neighbour discovery for anything but the gateway, and duplicate address detection.
	NDP Reason = 49
	// Multicast: Multicast. Pods send IGMP and MLD whenever a link goes up.
	Multicast Reason = 50
	// Broadcast: Broadcast, such as DHCP.
	Broadcast Reason = 51
	// ServiceNoBackend: To a Service that has no backend. The sender gets an error.
	ServiceNoBackend Reason = 52
	// ServiceNoLocalBackend: To a Service that requires a backend on this node, which has none.
	ServiceNoLocalBackend Reason = 53
	// ServiceSourceRange: To a Service that does not allow the source address.
	ServiceSourceRange Reason = 54
	// ServiceCorrupt: A Service refers to an entry that does not exist.
	ServiceCorrupt Reason = 55
	// ServiceSCTPPort: SCTP to a Service whose backend has another port: the SCTP checksum cannot be adjusted.
	ServiceSCTPPort Reason = 56
	// ServicePortInUse: The sender already uses this source port with every backend, directly or through another Service. It gets an error.
	ServicePortInUse Reason = 57
	// NATExhausted: None of the node's ports from 20000 to 29999 is free to translate a connection from outside to this backend on another node. The sender gets an error.
	NATExhausted Reason = 58
	// NATNoSource: The node has no source address of the family to translate a connection from outside to a backend on another node. The sender gets an error.
	NATNoSource Reason = 59
	// ServiceInside: From outside the node to a cluster IP, which only the node and its pods may use.
	ServiceInside Reason = 60
	// NoServicePort: To an address that only Services use, at a port without a Service. A pod gets an error.
	NoServicePort Reason = 61
	// NATShare: The sender outside has used up its share of the node's ports to this backend, and half of these ports are in use. The sender gets an error.
	NATShare Reason = 62
	// TranslationShare: The endpoint has used up its share of translations; a hairpin connection counts twice.
	TranslationShare Reason = 63
	// FragmentShare: The endpoint has used up its share of fragmented datagrams.
	FragmentShare Reason = 64
	// ProxyAway: The policy redirects to a proxy that does not run now.
	ProxyAway Reason = 65
	// ProxyForged: A proxy sent a packet that belongs to no connection that is redirected to it.
	ProxyForged Reason = 66
	// ProxyBudget: The endpoint has used up its share of the queue of the proxy.
	ProxyBudget Reason = 67
)

const (
	firstDrop  Reason = 16
	firstQuiet Reason = 48
	firstLate  Reason = 52
)

// reasonNames are part of the interface: they are metric labels.
var reasonNames = map[Reason]string{
	ForwardedToPod:         "forwarded-to-pod",
	ForwardedToPodDevice:   "forwarded-to-pod-device",
	ForwardedToHost:        "forwarded-to-host",
	ForwardedOutside:       "forwarded-outside",
	ForwardedFromStack:     "forwarded-from-stack",
	AnsweredARP:            "answered-arp",
	AnsweredNDP:            "answered-ndp",
	StackTimeExceeded:      "stack-time-exceeded",
	StackTooBig:            "stack-too-big",
	ForwardedOverlay:       "forwarded-overlay",
	ForwardedNative:        "forwarded-native",
	ForwardedToStack:       "forwarded-to-stack",
	AnsweredTooBig:         "answered-too-big",
	ForwardedToProxy:       "forwarded-to-proxy",
	NotIP:                  "not-ip",
	NoEndpoint:             "no-endpoint",
	Malformed:              "malformed",
	SpoofedMAC:             "spoofed-mac",
	SpoofedIP:              "spoofed-ip",
	WrongMAC:               "wrong-mac",
	SourceRoute:            "source-route",
	ExtensionHeaders:       "extension-headers",
	MartianAddress:         "martian-address",
	LinkLocal:              "link-local",
	TunnelPort:             "tunnel-port",
	PolicyDenied:           "policy-denied",
	PolicyPending:          "policy-pending",
	PolicyTableUnknown:     "policy-table-unknown",
	NoRoute:                "no-route",
	Hairpin:                "hairpin",
	WrongAddress:           "wrong-address",
	RewriteFailed:          "rewrite-failed",
	DeliveryUnknown:        "delivery-unknown",
	IdentityUnknown:        "identity-unknown",
	PolicyTableCorrupt:     "policy-table-corrupt",
	NoProxy:                "no-proxy",
	ConnectionInvalid:      "connection-invalid",
	ConnectionInsertFailed: "connection-insert-failed",
	ConnectionBudget:       "connection-budget",
	FragmentUnknown:        "fragment-unknown",
	NoNode:                 "no-node",
	UnknownNode:            "unknown-node",
	SpoofedNode:            "spoofed-node",
	SpoofedIdentity:        "spoofed-identity",
	TunnelKey:              "tunnel-key",
	Transit:                "transit",
	ARP:                    "arp",
	NDP:                    "ndp",
	Multicast:              "multicast",
	Broadcast:              "broadcast",
	ServiceNoBackend:       "service-no-backend",
	ServiceNoLocalBackend:  "service-no-local-backend",
	ServiceSourceRange:     "service-source-range",
	ServiceCorrupt:         "service-corrupt",
	ServiceSCTPPort:        "service-sctp-port",
	ServicePortInUse:       "service-port-in-use",
	NATExhausted:           "nat-exhausted",
	NATNoSource:            "nat-no-source",
	ServiceInside:          "service-inside",
	NoServicePort:          "no-service-port",
	NATShare:               "nat-share",
	TranslationShare:       "translation-share",
	FragmentShare:          "fragment-share",
	ProxyAway:              "proxy-away",
	ProxyForged:            "proxy-forged",
	ProxyBudget:            "proxy-budget",
}
