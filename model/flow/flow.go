// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flow describes the events of the eBPF programs, and the filters that select them. The datapath filters its
// latest events with it, and sluice-hubble its stored events.
package flow

import (
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/model/workload"
)

// Type is the type of an event.
type Type uint8

// Types of events. An event without a type only reports a loss.
const (
	// Drop is a dropped packet.
	Drop Type = iota + 1
	// PolicyVerdict is the evaluation of a connection.
	PolicyVerdict
	// Closed is the end of a connection.
	Closed
	// Repair is the repair of a program that was detached from an endpoint's device.
	Repair
	// DNS is a query or an answer that sluice-dns evaluated.
	DNS
)

// Verdict is the verdict on a packet.
type Verdict uint8

const (
	Forwarded Verdict = iota + 1
	Dropped
	Audited
	Redirected
)

// Side is the verdict of one side's policy. By is 0 if it was not evaluated.
type Side struct {
	By      uint8 // origin of the verdict, with the number that programs and API use
	Verdict Verdict
	Rule    uint16
	Table   uint16
	Epoch   uint32
	// Slot is the endpoint ID of the policy's endpoint.
	Slot uint16
	// Revision of the policy, Sources of the rule and its Proxy, resolved when the event was read; zero if they were
	// unknown. They cannot be resolved later, because events are kept longer than policies.
	Revision uint64
	Sources  []string
	Proxy    uint16
}

// End is an endpoint of this node at one end of a packet; zero if that end is not local.
type End struct {
	Slot  uint16
	Owner workload.Owner        // zero if the endpoint was removed
	Pod   workload.PodReference // zero without Kubernetes
}

// Event is a report about one packet, or a repair.
type Event struct {
	Type                Type
	Time                time.Time
	Reason              uint32 // the number that programs and API use
	Egress              bool   // direction seen from the endpoint
	Verdict             Verdict
	ID                  [16]byte // UUID, assigned when it is stored
	From, To            End
	Ifindex             uint32 // device where the packet was seen
	Source, Destination netip.AddrPort
	// Original is the destination before the translation to a backend of a service; invalid if the packet was not
	// translated.
	Original netip.AddrPort
	// Service is the service of the original destination when the packet was seen, as "shop/web:http"; empty if unknown.
	Service                             string
	Protocol                            uint8
	TCPFlags                            uint8
	SourceIdentity, DestinationIdentity uint32
	Length                              uint32
	SourceMAC                           [6]byte
	// Node is the node ID of the node that the packet came from or is sent to, if the packet bypasses the stack of
	// this node; 0: none.
	Node      uint16
	EtherType uint16
	// Sender and Receiver are the sides of the connection's first packet. With Reply, the packet travels in the opposite
	// direction.
	Sender, Receiver Side
	Reply            bool
	// Repair is only set for that type; From and SourceIdentity then describe the endpoint.
	Repair RepairDetails
	// KernelLost is the number of events that the kernel dropped before this one.
	KernelLost uint32
	// Message is only set for the type DNS.
	Message *Message
	// DNSLost is the number of DNS messages that were not reported before this event.
	DNSLost uint64
}

// Message is a DNS query or an answer.
type Message struct {
	Response  bool
	Name      string // of the question; empty if it is redacted
	QueryType uint16
	Code      uint16
	Addresses []netip.Addr
	Chain     []string // targets of the CNAME records
	TTL       uint32   // of the addresses, in seconds
	Redacted  bool
}

// RepairDetails describe a difference in how a program was attached, and the result of its repair.
type RepairDetails struct {
	Subject string // "filter" or "qdisc"
	Device  string
	Want    string
	Have    string
	// Err is the error of the repair; empty if it succeeded.
	Err string
}
