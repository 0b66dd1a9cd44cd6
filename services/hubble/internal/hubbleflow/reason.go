// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubbleflow

import (
	"slices"
	"strings"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// Reasons with long names. Two of them are deprecated, because Cilium no longer checks Ethernet addresses. The CLI
// still knows them.
const (
	invalidSourceMAC      = flow.DropReason_INVALID_SOURCE_MAC      //nolint:staticcheck // see above
	invalidDestinationMAC = flow.DropReason_INVALID_DESTINATION_MAC //nolint:staticcheck // see above
	noConfiguration       = flow.DropReason_NO_CONFIGURATION_AVAILABLE_TO_PERFORM_POLICY_DECISION
	noFirstFragment       = flow.DropReason_FIRST_LOGICAL_DATAGRAM_FRAGMENT_NOT_FOUND
	noRedirection         = flow.DropReason_PROXY_REDIRECTION_NOT_SUPPORTED_FOR_PROTOCOL
)

// dropReasons maps Sluice's reasons to Hubble's reasons. Hubble has fewer reasons; the extensions of a flow
// contain Sluice's reason.
var dropReasons = map[datapathv1.Reason]flow.DropReason{
	datapathv1.Reason_REASON_NOT_IP:                   flow.DropReason_UNSUPPORTED_L2_PROTOCOL,
	datapathv1.Reason_REASON_NO_ENDPOINT:              flow.DropReason_UNKNOWN_SENDER,
	datapathv1.Reason_REASON_MALFORMED:                flow.DropReason_INVALID_PACKET_DROPPED,
	datapathv1.Reason_REASON_SPOOFED_MAC:              invalidSourceMAC,
	datapathv1.Reason_REASON_SPOOFED_IP:               flow.DropReason_INVALID_SOURCE_IP,
	datapathv1.Reason_REASON_WRONG_MAC:                invalidDestinationMAC,
	datapathv1.Reason_REASON_SOURCE_ROUTE:             flow.DropReason_INVALID_PACKET_DROPPED,
	datapathv1.Reason_REASON_EXTENSION_HEADERS:        flow.DropReason_INVALID_IPV6_EXTENSION_HEADER,
	datapathv1.Reason_REASON_MARTIAN_ADDRESS:          flow.DropReason_STALE_OR_UNROUTABLE_IP,
	datapathv1.Reason_REASON_LINK_LOCAL:               flow.DropReason_STALE_OR_UNROUTABLE_IP,
	datapathv1.Reason_REASON_TUNNEL_PORT:              flow.DropReason_ENCAPSULATION_TRAFFIC_IS_PROHIBITED,
	datapathv1.Reason_REASON_POLICY_DENIED:            flow.DropReason_POLICY_DENIED,
	datapathv1.Reason_REASON_POLICY_PENDING:           flow.DropReason_DROP_EP_NOT_READY,
	datapathv1.Reason_REASON_POLICY_TABLE_UNKNOWN:     noConfiguration,
	datapathv1.Reason_REASON_NO_ROUTE:                 flow.DropReason_STALE_OR_UNROUTABLE_IP,
	datapathv1.Reason_REASON_HAIRPIN:                  flow.DropReason_UNKNOWN_L3_TARGET_ADDRESS,
	datapathv1.Reason_REASON_WRONG_ADDRESS:            flow.DropReason_UNKNOWN_L3_TARGET_ADDRESS,
	datapathv1.Reason_REASON_REWRITE_FAILED:           flow.DropReason_ERROR_WRITING_TO_PACKET,
	datapathv1.Reason_REASON_DELIVERY_UNKNOWN:         flow.DropReason_FIB_LOOKUP_FAILED,
	datapathv1.Reason_REASON_IDENTITY_UNKNOWN:         flow.DropReason_INVALID_IDENTITY,
	datapathv1.Reason_REASON_POLICY_TABLE_CORRUPT:     noConfiguration,
	datapathv1.Reason_REASON_NO_PROXY:                 noRedirection,
	datapathv1.Reason_REASON_CONNECTION_INVALID:       flow.DropReason_UNKNOWN_CONNECTION_TRACKING_STATE,
	datapathv1.Reason_REASON_CONNECTION_INSERT_FAILED: flow.DropReason_CT_MAP_INSERTION_FAILED,
	datapathv1.Reason_REASON_CONNECTION_BUDGET:        flow.DropReason_DROP_RATE_LIMITED,
	datapathv1.Reason_REASON_FRAGMENT_UNKNOWN:         noFirstFragment,
	datapathv1.Reason_REASON_NO_NODE:                  flow.DropReason_NO_TUNNEL_OR_ENCAPSULATION_ENDPOINT,
	datapathv1.Reason_REASON_UNKNOWN_NODE:             flow.DropReason_UNKNOWN_SENDER,
	datapathv1.Reason_REASON_SPOOFED_NODE:             flow.DropReason_INVALID_SOURCE_IP,
	datapathv1.Reason_REASON_SPOOFED_IDENTITY:         flow.DropReason_INVALID_IDENTITY,
	datapathv1.Reason_REASON_TUNNEL_KEY:               flow.DropReason_ERROR_RETRIEVING_TUNNEL_KEY,
	datapathv1.Reason_REASON_TRANSIT:                  flow.DropReason_STALE_OR_UNROUTABLE_IP,
	datapathv1.Reason_REASON_ARP:                      flow.DropReason_UNSUPPORTED_L3_PROTOCOL,
	datapathv1.Reason_REASON_NDP:                      flow.DropReason_FORBIDDEN_ICMPV6_MESSAGE,
	datapathv1.Reason_REASON_MULTICAST:                flow.DropReason_MULTICAST_HANDLED,
	datapathv1.Reason_REASON_BROADCAST:                flow.DropReason_MULTICAST_HANDLED,
	datapathv1.Reason_REASON_SERVICE_NO_BACKEND:       flow.DropReason_SERVICE_BACKEND_NOT_FOUND,
	datapathv1.Reason_REASON_SERVICE_NO_LOCAL_BACKEND: flow.DropReason_SERVICE_BACKEND_NOT_FOUND,
	datapathv1.Reason_REASON_SERVICE_SOURCE_RANGE:     flow.DropReason_DENIED_BY_LB_SRC_RANGE_CHECK,
	datapathv1.Reason_REASON_SERVICE_CORRUPT:          flow.DropReason_SERVICE_BACKEND_NOT_FOUND,
	datapathv1.Reason_REASON_SERVICE_SCTP_PORT:        flow.DropReason_UNSUPPORTED_PROTOCOL_FOR_NAT_MASQUERADE,
	datapathv1.Reason_REASON_SERVICE_PORT_IN_USE:      flow.DropReason_NO_MAPPING_FOR_NAT_MASQUERADE,
	datapathv1.Reason_REASON_NAT_EXHAUSTED:            flow.DropReason_NO_MAPPING_FOR_NAT_MASQUERADE,
	datapathv1.Reason_REASON_NAT_NO_SOURCE:            flow.DropReason_NO_MAPPING_FOR_NAT_MASQUERADE,
	datapathv1.Reason_REASON_SERVICE_INSIDE:           flow.DropReason_IS_A_CLUSTERIP,
	datapathv1.Reason_REASON_NO_SERVICE_PORT:          flow.DropReason_SERVICE_BACKEND_NOT_FOUND,
	datapathv1.Reason_REASON_NAT_SHARE:                flow.DropReason_DROP_RATE_LIMITED,
	datapathv1.Reason_REASON_TRANSLATION_SHARE:        flow.DropReason_DROP_RATE_LIMITED,
	datapathv1.Reason_REASON_FRAGMENT_SHARE:           flow.DropReason_DROP_RATE_LIMITED,
	datapathv1.Reason_REASON_PROXY_AWAY:               noRedirection,
	datapathv1.Reason_REASON_PROXY_FORGED:             flow.DropReason_UNKNOWN_CONNECTION_TRACKING_STATE,
	datapathv1.Reason_REASON_PROXY_BUDGET:             flow.DropReason_DROP_RATE_LIMITED,
}

// isolation is the path in the source of the rule that denies all traffic which no rule of a policy allows.
const isolation = " isolation"

// dropReason returns Hubble's reason for a dropped packet. A packet that matches a deny rule and a packet that no
// rule allows have different reasons.
func dropReason(f *datapathv1.Flow) flow.DropReason {
	if f.GetReason() == datapathv1.Reason_REASON_POLICY_DENIED {
		for _, side := range []*datapathv1.SideVerdict{f.GetEgress(), f.GetIngress()} {
			if side.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED &&
				side.GetDecidedBy() == netv1.DecidedBy_DECIDED_BY_RULE &&
				slices.ContainsFunc(side.GetRuleSources(), func(s string) bool { return !strings.HasSuffix(s, isolation) }) {
				return flow.DropReason_POLICY_DENY
			}
		}
	}
	if r, ok := dropReasons[f.GetReason()]; ok {
		return r
	}
	return flow.DropReason_DROP_REASON_UNKNOWN // a reason of a newer datapath
}
