// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Reason says why a packet was forwarded or dropped. Its numbers are those of
// the programs; String gives the stable name for metrics and events.
type Reason uint32

// The reasons, as bpf/include/sluice/abi.h explains them.
const (
	ForwardPeer      = Reason(bpf.MapsSlReasonSL_FWD_PEER)
	ForwardRedirect  = Reason(bpf.MapsSlReasonSL_FWD_REDIRECT)
	ForwardHost      = Reason(bpf.MapsSlReasonSL_FWD_HOST)
	ForwardOutside   = Reason(bpf.MapsSlReasonSL_FWD_OUTSIDE)
	ForwardFromStack = Reason(bpf.MapsSlReasonSL_FWD_FROM_STACK)
	ReplyARP         = Reason(bpf.MapsSlReasonSL_REPLY_ARP)
	ReplyNDP         = Reason(bpf.MapsSlReasonSL_REPLY_NDP)
	StackTTL         = Reason(bpf.MapsSlReasonSL_STACK_TTL)
	StackMTU         = Reason(bpf.MapsSlReasonSL_STACK_MTU)
	ForwardOverlay   = Reason(bpf.MapsSlReasonSL_FWD_OVERLAY)
	ForwardNative    = Reason(bpf.MapsSlReasonSL_FWD_NATIVE)
	ForwardStack     = Reason(bpf.MapsSlReasonSL_FWD_STACK)
	ReplyService     = Reason(bpf.MapsSlReasonSL_REPLY_SERVICE)

	DropNotIP             = Reason(bpf.MapsSlReasonSL_DROP_NOT_IP)
	DropNoEndpoint        = Reason(bpf.MapsSlReasonSL_DROP_NO_ENDPOINT)
	DropMalformed         = Reason(bpf.MapsSlReasonSL_DROP_MALFORMED)
	DropSpoofedMAC        = Reason(bpf.MapsSlReasonSL_DROP_SPOOFED_MAC)
	DropSpoofedIP         = Reason(bpf.MapsSlReasonSL_DROP_SPOOFED_IP)
	DropWrongMAC          = Reason(bpf.MapsSlReasonSL_DROP_WRONG_MAC)
	DropSourceRoute       = Reason(bpf.MapsSlReasonSL_DROP_SOURCE_ROUTE)
	DropExtHeaders        = Reason(bpf.MapsSlReasonSL_DROP_EXT_HEADERS)
	DropMartian           = Reason(bpf.MapsSlReasonSL_DROP_MARTIAN)
	DropLinkLocal         = Reason(bpf.MapsSlReasonSL_DROP_LINK_LOCAL)
	DropTunnelPort        = Reason(bpf.MapsSlReasonSL_DROP_TUNNEL_PORT)
	DropPolicyDenied      = Reason(bpf.MapsSlReasonSL_DROP_POLICY_DENIED)
	DropPolicyPending     = Reason(bpf.MapsSlReasonSL_DROP_POLICY_PENDING)
	DropPolicyTable       = Reason(bpf.MapsSlReasonSL_DROP_POLICY_TABLE)
	DropNoRoute           = Reason(bpf.MapsSlReasonSL_DROP_NO_ROUTE)
	DropHairpin           = Reason(bpf.MapsSlReasonSL_DROP_HAIRPIN)
	DropWrongAddress      = Reason(bpf.MapsSlReasonSL_DROP_WRONG_ADDRESS)
	DropRewrite           = Reason(bpf.MapsSlReasonSL_DROP_REWRITE)
	DropDelivery          = Reason(bpf.MapsSlReasonSL_DROP_DELIVERY)
	DropIdentityUnknown   = Reason(bpf.MapsSlReasonSL_DROP_IDENTITY_UNKNOWN)
	DropTableCorrupt      = Reason(bpf.MapsSlReasonSL_DROP_TABLE_CORRUPT)
	DropNoProxy           = Reason(bpf.MapsSlReasonSL_DROP_NO_PROXY)
	DropConnectionInvalid = Reason(bpf.MapsSlReasonSL_DROP_CT_INVALID)
	DropConnectionInsert  = Reason(bpf.MapsSlReasonSL_DROP_CT_INSERT)
	DropConnectionBudget  = Reason(bpf.MapsSlReasonSL_DROP_CT_BUDGET)
	DropFragment          = Reason(bpf.MapsSlReasonSL_DROP_FRAGMENT)
	DropNoNode            = Reason(bpf.MapsSlReasonSL_DROP_NO_NODE)
	DropUnknownNode       = Reason(bpf.MapsSlReasonSL_DROP_UNKNOWN_NODE)
	DropSpoofedNode       = Reason(bpf.MapsSlReasonSL_DROP_SPOOFED_NODE)
	DropSpoofedIdentity   = Reason(bpf.MapsSlReasonSL_DROP_SPOOFED_IDENTITY)
	DropTunnelKey         = Reason(bpf.MapsSlReasonSL_DROP_TUNNEL_KEY)
	DropTransit           = Reason(bpf.MapsSlReasonSL_DROP_TRANSIT)

	DropNoBackend      = Reason(bpf.MapsSlReasonSL_DROP_NO_BACKEND)
	DropNoLocalBackend = Reason(bpf.MapsSlReasonSL_DROP_NO_LOCAL_BACKEND)
	DropSourceRange    = Reason(bpf.MapsSlReasonSL_DROP_SOURCE_RANGE)
	DropServiceCorrupt = Reason(bpf.MapsSlReasonSL_DROP_SERVICE_CORRUPT)
	DropServicePort    = Reason(bpf.MapsSlReasonSL_DROP_SERVICE_PORT)
	DropServiceInUse   = Reason(bpf.MapsSlReasonSL_DROP_SERVICE_IN_USE)
	DropNATExhausted   = Reason(bpf.MapsSlReasonSL_DROP_NAT_EXHAUSTED)
	DropNATSource      = Reason(bpf.MapsSlReasonSL_DROP_NAT_SOURCE)
	DropServiceInside  = Reason(bpf.MapsSlReasonSL_DROP_SERVICE_INSIDE)
	DropNoServicePort  = Reason(bpf.MapsSlReasonSL_DROP_NO_SERVICE_PORT)
	DropNATShare       = Reason(bpf.MapsSlReasonSL_DROP_NAT_SHARE)

	DropTranslationShare = Reason(bpf.MapsSlReasonSL_DROP_XL_SHARE)
	DropFragmentShare    = Reason(bpf.MapsSlReasonSL_DROP_FRAGMENT_SHARE)

	QuietARP       = Reason(bpf.MapsSlReasonSL_QUIET_ARP)
	QuietNDP       = Reason(bpf.MapsSlReasonSL_QUIET_NDP)
	QuietMulticast = Reason(bpf.MapsSlReasonSL_QUIET_MULTICAST)
	QuietBroadcast = Reason(bpf.MapsSlReasonSL_QUIET_BROADCAST)
)

const (
	firstDrop  = Reason(bpf.MapsSlReasonSL_FIRST_DROP)
	firstQuiet = Reason(bpf.MapsSlReasonSL_FIRST_QUIET)
	firstLate  = Reason(bpf.MapsSlReasonSL_FIRST_LATE)
)

// reasonNames are part of the interface: they are metric labels. docs/datapath.md
// explains each.
var reasonNames = map[Reason]string{
	ForwardPeer:      "forwarded-to-pod",
	ForwardRedirect:  "forwarded-to-pod-device",
	ForwardHost:      "forwarded-to-host",
	ForwardOutside:   "forwarded-outside",
	ForwardFromStack: "forwarded-from-stack",
	ReplyARP:         "answered-arp",
	ReplyNDP:         "answered-ndp",
	StackTTL:         "stack-time-exceeded",
	StackMTU:         "stack-too-big",
	ForwardOverlay:   "forwarded-overlay",
	ForwardNative:    "forwarded-native",
	ForwardStack:     "forwarded-to-stack",
	ReplyService:     "answered-too-big",

	DropNotIP:             "not-ip",
	DropNoEndpoint:        "no-endpoint",
	DropMalformed:         "malformed",
	DropSpoofedMAC:        "spoofed-mac",
	DropSpoofedIP:         "spoofed-ip",
	DropWrongMAC:          "wrong-mac",
	DropSourceRoute:       "source-route",
	DropExtHeaders:        "extension-headers",
	DropMartian:           "martian-address",
	DropLinkLocal:         "link-local",
	DropTunnelPort:        "tunnel-port",
	DropPolicyDenied:      "policy-denied",
	DropPolicyPending:     "policy-pending",
	DropPolicyTable:       "policy-table-unknown",
	DropNoRoute:           "no-route",
	DropHairpin:           "hairpin",
	DropWrongAddress:      "wrong-address",
	DropRewrite:           "rewrite-failed",
	DropDelivery:          "delivery-unknown",
	DropIdentityUnknown:   "identity-unknown",
	DropTableCorrupt:      "policy-table-corrupt",
	DropNoProxy:           "no-proxy",
	DropConnectionInvalid: "connection-invalid",
	DropConnectionInsert:  "connection-insert-failed",
	DropConnectionBudget:  "connection-budget",
	DropFragment:          "fragment-unknown",
	DropNoNode:            "no-node",
	DropUnknownNode:       "unknown-node",
	DropSpoofedNode:       "spoofed-node",
	DropSpoofedIdentity:   "spoofed-identity",
	DropTunnelKey:         "tunnel-key",
	DropTransit:           "transit",

	DropNoBackend:      "service-no-backend",
	DropNoLocalBackend: "service-no-local-backend",
	DropSourceRange:    "service-source-range",
	DropServiceCorrupt: "service-corrupt",
	DropServicePort:    "service-sctp-port",
	DropServiceInUse:   "service-port-in-use",
	DropNATExhausted:   "nat-exhausted",
	DropNATSource:      "nat-no-source",
	DropServiceInside:  "service-inside",
	DropNoServicePort:  "no-service-port",
	DropNATShare:       "nat-share",

	DropTranslationShare: "translation-share",
	DropFragmentShare:    "fragment-share",

	QuietARP:       "arp",
	QuietNDP:       "ndp",
	QuietMulticast: "multicast",
	QuietBroadcast: "broadcast",
}

// Reasons lists every reason this build knows, by number.
func Reasons() []Reason { return slices.Sorted(maps.Keys(reasonNames)) }

// String is the stable name, or the number of a reason that a newer or older
// program has counted.
func (r Reason) String() string {
	if name, ok := reasonNames[r]; ok {
		return name
	}
	return fmt.Sprintf("reason-%d", uint32(r))
}

// Dropped says whether the packet ended here.
func (r Reason) Dropped() bool { return r >= firstDrop }

// Quiet reasons are counted but send no event: every pod causes them as a
// matter of course.
func (r Reason) Quiet() bool { return r >= firstQuiet && r < firstLate }

// Direction says for which side of an endpoint a packet was counted.
type Direction uint32

const (
	// Egress is what an endpoint sends.
	Egress = Direction(bpf.MapsSlDirectionSL_EGRESS)
	// Ingress is what an endpoint receives.
	Ingress = Direction(bpf.MapsSlDirectionSL_INGRESS)
)

// String is "egress" or "ingress".
func (d Direction) String() string {
	switch d {
	case Egress:
		return "egress"
	case Ingress:
		return "ingress"
	}
	return fmt.Sprintf("direction-%d", uint32(d))
}

// Events are what the programs report and count.
type Events struct {
	gate                   pin.Gate
	ring, counters, limits *ebpf.Map
	bounds                 *bound.Bounds
}

// Open finds the maps of events among all.
func Open(pm *pin.Maps, bounds *bound.Bounds) *Events {
	return &Events{
		bounds: bounds,
		gate:   pin.Gate{ValidateOnly: pm.ValidateOnly},
		ring:   pm.Map(bpf.MapsMapSlEvents), counters: pm.Map(bpf.MapsMapSlMetrics), limits: pm.Map(bpf.MapsMapSlLimits),
	}
}

// Close refuses every later call. Readers are closed by their owner.
func (es *Events) Close() { es.gate.Close() }

// Counter is one cell of the metrics.
type Counter struct {
	Reason    Reason
	Direction Direction
	Packets   uint64
	// Bytes with Ethernet headers; a GSO packet counts with its full length.
	Bytes uint64
}

// Metrics returns the counters of every reason and direction that has counted
// anything, summed over the CPUs, by reason. They only grow while the maps
// live. A packet between two local pods is counted once: as egress, or as
// ingress if the receiver's policy dropped it.
func (es *Events) Metrics() ([]Counter, error) {
	if err := es.gate.RLock(); err != nil {
		return nil, err
	}
	defer es.gate.RUnlock()
	var cs []Counter
	err := pin.EachPerCPU(es.counters, func(key uint32, perCPU []bpf.MapsSlCounter) {
		c := Counter{Reason: Reason(key >> 1), Direction: Direction(key&1 + 1)}
		for _, v := range perCPU {
			c.Packets += v.Packets
			c.Bytes += v.Bytes
		}
		if c.Packets > 0 {
			cs = append(cs, c)
		}
	})
	if err != nil {
		return nil, err
	}
	return cs, nil
}

// Lost is how many events were left out since the maps were made, because
// a reason exceeded its rate or the reader was behind. The packets themselves
// are counted in Metrics.
func (es *Events) Lost() (uint64, error) {
	if err := es.gate.RLock(); err != nil {
		return 0, err
	}
	defer es.gate.RUnlock()
	var lost uint64
	err := pin.EachPerCPU(es.limits, func(_ uint32, perCPU []bpf.MapsSlLimit) {
		for _, v := range perCPU {
			lost += v.LostTotal
		}
	})
	if err != nil {
		return 0, err
	}
	return lost, nil
}
